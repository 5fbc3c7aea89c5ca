//! Matches messages with receives, over a [`Link`] that carries small frames in order.
//!
//! A message of at most [`Link::payload_bytes`] is sent eagerly in one frame, and the receiver keeps it until a receive
//! takes it. A larger message uses a rendezvous: request to send (RTS), clear to send (CTS) once a receive with its tag
//! is posted, then the data; or a NACK if the lengths differ:
//!
//! ```text
//! sender    Rts{tag, bytes, id} -->              Data{slot, offset} --> Data ..
//! receiver                      <-- Cts{id, slot}   (or Nack{id, bytes} if the lengths differ)
//! ```
//!
//! - MBX-1: an arriving frame is always accepted, whatever receives are posted, so no message blocks another one
//!   (TRA-1).
//! - MBX-2: `Eager` and `Rts` frames to one peer are sent in the order of their posts, so messages with equal tags
//!   stay in order. Frames without a tag are sent before both.
//! - MBX-3: a send that is cancelled after its `Rts` is withdrawn. The receiver removes the announcement. A receive
//!   that was matched with it returns to its place in the order, for the next message with its tag.
//! - MBX-4: a receiver buffers at most [`EAGER_LIMIT`] bytes of unreceived eager messages of each sender. The sender
//!   counts the bytes that it has sent, and the receiver returns those that receives took (`Credit`). A small message
//!   beyond the limit uses the rendezvous like a large one, so its send waits for the receive.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::{Members, Tag};
use crate::bulk_copy;
use crate::error::Error;

mod direct_receive;
mod frame;
mod message;
#[cfg(test)]
mod random_messages;
mod transfers;
mod withdrawal;

use direct_receive::DirectReceive;
pub(crate) use frame::{FrameKind, Header, key_of};
pub use message::Message;
use transfers::PeerTransfers;

/// The limit of MBX-4 in bytes, with [`EAGER_OVERHEAD`] for each message.
pub(crate) const EAGER_LIMIT: usize = 4 << 20;
/// The overhead that is counted for each message, so that empty messages are limited, too.
pub(crate) const EAGER_OVERHEAD: usize = 64;
/// Credits are returned in units of this size: there are few frames, and the sender is short of at most this many
/// bytes.
const CREDIT_BYTES: usize = EAGER_LIMIT / 8;

/// The number of bytes that an eager message of `bytes` bytes counts as (MBX-4).
fn eager_cost(bytes: usize) -> usize {
    bytes.saturating_add(EAGER_OVERHEAD)
}

/// Carries frames between pairs, in order, without waiting.
pub(crate) trait Link: Send + Sync {
    /// The largest payload of a frame from or to `peer`.
    fn payload_bytes(&self, peer: usize) -> usize;
    /// Sends a frame, or returns false if there is no space for it now.
    ///
    /// # Safety
    /// `payload` is valid for reads of `header[4]` bytes, at most [`Link::payload_bytes`].
    unsafe fn push(&self, to: usize, header: Header, payload: *const u8) -> bool;
    /// Passes the next frame from `from` to `take`; false if there is none. During the call, the payload pointer is
    /// valid for as many bytes as the header says, but no more than [`Link::payload_bytes`]; a peer may write there
    /// at the same time.
    fn pop(&self, from: usize, take: &mut dyn FnMut(Header, *const u8)) -> bool;
    /// Whether long messages to and from `peer` are moved without copies ([`super::zero_copy`]).
    fn is_zero_copy(&self, _peer: usize) -> bool {
        false
    }
    /// Starts to receive the message with number `message` from `from` without copies. Returns the key for its sender, or
    /// none if that is not possible now.
    ///
    /// # Safety
    /// The memory stays valid, and no other code accesses it, until [`Mailbox::end_transfer`] is called or
    /// [`Link::has_transfers`] is false.
    unsafe fn start_receive(&self, _from: usize, _message: u64, _data: *mut u8, _bytes: usize) -> Option<u64> {
        None
    }
    /// Starts to send a message without copies to `to`, which has sent the key. Returns false if it is not a valid one.
    ///
    /// # Safety
    /// The memory stays valid and unchanged until [`Mailbox::end_transfer`] is called or [`Link::has_transfers`] is
    /// false.
    unsafe fn start_send(&self, _to: usize, _key: u64, _message: u64, _data: *const u8, _bytes: usize) -> bool {
        false
    }
    /// See [`super::ports::Carrier::has_transfers`].
    fn has_transfers(&self, _gives_up: bool) -> bool {
        false
    }
    /// See [`super::Transport::doorbell`].
    fn doorbell(&self) -> u32;
    /// See [`super::Transport::wait_doorbell`].
    fn wait_doorbell(&self, seen: u32, limit: Duration);
    /// Wakes sleeping threads of this process.
    fn ring_own(&self);
}

