//! Collectives in which members read each other's tensors ([`crate::collectives::paths`]): all-reduce, reduce-scatter,
//! all-gather and broadcast. Nobody copies its values for the others.
//!
//! - DIRECT-1: a member publishes where its tensors are with its call. They stay there, and keep the values that others
//!   still read, until the last synchronisation of the call: no member returns before.
//! - DIRECT-2: a member that fails in the call withdraws before it returns, because its caller may then free or change a
//!   tensor that others still read. Those that see this after their last read fail, too.

use std::ops::Range;

use super::SyncSteps;
use crate::buffer::{DType, ReduceOp, TensorView};
use crate::collectives::call::{Call, Kind};
use crate::collectives::kernels::{self, Fold, FoldStage};
use crate::collectives::{Group, Request};
use crate::error::{Error, Result};
use crate::transport::Members;
use crate::transport::shm::SharedMemory;
use crate::transport::shm::layout::ARENA_BYTES;
use crate::transport::shm::member_memory::{MemberMemory, unreadable};

/// Bytes that a member reduces between two synchronisations: as few synchronisations as possible, while the results of
/// all members stay in the last-level cache until the others read them.
const SHARD_BYTES: usize = 1 << 20;
/// Bytes that are read of all others before they are reduced, so that they stay in the second-level cache.
const PART_BYTES: usize = 256 << 10;
const _: () = assert!(PART_BYTES <= ARENA_BYTES);
/// The largest group: more members would read less than a page of each other at a time.
const MAX_MEMBERS: usize = PART_BYTES / 4096;

/// The largest number of bytes that a member reads of another one, if these collectives can run the call: that depends on
/// what all members agree on, and on what the system permits.
pub(super) fn longest_read(call: &Call, group: &Group<'_>) -> Option<usize> {
    group.memory?.direct()?;
    if group.members.size() > MAX_MEMBERS {
        return None;
    }
    let elems = match call.kind {
        Kind::AllReduce | Kind::Broadcast => call.elems,
        Kind::AllGather => call.received.iter().copied().max()?,
        Kind::ReduceScatter => call.sent.iter().copied().max()?,
        _ => return None,
    };
    elems.checked_mul(call.dtype.size())
}

/// Runs the call; returns whether it could: not if a member's tensor cannot be read by others. Then all members have
/// agreed on the call, and nothing else has happened.
pub(super) fn run(request: &Request, call: &Call, group: &Group<'_>) -> Result<bool> {
    let memory = group.shared();
    let peers = memory.direct().expect("`longest_read` found it");
    let mut steps = SyncSteps::new(memory, call, group);
    publish(request, memory, peers);
    steps.sync()?;
    let tensors = DirectReads { memory, peers, group };
    if !tensors.all_are_readable() {
        return Ok(false);
    }
    let outcome = match request {
        Request::AllReduce { input, output, op } => tensors.all_reduce(call, [input, output], *op, &mut steps),
        Request::ReduceScatter { inputs, output, op } => tensors.reduce_scatter(&inputs[memory.me()], output, *op),
        Request::AllGather { input, outputs } => tensors.all_gather(input, outputs),
        Request::Broadcast { data, root } => tensors.broadcast(data, *root),
        other => unreachable!("`longest_read` accepts no {other:?}"),
    };
    // The members whose tensors this one has read, and those that have read its own, are done (DIRECT-1).
    let outcome = outcome.and_then(|()| steps.sync());
    let outcome = outcome.and_then(|()| memory.check_withdrawn(&group.wait));
    if let Err(error) = &outcome {
        memory.withdraw(match error {
            Error::PeerFailed { rank, .. } => *rank,
            _ => group.members.ranks[memory.me()],
        });
    }
    outcome.map(|()| true)
}

