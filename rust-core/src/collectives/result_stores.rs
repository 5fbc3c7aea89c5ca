//! Chooses by measurement whether a member writes its own results with ordinary or with streaming stores.
//!
//! Note "results". An ordinary store reads the line of the result from memory before it overwrites a part of it, and
//! leaves it in the cache for the next reader. A streaming store does neither, and it does not displace other lines. So
//! results that fit into the caches should be written with ordinary stores, and larger ones with streaming stores, which
//! save a third of the memory traffic of a copy. Which results fit depends on the processor, on the number of members
//! that share a cache, on the operation and on what else runs.
//!
//! So some calls are trials. A trial writes all results of the call with one kind, and its time has two parts:
//!
//! - The time of the whole call without its waits. The time of the copies alone would not do: lines that ordinary stores
//!   leave in the cache are written to memory by later copies, and displace what the next chunk needs.
//! - The time of the next access: after the call, the member reads some pages of the result, spread over it, and counts
//!   half of the time that reading all of it would take. Without this part, streaming stores look best for results that
//!   the caller reads from the cache otherwise. Half, because a caller may read the result much later, when other work
//!   has displaced it.
//!
//! Trials come in pairs of neighbouring calls, one of each kind, so that a change of the machine's load meets both. Until
//! there are enough, the size of the cache decides.
//!
//! - RESULT-1: the results are this member's own memory. The choice changes no value and no synchronisation, so each
//!   member has its own.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::call::Kind;
use super::stores::Stores;
use crate::buffer::TensorView;
use crate::bulk_copy;
use crate::trials::{Trials, split_mix64};

/// Smaller results are written with ordinary stores: they stay in the second-level cache or in the one behind it, and the
/// trials of a call that short cost more than they find.
const TIMED_BYTES: usize = 1 << 20;
/// Times that are kept of each kind.
const TIMES: usize = 5;
/// One pair of trials in so many calls: a change is followed within three pairs, and a short job loses little by them.
const CALLS_PER_PAIR: u64 = 16;
/// As above while the other kind is clearly slower, so that trials cost little: they also displace lines of the next call.
const CALLS_PER_COSTLY_PAIR: u64 = 128;
/// The other kind is clearly slower if it needs this much more time.
const COSTLY: f32 = 1.2;
/// The other kind is chosen if it needs less than this part of the time.
const WORTHWHILE: f32 = 0.9;
/// The part of a result whose reading is timed, in pages; at least 8, and at most 64.
const SAMPLED_PART: usize = 64;
const PAGE_BYTES: usize = 4096;
/// The part of the time of the next access that counts.
const NEXT_ACCESS: f32 = 0.5;
/// At first, results are written with streaming stores if they are larger than this part of the last-level cache, because
/// other members and the inputs need the rest of it.
const CACHE_PART: usize = 4;
/// The size of the last-level cache, if the system does not know it.
const USUAL_CACHE_BYTES: usize = 32 << 20;

/// The choices of one member in a group, or of another writer of results. Calls of one kind and of similar size share
/// their choice.
#[derive(Debug, Default)]
pub(crate) struct ResultStores {
    classes: Mutex<HashMap<(Option<Kind>, u32), PairedTrials>>,
}

/// The trials of one class of calls.
#[derive(Clone, Copy, Debug)]
struct PairedTrials {
    trials: Trials<2, TIMES>,
    calls: u64,
    /// The call at which the next pair may begin, and the call at which it begins.
    pair_from: u64,
    pair: u64,
}

impl PairedTrials {
    fn starting_with(stores: Stores) -> Self {
        Self { trials: Trials::starting_with(stores as usize), calls: 0, pair_from: 0, pair: 0 }
    }

    /// Counts a call; returns its kind of stores, and whether it is a trial.
    fn next(&mut self) -> (Stores, bool) {
        let call = self.calls;
        self.calls += 1;
        if call == self.pair + 2 || call == 0 {
            self.plan_pair(call);
        }
        // The kinds begin a pair at random, because calls may repeat in a cycle, as in a training step.
        match call.checked_sub(self.pair) {
            Some(place) => (Stores::ALL[(place ^ split_mix64(1, self.pair) & 1) as usize], true),
            None => (Stores::ALL[self.trials.chosen()], false),
        }
    }