struct Outgoing {
    message: Message,
    tag: Tag,
    data: *const u8,
    bytes: usize,
}

struct ClearedSend {
    send: Outgoing,
    slot: u64,
    sent: usize,
}

struct Posted {
    message: Message,
    from: Option<usize>,
    tag: Tag,
    data: *mut u8,
    bytes: usize,
    /// Whether the message may be shorter.
    is_limit: bool,
}

impl Posted {
    /// Whether it takes messages with `tag` from `from`.
    fn is_for(&self, from: usize, tag: Tag) -> bool {
        self.tag == tag && self.from.is_none_or(|it| it == from)
    }

    /// Whether a message of `bytes` bytes fits.
    fn accepts(&self, bytes: usize) -> bool {
        bytes == self.bytes || (self.is_limit && bytes < self.bytes)
    }
}

struct Filling {
    recv: Posted,
    from: usize,
    /// Length of the sender's message, and its id.
    bytes: usize,
    id: u64,
    received: usize,
    /// Whether a transfer fills it ([`super::zero_copy`]), and whether the sender has withdrawn that.
    in_transfer: bool,
    is_withdrawn: bool,
}

enum Body {
    Eager(Vec<u8>),
    Rts { id: u64, bytes: usize },
}

struct Unexpected {
    from: usize,
    tag: Tag,
    body: Body,
}

#[derive(Default)]
struct Peer {
    /// Frames without a tag that wait for space on the link.
    replies: VecDeque<Header>,
    /// Bytes sent to the peer for which it has returned no credit (MBX-4).
    eager_sent: usize,
    /// Bytes received from the peer that no receive has taken (MBX-4).
    eager_kept: usize,
    /// Bytes that receives took since the last credit to the peer.
    eager_taken: usize,
    /// Posted sends in order that are not on the link yet.
    waiting: VecDeque<Outgoing>,
    /// Announced sends, by id.
    announced: HashMap<u64, Outgoing>,
    /// Sends whose data is being sent, one after the other.
    streams: VecDeque<ClearedSend>,
    direct_receive: Option<DirectReceive>,
    transfers: PeerTransfers,
}

#[derive(Default)]
struct MailboxState {
    peers: Vec<Peer>,
    posted: VecDeque<Posted>,
    unexpected: VecDeque<Unexpected>,
    filling: HashMap<u64, Filling>,
    next_id: u64,
    /// Whether a message was completed in this call of `progress`.
    completed: bool,
    /// Messages whose cancellation waits for their transfer.
    cancelling: Vec<u64>,
}

// SAFETY: the raw pointers are the buffers of posted messages, whose owner promised in `post_send` and `post_recv`
// that any thread may use them until completion; the mutex around the state orders these uses.
unsafe impl Send for MailboxState {}

