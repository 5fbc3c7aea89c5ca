//! Reductions of groups with one member on each host. Each piece of the tensor is reduced by one member, to which all
//! others send their values.
//!
//! ```text
//!              member 0            member 1            member 2
//!   values     piece 1 --------> fold 0, 1, 2 <------ piece 1
//!   result     write <----------- piece 1 ----------> write
//! ```
//!
//! In an all-reduce, members reduce pieces in turn, so all of them send, receive and add the same number of values.
//! Compared with a chain ([`super::chain`]): there, the last host adds all values of two hosts while the other one waits;
//! a result arrives after two transfers for each further host, here after two in all; and a carry of 16-bit values has
//! 32 bits, while these values are sent as they are.
//!
//! - DST-1: the values of all members are folded at once, in rank order (COL-1).
//! - DST-2: the result of a piece may overwrite input values. It is computed from the values of all members, so they
//!   have been sent by then.
//! - DST-3: a member sends at most `depth` pieces to each reducer before it has their results; it chooses the depth by
//!   measurement ([`depth`](crate::collectives::depth)). It has posted receives for as many pieces, but not more: their
//!   memory is used in turn, and little memory stays in the cache. What others send earlier is buffered. Where members
//!   do not get results, nothing tells the sender how far the reducer is. Then only the transport limits it, and as many
//!   receives as possible are posted. Of pieces that are longer than a frame, only two may be received at
//!   once; their senders keep the others.

use std::collections::VecDeque;

use super::steps::{self, MessageSteps};
use crate::buffer::{DType, ReduceOp, TensorView};
use crate::collectives::call::{Call, Kind};
use crate::collectives::depth::{DepthTimer, MAX_DEPTH, ReductionSize};
use crate::collectives::kernels::{self, Fold, FoldStage};
use crate::collectives::scratch::MAX_KEPT_BYTES;
use crate::collectives::{Group, Request, call_exchange};
use crate::error::Result;
use crate::transport::ports::PAYLOAD_BYTES;
use crate::transport::{Message, Tag};

const TAG_VALUES: Tag = 7 << 40;
const TAG_RESULT: Tag = 8 << 40;

/// The smallest piece that is worth a message of its own.
const MIN_PIECE_BYTES: usize = 16 << 10;
/// The memory for the values of one piece from all peers, if messages are moved without copies: pieces are as long as
/// that allows, since each message has to be announced.
const ZERO_COPY_PIECE_BYTES: usize = 2 << 20;

/// Whether `call` is reduced here: each host has one member, and there are few enough for each to receive from all
/// others. A reduce to one member only between two: with more hosts, that member would receive a tensor from each of
/// them over its link, and in a chain it receives one.
pub(super) fn accepts(call: &Call, group: &Group<'_>) -> bool {
    let (hosts, members) = (group.several_hosts().map.num_hosts(), group.members.size());
    hosts == members && call_exchange::is_direct(hosts) && (call.kind != Kind::Reduce || hosts == 2)
}

/// Runs a reduction whose calls all members have compared.
pub(super) fn run(request: &Request, call: &Call, group: &Group<'_>) -> Result<()> {
    let (me, members) = (group.members.me, group.members.size());
    let max_piece = match group.transport.is_zero_copy() {
        true => (ZERO_COPY_PIECE_BYTES / (members - 1).max(1) / 64 * 64).max(PAYLOAD_BYTES),
        false => PAYLOAD_BYTES,
    };
    let mut to_all = true;
    let (pieces, op) = match request {
        Request::AllReduce { input, output, op } => {
            (pieces_in_turn(input.bytes(), input.ptr(), output.ptr(), members, max_piece), op)
        }
        Request::AllReduceWindow { window, op, .. } => {
            let own = super::window_parts(window, call.bytes(), group)?[0];
            (pieces_in_turn(call.bytes(), own, own, members, max_piece), op)
        }
        Request::Reduce { input, output, op, root } => {
            to_all = false;
            (pieces_of_block(input, (*root == me).then_some(output), *root, max_piece), op)
        }
        Request::ReduceScatter { inputs, output, op } => {
            to_all = false;
            let blocks = inputs.iter().enumerate();
            let pieces_to = |(to, block)| pieces_of_block(block, (to == me).then_some(output), to, max_piece);
            (blocks.flat_map(pieces_to).collect(), op)
        }
        _ => unreachable!("`accepts` takes reductions only"),
    };
    // SAFETY: tensors and the window's range contain their pieces, and are the operation's until it has ended. Members
    // agree on the calls. Validation checked the op.
    let mut reduction = unsafe { DistributedReduction::new(call.dtype, *op, &pieces, to_all, group) };
    steps::run(&mut reduction, group)
}

