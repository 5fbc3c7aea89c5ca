//! A reduction that is passed from host to host, in rank order.
//!
//! ```text
//!              span 0 (host a)      span 1 (host b)      span 2 (host c)
//!   carry      fold 0 1 2 -------> + 3 4 5 ----------> + 6 7 8 = result
//!   result     write <------------ write <------------ write
//! ```
//!
//! Tensors are cut into pieces, which are pipelined through the chain, so that all hosts and both directions of their
//! links work at the same time. Each channel has a chain of its own, with one owner on each host, and handles every
//! n-th piece. Each link carries a tensor once in each direction, for any number of hosts.
//!
//! - CHN-1: a span adds its members' values to the carry in the accumulation type, without rounding, and the last
//!   span rounds. This is the order of summation of COL-1.
//! - CHN-2: the result of a piece overwrites input values. By then they have been added: the last span computes the
//!   result from its carry, which exists only after every span has added its values.
//! - CHN-3: an owner touches the parts of a piece only after the piece was released ([`ChannelOwner::work`]), because
//!   the other members have not written their values before. Carries may arrive earlier, in memory of their own.
//! - CHN-4: a member that is alone on its host uses no part if the addresses of its values and of the result are known.
//!   It sends the values from their own memory, if they are a carry already, and receives the result in its output.
//! - CHN-5: an owner that begins the chain of a piece has at most `depth` pieces in flight whose results it awaits; it
//!   chooses the depth by measurement ([`depth`](crate::collectives::depth)). The other owners have posted [`MAX_DEPTH`]
//!   receives, so frames go to the memory of their receives.

use std::collections::VecDeque;
use std::ops::Range;

use super::steps::{self, MessageSteps};
use crate::buffer::{DType, ReduceOp};
use crate::collectives::Group;
use crate::collectives::depth::{DepthTimer, MAX_DEPTH, ReductionSize};
use crate::collectives::kernels::{self, Fold, FoldStage, carry_bytes};
use crate::error::Result;
use crate::transport::hosts::Hosts;
use crate::transport::ports::PAYLOAD_BYTES;
use crate::transport::{Message, Tag};

/// The smallest piece for which a second channel pays off.
const SMALL_BYTES: usize = 16 << 10;
const TAG_CARRY: Tag = 5 << 40;
const TAG_RESULT: Tag = 6 << 40;

/// Which members get a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ResultRanks {
    All,
    Member(usize),
}

impl ResultRanks {
    pub(super) fn is_for(self, member: usize) -> bool {
        match self {
            ResultRanks::All => true,
            ResultRanks::Member(one) => one == member,
        }
    }
}

/// A range of the parts. Piece i belongs to channel i modulo the number of channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChainPiece {
    /// Offset in the parts.
    pub(super) start: usize,
    pub(super) bytes: usize,
    pub(super) to: ResultRanks,
    /// Where this member's values are; its part need not contain those of the pieces that it owns.
    pub(super) input: *const u8,
    /// Where this member also wants the result of a piece that it owns. Null if nowhere.
    pub(super) output: *mut u8,
}

/// Cuts a range into pieces, the same on all members. Carries and results of each fit one frame, so that no message
/// has to be announced before it is sent.
pub(super) fn pieces(range: Range<usize>, dtype: DType, channels: usize) -> impl Iterator<Item = Range<usize>> {
    let share = range.len().div_ceil(channels.max(1)).next_multiple_of(64);
    let step = share.clamp(SMALL_BYTES, PAYLOAD_BYTES / carry_bytes(dtype) * dtype.size());
    range.clone().step_by(step).map(move |start| start..range.end.min(start + step))
}

/// One reduction over the parts of the members of this host.
pub(super) struct Chain<'a> {
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    /// The values of each member of this host, by position.
    pub(super) parts: &'a [*mut u8],
    pub(super) pieces: &'a [ChainPiece],
    /// Whether a result goes to the parts of all members. Otherwise it goes to its owner's only.
    pub(super) to_parts: bool,
}

/// Messages that an owner receives piece by piece: the carry for one of its host's spans, or results.
struct CarryStream {
    kind: ChainKind,
    /// The sender; none for the carry of the first span.
    from: Option<usize>,
    tag: Tag,
    /// Numbers of its pieces.
    pieces: Vec<usize>,
    posted: usize,
    done: usize,
    /// Posted receives, oldest first, with the memory for carries.
    open: VecDeque<(Message, Vec<u128>)>,
}

#[derive(Clone, Copy)]
enum ChainKind {
    Carry { span: usize },
    Result,
}

