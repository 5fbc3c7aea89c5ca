//! Which size of what runs together is fastest, tried out while the job trains (`SMD_AUTOTUNE`).
//!
//! The root measures, and its answers tell all members the size that is tried next, so all run the same operations. A few
//! sizes cover the range, so each is tried; the best stays.

use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};

const MIB: u64 = 1 << 20;
/// What names of votes on rounds of gradients end in ([`crate::reducer::ballot`]): they say nothing of sizes.
pub(crate) const VOTE: &str = ".round";
/// What the ends of these rounds are asked for by.
pub(crate) const VOTE_END: &str = ".round.end";
/// A step has no more names than this, which may be new ones for ever.
const MOST_NAMES: usize = 1 << 16;
/// What is tried.
const SIZES: [u64; 9] = [0, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB];
/// The median of so many samples is a size's score.
const SAMPLES: usize = 5;

/// How a negotiation tries sizes; see the knobs of the same names.
#[derive(Clone, Debug)]
pub struct Tuning {
    /// Samples before the first that counts.
    pub warmup_samples: u32,
    /// Steps of a sample. A step is over when one of its names comes again.
    pub steps_per_sample: u32,
    /// The size that was asked for, which stays.
    pub fixed: bool,
    /// What was tried, as lines with commas.
    pub log: Option<PathBuf>,
}

/// A size and its score.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Trial {
    pub(super) fusion_bytes: u64,
    /// Bytes that were reduced in a microsecond.
    pub(super) score: f64,
    /// Nothing is better, and nothing more is tried.
    pub(super) is_last: bool,
}

/// The root's measurements.
pub(super) struct Tuner {
    /// Sizes to try after the current one, the next last.
    left: Vec<u64>,
    current: u64,
    warmup_left: u32,
    steps_per_sample: u32,
    names: HashSet<Arc<str>>,
    steps: u32,
    bytes: u64,
    since: Option<Duration>,
    scores: Vec<f64>,
    best: Option<Trial>,
}

impl Tuner {
    pub(super) fn new(tuning: &Tuning, fusion_bytes: u64) -> Self {
        let mut left: Vec<u64> = SIZES.into_iter().rev().filter(|_| !tuning.fixed).collect();
        let current = left.pop().unwrap_or(fusion_bytes);
        Self {
            left,
            current,
            warmup_left: tuning.warmup_samples,
            steps_per_sample: tuning.steps_per_sample.max(1),
            names: HashSet::new(),
            steps: 0,
            bytes: 0,
            since: None,
            scores: Vec::new(),
            best: None,
        }
    }

    /// The size to begin with.
    pub(super) fn first(&self) -> u64 {
        self.current
    }

    /// A name is going to run. What was found out by that, and the size from the next answer on.
    pub(super) fn ran(&mut self, name: &Arc<str>, bytes: u64, now: Duration) -> Option<(Vec<Trial>, u64)> {
        if name.ends_with(VOTE) || name.ends_with(VOTE_END) {
            return None;
        }
        if self.names.contains(name) || self.names.len() >= MOST_NAMES {
            self.names.clear();
            self.steps += 1;
        }
        let ended = if self.steps >= self.steps_per_sample { self.end_sample(now) } else { None };
        self.names.insert(name.clone());
        self.since.get_or_insert(now);
        self.bytes += bytes;
        ended
    }

    fn end_sample(&mut self, now: Duration) -> Option<(Vec<Trial>, u64)> {
        let time = now.saturating_sub(self.since.take().unwrap_or(now)).as_secs_f64() * 1e6;
        let score = std::mem::take(&mut self.bytes) as f64 / time.max(1e-3);
        self.steps = 0;
        if self.warmup_left > 0 {
            self.warmup_left -= 1;
            return None;
        }
        self.scores.push(score);
        if self.scores.len() < SAMPLES {
            return None;
        }
        self.scores.sort_by(f64::total_cmp);
        let trial = Trial { fusion_bytes: self.current, score: self.scores[SAMPLES / 2], is_last: false };
        self.scores.clear();
        let best = *self.best.get_or_insert(trial);
        let best = if trial.score > best.score { trial } else { best };
        self.best = Some(best);
        let mut trials = vec![trial];
        self.current = self.left.pop().unwrap_or_else(|| {
            trials.push(Trial { is_last: true, ..best });
            best.fusion_bytes
        });
        Some((trials, self.current))
    }
}

/// The file with what was tried, in the columns of Horovod's: those that nothing here corresponds to do not change.
pub(super) struct Log(File);

impl Log {
    pub(super) fn create(path: &Path) -> Result<Self> {
        let mut file =
            File::create(path).map_err(|error| Error::io(format!("creating `{}`", path.display()), error))?;
        let columns = "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,\
                       tensor_fusion_threshold,score";
        // What cannot be written is no reason to end a job.
        let _ = writeln!(file, "{columns}");
        Ok(Self(file))
    }

    pub(super) fn write(&mut self, trial: &Trial, cache_enabled: bool) {
        let _ = writeln!(self.0, "0,0,0,{},0,{},{}", u8::from(cache_enabled), trial.fusion_bytes, trial.score);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs steps of two names, whose time follows from the size; returns the sizes that were tried, and the last trial.
    fn tuned(tuning: &Tuning, micros: impl Fn(u64) -> u64) -> (Vec<u64>, Trial) {
        let names: [Arc<str>; 2] = ["a".into(), "b".into()];
        let mut tuner = Tuner::new(tuning, 3 * MIB);
        let (mut size, mut now, mut tried) = (tuner.first(), Duration::ZERO, Vec::new());
        for _ in 0..10_000 {
            for name in &names {
                if let Some((trials, next)) = tuner.ran(name, 1000, now) {
                    tried.extend(trials.iter().filter(|trial| !trial.is_last).map(|trial| trial.fusion_bytes));
                    size = next;
                    if let Some(last) = trials.into_iter().find(|trial| trial.is_last) {
                        return (tried, last);
                    }
                }
            }
            now += Duration::from_micros(micros(size));
        }
        panic!("it never ends: {tried:?}");
    }

    #[test]
    fn the_fastest_size_stays() {
        let tuning = Tuning { warmup_samples: 3, steps_per_sample: 2, fixed: false, log: None };
        let (tried, last) = tuned(&tuning, |size| if size == 4 * MIB { 100 } else { 200 });
        assert_eq!(tried, SIZES);
        assert_eq!(last, Trial { fusion_bytes: 4 * MIB, score: 20.0, is_last: true });
    }

    #[test]
    fn what_was_asked_for_stays() {
        let tuning = Tuning { warmup_samples: 0, steps_per_sample: 1, fixed: true, log: None };
        let (tried, last) = tuned(&tuning, |_| 50);
        assert_eq!((tried, last.fusion_bytes), (vec![3 * MIB], 3 * MIB));
    }
}