/// A range of the tensor.
#[derive(Clone, Copy, Debug)]
struct ReducedPiece {
    bytes: usize,
    /// The values of this member.
    input: *const u8,
    /// Where this member wants the result; null if it gets none.
    output: *mut u8,
    /// The member that reduces it.
    reducer: usize,
}

/// Cuts `bytes` bytes at `input` into pieces of at most `max_piece` bytes, which the members reduce in turn. The result
/// goes to `output`.
fn pieces_in_turn(
    bytes: usize,
    input: *const u8,
    output: *mut u8,
    members: usize,
    max_piece: usize,
) -> Vec<ReducedPiece> {
    let cut = piece_bytes(bytes.div_ceil(members), max_piece);
    let starts = (0..bytes).step_by(cut).enumerate();
    starts
        .map(|(index, start)| ReducedPiece {
            bytes: cut.min(bytes - start),
            input: input.wrapping_add(start),
            output: output.wrapping_add(start),
            reducer: index % members,
        })
        .collect()
}

/// Cuts a block into pieces, which `reducer` reduces; only that member has an output.
fn pieces_of_block(
    block: &TensorView,
    output: Option<&TensorView>,
    reducer: usize,
    max_piece: usize,
) -> Vec<ReducedPiece> {
    let cut = piece_bytes(block.bytes(), max_piece);
    let starts = (0..block.bytes()).step_by(cut);
    starts
        .map(|start| ReducedPiece {
            bytes: cut.min(block.bytes() - start),
            input: block.ptr().wrapping_add(start),
            output: output.map_or(std::ptr::null_mut(), |output| output.ptr().wrapping_add(start)),
            reducer,
        })
        .collect()
}

/// The length of pieces if one member reduces `share` bytes. Few long pieces are faster than many short ones, even if a
/// member then has a single one. Each fits one frame, so that no message has to be announced before it is sent, unless
/// messages are moved without copies.
fn piece_bytes(share: usize, max_piece: usize) -> usize {
    share.next_multiple_of(64).clamp(MIN_PIECE_BYTES, max_piece)
}

/// A member and the messages between it and this one.
struct PeerProgress {
    member: usize,
    /// The pieces that it reduces.
    pieces: Vec<usize>,
    /// How many of them have been sent; for how many a receive of the result is posted; and how many are done, because
    /// their result has arrived, or the values are sent if there is none.
    sent: usize,
    posted: usize,
    done: usize,
    results: VecDeque<Message>,
}

/// The values of a piece that this member reduces.
struct IncomingValues {
    /// One for each peer, in their order, with the memory of all.
    messages: Vec<Message>,
    memory: Vec<u128>,
}

struct OutgoingMessage {
    message: Message,
    /// The peer to which values are sent; none if it is a result.
    values_to: Option<usize>,
}

/// A reduction that is under way. When it is dropped, no message uses the tensors any more.
struct DistributedReduction<'a> {
    dtype: DType,
    op: ReduceOp,
    pieces: &'a [ReducedPiece],
    group: &'a Group<'a>,
    /// Whether all members get the result. Otherwise only the reducer does.
    to_all: bool,
    peers: Vec<PeerProgress>,
    /// The pieces that this member reduces; for how many receives are posted, and how many are done.
    own: Vec<usize>,
    posted: usize,
    done: usize,
    /// How many bytes of the next one are reduced.
    folded: usize,
    incoming: VecDeque<IncomingValues>,
    outgoing: Vec<OutgoingMessage>,
    depth: DepthTimer<'a>,
}

impl Drop for DistributedReduction<'_> {
    fn drop(&mut self) {
        self.awaited().for_each(|message| self.group.transport.cancel(message));
    }
}

impl<'a> DistributedReduction<'a> {
    /// Begins this member's part of the reduction of `pieces`.
    ///
    /// # Safety
    /// The inputs and outputs of pieces are valid until it is dropped, and only this operation accesses them. Their
    /// lengths are multiples of the element size. [`kernels::check`] accepts the pair of dtype and op.
    unsafe fn new(dtype: DType, op: ReduceOp, pieces: &'a [ReducedPiece], to_all: bool, group: &'a Group<'a>) -> Self {
        let reduced_by = |member: usize| -> Vec<usize> {
            (0..pieces.len()).filter(|piece| pieces[*piece].reducer == member).collect()
        };
        let me = group.members.me;
        let peers: Vec<PeerProgress> = (0..group.members.size())
            .filter(|member| *member != me)
            .map(|member| PeerProgress {
                member,
                pieces: reduced_by(member),
                sent: 0,
                posted: 0,
                done: 0,
                results: VecDeque::new(),
            })
            .collect();
        let own = reduced_by(me);
        let results = if to_all { pieces.len() - own.len() } else { 0 };
        let depth = group.depths.begin(ReductionSize { pieces: pieces.len(), results });
        Self {
            dtype,
            op,
            pieces,
            group,
            to_all,
            peers,
            own,
            posted: 0,
            done: 0,
            folded: 0,
            incoming: VecDeque::new(),
            outgoing: Vec::new(),
            depth,
        }
    }