/// Publishes where this member's tensors are: for an all-reduce the input and the output, for others the block for each
/// member. A tensor that cannot be read is at 0, and one without bytes is anywhere else.
fn publish(request: &Request, memory: &SharedMemory, peers: &MemberMemory) {
    let address = |view: &TensorView| match view.bytes() {
        0 => 1,
        bytes if peers.is_readable(view.ptr(), bytes) => view.ptr() as u64,
        _ => 0,
    };
    let size = memory.size();
    let mut addresses = vec![1; size];
    match request {
        Request::AllReduce { input, output, .. } => {
            addresses[0] = address(input);
            addresses[1] = if output.ptr() == input.ptr() { addresses[0] } else { address(output) };
        }
        Request::ReduceScatter { inputs, .. } => {
            addresses = inputs.iter().map(address).collect();
            // Nobody reads this member's own block.
            addresses[memory.me()] = 1;
        }
        Request::AllGather { input, .. } => addresses.fill(address(input)),
        Request::Broadcast { data, root } if *root == memory.me() => addresses.fill(address(data)),
        _ => {}
    }
    let words = memory.direct_words(memory.me(), memory.phase().wrapping_add(1));
    for (at, address) in addresses.into_iter().enumerate() {
        // SAFETY: the place has a word for each member behind the first one; peers read it after the next arrival.
        unsafe { words.add(1 + at).write(address) };
    }
}

/// The members' tensors during one call.
struct DirectReads<'a> {
    memory: &'a SharedMemory,
    peers: &'a MemberMemory,
    group: &'a Group<'a>,
}

