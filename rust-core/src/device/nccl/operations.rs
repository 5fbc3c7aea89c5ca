//! Operations of a communicator, queued into a stream, and the types and reductions that NCCL supports.

use std::ffi::c_int;

use cudarc::nccl::sys::{self, ncclDataType_t, ncclRedOp_t};

use super::comm::Comm;
use crate::buffer::{DType, ReduceOp, TensorView};
use crate::device::stream::Stream;
use crate::error::{Error, Result};

impl Comm {
    /// Queues `output = op over members (input)`. Waits for the other members if NCCL has not connected to them yet.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for types or reductions that NCCL lacks, [`Error::Device`].
    ///
    /// # Safety
    /// Here and below: views are memory of the communicator's device, of equal length where they correspond, until
    /// the queued work is done; the stream belongs to that device.
    pub unsafe fn all_reduce(
        &self,
        input: &TensorView,
        output: &TensorView,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let (elems, dtype, op) = reduction(input, op)?;
        // SAFETY: the caller's promise.
        self.call("all_reduce", |nccl, comm| unsafe {
            (nccl.ncclAllReduce)(input.ptr().cast(), output.ptr().cast(), elems, dtype, op, comm, queue(stream))
        })
    }

    /// Queues a reduction whose result only `root` gets.
    ///
    /// # Errors
    /// As [`Comm::all_reduce`].
    ///
    /// # Safety
    /// As [`Comm::all_reduce`].
    pub unsafe fn reduce(
        &self,
        input: &TensorView,
        output: &TensorView,
        op: ReduceOp,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        let (elems, dtype, op) = reduction(input, op)?;
        // SAFETY: the caller's promise.
        self.call("reduce", |nccl, comm| unsafe {
            let (from, to) = (input.ptr().cast(), output.ptr().cast());
            (nccl.ncclReduce)(from, to, elems, dtype, op, root as c_int, comm, queue(stream))
        })
    }

    /// Queues `output = input of root`.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// As [`Comm::all_reduce`].
    pub unsafe fn broadcast(
        &self,
        input: &TensorView,
        output: &TensorView,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        let (elems, dtype) = moved(output);
        // SAFETY: the caller's promise.
        self.call("broadcast", |nccl, comm| unsafe {
            let (from, to) = (input.ptr().cast(), output.ptr().cast());
            (nccl.ncclBroadcast)(from, to, elems, dtype, root as c_int, comm, queue(stream))
        })
    }

    /// Queues `output = inputs of all members, in rank order`; inputs are equally long on all members.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// As [`Comm::all_reduce`]; `output` has space for the inputs of all members.
    pub unsafe fn all_gather(&self, input: &TensorView, output: *mut u8, stream: &Stream) -> Result<()> {
        let (elems, dtype) = moved(input);
        // SAFETY: the caller's promise.
        self.call("all_gather", |nccl, comm| unsafe {
            (nccl.ncclAllGather)(input.ptr().cast(), output.cast(), elems, dtype, comm, queue(stream))
        })
    }

    /// Queues `output = op over members (block of this member in input)`; blocks are equally long on all members.
    ///
    /// # Errors
    /// As [`Comm::all_reduce`].
    ///
    /// # Safety
    /// As [`Comm::all_reduce`]; `input` has a block for every member.
    pub unsafe fn reduce_scatter(
        &self,
        input: *const u8,
        output: &TensorView,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let (elems, dtype, op) = reduction(output, op)?;
        // SAFETY: the caller's promise.
        self.call("reduce_scatter", |nccl, comm| unsafe {
            (nccl.ncclReduceScatter)(input.cast(), output.ptr().cast(), elems, dtype, op, comm, queue(stream))
        })
    }

    /// Queues a message to member `to`. Several messages must be in one [`Comm::group`].
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// As [`Comm::all_reduce`].
    pub unsafe fn send(&self, data: &TensorView, to: usize, stream: &Stream) -> Result<()> {
        let (elems, dtype) = moved(data);
        // SAFETY: the caller's promise.
        self.call("send", |nccl, comm| unsafe {
            (nccl.ncclSend)(data.ptr().cast(), elems, dtype, to as c_int, comm, queue(stream))
        })
    }