/// A send in flight, with the memory of what it sends if that is not a part.
struct PieceSend {
    piece: usize,
    message: Message,
    memory: Vec<u128>,
}

/// The state of the owner of a channel while the chain runs. When it is dropped, no message uses the parts any more.
pub(super) struct ChannelOwner<'a> {
    chain: &'a Chain<'a>,
    group: &'a Group<'a>,
    hosts: &'a Hosts,
    channel: usize,
    /// Pieces below this number may be used (CHN-3).
    released: usize,
    /// Pieces below this number are to be completed.
    until: usize,
    streams: Vec<CarryStream>,
    sends: Vec<PieceSend>,
    /// The number of pieces under way (CHN-5).
    depth: DepthTimer<'a>,
}

impl Drop for ChannelOwner<'_> {
    fn drop(&mut self) {
        self.awaited().for_each(|message| self.group.transport.cancel(message));
    }
}

impl<'a> ChannelOwner<'a> {
    /// Starts this member's part of `chain`; none if it owns no channel.
    ///
    /// Safety
    /// The parts, and the inputs and outputs of pieces, are valid for all pieces, whose bounds are multiples of the
    /// element size.
    pub(super) unsafe fn new(chain: &'a Chain<'a>, group: &'a Group<'a>) -> Option<Self> {
        let hosts = group.several_hosts();
        let map = &hosts.map;
        let channel = map.position_of(group.members.me);
        if channel >= map.channels() {
            return None;
        }
        let host = map.host_of(group.members.me);
        let spans = map.spans();
        let last = spans[spans.len() - 1].host;
        let every = (channel..chain.pieces.len()).step_by(map.channels());
        let mut streams = Vec::new();
        for (span, _) in spans.iter().enumerate().filter(|(_, span)| span.host == host) {
            let from = span.checked_sub(1).map(|before| map.owner(spans[before].host, channel));
            let tag = TAG_CARRY + span as Tag;
            streams.push(CarryStream::new(ChainKind::Carry { span }, from, tag, every.clone().collect()));
        }
        // A result for all members is passed from host to host; a result for one member is sent directly to its host.
        for (to_all, from) in [(true, (host + 1) % map.num_hosts()), (false, last)] {
            let wanted = every.clone().filter(|piece| match chain.pieces[*piece].to {
                ResultRanks::All => to_all,
                ResultRanks::Member(member) => !to_all && map.host_of(member) == host,
            });
            if host != last {
                streams.push(CarryStream::new(
                    ChainKind::Result,
                    Some(map.owner(from, channel)),
                    TAG_RESULT,
                    wanted.collect(),
                ));
            }
        }
        streams.retain(|stream| !stream.pieces.is_empty());
        let begins = streams.iter().any(|stream| stream.from.is_none());
        let results = streams.iter().filter(|stream| matches!(stream.kind, ChainKind::Result));
        let results = if begins { results.map(|stream| stream.pieces.len()).sum() } else { 0 };
        let depth = group.depths.begin(ReductionSize { pieces: chain.pieces.len(), results });
        Some(Self { chain, group, hosts, channel, released: 0, until: 0, streams, sends: Vec::new(), depth })
    }

    /// Releases the pieces below `released`, and works until those below `until` are complete.
    ///
    /// Safety
    /// From now until the pieces are complete, only their owners access the parts of released pieces.
    pub(super) unsafe fn work(&mut self, released: usize, until: usize) -> Result<()> {
        (self.released, self.until) = (released, until);
        let group = self.group;
        steps::run(self, group)
    }

    /// Whether as many pieces before `piece` are under way as may be (CHN-5).
    fn is_behind(&self, piece: usize) -> bool {
        let results = self.streams.iter().filter(|stream| matches!(stream.kind, ChainKind::Result));
        let awaited = results.map(|stream| stream.pieces.partition_point(|other| *other < piece) - stream.done);
        let depth = self.depth.pieces();
        self.sends.len() >= depth || awaited.sum::<usize>() >= depth
    }

