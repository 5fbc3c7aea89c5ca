//! All-reduces of float32 that are large, or many, between two members: one launch that goes from chunk to chunk
//! (`device/kernels/chunks.cu`).

use super::{ALL, HEADER_BYTES, Peers, PeersArgument, Turn, op_name};
use crate::buffer::DType;
use crate::collectives::{Beside, ReduceOp, Request};
use crate::device::{Context, Grid, Kernel, Source, Stream};
use crate::error::{Error, Result};

const SOURCE: Source = Source { name: "chunks.cu", text: include_str!("../../../device/kernels/chunks.cu") };

pub(super) const ENTRY: &str = "all_reduce_chunks";
/// Mirrored by chunks.cu, as are the next ones and the structures.
const MAX_TENSORS: usize = 128;
const THREADS: u32 = 512;
const SLOTS: usize = 4;
/// Elements of a chunk.
const CHUNK_ELEMS: usize = 32 << 10;
const SLOT_BYTES: usize = 4 * CHUNK_ELEMS + 256;
/// Members for which there are slots.
const MEMBERS: usize = 2;
/// Most blocks of a launch, for which there are slots.
const CHANNELS: usize = 64;

/// Most blocks of a launch with this beside it. Half of them take up to a half longer alone, but leave more
/// multiprocessors to a computation.
fn channels(beside: Beside) -> usize {
    match beside {
        Beside::Computation => CHANNELS / 2,
        Beside::Nothing => CHANNELS,
    }
}

/// `Tensor` of chunks.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Tensor {
    input: u64,
    output: u64,
    elems: u64,
}

/// `Chunks` of chunks.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct ChunksArgument {
    peers: PeersArgument,
    slots: u64,
    rounds: u32,
    count: u32,
    tensors: [Tensor; MAX_TENSORS],
}

const _: () = assert!(size_of::<ChunksArgument>() <= 4096, "a launch has room for its argument");

/// Bytes of the slots of a member of a group of `size`.
pub(super) fn slots_bytes(size: usize) -> usize {
    if size == MEMBERS { CHANNELS * SLOTS * SLOT_BYTES } else { 0 }
}

/// The kernel for `op`.
pub(super) fn kernel(context: &'static Context, op: ReduceOp) -> Result<&'static Kernel> {
    Kernel::get(context, &SOURCE, ENTRY, &[("OP", op_name(op))])
}

/// The operation of `requests`, if chunks are for them: all-reduces of float32 alike.
fn operation(requests: &[Request]) -> Option<ReduceOp> {
    let mut operations = requests.iter().map(|request| match request {
        Request::AllReduce { input, op, .. } if input.dtype() == DType::Float32 => Some(*op),
        _ => None,
    });
    let first = operations.next()??;
    operations.all(|op| op == Some(first)).then_some(first)
}

/// The blocks for `chunks` chunks, and in how many rounds they make them.
fn grid(chunks: usize, beside: Beside) -> (Grid, u32) {
    let blocks = chunks.clamp(1, channels(beside));
    (Grid { blocks: blocks as u32, threads: THREADS }, chunks.div_ceil(blocks) as u32)
}

impl Peers {
    /// Whether `requests` are for [`Peers::queue_chunks`]; the same on all members.
    pub fn accepts_chunks(&self, requests: &[Request]) -> bool {
        let bytes = |request: &Request| match request {
            Request::AllReduce { input, .. } => input.bytes(),
            _ => 0,
        };
        self.size == MEMBERS
            && operation(requests).is_some()
            && requests.iter().map(bytes).sum::<usize>() >= self.tuning().chunks_bytes
    }

    /// Queues `requests`, which [`Peers::accepts_chunks`], into `stream`. How many calls this member has made then, as
    /// counted in [`Mismatch::call`](super::Mismatch::call).
    ///
    /// # Errors
    /// [`Error::Device`]; those of [`Kernel::get`].
    ///
    /// # Safety
    /// As [`Peers::queue`].
    pub unsafe fn queue_chunks(&self, requests: &[Request], beside: Beside, stream: &Stream) -> Result<u32> {
        let op = operation(requests)
            .ok_or_else(|| Error::Internal("an operation that does not go in chunks was to go in them".into()))?;
        let mut turn = self.turn.lock();
        let tensors: Vec<Tensor> = requests.iter().filter_map(tensor).collect();
        for tensors in tensors.chunks(MAX_TENSORS) {
            // SAFETY: the caller's promise.
            unsafe { self.launch_chunks(&mut turn, tensors, op, beside, stream)? };
        }
        Ok(turn.calls)
    }

    /// # Safety
    /// As [`Peers::queue`], for the tensors.
    unsafe fn launch_chunks(
        &self,
        turn: &mut Turn,
        tensors: &[Tensor],
        op: ReduceOp,
        beside: Beside,
        stream: &Stream,
    ) -> Result<()> {
        let chunks = tensors.iter().map(|tensor| (tensor.elems as usize).div_ceil(CHUNK_ELEMS)).sum();
        let (grid, rounds) = grid(chunks, beside);
        let lengths = tensors.iter().map(|tensor| tensor.elems);
        let call: Vec<u64> = [3, op as u64, ALL, u64::from(grid.blocks)].into_iter().chain(lengths).collect();
        let mut argument = ChunksArgument {
            peers: self.argument(&call),
            slots: (HEADER_BYTES + 2 * self.half_bytes) as u64,
            rounds,
            count: tensors.len() as u32,
            tensors: [Tensor { input: 0, output: 0, elems: 0 }; MAX_TENSORS],
        };
        argument.tensors[..tensors.len()].copy_from_slice(tensors);
        let kernel = turn.kernel(ENTRY, DType::Float32, op, || kernel(self.context, op))?;
        // SAFETY: the argument is the kernel's, declared alike; the arenas live (PEER-8) and have slots, the rest is the
        // caller's promise.
        unsafe { self.launch(turn, kernel, grid, rounds, &argument, stream) }
    }
}

/// A request's tensor, if it has elements.
fn tensor(request: &Request) -> Option<Tensor> {
    match request {
        Request::AllReduce { input, output, .. } if input.elems() > 0 => {
            Some(Tensor { input: input.ptr() as u64, output: output.ptr() as u64, elems: input.elems() as u64 })
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
        for op in ReduceOp::ALL.into_iter().filter(|op| kernels::check(DType::Float32, *op).is_ok()) {
            if compile_for_test(&SOURCE, &[("OP", op_name(op))]).is_none() {
                return;
            }
        }
    }

    #[test]
    fn rounds_have_room_for_every_chunk() {
        for beside in [Beside::Computation, Beside::Nothing] {
            for chunks in [1, 2, 31, 32, 33, 63, 64, 65, 800, 100_000] {
                let (grid, rounds) = grid(chunks, beside);
                let (blocks, rounds) = (grid.blocks as usize, rounds as usize);
                assert!(
                    blocks <= CHANNELS && (chunks..chunks + blocks).contains(&(blocks * rounds)),
                    "{chunks} chunks"
                );
            }
        }
    }
}
