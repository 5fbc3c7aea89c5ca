use std::time::Duration;

use proptest::prelude::*;

use super::schedule::{Bounds, Schedule, plan};
use super::*;

fn chain(ranks: usize, microbatches: usize, costs: Costs) -> Graph {
    Graph::chain(ranks, 1, StagePlacement::Looped, microbatches, costs).unwrap()
}

fn timeline(graph: &Graph, schedule: Schedule) -> Timeline {
    simulate(graph, &plan(graph, schedule, Bounds::default()).unwrap()).unwrap()
}

/// The average idle time of the ranks.
fn idle(graph: &Graph, timeline: &Timeline) -> f64 {
    let work: u64 = graph.work().iter().sum();
    timeline.step_time as f64 - work as f64 / graph.ranks() as f64
}

const SIZES: [(usize, usize); 9] = [(1, 1), (1, 5), (2, 1), (2, 8), (3, 7), (4, 4), (4, 8), (7, 12), (8, 32)];

#[test]
fn bubbles_are_those_of_the_closed_forms() {
    for (p, m) in SIZES {
        let expected = (p - 1) as f64 / (m + p - 1) as f64;
        for costs in [Costs::UNIT, Costs { forward: 5, input: 7, weight: 2 }] {
            let graph = chain(p, m, costs);
            for schedule in [Schedule::Simple, Schedule::Interleaved] {
                let bubble = timeline(&graph, schedule).bubble();
                assert!((bubble - expected).abs() < 1e-9, "{schedule} {p} {m}: {bubble}, not {expected}");
            }
        }
    }
}

#[test]
fn several_stages_a_rank_divide_the_bubble() {
    for (p, m, chunks) in [(2, 2, 2), (2, 8, 2), (4, 4, 2), (4, 8, 2), (4, 8, 3), (8, 32, 4)] {
        let graph = Graph::chain(p, chunks, StagePlacement::Looped, m, Costs::UNIT).unwrap();
        let timeline = timeline(&graph, Schedule::Interleaved);
        // In units of a rank's whole forward and backward, the bubble is p - 1 if each rank has one stage.
        let expected = ((p - 1) * 3) as f64;
        assert!((idle(&graph, &timeline) - expected).abs() < 1e-9, "{p} {m} {chunks}: {}", idle(&graph, &timeline));
    }
}

#[test]
fn split_backwards_leave_a_third_of_the_bubble() {
    for (p, m) in SIZES.into_iter().filter(|(p, m)| m >= p) {
        let graph = chain(p, m, Costs::UNIT);
        let (whole, split) = (timeline(&graph, Schedule::Interleaved), timeline(&graph, Schedule::ZeroBubble));
        assert!((idle(&graph, &split) - idle(&graph, &whole) / 3.0).abs() < 1e-9, "{p} {m}: {}", idle(&graph, &split));
        assert!(split.peak_bytes.iter().max() <= whole.peak_bytes.iter().max(), "{p} {m}");
    }
}

/// ZB-H2 (Qi et al. 2023, section 2.3): a bubble of (p - 1)(F + I - 2W) where H1 has (p - 1)(F + I - W), at twice the
/// memory.
#[test]
fn more_active_microbatches_fill_the_gap_before_the_first_gradient() {
    let costs = Costs { forward: 10, input: 14, weight: 6 };
    for (p, m) in [(2, 8), (3, 12), (4, 16), (8, 48)] {
        let graph = chain(p, m, costs);
        let mut before = idle(&graph, &timeline(&graph, Schedule::ZeroBubble));
        for active in p + 1..=2 * p {
            let bounds = Bounds { active_microbatches: Some(active), memory_bytes: None };
            let more = simulate(&graph, &plan(&graph, Schedule::ZeroBubble, bounds).unwrap()).unwrap();
            assert!(more.peak_bytes.iter().all(|&bytes| bytes <= active as u64), "{p} {m}: {:?}", more.peak_bytes);
            let after = idle(&graph, &more);
            assert!(after <= before, "{p} {m} {active}: {after}, {before} with one less");
            before = after;
        }
        let expected = ((p - 1) * (10 + 14 - 2 * 6)) as f64;
        let bounds = Bounds { active_microbatches: Some(usize::MAX), memory_bytes: None };
        let most = simulate(&graph, &plan(&graph, Schedule::ZeroBubble, bounds).unwrap()).unwrap();
        assert!(idle(&graph, &most) <= before, "{p} {m}: {}, {before} with {}", idle(&graph, &most), 2 * p);
        assert!(before <= 1.05 * expected, "{p} {m}: {before}, and the closed form is {expected}");
    }
}

