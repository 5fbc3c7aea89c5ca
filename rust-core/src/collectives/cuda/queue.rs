//! Maps a request to NCCL's operations. Operations that NCCL lacks are composed of broadcasts, reductions or messages
//! in one NCCL group.

use crate::buffer::TensorView;
use crate::collectives::Request;
use crate::device::Stream;
use crate::device::nccl::Comm;
use crate::error::{Error, Result};

/// Queues `request` of member `me` of `size`.
///
/// # Safety
/// The views satisfy the request, on the communicator's device, until the queued work is done; the stream belongs to
/// that device.
pub(super) unsafe fn queue(comm: &Comm, request: &Request, me: usize, size: usize, stream: &Stream) -> Result<()> {
    // SAFETY, for every call of the function: the caller's promise, and lengths that validation of the request
    // checked.
    match request {
        Request::AllReduce { input, output, op } => {
            // SAFETY: see above.
            unsafe { comm.all_reduce(input, output, *op, stream) }
        }
        Request::Reduce { input, output, op, root } => {
            let output = if me == *root { output } else { input };
            // SAFETY: see above; NCCL writes the output of the root only.
            unsafe { comm.reduce(input, output, *op, *root, stream) }
        }
        Request::Broadcast { data, root } => {
            // SAFETY: see above.
            unsafe { comm.broadcast(data, data, *root, stream) }
        }
        Request::AllGather { input, outputs } => match row(outputs)? {
            // SAFETY: see above; the blocks lie side by side.
            Some(start) => unsafe { comm.all_gather(input, start, stream) },
            None => comm.group(|| {
                for (root, output) in outputs.iter().enumerate().filter(|(_, output)| output.elems() > 0) {
                    let source = if root == me { input } else { output };
                    // SAFETY: see above.
                    unsafe { comm.broadcast(source, output, root, stream) }?;
                }
                Ok(())
            }),
        },
        Request::Gather { input, outputs, root } => comm.group(|| {
            // SAFETY, for both loops: see above.
            if input.elems() > 0 {
                // SAFETY: see above.
                unsafe { comm.send(input, *root, stream) }?;
            }
            for (from, output) in outputs.iter().enumerate().filter(|(_, output)| output.elems() > 0) {
                // SAFETY: see above.
                unsafe { comm.recv(output, from, stream) }?;
            }
            Ok(())
        }),
        Request::Scatter { inputs, output, root } => comm.group(|| {
            for (to, input) in inputs.iter().enumerate().filter(|(_, input)| input.elems() > 0) {
                // SAFETY: see above.
                unsafe { comm.send(input, to, stream) }?;
            }
            if output.elems() > 0 {
                // SAFETY: see above.
                unsafe { comm.recv(output, *root, stream) }?;
            }
            Ok(())
        }),
        Request::ReduceScatter { inputs, output, op } => match row(inputs)? {
            // SAFETY: see above; the blocks lie side by side.
            Some(start) => unsafe { comm.reduce_scatter(start, output, *op, stream) },
            None => comm.group(|| {
                for (root, input) in inputs.iter().enumerate().filter(|(_, input)| input.elems() > 0) {
                    let output = if root == me { output } else { input };
                    // SAFETY: see above; NCCL writes the output of the root only.
                    unsafe { comm.reduce(input, output, *op, root, stream) }?;
                }
                Ok(())
            }),
        },
        Request::AllToAll { inputs, outputs } => comm.group(|| {
            for peer in 0..size {
                if inputs[peer].elems() > 0 {
                    // SAFETY: see above.
                    unsafe { comm.send(&inputs[peer], peer, stream) }?;
                }
                if outputs[peer].elems() > 0 {
                    // SAFETY: see above.
                    unsafe { comm.recv(&outputs[peer], peer, stream) }?;
                }
            }
            Ok(())
        }),
        Request::Send { data, to, .. } => {
            // SAFETY: see above.
            unsafe { comm.send(data, *to, stream) }
        }
        Request::Recv { data, from: Some(from), .. } => {
            // SAFETY: see above.
            unsafe { comm.recv(data, *from, stream) }
        }
        Request::Recv { from: None, .. }
        | Request::AllReduceWindow { .. }
        | Request::AllGatherRows { .. }
        | Request::AllToAllRows { .. }
        | Request::Adasum { .. }
        | Request::Barrier => {
            Err(Error::Internal("an operation that devices do not support was queued on a device".into()))
        }
    }
}