/// The message functions of a transport: [`super::Transport`] has functions of the same names.
pub trait Messages: Send + Sync {
    /// See [`super::Transport::post_send`].
    ///
    /// # Safety
    /// As there.
    unsafe fn post_send(&self, to: usize, tag: Tag, data: *const u8, bytes: usize) -> Message;
    /// See [`super::Transport::post_recv`].
    ///
    /// # Safety
    /// As there.
    unsafe fn post_recv(&self, from: Option<usize>, tag: Tag, data: *mut u8, bytes: usize) -> Message;
    /// See [`super::Transport::post_recv_up_to`].
    ///
    /// # Safety
    /// As there.
    unsafe fn post_recv_up_to(&self, from: usize, tag: Tag, data: *mut u8, limit: usize) -> Message;
    /// See [`super::Transport::progress`].
    fn progress(&self);
    /// See [`super::Transport::cancel`].
    fn cancel(&self, message: &Message);
    /// See [`super::Transport::doorbell`].
    fn doorbell(&self) -> u32;
    /// See [`super::Transport::wait_doorbell`].
    fn wait_doorbell(&self, seen: u32, limit: Duration);
    /// See [`super::Transport::ring`].
    fn ring(&self);
}

/// Matches the messages of one member of a group with its receives.
pub(crate) struct Mailbox<L> {
    pub(crate) link: L,
    members: Members,
    state: Mutex<MailboxState>,
    /// Notified when a read to the memory of a receive ends.
    direct_read_ended: Condvar,
}

impl<L: Link> Mailbox<L> {
    pub(crate) fn new(link: L, members: Members) -> Self {
        let peers = (0..members.size())
            .map(|peer| {
                let is_zero_copy = peer != members.me && link.is_zero_copy(peer);
                let frame_bytes = is_zero_copy.then(|| link.payload_bytes(peer));
                Peer { transfers: PeerTransfers::new(frame_bytes), ..Peer::default() }
            })
            .collect();
        let state = Mutex::new(MailboxState { peers, ..MailboxState::default() });
        Self { link, members, state, direct_read_ended: Condvar::new() }
    }

    fn advance(&self, state: &mut MailboxState) {
        for peer in (0..self.members.size()).filter(|peer| *peer != self.members.me) {
            while self.link.pop(peer, &mut |header, payload| {
                // SAFETY: the link promises as many readable bytes as the header says, up to `payload_bytes`.
                unsafe { state.take(peer, header, payload, self.link.payload_bytes(peer), &self.members) }
            }) {}
            self.push_to(state, peer);
        }
        if std::mem::take(&mut state.completed) {
            // Another thread of this process may sleep until this message is complete.
            self.link.ring_own();
        }
    }

    fn post(&self, state: &mut MailboxState, recv: Posted) -> Message {
        let message = recv.message.clone();
        let matches =
            |it: &Unexpected| recv.is_for(it.from, it.tag) && !state.is_reserved(it.from, it.tag, message.id());
        match state.unexpected.iter().position(matches) {
            Some(at) => state.deliver_unexpected(recv, at, &self.members),
            None => state.posted.push_back(recv),
        }
        self.advance(state);
        message
    }

    fn push_to(&self, state: &mut MailboxState, to: usize) {
        let payload_bytes = self.link.payload_bytes(to);
        self.start_transfers(state, to);
        let MailboxState { peers, completed, .. } = state;
        let peer = &mut peers[to];
        while let Some(header) = peer.replies.front() {
            // SAFETY: replies have no payload.
            if !unsafe { self.link.push(to, *header, std::ptr::null()) } {
                // Replies are sent first: a withdrawal must come before the next announcement (MBX-2).
                return;
            }
            peer.replies.pop_front();
        }
        while let Some(send) = peer.waiting.front() {
            let cost = eager_cost(send.bytes);
            let eager = send.bytes <= payload_bytes && peer.eager_sent + cost <= EAGER_LIMIT;
            let header = match eager {
                true => [FrameKind::Eager as u64, send.tag, 0, 0, send.bytes as u64],
                false => [FrameKind::Rts as u64, send.tag, send.bytes as u64, send.message.id(), 0],
            };
            // SAFETY: an eager message's bytes are valid until it completes, and fit a frame; an announcement has no
            // payload.
            if !unsafe { self.link.push(to, header, send.data) } {
                return;
            }
            let send = peer.waiting.pop_front().expect("it was at the front");
            if eager {
                peer.eager_sent += cost;
                send.message.complete(Ok(to));
                *completed = true;
            } else {
                peer.announced.insert(send.message.id(), send);
            }
        }
        while let Some(stream) = peer.streams.front_mut() {
            let part = (stream.send.bytes - stream.sent).min(payload_bytes);
            let header = [FrameKind::Data as u64, stream.slot, stream.sent as u64, 0, part as u64];
            // SAFETY: `sent + part <= bytes`, and the message's memory is valid until it completes.
            if !unsafe { self.link.push(to, header, stream.send.data.add(stream.sent)) } {
                return;
            }
            stream.sent += part;
            if stream.sent == stream.send.bytes {
                stream.send.message.complete(Ok(to));
                *completed = true;
                peer.streams.pop_front();
            }
        }
    }
}