#[test]
fn a_chain_there_and_back_leaves_no_gap_but_at_its_ends() {
    for (p, m) in [(2, 4), (3, 6), (4, 8), (4, 17), (8, 24)] {
        let graph = Graph::chain(p, 2, StagePlacement::VShaped, m, Costs::UNIT).unwrap();
        let timeline = timeline(&graph, Schedule::ZeroBubble);
        assert!((idle(&graph, &timeline) - (p - 1) as f64).abs() < 1e-9, "{p} {m}: {}", idle(&graph, &timeline));
        assert!(timeline.peak_bytes.iter().all(|&bytes| bytes <= 2 * p as u64), "{:?}", timeline.peak_bytes);
    }
}

/// An embedding on the last rank, beside the output layer whose parameter it shares; `before` it, a rank may prepare its
/// input. With two ranks, that is a chain as for looped 1F1B, but of unequal stages.
#[test]
fn light_stages_delay_no_other_rank() {
    for ((p, m), before) in [
        ((2, 8), None),
        ((2, 8), Some(0)),
        ((2, 16), Some(0)),
        ((3, 12), None),
        ((4, 16), None),
        ((4, 16), Some(0)),
        ((8, 32), Some(0)),
    ] {
        let costs = Costs { forward: 100, input: 120, weight: 80 };
        let stage = |rank: usize, costs: Costs, activation_bytes: u64, from: Option<usize>| Stage {
            rank,
            costs,
            activation_bytes,
            waiting_bytes: activation_bytes,
            inputs: from.map(|from| Edge { from, bytes: 0 }).into_iter().collect(),
            backward: true,
        };
        let mut stages: Vec<Stage> = Vec::new();
        for rank in before.into_iter().chain([p - 1]) {
            stages.push(stage(rank, Costs { forward: 1, input: 1, weight: 1 }, 1, stages.len().checked_sub(1)));
        }
        for rank in 0..p {
            stages.push(stage(rank, costs, 100, Some(stages.len() - 1)));
        }
        let graph = Graph::new(p, m, stages, LinkCost { latency: 2, bytes_per_tick: 0 }).unwrap();
        for schedule in [Schedule::Interleaved, Schedule::ZeroBubble] {
            let without = chain(p, m, costs).with_link(LinkCost { latency: 2, bytes_per_tick: 0 });
            let bounds = Bounds {
                active_microbatches: (schedule == Schedule::Interleaved).then_some(p + 2),
                memory_bytes: None,
            };
            let found = simulate(&graph, &plan(&graph, schedule, bounds).unwrap()).unwrap();
            let expected = timeline(&without, schedule);
            let ratio = found.step_time as f64 / expected.step_time as f64;
            assert!(ratio < 1.05, "{schedule} {p} {m}: {ratio} {}", plan(&graph, schedule, bounds).unwrap());
            assert!(found.peak_bytes[0] < 100 * (p as u64 + 1), "{schedule} {p} {m}: {:?}", found.peak_bytes);
        }
    }
}

#[test]
fn many_equal_stages_are_not_light() {
    for (p, m, chunks) in [(2, 32, 24), (4, 64, 17)] {
        let graph = Graph::chain(p, chunks, StagePlacement::Looped, m, Costs::UNIT).unwrap();
        let heights = graph.heights();
        let most = (0..p).map(|rank| (0..chunks).map(|lap| heights[lap * p + rank]).sum::<usize>()).max().unwrap();
        let timeline = timeline(&graph, Schedule::ZeroBubble);
        assert!(timeline.peak_bytes.iter().all(|&bytes| bytes <= most as u64), "{:?} {most}", timeline.peak_bytes);
    }
}

#[test]
fn one_f_one_b_keeps_as_many_microbatches_as_there_are_ranks_after_it() {
    let timeline = timeline(&chain(4, 16, Costs::UNIT), Schedule::Interleaved);
    assert_eq!(timeline.peak_bytes, [4, 3, 2, 1]);
    assert_eq!(timeline.active_microbatches, [4, 3, 2, 1]);
}

