//! The documented tables, number by number, and the properties that hold for every layout.

use proptest::prelude::*;

use super::*;

fn layout(strategy: &str, size: usize, pp: usize, tp: usize) -> ParallelTopology {
    ParallelTopology::new(strategy.parse().unwrap(), size, pp, tp).unwrap()
}

/// The groups of a kind in the order of their first members, as `02 13`: one digit a rank.
fn groups(layout: &ParallelTopology, kind: GroupKind) -> String {
    let mut all: Vec<Vec<usize>> = (0..layout.size()).map(|rank| layout.group(kind, rank)).collect();
    all.sort();
    all.dedup();
    let text = |group: &Vec<usize>| group.iter().map(usize::to_string).collect::<String>();
    all.iter().map(text).collect::<Vec<_>>().join(" ")
}

#[test]
fn eight_ranks_without_tensor_parallelism() {
    use GroupKind::{Data, Model};
    let table = [
        ("cluster", 2, "01 23 45 67", "0246 1357"),
        ("spread", 2, "04 15 26 37", "0123 4567"),
        ("cluster", 4, "0123 4567", "04 15 26 37"),
        ("spread", 4, "0246 1357", "01 23 45 67"),
    ];
    for (strategy, pp, mp, dp) in table {
        let layout = layout(strategy, 8, pp, 1);
        assert_eq!(groups(&layout, Model), mp, "{strategy}, pp {pp}");
        assert_eq!(groups(&layout, Data), dp, "{strategy}, pp {pp}");
    }
    let spread = layout("spread", 8, 2, 1);
    assert_eq!(spread.group_rank(Data, 6), 2);
    for rank in 0..8 {
        assert_eq!(spread.group_rank(Model, rank), rank / 4);
    }
}

#[test]
fn eight_ranks_with_all_three() {
    // (pp, tp, rdp, mp_rank, dp_rank) of ranks 0..8
    let cluster = [
        (0, 0, 0, 0, 0),
        (0, 1, 0, 1, 1),
        (1, 0, 0, 2, 0),
        (1, 1, 0, 3, 1),
        (0, 0, 1, 0, 2),
        (0, 1, 1, 1, 3),
        (1, 0, 1, 2, 2),
        (1, 1, 1, 3, 3),
    ];
    let spread = [
        (0, 0, 0, 0, 0),
        (0, 0, 1, 0, 1),
        (1, 0, 0, 1, 0),
        (1, 0, 1, 1, 1),
        (0, 1, 0, 2, 2),
        (0, 1, 1, 2, 3),
        (1, 1, 0, 3, 2),
        (1, 1, 1, 3, 3),
    ];
    for (strategy, table) in [("cluster", cluster), ("spread", spread)] {
        let layout = layout(strategy, 8, 2, 2);
        for (rank, (pp, tp, rdp, mp_rank, dp_rank)) in table.into_iter().enumerate() {
            assert_eq!(layout.coordinates(rank), Coordinates { pp, tp, rdp }, "{strategy}, rank {rank}");
            assert_eq!(layout.group_rank(GroupKind::Model, rank), mp_rank, "{strategy}, rank {rank}");
            assert_eq!(layout.group_rank(GroupKind::Data, rank), dp_rank, "{strategy}, rank {rank}");
        }
    }
}

#[test]
fn the_other_orders() {
    let table = [
        ("PTD", "000 001 010 011 100 101 110 111"),
        ("PDT", "000 010 001 011 100 110 101 111"),
        ("DTP", "000 100 010 110 001 101 011 111"),
        ("TDP", "000 100 001 101 010 110 011 111"),
    ];
    for (strategy, expected) in table {
        let layout = layout(strategy, 8, 2, 2);
        let text = |rank| {
            let Coordinates { pp, tp, rdp } = layout.coordinates(rank);
            format!("{pp}{tp}{rdp}")
        };
        assert_eq!((0..8).map(text).collect::<Vec<_>>().join(" "), expected, "{strategy}");
    }
}

