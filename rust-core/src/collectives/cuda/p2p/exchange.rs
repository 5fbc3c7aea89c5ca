//! Small all-gathers and broadcasts between peers: each member writes its block to the others' staging memory.

use super::kernel_launch::{KernelLaunch, block_bytes};
use super::{CallState, MAX_RANKS, Peers, PeersArgument, addresses, bits_of, is_even, type_name};
use crate::buffer::{DType, ReduceOp};
use crate::collectives::Request;
use crate::device::{Kernel, KernelSource, Stream};
use crate::error::Result;

const SOURCE: KernelSource =
    KernelSource { name: "exchange.cu", text: include_str!("../../../device/kernels/exchange.cu") };

/// The struct `Exchange` of exchange.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct ExchangeArgument {
    peers: PeersArgument,
    inputs: [u64; MAX_RANKS],
    outputs: [u64; MAX_RANKS],
    elems: u64,
}

/// Blocks of equal length that one member sends and receives.
#[derive(Clone, Copy)]
pub(super) struct Blocks {
    /// The address of the block for each member, or 0.
    inputs: [u64; MAX_RANKS],
    /// The address of the place for each member's block, or 0.
    outputs: [u64; MAX_RANKS],
    elems: usize,
    dtype: DType,
    /// The member that sends, if it is not all of them.
    root: Option<usize>,
}

impl Blocks {
    /// The blocks of member `me` of `size`; `None` for other operations, and for blocks whose lengths differ. Whether
    /// there are any is equal on all members, because each knows all lengths.
    pub(super) fn of(request: &Request, me: usize, size: usize) -> Option<Self> {
        match request {
            Request::AllGather { input, outputs } if is_even(outputs) => Some(Self {
                inputs: std::array::from_fn(|rank| if rank < size { input.ptr() as u64 } else { 0 }),
                outputs: addresses(outputs, 0, input.elems()),
                elems: input.elems(),
                dtype: input.dtype(),
                root: None,
            }),
            Request::Broadcast { data, root } => {
                let place = data.ptr() as u64;
                let sends = |rank: usize| me == *root && rank != me && rank < size;
                let receives = |rank: usize| me != *root && rank == *root;
                Some(Self {
                    inputs: std::array::from_fn(|rank| if sends(rank) { place } else { 0 }),
                    outputs: std::array::from_fn(|rank| if receives(rank) { place } else { 0 }),
                    elems: data.elems(),
                    dtype: data.dtype(),
                    root: Some(*root),
                })
            }
            _ => None,
        }
    }

    fn bytes(&self) -> usize {
        self.elems * self.dtype.size()
    }
}

impl Peers {
    /// The blocks of `request`, if the members exchange them without NCCL: there is room for all of them in messages
    /// of `most` bytes.
    pub(super) fn small_blocks(&self, request: &Request, most: usize) -> Option<Blocks> {
        Blocks::of(request, self.me, self.size).filter(|blocks| blocks.bytes() <= block_bytes(most, self.size))
    }

    /// # Safety
    /// As [`Peers::queue`].
    pub(super) unsafe fn exchange(&self, state: &mut CallState, blocks: &Blocks, stream: &Stream) -> Result<()> {
        let Blocks { inputs, outputs, elems, dtype, root } = *blocks;
        if elems == 0 {
            return Ok(());
        }
        let root = root.map_or(super::ALL, |root| root as u64);
        let argument = ExchangeArgument {
            peers: self.argument(&[3, dtype as u64, elems as u64, root]),
            inputs,
            outputs,
            elems: elems as u64,
        };
        let KernelLaunch { entry, grid } = KernelLaunch::exchange(blocks.bytes(), &self.tuning());
        let dtype = bits_of(dtype);
        let load = || {
            let ranks = self.size.to_string();
            Kernel::get(self.context, &SOURCE, entry, &[("TYPE", type_name(dtype)), ("RANKS", &ranks)])
        };
        // The operation is a key only.
        let kernel = state.kernel(entry, dtype, ReduceOp::Sum, load)?;
        // SAFETY: the argument is the kernel's, declared alike; the arenas live (PEER-8), the rest is the caller's
        // promise.
        unsafe { self.launch(state, kernel, grid, 1, &argument, stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::{Device, TensorView};
    use crate::device::kernel::compile_for_test;

    fn view(address: usize, elems: usize) -> TensorView {
        // SAFETY: no code reads or writes through it.
        unsafe { TensorView::new(address as *mut u8, elems, DType::Float32, Device::Cuda(0), 0) }.unwrap()
    }

    #[test]
    fn the_kernel_compiles_for_every_size_of_elements() {
        for dtype in DType::ALL {
            assert_eq!(bits_of(dtype).size(), dtype.size());
            if compile_for_test(&SOURCE, &[("TYPE", type_name(bits_of(dtype))), ("RANKS", "3")]).is_none() {
                return;
            }
        }
    }

    #[test]
    fn an_all_gather_sends_its_block_to_all() {
        let request = |lengths: [usize; 3]| {
            let outputs = (0..3).map(|rank| view(0x1000 * (1 + rank), lengths[rank])).collect();
            Request::AllGather { input: view(0x40, lengths[1]), outputs }
        };
        let blocks = Blocks::of(&request([5, 5, 5]), 1, 3).unwrap();
        assert_eq!(blocks.inputs[..4], [0x40, 0x40, 0x40, 0]);
        assert_eq!(blocks.outputs[..4], [0x1000, 0x2000, 0x3000, 0]);
        assert_eq!((blocks.elems, blocks.bytes()), (5, 20));
        assert!(Blocks::of(&request([5, 5, 4]), 1, 3).is_none());
    }

    #[test]
    fn a_broadcast_has_one_sender() {
        let request = Request::Broadcast { data: view(0x40, 5), root: 1 };
        let root = Blocks::of(&request, 1, 3).unwrap();
        assert_eq!((&root.inputs[..4], root.outputs), (&[0x40, 0, 0x40, 0][..], [0; MAX_RANKS]));
        let other = Blocks::of(&request, 0, 3).unwrap();
        assert_eq!((other.inputs, &other.outputs[..4]), ([0; MAX_RANKS], &[0, 0x40, 0, 0][..]));
    }
}
