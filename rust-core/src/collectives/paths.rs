//! Chooses by measurement how the bytes of a large call get from one member to another.
//!
//! Note "paths". Through shared memory, a sender copies its bytes there and a receiver reads them. Directly, a receiver
//! reads the sender's own memory by a system call ([`crate::transport::shm::member_memory`]). That saves a copy, and the
//! stores to lines that a peer has read. But the system looks up each page, and members wait for each other once more.
//! Which one is faster depends on the processor, on the cores of the members, on the size and on the kernel.
//!
//! So some calls are trials of the other path. Each member times its calls, without the wait in which members meet, and
//! publishes its times with its next call of this kind. Members choose by the slowest one's time. A call leaves lines in
//! the caches of different members, depending on its path, and so slows down or speeds up the next one. Therefore two
//! calls in a row are a trial, and after each change of the path only the second call's time counts.
//!
//! - PATH-1: the path of a call depends on the number of calls of its class so far and on published times, which are equal
//!   on all members. It changes no value.
//! - PATH-2: there are no trials before all pages of the shared memory were touched, because a first access takes longer.
//!   While a member has not chosen the stores for its results, on which the time through shared memory depends, every
//!   second block of calls takes that path, so that it finds them ([`super::result_stores`]).
//! - PATH-3: a call in which a member's memory cannot be read runs through shared memory on all members, after it has
//!   tried to run directly, and counts as a direct one.

use std::collections::HashMap;

use parking_lot::Mutex;

use super::call::Kind;
use crate::trials::{Trials, split_mix64};

/// How bytes get from one member to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// The sender copies them to shared memory, and the receiver reads them there.
    Shared,
    /// The receiver reads the sender's memory.
    Direct,
}

impl Path {
    const ALL: [Path; 2] = [Path::Shared, Path::Direct];
}

/// Smaller calls use shared memory: their time is that of the synchronisation.
const TIMED_BYTES: usize = 64 << 10;
/// Times that are kept of each path.
const TIMES: usize = 3;
/// Calls in a row that take the path of a trial.
const TRIAL_CALLS: u64 = 2;
/// The calls of the first trial, in a row.
const FIRST_TRIAL_CALLS: u64 = TIMES as u64 + 1;
/// The calls of a block in which one path is taken (PATH-2).
const BLOCK_CALLS: u64 = 8;
/// Afterwards, trials cost this part of the time, but are about this many calls apart at least and at most. So a change
/// between paths that are nearly equal is followed within 50 calls.
const TRIAL_COST: f32 = 1.0 / 64.0;
const TRIAL_INTERVALS: (u64, u64) = (16, 128);
/// The other path is chosen if it needs less than this part of the time.
const WORTHWHILE: f32 = 0.9;

/// A class of calls that share their choice: of one kind, and each size up to twice as large as the one before.
pub(crate) type PathClass = (Kind, u32);

/// The choices of a group.
#[derive(Debug, Default)]
pub(crate) struct PathChooser {
    classes: Mutex<HashMap<PathClass, PathTrials>>,
    /// The path of all calls, in tests.
    only: Option<Path>,
}

/// The path of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathTurn {
    pub(crate) class: PathClass,
    pub(crate) path: Path,
    /// Whether its time counts.
    is_timed: bool,
}

#[derive(Clone, Copy, Debug)]
struct PathTrials {
    calls: u64,
    /// The first call of the next trial, or of the present one.
    trial: u64,
    /// The path of the last call.
    last: Option<Path>,
    /// This member's times of [`Path::ALL`], in seconds for each byte, and the common choice.
    trials: Trials<2, TIMES>,
    /// The slowest members' medians, as last published.
    slowest: [f32; 2],
    /// What this member knows about calls through shared memory (PATH-2), and what the least informed member knows.
    own: SharedTime,
    least: SharedTime,
}

/// What is known about the time of calls through shared memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SharedTime {
    /// Nothing: pages are touched for the first time.
    #[default]
    Unknown,
    /// The present time; it may become less when the stores for results are chosen.
    Present,
    /// The time that such calls will take.
    Steady,
}

impl Default for PathTrials {
    fn default() -> Self {
        let (own, least) = Default::default();
        Self { calls: 0, trial: 0, last: None, trials: Trials::default(), slowest: [f32::NAN; 2], own, least }
    }
}