    /// Adds the values of the members of `span` to the carry, and sends the sum to the next span, or the result to
    /// the members that get it.
    fn fold(&mut self, span: usize, number: usize, carry: Option<Vec<u128>>) {
        let Self { chain, hosts, channel, group, .. } = *self;
        let piece = &chain.pieces[number];
        let map = &hosts.map;
        let spans = map.spans();
        let members = spans[span].start..spans[span].end;
        let me = group.members.me;
        let at = |member: usize| match member == me {
            true => piece.input,
            false => chain.parts[map.position_of(member)].wrapping_add(piece.start).cast_const(),
        };
        let sources: Vec<*const u8> = members.map(at).collect();
        let carried = carry.as_ref().map_or(std::ptr::null(), |carry| carry.as_ptr().cast());
        let elems = chain.elems(piece);
        let next = spans.get(span + 1).map(|next| map.owner(next.host, channel));
        let mut fold = Fold {
            dtype: chain.dtype,
            op: chain.op,
            sources: &sources,
            stage: FoldStage::Last { carry: carried, ranks: group.members.size() },
            outputs: &[],
            elems,
            prefetch: std::ptr::null(),
        };
        let elsewhere = match piece.to {
            ResultRanks::Member(member) if map.host_of(member) != map.host_of(me) => {
                Some(map.owner(map.host_of(member), channel))
            }
            ResultRanks::All | ResultRanks::Member(_) => None,
        };
        if next.is_some() || elsewhere.is_some() {
            let (to, tag, bytes) = match (next, elsewhere) {
                (Some(next), _) => {
                    fold.stage = FoldStage::Middle { carry: carried };
                    (next, TAG_CARRY + span as Tag + 1, elems * carry_bytes(chain.dtype))
                }
                (None, other) => (other.expect("one of them is some"), TAG_RESULT, piece.bytes),
            };
            // The values of a single member are the carry already (CHN-4).
            let (from, memory) = match (&sources[..], &carry) {
                ([values], None) if next.is_some() && kernels::is_own_carry(chain.dtype) => (*values, Vec::new()),
                _ => {
                    let mut made = self.group.scratch.take(bytes);
                    // SAFETY: the parts are valid for the piece, and only this owner accesses them; the carries have
                    // that many elements in the accumulation type. Validation checked the op.
                    unsafe { kernels::fold(&Fold { outputs: &[made.as_mut_ptr().cast()], ..fold }) };
                    (made.as_ptr().cast(), made)
                }
            };
            // SAFETY: the memory does not move until the message is complete or cancelled; the result, which
            // overwrites the values, is computed from this message and so arrives after it was sent (CHN-2).
            let message = unsafe { group.transport.post_send(to, tag, from, bytes) };
            self.sends.push(PieceSend { piece: number, message, memory });
        } else {
            let places = self.places(piece);
            // SAFETY: as above; the outputs are at the same place as a source or apart from all of them.
            unsafe { kernels::fold(&Fold { outputs: &places, ..fold }) };
            self.send_on(number);
        }
        group.scratch.put(carry.unwrap_or_default());
    }

    /// Copies a result, which has arrived at the first of its places, to the others.
    fn pass_on(&mut self, number: usize) {
        let piece = &self.chain.pieces[number];
        let [first, rest @ ..] = &self.places(piece)[..] else { return };
        for place in rest {
            // SAFETY: the places do not overlap, and only this owner accesses them.
            unsafe { std::ptr::copy_nonoverlapping(*first, *place, piece.bytes) };
        }
        self.send_on(number);
    }

    /// The destinations of a piece's result on this host; the first one is where it arrives.
    fn places(&self, piece: &ChainPiece) -> Vec<*mut u8> {
        let first = self.chain.place(piece, self.channel);
        let parts = self.chain.parts.iter().map(|part| part.wrapping_add(piece.start));
        let parts = parts.filter(|_| self.chain.to_parts);
        let output = (!piece.output.is_null()).then_some(piece.output);
        std::iter::once(first).chain(parts.chain(output).filter(|place| *place != first)).collect()
    }

    /// Sends a result for all members to the previous host, in a ring that begins at the host of the last span.
    fn send_on(&mut self, number: usize) {
        let piece = &self.chain.pieces[number];
        let map = &self.hosts.map;
        let (num_hosts, spans) = (map.num_hosts(), map.spans());
        let before = (map.host_of(self.group.members.me) + num_hosts - 1) % num_hosts;
        if piece.to != ResultRanks::All || before == spans[spans.len() - 1].host {
            return;
        }
        let place = self.chain.place(piece, self.channel);
        // SAFETY: the result is not written any more until the piece is complete, by which time the message is
        // complete or cancelled.
        let message =
            unsafe { self.group.transport.post_send(map.owner(before, self.channel), TAG_RESULT, place, piece.bytes) };
        self.sends.push(PieceSend { piece: number, message, memory: Vec::new() });
    }
}