    /// Plans the next pair of trials, at a random place of the next calls.
    fn plan_pair(&mut self, call: u64) {
        let medians = self.trials.medians();
        let chosen = self.trials.chosen();
        // Not if one is NaN.
        let is_costly = medians[1 - chosen] > COSTLY * medians[chosen];
        let every = if is_costly { CALLS_PER_COSTLY_PAIR } else { CALLS_PER_PAIR };
        self.pair = call.max(self.pair_from) + split_mix64(0, call) % (every - 2);
        self.pair_from = call.max(self.pair_from) + every;
    }

    fn add(&mut self, stores: Stores, time: f32) {
        self.trials.add(stores as usize, time);
        let medians = self.trials.medians();
        if self.trials.switch(medians, WORTHWHILE) {
            tracing::debug!(stores = ?Stores::ALL[self.trials.chosen()], ?medians, "results are written with other stores");
        }
    }
}

/// The class of results of `bytes` bytes; `None` for results that are not timed. Each class has results up to 4 times as
/// large as the one before.
fn size_class(bytes: usize) -> Option<u32> {
    Some((bytes / TIMED_BYTES).checked_ilog2()? / 2)
}

/// The size of the last-level cache.
fn cache_bytes() -> usize {
    static CACHE_BYTES: OnceLock<usize> = OnceLock::new();
    *CACHE_BYTES.get_or_init(|| {
        // Not `sysconf`, which adds the caches of all cores of the host.
        let size = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size").unwrap_or_default();
        size.trim().strip_suffix('K').and_then(|kib| kib.parse().ok()).map_or(USUAL_CACHE_BYTES, |kib: usize| kib << 10)
    })
}

/// The kind for results of `bytes` bytes before there are measurements.
fn first_guess(bytes: usize, cache_bytes: usize) -> Stores {
    if bytes >= cache_bytes / CACHE_PART { Stores::Streaming } else { Stores::Ordinary }
}

impl ResultStores {
    /// Begins a call of `kind` in which this member writes `bytes` bytes of results. `kind` is `None` for a writer of
    /// only one kind.
    pub(crate) fn begin(&self, kind: Option<Kind>, bytes: usize) -> ResultWriter<'_> {
        let mut writer = ResultWriter { chooser: self, key: (kind, 0), bytes, stores: Stores::Ordinary, trial: None };
        if let Some(class) = size_class(bytes).filter(|_| bulk_copy::HAS_STREAMING_STORES) {
            writer.key = (kind, class);
            let (stores, is_trial) = self
                .classes
                .lock()
                .entry(writer.key)
                .or_insert_with(|| PairedTrials::starting_with(first_guess(bytes, cache_bytes())))
                .next();
            writer.stores = stores;
            writer.trial = is_trial.then(|| ResultTrial { since: Instant::now(), waited: Cell::default() });
        }
        writer
    }
}

impl ResultStores {
    /// Whether the kind of stores is chosen for calls of `kind` with so many bytes, or such calls have no choice.
    pub(crate) fn are_chosen(&self, kind: Kind, bytes: usize) -> bool {
        let Some(class) = size_class(bytes) else { return true };
        let classes = self.classes.lock();
        // After some more pairs than a choice needs.
        classes.get(&(Some(kind), class)).is_none_or(|of_class| of_class.calls >= (TIMES as u64 + 2) * CALLS_PER_PAIR)
    }
}

/// Writes the results of one call.
pub(crate) struct ResultWriter<'a> {
    chooser: &'a ResultStores,
    key: (Option<Kind>, u32),
    bytes: usize,
    stores: Stores,
    trial: Option<ResultTrial>,
}

struct ResultTrial {
    since: Instant,
    waited: Cell<Duration>,
}

