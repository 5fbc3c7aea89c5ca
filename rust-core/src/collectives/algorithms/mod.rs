//! The algorithms of collectives on CPU tensors. The first one in [`ALGORITHMS`] that accepts a call runs it. All
//! members make the same call, so all choose the same algorithm. If their calls differ, they may choose differently;
//! every algorithm begins with the same arrival, which finds the difference.

use super::call::Call;
use super::{Group, Request, agreement};
use crate::bulk_copy;
use crate::collectives::stores::{ChunkStores, Purpose};
use crate::error::Result;
use crate::transport::shm::SharedMemory;

mod adasum;
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

/// Runs the operation with the first algorithm that accepts it.
pub(crate) fn run(request: &Request, call: &Call, group: &Group<'_>) -> Result<()> {
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
        agreement::publish(memory, call, 0);
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
        agreement::publish(memory, call, group.stores.times(purpose, bytes));
        Self { memory, call, group, calls: None, chunks: Some((purpose, bytes)) }
    }

    /// Begins a chunk of `bytes` bytes.
    fn chunk(&self, bytes: usize) -> ChunkStores<'a> {
        let (purpose, call_bytes) = self.chunks.expect("the call writes chunks");
        self.group.stores.chunk(purpose, call_bytes, bytes)
    }

    /// Waits until the writes of all members in this phase are visible.
    fn sync(&mut self) -> Result<()> {
        if self.calls.is_some() {
            return self.memory.sync(&self.group.wait);
        }
        self.calls = Some(agreement::agree(self.memory, self.call, self.group)?);
        if let Some((purpose, bytes)) = self.chunks {
            self.group.stores.choose(purpose, bytes, agreement::store_times(self.memory));
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