    /// Reduces the next piece if its values have arrived; returns whether they had.
    fn reduce(&mut self) -> Result<bool> {
        let Some(values) = self.incoming.front() else { return Ok(false) };
        for message in &values.messages {
            match message.poll() {
                None => return Ok(false),
                Some(Err(error)) => return Err(error),
                Some(Ok(_)) => {}
            }
        }
        let piece = &self.pieces[self.own[self.done]];
        let (start, me) = (self.folded, self.group.members.me);
        // Other messages are moved between the parts of a long piece.
        let bytes = PAYLOAD_BYTES.min(piece.bytes - start);
        let mut received = (0..self.peers.len()).map(|place| values_at(&values.memory, piece.bytes, place));
        let sources: Vec<*const u8> = (0..self.group.members.size())
            .map(|member| if member == me { piece.input } else { received.next().expect("there is one for each peer") })
            .map(|values| values.wrapping_add(start))
            .collect();
        let next = self.own.get(self.done + 1).map_or(std::ptr::null(), |next| self.pieces[*next].input);
        let is_last = start + bytes == piece.bytes;
        let fold = Fold {
            dtype: self.dtype,
            op: self.op,
            sources: &sources,
            stage: FoldStage::Whole,
            outputs: &[piece.output.wrapping_add(start)],
            elems: bytes / self.dtype.size(),
            prefetch: if is_last { next } else { std::ptr::null() },
        };
        // SAFETY: the values have arrived, aligned, with as many bytes each; the output is this member's input or apart
        // from all sources.
        unsafe { kernels::fold(&fold) };
        if !is_last {
            self.folded += bytes;
            return Ok(true);
        }
        self.folded = 0;
        self.done += 1;
        let IncomingValues { memory, .. } = self.incoming.pop_front().expect("it has a front");
        self.group.scratch.put(memory);
        if self.to_all {
            for peer in &self.peers {
                // SAFETY: no code writes to the result's memory before this operation is complete or dropped.
                let message =
                    unsafe { self.group.transport.post_send(peer.member, TAG_RESULT, piece.output, piece.bytes) };
                self.outgoing.push(OutgoingMessage { message, values_to: None });
            }
        }
        Ok(true)
    }

    /// Counts results that have arrived.
    fn take_results(&mut self) -> Result<bool> {
        let mut moved = false;
        for peer in &mut self.peers {
            while let Some(result) = peer.results.front().and_then(Message::poll) {
                result?;
                peer.results.pop_front();
                peer.done += 1;
                self.depth.note_result();
                moved = true;
            }
        }
        Ok(moved)
    }

    /// Sends the values of a piece to a peer that may get more (DST-3); returns whether there is one.
    fn send_values(&mut self) -> bool {
        let depth = self.depth.pieces();
        // Each member begins with the one behind it, so that they do not all send to the same one. `peers[i]` is member i, or
        // i + 1 if this member is before it.
        let in_turn = (0..self.peers.len()).map(|step| (self.group.members.me + step) % self.peers.len());
        let may_send = |peer: &usize| {
            let peer = &self.peers[*peer];
            peer.sent < peer.pieces.len().min(peer.done + depth)
        };
        let Some(index) = in_turn.filter(may_send).min_by_key(|peer| self.peers[*peer].sent) else { return false };
        let peer = &mut self.peers[index];
        let piece = &self.pieces[peer.pieces[peer.sent]];
        // SAFETY: only the piece's result may overwrite the values, and it arrives after they have been sent (DST-2).
        let message = unsafe { self.group.transport.post_send(peer.member, TAG_VALUES, piece.input, piece.bytes) };
        self.outgoing.push(OutgoingMessage { message, values_to: Some(index) });
        peer.sent += 1;
        true
    }

    /// Forgets messages that have been sent.
    fn end_sends(&mut self) -> Result<bool> {
        let mut outcome = Ok(());
        let before = self.outgoing.len();
        let (peers, to_all) = (&mut self.peers, self.to_all);
        self.outgoing.retain(|outgoing| {
            let Some(result) = outgoing.message.poll() else { return true };
            if let (Some(peer), false) = (outgoing.values_to, to_all) {
                peers[peer].done += 1;
            }
            if let (Err(error), Ok(())) = (result, &outcome) {
                outcome = Err(error);
            }
            false
        });
        outcome.map(|()| self.outgoing.len() < before)
    }
}