impl PathTrials {
    /// Counts a call; returns its path, and whether its time counts.
    fn next(&mut self) -> (Path, bool) {
        let call = self.calls;
        self.calls += 1;
        let path = self.path(call);
        let is_timed = self.last.replace(path) == Some(path);
        (path, is_timed)
    }

    fn path(&mut self, call: u64) -> Path {
        let chosen = self.trials.chosen();
        let [shared, direct] = self.slowest;
        if shared.is_nan() && Path::ALL[chosen] == Path::Shared {
            self.trial = call + 1;
            return Path::Shared;
        }
        if direct.is_nan() && call < self.trial + FIRST_TRIAL_CALLS {
            return Path::Direct;
        }
        if Path::ALL[chosen] == Path::Direct && self.least < SharedTime::Steady {
            self.trial = call + 1;
            return Path::ALL[(call / BLOCK_CALLS % 2) as usize];
        }
        if call < self.trial {
            return Path::ALL[chosen];
        }
        if call + 1 >= self.trial + TRIAL_CALLS {
            // NaN, after Shared was forgotten, becomes 0.
            let excess = TRIAL_CALLS as f32 * (self.slowest[1 - chosen] / self.slowest[chosen] - 1.0);
            let interval = ((excess / TRIAL_COST) as u64).clamp(TRIAL_INTERVALS.0, TRIAL_INTERVALS.1);
            // At random, because calls may repeat in a cycle, as in a training step.
            self.trial = call + 1 + interval / 2 + split_mix64(0, call) % interval;
        }
        Path::ALL[1 - chosen]
    }
}

impl PathChooser {
    /// The class of calls in which a member sends or gets `bytes` bytes; `None` for calls that use shared memory.
    pub(crate) fn class(kind: Kind, bytes: usize) -> Option<PathClass> {
        Some((kind, (bytes / TIMED_BYTES).checked_ilog2()?))
    }

    /// All calls take one path.
    #[cfg(test)]
    pub(crate) fn only(path: Path) -> Self {
        Self { only: Some(path), ..Self::default() }
    }

    /// Begins a call. All members call it with equal arguments.
    pub(crate) fn begin(&self, class: PathClass) -> PathTurn {
        if let Some(path) = self.only {
            return PathTurn { class, path, is_timed: false };
        }
        let (path, is_timed) = self.classes.lock().entry(class).or_default().next();
        PathTurn { class, path, is_timed }
    }

    /// This member's times, to be published with a call: a word for the path through shared memory, and one for the other.
    pub(crate) fn times(&self, class: PathClass) -> u64 {
        let mut classes = self.classes.lock();
        let of_class = classes.entry(class).or_default();
        let [shared, direct] = of_class.trials.medians();
        let shared = match of_class.own {
            SharedTime::Unknown => f32::NAN,
            SharedTime::Present => -shared,
            SharedTime::Steady => shared,
        };
        u64::from(direct.to_bits()) << 32 | u64::from(shared.to_bits())
    }

    /// Chooses by what all members have published with a call.
    pub(crate) fn choose(&self, class: PathClass, times: impl Iterator<Item = u64>) {
        // NaN if one of the times is.
        let slower = |one: f32, other: f32| if one.is_nan() || one > other { one } else { other };
        let (mut slowest, mut least) = ([0.0; 2], SharedTime::Steady);
        for word in times {
            let [shared, direct] = [f32::from_bits(word as u32), f32::from_bits((word >> 32) as u32)];
            slowest = [slower(slowest[0], shared.abs()), slower(slowest[1], direct)];
            if shared < 0.0 {
                least = SharedTime::Present;
            }
        }
        let mut classes = self.classes.lock();
        let trials = classes.entry(class).or_default();
        (trials.slowest, trials.least) = (slowest, least);
        if trials.trials.switch(slowest, WORTHWHILE) {
            let path = Path::ALL[trials.trials.chosen()];
            tracing::debug!(?path, ?class, ?slowest, "calls take another path");
        }
    }

    /// Ends a call that took `seconds`, for `bytes` bytes. `shared`: what this member knows about the other calls.
    pub(crate) fn add(&self, turn: PathTurn, seconds: f32, bytes: usize, shared: SharedTime) {
        let mut classes = self.classes.lock();
        let of_class = classes.entry(turn.class).or_default();
        if shared > of_class.own {
            of_class.trials.forget(Path::Shared as usize);
            of_class.own = shared;
        }
        if turn.is_timed {
            of_class.trials.add(turn.path as usize, seconds / bytes.max(1) as f32);
        }
    }

