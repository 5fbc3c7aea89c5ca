//! The ways to run an operation. The first in [`ALGORITHMS`] that accepts it runs it; as all members call the same,
//! all choose the same. If their calls differ, they may choose differently, and meet at the arrival with which every
//! algorithm begins.

use super::call::Call;
use super::{Group, Request, agreement};
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

/// One way to run some operations.
pub(crate) trait Algorithm: Sync {
    /// For the log.
    fn name(&self) -> &'static str;
    /// Whether it can run the call in this group, and is meant to.
    fn accepts(&self, call: &Call, group: &Group<'_>) -> bool;
    /// Arrives, compares, and runs.
    fn run(&self, request: &Request, call: &Call, group: &Group<'_>) -> Result<()>;
}

/// In order of preference.
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

/// The synchronisations of one operation over shared memory: the first compares the calls.
struct SyncSteps<'a> {
    memory: &'a SharedMemory,
    call: &'a Call,
    group: &'a Group<'a>,
    calls: Option<Vec<Call>>,
}

impl<'a> SyncSteps<'a> {
    fn new(memory: &'a SharedMemory, call: &'a Call, group: &'a Group<'a>) -> Self {
        agreement::publish(memory, call);
        Self { memory, call, group, calls: None }
    }

    /// Everybody's writes for this phase are done and visible.
    fn sync(&mut self) -> Result<()> {
        if self.calls.is_some() {
            return self.memory.sync(&self.group.wait);
        }
        self.calls = Some(agreement::agree(self.memory, self.call, self.group)?);
        Ok(())
    }
}

/// Copies `bytes` bytes between places that are the same or do not overlap.
///
/// # Safety
/// Both are valid for that.
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    if bytes > 0 && from != to.cast_const() {
        // SAFETY: the caller promises validity, and that different places do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
    }
}