impl MessageSteps for DistributedReduction<'_> {
    fn post(&mut self) {
        let transport = self.group.transport;
        let open = if self.to_all { self.depth.pieces() } else { MAX_DEPTH };
        while self.posted < self.own.len().min(self.done + open) {
            let bytes = self.pieces[self.own[self.posted]].bytes;
            // While two long pieces are being received, the next one waits with its sender, unless the memory that the
            // group keeps is enough for it, too.
            let is_long =
                bytes > PAYLOAD_BYTES && (self.incoming.len() + 1) * bytes * self.peers.len() > MAX_KEPT_BYTES;
            if is_long && self.incoming.len() >= 2 {
                break;
            }
            let mut memory = self.group.scratch.take(bytes.next_multiple_of(16) * self.peers.len());
            let start: *mut u8 = memory.as_mut_ptr().cast();
            let messages = (self.peers.iter().enumerate())
                .map(|(place, peer)| {
                    let place = start.wrapping_add(place * bytes.next_multiple_of(16));
                    // SAFETY: the place has that many bytes. The memory does not move, and only this message accesses it
                    // until it is complete or cancelled.
                    unsafe { transport.post_recv(Some(peer.member), TAG_VALUES, place, bytes) }
                })
                .collect();
            self.incoming.push_back(IncomingValues { messages, memory });
            self.posted += 1;
        }
        let depth = self.depth.pieces();
        for peer in self.peers.iter_mut().filter(|_| self.to_all) {
            while peer.posted < peer.pieces.len().min(peer.done + depth) {
                let piece = &self.pieces[peer.pieces[peer.posted]];
                // SAFETY: as above; the result overwrites values only after they have been sent (DST-2).
                let message = unsafe { transport.post_recv(Some(peer.member), TAG_RESULT, piece.output, piece.bytes) };
                peer.results.push_back(message);
                peer.posted += 1;
            }
        }
    }

    fn step(&mut self) -> Result<bool> {
        let arrived = self.take_results()?;
        let ended = self.end_sends()?;
        // One thing at a time, since frames are received in between. Values that have arrived go first: more of them would
        // have to be buffered meanwhile.
        Ok(self.reduce()? || self.send_values() || arrived || ended)
    }

    fn is_complete(&self) -> bool {
        self.done == self.own.len()
            && self.outgoing.is_empty()
            && self.peers.iter().all(|peer| peer.done == peer.pieces.len())
    }

    fn awaited(&self) -> impl Iterator<Item = &Message> {
        let values = self.incoming.iter().flat_map(|values| &values.messages);
        let results = self.peers.iter().flat_map(|peer| &peer.results);
        values.chain(results).chain(self.outgoing.iter().map(|outgoing| &outgoing.message))
    }
}

/// The values of `bytes` bytes from the peer at `place`.
fn values_at(memory: &[u128], bytes: usize, place: usize) -> *const u8 {
    memory.as_ptr().cast::<u8>().wrapping_add(place * bytes.next_multiple_of(16))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Device;

    /// Checks that pieces follow each other without gaps, and fit one frame and every element; returns their bytes.
    fn check(pieces: &[ReducedPiece], start: *const u8) -> usize {
        pieces.iter().fold(0, |bytes, piece| {
            assert_eq!(piece.input, start.wrapping_add(bytes));
            assert!(piece.bytes.is_multiple_of(16) && (1..=PAYLOAD_BYTES).contains(&piece.bytes), "{piece:?}");
            bytes + piece.bytes
        })
    }

    #[test]
    fn pieces_cover_the_tensor_and_members_reduce_equally_many() {
        let start: *mut u8 = std::ptr::without_provenance_mut(4096);
        for bytes in [0, 16, 16 << 10, 100_000, 1 << 20, 3 << 20] {
            for members in [2, 3, 8] {
                let pieces = pieces_in_turn(bytes, start, start, members, PAYLOAD_BYTES);
                assert_eq!(check(&pieces, start), bytes);
                let reduced = |member: usize| pieces.iter().filter(|piece| piece.reducer == member).count();
                assert!(reduced(0) - reduced(members - 1) <= 1, "{bytes} {members}");
            }
            // SAFETY: nothing reads the memory.
            let block = unsafe { TensorView::new(start, bytes, DType::UInt8, Device::Cpu, 0) }.unwrap();
            for output in [None, Some(&block)] {
                let pieces = pieces_of_block(&block, output, 1, PAYLOAD_BYTES);
                assert_eq!(check(&pieces, start), bytes);
                assert!(pieces.iter().all(|piece| piece.reducer == 1 && piece.output.is_null() == output.is_none()));
            }
        }
    }
}