impl DirectReads<'_> {
    /// What `rank` has published at `place` with this call, which is the last phase with one.
    fn address(&self, rank: usize, place: usize, phase: u32) -> u64 {
        // SAFETY: inside the place, aligned; any bits are a value.
        unsafe { self.memory.direct_words(rank, phase).add(1 + place).read_volatile() }
    }

    fn all_are_readable(&self) -> bool {
        let (size, phase) = (self.memory.size(), self.memory.phase());
        (0..size).all(|rank| (0..size).all(|place| self.address(rank, place, phase) != 0))
    }

    /// Reads bytes of another member.
    ///
    /// # Safety
    /// `to` is valid for writes of `bytes` bytes, and no other code accesses them.
    unsafe fn read(&self, rank: usize, from: u64, to: *mut u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        let read = unsafe { self.peers.read(rank, from, to, bytes) };
        let wait = &self.group.wait;
        read.map_err(|error| match self.memory.check_withdrawn(wait) {
            // It may have freed the tensor since.
            Err(withdrawn) => withdrawn,
            Ok(()) => {
                let Members { ranks, me } = self.group.members;
                unreadable(ranks[rank], ranks[*me], &error, wait)
            }
        })
    }

    /// The other members, beginning with the next one, so that they do not all read the same one.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, size) = (self.memory.me(), self.memory.size());
        (1..size).map(move |distance| (me + distance) % size)
    }

    /// Each member reduces its shard of a chunk, and then reads the others' shards of it.
    fn all_reduce(
        &self,
        call: &Call,
        [input, output]: [&TensorView; 2],
        op: ReduceOp,
        steps: &mut SyncSteps<'_>,
    ) -> Result<()> {
        let (me, size, phase) = (self.memory.me(), self.memory.size(), self.memory.phase());
        let addresses: Vec<[u64; 2]> =
            (0..size).map(|rank| [0, 1].map(|place| self.address(rank, place, phase))).collect();
        let bytes = call.bytes();
        let chunk_bytes = size * SHARD_BYTES;
        let chunks = bytes.div_ceil(chunk_bytes);
        // The bytes of chunk `chunk` that `rank` reduces.
        let shard = |chunk: usize, rank: usize| -> Range<usize> {
            let start = chunk * chunk_bytes;
            let length = chunk_bytes.min(bytes - start);
            let part = length.div_ceil(size).next_multiple_of(64);
            start + (rank * part).min(length)..start + ((rank + 1) * part).min(length)
        };
        for step in 0..=chunks {
            if step < chunks {
                let range = shard(step, me);
                let from = |rank: usize| addresses[rank][0].wrapping_add(range.start as u64);
                let [own, to] = [input, output].map(|view| view.ptr().wrapping_add(range.start));
                // SAFETY: the range lies inside the input and the output. Others read other shards of this input, and
                // this shard of the output after the next arrival.
                unsafe { self.reduce(call.dtype, op, range.len(), from, own, to)? };
            }
            if let Some(chunk) = step.checked_sub(1) {
                for rank in self.others() {
                    let range = shard(chunk, rank);
                    let from = addresses[rank][1].wrapping_add(range.start as u64);
                    // SAFETY: the range lies inside the output. If that is the input, its only reader was `rank`, before
                    // it arrived with the result.
                    unsafe { self.read(rank, from, output.ptr().wrapping_add(range.start), range.len())? };
                }
            }
            if step < chunks {
                steps.sync()?;
            }
        }
        Ok(())
    }

    fn reduce_scatter(&self, input: &TensorView, output: &TensorView, op: ReduceOp) -> Result<()> {
        let (me, phase) = (self.memory.me(), self.memory.phase());
        let addresses: Vec<u64> = (0..self.memory.size()).map(|rank| self.address(rank, me, phase)).collect();
        // SAFETY: the output is as long as the input, and is the same memory or apart from it. Nobody else reads either.
        unsafe { self.reduce(output.dtype(), op, output.bytes(), |rank| addresses[rank], input.ptr(), output.ptr()) }
    }

    fn all_gather(&self, input: &TensorView, outputs: &[TensorView]) -> Result<()> {
        let (me, phase) = (self.memory.me(), self.memory.phase());
        if input.ptr() != outputs[me].ptr() {
            // SAFETY: validation ensured equal lengths; they are the same memory or do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(input.ptr(), outputs[me].ptr(), input.bytes()) };
        }
        for rank in self.others() {
            let output = &outputs[rank];
            // SAFETY: the output is this call's.
            unsafe { self.read(rank, self.address(rank, me, phase), output.ptr(), output.bytes())? };
        }
        Ok(())
    }

    fn broadcast(&self, data: &TensorView, root: usize) -> Result<()> {
        let me = self.memory.me();
        if me == root {
            return Ok(());
        }
        // SAFETY: the tensor is this call's.
        unsafe { self.read(root, self.address(root, me, self.memory.phase()), data.ptr(), data.bytes()) }
    }

    /// Reduces `bytes` bytes of all members, which are at `from(rank)` of the others and at `own` of this one, to `to`.
    ///
    /// # Safety
    /// `own` is valid for reads and `to` for writes of `bytes` bytes; they are the same or do not overlap, and no other
    /// member writes the one or reads the other. Elements of the type are aligned in both.
    unsafe fn reduce(
        &self,
        dtype: DType,
        op: ReduceOp,
        bytes: usize,
        from: impl Fn(usize) -> u64,
        own: *const u8,
        to: *mut u8,
    ) -> Result<()> {
        let (me, size) = (self.memory.me(), self.memory.size());
        let part_bytes = (PART_BYTES / (size - 1)) & !63;
        let mut sources = vec![std::ptr::null(); size];
        for start in (0..bytes).step_by(part_bytes) {
            let length = part_bytes.min(bytes - start);
            // The parts go to this member's results area. Other members read earlier results there, but they have done so
            // before they arrived with this call.
            let mut place = 0;
            for (rank, source) in sources.iter_mut().enumerate() {
                if rank == me {
                    *source = own.wrapping_add(start);
                    continue;
                }
                let part = self.memory.results(me, place);
                // SAFETY: the parts of all others fit the area, one behind the other.
                unsafe { self.read(rank, from(rank).wrapping_add(start as u64), part, length)? };
                *source = part.cast_const();
                place += part_bytes;
            }
            let fold = Fold {
                dtype,
                op,
                sources: &sources,
                stage: FoldStage::Whole,
                outputs: &[to.wrapping_add(start)],
                elems: length / dtype.size(),
                prefetch: std::ptr::null(),
            };
            // SAFETY: the sources are the parts that were just read and the own one; the output is the own one's place or
            // apart from all. Validation checked the op.
            unsafe { kernels::fold(&fold) };
        }
        Ok(())
    }
}
