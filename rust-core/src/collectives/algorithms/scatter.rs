//! Reduce-scatter: every member publishes the other members' blocks, and reduces its own.

use super::{Algorithm, SyncSteps};
use crate::collectives::call::{Call, Kind};
use crate::collectives::kernels::{self, Fold, FoldStage};
use crate::collectives::stores::Purpose;
use crate::collectives::{Group, Request};
use crate::error::Result;

/// Reduce-scatter over shared memory.
pub(super) struct ReduceScatter;

/// Bytes that a member publishes in one step, for all members together.
const CHUNK_BYTES: usize = 512 << 10;

impl Algorithm for ReduceScatter {
    fn name(&self) -> &'static str {
        "reduce_scatter"
    }

    fn accepts(&self, call: &Call, group: &Group<'_>) -> bool {
        group.memory.is_some() && call.kind == Kind::ReduceScatter
    }

    fn run(&self, request: &Request, call: &Call, group: &Group<'_>) -> Result<()> {
        let Request::ReduceScatter { inputs, output, op } = request else {
            unreachable!("`accepts` takes reduce_scatter only");
        };
        let memory = group.shared();
        let (me, size) = (memory.me(), memory.size());
        let channel = (CHUNK_BYTES.min(memory.region_limit()) / size) & !63;
        let longest = call.sent.iter().max().map_or(0, |elems| elems * call.dtype.size());
        let mut steps = SyncSteps::with_chunks(memory, call, group, Purpose::Reduce, longest);
        let mut sources = vec![std::ptr::null(); size];
        for start in (0..longest.max(1)).step_by(channel) {
            let region = memory.reserve(size * channel);
            let arena = memory.arena(me, region);
            let stores = steps.chunk(channel);
            for (rank, input) in inputs.iter().enumerate().filter(|(rank, _)| *rank != me) {
                let length = input.bytes().saturating_sub(start).min(channel);
                // SAFETY: the range lies inside the block; `size` channels fit the region, which is this member's to
                // write until the synchronisation (SHM-2).
                unsafe { stores.publish(input.ptr().wrapping_add(start), arena.add(rank * channel), length) };
            }
            steps.sync()?;
            let length = output.bytes().saturating_sub(start).min(channel);
            stores.in_parts(length, |part, _| {
                for (rank, source) in sources.iter_mut().enumerate() {
                    *source = if rank == me {
                        inputs[me].ptr().wrapping_add(start + part.start).cast_const()
                    } else {
                        memory.arena(rank, region).wrapping_add(me * channel + part.start).cast_const()
                    };
                }
                let outputs = [output.ptr().wrapping_add(start + part.start)];
                let fold = Fold {
                    dtype: call.dtype,
                    op: *op,
                    sources: &sources,
                    stage: FoldStage::Whole,
                    outputs: &outputs,
                    elems: part.len() / call.dtype.size(),
                    prefetch: std::ptr::null(),
                };
                // SAFETY: the sources are this member's channel of every arena (SHM-1) and the own block, as long as
                // the output, which is the same memory or apart from it. Validation checked the op.
                unsafe { kernels::fold(&fold) };
            });
            stores.finish();
        }
        Ok(())
    }
}
