//! The summary of a job: `smdrun --summary`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::metrics::{Snapshot, slowest};

/// The text for a job of `num_ranks` ranks from the counters that its ranks sent before they left.
pub(super) fn text(counters: &BTreeMap<usize, Snapshot>, num_ranks: usize, elapsed: f64) -> String {
    let all: Vec<Snapshot> = counters.values().cloned().collect();
    let mut text = format!("summary of {elapsed:.1} s");
    let width = num_ranks.saturating_sub(1).to_string().len();
    for (rank, of) in counters {
        let _ = write!(
            text,
            "\nsmdrun: rank {rank:>width$}: {} steps, {:.1} s in communication, {:.1} s exposed, {} operations, {:.1} MiB",
            of.steps(),
            of.communication().as_secs_f64(),
            of.exposed().as_secs_f64(),
            of.total_calls(),
            of.total_bytes() as f64 / (1 << 20) as f64
        );
    }
    let missing: Vec<_> =
        (0..num_ranks).filter(|rank| !counters.contains_key(rank)).map(|rank| rank.to_string()).collect();
    if !missing.is_empty() {
        let _ = write!(text, "\nsmdrun: no numbers came from rank(s) {}", missing.join(", "));
    }
    let stalls: u64 = all.iter().map(|of| of.stalls).sum();
    let _ = write!(text, "\nsmdrun: {stalls} stalls");
    for (reason, times) in fallbacks(&all) {
        let _ = write!(text, "; {reason} {times} times");
    }
    if let Some((rank, waited)) = slowest(&all) {
        let _ = write!(text, "\nsmdrun: slowest: rank {rank}; the others waited {:.1} s for it", waited.as_secs_f64());
    }
    text
}

fn fallbacks(all: &[Snapshot]) -> Vec<(&'static str, u64)> {
    let times = |place: usize| all.iter().filter_map(|of| of.fallbacks.get(place)).sum::<u64>();
    let named = crate::metrics::FALLBACKS.iter().enumerate().map(|(place, reason)| (*reason, times(place)));
    named.filter(|(_, times)| *times > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_names_the_slowest_rank_and_ranks_without_numbers() {
        let of = |rank, exposed_ns, waited_ns: &[(u64, u64)]| Snapshot {
            rank,
            size: 3,
            reducer_steps: 5,
            exposed_ns,
            waited_ns: waited_ns.to_vec(),
            fallbacks: vec![0, 2],
            ..Snapshot::default()
        };
        let counters = BTreeMap::from([(0, of(0, 1_500_000_000, &[(1, 1_400_000_000)])), (1, of(1, 0, &[]))]);
        let expected = "summary of 2.0 s\n\
            smdrun: rank 0: 5 steps, 0.0 s in communication, 1.5 s exposed, 0 operations, 0.0 MiB\n\
            smdrun: rank 1: 5 steps, 0.0 s in communication, 0.0 s exposed, 0 operations, 0.0 MiB\n\
            smdrun: no numbers came from rank(s) 2\n\
            smdrun: 0 stalls; gradients_one_by_one 4 times\n\
            smdrun: slowest: rank 1; the others waited 1.4 s for it";
        assert_eq!(text(&counters, 3, 2.0), expected);
    }
}
