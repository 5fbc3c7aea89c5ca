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

use std::collections::VecDeque;
use std::ops::Range;

use crate::buffer::{DType, ReduceOp};
use crate::collectives::Group;
use crate::collectives::kernels::{self, Fold, FoldStage, carry_bytes};
use crate::error::Result;
use crate::transport::hosts::Hosts;
use crate::transport::{Backoff, Message, NAP, Tag, cores};

/// Bytes of a piece: large enough for full bandwidth, small enough that a bucket has several in flight.
const PIECE_BYTES: usize = 512 << 10;
/// The smallest piece for which a second channel pays off.
const SMALL_BYTES: usize = 16 << 10;
/// Number of posted receives in each stream, and of sends in flight.
const DEPTH: usize = 3;

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

/// A range of the parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChainPiece {
    start: usize,
    bytes: usize,
    to: ResultRanks,
}

/// Cuts a range into pieces, the same on all members.
pub(super) fn pieces(range: Range<usize>, to: ResultRanks, channels: usize) -> Vec<ChainPiece> {
    let share = range.len().div_ceil(channels.max(1)).next_multiple_of(64);
    let step = share.clamp(SMALL_BYTES, PIECE_BYTES);
    let piece = |start: usize| ChainPiece { start, bytes: step.min(range.end - start), to };
    range.clone().step_by(step).map(piece).collect()
}

/// One reduction over the parts of the members of this host, in place.
pub(super) struct Chain<'a> {
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    /// The values of each member of this host, by position.
    pub(super) parts: &'a [*mut u8],
    pub(super) pieces: &'a [ChainPiece],
}

/// What an owner receives piece by piece: the carry for one of its host's spans, or results.
struct CarryStream {
    kind: ChainKind,
    /// The sender; none for the carry of the first span.
    from: Option<usize>,
    tag: Tag,
    pieces: Vec<ChainPiece>,
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

/// The state of an owner while the chain runs.
struct ChannelOwner<'a> {
    chain: &'a Chain<'a>,
    group: &'a Group<'a>,
    hosts: &'a Hosts,
    channel: usize,
    streams: Vec<CarryStream>,
    /// Sends in flight, with the carries that they send.
    sends: Vec<(Message, Vec<u128>)>,
}

impl Chain<'_> {
    /// Runs this member's part; returns when the pieces that it owns are complete. The parts may be used after the
    /// next arrival.
    ///
    /// Safety
    /// The parts are valid for all pieces, whose bounds are multiples of the element size. From now until the next
    /// arrival of this host's members, only their owners access the parts, and only in this function.
    pub(super) unsafe fn run(&self, group: &Group<'_>) -> Result<()> {
        let hosts = group.several_hosts();
        let channel = hosts.map.position_of(group.members.me);
        if channel >= hosts.map.channels() || self.pieces.is_empty() {
            return Ok(());
        }
        let mut owner = ChannelOwner::new(self, group, hosts, channel);
        let outcome = owner.work();
        // After an error, no message may write to the caller's memory any more.
        let open = owner.streams.iter().flat_map(|stream| stream.open.iter().map(|(message, _)| message));
        open.chain(owner.sends.iter().map(|(message, _)| message)).for_each(|message| group.transport.cancel(message));
        outcome
    }
}