impl<L: Link> Messages for Mailbox<L> {
    unsafe fn post_send(&self, to: usize, tag: Tag, data: *const u8, bytes: usize) -> Message {
        let mut state = self.state.lock();
        let message = state.message(Some(to));
        if to == self.members.me {
            let mut copy = vec![0; bytes];
            if bytes > 0 {
                // SAFETY: the caller promises `bytes` readable bytes; the copy has that length.
                unsafe { std::ptr::copy_nonoverlapping(data, copy.as_mut_ptr(), bytes) };
            }
            message.complete(Ok(to));
            // A message to itself: MBX-4 limits only memory for other members.
            state.arrive(to, tag, Body::Eager(copy), &self.members);
        } else {
            state.peers[to].waiting.push_back(Outgoing { message: message.clone(), tag, data, bytes });
        }
        self.advance(&mut state);
        message
    }

    unsafe fn post_recv(&self, from: Option<usize>, tag: Tag, data: *mut u8, bytes: usize) -> Message {
        let mut state = self.state.lock();
        let recv = Posted { message: state.message(from), from, tag, data, bytes, is_limit: false };
        self.post(&mut state, recv)
    }

    unsafe fn post_recv_up_to(&self, from: usize, tag: Tag, data: *mut u8, limit: usize) -> Message {
        let mut state = self.state.lock();
        let from = Some(from);
        let recv = Posted { message: state.message(from), from, tag, data, bytes: limit, is_limit: true };
        self.post(&mut state, recv)
    }

    fn cancel(&self, message: &Message) {
        let mut state = self.state.lock();
        let id = message.id();
        self.detach(&mut state, id);
        self.await_transfer(&mut state, id);
        state.posted.retain(|it| it.message.id() != id);
        state.filling.remove(&id);
        for peer in &mut state.peers {
            peer.waiting.retain(|it| it.message.id() != id);
            let streaming = peer.streams.iter().any(|it| it.send.message.id() == id);
            peer.streams.retain(|it| it.send.message.id() != id);
            if peer.announced.remove(&id).is_some() || streaming {
                // The send was cancelled (MBX-3).
                peer.replies.push_back([FrameKind::Withdraw as u64, id, 0, 0, 0]);
            }
        }
        self.advance(&mut state);
    }

    fn progress(&self) {
        self.advance(&mut self.state.lock());
    }

    fn doorbell(&self) -> u32 {
        self.link.doorbell()
    }

    fn wait_doorbell(&self, seen: u32, limit: Duration) {
        self.link.wait_doorbell(seen, limit);
    }

    fn ring(&self) {
        self.link.ring_own();
    }
}

impl MailboxState {
    fn message(&mut self, partner: Option<usize>) -> Message {
        self.next_id += 1;
        Message::new(partner, self.next_id)
    }

