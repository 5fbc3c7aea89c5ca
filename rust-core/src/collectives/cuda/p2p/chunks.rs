//! Kernels for large collectives, or several of them: one launch processes all chunks in turn. Between two members,
//! `device/kernels/chunks.cu` reduces floating-point numbers (all-reduce, reduce-scatter) and gathers numbers of any
//! type. Between more members, `parts.cu` reduces float32: each member reduces a part of every chunk.

use std::ops::RangeInclusive;

use super::alignment;
use super::kernel_launch::CHUNKS_ABOVE;
use super::{CallState, HEADER_BYTES, Peers, PeersArgument, VECTOR, bits_of, is_even, op_name, type_name};
use crate::buffer::{DType, ReduceOp, TensorView};
use crate::collectives::{Overlap, Request};
use crate::device::{Context, Grid, Kernel, KernelSource, Stream, memory};
use crate::error::{Error, Result};

/// The kernels for one group size.
struct ChunkLayout {
    source: &'static KernelSource,
    entry: &'static str,
    /// Of a block.
    threads: u32,
    /// The types of numbers that are reduced.
    dtypes: &'static [DType],
    /// Whether it also runs reduce-scatters and all-gathers.
    has_blocks: bool,
    chunk_bytes: usize,
    slot_bytes: usize,
    /// Calls, as PEER-4 counts them, that a launch makes in addition to its rounds.
    more_calls: u32,
}

static HALVES: KernelSource =
    KernelSource { name: "chunks.cu", text: include_str!("../../../device/kernels/chunks.cu") };
static PARTS: KernelSource = KernelSource { name: "parts.cu", text: include_str!("../../../device/kernels/parts.cu") };

/// Mirrored by chunk.cuh, like the next two constants, the structures, and the sizes of the layouts.
const MAX_TENSORS: usize = 120;
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
                entry: "exchange_chunks",
                threads: (SENDERS + FOLDERS + 4) * 32,
                dtypes: &[DType::Float32, DType::Float16, DType::BFloat16],
                has_blocks: true,
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
            has_blocks: false,
            chunk_bytes: size * part_units * UNIT_BYTES,
            slot_bytes: (size - 1) * (sent + results),
            more_calls: 1,
        })
    }

    fn kernel(&self, context: &'static Context, operation: ChunkOperation, size: usize) -> Result<&'static Kernel> {
        let ranks = size.to_string();
        let op = operation.op.map_or("Receive", op_name);
        let defines = [("TYPE", type_name(operation.dtype)), ("OP", op), ("RANKS", ranks.as_str())];
        Kernel::get(context, self.source, self.entry, &defines)
    }

    /// The common operation of `requests`, if the kernels run all of them; equal on all members.
    fn operation(&self, requests: &[Request]) -> Option<ChunkOperation> {
        let reduces = |view: &TensorView, op: &ReduceOp| {
            let operation = ChunkOperation { dtype: view.dtype(), op: Some(*op) };
            self.dtypes.contains(&view.dtype()).then_some(operation)
        };
        let mut operations = requests.iter().map(|request| match request {
            Request::AllReduce { input, op, .. } => reduces(input, op),
            Request::ReduceScatter { inputs, output, op } if self.has_blocks && is_even(inputs) => reduces(output, op),
            Request::AllGather { input, outputs } if self.has_blocks && is_even(outputs) => {
                Some(ChunkOperation { dtype: bits_of(input.dtype()), op: None })
            }
            _ => None,
        });
        let first = operations.next()??;
        operations.all(|operation| operation == Some(first)).then_some(first)
    }
}

/// What a launch does with its tensors.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ChunkOperation {
    dtype: DType,
    /// How numbers are reduced; none in an all-gather.
    op: Option<ReduceOp>,
}

impl ChunkOperation {
    /// The key under which its kernel is kept. All kernels of a layout have one name.
    fn key(&self, layout: &ChunkLayout) -> (&'static str, DType, ReduceOp) {
        match self.op {
            Some(op) => (layout.entry, self.dtype, op),
            None => ("gather_chunks", self.dtype, ReduceOp::Sum),
        }
    }
}

/// Largest number of blocks of a launch; there are slots for that many.
const CHANNELS: usize = 64;

/// Largest number of blocks of a launch. With half of the blocks, the collective alone takes longer (all-reduces of
/// float32 between two members 0 to 13 %, between more up to 50 %; all-gathers and reduce-scatters 2 to 13 %), but a
/// computation that runs beside it gets more multiprocessors. Callers do not always say what overlaps: all-reduces are
/// then mostly waited for, whereas FSDP's all-gathers and reduce-scatters overlap with computation.
fn channels(overlap: Overlap, only_all_reduces: bool) -> usize {
    match overlap {
        Overlap::Nothing => CHANNELS,
        Overlap::Unknown if only_all_reduces => CHANNELS,
        Overlap::Unknown | Overlap::Computation => CHANNELS / 2,
    }
}

