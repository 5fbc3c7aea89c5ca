//! All-reduce and reduce in one step for each chunk: every member publishes its values, and every member reduces all
//! of them.
//!
//! There is one synchronisation for each chunk, but each member reads all values of the n members. That is fastest
//! for small tensors, and for two members, where the bytes that two-shot saves are spent on its second copy.

use super::{Algorithm, SyncSteps};
use crate::collectives::call::{Call, Kind};
use crate::collectives::kernels::{self, Fold, FoldStage};
use crate::collectives::stores::Purpose;
use crate::collectives::{Group, Request};
use crate::error::Result;

/// All-reduce and reduce over shared memory in which every member reduces all values.
pub(super) struct OneShot;

/// Largest tensor for more than two members.
const SMALL_BYTES: usize = 32 << 10;
/// Bytes that a member publishes in one step. A few chunks fit the second-level cache, so that a chunk stays there
/// between the copy, the reduction and the next copy.
const CHUNK_BYTES: usize = 256 << 10;

impl Algorithm for OneShot {
    fn name(&self) -> &'static str {
        "one_shot"
    }

    fn accepts(&self, call: &Call, group: &Group<'_>) -> bool {
        group.memory.is_some()
            && matches!(call.kind, Kind::AllReduce | Kind::Reduce)
            && (group.members.size() <= 2 || call.bytes() <= SMALL_BYTES)
    }

    fn run(&self, request: &Request, call: &Call, group: &Group<'_>) -> Result<()> {
        let (Request::AllReduce { input, output, op } | Request::Reduce { input, output, op, .. }) = request else {
            unreachable!("`accepts` takes all_reduce and reduce only");
        };
        let memory = group.shared();
        let me = memory.me();
        let wants = call.kind == Kind::AllReduce || call.root == me;
        let (bytes, size) = (call.bytes(), call.dtype.size());
        let mut steps = SyncSteps::with_chunks(memory, call, group, Purpose::Reduce, bytes);
        let mut sources = vec![std::ptr::null(); memory.size()];
        for start in (0..bytes.max(1)).step_by(CHUNK_BYTES) {
            let chunk = (bytes - start).min(CHUNK_BYTES);
            let region = memory.reserve(chunk);
            let stores = steps.chunk(chunk);
            // SAFETY: the chunk lies inside the input and is as long as the region; the region is this member's to
            // write until the synchronisation (SHM-2).
            unsafe { stores.publish(input.ptr().wrapping_add(start), memory.arena(me, region), chunk) };
            steps.sync()?;
            stores.in_parts(if wants { chunk } else { 0 }, |part, _| {
                for (rank, source) in sources.iter_mut().enumerate() {
                    *source = if rank == me {
                        input.ptr().wrapping_add(start + part.start).cast_const()
                    } else {
                        memory.arena(rank, region).wrapping_add(part.start).cast_const()
                    };
                }
                let outputs = [output.ptr().wrapping_add(start + part.start)];
                let fold = Fold {
                    dtype: call.dtype,
                    op: *op,
                    sources: &sources,
                    stage: FoldStage::Whole,
                    outputs: &outputs,
                    elems: part.len() / size,
                    // The next chunk is read from memory while this one is read from the caches.
                    prefetch: if start + chunk < bytes {
                        input.ptr().wrapping_add(start + chunk + part.start)
                    } else {
                        std::ptr::null()
                    },
                };
                // SAFETY: the sources are the arenas, which hold a chunk of every member now (SHM-1), and the own
                // input; the output is the own one, at the same place as the input or apart from it. Validation
                // checked the op.
                unsafe { kernels::fold(&fold) };
            });
            stores.finish();
        }
        Ok(())
    }
}