    /// Handles a frame from `from`.
    ///
    /// # Safety
    /// `payload` is valid for reads of as many bytes as `header` says, but no more than `payload_bytes`.
    unsafe fn take(
        &mut self,
        from: usize,
        header: Header,
        payload: *const u8,
        payload_bytes: usize,
        members: &Members,
    ) {
        let [kind, a, b, c, length] = header;
        let length = usize::try_from(length).unwrap_or(usize::MAX).min(payload_bytes);
        match FrameKind::decode(kind) {
            Some(FrameKind::Eager) => {
                let cost = eager_cost(length);
                if let Some(recv) = self.claim(from, a) {
                    self.peers[from].eager_kept += cost;
                    self.note_taken(from, length, members);
                    // SAFETY: forwarded from the caller; `length` is at most `payload_bytes`.
                    unsafe { self.finish(recv, from, payload, length, members) };
                } else if self.peers[from].eager_kept + cost <= EAGER_LIMIT {
                    self.peers[from].eager_kept += cost;
                    let mut copy = vec![0; length];
                    // SAFETY: `length` is at most `payload_bytes`, and the copy has that length.
                    unsafe { bulk_copy::ordinary(payload, copy.as_mut_ptr(), length) };
                    self.unexpected.push_back(Unexpected { from, tag: a, body: Body::Eager(copy) });
                }
            }
            Some(FrameKind::Withdraw) => self.withdraw(from, a, members),
            Some(FrameKind::Credit) => {
                let sent = &mut self.peers[from].eager_sent;
                *sent = sent.saturating_sub(usize::try_from(a).unwrap_or(usize::MAX));
            }
            Some(FrameKind::Rts) => {
                let bytes = usize::try_from(b).unwrap_or(usize::MAX);
                self.arrive(from, a, Body::Rts { id: c, bytes }, members);
            }
            Some(FrameKind::Cts) => {
                let peer = &mut self.peers[from];
                let send = peer.announced.remove(&a);
                if c != 0 && peer.transfers.is_enabled() {
                    peer.transfers.clear(send, c);
                } else if let Some(send) = send {
                    peer.streams.push_back(ClearedSend { send, slot: b, sent: 0 });
                }
            }
            Some(FrameKind::Nack) => {
                if let Some(send) = self.peers[from].announced.remove(&a) {
                    let error = length_mismatch(send.tag, members.me, send.bytes as u64, from, b, members);
                    send.message.complete(Err(error));
                    self.completed = true;
                }
            }
            Some(FrameKind::Data) => {
                let Some(filling) = self.filling.get_mut(&a) else { return };
                // Parts of one message arrive in order, so the offset is known; a different offset is forged.
                if filling.in_transfer
                    || filling.from != from
                    || b != filling.received as u64
                    || length > filling.bytes - filling.received
                {
                    return;
                }
                // SAFETY: the part lies inside the posted buffer by the check above; the payload is the caller's.
                unsafe { bulk_copy::ordinary(payload, filling.recv.data.add(filling.received), length) };
                self.note_received(a, length, from);
            }
            // Only a corrupt peer sends this; the affected waits end at their deadlines.
            None => {}
        }
    }

    /// A receive has taken an eager message of `bytes` bytes from `from` (MBX-4).
    fn note_taken(&mut self, from: usize, bytes: usize, members: &Members) {
        if from == members.me {
            return;
        }
        let (peer, cost) = (&mut self.peers[from], eager_cost(bytes));
        peer.eager_kept -= cost;
        peer.eager_taken += cost;
        if peer.eager_taken >= CREDIT_BYTES {
            let credit = std::mem::take(&mut peer.eager_taken);
            peer.replies.push_back([FrameKind::Credit as u64, credit as u64, 0, 0, 0]);
        }
    }

    /// A part of the message for the receive `slot` is in its memory.
    fn note_received(&mut self, slot: u64, length: usize, from: usize) {
        let Some(filling) = self.filling.get_mut(&slot) else { return };
        filling.received += length;
        if filling.received == filling.bytes
            && let Some(done) = self.filling.remove(&slot)
        {
            done.recv.message.complete_receive(from, done.bytes);
            self.completed = true;
        }
    }

    /// Takes the posted receive that gets an arriving message with `tag` from `from`, if there is one.
    fn claim(&mut self, from: usize, tag: Tag) -> Option<Posted> {
        let at = self.position_for_arrival(from, tag)?;
        self.posted.remove(at)
    }

