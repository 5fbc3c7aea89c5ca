//! Chooses into how many chunks a product and the exchange of its result are divided, by trial.
//!
//! Ranks exchange a chunk while they compute the next one. More chunks hide more of the exchange, but small products are
//! slower, and each chunk costs the host a launch. The best number depends on the sizes, on the device and on what limits
//! a step, so it is measured in the first steps.
//!
//! - TRIAL-1: all ranks divide the same call into the same number of chunks, because each chunk is an operation of the
//!   group. So the number depends only on the count of steps, and later on times that the ranks have summed.
//! - TRIAL-2: within a step the number is constant, so a recomputed forward computes what the forward computed.

use std::num::NonZeroU32;

use crate::trials::median;

/// More chunks than this leave too little work for a device in each.
const MOST_CHUNKS: u32 = 4;
/// Steps before the trial, which run undivided: they allocate memory and compile.
const WARM_UP_STEPS: u64 = 5;
/// Measured steps of each number of chunks.
const MEASURED_STEPS: u64 = 3;
/// A larger number of chunks is chosen only if it needs less than this part of the time of the smaller number.
const WORTHWHILE: f32 = 0.98;

/// What a call has to do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ChunkTurn {
    /// Run in this many chunks.
    Run(NonZeroU32),
    /// Run in this many chunks, and measure the time.
    Measure(NonZeroU32),
    /// Sum [`ChunkTrial::medians`] over the ranks, pass the sums to [`ChunkTrial::choose`], and ask again.
    Choose,
}

/// The trial of a product of one shape in one group.
#[derive(Clone, Debug)]
pub struct ChunkTrial {
    candidates: Vec<NonZeroU32>,
    /// The step of the first call.
    begin: Option<u64>,
    /// For each candidate, the measured times in seconds.
    times: Vec<Vec<f32>>,
    chosen: Option<NonZeroU32>,
}

impl Default for ChunkTrial {
    fn default() -> Self {
        Self::up_to(MOST_CHUNKS)
    }
}

impl ChunkTrial {
    /// A trial of 1, 2, 4, .. chunks, up to `most`.
    fn up_to(most: u32) -> Self {
        let powers = (0..32).map(|power| 1 << power).take_while(|&chunks| chunks <= most.max(1));
        let candidates: Vec<_> = powers.filter_map(NonZeroU32::new).collect();
        let times = vec![Vec::new(); candidates.len()];
        let chosen = if candidates.len() == 1 { Some(candidates[0]) } else { None };
        Self { candidates, begin: None, times, chosen }
    }

    /// What a call has to do. `step` is the number of the current step, the same on all ranks.
    pub fn turn(&mut self, step: u64) -> ChunkTurn {
        if let Some(chunks) = self.chosen {
            return ChunkTurn::Run(chunks);
        }
        let passed = step.saturating_sub(*self.begin.get_or_insert(step));
        let Some(measured) = passed.checked_sub(WARM_UP_STEPS) else { return ChunkTurn::Run(self.candidates[0]) };
        let count = self.candidates.len() as u64;
        if measured >= MEASURED_STEPS * count {
            return ChunkTurn::Choose;
        }
        ChunkTurn::Measure(self.candidates[(measured % count) as usize])
    }

    /// The number of chunks that the trial has chosen, or one.
    pub fn chosen(&self) -> u32 {
        self.chosen.map_or(1, NonZeroU32::get)
    }

    /// Adds the time of a measured call.
    pub fn add(&mut self, chunks: u32, seconds: f32) {
        if let Some(at) = self.candidates.iter().position(|each| each.get() == chunks) {
            self.times[at].push(seconds);
        }
    }

    /// The median time of each candidate in seconds, in the order of their numbers of chunks.
    pub fn medians(&self) -> Vec<f32> {
        self.times.iter().map(|times| median(times).unwrap_or(f32::INFINITY)).collect()
    }

