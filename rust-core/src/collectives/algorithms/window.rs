//! All-reduce of values that lie in a window: each member reduces its shard in place, from the parts of all members
//! into the parts of all members. No byte moves twice, and two synchronisations suffice for any size.

use super::{Algorithm, SyncSteps};
use crate::collectives::call::{Call, Kind};
use crate::collectives::kernels::{self, Fold, FoldStage};
use crate::collectives::{Group, Request, agreement};
use crate::error::Result;

/// All-reduce, in place, of values that already lie in a shared-memory window.
pub(super) struct WindowAllReduce;

impl Algorithm for WindowAllReduce {
    fn name(&self) -> &'static str {
        "window"
    }

    fn accepts(&self, call: &Call, group: &Group<'_>) -> bool {
        group.memory.is_some() && call.kind == Kind::AllReduceWindow
    }

    fn run(&self, request: &Request, call: &Call, group: &Group<'_>) -> Result<()> {
        let Request::AllReduceWindow { window, op, .. } = request else {
            unreachable!("`accepts` takes windows only");
        };
        let memory = group.shared();
        let (me, size) = (memory.me(), memory.size());
        let bytes = call.bytes();
        let mut steps = SyncSteps::new(memory, call, group);
        steps.sync()?;
        let part = bytes.div_ceil(size).next_multiple_of(4096);
        let range = (me * part).min(bytes)..((me + 1) * part).min(bytes);
        let mut places = Vec::with_capacity(size);
        for rank in 0..size {
            let offset = agreement::offset_bytes(memory, rank, memory.phase(), window, bytes)?;
            let start = window.peer(rank).expect("a window of a group with shared memory is visible to all");
            places.push(start.wrapping_add(offset + range.start));
        }
        let sources: Vec<*const u8> = places.iter().map(|place| place.cast_const()).collect();
        let elems = range.len() / call.dtype.size();
        let fold = Fold {
            dtype: call.dtype,
            op: *op,
            sources: &sources,
            stage: FoldStage::Whole,
            outputs: &places,
            elems,
            prefetch: std::ptr::null(),
        };
        // SAFETY: the ranges were checked against the window, whose parts are mapped with that size; between the two
        // synchronisations no other code touches this member's shard of them. Validation checked the op.
        unsafe { kernels::fold(&fold) };
        steps.sync()
    }
}