    /// The present choice for a class of calls.
    #[cfg(test)]
    pub(crate) fn chosen(&self, class: PathClass) -> Path {
        Path::ALL[self.classes.lock().get(&class).map_or(0, |trials| trials.trials.chosen())]
    }

    /// Begins again: after calls that differ, members may have counted differently (PATH-1).
    pub(crate) fn reset(&self) {
        self.classes.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLASS: PathClass = (Kind::AllReduce, 4);

    /// Calls of two members in which each path needs the given seconds; returns the number of calls of each path.
    fn run(choosers: &[PathChooser; 2], calls: usize, seconds: impl Fn(usize, Path) -> f32) -> [usize; 2] {
        run_knowing(choosers, calls, [SharedTime::Steady; 2], seconds)
    }

    fn run_knowing(
        choosers: &[PathChooser; 2],
        calls: usize,
        known: [SharedTime; 2],
        seconds: impl Fn(usize, Path) -> f32,
    ) -> [usize; 2] {
        let mut made = [0; 2];
        for _ in 0..calls {
            let turns = choosers.each_ref().map(|chooser| chooser.begin(CLASS));
            assert_eq!(turns[0].path, turns[1].path);
            let times = choosers.each_ref().map(|chooser| chooser.times(CLASS));
            for (member, chooser) in choosers.iter().enumerate() {
                chooser.choose(CLASS, times.into_iter());
                chooser.add(turns[member], seconds(member, turns[member].path), 1 << 20, known[member]);
            }
            made[turns[0].path as usize] += 1;
        }
        made
    }

    #[test]
    fn a_change_is_followed_within_fifty_calls() {
        let choosers = Default::default();
        for (times, chosen) in [([1.0, 0.8], Path::Direct), ([1.0, 1.2], Path::Shared), ([1.5, 1.2], Path::Direct)] {
            run(&choosers, 50, |_, path| times[path as usize]);
            assert_eq!(choosers.each_ref().map(|chooser| chooser.chosen(CLASS)), [chosen; 2]);
        }
    }

    #[test]
    fn the_slowest_member_counts_and_nearly_equal_paths_change_nothing() {
        let choosers = Default::default();
        run(&choosers, 200, |member, path| if path == Path::Direct { [0.5, 1.5][member] } else { 1.0 });
        assert_eq!(choosers[0].chosen(CLASS), Path::Shared);
        run(&choosers, 200, |_, path| if path == Path::Direct { 0.95 } else { 1.0 });
        assert_eq!(choosers[0].chosen(CLASS), Path::Shared);
    }

    #[test]
    fn trials_of_a_clearly_slower_path_are_rare() {
        let made = run(&Default::default(), 10_000, |_, path| if path == Path::Direct { 5.0 } else { 1.0 });
        assert!((120..190).contains(&made[Path::Direct as usize]), "{made:?}");
        let made = run(&Default::default(), 10_000, |_, _| 1.0);
        assert!((1000..1300).contains(&made[Path::Direct as usize]), "{made:?}");
    }

    #[test]
    fn shared_memory_gets_calls_until_its_stores_are_chosen() {
        let choosers = Default::default();
        let unknown = [SharedTime::Steady, SharedTime::Unknown];
        assert_eq!(run_knowing(&choosers, 50, unknown, |_, path| [2.0, 1.0][path as usize]), [50, 0]);
        let present = [SharedTime::Steady, SharedTime::Present];
        let made = run_knowing(&choosers, 100, present, |_, path| [2.0, 1.0][path as usize]);
        assert!(made.iter().all(|made| (40..60).contains(made)), "{made:?}");
        let made = run(&choosers, 100, |_, path| [2.0, 1.0][path as usize]);
        assert!(made[Path::Direct as usize] > 80, "{made:?}");
        // Not while the other path is slower.
        let made = run_knowing(&Default::default(), 100, present, |_, path| [1.0, 2.0][path as usize]);
        assert!(made[Path::Shared as usize] > 85, "{made:?}");
    }

    #[test]
    fn small_calls_have_no_class() {
        assert_eq!(PathChooser::class(Kind::AllReduce, TIMED_BYTES - 1), None);
        assert_eq!(PathChooser::class(Kind::AllReduce, TIMED_BYTES), Some((Kind::AllReduce, 0)));
        assert_eq!(PathChooser::class(Kind::Broadcast, 1 << 20), Some((Kind::Broadcast, 4)));
    }
}
