//! Kernels for large all-reduces of floating-point numbers, or several of them: one launch processes all chunks in turn.
//! Between two members, each reduces every chunk (`device/kernels/chunks.cu`); between more, each reduces a part of every
//! chunk (`parts.cu`), of float32 only.

use std::ops::RangeInclusive;

use super::kernel_launch::CHUNKS_ABOVE;
use super::{ALL, CallState, HEADER_BYTES, Peers, PeersArgument, op_name, type_name};
use crate::buffer::{DType, ReduceOp};
use crate::collectives::{Overlap, Request};
use crate::device::{Context, Grid, Kernel, KernelSource, Stream};
use crate::error::{Error, Result};

/// The kernels for one group size.
struct ChunkLayout {
    source: &'static KernelSource,
    entry: &'static str,
    /// Of a block.
    threads: u32,
    /// The types of the elements.
    dtypes: &'static [DType],
    chunk_bytes: usize,
    slot_bytes: usize,
    /// Calls, as PEER-4 counts them, that a launch makes in addition to its rounds.
    more_calls: u32,
}

static HALVES: KernelSource =
    KernelSource { name: "chunks.cu", text: include_str!("../../../device/kernels/chunks.cu") };
static PARTS: KernelSource = KernelSource { name: "parts.cu", text: include_str!("../../../device/kernels/parts.cu") };

/// Mirrored by chunk.cuh, like the next two constants, the structures, and the sizes of the layouts.
const MAX_TENSORS: usize = 128;
const SLOTS: usize = 4;
/// Each thread of a warp has two vectors of a unit.
const UNIT_BYTES: usize = 1024;
/// Mirrored by chunks.cu: numbers of warps of its roles.
const SENDERS: u32 = 8;
const FOLDERS: u32 = 16;
/// The largest group size with kernels. In larger groups, each member's part of a chunk would be too small.
const MEMBERS: RangeInclusive<usize> = 2..=8;

impl ChunkLayout {
    /// The kernels for a group of `size`, if there are any.
    fn of(size: usize) -> Option<Self> {
        if !MEMBERS.contains(&size) {
            return None;
        }
        if size == 2 {
            let slot_bytes = 128 * UNIT_BYTES + 256;
            return Some(Self {
                source: &HALVES,
                entry: "all_reduce_chunks",
                threads: (SENDERS + FOLDERS + 4) * 32,
                dtypes: &[DType::Float32, DType::Float16, DType::BFloat16],
                chunk_bytes: 128 * UNIT_BYTES,
                slot_bytes,
                more_calls: 0,
            });
        }
        let part_units = if size <= 4 { 32 } else { 16 };
        let (sent, results) = (part_units * UNIT_BYTES + 256, part_units * UNIT_BYTES);
        Some(Self {
            source: &PARTS,
            entry: "all_reduce_parts",
            threads: 512,
            dtypes: &[DType::Float32],
            chunk_bytes: size * part_units * UNIT_BYTES,
            slot_bytes: (size - 1) * (sent + results),
            more_calls: 1,
        })
    }

