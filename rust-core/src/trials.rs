//! Choices between a few options by measured times, and numbers that look random for the places of trials.
//!
//! The options are kinds of stores, paths of bytes ([`crate::collectives`]) or numbers of pieces in flight. A chooser, such as
//! `StoreChooser`, runs some calls with each option and times them. [`Trials`] keeps the newest of these times.
//!
//! - CHOICE-1: an option is compared by the median of its newest times, so that one disturbed call does not count, and a
//!   change of the machine is followed when half of these times are new.
//! - CHOICE-2: another option is chosen only if it is faster by a margin, so that nearly equal options do not take turns.

/// The newest `TIMES` times of each of `OPTIONS` options, and the chosen option. At first, option 0 is chosen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trials<const OPTIONS: usize, const TIMES: usize> {
    chosen: usize,
    times: [[f32; TIMES]; OPTIONS],
    /// The number of times so far.
    measured: [usize; OPTIONS],
}

impl<const OPTIONS: usize, const TIMES: usize> Default for Trials<OPTIONS, TIMES> {
    fn default() -> Self {
        Self { chosen: 0, times: [[0.0; TIMES]; OPTIONS], measured: [0; OPTIONS] }
    }
}

impl<const OPTIONS: usize, const TIMES: usize> Trials<OPTIONS, TIMES> {
    /// Trials in which `option` is chosen until another one is faster.
    pub(crate) fn starting_with(option: usize) -> Self {
        Self { chosen: option, ..Self::default() }
    }

    /// The chosen option.
    pub(crate) fn chosen(&self) -> usize {
        self.chosen
    }

    /// The number of times of an option so far.
    #[cfg(test)]
    pub(crate) fn measured(&self, option: usize) -> usize {
        self.measured[option]
    }

    /// Whether an option has too few times for a choice.
    pub(crate) fn is_open(&self, option: usize) -> bool {
        self.measured[option] < TIMES
    }

    /// Adds a time of an option, which replaces its oldest one.
    pub(crate) fn add(&mut self, option: usize, time: f32) {
        self.times[option][self.measured[option] % TIMES] = time;
        self.measured[option] += 1;
    }

    /// Forgets the times of an option, because something has changed that they depend on.
    pub(crate) fn forget(&mut self, option: usize) {
        self.measured[option] = 0;
    }

    /// The median of each option's newest times, or NaN before there are enough.
    pub(crate) fn medians(&self) -> [f32; OPTIONS] {
        std::array::from_fn(|option| match self.is_open(option) {
            true => f32::NAN,
            false => median(&self.times[option]).unwrap_or(f32::NAN),
        })
    }

    /// Chooses the option with the least of `medians` if it is less than `ratio` times the chosen option's; not if one of
    /// them is NaN. Returns whether the choice has changed.
    pub(crate) fn switch(&mut self, medians: [f32; OPTIONS], ratio: f32) -> bool {
        if medians.iter().any(|median| median.is_nan()) {
            return false;
        }
        let best = (0..OPTIONS).min_by(|one, other| medians[*one].total_cmp(&medians[*other])).unwrap_or_default();
        let switches = medians[best] < ratio * medians[self.chosen];
        if switches {
            self.chosen = best;
        }
        switches
    }
}

/// The median, of an even number the greater one in the middle; `None` without times.
pub(crate) fn median(times: &[f32]) -> Option<f32> {
    let mut sorted = times.to_vec();
    sorted.sort_by(f32::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

/// Number `index` of a sequence that looks random (SplitMix64). Sequences of different seeds differ.
pub(crate) fn split_mix64(seed: u64, index: u64) -> u64 {
    let mut word = seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times each option `rounds` times, and chooses after each round.
    fn run(trials: &mut Trials<3, 3>, rounds: usize, times: [f32; 3]) -> usize {
        for _ in 0..rounds {
            times.iter().enumerate().for_each(|(option, time)| trials.add(option, *time));
            trials.switch(trials.medians(), 0.9);
        }
        trials.chosen()
    }

    #[test]
    fn the_fastest_option_is_chosen_once_half_of_the_times_are_new() {
        let mut trials = Trials::default();
        assert_eq!(run(&mut trials, 2, [3.0, 2.0, 1.0]), 0, "too few times");
        assert_eq!(run(&mut trials, 1, [3.0, 2.0, 1.0]), 2);
        assert_eq!(run(&mut trials, 1, [3.0, 2.0, 9.0]), 2, "one slow call");
        assert_eq!(run(&mut trials, 1, [3.0, 2.0, 9.0]), 1);
    }

    #[test]
    fn nearly_equal_options_change_nothing() {
        assert_eq!(run(&mut Trials::default(), 100, [1.0, 0.91, 0.95]), 0);
    }

    #[test]
    fn an_unknown_median_is_no_reason_to_switch() {
        let mut trials = Trials::<2, 3>::default();
        for medians in [[f32::NAN, 1.0], [1.0, f32::NAN], [1.0, -f32::NAN]] {
            assert!(!trials.switch(medians, 0.9));
        }
        assert!(trials.switch([2.0, 1.0], 0.9));
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[2.0, 9.0, 1.0]), Some(2.0));
    }

    #[test]
    fn the_sequence_is_the_published_one() {
        // The first numbers of SplitMix64 with seed 1234567 (Vigna's reference).
        assert_eq!(
            [1, 2].map(|index| split_mix64(1_234_567, index)),
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]
        );
    }
}
