//! Matching of messages with receives, over a [`Link`] that carries small frames in order.
//!
//! A message of at most [`Link::payload_bytes`] travels at once in one frame and is kept at the receiver until
//! somebody asks for it. A larger one asks first; its bytes travel when a receive with its tag is there:
//!
//! ```text
//! sender    Ask{tag, bytes, id} -->              Part{slot, offset} --> Part ..
//! receiver                      <-- Grant{id, slot}   (or Refuse{id, bytes} if the lengths differ)
//! ```
//!
//! - MBX-1: an arriving frame is always taken, whatever is posted: so no message blocks another (TRA-1).
//! - MBX-2: `Eager` and `Ask` frames to one peer leave in the order of their posts, so equal tags stay in order.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;

use super::{Members, Tag};
use crate::error::{Error, Result};

/// What a frame says. `#[repr]` values are the wire's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum FrameKind {
    Eager = 1,
    Ask = 2,
    Grant = 3,
    Refuse = 4,
    Part = 5,
}

impl FrameKind {
    fn decode(value: u64) -> Option<Self> {
        [Self::Eager, Self::Ask, Self::Grant, Self::Refuse, Self::Part].into_iter().find(|kind| *kind as u64 == value)
    }
}

/// The words before a frame's payload: `[kind, a, b, c, payload bytes]`, where a, b, c are
/// Eager: tag; Ask: tag, bytes, id; Grant: id, slot; Refuse: id, bytes; Part: slot, offset.
pub(crate) type Header = [u64; 5];

/// Carries frames between pairs, in order, without waiting.
pub(crate) trait Link: Send + Sync {
    /// The largest payload of a frame from or to `peer`.
    fn payload_bytes(&self, peer: usize) -> usize;
    /// Hands over a frame, or returns false if there is no room for it now.
    ///
    /// # Safety
    /// `payload` is valid for reads of `header[4]` bytes, at most [`Link::payload_bytes`].
    unsafe fn push(&self, to: usize, header: Header, payload: *const u8) -> bool;
    /// Gives the next frame from `from` to `take`; false if there is none. During the call the payload pointer is valid for
    /// as many bytes as the header says, but no more than [`Link::payload_bytes`]; a peer may write there meanwhile.
    fn pop(&self, from: usize, take: &mut dyn FnMut(Header, *const u8)) -> bool;
    /// See [`super::Transport::doorbell`].
    fn doorbell(&self) -> u32;
    /// See [`super::Transport::doze`].
    fn doze(&self, seen: u32, limit: Duration);
    /// Wakes the threads of this process that doze.
    fn ring_own(&self);
}

#[derive(Debug)]
struct MessageState {
    /// The member at the other end; `None` for a receive from anybody.
    partner: Option<usize>,
    id: u64,
    result: OnceLock<Result<usize>>,
}

/// A message under way, by [`super::Transport::post_send`] or [`super::Transport::post_recv`].
#[derive(Clone, Debug)]
pub struct Message(Arc<MessageState>);

impl Message {
    /// The outcome, once there is one: the member at the other end, or what went wrong.
    pub fn poll(&self) -> Option<Result<usize>> {
        self.0.result.get().cloned()
    }

    /// Global ranks that may complete this message.
    pub(crate) fn partners(&self, members: &Members) -> Vec<usize> {
        match self.0.partner {
            Some(partner) => vec![members.ranks[partner]],
            None => (0..members.size()).filter(|rank| *rank != members.me).map(|rank| members.ranks[rank]).collect(),
        }
    }

    fn complete(&self, result: Result<usize>) {
        // A second outcome can only come from a forged frame; the first stands.
        let _ = self.0.result.set(result);
    }
}

struct Outgoing {
    message: Message,
    tag: Tag,
    data: *const u8,
    bytes: usize,
}

struct Granted {
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
}

struct Filling {
    recv: Posted,
    from: usize,
    received: usize,
}

enum Body {
    Eager(Vec<u8>),
    Ask { id: u64, bytes: usize },
}

struct Unexpected {
    from: usize,
    tag: Tag,
    body: Body,
}

#[derive(Default)]
struct Peer {
    /// Grants and refusals that wait for room.
    replies: VecDeque<Header>,
    /// Posted, in order, not yet on the link.
    waiting: VecDeque<Outgoing>,
    /// Asked for, by id.
    asked: HashMap<u64, Outgoing>,
    /// Granted, being streamed one after the other.
    streams: VecDeque<Granted>,
}

#[derive(Default)]
struct State {
    peers: Vec<Peer>,
    posted: VecDeque<Posted>,
    unexpected: VecDeque<Unexpected>,
    filling: HashMap<u64, Filling>,
    next_id: u64,
    /// A message was completed in this round of progress.
    completed: bool,
}

