//! All operations over point-to-point messages, for transports without shared memory. All messages of a step are in
//! flight at the same time; each reduction runs on the member that receives the values.

use super::{Algorithm, copy};
use crate::buffer::{ReduceOp, TensorView};
use crate::collectives::agreement::{TAG_DATA, agree_without_memory};
use crate::collectives::call::Call;
use crate::collectives::kernels::{self, Fold, FoldStage};
use crate::collectives::{Group, Request};
use crate::error::Result;
use crate::transport::wait_all;

/// All collectives over point-to-point messages, for groups without shared memory.
pub(super) struct MessageAlgorithm;

impl Algorithm for MessageAlgorithm {
    fn name(&self) -> &'static str {
        "messages"
    }

    fn accepts(&self, _call: &Call, _group: &Group<'_>) -> bool {
        true
    }

    fn run(&self, request: &Request, call: &Call, group: &Group<'_>) -> Result<()> {
        agree_without_memory(call, group)?;
        let (me, size) = (group.members.me, group.members.size());
        let others = || (1..size).map(|distance| (me + distance) % size);
        match request {
            Request::AllReduce { input, output, op } => all_reduce(group, input, output, *op),
            Request::AllReduceWindow { window, offset_bytes, elems, dtype, op } => {
                // SAFETY: the call was validated, so the range lies inside this member's part of the window, which
                // lives as long as the request.
                let view = unsafe {
                    let start = window.local().add(*offset_bytes);
                    TensorView::new(start, *elems, *dtype, crate::buffer::Device::Cpu, 0)?
                };
                all_reduce(group, &view, &view, *op)
            }
            Request::Reduce { input, output, op, root } => {
                let mut own = vec![0u8; shards(call.elems, size)[me].1 * call.dtype.size()];
                fold_shard(group, input, &mut own, *op)?;
                let blocks = |view: &TensorView| -> Vec<TensorView> {
                    shards(call.elems, size).iter().map(|(start, elems)| view.slice(*start, *elems)).collect()
                };
                if me != *root {
                    return exchange(group, &[(*root, own.as_ptr(), own.len())], &[]);
                }
                let outputs = blocks(output);
                // SAFETY: the shard has the length of its place in the output; `own` is a buffer of this function.
                unsafe { copy(own.as_ptr(), outputs[me].ptr(), own.len()) };
                let recvs: Vec<_> = others().map(|rank| (rank, outputs[rank].ptr(), outputs[rank].bytes())).collect();
                exchange(group, &[], &recvs)
            }
            Request::Broadcast { data, root } => broadcast(group, data, *root),
            Request::AllGather { input, outputs } => {
                // SAFETY: validation ensured equal lengths; they are the same memory or do not overlap.
                unsafe { copy(input.ptr(), outputs[me].ptr(), input.bytes()) };
                let sends: Vec<_> = others().map(|rank| (rank, input.ptr().cast_const(), input.bytes())).collect();
                let recvs: Vec<_> = others().map(|rank| (rank, outputs[rank].ptr(), outputs[rank].bytes())).collect();
                exchange(group, &sends, &recvs)
            }
            Request::Gather { input, outputs, root } => {
                if me != *root {
                    return exchange(group, &[(*root, input.ptr().cast_const(), input.bytes())], &[]);
                }
                // SAFETY: as for all-gather.
                unsafe { copy(input.ptr(), outputs[me].ptr(), input.bytes()) };
                let recvs: Vec<_> = others().map(|rank| (rank, outputs[rank].ptr(), outputs[rank].bytes())).collect();
                exchange(group, &[], &recvs)
            }
            Request::Scatter { inputs, output, root } => {
                if me != *root {
                    return exchange(group, &[], &[(*root, output.ptr(), output.bytes())]);
                }
                // SAFETY: as for all-gather.
                unsafe { copy(inputs[me].ptr(), output.ptr(), output.bytes()) };
                let send = |rank: usize| (rank, inputs[rank].ptr().cast_const(), inputs[rank].bytes());
                exchange(group, &others().map(send).collect::<Vec<_>>(), &[])
            }
            Request::ReduceScatter { inputs, output, op } => {
                let views: Vec<_> = inputs.iter().map(|view| (view.ptr().cast_const(), view.bytes())).collect();
                fold_blocks(group, &views, output.ptr(), call, *op)
            }
            Request::AllToAll { inputs, outputs } => {
                // SAFETY: as for all-gather.
                unsafe { copy(inputs[me].ptr(), outputs[me].ptr(), inputs[me].bytes()) };
                let send = |rank: usize| (rank, inputs[rank].ptr().cast_const(), inputs[rank].bytes());
                let recv = |rank: usize| (rank, outputs[rank].ptr(), outputs[rank].bytes());
                exchange(group, &others().map(send).collect::<Vec<_>>(), &others().map(recv).collect::<Vec<_>>())
            }
            // The arrival is the barrier.
            Request::Barrier => Ok(()),
            Request::Adasum { .. } => unreachable!("it has an algorithm of its own"),
            Request::AllGatherRows { .. } | Request::AllToAllRows { .. } => unreachable!("they are settled first"),
            Request::Send { .. } | Request::Recv { .. } => unreachable!("messages between pairs are not collectives"),
        }
    }
}