impl MessageSteps for ChannelOwner<'_> {
    fn post(&mut self) {
        let chain = self.chain;
        for stream in &mut self.streams {
            let Some(from) = stream.from else { continue };
            while stream.posted < stream.pieces.len().min(stream.done + MAX_DEPTH) {
                let number = stream.pieces[stream.posted];
                let piece = &chain.pieces[number];
                let (mut memory, place, bytes);
                match stream.kind {
                    ChainKind::Carry { .. } => {
                        bytes = chain.elems(piece) * carry_bytes(chain.dtype);
                        memory = self.group.scratch.take(bytes);
                        place = memory.as_mut_ptr().cast();
                    }
                    ChainKind::Result if number >= self.released => break,
                    ChainKind::Result => {
                        (memory, bytes) = (Vec::new(), piece.bytes);
                        place = chain.place(piece, self.channel);
                    }
                }
                // SAFETY: `memory` does not move, and only this owner accesses the parts of a released piece, until
                // the message is complete or cancelled. The result overwrites only values that have been added
                // (CHN-2).
                let message = unsafe { self.group.transport.post_recv(Some(from), stream.tag, place, bytes) };
                stream.open.push_back((message, memory));
                stream.posted += 1;
            }
        }
    }

    fn step(&mut self) -> Result<bool> {
        let mut moved = false;
        for index in 0..self.streams.len() {
            while let Some(piece) = self.streams[index].next().filter(|piece| *piece < self.released) {
                let is_behind = self.is_behind(piece);
                let stream = &mut self.streams[index];
                let carry = match (stream.from, stream.open.front()) {
                    // The first span waits for no carry, only for its own sends and the results of earlier pieces.
                    (None, _) if is_behind => break,
                    (None, _) => None,
                    (Some(_), Some((message, _))) => match message.poll() {
                        None => break,
                        Some(Err(error)) => return Err(error),
                        Some(Ok(_)) => stream.open.pop_front().map(|(_, memory)| memory),
                    },
                    (Some(_), None) => break,
                };
                let kind = stream.kind;
                stream.done += 1;
                moved = true;
                match kind {
                    ChainKind::Carry { span } => self.fold(span, piece, carry),
                    ChainKind::Result => {
                        self.depth.note_result();
                        self.pass_on(piece);
                    }
                }
            }
        }
        let mut error = None;
        let (before, scratch) = (self.sends.len(), self.group.scratch);
        self.sends.retain_mut(|send| match send.message.poll() {
            None => true,
            Some(result) => {
                error = error.take().or(result.err());
                scratch.put(std::mem::take(&mut send.memory));
                false
            }
        });
        error.map_or(Ok(moved || self.sends.len() < before), Err)
    }

    fn is_complete(&self) -> bool {
        self.sends.iter().all(|send| send.piece >= self.until)
            && self.streams.iter().all(|stream| stream.next().is_none_or(|piece| piece >= self.until))
    }

    fn awaited(&self) -> impl Iterator<Item = &Message> {
        let open = self.streams.iter().flat_map(|stream| stream.open.iter().map(|(message, _)| message));
        open.chain(self.sends.iter().map(|send| &send.message))
    }
}

impl CarryStream {
    fn new(kind: ChainKind, from: Option<usize>, tag: Tag, pieces: Vec<usize>) -> Self {
        Self { kind, from, tag, pieces, posted: 0, done: 0, open: VecDeque::new() }
    }

    /// The first piece that is not done.
    fn next(&self) -> Option<usize> {
        self.pieces.get(self.done).copied()
    }
}

impl Chain<'_> {
    /// Where the result of a piece arrives: the owner's part, unless the only member of this host wants it elsewhere
    /// (CHN-4).
    fn place(&self, piece: &ChainPiece, channel: usize) -> *mut u8 {
        match self.parts.len() == 1 && !piece.output.is_null() {
            true => piece.output,
            false => self.parts[channel].wrapping_add(piece.start),
        }
    }

    fn elems(&self, piece: &ChainPiece) -> usize {
        piece.bytes / self.dtype.size()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_range_and_fit_every_element_and_one_frame() {
        for bytes in [0, 16, 48, 16 << 10, 100_000, 3 << 20] {
            for (channels, dtype) in [1, 2, 3, 8].into_iter().zip([DType::Float32, DType::Float16, DType::Complex128]) {
                let mut next = 160;
                for piece in pieces(160..160 + bytes, dtype, channels) {
                    assert_eq!(piece.start, next);
                    assert!(!piece.is_empty() && piece.len().is_multiple_of(16));
                    assert!(piece.len() / dtype.size() * carry_bytes(dtype) <= PAYLOAD_BYTES);
                    next = piece.end;
                }
                assert_eq!(next, 160 + bytes);
            }
        }
    }
}