impl ResultWriter<'_> {
    /// Copies `bytes` bytes of a result. `from` and `to` are equal or do not overlap.
    ///
    /// # Safety
    /// `from` is valid for reads and `to` for writes of `bytes` bytes.
    pub(crate) unsafe fn copy(&self, from: *const u8, to: *mut u8, bytes: usize) {
        if bytes == 0 || from == to.cast_const() {
            return;
        }
        // SAFETY: the caller promises validity, and that different places do not overlap.
        unsafe {
            match self.stores {
                Stores::Ordinary => bulk_copy::ordinary(from, to, bytes),
                Stores::Streaming => bulk_copy::streaming(from, to, bytes),
            }
        }
    }

    /// Runs a part of the call that waits for other members, and whose time therefore does not count.
    pub(crate) fn wait<T>(&self, wait: impl FnOnce() -> T) -> T {
        let Some(trial) = &self.trial else { return wait() };
        let start = Instant::now();
        let outcome = wait();
        trial.waited.set(trial.waited.get() + start.elapsed());
        outcome
    }

    /// Ends a call that has succeeded and has written `results`.
    pub(crate) fn finish<'t>(self, results: impl Iterator<Item = &'t TensorView> + Clone) {
        let pages = self.sampled_pages().div_ceil(results.clone().count().max(1));
        // SAFETY: the results are tensors of the call.
        self.finish_reading(|| results.map(|result| unsafe { read_pages(result.ptr(), result.bytes(), pages) }).sum());
    }

    /// Ends a copy of `bytes` bytes to `result`.
    ///
    /// # Safety
    /// The bytes are valid for reads.
    pub(crate) unsafe fn finish_copy(self, result: *const u8, bytes: usize) {
        let pages = self.sampled_pages();
        // SAFETY: the caller's promise.
        self.finish_reading(|| unsafe { read_pages(result, bytes, pages) });
    }

    fn sampled_pages(&self) -> usize {
        (self.bytes / SAMPLED_PART / PAGE_BYTES).clamp(8, 64)
    }

    /// `read` reads a sample of the result, and returns its number of bytes.
    fn finish_reading(self, read: impl FnOnce() -> usize) {
        let Some(trial) = &self.trial else { return };
        let worked = trial.since.elapsed().saturating_sub(trial.waited.get());
        let start = Instant::now();
        let read = read();
        let next_access = start.elapsed().as_secs_f32() / read.max(1) as f32;
        let time = worked.as_secs_f32() / self.bytes.max(1) as f32 + NEXT_ACCESS * next_access;
        if let Some(trials) = self.chooser.classes.lock().get_mut(&self.key) {
            trials.add(self.stores, time);
        }
    }
}

