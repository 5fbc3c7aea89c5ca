//! The algorithms of collectives on CPU tensors. The first one in [`ALGORITHMS`] that accepts a call runs it, unless
//! members read each other's tensors ([`direct`]). All members make the same call, so all choose the same algorithm. If
//! their calls differ, they may choose differently; every algorithm begins with the same arrival, which finds the
//! difference.

use std::time::{Duration, Instant};

use super::call::Call;
use super::paths::{Path, PathChooser, SharedTime};
use super::{Group, Request, agreement};
use crate::buffer::TensorView;
use crate::bulk_copy;
use crate::collectives::stores::{self, ChunkStores, Purpose};
use crate::error::Result;
use crate::transport::shm::SharedMemory;

mod adasum;
mod direct;
mod exchange;
mod hosts;
mod messages;
mod one_shot;
mod scatter;
pub(super) mod sizes;
mod two_shot;
mod window;

/// An algorithm for some kinds of calls.
pub(crate) trait Algorithm: Sync {
    /// The name for the log.
    fn name(&self) -> &'static str;
    /// Whether the algorithm can run the call in this group and is the preferred one for its size.
    fn accepts(&self, call: &Call, group: &Group<'_>) -> bool;
    /// Compares the members' calls, then runs the operation.
    fn run(&self, request: &Request, call: &Call, group: &Group<'_>) -> Result<()>;
}

/// All algorithms, in order of preference.
pub(crate) const ALGORITHMS: &[&dyn Algorithm] = &[
    &adasum::Adasum,
    &window::WindowAllReduce,
    &one_shot::OneShot,
    &two_shot::TwoShot,
    &scatter::ReduceScatter,
    &exchange::Exchange,
    &hosts::Reduction,
    &hosts::Spread,
    &messages::MessageAlgorithm,
];

/// Runs the operation: large ones by the path that is faster at present, all others with the first algorithm that accepts
/// them.
pub(crate) fn run(request: &Request, call: &Call, group: &Group<'_>) -> Result<()> {
    let bytes = direct::longest_read(call, group).unwrap_or(0);
    let Some(class) = PathChooser::class(call.kind, bytes) else {
        return run_first(request, call, group);
    };
    let turn = group.paths.begin(class);
    group.timed_class.set(Some(class));
    let start = Instant::now();
    if turn.path == Path::Direct {
        tracing::trace!(operation = group.operation, group = group.id, algorithm = "direct", "{call}");
    }
    if turn.path == Path::Shared || !direct::run(request, call, group)? {
        run_first(request, call, group)?;
    }
    let time = start.elapsed().saturating_sub(group.waited.get());
    group.paths.add(turn, time.as_secs_f32(), bytes, shared_time(request, call, group));
    Ok(())
}

/// What this member knows about the time of such calls through shared memory.
fn shared_time(request: &Request, call: &Call, group: &Group<'_>) -> SharedTime {
    if !group.shared().has_touched_all() {
        SharedTime::Unknown
    } else if group.results.are_chosen(call.kind, results_bytes(request)) {
        SharedTime::Steady
    } else {
        SharedTime::Present
    }
}

/// Bytes of the results that an algorithm copies out of shared memory, if it runs the call there.
fn results_bytes(request: &Request) -> usize {
    match request {
        Request::AllReduce { output, .. } => output.bytes(),
        Request::AllGather { outputs, .. } => outputs.iter().map(TensorView::bytes).sum(),
        Request::Broadcast { data, .. } => data.bytes(),
        _ => 0,
    }
}

fn run_first(request: &Request, call: &Call, group: &Group<'_>) -> Result<()> {
    let algorithm = ALGORITHMS.iter().find(|algorithm| algorithm.accepts(call, group));
    let algorithm = algorithm.expect("messages accept everything");
    tracing::trace!(operation = group.operation, group = group.id, algorithm = algorithm.name(), "{call}");
    algorithm.run(request, call, group)
}

/// The synchronisation points of one operation over shared memory; the first one compares the calls.
struct SyncSteps<'a> {
    memory: &'a SharedMemory,
    call: &'a Call,
    group: &'a Group<'a>,
    calls: Option<Vec<Call>>,
    /// For calls that write chunks: their purpose, and the bytes of their blocks.
    chunks: Option<(Purpose, usize)>,
}

impl<'a> SyncSteps<'a> {
    fn new(memory: &'a SharedMemory, call: &'a Call, group: &'a Group<'a>) -> Self {
        Self::publishing(memory, call, group, 0);
        Self { memory, call, group, calls: None, chunks: None }
    }

    /// For calls that write blocks of `bytes` bytes in chunks ([`SyncSteps::chunk`]).
    fn with_chunks(
        memory: &'a SharedMemory,
        call: &'a Call,
        group: &'a Group<'a>,
        purpose: Purpose,
        bytes: usize,
    ) -> Self {
        Self::publishing(memory, call, group, group.stores.times(purpose, bytes));
        Self { memory, call, group, calls: None, chunks: Some((purpose, bytes)) }
    }

    /// Publishes the call, and this member's times of such calls.
    fn publishing(memory: &SharedMemory, call: &Call, group: &Group<'_>, store_times: u64) {
        agreement::publish(memory, call, store_times);
        if let Some(class) = group.timed_class.get() {
            let words = memory.direct_words(memory.me(), memory.phase().wrapping_add(1));
            // SAFETY: the place lies in this member's part of the segment, which is read after the next arrival (SHM-2).
            unsafe { words.write(group.paths.times(class)) };
        }
    }

    /// Begins a chunk of `bytes` bytes.
    fn chunk(&self, bytes: usize) -> ChunkStores<'a> {
        let (purpose, call_bytes) = self.chunks.expect("the call writes chunks");
        self.group.stores.chunk(purpose, call_bytes, bytes)
    }

    /// Waits until the writes of all members in this phase are visible.
    fn sync(&mut self) -> Result<()> {
        match self.calls {
            Some(_) => self.memory.sync(&self.group.wait),
            None => self.first_sync(),
        }
    }

    fn first_sync(&mut self) -> Result<()> {
        let start = self.group.timed_class.get().map(|_| Instant::now());
        self.calls = Some(agreement::agree(self.memory, self.call, self.group)?);
        if let Some(class) = self.group.timed_class.get() {
            let waited = start.map_or(Duration::ZERO, |start| start.elapsed());
            self.group.waited.set(self.group.waited.get() + waited);
            let (memory, phase) = (self.memory, self.memory.phase());
            // SAFETY: inside the segment and aligned by its layout; any bits are a value.
            let times = |rank| unsafe { memory.direct_words(rank, phase).read_volatile() };
            self.group.paths.choose(class, (0..memory.size()).map(times));
        }
        if let Some((purpose, bytes)) = self.chunks {
            let slowdown = self.group.stores.choose(purpose, bytes, agreement::store_times(self.memory));
            if let Some(slowdown) = slowdown {
                stores::note_far(slowdown, self.memory.me() == 0);
            }
        }
        Ok(())
    }
}

/// Copies `bytes` bytes. `from` and `to` are equal or do not overlap.
///
/// # Safety
/// `from` is valid for reads and `to` for writes of `bytes` bytes.
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    if bytes > 0 && from != to.cast_const() {
        // SAFETY: the caller promises validity, and that different places do not overlap.
        unsafe { bulk_copy::ordinary(from, to, bytes) };
    }
}