// SAFETY: the raw pointers are the buffers of posted messages, whose owner promised in `post_send` and `post_recv`
// that any thread may use them until completion; the mutex around the state orders these uses.
unsafe impl Send for State {}

/// What a transport's messages are made with: [`super::Transport`] has its functions under the same names.
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
    /// See [`super::Transport::progress`].
    fn progress(&self);
    /// See [`super::Transport::cancel`].
    fn cancel(&self, message: &Message);
    /// See [`super::Transport::doorbell`].
    fn doorbell(&self) -> u32;
    /// See [`super::Transport::doze`].
    fn doze(&self, seen: u32, limit: Duration);
    /// See [`super::Transport::ring`].
    fn ring(&self);
}

/// The messages of one member; see the module's text.
pub(crate) struct Mailbox<L> {
    pub(crate) link: L,
    members: Members,
    state: Mutex<State>,
}

impl<L: Link> Mailbox<L> {
    pub(crate) fn new(link: L, members: Members) -> Self {
        let peers = (0..members.size()).map(|_| Peer::default()).collect();
        Self { link, members, state: Mutex::new(State { peers, ..State::default() }) }
    }

    fn advance(&self, state: &mut State) {
        for peer in (0..self.members.size()).filter(|peer| *peer != self.members.me) {
            while self.link.pop(peer, &mut |header, payload| {
                // SAFETY: the link promises as many readable bytes as the header says, up to `payload_bytes`.
                unsafe { state.take(peer, header, payload, self.link.payload_bytes(peer), &self.members) }
            }) {}
            self.push_to(state, peer);
        }
        if std::mem::take(&mut state.completed) {
            // Another thread of this process may doze for the message that this one completed.
            self.link.ring_own();
        }
    }

    fn push_to(&self, state: &mut State, to: usize) {
        let payload_bytes = self.link.payload_bytes(to);
        let State { peers, completed, .. } = state;
        let peer = &mut peers[to];
        while let Some(header) = peer.replies.front() {
            // SAFETY: replies have no payload.
            if !unsafe { self.link.push(to, *header, std::ptr::null()) } {
                break;
            }
            peer.replies.pop_front();
        }
        while let Some(send) = peer.waiting.front() {
            let eager = send.bytes <= payload_bytes;
            let header = match eager {
                true => [FrameKind::Eager as u64, send.tag, 0, 0, send.bytes as u64],
                false => [FrameKind::Ask as u64, send.tag, send.bytes as u64, send.message.0.id, 0],
            };
            // SAFETY: an eager message's bytes are valid until it completes, and fit a frame; an ask has no payload.
            if !unsafe { self.link.push(to, header, send.data) } {
                return;
            }
            let send = peer.waiting.pop_front().expect("it was at the front");
            if eager {
                send.message.complete(Ok(to));
                *completed = true;
            } else {
                peer.asked.insert(send.message.0.id, send);
            }
        }
        while let Some(stream) = peer.streams.front_mut() {
            let part = (stream.send.bytes - stream.sent).min(payload_bytes);
            let header = [FrameKind::Part as u64, stream.slot, stream.sent as u64, 0, part as u64];
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
            state.arrive(to, tag, Body::Eager(copy), &self.members);
        } else {
            state.peers[to].waiting.push_back(Outgoing { message: message.clone(), tag, data, bytes });
        }
        self.advance(&mut state);
        message
    }

    unsafe fn post_recv(&self, from: Option<usize>, tag: Tag, data: *mut u8, bytes: usize) -> Message {
        let mut state = self.state.lock();
        let message = state.message(from);
        let recv = Posted { message: message.clone(), from, tag, data, bytes };
        let found = state.unexpected.iter().position(|it| it.tag == tag && from.is_none_or(|from| from == it.from));
        match found.and_then(|at| state.unexpected.remove(at)) {
            Some(arrived) => state.deliver(recv, arrived.from, arrived.body, &self.members),
            None => state.posted.push_back(recv),
        }
        self.advance(&mut state);
        message
    }

    fn cancel(&self, message: &Message) {
        let mut state = self.state.lock();
        let id = message.0.id;
        state.posted.retain(|it| it.message.0.id != id);
        state.filling.remove(&id);
        for peer in &mut state.peers {
            peer.waiting.retain(|it| it.message.0.id != id);
            peer.asked.remove(&id);
            peer.streams.retain(|it| it.send.message.0.id != id);
        }
    }

    fn progress(&self) {
        self.advance(&mut self.state.lock());
    }

    fn doorbell(&self) -> u32 {
        self.link.doorbell()
    }