    fn kernel(&self, context: &'static Context, dtype: DType, op: ReduceOp, size: usize) -> Result<&'static Kernel> {
        let ranks = size.to_string();
        let defines = [("TYPE", type_name(dtype)), ("OP", op_name(op)), ("RANKS", ranks.as_str())];
        Kernel::get(context, self.source, self.entry, &defines)
    }

    /// The common type and reduction of `requests`, if all of them are all-reduces of a type that the kernels have.
    fn operation(&self, requests: &[Request]) -> Option<(DType, ReduceOp)> {
        let mut operations = requests.iter().map(|request| match request {
            Request::AllReduce { input, op, .. } if self.dtypes.contains(&input.dtype()) => Some((input.dtype(), *op)),
            _ => None,
        });
        let first = operations.next()??;
        operations.all(|operation| operation == Some(first)).then_some(first)
    }
}

/// Largest number of blocks of a launch; there are slots for that many.
const CHANNELS: usize = 64;

/// Largest number of blocks of a launch with this overlap. With half of the blocks, the all-reduce alone takes longer
/// (float32 between two members 0 to 13 %, between more up to 50 %), but a computation that runs beside it gets more
/// multiprocessors. A caller that does not say so mostly waits for the result.
fn channels(overlap: Overlap) -> usize {
    match overlap {
        Overlap::Computation => CHANNELS / 2,
        Overlap::Nothing | Overlap::Unknown => CHANNELS,
    }
}

/// The struct `Tensor` of chunk.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
struct ChunkTensor {
    input: u64,
    output: u64,
    elems: u64,
}

/// The struct `Chunks` of chunk.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
struct ChunksArgument {
    peers: PeersArgument,
    slots: u64,
    rounds: u32,
    count: u32,
    tensors: [ChunkTensor; MAX_TENSORS],
}

const _: () = assert!(size_of::<ChunksArgument>() <= 4096, "a launch has room for its argument");

/// Bytes of a member's slots in a group of `size`.
pub(super) fn slots_bytes(size: usize) -> usize {
    ChunkLayout::of(size).map_or(0, |layout| CHANNELS * SLOTS * layout.slot_bytes)
}

/// The kernel for `op` on float32 in a group of `size`, with its name, if there is one.
pub(super) fn kernel(
    context: &'static Context,
    op: ReduceOp,
    size: usize,
) -> Result<Option<(&'static str, &'static Kernel)>> {
    ChunkLayout::of(size)
        .map(|layout| Ok((layout.entry, layout.kernel(context, DType::Float32, op, size)?)))
        .transpose()
}

/// The number of blocks of a launch for `chunks` chunks, and the number of rounds in which they process them.
fn blocks(chunks: usize, overlap: Overlap) -> (u32, u32) {
    let blocks = chunks.clamp(1, channels(overlap));
    (blocks as u32, chunks.div_ceil(blocks) as u32)
}

impl Peers {
    /// Whether [`Peers::queue_chunks`] runs `requests`; equal on all members.
    pub fn accepts_chunks(&self, requests: &[Request], overlap: Overlap) -> bool {
        let bytes = |request: &Request| match request {
            Request::AllReduce { input, .. } => input.bytes(),
            _ => 0,
        };
        ChunkLayout::of(self.size)
            .and_then(|layout| layout.operation(requests))
            .is_some_and(|(dtype, _)| requests.iter().map(bytes).sum::<usize>() >= self.least_in_chunks(dtype, overlap))
    }

    /// Smallest operation, in bytes, that the chunked kernels run. In groups of more than two members, NCCL is faster
    /// for numbers with full float32 precision. There, the chunked kernels run only the buckets of reducers, whose
    /// numbers mostly were bfloat16, and only where tuning chose the core's kernels for small messages, too. Numbers of
    /// 16 bits cannot be halved, and with the fewer blocks of a reducer's launch, NCCL is as fast.
    fn least_in_chunks(&self, dtype: DType, overlap: Overlap) -> usize {
        let tuning = self.tuning();
        match overlap {
            Overlap::Unknown if dtype != DType::Float32 => tuning.chunks_of_16_bits_bytes,
            Overlap::Computation | Overlap::Nothing if dtype != DType::Float32 => usize::MAX,
            _ if self.size == 2 => tuning.chunks_bytes,
            _ if tuning.peer_bytes == 0 => usize::MAX,
            Overlap::Unknown => usize::MAX,
            Overlap::Computation | Overlap::Nothing => self.piece_bytes().max(CHUNKS_ABOVE) + 1,
        }
    }

    /// Queues `requests`, which [`Peers::accepts_chunks`], into `stream`. Returns the number of calls so far, as
    /// counted in [`Mismatch::call`](super::Mismatch::call).
    ///
    /// # Errors
    /// [`Error::Device`]; those of [`Kernel::get`].
    ///
    /// # Safety
    /// As [`Peers::queue`].
    pub unsafe fn queue_chunks(&self, requests: &[Request], overlap: Overlap, stream: &Stream) -> Result<u32> {
        let layout = ChunkLayout::of(self.size);
        let operation = layout.and_then(|layout| Some((layout.operation(requests)?, layout)));
        let ((dtype, op), layout) = operation.ok_or_else(|| {
            Error::Internal("an operation was passed to the chunked all-reduce that it does not support".into())
        })?;
        let mut state = self.state.lock();
        let tensors: Vec<ChunkTensor> = requests.iter().filter_map(tensor).collect();
        for tensors in tensors.chunks(MAX_TENSORS) {
            // SAFETY: the caller's promise.
            unsafe { self.launch_chunks(&mut state, &layout, tensors, (dtype, op), overlap, stream)? };
        }
        Ok(state.calls)
    }

