//! Chooses by measurement the depth of a reduction between hosts: the number of pieces that a member has in flight
//! while it awaits their results. This member is an owner that begins a chain, or any member of a distributed
//! reduction, where the depth applies to each other member.
//!
//! Note "depth". A link with a long delay needs many pieces in flight to be busy. Where hosts share processors, as
//! containers and virtual machines of one machine do, a piece that waits in a socket leaves the cache before its
//! receiver copies it, and few pieces can be twice as fast. The system reports neither case.
//!
//! So some reductions are trials, with another depth. The member times each reduction, from the comparison of the
//! members' calls on, and compares the medians of reductions of equal size. It times whole
//! reductions: the first results of a deep chain come late, and the next ones follow faster than the link can carry.
//!
//! - DEPTH-1: the depth changes when pieces are sent, and neither their order nor a value. Each owner may have its own.
//! - DEPTH-2: trials are at random, because the reductions of a training step repeat in a cycle. The random numbers are
//!   equal on all members, so that they try the same depth in the same reduction: otherwise, a member would time a mixture.

use std::cell::Cell;
use std::collections::HashMap;
use std::time::Instant;

use parking_lot::Mutex;

use crate::trials::{Trials, split_mix64};

/// The depths; the first one is used before any measurement.
const DEPTHS: [usize; 3] = [6, 2, 12];
/// The largest one.
pub(crate) const MAX_DEPTH: usize = 12;

/// Reductions with fewer results are not measured.
const MIN_RESULTS: usize = 4;
/// The number of sizes that are measured.
const MAX_SIZES: usize = 256;
/// After the first trials, one of this many reductions is a trial, so that a slow depth costs little.
const CALLS_PER_TRIAL: u64 = 32;
/// Times that are kept of each depth.
const TIMES: usize = 5;
/// Another depth is chosen if its median is less than this part of the chosen one's.
const SWITCH_RATIO: f32 = 0.85;

/// Reductions with equal sizes: the number of pieces, and of those whose result the member awaits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ReductionSize {
    pub(crate) pieces: usize,
    pub(crate) results: usize,
}

/// The choices of a member in a group.
#[derive(Debug, Default)]
pub(crate) struct DepthChooser {
    trials: Mutex<HashMap<ReductionSize, DepthTrials>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct DepthTrials {
    calls: u64,
    /// The times of a reduction in seconds, for each of [`DEPTHS`].
    trials: Trials<{ DEPTHS.len() }, TIMES>,
}

impl DepthTrials {
    /// Counts a reduction; returns the position of its depth.
    fn next(&mut self) -> usize {
        self.calls += 1;
        let random = split_mix64(0, self.calls);
        let open: Vec<usize> = (0..DEPTHS.len()).filter(|depth| self.trials.is_open(*depth)).collect();
        if !open.is_empty() {
            return open[(random % open.len() as u64) as usize];
        }
        match random % CALLS_PER_TRIAL {
            0 => (random / CALLS_PER_TRIAL % DEPTHS.len() as u64) as usize,
            _ => self.trials.chosen(),
        }
    }

    fn add(&mut self, depth: usize, time: f32) {
        self.trials.add(depth, time);
        let medians = self.trials.medians();
        if self.trials.switch(medians, SWITCH_RATIO) {
            let pieces = DEPTHS[self.trials.chosen()];
            tracing::debug!(pieces, ?medians, "another number of pieces in flight is faster");
        }
    }
}

impl DepthChooser {
    /// Begins a reduction. A member that awaits no results, such as an owner that does not begin a chain, measures none.
    pub(crate) fn begin(&self, size: ReductionSize) -> DepthTimer<'_> {
        let mut trials = self.trials.lock();
        let is_measured = size.results >= MIN_RESULTS && (trials.len() < MAX_SIZES || trials.contains_key(&size));
        let depth = if is_measured { trials.entry(size).or_default().next() } else { 0 };
        DepthTimer { chooser: self, size, is_measured, depth, num_results: Cell::new(0), since: Instant::now() }
    }
}

/// The depth of one reduction, and its time.
pub(crate) struct DepthTimer<'a> {
    chooser: &'a DepthChooser,
    size: ReductionSize,
    is_measured: bool,
    /// A position in [`DEPTHS`].
    depth: usize,
    /// The number of results so far.
    num_results: Cell<usize>,
    since: Instant,
}