    fn arrive(&mut self, from: usize, tag: Tag, body: Body, members: &Members) {
        match self.claim(from, tag) {
            Some(recv) => self.deliver(recv, from, body, members),
            None => self.unexpected.push_back(Unexpected { from, tag, body }),
        }
    }

    fn deliver(&mut self, recv: Posted, from: usize, body: Body, members: &Members) {
        match body {
            // SAFETY: the vector is valid for its length.
            Body::Eager(bytes) => unsafe { self.finish(recv, from, bytes.as_ptr(), bytes.len(), members) },
            Body::Rts { id, bytes } if recv.accepts(bytes) => {
                let slot = recv.message.id();
                self.filling.insert(
                    slot,
                    Filling { recv, from, bytes, id, received: 0, in_transfer: false, is_withdrawn: false },
                );
                let peer = &mut self.peers[from];
                match peer.transfers.is_for(bytes) {
                    true => peer.transfers.expect(id, slot),
                    false => peer.replies.push_back([FrameKind::Cts as u64, id, slot, 0, 0]),
                }
            }
            Body::Rts { id, bytes } => {
                self.peers[from].replies.push_back([FrameKind::Nack as u64, id, recv.bytes as u64, 0, 0]);
                let error = length_mismatch(recv.tag, from, bytes as u64, members.me, recv.bytes as u64, members);
                recv.message.complete(Err(error));
                self.completed = true;
            }
        }
    }

    /// # Safety
    /// `data` is valid for reads of `bytes` bytes.
    unsafe fn finish(&mut self, recv: Posted, from: usize, data: *const u8, bytes: usize, members: &Members) {
        self.completed = true;
        if !recv.accepts(bytes) {
            let error = length_mismatch(recv.tag, from, bytes as u64, members.me, recv.bytes as u64, members);
            recv.message.complete(Err(error));
            return;
        }
        if bytes > 0 {
            // SAFETY: both sides are valid for `bytes`; no other code uses the posted buffer.
            unsafe { std::ptr::copy_nonoverlapping(data, recv.data, bytes) };
        }
        recv.message.complete_receive(from, bytes);
    }
}