    /// # Safety
    /// As [`Peers::queue`], for the tensors.
    unsafe fn launch_chunks(
        &self,
        state: &mut CallState,
        layout: &ChunkLayout,
        tensors: &[ChunkTensor],
        (dtype, op): (DType, ReduceOp),
        overlap: Overlap,
        stream: &Stream,
    ) -> Result<()> {
        let chunk_elems = layout.chunk_bytes / dtype.size();
        let chunks = tensors.iter().map(|tensor| (tensor.elems as usize).div_ceil(chunk_elems)).sum();
        let (blocks, rounds) = blocks(chunks, overlap);
        let lengths = tensors.iter().map(|tensor| tensor.elems);
        let call: Vec<u64> = [3, dtype as u64, op as u64, ALL, u64::from(blocks)].into_iter().chain(lengths).collect();
        let mut argument = ChunksArgument {
            peers: self.argument(&call),
            slots: (HEADER_BYTES + 2 * self.half_bytes) as u64,
            rounds,
            count: tensors.len() as u32,
            tensors: [ChunkTensor { input: 0, output: 0, elems: 0 }; MAX_TENSORS],
        };
        argument.tensors[..tensors.len()].copy_from_slice(tensors);
        let kernel = state.kernel(layout.entry, dtype, op, || layout.kernel(self.context, dtype, op, self.size))?;
        let grid = Grid { blocks, threads: layout.threads };
        // SAFETY: the argument matches the kernel's declaration; the arenas live (PEER-8) and have slots, the rest is
        // the caller's promise.
        unsafe { self.launch(state, kernel, grid, rounds + layout.more_calls, &argument, stream) }
    }
}

/// The tensor of a request, if it has elements.
fn tensor(request: &Request) -> Option<ChunkTensor> {
    match request {
        Request::AllReduce { input, output, .. } if input.elems() > 0 => {
            Some(ChunkTensor { input: input.ptr() as u64, output: output.ptr() as u64, elems: input.elems() as u64 })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collectives::kernels;
    use crate::device::kernel::compile_for_test;

    #[test]
    fn the_kernel_compiles_for_every_reduction() {
        let compile = |source, dtype, op, ranks: usize| {
            let ranks = ranks.to_string();
            compile_for_test(source, &[("TYPE", type_name(dtype)), ("OP", op_name(op)), ("RANKS", ranks.as_str())])
        };
        for op in ReduceOp::ALL.into_iter().filter(|op| kernels::check(DType::Float32, *op).is_ok()) {
            if compile(&HALVES, DType::Float32, op, 2).is_none() {
                return;
            }
            compile(&HALVES, DType::BFloat16, op, 2);
            compile(&PARTS, DType::Float32, op, 4);
        }
        compile(&HALVES, DType::Float16, ReduceOp::Sum, 2);
        for size in 3..=*MEMBERS.end() {
            compile(&PARTS, DType::Float32, ReduceOp::Sum, size);
        }
    }

    #[test]
    fn blocks_have_the_warps_of_the_kernel() {
        for (name, warps) in [("SENDERS", SENDERS), ("FOLDERS", FOLDERS)] {
            assert!(HALVES.text.contains(&format!("#define {name} {warps}\n")), "{name}");
        }
    }

    #[test]
    fn rounds_have_room_for_every_chunk() {
        for overlap in [Overlap::Computation, Overlap::Nothing, Overlap::Unknown] {
            for chunks in [1, 2, 31, 32, 33, 63, 64, 65, 800, 100_000] {
                let (blocks, rounds) = blocks(chunks, overlap);
                let (blocks, rounds) = (blocks as usize, rounds as usize);
                assert!(
                    blocks <= CHANNELS && (chunks..chunks + blocks).contains(&(blocks * rounds)),
                    "{chunks} chunks"
                );
            }
        }
    }
}
