//! All-reduce and reduce in two steps for each chunk, for more than two members: each member reduces its shard of the
//! chunk, then all members collect the results.
//!
//! ```text
//! phase      p                  p+1                    p+2
//! publish    chunk k            chunk k+1              chunk k+2
//! fold                          own shard of k         own shard of k+1
//! collect                                              others' shards of k
//! ```
//!
//! The steps of different chunks overlap, so there is one synchronisation for each chunk and one more, and the data
//! stays in the caches between its steps.

use std::ops::Range;

use super::{Algorithm, SyncSteps};
use crate::bulk_copy;
use crate::collectives::call::{Call, Kind};
use crate::collectives::kernels::{self, Fold, FoldStage};
use crate::collectives::stores::{Purpose, Stores};
use crate::collectives::{Group, Request};
use crate::error::Result;

/// All-reduce and reduce over shared memory with a reduce-scatter and an all-gather step for each chunk.
pub(super) struct TwoShot;

/// Bytes of a chunk, for all members together: the data of its steps fits the second-level cache, even if members
/// share one.
const CHUNK_BYTES: usize = 256 << 10;

impl Algorithm for TwoShot {
    fn name(&self) -> &'static str {
        "two_shot"
    }

    fn accepts(&self, call: &Call, group: &Group<'_>) -> bool {
        group.memory.is_some() && matches!(call.kind, Kind::AllReduce | Kind::Reduce)
    }

    fn run(&self, request: &Request, call: &Call, group: &Group<'_>) -> Result<()> {
        let (Request::AllReduce { input, output, op } | Request::Reduce { input, output, op, .. }) = request else {
            unreachable!("`accepts` takes all_reduce and reduce only");
        };
        let memory = group.shared();
        let (me, size) = (memory.me(), memory.size());
        let wants = call.kind == Kind::AllReduce || call.root == me;
        let bytes = call.bytes();
        let chunk_bytes = CHUNK_BYTES.min(memory.region_limit());
        let chunks = bytes.div_ceil(chunk_bytes).max(1);
        // The bytes of chunk `chunk` that `rank` reduces.
        let shard = |chunk: usize, rank: usize| -> Range<usize> {
            let start = chunk * chunk_bytes;
            let length = chunk_bytes.min(bytes - start);
            let part = length.div_ceil(size).next_multiple_of(64);
            start + (rank * part).min(length)..start + ((rank + 1) * part).min(length)
        };
        let results = group.results.begin(Some(call.kind), if wants { bytes } else { 0 });
        let mut steps = SyncSteps::with_chunks(memory, call, group, Purpose::Reduce, bytes);
        let mut sources = vec![std::ptr::null(); size];
        // Regions of the last three chunks, by chunk, and how they are written.
        let mut regions = [0; 3];
        let mut stores = [const { None }; 3];
        for step in 0..chunks + 2 {
            if step < chunks {
                let length = chunk_bytes.min(bytes - step * chunk_bytes);
                regions[step % 3] = memory.reserve(length);
                let chunk = stores[step % 3].insert(steps.chunk(length));
                let arena = memory.arena(me, regions[step % 3]);
                for rank in (0..size).filter(|rank| *rank != me) {
                    let range = shard(step, rank);
                    // SAFETY: the range lies inside the input, and inside a chunk, for which the region is reserved; it
                    // is this member's to write until the synchronisation (SHM-2).
                    unsafe {
                        let to = arena.add(range.start - step * chunk_bytes);
                        chunk.publish(input.ptr().add(range.start), to, range.len());
                    }
                }
            }
            if let Some(chunk) = step.checked_sub(1).filter(|chunk| *chunk < chunks)
                && let Some(stores) = &stores[chunk % 3]
            {
                let range = shard(chunk, me);
                let inside = regions[chunk % 3] + range.start - chunk * chunk_bytes;
                stores.in_parts(range.len(), |part, kind| {
                    for (rank, source) in sources.iter_mut().enumerate() {
                        *source = if rank == me {
                            input.ptr().wrapping_add(range.start + part.start).cast_const()
                        } else {
                            memory.arena(rank, inside + part.start).cast_const()
                        };
                    }
                    let shared = memory.results(me, inside + part.start);
                    let own = output.ptr().wrapping_add(range.start + part.start);
                    // The fold writes with ordinary stores, so for streaming ones the results are a second copy.
                    let streams = wants && kind == Stores::Streaming;
                    let outputs: &[*mut u8] = match (wants, streams) {
                        (false, _) => &[shared],
                        (true, false) => &[shared, own],
                        (true, true) => &[own],
                    };
                    let fold = Fold {
                        dtype: call.dtype,
                        op: *op,
                        sources: &sources,
                        stage: FoldStage::Whole,
                        outputs,
                        elems: part.len() / call.dtype.size(),
                        // The next chunk to publish is read from memory while this one is read from the caches.
                        prefetch: if step + 1 < chunks {
                            input.ptr().wrapping_add(shard(step + 1, (me + 1) % size).start + part.start)
                        } else {
                            std::ptr::null()
                        },
                    };
                    // SAFETY: the sources are the arenas, which hold every member's part of this shard now (SHM-1),
                    // and the own input; the outputs are the own tensor, at the same place as the input or apart from
                    // it, and the own results. Validation checked the op.
                    unsafe { kernels::fold(&fold) };
                    if streams {
                        // SAFETY: the own result was just computed; the place for it in the results is as long.
                        unsafe { bulk_copy::streaming(own, shared, part.len()) };
                    }
                });
            }
            if let Some(chunk) = step.checked_sub(2)
                && let Some(stores) = stores[chunk % 3].take()
            {
                for rank in (1..size).map(|distance| (me + distance) % size).filter(|_| wants) {
                    let range = shard(chunk, rank);
                    let inside = regions[chunk % 3] + range.start - chunk * chunk_bytes;
                    stores.in_parts(range.len(), |part, _| {
                        // SAFETY: the results of this chunk were written in the phase before this one (SHM-1); the
                        // range lies inside the output.
                        unsafe {
                            let from = memory.results(rank, inside + part.start);
                            results.copy(from, output.ptr().add(range.start + part.start), part.len());
                        }
                    });
                }
                stores.finish();
            }
            if step < chunks + 1 {
                results.wait(|| steps.sync())?;
            }
        }
        results.finish([output].into_iter());
        Ok(())
    }
}