impl<'a> ChannelOwner<'a> {
    fn new(chain: &'a Chain<'a>, group: &'a Group<'a>, hosts: &'a Hosts, channel: usize) -> Self {
        let map = &hosts.map;
        let host = map.host_of(group.members.me);
        let spans = map.spans();
        let last = spans[spans.len() - 1].host;
        let every = chain.pieces.iter().skip(channel).step_by(map.channels()).copied();
        let mut streams = Vec::new();
        for (span, _) in spans.iter().enumerate().filter(|(_, span)| span.host == host) {
            let from = span.checked_sub(1).map(|before| map.owner(spans[before].host, channel));
            let tag = TAG_CARRY + span as Tag;
            streams.push(CarryStream::new(ChainKind::Carry { span }, from, tag, every.clone().collect()));
        }
        // A result for all members is passed from host to host; a result for one member is sent directly to its host.
        for (to_all, from) in [(true, (host + 1) % map.num_hosts()), (false, last)] {
            let wanted = every.clone().filter(|piece| match piece.to {
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
        Self { chain, group, hosts, channel, streams, sends: Vec::new() }
    }

    fn work(&mut self) -> Result<()> {
        let transport = self.group.transport;
        let crowded = self.hosts.memory.size() > cores();
        let mut backoff = Backoff::new();
        loop {
            let seen = transport.doorbell();
            self.post();
            transport.progress();
            let moved = self.step()?;
            if self.sends.is_empty() && self.streams.iter().all(|stream| stream.done == stream.pieces.len()) {
                return Ok(());
            }
            if moved {
                backoff = Backoff::new();
                continue;
            }
            if backoff.pause(|| crowded) {
                continue;
            }
            self.group.wait.check(|| self.missing())?;
            transport.doze(seen, NAP);
        }
    }

    /// Posts receives.
    fn post(&mut self) {
        let chain = self.chain;
        for stream in &mut self.streams {
            let Some(from) = stream.from else { continue };
            while stream.posted < stream.pieces.len().min(stream.done + DEPTH) {
                let piece = stream.pieces[stream.posted];
                let (mut memory, place, bytes);
                match stream.kind {
                    ChainKind::Carry { .. } => {
                        bytes = chain.elems(piece) * carry_bytes(chain.dtype);
                        memory = vec![0u128; bytes.div_ceil(16)];
                        place = memory.as_mut_ptr().cast();
                    }
                    ChainKind::Result => {
                        (memory, bytes) = (Vec::new(), piece.bytes);
                        place = chain.first_place(piece, self.hosts);
                    }
                }
                // SAFETY: `memory` does not move, and only this owner accesses the parts (see `Chain::run`), until
                // the message is complete or cancelled. The result overwrites only values that have been added
                // (CHN-2).
                let message = unsafe { self.group.transport.post_recv(Some(from), stream.tag, place, bytes) };
                stream.open.push_back((message, memory));
                stream.posted += 1;
            }
        }
    }

    /// Makes progress without waiting; returns whether there was any.
    fn step(&mut self) -> Result<bool> {
        let mut moved = false;
        for index in 0..self.streams.len() {
            loop {
                let sending = self.sends.len();
                let stream = &mut self.streams[index];
                if stream.done == stream.pieces.len() {
                    break;
                }
                let carry = match (stream.from, stream.open.front()) {
                    // The first span waits for no carry, only for its own sends.
                    (None, _) if sending >= DEPTH => break,
                    (None, _) => None,
                    (Some(_), Some((message, _))) => match message.poll() {
                        None => break,
                        Some(Err(error)) => return Err(error),
                        Some(Ok(_)) => stream.open.pop_front().map(|(_, memory)| memory),
                    },
                    (Some(_), None) => break,
                };
                let (kind, piece) = (stream.kind, stream.pieces[stream.done]);
                stream.done += 1;
                moved = true;
                match kind {
                    ChainKind::Carry { span } => self.fold(span, piece, carry.as_deref()),
                    ChainKind::Result => self.pass_on(piece),
                }
            }
        }
        let mut error = None;
        let before = self.sends.len();
        self.sends.retain(|(message, _)| match message.poll() {
            None => true,
            Some(result) => {
                error = error.take().or(result.err());
                false
            }
        });
        error.map_or(Ok(moved || self.sends.len() < before), Err)
    }

    /// Adds the values of the members of `span` to the carry, and sends the sum to the next span, or the result to
    /// the members that get it.
    fn fold(&mut self, span: usize, piece: ChainPiece, carry: Option<&[u128]>) {
        let Self { chain, hosts, channel, group, .. } = *self;
        let map = &hosts.map;
        let spans = map.spans();
        let members = spans[span].start..spans[span].end;
        let at = |member: usize| chain.parts[map.position_of(member)].wrapping_add(piece.start);
        let sources: Vec<*const u8> = members.map(|member| at(member).cast_const()).collect();
        let carry = carry.map_or(std::ptr::null(), |carry| carry.as_ptr().cast());
        let elems = chain.elems(piece);
        let next = spans.get(span + 1).map(|next| map.owner(next.host, channel));
        let mut fold = Fold {
            dtype: chain.dtype,
            op: chain.op,
            sources: &sources,
            stage: FoldStage::Last { carry, ranks: group.members.size() },
            outputs: &[],
            elems,
            prefetch: std::ptr::null(),
        };
        if let Some(next) = next {
            let bytes = elems * carry_bytes(chain.dtype);
            let mut made = vec![0u128; bytes.div_ceil(16)];
            fold.stage = FoldStage::Middle { carry };
            // SAFETY: the parts are valid for the piece, and only this owner accesses them; the carries have that
            // many elements in the accumulation type. Validation checked the op.
            unsafe { kernels::fold(&Fold { outputs: &[made.as_mut_ptr().cast()], ..fold }) };
            return self.send(next, TAG_CARRY + span as Tag + 1, made, bytes);
        }
        let host = map.host_of(group.members.me);
        if let ResultRanks::Member(member) = piece.to
            && map.host_of(member) != host
        {
            let mut made = vec![0u128; piece.bytes.div_ceil(16)];
            // SAFETY: as above; the memory has room for the piece.
            unsafe { kernels::fold(&Fold { outputs: &[made.as_mut_ptr().cast()], ..fold }) };
            return self.send(map.owner(map.host_of(member), channel), TAG_RESULT, made, piece.bytes);
        }
        let places = chain.places(piece, hosts);
        // SAFETY: as above; the outputs are the parts themselves, at the same place as the sources.
        unsafe { kernels::fold(&Fold { outputs: &places, ..fold }) };
        self.send_on(piece);
    }

    /// Copies a result, which has arrived at the first of its places, to the others.
    fn pass_on(&mut self, piece: ChainPiece) {
        let [first, rest @ ..] = &self.chain.places(piece, self.hosts)[..] else { return };
        for place in rest {
            // SAFETY: the places of different members do not overlap, and only this owner accesses them.
            unsafe { std::ptr::copy_nonoverlapping(*first, *place, piece.bytes) };
        }
        self.send_on(piece);
    }

    /// Sends a result for all members to the previous host, in a ring that begins at the host of the last span.
    fn send_on(&mut self, piece: ChainPiece) {
        let map = &self.hosts.map;
        let (num_hosts, spans) = (map.num_hosts(), map.spans());
        let before = (map.host_of(self.group.members.me) + num_hosts - 1) % num_hosts;
        if piece.to != ResultRanks::All || before == spans[spans.len() - 1].host {
            return;
        }
        let place = self.chain.first_place(piece, self.hosts);
        // SAFETY: the result is not written any more and stays valid until the next agreement, by which time the
        // message is complete or cancelled.
        let message =
            unsafe { self.group.transport.post_send(map.owner(before, self.channel), TAG_RESULT, place, piece.bytes) };
        self.sends.push((message, Vec::new()));
    }

    fn send(&mut self, to: usize, tag: Tag, memory: Vec<u128>, bytes: usize) {
        // SAFETY: the memory does not move until the message is complete or cancelled.
        let message = unsafe { self.group.transport.post_send(to, tag, memory.as_ptr().cast(), bytes) };
        self.sends.push((message, memory));
    }

    /// Global ranks that this owner waits for.
    fn missing(&self) -> Vec<usize> {
        let open = self.streams.iter().flat_map(|stream| stream.open.front());
        let waiting = open.map(|(message, _)| message).chain(self.sends.iter().map(|(message, _)| message));
        let mut ranks: Vec<usize> = (waiting.filter(|message| message.poll().is_none()))
            .flat_map(|message| message.partners(self.group.members))
            .collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}

impl CarryStream {
    fn new(kind: ChainKind, from: Option<usize>, tag: Tag, pieces: Vec<ChainPiece>) -> Self {
        Self { kind, from, tag, pieces, posted: 0, done: 0, open: VecDeque::new() }
    }
}

impl Chain<'_> {
    fn elems(&self, piece: ChainPiece) -> usize {
        piece.bytes / self.dtype.size()
    }

    /// Offset of the result in the parts of this host.
    fn places(&self, piece: ChainPiece, hosts: &Hosts) -> Vec<*mut u8> {
        match piece.to {
            ResultRanks::All => self.parts.iter().map(|part| part.wrapping_add(piece.start)).collect(),
            ResultRanks::Member(_) => vec![self.first_place(piece, hosts)],
        }
    }

    fn first_place(&self, piece: ChainPiece, hosts: &Hosts) -> *mut u8 {
        let position = match piece.to {
            ResultRanks::All => 0,
            ResultRanks::Member(member) => hosts.map.position_of(member),
        };
        self.parts[position].wrapping_add(piece.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_range_and_fit_every_element() {
        for bytes in [0, 16, 48, 16 << 10, 100_000, 3 << 20] {
            for channels in [1, 2, 3, 8] {
                let pieces = pieces(160..160 + bytes, ResultRanks::All, channels);
                let mut next = 160;
                for piece in &pieces {
                    assert_eq!(piece.start, next);
                    assert!(piece.bytes > 0 && piece.bytes <= PIECE_BYTES && piece.bytes.is_multiple_of(16));
                    next += piece.bytes;
                }
                assert_eq!(next, 160 + bytes);
            }
        }
    }
}