#[test]
fn bounds_are_kept() {
    let graph = chain(4, 13, Costs::UNIT);
    for schedule in Schedule::ALL {
        for bound in 1..6 {
            let active = Bounds { active_microbatches: Some(bound), memory_bytes: None };
            let memory = Bounds { active_microbatches: None, memory_bytes: Some(bound as u64) };
            for bounds in [active, memory] {
                let program = plan(&graph, schedule, bounds).unwrap();
                validate(&graph, &program, bounds, schedule != Schedule::ForwardOnly).unwrap();
            }
        }
    }
    let nothing = Bounds { active_microbatches: None, memory_bytes: Some(0) };
    let error = plan(&graph, Schedule::Simple, nothing).unwrap_err().to_string();
    assert_eq!(error, "one microbatch keeps 1 bytes of activations on rank 0, and the bound is 0");
}

/// Looped 1F1B needs more microbatches in flight than the bound, so the list scheduler is used.
#[test]
fn a_bound_that_the_looped_order_breaks_is_kept() {
    let graph = Graph::chain(4, 2, StagePlacement::Looped, 8, Costs::UNIT).unwrap();
    let bounds = Bounds { active_microbatches: Some(3), memory_bytes: None };
    let free = timeline(&graph, Schedule::Interleaved);
    assert!(free.active_microbatches[0] > 3);
    let program = plan(&graph, Schedule::Interleaved, bounds).unwrap();
    assert_eq!(simulate(&graph, &program).unwrap().active_microbatches[0], 3);
}

#[test]
fn evaluation_has_no_backwards() {
    let graph = chain(3, 5, Costs::UNIT);
    let program = plan(&graph, Schedule::ForwardOnly, Bounds::default()).unwrap();
    assert_eq!(
        program.computations().to_string(),
        "0: 0F0 0F1 0F2 0F3 0F4\n1: 1F0 1F1 1F2 1F3 1F4\n2: 2F0 2F1 2F2 2F3 2F4\n"
    );
}

#[test]
fn programs_are_those_of_the_golden_file() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/pipeline/schedule/golden.txt");
    let cases = [
        (Schedule::Simple, 3, 1, StagePlacement::Looped, 4),
        (Schedule::Interleaved, 4, 1, StagePlacement::Looped, 6),
        (Schedule::Interleaved, 2, 2, StagePlacement::Looped, 4),
        (Schedule::ZeroBubble, 4, 1, StagePlacement::Looped, 8),
        (Schedule::ZeroBubble, 3, 2, StagePlacement::VShaped, 6),
    ];
    let mut text = String::new();
    for (schedule, ranks, chunks, placement, microbatches) in cases {
        let graph = Graph::chain(ranks, chunks, placement, microbatches, Costs::UNIT).unwrap();
        let program = plan(&graph, schedule, Bounds::default()).unwrap();
        let timeline = simulate(&graph, &program).unwrap();
        text += &format!(
            "{schedule}, {ranks} ranks, {chunks} stages each, {microbatches} microbatches: {} units, bubble {:.4}\n{}{program}\n",
            timeline.step_time,
            timeline.bubble(),
            grid(&timeline, 100)
        );
    }
    if std::env::var_os("SMD_UPDATE_GENERATED").is_some() {
        std::fs::write(path, &text).unwrap();
    }
    assert!(std::fs::read_to_string(path).unwrap_or_default() == text, "`{path}` is not current: run `make generated`");
}

/// Applies `change` to the list of rank `rank` in a valid program; returns the results of `simulate` and `validate`.
fn errors_after(rank: usize, change: impl Fn(&mut Vec<Action>)) -> String {
    let graph = chain(2, 2, Costs::UNIT);
    let program = plan(&graph, Schedule::Simple, Bounds::default()).unwrap();
    let mut ranks = program.ranks().to_vec();
    change(&mut ranks[rank]);
    validate(&graph, &Program::new(ranks), Bounds::default(), true).unwrap_err().to_string()
}