    /// Queues a receive from member `from`.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// As [`Comm::all_reduce`].
    pub unsafe fn recv(&self, data: &TensorView, from: usize, stream: &Stream) -> Result<()> {
        let (elems, dtype) = moved(data);
        // SAFETY: the caller's promise.
        self.call("recv", |nccl, comm| unsafe {
            (nccl.ncclRecv)(data.ptr().cast(), elems, dtype, from as c_int, comm, queue(stream))
        })
    }
}

fn queue(stream: &Stream) -> sys::cudaStream_t {
    stream.raw() as sys::cudaStream_t
}

/// The address, length and type of a view for operations that do not compute.
fn moved(view: &TensorView) -> (usize, ncclDataType_t) {
    (view.bytes(), ncclDataType_t::ncclUint8)
}

/// Length, type and operation of a reduction, in NCCL's terms.
///
/// # Errors
/// [`Error::Unsupported`].
pub fn reduction(view: &TensorView, op: ReduceOp) -> Result<(usize, ncclDataType_t, ncclRedOp_t)> {
    use ncclDataType_t as Type;
    use ncclRedOp_t as Op;
    let dtype = view.dtype();
    let refuse = || {
        let op = format!("{op:?}").to_lowercase();
        Err(Error::Unsupported(format!("NCCL has no reduction `{op}` of {dtype}: move the tensor to the CPU")))
    };
    if dtype == DType::Bool {
        // Bools have the values 0 and 1.
        return match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => Ok((view.elems(), Type::ncclUint8, Op::ncclMax)),
            ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => Ok((view.elems(), Type::ncclUint8, Op::ncclMin)),
            ReduceOp::Average | ReduceOp::BitXor => refuse(),
        };
    }
    let (parts, ty) = match dtype {
        DType::UInt8 => (1, Type::ncclUint8),
        DType::Int8 => (1, Type::ncclInt8),
        DType::Int32 => (1, Type::ncclInt32),
        DType::Int64 => (1, Type::ncclInt64),
        DType::Float16 => (1, Type::ncclFloat16),
        DType::BFloat16 => (1, Type::ncclBfloat16),
        DType::Float32 => (1, Type::ncclFloat32),
        DType::Float64 => (1, Type::ncclFloat64),
        DType::Complex64 => (2, Type::ncclFloat32),
        DType::Complex128 => (2, Type::ncclFloat64),
        DType::Int16 | DType::Bool => return refuse(),
    };
    let op = match op {
        ReduceOp::Sum => Op::ncclSum,
        ReduceOp::Average => Op::ncclAvg,
        // Complex products are not products of the components, and complex numbers have no order.
        ReduceOp::Product | ReduceOp::Min | ReduceOp::Max if parts == 2 => return refuse(),
        ReduceOp::Product => Op::ncclProd,
        ReduceOp::Min => Op::ncclMin,
        ReduceOp::Max => Op::ncclMax,
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => return refuse(),
    };
    Ok((view.elems() * parts, ty, op))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reductions_that_nccl_lacks_are_rejected_with_their_names() {
        let text = |dtype, op| reduction(&TensorView::empty(dtype), op).unwrap_err().to_string();
        assert_eq!(
            text(DType::Int32, ReduceOp::BitXor),
            "NCCL has no reduction `bitxor` of int32: move the tensor to the CPU"
        );
        assert!(text(DType::Complex64, ReduceOp::Product).contains("`product` of complex64"));
        assert!(reduction(&TensorView::empty(DType::Bool), ReduceOp::Sum).is_ok());
        for dtype in [DType::Float16, DType::BFloat16, DType::Float32, DType::Float64, DType::Int64, DType::UInt8] {
            assert!(reduction(&TensorView::empty(dtype), ReduceOp::Sum).is_ok(), "{dtype}");
        }
    }
}