fn length_mismatch(tag: Tag, from: usize, sent: u64, to: usize, expected: u64, members: &Members) -> Error {
    let (from, to) = (members.ranks[from], members.ranks[to]);
    Error::Mismatch {
        during: format!("message with tag {tag} from rank {from} to rank {to}"),
        detail: format!("rank {from} sends {sent} bytes, rank {to} receives {expected} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;

    /// Delivers frames that a test pushes, and discards the frames that the mailbox sends.
    #[derive(Default)]
    struct ScriptedLink(Mutex<VecDeque<Header>>);

    impl Link for ScriptedLink {
        fn payload_bytes(&self, _peer: usize) -> usize {
            64
        }
        unsafe fn push(&self, _to: usize, _header: Header, _payload: *const u8) -> bool {
            true
        }
        fn pop(&self, _from: usize, take: &mut dyn FnMut(Header, *const u8)) -> bool {
            let header = self.0.lock().pop_front();
            header.is_some_and(|header| {
                take(header, [7u8; 64].as_ptr());
                true
            })
        }
        fn doorbell(&self) -> u32 {
            0
        }
        fn wait_doorbell(&self, _seen: u32, _limit: Duration) {}
        fn ring_own(&self) {}
    }

    /// Frames of a peer beyond the limit that it must keep take no memory (MBX-4).
    #[test]
    fn a_peer_that_ignores_the_limit_is_not_buffered() {
        let ranks: Arc<[usize]> = [0, 1].into();
        let mailbox = Mailbox::new(ScriptedLink::default(), Members { ranks, me: 0 });
        let frames = 2 * EAGER_LIMIT / (64 + EAGER_OVERHEAD);
        mailbox.link.0.lock().extend(std::iter::repeat_n([FrameKind::Eager as u64, 1, 0, 0, 64], frames));
        mailbox.progress();
        assert_eq!(mailbox.state.lock().unexpected.len(), frames / 2);
        // Other frames are still accepted.
        let mut memory = [0u8; 64];
        for _ in 0..frames / 2 {
            // SAFETY: the memory outlives the message, which is complete when the call returns.
            let message = unsafe { mailbox.post_recv(Some(1), 1, memory.as_mut_ptr(), 64) };
            assert!(matches!(message.poll(), Some(Ok(1))));
        }
        assert_eq!((mailbox.state.lock().peers[1].eager_kept, memory), (0, [7; 64]));
    }

    /// Receives that state a limit take shorter messages, whether these are announced or not.
    #[test]
    fn a_receive_with_a_limit_takes_shorter_messages() {
        let ranks: Arc<[usize]> = [0, 1].into();
        let mailbox = Mailbox::new(ScriptedLink::default(), Members { ranks, me: 0 });
        let mut memory = [0u8; 200];
        let mut receive = |limit: usize, headers: &[Header]| {
            memory.fill(0);
            // SAFETY: the memory outlives the message, which is complete or cancelled when the closure returns.
            let message = unsafe { mailbox.post_recv_up_to(1, 3, memory.as_mut_ptr(), limit) };
            mailbox.link.0.lock().extend(headers);
            mailbox.progress();
            mailbox.cancel(&message);
            let filled = memory.iter().filter(|byte| **byte == 7).count();
            if matches!(message.poll(), Some(Ok(1))) {
                assert_eq!(message.received_bytes(), filled);
            }
            (message.poll().map(|result| result.is_ok()), filled)
        };
        let eager = |bytes: u64| [FrameKind::Eager as u64, 3, 0, 0, bytes];
        let announce = |bytes: u64, id: u64| [FrameKind::Rts as u64, 3, bytes, id, 0];
        let data = |slot: u64, offset: u64, bytes: u64| [FrameKind::Data as u64, slot, offset, 0, bytes];
        assert_eq!(receive(64, &[eager(64)]), (Some(true), 64));
        assert_eq!(receive(64, &[eager(10)]), (Some(true), 10));
        assert_eq!(receive(64, &[eager(0)]), (Some(true), 0));
        assert_eq!(receive(40, &[eager(41)]), (Some(false), 0));
        // Messages have the numbers 1, 2, ... in this mailbox, and those of receives are their slots.
        assert_eq!(receive(150, &[announce(100, 9), data(5, 0, 64), data(5, 64, 36)]), (Some(true), 100));
        assert_eq!(receive(150, &[announce(100, 9), data(6, 0, 64), data(6, 64, 37)]), (None, 64));
        assert_eq!(receive(150, &[announce(151, 9)]), (Some(false), 0));
    }

    /// Small numbers, which may be valid ids, and random ones.
    fn word() -> impl Strategy<Value = u64> {
        prop_oneof![4 => 0..8u64, 2 => 60..300u64, 1 => any::<u64>()]
    }

    proptest! {
        /// Whatever a peer sends, only posted memory is written, and nothing panics (TRA-2).
        #[test]
        fn forged_frames_are_harmless(headers in prop::collection::vec(prop::array::uniform5(word()), 0..60)) {
            let ranks: Arc<[usize]> = [0, 1].into();
            let mailbox = Mailbox::new(ScriptedLink::default(), Members { ranks, me: 0 });
            let mut memory = vec![0u8; 400];
            let data = [1u8; 200];
            // SAFETY: both outlive the mailbox's use of them, which ends with the last call below.
            let messages = unsafe {
                [
                    mailbox.post_recv(Some(1), 3, memory.as_mut_ptr().add(100), 200),
                    mailbox.post_recv(None, 4, memory.as_mut_ptr().add(300), 10),
                    mailbox.post_send(1, 5, data.as_ptr(), 200),
                ]
            };
            mailbox.link.0.lock().extend(headers);
            mailbox.progress();
            messages.iter().for_each(|message| mailbox.cancel(message));
            prop_assert!(memory[..100].iter().chain(&memory[310..]).all(|byte| *byte == 0));
        }
    }
}