    fn doze(&self, seen: u32, limit: Duration) {
        self.link.doze(seen, limit);
    }

    fn ring(&self) {
        self.link.ring_own();
    }
}

impl State {
    fn message(&mut self, partner: Option<usize>) -> Message {
        self.next_id += 1;
        Message(Arc::new(MessageState { partner, id: self.next_id, result: OnceLock::new() }))
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
                if let Some(recv) = self.claim(from, a) {
                    // SAFETY: forwarded from the caller; `length` is at most `payload_bytes`.
                    unsafe { self.finish(recv, from, payload, length, members) };
                } else {
                    let mut copy = vec![0; length];
                    // SAFETY: `length` is at most `payload_bytes`, and the copy has that length.
                    unsafe { std::ptr::copy_nonoverlapping(payload, copy.as_mut_ptr(), length) };
                    self.unexpected.push_back(Unexpected { from, tag: a, body: Body::Eager(copy) });
                }
            }
            Some(FrameKind::Ask) => {
                let bytes = usize::try_from(b).unwrap_or(usize::MAX);
                self.arrive(from, a, Body::Ask { id: c, bytes }, members);
            }
            Some(FrameKind::Grant) => {
                let peer = &mut self.peers[from];
                if let Some(send) = peer.asked.remove(&a) {
                    peer.streams.push_back(Granted { send, slot: b, sent: 0 });
                }
            }
            Some(FrameKind::Refuse) => {
                if let Some(send) = self.peers[from].asked.remove(&a) {
                    let error = length_mismatch(send.tag, members.me, send.bytes as u64, from, b, members);
                    send.message.complete(Err(error));
                    self.completed = true;
                }
            }
            Some(FrameKind::Part) => {
                let Some(filling) = self.filling.get_mut(&a) else { return };
                // Parts of one message arrive in order, so the offset is known; another one is forged.
                if filling.from != from
                    || b != filling.received as u64
                    || length > filling.recv.bytes - filling.received
                {
                    return;
                }
                // SAFETY: the part lies inside the posted buffer by the check above; the payload is the caller's.
                unsafe { std::ptr::copy_nonoverlapping(payload, filling.recv.data.add(filling.received), length) };
                filling.received += length;
                if filling.received == filling.recv.bytes
                    && let Some(done) = self.filling.remove(&a)
                {
                    done.recv.message.complete(Ok(from));
                    self.completed = true;
                }
            }
            // Only a corrupt peer sends this; what waits for it ends by its own deadline.
            None => {}
        }
    }

    /// The first posted receive that takes a message with `tag` from `from`.
    fn claim(&mut self, from: usize, tag: Tag) -> Option<Posted> {
        let at = self.posted.iter().position(|it| it.tag == tag && it.from.is_none_or(|it| it == from))?;
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
            Body::Ask { id, bytes } if bytes == recv.bytes => {
                let slot = recv.message.0.id;
                self.filling.insert(slot, Filling { recv, from, received: 0 });
                self.peers[from].replies.push_back([FrameKind::Grant as u64, id, slot, 0, 0]);
            }
            Body::Ask { id, bytes } => {
                self.peers[from].replies.push_back([FrameKind::Refuse as u64, id, recv.bytes as u64, 0, 0]);
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
        if bytes != recv.bytes {
            let error = length_mismatch(recv.tag, from, bytes as u64, members.me, recv.bytes as u64, members);
            recv.message.complete(Err(error));
            return;
        }
        if bytes > 0 {
            // SAFETY: both sides are valid for `bytes`; the posted buffer is nobody else's.
            unsafe { std::ptr::copy_nonoverlapping(data, recv.data, bytes) };
        }
        recv.message.complete(Ok(from));
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
    use proptest::prelude::*;

    use super::*;

    /// Takes what a test pushes, and swallows what the mailbox sends.
    #[derive(Default)]
    struct Script(Mutex<VecDeque<Header>>);

    impl Link for Script {
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
        fn doze(&self, _seen: u32, _limit: Duration) {}
        fn ring_own(&self) {}
    }

    /// Small numbers, which may name something, and any others.
    fn word() -> impl Strategy<Value = u64> {
        prop_oneof![4 => 0..8u64, 2 => 60..300u64, 1 => any::<u64>()]
    }

    proptest! {
        /// TRA-2: whatever a peer sends, nothing is written outside posted memory and nothing panics.
        #[test]
        fn forged_frames_are_harmless(headers in prop::collection::vec(prop::array::uniform5(word()), 0..60)) {
            let ranks: Arc<[usize]> = [0, 1].into();
            let mailbox = Mailbox::new(Script::default(), Members { ranks, me: 0 });
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