/// Reads up to `pages` pages that are spread over `bytes` bytes, one word of each line; returns the number of bytes.
///
/// # Safety
/// The bytes are valid for reads.
unsafe fn read_pages(from: *const u8, bytes: usize, pages: usize) -> usize {
    let distance = (bytes / pages).max(PAGE_BYTES);
    let mut read = 0;
    for page in (0..bytes.saturating_sub(PAGE_BYTES)).step_by(distance).take(pages) {
        for line in (page..page + PAGE_BYTES).step_by(64) {
            // SAFETY: inside the range. Volatile, because the value is not used.
            unsafe { from.add(line).read_volatile() };
        }
        read += PAGE_BYTES;
    }
    read
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::{DType, Device};

    /// Makes calls in which each kind needs the given time, `disturbed(call)` times as long; returns the number of calls
    /// of each kind.
    fn run(trials: &mut PairedTrials, calls: u64, times: [f32; 2], disturbed: impl Fn(u64) -> f32) -> [usize; 2] {
        let mut made = [0; 2];
        for call in 0..calls {
            let (stores, is_trial) = trials.next();
            made[stores as usize] += 1;
            if is_trial {
                trials.add(stores, times[stores as usize] * disturbed(call));
            }
        }
        made
    }

    fn ordinary_first() -> PairedTrials {
        PairedTrials::starting_with(Stores::Ordinary)
    }

    fn chosen(trials: &PairedTrials) -> Stores {
        Stores::ALL[trials.trials.chosen()]
    }

    #[test]
    fn the_faster_kind_is_chosen_and_a_change_is_followed_within_fifty_calls() {
        let mut trials = ordinary_first();
        run(&mut trials, TIMES as u64 * CALLS_PER_PAIR, [1.15, 1.0], |_| 1.0);
        assert_eq!(chosen(&trials), Stores::Streaming);
        for (times, wanted) in [([1.0, 1.19], Stores::Ordinary), ([2.0, 1.0], Stores::Streaming)] {
            // The first of these calls may be anywhere between two trials.
            run(&mut trials, 50, times, |_| 1.0);
            assert_eq!(chosen(&trials), wanted);
        }
        // Trials were rare because the kinds differed much.
        run(&mut trials, 4 * CALLS_PER_COSTLY_PAIR, [1.0, 3.0], |_| 1.0);
        assert_eq!(chosen(&trials), Stores::Ordinary);
    }

    #[test]
    fn nearly_equal_times_and_single_slow_calls_change_nothing() {
        let mut trials = ordinary_first();
        run(&mut trials, 1000, [1.0, 0.95], |_| 1.0);
        assert_eq!(chosen(&trials), Stores::Ordinary);
        for slow in 0..200 {
            run(&mut trials, 200, [1.0, 1.0], |call| if call == slow { 50.0 } else { 1.0 });
            assert_eq!(chosen(&trials), Stores::Ordinary);
        }
    }

    #[test]
    fn trials_are_rare_after_the_first_ones_and_rarer_if_they_are_costly() {
        for (slower, limit) in [(1.1, 1000 / CALLS_PER_PAIR), (2.0, 1000 / CALLS_PER_COSTLY_PAIR)] {
            let mut trials = ordinary_first();
            let made = run(&mut trials, 1000, [1.0, slower], |_| 1.0);
            assert!((limit as usize - 2..limit as usize + TIMES + 3).contains(&made[1]), "{made:?}, not {limit}");
        }
    }

    #[test]
    fn calls_that_repeat_in_a_cycle_do_not_change_the_choice() {
        // The time depends on the place in a step, and not on the kind.
        for cycle in 2..40 {
            let mut trials = ordinary_first();
            run(&mut trials, 4000, [1.0; 2], |call| 1.0 + 0.09 * (call % cycle) as f32 / cycle as f32);
            assert_eq!(chosen(&trials), Stores::Ordinary, "{cycle}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn waits_do_not_count_and_small_results_are_not_timed() {
        let chooser = ResultStores::default();
        let mut result = vec![1u8; 1 << 20];
        // SAFETY: the memory lives until the end of the test.
        let view = unsafe { TensorView::new(result.as_mut_ptr(), 1 << 20, DType::UInt8, Device::Cpu, 0) }.unwrap();
        chooser.begin(Some(Kind::Reduce), TIMED_BYTES - 1).finish([view].iter());
        assert!(chooser.classes.lock().is_empty());
        if !bulk_copy::HAS_STREAMING_STORES {
            return;
        }
        for _ in 0..TIMES as u64 * CALLS_PER_PAIR {
            let writer = chooser.begin(Some(Kind::Reduce), 1 << 20);
            writer.wait(|| std::thread::sleep(Duration::from_millis(10)));
            writer.finish([view].iter());
        }
        let medians = chooser.classes.lock()[&(Some(Kind::Reduce), 0)].trials.medians();
        assert!(medians.iter().all(|time| *time * ((1 << 20) as f32) < 0.008), "{medians:?}");
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn copies_are_exact_with_both_kinds_and_sampled_pages_lie_inside() {
        let source: Vec<u8> = (0..TIMED_BYTES + 100).map(|at| (at % 251) as u8).collect();
        let chooser = ResultStores::default();
        for _ in 0..4 {
            let mut target = vec![0u8; source.len() + 1];
            let writer = chooser.begin(None, source.len());
            // SAFETY: both ranges lie inside the vectors; the second copy has one place only.
            unsafe {
                writer.copy(source.as_ptr(), target.as_mut_ptr().add(1), source.len());
                let same = target.as_mut_ptr();
                writer.copy(same, same, target.len());
            }
            assert_eq!(target[1..], source);
        }
        for (bytes, pages, read) in [(0, 8, 0), (4096, 8, 0), (5000, 8, 1), (100 << 10, 8, 8), (100 << 10, 1, 1)] {
            // SAFETY: shorter than the source.
            assert_eq!(unsafe { read_pages(source.as_ptr(), bytes, pages) }, read * PAGE_BYTES);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn results_larger_than_the_cache_are_streamed_at_first() {
        let guesses = [(8 << 20) - 1, 8 << 20].map(|bytes| first_guess(bytes, 32 << 20));
        assert_eq!(guesses, [Stores::Ordinary, Stores::Streaming]);
        assert!(cache_bytes() > 0);
    }

    #[test]
    fn classes_have_results_of_similar_size() {
        let classes = [0, (1 << 20) - 1, 1 << 20, (4 << 20) - 1, 4 << 20, 16 << 20, 1 << 40].map(size_class);
        assert_eq!(classes, [None, None, Some(0), Some(0), Some(1), Some(2), Some(10)]);
    }
}