#[test]
fn wrong_programs_are_refused() {
    let at = |actions: &[Action], text: &str| {
        let action: Action = text.parse().unwrap();
        actions.iter().position(|&other| other == action).expect("the program has it")
    };
    let remove = |text: &'static str| {
        move |actions: &mut Vec<Action>| {
            actions.remove(at(actions, text));
        }
    };
    let swap = |one: &'static str, other: &'static str| {
        move |actions: &mut Vec<Action>| {
            let (one, other) = (at(actions, one), at(actions, other));
            actions.swap(one, other);
        }
    };
    let insert = |text: &'static str| move |actions: &mut Vec<Action>| actions.insert(0, text.parse().unwrap());
    assert_eq!(errors_after(0, remove("0B1")), "rank 0 has 1 gradients of inputs of stage 0 instead of 2");
    assert_eq!(errors_after(1, remove("1F1")), "rank 1 has `1B1` before its forward");
    assert_eq!(errors_after(1, remove("1RF0<0")), "rank 1 has `1F0` before its inputs are received");
    assert_eq!(errors_after(0, remove("0SF0>1")), "rank 1 has `1RF0<0`, but rank 0's next message to it is `0SF1>1`");
    assert_eq!(errors_after(0, remove("0RB1<1")), "rank 0 has `0B1` before its inputs are received");
    assert_eq!(
        errors_after(0, swap("0SF0>1", "0SF1>1")),
        "rank 0 has `0SF1>1` before the forward that computes the value"
    );
    assert_eq!(
        errors_after(1, swap("1RF0<0", "1RF1<0")),
        "rank 1 has `1RF1<0`, but rank 0's next message to it is `0SF0>1`"
    );
    assert_eq!(errors_after(0, swap("0F0", "0RB0<1")), "the program deadlocks: rank 0 at `0RB0<1`, rank 1 at `1RF0<0`");
    assert_eq!(errors_after(0, insert("1F0")), "rank 0 has `1F0`: the stage is on rank 1");
    assert_eq!(errors_after(0, insert("0F2")), "rank 0 has `0F2`: there are 2 microbatches");
    assert_eq!(errors_after(0, insert("2F0")), "rank 0 has `2F0`: there are 2 stages");
    assert_eq!(errors_after(0, insert("0RF0<1")), "rank 0 has `0RF0<1`: no message passes between these stages");
    assert_eq!(errors_after(0, insert("0F0")), "rank 0 has `0F0` twice");
}

#[test]
fn graphs_that_make_no_sense_are_refused() {
    let stage = |rank, inputs: &[usize], backward| Stage {
        rank,
        costs: Costs::UNIT,
        activation_bytes: 1,
        waiting_bytes: 1,
        inputs: inputs.iter().map(|&from| Edge { from, bytes: 0 }).collect(),
        backward,
    };
    let refused = |stages: Vec<Stage>| Graph::new(2, 1, stages, LinkCost::default()).unwrap_err().to_string();
    assert_eq!(refused(vec![]), "a pipeline needs ranks, microbatches and stages, not 2, 1 and 0");
    assert_eq!(refused(vec![stage(2, &[], true)]), "stage 0 is on rank 2 of 2");
    assert_eq!(refused(vec![stage(0, &[0], true)]), "stage 0 has an input from stage 0, which does not precede it");
    assert_eq!(
        refused(vec![stage(0, &[], true), stage(1, &[0, 0], true)]),
        "stage 1 has two edges from stage 0: one edge carries all of its inputs"
    );
    assert_eq!(
        refused(vec![stage(0, &[], true), stage(1, &[0], false)]),
        "stage 0 has a backward, but stage 1, which uses its value, has none"
    );
}

#[test]
fn transfers_take_their_time() {
    let graph = chain(2, 1, Costs::UNIT).with_link(LinkCost { latency: 10, bytes_per_tick: 0 });
    assert_eq!(timeline(&graph, Schedule::Simple).step_time, 1 + 10 + 1 + 2 + 10 + 2);
}

