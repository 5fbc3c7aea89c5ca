//! Chooses by measurement whether members write the chunks that peers read with ordinary or with streaming stores.
//!
//! Note "stores". A cache line that a peer has read is in that peer's cache, and an ordinary store must first
//! invalidate it there. Where cores share a cache this is fast, and the chunk then stays in that cache for its readers.
//! Where they share none (two sockets, or two chiplets of one), ordinary stores can be ten times slower than streaming
//! stores, which write to memory, from where peers then read. The system does not report which case applies, and in a
//! virtual machine it changes at run time.
//!
//! So some chunks are trials: all members write the first part of such a chunk with one kind of stores, and each times
//! its writes and reads of this part, but no waits. Members publish their times with their next call and choose by the
//! slowest member's time: one member's writes determine another's reads, and members work on different chunks at the
//! same time.
//!
//! - STORES-1: which chunks are trials, and of which kind, depends on the number of chunks so far, which is equal on all
//!   members. A choice depends on the published times, which all members read. It changes no value, only the time.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Once;
use std::time::Instant;

use parking_lot::Mutex;

use crate::bulk_copy;
use crate::metrics::{self, Fallback};
use crate::trials::Trials;

/// Kinds of stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stores {
    /// They leave the lines in the writer's cache.
    Ordinary,
    /// They write past the caches.
    Streaming,
}

impl Stores {
    pub(super) const ALL: [Stores; 2] = [Stores::Ordinary, Stores::Streaming];
}

/// Copies bytes to memory that peers read.
type Copy = unsafe fn(*const u8, *mut u8, usize);

/// What the chunks of a call are written for. Their readers access them differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Peers combine them with their own values.
    Reduce,
    /// Peers copy them.
    Move,
}

/// Smaller calls use ordinary stores: their time is that of the synchronisation.
const TIMED_BYTES: usize = 32 << 10;
/// Calls of one purpose and of similar size share their choice. Each class has calls up to 4 times as large as the one
/// before.
const SIZE_CLASSES: usize = 5;
/// One of this many chunks is a trial, and the kinds take turns. A change is followed within three trials of a kind.
const CHUNKS_PER_TRIAL: u64 = 8;
/// As above, until each kind was measured often enough for a choice.
const CHUNKS_PER_FIRST_TRIAL: u64 = 2;
/// The trial is this part of a chunk, so that the slower kind costs little.
const TRIAL_PART: usize = 8;
/// Smaller trials would measure the clock.
const SMALLEST_TRIAL_BYTES: usize = 4 << 10;
/// Times that are kept of each kind.
const TIMES: usize = 3;
/// The other kind is chosen if it needs less than this part of the time.
const WORTHWHILE: f32 = 0.9;

/// Where ordinary stores take so many times as long as streaming ones, the writer's core and its readers' cores share no
/// cache. Smaller differences have other causes, such as chunks that do not fit into a cache.
const FAR: f32 = 2.0;
/// Smaller calls take little time in any case.
const LARGE_BYTES: usize = 1 << 20;

/// Counts that the cores of a group's members were found to share no cache; the first member warns once.
pub(super) fn note_far(slowdown: f32, is_first: bool) {
    static WARNED: Once = Once::new();
    metrics::note_fallback(Fallback::FarStores);
    if is_first {
        WARNED.call_once(|| {
            tracing::warn!(
                "the cores on which ranks of this host run share no cache: writing memory that another rank has \
                 read takes {slowdown:.1} times as long as writing around the caches, so collectives are slower than on cores \
                 that share one. Bind the ranks to such cores if the machine has them; in a virtual machine, its host \
                 decides"
            );
        });
    }
}

/// The choices of a group. One thread at a time runs its operations.
#[derive(Debug)]
pub(crate) struct StoreChooser {
    copies: [Copy; 2],
    /// Whether the copies differ.
    has_choice: bool,
    classes: Mutex<[[StoreTrials; SIZE_CLASSES]; 2]>,
}

