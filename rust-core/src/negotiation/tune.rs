//! Finds the fastest fusion size while the job trains (`SMD_AUTOTUNE`).
//!
//! The root measures. Its answers carry the next size to try, so all members fuse the same operations. `search` chooses
//! the sizes; the best one stays.

use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::search::TuningSearch;
use crate::error::{Error, Result};

/// The suffix of the names of votes on rounds ([`crate::reducer::ballot`]), which are not measured.
pub(crate) const VOTE: &str = ".round";
/// The suffix of the names of requests to end a round.
pub(crate) const VOTE_END: &str = ".round.end";
/// A step ends at this number of names, in case names never repeat.
const MAX_NAMES_PER_STEP: usize = 1 << 16;
/// The smallest size to try, as a power of 2. Sizes are evenly spaced up to the largest one, with four in each octave.
const SMALLEST_POWER: f64 = 16.0;
const LARGEST_POWER: f64 = 27.0;
const NUM_SIZES: usize = 4 * (LARGEST_POWER - SMALLEST_POWER) as usize + 1;
/// The score of a size is the median of this many samples.
const SAMPLES: usize = 5;

/// Settings of autotuning, named as in `config`.
#[derive(Clone, Debug)]
pub struct FusionTuning {
    /// Samples to discard before the first one that counts.
    pub warmup_samples: u32,
    /// Steps in a sample. A step ends when one of its names comes again.
    pub steps_per_sample: u32,
    /// The number of sizes to try.
    pub max_samples: u32,
    /// The share of the scores' variance that is attributed to noise, from 0 to 1.
    pub noise: f64,
    /// Whether the user has set a size, which is then not changed.
    pub fixed: bool,
    /// The file that gets one line with comma-separated values for each trial.
    pub log: Option<PathBuf>,
}

/// One size that was tried, and its score.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Trial {
    pub(super) fusion_bytes: u64,
    /// Bytes reduced in a microsecond.
    pub(super) score: f64,
    /// Whether this is the best size and no more are tried.
    pub(super) is_last: bool,
}

/// Measures sizes at the root of the negotiation.
pub(super) struct Tuner {
    search: Option<TuningSearch>,
    /// The size that is being tried, as a place in the search.
    current: u64,
    place: usize,
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
    pub(super) fn new(tuning: &FusionTuning, fusion_bytes: u64) -> Self {
        let mut search =
            (!tuning.fixed).then(|| TuningSearch::new(NUM_SIZES, tuning.max_samples as usize, tuning.noise));
        let place = search.as_mut().and_then(TuningSearch::next);
        Self {
            search,
            current: place.map_or(fusion_bytes, size_at),
            place: place.unwrap_or(0),
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

    /// The first size, in bytes.
    pub(super) fn first(&self) -> u64 {
        self.current
    }

    /// Notes that the operation `name` runs. Returns finished trials and the next size, if the size changes.
    pub(super) fn ran(&mut self, name: &Arc<str>, bytes: u64, now: Duration) -> Option<(Vec<Trial>, u64)> {
        if name.ends_with(VOTE) || name.ends_with(VOTE_END) {
            return None;
        }
        if self.names.contains(name) || self.names.len() >= MAX_NAMES_PER_STEP {
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
        let next = self.search.as_mut().and_then(|search| {
            search.answer(self.place, trial.score);
            search.next()
        });
        match next {
            Some(place) => (self.place, self.current) = (place, size_at(place)),
            None => {
                trials.push(Trial { is_last: true, ..best });
                self.current = best.fusion_bytes;
            }
        }
        Some((trials, self.current))
    }
}

/// The size in bytes at a place of the search.
fn size_at(place: usize) -> u64 {
    let power = SMALLEST_POWER + (LARGEST_POWER - SMALLEST_POWER) * place as f64 / (NUM_SIZES - 1) as f64;
    power.exp2().round() as u64
}

/// The log file of trials, with Horovod's columns. Columns for parameters that this library lacks are constant.
pub(super) struct Log(File);

impl Log {
    pub(super) fn create(path: &Path) -> Result<Self> {
        let mut file =
            File::create(path).map_err(|error| Error::io(format!("creating `{}`", path.display()), error))?;
        let columns = "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,\
                       tensor_fusion_threshold,score";
        // An error while writing the log does not end the job.
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

    /// Runs steps of two names, whose time depends on the size. Returns the sizes that were tried, and the last trial.
    fn tuned(tuning: &FusionTuning, micros: impl Fn(u64) -> u64) -> (Vec<u64>, Trial) {
        let names: [Arc<str>; 2] = ["a".into(), "b".into()];
        let mut tuner = Tuner::new(tuning, 3 << 20);
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

    fn tuning(max_samples: u32, fixed: bool) -> FusionTuning {
        FusionTuning { warmup_samples: 3, steps_per_sample: 2, max_samples, noise: 0.8, fixed, log: None }
    }

    #[test]
    fn the_fastest_size_stays() {
        // The best size is 4 MiB; one octave above or below costs a tenth more.
        let micros = |size: u64| (1000.0 * (1.0 + 0.1 * ((size as f64).log2() - 22.0).abs())) as u64;
        let (tried, last) = tuned(&tuning(20, false), micros);
        assert_eq!(tried.len(), 20);
        assert_eq!(tried[..2], [1 << 27, 1 << 16]);
        assert!(((last.fusion_bytes as f64).log2() - 22.0).abs() <= 0.5, "{tried:?}, {last:?}");
        assert!(last.is_last);
    }

    #[test]
    fn a_requested_fusion_size_is_not_changed() {
        let (tried, last) = tuned(&tuning(20, true), |_| 50);
        assert_eq!((tried, last.fusion_bytes), (vec![3 << 20], 3 << 20));
    }
}