/// A random graph: branches, skip connections, ranks with several stages, parts without a backward.
fn any_graph() -> impl Strategy<Value = Graph> {
    let bytes = (0_u64..4, 0_u64..4);
    let stage = (0_usize..6, any::<[bool; 12]>(), any::<bool>(), (0_u64..5, 0_u64..5, 0_u64..5), bytes);
    (1_usize..6, 1_usize..9, prop::collection::vec(stage, 1..12), 0_u64..3, 0_u64..3).prop_map(
        |(ranks, microbatches, drawn, latency, bytes_per_tick)| {
            let mut stages: Vec<Stage> = Vec::new();
            for (index, (rank, inputs, trains, (forward, input, weight), (kept, waiting))) in
                drawn.into_iter().enumerate()
            {
                let inputs: Vec<Edge> =
                    (0..index).filter(|&from| inputs[from]).map(|from| Edge { from, bytes: from as u64 }).collect();
                let backward = trains || inputs.iter().any(|edge| stages[edge.from].backward);
                let costs = Costs { forward, input, weight };
                stages.push(Stage {
                    rank: rank % ranks,
                    costs,
                    activation_bytes: kept,
                    waiting_bytes: waiting,
                    inputs,
                    backward,
                });
            }
            Graph::new(ranks, microbatches, stages, LinkCost { latency, bytes_per_tick }).expect("it is a valid graph")
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, ..ProptestConfig::default() })]

    /// For random graphs: the program is complete, within its bounds and free of deadlock, also if tasks take other
    /// times than those it was planned for (PIPE-1), and its text parses back.
    #[test]
    fn every_graph_has_a_valid_program(
        graph in any_graph(),
        schedule in prop::sample::select(&Schedule::ALL),
        active in prop::option::of(1_usize..9),
        memory in prop::option::of(1_u64..20),
    ) {
        let bounds = Bounds { active_microbatches: active, memory_bytes: memory };
        let Ok(program) = plan(&graph, schedule, bounds) else {
            // One microbatch alone exceeds the bounds of some rank.
            prop_assert!(memory.is_some());
            return Ok(());
        };
        let timeline = validate(&graph, &program, bounds, schedule != Schedule::ForwardOnly).unwrap();
        let computations = simulate(&graph, &program.computations()).unwrap();
        if graph.link().bytes_per_tick == 0 {
            prop_assert_eq!(&timeline.spans, &computations.spans);
        } else {
            // A small message waits for a large one that was sent before it.
            prop_assert!(timeline.step_time >= computations.step_time);
        }
        prop_assert_eq!(&plan(&graph, schedule, bounds).unwrap(), &program);
        prop_assert_eq!(&program.to_string().parse::<Program>().unwrap(), &program);
        let mut slow: Vec<Stage> = graph.stages().to_vec();
        for (index, stage) in slow.iter_mut().enumerate() {
            stage.costs = Costs { forward: index as u64 % 3, input: 7 - index as u64 % 5, weight: 1 };
        }
        let slow = Graph::new(graph.ranks(), graph.microbatches(), slow, LinkCost { latency: 5, bytes_per_tick: 1 }).unwrap();
        simulate(&slow, &program).unwrap();
    }

    #[test]
    fn actions_parse_back(kind in 0_usize..8, stage in 0_u32..100, microbatch in 0_u32..5000, peer in 0_u32..100) {
        let kinds = [ActionKind::Forward, ActionKind::Backward, ActionKind::Input, ActionKind::Weight, ActionKind::SendForward, ActionKind::RecvForward,
            ActionKind::SendBackward, ActionKind::RecvBackward];
        let peer = (!kinds[kind].computes()).then_some(peer);
        let action = Action { kind: kinds[kind], stage, microbatch, peer };
        prop_assert_eq!(action.to_string().parse::<Action>().unwrap(), action);
    }

    #[test]
    fn any_text_parses_or_is_refused(text in "[0-9FBIWSR<>+ -]{0,8}") {
        if let Ok(action) = text.parse::<Action>() {
            prop_assert_eq!(action.to_string().parse::<Action>().unwrap(), action);
        }
    }
}

/// A pipeline of the size of the largest machines: two million forwards and as many backwards.
#[test]
fn large_pipelines_are_simulated_in_seconds() {
    let graph = chain(512, 4096, Costs { forward: 100, input: 100, weight: 100 });
    // CPU time of this thread, which other processes do not affect.
    let computed = || {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
    };
    let start = computed();
    let order = schedule::computations(&graph, Schedule::Interleaved, Bounds::default()).unwrap();
    let planned = computed() - start;
    let timeline = simulate(&graph, &order).unwrap();
    let both = computed() - start;
    println!("planned in {planned:.1?}, simulated in {:.1?}", both - planned);
    assert!(both < Duration::from_secs(10), "{both:?}");
    assert!((timeline.bubble() - 511.0 / (4096.0 + 511.0)).abs() < 1e-9);
}