    /// Ends the trial. `sums` are the sums of [`Self::medians`] over the ranks, and the same on all of them (TRIAL-1).
    pub fn choose(&mut self, sums: &[f32]) {
        let mut best = 0;
        for (at, &time) in sums.iter().enumerate().take(self.candidates.len()) {
            if time < WORTHWHILE * sums[best] {
                best = at;
            }
        }
        self.chosen = Some(self.candidates[best]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a trial in which `chunks` chunks need `seconds(chunks)`, and returns the number that is chosen.
    fn chosen(most: u32, seconds: impl Fn(u32) -> f32) -> u32 {
        let mut trial = ChunkTrial::up_to(most);
        for step in 7.. {
            match trial.turn(step) {
                ChunkTurn::Measure(chunks) => trial.add(chunks.get(), seconds(chunks.get())),
                ChunkTurn::Run(_) => {}
                ChunkTurn::Choose => {
                    let medians = trial.medians();
                    trial.choose(&medians);
                    assert_eq!(ChunkTurn::Run(NonZeroU32::new(trial.chosen()).unwrap()), trial.turn(step));
                    return trial.chosen();
                }
            }
        }
        unreachable!("a trial ends")
    }

    #[test]
    fn the_fastest_number_of_chunks_is_chosen() {
        assert_eq!(chosen(4, |chunks| [9.0, 7.0, 0.0, 8.0][chunks as usize - 1]), 2);
        assert_eq!(chosen(8, |chunks| 1.0 / chunks as f32), 8);
    }

    #[test]
    fn equal_times_choose_the_fewest_chunks() {
        assert_eq!(chosen(4, |chunks| 1.0 - 0.001 * chunks as f32), 1);
    }

    #[test]
    fn one_slow_call_of_a_candidate_does_not_matter() {
        let mut trial = ChunkTrial::up_to(2);
        for slow in [true, false, false] {
            trial.add(1, 2.0);
            trial.add(2, if slow { 50.0 } else { 1.0 });
        }
        assert_eq!(trial.medians(), [2.0, 1.0]);
    }

    #[test]
    fn all_calls_of_a_step_have_the_same_number() {
        let mut trial = ChunkTrial::up_to(4);
        let mut numbers = Vec::new();
        for step in 0..WARM_UP_STEPS + 3 * MEASURED_STEPS {
            let turn = trial.turn(step);
            assert_eq!([trial.turn(step), trial.turn(step)], [turn, turn]);
            if let ChunkTurn::Measure(chunks) = turn {
                numbers.push(chunks.get());
            }
        }
        assert_eq!(numbers, [1, 2, 4, 1, 2, 4, 1, 2, 4]);
    }

    #[test]
    fn without_steps_products_are_not_divided() {
        let mut trial = ChunkTrial::up_to(4);
        for _ in 0..1000 {
            assert_eq!(trial.turn(0), ChunkTurn::Run(NonZeroU32::MIN));
        }
    }

    #[test]
    fn ranks_with_different_times_run_the_same_numbers() {
        let mut ranks = [ChunkTrial::default(), ChunkTrial::default()];
        for step in 0..WARM_UP_STEPS + 3 * MEASURED_STEPS {
            let turns = ranks.each_mut().map(|rank| rank.turn(step));
            assert_eq!(turns[0], turns[1]);
            if let ChunkTurn::Measure(chunks) = turns[0] {
                ranks[0].add(chunks.get(), 1.0 / chunks.get() as f32);
                ranks[1].add(chunks.get(), 3.0 * chunks.get() as f32);
            }
        }
        let sums: Vec<f32> =
            ranks[0].medians().iter().zip(ranks[1].medians()).map(|(one, other)| one + other).collect();
        ranks.iter_mut().for_each(|rank| rank.choose(&sums));
        assert_eq!(ranks.each_mut().map(|rank| rank.turn(99)), [ChunkTurn::Run(NonZeroU32::MIN); 2]);
    }

    #[test]
    fn a_trial_of_one_candidate_is_over_at_once() {
        assert_eq!(ChunkTrial::up_to(0).turn(0), ChunkTurn::Run(NonZeroU32::MIN));
    }
}