/// Runs sends `(to, data, bytes)` and receives `(from, data, bytes)` at once.
pub(super) fn exchange(
    group: &Group<'_>,
    sends: &[(usize, *const u8, usize)],
    recvs: &[(usize, *mut u8, usize)],
) -> Result<()> {
    let mut messages = Vec::with_capacity(sends.len() + recvs.len());
    // SAFETY: the callers pass memory that no other code uses until this function returns, and `wait_all` completes
    // or cancels every message before that.
    unsafe {
        for (from, data, bytes) in recvs {
            messages.push(group.transport.post_recv(Some(*from), TAG_DATA, *data, *bytes));
        }
        for (to, data, bytes) in sends {
            messages.push(group.transport.post_send(*to, TAG_DATA, *data, *bytes));
        }
    }
    wait_all(group.transport, &messages, &group.wait)
}

/// Start and length, in elements, of the part that each member reduces.
fn shards(elems: usize, size: usize) -> Vec<(usize, usize)> {
    let part = elems.div_ceil(size);
    (0..size).map(|rank| ((rank * part).min(elems), part.min(elems - (rank * part).min(elems)))).collect()
}

fn all_reduce(group: &Group<'_>, input: &TensorView, output: &TensorView, op: ReduceOp) -> Result<()> {
    let (me, size) = (group.members.me, group.members.size());
    let shards = shards(input.elems(), size);
    let mut own = vec![0u8; shards[me].1 * input.dtype().size()];
    fold_shard(group, input, &mut own, op)?;
    let blocks: Vec<TensorView> = shards.iter().map(|(start, elems)| output.slice(*start, *elems)).collect();
    // SAFETY: the shard has the length of its place in the output; `own` is a buffer of this function.
    unsafe { copy(own.as_ptr(), blocks[me].ptr(), own.len()) };
    let others = || (0..size).filter(|rank| *rank != me);
    let sends: Vec<_> = others().map(|rank| (rank, own.as_ptr(), own.len())).collect();
    let recvs: Vec<_> = others().map(|rank| (rank, blocks[rank].ptr(), blocks[rank].bytes())).collect();
    exchange(group, &sends, &recvs)
}

/// Reduces this member's shard of all members' `input` into `own`.
fn fold_shard(group: &Group<'_>, input: &TensorView, own: &mut [u8], op: ReduceOp) -> Result<()> {
    let size = group.members.size();
    let view = |(start, elems): &(usize, usize)| {
        let view = input.slice(*start, *elems);
        (view.ptr().cast_const(), view.bytes())
    };
    let blocks: Vec<_> = shards(input.elems(), size).iter().map(view).collect();
    let call = Call { dtype: input.dtype(), ..Call::new(crate::collectives::call::Kind::ReduceScatter) };
    fold_blocks(group, &blocks, own.as_mut_ptr(), &call, op)
}

/// Sends block i of each member to member i, which reduces the received blocks into `output`.
fn fold_blocks(
    group: &Group<'_>,
    blocks: &[(*const u8, usize)],
    output: *mut u8,
    call: &Call,
    op: ReduceOp,
) -> Result<()> {
    let (me, size) = (group.members.me, group.members.size());
    let (own, bytes) = blocks[me];
    let mut parts: Vec<Vec<u128>> = (0..size).map(|_| Vec::new()).collect();
    let others = || (0..size).filter(|rank| *rank != me);
    for rank in others() {
        // 128-bit words are aligned for every element.
        parts[rank] = vec![0; bytes.div_ceil(16)];
    }
    let recvs: Vec<_> = others().map(|rank| (rank, parts[rank].as_mut_ptr().cast::<u8>(), bytes)).collect();
    let sends: Vec<_> = others().map(|rank| (rank, blocks[rank].0, blocks[rank].1)).collect();
    exchange(group, &sends, &recvs)?;
    let source = |rank: usize| if rank == me { own } else { parts[rank].as_ptr().cast::<u8>() };
    let sources: Vec<*const u8> = (0..size).map(source).collect();
    let elems = bytes / call.dtype.size();
    // SAFETY: each source has `bytes` bytes, and so has the output, which is the own block or apart from all sources.
    unsafe {
        kernels::fold(&Fold {
            dtype: call.dtype,
            op,
            sources: &sources,
            stage: FoldStage::Whole,
            outputs: &[output],
            elems,
            prefetch: std::ptr::null(),
        })
    };
    Ok(())
}

/// Broadcasts along a binomial tree, so that no member sends to more than log2(n) others.
fn broadcast(group: &Group<'_>, data: &TensorView, root: usize) -> Result<()> {
    let (me, size) = (group.members.me, group.members.size());
    // Positions are relative to the root; the parent of a position lacks its lowest set bit.
    let place = (me + size - root) % size;
    let rank = |place: usize| (place + root) % size;
    let reach = if place == 0 { size.next_power_of_two() } else { 1 << place.trailing_zeros() };
    if place != 0 {
        exchange(group, &[], &[(rank(place - reach), data.ptr(), data.bytes())])?;
    }
    let mut sends = Vec::new();
    let mut step = reach / 2;
    while step > 0 {
        if place + step < size {
            sends.push((rank(place + step), data.ptr().cast_const(), data.bytes()));
        }
        step /= 2;
    }
    exchange(group, &sends, &[])
}