impl Default for StoreChooser {
    fn default() -> Self {
        let copies: [Copy; 2] = [bulk_copy::ordinary, bulk_copy::streaming];
        Self { has_choice: bulk_copy::HAS_STREAMING_STORES, ..Self::with_copies(copies) }
    }
}

/// The trials of one class of calls.
#[derive(Clone, Copy, Debug, Default)]
struct StoreTrials {
    /// The number of chunks so far.
    chunks: u64,
    /// The times of [`Stores::ALL`], in nanoseconds for each byte of a chunk.
    trials: Trials<2, TIMES>,
}

impl StoreTrials {
    /// Counts a chunk; returns the kind of stores for its trial if it is one.
    fn next(&mut self) -> Option<Stores> {
        let chunk = self.chunks;
        self.chunks += 1;
        let warm = 2 * TIMES as u64 * CHUNKS_PER_FIRST_TRIAL;
        let every = if chunk < warm { CHUNKS_PER_FIRST_TRIAL } else { CHUNKS_PER_TRIAL };
        chunk.is_multiple_of(every).then(|| Stores::ALL[(chunk / every % 2) as usize])
    }

    fn chosen(&self) -> Stores {
        Stores::ALL[self.trials.chosen()]
    }

    /// Chooses by the medians of the slowest members. Returns the time of ordinary stores as a multiple of that of
    /// streaming ones, if the latter are chosen now.
    fn choose(&mut self, slowest: [f32; 2]) -> Option<f32> {
        if !self.trials.switch(slowest, WORTHWHILE) {
            return None;
        }
        tracing::debug!(stores = ?self.chosen(), ?slowest, "ranks write shared memory with other stores");
        (self.chosen() == Stores::Streaming).then_some(slowest[0] / slowest[1])
    }
}

/// The class of calls with `bytes` bytes in each block; `None` for calls that are not timed.
fn size_class(bytes: usize) -> Option<usize> {
    let times = (bytes / TIMED_BYTES).checked_ilog2()?;
    Some((times as usize / 2).min(SIZE_CLASSES - 1))
}

impl StoreChooser {
    pub(crate) fn with_copies(copies: [Copy; 2]) -> Self {
        Self { copies, has_choice: true, classes: Mutex::default() }
    }

    /// Begins a chunk of a call. All members call it for each chunk, with equal arguments.
    ///
    /// Arguments: the call's purpose, the bytes of its blocks, and the bytes of this chunk of them.
    pub(crate) fn chunk(&self, purpose: Purpose, call_bytes: usize, bytes: usize) -> ChunkStores<'_> {
        let mut chunk =
            ChunkStores { chooser: self, purpose, call_bytes, bytes, chosen: Stores::Ordinary, trial: None };
        if let Some(class) = size_class(call_bytes).filter(|_| self.has_choice) {
            let mut classes = self.classes.lock();
            let trials = &mut classes[purpose as usize][class];
            chunk.chosen = trials.chosen();
            chunk.trial = trials.next().map(|stores| StoreTrial { stores, nanoseconds: Cell::new(0) });
        }
        chunk
    }

    /// The times of this member's trials, to be published with a call.
    pub(crate) fn times(&self, purpose: Purpose, call_bytes: usize) -> u64 {
        let class = size_class(call_bytes);
        let medians =
            class.map_or([f32::NAN; 2], |class| self.classes.lock()[purpose as usize][class].trials.medians());
        medians.iter().rev().fold(0, |word, median| word << 32 | u64::from(median.to_bits()))
    }

    /// Chooses by what all members have published with a call. Returns how many times as long ordinary stores take, if
    /// that shows that the members' cores share no cache, and did not show it before. Only large calls tell.
    pub(crate) fn choose(&self, purpose: Purpose, call_bytes: usize, times: impl Iterator<Item = u64>) -> Option<f32> {
        let class = size_class(call_bytes)?;
        // NaN if one of the times is.
        let slower = |one: f32, other: f32| if one.is_nan() || one > other { one } else { other };
        let slowest = times.fold([0.0; 2], |slowest: [f32; 2], word| {
            [slower(slowest[0], f32::from_bits(word as u32)), slower(slowest[1], f32::from_bits((word >> 32) as u32))]
        });
        self.classes.lock()[purpose as usize][class]
            .choose(slowest)
            .filter(|times| *times >= FAR && call_bytes >= LARGE_BYTES)
    }

    /// The present choice for calls of this size.
    #[cfg(test)]
    pub(crate) fn chosen(&self, purpose: Purpose, call_bytes: usize) -> Stores {
        size_class(call_bytes).map_or(Stores::Ordinary, |class| self.classes.lock()[purpose as usize][class].chosen())
    }

    /// Begins again: after calls that differ, members may have counted differently (STORES-1).
    pub(crate) fn reset(&self) {
        *self.classes.lock() = Default::default();
    }
}