#[test]
fn the_groups_of_all_orders() {
    let table = [
        ("DPT", "02 13 46 57", "01 23 45 67", "04 15 26 37", "0123 4567", "0145 2367"),
        ("TPD", "02 13 46 57", "04 15 26 37", "01 23 45 67", "0246 1357", "0145 2367"),
        ("PTD", "04 15 26 37", "02 13 46 57", "01 23 45 67", "0246 1357", "0123 4567"),
        ("PDT", "04 15 26 37", "01 23 45 67", "02 13 46 57", "0145 2367", "0123 4567"),
        ("DTP", "01 23 45 67", "02 13 46 57", "04 15 26 37", "0123 4567", "0246 1357"),
        ("TDP", "01 23 45 67", "04 15 26 37", "02 13 46 57", "0145 2367", "0246 1357"),
    ];
    for (strategy, pp, tp, rdp, mp, dp) in table {
        let layout = layout(strategy, 8, 2, 2);
        assert_eq!(groups(&layout, GroupKind::Pipeline), pp, "{strategy}");
        assert_eq!(groups(&layout, GroupKind::Tensor), tp, "{strategy}");
        assert_eq!(groups(&layout, GroupKind::ReducedData), rdp, "{strategy}");
        assert_eq!(groups(&layout, GroupKind::Model), mp, "{strategy}");
        assert_eq!(groups(&layout, GroupKind::Data), dp, "{strategy}");
    }
}

#[test]
fn strategies_are_read_in_any_case() {
    assert_eq!("Cluster".parse::<Placement>().unwrap(), "dpt".parse().unwrap());
    assert_eq!("SPREAD".parse::<Placement>().unwrap(), Placement::SPREAD);
    for text in ["", "DP", "DPP", "DPTD", "near"] {
        let error = text.parse::<Placement>().unwrap_err().to_string();
        assert!(error.starts_with(&format!("`placement_strategy` is `{text}`")), "{error}");
    }
}

#[test]
fn sizes_that_do_not_divide_are_refused() {
    for (size, pp, tp) in [(8, 3, 1), (8, 2, 3), (0, 1, 1), (8, 0, 1), (8, 1, 0), (4, 8, 1), (8, usize::MAX, 2)] {
        let error = ParallelTopology::new(Placement::CLUSTER, size, pp, tp).unwrap_err().to_string();
        assert!(error.contains(&format!("{size} processes")), "{error}");
    }
}

proptest! {
    #[test]
    fn every_layout_keeps_the_rules(
        placement in prop::sample::select(Placement::ALL.to_vec()), pp in 1usize..6, tp in 1usize..6, rdp in 1usize..6,
    ) {
        let size = pp * tp * rdp;
        let layout = ParallelTopology::new(placement, size, pp, tp).unwrap();
        let [pipeline, tensor, reduced, model, data] = GroupKind::ALL.map(|kind| layout.group_size(kind));
        prop_assert_eq!((pipeline, tensor, reduced), (pp, tp, rdp));
        prop_assert_eq!(size, model * rdp);
        prop_assert_eq!(size, pp * data);
        prop_assert_eq!(size, pp * tp * rdp);
        for rank in 0..size {
            for kind in GroupKind::ALL {
                let group = layout.group(kind, rank);
                prop_assert_eq!(group.len(), layout.group_size(kind));
                prop_assert!(group.contains(&rank) && group.is_sorted_by(|a, b| a < b));
                // All members see the same group, so groups divide the ranks.
                prop_assert!(group.iter().all(|member| layout.group(kind, *member) == group));
                // Members differ only along what the group spans.
                let here = layout.coordinates(rank);
                for member in group {
                    let there = layout.coordinates(member);
                    prop_assert!(kind.spans(Axis::Pipeline) || here.pp == there.pp);
                    prop_assert!(kind.spans(Axis::Tensor) || here.tp == there.tp);
                    prop_assert!(kind.spans(Axis::ReducedData) || here.rdp == there.rdp);
                }
            }
            let group = |kind| layout.group(kind, rank);
            for member in group(GroupKind::Tensor) {
                prop_assert!(group(GroupKind::Model).contains(&member) && group(GroupKind::Data).contains(&member));
            }
            if tp == 1 {
                prop_assert_eq!(group(GroupKind::Pipeline), group(GroupKind::Model));
                prop_assert_eq!(group(GroupKind::ReducedData), group(GroupKind::Data));
            }
            if pp == 1 {
                prop_assert_eq!(group(GroupKind::Tensor), group(GroupKind::Model));
            }
        }
    }
}