impl DepthTimer<'_> {
    /// The number of pieces that may be in flight.
    pub(crate) fn pieces(&self) -> usize {
        DEPTHS[self.depth]
    }

    /// A result has arrived.
    pub(crate) fn note_result(&self) {
        self.num_results.set(self.num_results.get() + 1);
        if self.is_measured && self.num_results.get() == self.size.results {
            let time = self.since.elapsed().as_secs_f32();
            self.chooser.trials.lock().entry(self.size).or_default().add(self.depth, time);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of first trials.
    const FIRST: u64 = (TIMES * DEPTHS.len()) as u64;

    /// Runs reductions of one class in which a piece needs `time(depth)`; returns the chosen depth.
    fn run(trials: &mut DepthTrials, calls: u64, time: impl Fn(usize) -> f32) -> usize {
        for _ in 0..calls {
            let depth = trials.next();
            trials.add(depth, time(DEPTHS[depth]));
        }
        DEPTHS[trials.trials.chosen()]
    }

    #[test]
    fn the_fastest_depth_is_chosen_and_a_change_is_followed() {
        let mut trials = DepthTrials::default();
        assert_eq!(run(&mut trials, FIRST, |depth| depth as f32), 2);
        let calls = 2 * CALLS_PER_TRIAL * FIRST;
        assert_eq!(run(&mut trials, calls, |depth| 100.0 / depth as f32), 12);
    }

    #[test]
    fn similar_depths_do_not_change_the_choice() {
        assert_eq!(run(&mut DepthTrials::default(), 500, |depth| 1.0 - 0.01 * depth as f32), DEPTHS[0]);
    }

    #[test]
    fn two_slow_reductions_change_nothing() {
        let mut trials = DepthTrials::default();
        run(&mut trials, FIRST, |_| 1.0);
        trials.add(0, 50.0);
        trials.add(0, 50.0);
        assert_eq!(trials.trials.chosen(), 0);
    }

    #[test]
    fn trials_are_rare_after_the_first_ones() {
        let mut trials = DepthTrials::default();
        run(&mut trials, FIRST, |_| 1.0);
        let others = (0..100 * CALLS_PER_TRIAL).filter(|_| trials.next() != 0).count();
        assert!((20..120).contains(&others), "{others} trials");
    }

    #[test]
    fn reductions_that_repeat_in_a_cycle_get_all_depths() {
        // Reductions of one size whose time depends on their place in a step, and not on the depth.
        for cycle in 2..40 {
            let mut trials = DepthTrials::default();
            let mut seen = vec![[false; DEPTHS.len()]; cycle];
            for call in 0..4000 * cycle {
                let depth = trials.next();
                seen[call % cycle][depth] = true;
                trials.add(depth, 1.0 + 0.1 * (call % cycle) as f32 / cycle as f32);
            }
            assert!(seen.iter().flatten().all(|seen| *seen), "{cycle}: {seen:?}");
            assert_eq!(trials.trials.chosen(), 0, "{cycle}");
        }
    }

    #[test]
    fn all_depths_are_at_most_the_largest() {
        assert_eq!(DEPTHS.iter().max(), Some(&MAX_DEPTH));
    }

    #[test]
    fn a_reduction_is_measured_when_its_last_result_has_arrived_if_it_is_long_enough() {
        let chooser = DepthChooser::default();
        let size = |results| ReductionSize { pieces: 20, results };
        for results in [0, 1, MIN_RESULTS - 1] {
            let timer = chooser.begin(size(results));
            (0..results).for_each(|_| timer.note_result());
            assert_eq!(timer.pieces(), DEPTHS[0]);
        }
        assert!(chooser.trials.lock().is_empty());
        let measured = |results| {
            let trials = chooser.trials.lock()[&size(results)].trials;
            (0..DEPTHS.len()).map(|depth| trials.measured(depth)).sum::<usize>()
        };
        let timer = chooser.begin(size(MIN_RESULTS));
        (1..MIN_RESULTS).for_each(|_| timer.note_result());
        assert_eq!(measured(MIN_RESULTS), 0);
        timer.note_result();
        assert_eq!(measured(MIN_RESULTS), 1);
        for results in 0..2 * MAX_SIZES {
            chooser.begin(size(results));
        }
        assert_eq!(chooser.trials.lock().len(), MAX_SIZES);
    }
}