/// How one chunk of a call is written.
pub(crate) struct ChunkStores<'a> {
    chooser: &'a StoreChooser,
    purpose: Purpose,
    call_bytes: usize,
    bytes: usize,
    chosen: Stores,
    trial: Option<StoreTrial>,
}

struct StoreTrial {
    stores: Stores,
    /// The time of the trial's accesses so far.
    nanoseconds: Cell<u64>,
}

impl ChunkStores<'_> {
    /// Calls `access` for the ranges of `bytes` bytes of the chunk, with the kind of stores of each. In a trial there are
    /// two ranges, and the first one is timed. Writers and readers of the same bytes pass the same number.
    pub(crate) fn in_parts(&self, bytes: usize, mut access: impl FnMut(Range<usize>, Stores)) {
        let mut begin = 0;
        if let Some(trial) = &self.trial {
            begin = (bytes / TRIAL_PART).next_multiple_of(64).max(SMALLEST_TRIAL_BYTES).min(bytes);
            let start = Instant::now();
            access(0..begin, trial.stores);
            trial.nanoseconds.set(trial.nanoseconds.get() + start.elapsed().as_nanos() as u64);
        }
        if begin < bytes || self.trial.is_none() {
            access(begin..bytes, self.chosen);
        }
    }

    /// Copies bytes that this core reads again soon to memory that peers read next.
    ///
    /// # Safety
    /// `from` is valid for reads and `to` for writes of `bytes` bytes; they do not overlap.
    pub(crate) unsafe fn publish(&self, from: *const u8, to: *mut u8, bytes: usize) {
        self.in_parts(bytes, |part, stores| {
            let copy = self.chooser.copies[stores as usize];
            // SAFETY: the part lies inside both ranges.
            unsafe { copy(from.wrapping_add(part.start), to.wrapping_add(part.start), part.len()) };
        });
    }

    /// Ends the chunk: this member has written and read all of it.
    pub(crate) fn finish(self) {
        if let (Some(trial), Some(class)) = (self.trial, size_class(self.call_bytes)) {
            let time = trial.nanoseconds.get() as f32 / self.bytes.max(1) as f32;
            self.chooser.classes.lock()[self.purpose as usize][class].trials.add(trial.stores as usize, time);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Streaming stores or not, a choice between them.
    fn chooser() -> StoreChooser {
        StoreChooser::with_copies([bulk_copy::ordinary, bulk_copy::streaming])
    }

    /// Calls of one member in which each kind needs the given nanoseconds; returns the number until `wanted` is chosen.
    fn calls_until(chooser: &StoreChooser, wanted: Stores, nanoseconds: [u64; 2]) -> usize {
        for call in 0..100 {
            let times = chooser.times(Purpose::Reduce, 64 << 10);
            chooser.choose(Purpose::Reduce, 64 << 10, [times, times].into_iter());
            let chunk = chooser.chunk(Purpose::Reduce, 64 << 10, 64 << 10);
            if chunk.chosen == wanted {
                return call;
            }
            if let Some(trial) = &chunk.trial {
                trial.nanoseconds.set(nanoseconds[trial.stores as usize]);
            }
            chunk.finish();
        }
        panic!("{wanted:?} was not chosen");
    }

    #[test]
    fn a_change_is_followed_within_fifty_calls() {
        let chooser = chooser();
        assert!(calls_until(&chooser, Stores::Streaming, [2000, 1000]) < 15);
        assert!(calls_until(&chooser, Stores::Ordinary, [500, 1000]) < 50);
        assert!(calls_until(&chooser, Stores::Streaming, [2000, 1000]) < 50);
    }

    #[test]
    fn nearly_equal_times_and_single_slow_calls_change_nothing() {
        let chooser = chooser();
        for call in 0..200 {
            let times = chooser.times(Purpose::Reduce, 64 << 10);
            chooser.choose(Purpose::Reduce, 64 << 10, [times].into_iter());
            let chunk = chooser.chunk(Purpose::Reduce, 64 << 10, 64 << 10);
            assert_eq!(chunk.chosen, Stores::Ordinary);
            if let Some(trial) = &chunk.trial {
                // Each third trial of ordinary stores was interrupted.
                let interrupted = trial.stores == Stores::Ordinary && call % 48 == 0;
                let time = if trial.stores == Stores::Ordinary { 1000 } else { 950 };
                trial.nanoseconds.set(if interrupted { 50_000 } else { time });
            }
            chunk.finish();
        }
    }

    #[test]
    fn the_slowest_member_counts() {
        let chooser = chooser();
        let word = |ordinary: f32, streaming: f32| u64::from(streaming.to_bits()) << 32 | u64::from(ordinary.to_bits());
        let chosen = || chooser.chosen(Purpose::Move, 1 << 20);
        // The writer of a broadcast is faster with streaming stores, and its readers are slower.
        assert_eq!(chooser.choose(Purpose::Move, 1 << 20, [word(2.0, 0.1), word(1.0, 2.5)].into_iter()), None);
        assert_eq!(chosen(), Stores::Ordinary);
        for unknown in [[word(2.0, 1.0), word(f32::NAN, f32::NAN)], [word(f32::NAN, f32::NAN), word(2.0, 1.0)]] {
            assert_eq!(chooser.choose(Purpose::Move, 1 << 20, unknown.into_iter()), None);
            assert_eq!(chosen(), Stores::Ordinary);
        }
        // Cores without a common cache are told from other causes by the factor, and once.
        let times = || [word(4.0, 1.0), word(1.0, 3.0)].into_iter();
        assert_eq!(chooser.choose(Purpose::Move, 1 << 20, times()), None);
        assert_eq!(chosen(), Stores::Streaming);
        let far = || [word(6.0, 1.0), word(1.0, 2.0)].into_iter();
        assert_eq!(chooser.choose(Purpose::Move, 32 << 10, far()), None, "a small call");
        assert_eq!(chooser.choose(Purpose::Move, 16 << 20, far()), Some(3.0));
        assert_eq!(chooser.choose(Purpose::Move, 16 << 20, far()), None, "it is known");
        assert_eq!(chooser.chosen(Purpose::Reduce, 1 << 20), Stores::Ordinary);
    }

    #[test]
    fn all_bytes_of_a_chunk_are_copied_once() {
        let source: Vec<u8> = (0..100_000u32).map(|at| (at % 251) as u8).collect();
        let chooser = chooser();
        for bytes in [0, 1, 63, 4096, 5000, 40_000, 99_999] {
            for _ in 0..20 {
                let chunk = chooser.chunk(Purpose::Reduce, 64 << 10, 64 << 10);
                let mut target = vec![0u8; 100_001];
                // SAFETY: both ranges lie inside the vectors.
                unsafe { chunk.publish(source.as_ptr(), target.as_mut_ptr().add(1), bytes) };
                assert_eq!(target[1..=bytes], source[..bytes]);
                assert!(target[bytes + 1..].iter().all(|byte| *byte == 0));
            }
        }
    }

    #[test]
    fn classes_have_calls_of_similar_size() {
        assert_eq!(
            [0, (32 << 10) - 1, 32 << 10, (128 << 10) - 1, 128 << 10, 8 << 20, 1 << 40].map(size_class),
            [None, None, Some(0), Some(0), Some(1), Some(4), Some(4)]
        );
    }
}
