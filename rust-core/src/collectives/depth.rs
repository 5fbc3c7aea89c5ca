//! Chooses by measurement how many pieces of a reduction the host that begins the chain has under way.
//!
//! Note "depth". A link with a long delay needs many pieces in flight to be busy. Where hosts share processors, as
//! containers and virtual machines of one machine do, a piece that waits in a socket leaves the cache before its
//! receiver copies it, and few pieces can be twice as fast. The system reports neither case.
//!
//! So some reductions are trials: they run with another depth. The owner of a channel that begins the chain times each
//! reduction, from the comparison of the members' calls on, and compares medians. The whole reduction is measured: while
//! a deep chain is filled, results come late, and then faster than the link carries them.
//!
//! - DEPTH-1: the depth changes when pieces are sent, and neither their order nor a value. Each owner may have its own.

use std::cell::Cell;
use std::time::Instant;

use parking_lot::Mutex;

/// The depths; the first one is chosen before any measurement.
const DEPTHS: [usize; 3] = [6, 2, 12];
/// The largest one.
pub(crate) const MAX_DEPTH: usize = 12;

/// Reductions with fewer results are not measured.
const FEWEST_RESULTS: usize = 4;
/// Reductions with a similar number of results share their choice. Each class has up to 4 times as many as the one
/// before.
const SIZE_CLASSES: usize = 4;
/// After the first trials, one of this many reductions is a trial, so that a slow depth costs little.
const CALLS_PER_TRIAL: u64 = 32;
/// Times that are kept of each depth.
const TIMES: usize = 5;
/// Another depth is chosen if it needs less than this part of the time.
const WORTHWHILE: f32 = 0.85;

/// The choices of an owner in a group.
#[derive(Debug, Default)]
pub(crate) struct DepthChooser {
    classes: Mutex<[DepthTrials; SIZE_CLASSES]>,
}

#[derive(Clone, Copy, Debug, Default)]
struct DepthTrials {
    /// Positions in [`DEPTHS`].
    chosen: usize,
    calls: u64,
    /// For each depth the newest times of a result in seconds, and the number of times so far.
    times: [[f32; TIMES]; DEPTHS.len()],
    measured: [usize; DEPTHS.len()],
}

impl DepthTrials {
    /// Counts a reduction; returns its depth.
    fn next(&mut self) -> usize {
        let call = self.calls;
        self.calls += 1;
        let first = (TIMES * DEPTHS.len()) as u64;
        if call < first {
            return (call % DEPTHS.len() as u64) as usize;
        }
        match (call - first) % CALLS_PER_TRIAL {
            0 => ((call - first) / CALLS_PER_TRIAL % DEPTHS.len() as u64) as usize,
            _ => self.chosen,
        }
    }

    fn add(&mut self, depth: usize, time: f32) {
        self.times[depth][self.measured[depth] % TIMES] = time;
        self.measured[depth] += 1;
        if self.measured.iter().any(|count| *count < TIMES) {
            return;
        }
        let median = |times: &[f32; TIMES]| {
            let mut times = *times;
            times.sort_by(f32::total_cmp);
            times[TIMES / 2]
        };
        let medians = self.times.each_ref().map(median);
        let best = (0..DEPTHS.len()).min_by(|one, other| medians[*one].total_cmp(&medians[*other])).unwrap_or_default();
        if medians[best] < WORTHWHILE * medians[self.chosen] {
            tracing::debug!(pieces = DEPTHS[best], ?medians, "another number of pieces between hosts is faster");
            self.chosen = best;
        }
    }
}

/// The class of reductions with `results` results; `None` for those that are not measured.
fn size_class(results: usize) -> Option<usize> {
    let times = (results / FEWEST_RESULTS).checked_ilog2()?;
    Some((times as usize / 2).min(SIZE_CLASSES - 1))
}

impl DepthChooser {
    /// Begins a reduction in which the owner begins a chain and awaits `results` results.
    pub(crate) fn begin(&self, results: usize) -> DepthTimer<'_> {
        let class = size_class(results);
        let depth = class.map_or(0, |class| self.classes.lock()[class].next());
        DepthTimer { chooser: self, class, depth, results, came: Cell::new(0), since: Instant::now() }
    }
}

/// The depth of one reduction, and its time.
pub(crate) struct DepthTimer<'a> {
    chooser: &'a DepthChooser,
    class: Option<usize>,
    /// A position in [`DEPTHS`].
    depth: usize,
    results: usize,
    /// The number of results so far.
    came: Cell<usize>,
    since: Instant,
}

impl DepthTimer<'_> {
    /// The number of pieces that may be under way.
    pub(crate) fn pieces(&self) -> usize {
        DEPTHS[self.depth]
    }

    /// A result has arrived.
    pub(crate) fn note_result(&self) {
        self.came.set(self.came.get() + 1);
        if let Some(class) = self.class.filter(|_| self.came.get() == self.results) {
            let time = self.since.elapsed().as_secs_f32() / self.results as f32;
            self.chooser.classes.lock()[class].add(self.depth, time);
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
        DEPTHS[trials.chosen]
    }

    #[test]
    fn the_fastest_depth_is_chosen_and_a_change_is_followed() {
        let mut trials = DepthTrials::default();
        assert_eq!(run(&mut trials, FIRST, |depth| depth as f32), 2);
        // The newest times of the chosen depth are replaced at once, and then the others are known from earlier: at the
        // latest when each has been tried again, the choice is right.
        let calls = CALLS_PER_TRIAL * FIRST;
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
        assert_eq!(trials.chosen, 0);
    }

    #[test]
    fn trials_are_rare_after_the_first_ones() {
        let mut trials = DepthTrials::default();
        run(&mut trials, FIRST, |_| 1.0);
        let others = (0..10 * CALLS_PER_TRIAL).filter(|_| trials.next() != 0).count();
        assert!(others <= 10, "{others} trials");
    }

    #[test]
    fn all_depths_are_at_most_the_largest() {
        assert_eq!(DEPTHS.iter().max(), Some(&MAX_DEPTH));
    }

    #[test]
    fn a_reduction_is_measured_when_its_last_result_has_come_if_it_is_long_enough() {
        let chooser = DepthChooser::default();
        for results in [0, 1, FEWEST_RESULTS - 1] {
            let timer = chooser.begin(results);
            (0..results).for_each(|_| timer.note_result());
            assert_eq!(timer.pieces(), DEPTHS[0]);
        }
        let timer = chooser.begin(FEWEST_RESULTS);
        (1..FEWEST_RESULTS).for_each(|_| timer.note_result());
        assert!(chooser.classes.lock().iter().all(|class| class.measured == [0; DEPTHS.len()]));
        timer.note_result();
        assert_eq!(chooser.classes.lock()[0].measured[0], 1);
    }
}