/// If all messages are from member `me` to itself, returns the copies that replace them, as source and destination.
/// The n-th send matches the n-th receive.
pub(super) fn to_oneself(requests: &[Request], me: usize) -> Result<Option<Vec<(TensorView, TensorView)>>> {
    let (mut sent, mut received) = (Vec::new(), Vec::new());
    for request in requests {
        match request {
            Request::Send { data, to, .. } if *to == me => sent.push(*data),
            Request::Recv { data, from, .. } if *from == Some(me) => received.push(*data),
            _ => return Ok(None),
        }
    }
    if sent.len() != received.len() || sent.iter().zip(&received).any(|(from, to)| from.bytes() != to.bytes()) {
        return Err(Error::InvalidArgument(
            "messages to oneself on a device are sent and received together, each with as many bytes".to_owned(),
        ));
    }
    Ok(Some(sent.into_iter().zip(received).collect()))
}

/// The start of blocks of equal length. They must be adjacent, because a member does not know whether the others'
/// are, and all members must choose the same NCCL operation.
fn row(blocks: &[TensorView]) -> Result<Option<*mut u8>> {
    let Some(first) = blocks.first() else { return Ok(None) };
    let bytes = first.bytes();
    if blocks.iter().any(|block| block.bytes() != bytes) {
        return Ok(None);
    }
    let beside = |(at, block): (usize, &TensorView)| block.ptr() as usize == first.ptr() as usize + at * bytes;
    if bytes > 0 && !blocks.iter().enumerate().all(beside) {
        return Err(Error::InvalidArgument("blocks of equal length on a device must be contiguous".to_owned()));
    }
    Ok(Some(first.ptr()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::{DType, Device};

    fn view(start: usize, elems: usize) -> TensorView {
        // SAFETY: no code reads or writes through it.
        unsafe { TensorView::new(start as *mut u8, elems, DType::Float32, Device::Cuda(0), 0) }.unwrap()
    }

    #[test]
    fn messages_to_oneself_are_copies_in_order() {
        let send = |start, elems, to| Request::Send { data: view(start, elems), to, tag: 0 };
        let recv = |start, elems, from| Request::Recv { data: view(start, elems), from: Some(from), tag: 0 };
        let own = to_oneself(&[recv(64, 4, 1), send(128, 4, 1), send(256, 3, 1), recv(192, 3, 1)], 1).unwrap().unwrap();
        let addresses: Vec<_> = own.iter().map(|(from, to)| (from.ptr() as usize, to.ptr() as usize)).collect();
        assert_eq!(addresses, [(128, 64), (256, 192)]);
        assert!(to_oneself(&[recv(64, 4, 1), send(128, 4, 0)], 1).unwrap().is_none());
        assert!(to_oneself(&[recv(64, 4, 1)], 1).is_err());
        assert!(to_oneself(&[recv(64, 4, 1), send(128, 3, 1)], 1).is_err());
    }

    #[test]
    fn a_row_is_equal_blocks_side_by_side() {
        assert_eq!(row(&[view(64, 4), view(80, 4), view(96, 4)]).unwrap(), Some(64 as *mut u8));
        assert!(row(&[view(64, 4), view(96, 4), view(80, 4)]).is_err());
        assert_eq!(row(&[view(64, 4), view(80, 3)]).unwrap(), None);
        assert_eq!(row(&[]).unwrap(), None);
    }
}