/// The struct `Tensor` of chunk.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
struct ChunkTensor {
    sent: u64,
    input: u64,
    output: u64,
    elems: u64,
}

impl ChunkTensor {
    const NONE: Self = Self { sent: 0, input: 0, output: 0, elems: 0 };

    /// The tensor of a request of member `me`; of an all-gather or reduce-scatter, which two members run, the part that
    /// crosses the link.
    fn of(request: &Request, me: usize) -> Self {
        let (sent, input, output) = match request {
            Request::AllReduce { input, output, .. } => (input, input, output),
            Request::ReduceScatter { inputs, output, .. } => (&inputs[1 - me], &inputs[me], output),
            Request::AllGather { input, outputs } => (input, input, &outputs[1 - me]),
            _ => return Self::NONE,
        };
        let address = |view: &TensorView| view.ptr() as u64;
        Self { sent: address(sent), input: address(input), output: address(output), elems: sent.elems() as u64 }
    }
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
    let operation = ChunkOperation { dtype: DType::Float32, op: Some(op) };
    ChunkLayout::of(size).map(|layout| Ok((layout.entry, layout.kernel(context, operation, size)?))).transpose()
}

/// The number of blocks, of at most `channels`, of a launch for `chunks` chunks, and the number of rounds in which they
/// process them.
fn blocks(chunks: usize, channels: usize) -> (u32, u32) {
    let blocks = chunks.clamp(1, channels);
    (blocks as u32, chunks.div_ceil(blocks) as u32)
}

impl Peers {
    /// Whether [`Peers::queue_chunks`] runs `requests`; equal on all members.
    pub fn accepts_chunks(&self, requests: &[Request], overlap: Overlap) -> bool {
        let bytes = |request: &Request| match request {
            Request::AllReduce { input, .. } => input.bytes(),
            Request::ReduceScatter { inputs: blocks, .. } | Request::AllGather { outputs: blocks, .. } => {
                blocks.iter().map(TensorView::bytes).sum()
            }
            _ => 0,
        };
        ChunkLayout::of(self.size).filter(|layout| layout.operation(requests).is_some()).is_some_and(|_| {
            let least = requests.iter().map(|request| self.least_in_chunks(request, overlap)).max();
            requests.iter().map(bytes).sum::<usize>() >= least.unwrap_or(usize::MAX)
        })
    }

    /// Smallest operation like `request`, in bytes, that the chunked kernels run. In groups of more than two members,
    /// NCCL is faster for all-reduces of numbers with full float32 precision. There, the chunked kernels run only the
    /// buckets of reducers, whose numbers mostly were bfloat16, and only where tuning chose the core's kernels for small
    /// messages, too. Numbers of 16 bits cannot be halved, and with the fewer blocks of a reducer's launch, NCCL is as
    /// fast. Blocks of other lengths than whole vectors would be copied number by number.
    fn least_in_chunks(&self, request: &Request, overlap: Overlap) -> usize {
        let tuning = self.tuning();
        let dtype = match request {
            Request::AllReduce { input, .. } => input.dtype(),
            Request::ReduceScatter { output: block, .. } | Request::AllGather { input: block, .. }
                if block.bytes().is_multiple_of(VECTOR) =>
            {
                return tuning.chunks_of_blocks_bytes;
            }
            _ => return usize::MAX,
        };
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
        let (operation, layout) = operation.ok_or_else(|| {
            Error::Internal("an operation was passed to the chunked kernels that they do not support".into())
        })?;
        requests.iter().for_each(alignment::note);
        let mut state = self.state.lock();
        for request in requests {
            if let Request::AllGather { input, outputs } = request
                && input.elems() > 0
                && input.ptr() != outputs[self.me].ptr()
            {
                // SAFETY: the caller's promise, by which an input that is not the member's own block does not overlap
                // any output, and no request of a call uses another one's outputs.
                unsafe { memory::copy(outputs[self.me].ptr() as u64, input.ptr() as u64, input.bytes(), stream)? };
            }
        }
        let tensors: Vec<([u64; 2], ChunkTensor)> = requests
            .iter()
            .map(|request| (kind(request), ChunkTensor::of(request, self.me)))
            .filter(|(_, tensor)| tensor.elems > 0)
            .collect();
        for tensors in tensors.chunks(MAX_TENSORS) {
            // SAFETY: the caller's promise.
            unsafe { self.launch_chunks(&mut state, &layout, tensors, operation, overlap, stream)? };
        }
        Ok(state.calls)
    }

    /// # Safety
    /// As [`Peers::queue`], for the tensors.
    unsafe fn launch_chunks(
        &self,
        state: &mut CallState,
        layout: &ChunkLayout,
        tensors: &[([u64; 2], ChunkTensor)],
        operation: ChunkOperation,
        overlap: Overlap,
        stream: &Stream,
    ) -> Result<()> {
        let chunk_elems = layout.chunk_bytes / operation.dtype.size();
        let chunks = tensors.iter().map(|(_, tensor)| (tensor.elems as usize).div_ceil(chunk_elems)).sum();
        let only_all_reduces = tensors.iter().all(|([kind, _], _)| *kind == ALL_REDUCE);
        let (blocks, rounds) = blocks(chunks, channels(overlap, only_all_reduces));
        let all = [4, operation.op.map_or(0, |op| 1 + op as u64), u64::from(blocks)];
        let each = tensors.iter().flat_map(|([kind, dtype], tensor)| [*kind, *dtype, tensor.elems]);
        let mut argument = ChunksArgument {
            peers: self.argument(&all.into_iter().chain(each).collect::<Vec<_>>()),
            slots: (HEADER_BYTES + 2 * self.half_bytes) as u64,
            rounds,
            count: tensors.len() as u32,
            tensors: [ChunkTensor::NONE; MAX_TENSORS],
        };
        argument.tensors.iter_mut().zip(tensors).for_each(|(place, (_, tensor))| *place = *tensor);
        let (entry, dtype, op) = operation.key(layout);
        let kernel = state.kernel(entry, dtype, op, || layout.kernel(self.context, operation, self.size))?;
        let grid = Grid { blocks, threads: layout.threads };
        // SAFETY: the argument matches the kernel's declaration; the arenas live (PEER-8) and have slots, the rest is
        // the caller's promise.
        unsafe { self.launch(state, kernel, grid, rounds + layout.more_calls, &argument, stream) }
    }
}

/// The kind of a request and its type, as numbers that members compare: the kernels themselves do not tell them apart.
fn kind(request: &Request) -> [u64; 2] {
    match request {
        Request::AllReduce { input, .. } => [ALL_REDUCE, input.dtype() as u64],
        Request::ReduceScatter { output, .. } => [1, output.dtype() as u64],
        Request::AllGather { input, .. } => [2, input.dtype() as u64],
        _ => [3, 0],
    }
}

/// The number of an all-reduce.
const ALL_REDUCE: u64 = 0;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Device;
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
        let mut dtypes: Vec<DType> = DType::ALL.map(bits_of).into();
        dtypes.sort_unstable_by_key(|dtype| *dtype as u64);
        dtypes.dedup();
        for dtype in dtypes {
            compile_for_test(&HALVES, &[("TYPE", type_name(dtype)), ("OP", "Receive"), ("RANKS", "2")]);
        }
        for size in 3..=*MEMBERS.end() {
            compile(&PARTS, DType::Float32, ReduceOp::Sum, size);
        }
    }

    #[test]
    fn the_other_members_block_crosses_the_link() {
        let view = |address: usize| {
            // SAFETY: no code reads or writes through it.
            unsafe { TensorView::new(address as *mut u8, 8, DType::BFloat16, Device::Cuda(0), 0) }.unwrap()
        };
        let (input, blocks, output) = (view(0x40), vec![view(0x100), view(0x200)], view(0x300));
        let parts = |request: &Request, me| {
            let ChunkTensor { sent, input, output, elems } = ChunkTensor::of(request, me);
            assert_eq!(elems, 8);
            (sent, input, output)
        };
        let gather = Request::AllGather { input, outputs: blocks.clone() };
        assert_eq!(parts(&gather, 0), (0x40, 0x40, 0x200));
        assert_eq!(parts(&gather, 1), (0x40, 0x40, 0x100));
        let scatter = Request::ReduceScatter { inputs: blocks, output, op: ReduceOp::Sum };
        assert_eq!(parts(&scatter, 0), (0x200, 0x100, 0x300));
        assert_eq!(parts(&scatter, 1), (0x100, 0x200, 0x300));
        assert_ne!(kind(&gather), kind(&scatter));
    }

    #[test]
    fn blocks_have_the_warps_of_the_kernel() {
        for (name, warps) in [("SENDERS", SENDERS), ("FOLDERS", FOLDERS)] {
            assert!(HALVES.text.contains(&format!("#define {name} {warps}\n")), "{name}");
        }
    }

    #[test]
    fn rounds_have_room_for_every_chunk() {
        for channels in [CHANNELS / 2, CHANNELS] {
            for chunks in [1, 2, 31, 32, 33, 63, 64, 65, 800, 100_000] {
                let (blocks, rounds) = blocks(chunks, channels);
                let (blocks, rounds) = (blocks as usize, rounds as usize);
                assert!(
                    blocks <= channels && (chunks..chunks + blocks).contains(&(blocks * rounds)),
                    "{chunks} chunks"
                );
            }
        }
    }
}
