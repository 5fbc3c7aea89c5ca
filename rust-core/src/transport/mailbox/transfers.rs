//! The mailbox's part of transfers without copies (transport/zero_copy.rs).

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use parking_lot::MutexGuard;

use super::{Filling, FrameKind, Link, Mailbox, MailboxState, Outgoing};
use crate::transport::zero_copy::{MAX_BYTES, cancel_timeout};

/// The transfers between this member and a peer.
#[derive(Default)]
pub(super) struct PeerTransfers {
    /// Messages with more bytes are moved without copies; none if the link does not do that.
    frame_bytes: Option<usize>,
    /// Receives that wait to be started: the sender's number of the message, and the receive's.
    expected: VecDeque<(u64, u64)>,
    /// Sends whose key has come; none if the send was cancelled. They are started before the mailbox's lock is released.
    cleared: VecDeque<(Option<Outgoing>, u64)>,
    /// Sends that were started, by number.
    sends: HashMap<u64, Outgoing>,
}

impl PeerTransfers {
    pub(super) fn new(frame_bytes: Option<usize>) -> Self {
        Self { frame_bytes, ..Self::default() }
    }

    /// Whether the link moves messages without copies.
    pub(super) fn is_enabled(&self) -> bool {
        self.frame_bytes.is_some()
    }

    /// Whether a message of `bytes` bytes is moved without copies.
    pub(super) fn is_for(&self, bytes: usize) -> bool {
        self.frame_bytes.is_some_and(|frame_bytes| bytes > frame_bytes) && bytes <= MAX_BYTES
    }

    /// The receive `slot` takes the peer's message `id`.
    pub(super) fn expect(&mut self, id: u64, slot: u64) {
        self.expected.push_back((id, slot));
    }

    /// The key for a send has come; none if the send was cancelled.
    pub(super) fn clear(&mut self, send: Option<Outgoing>, key: u64) {
        self.cleared.push_back((send, key));
    }
}

impl MailboxState {
    /// Whether a transfer uses the memory of the message `id`.
    fn is_in_transfer(&self, id: u64) -> bool {
        self.filling.get(&id).is_some_and(|filling| filling.in_transfer)
            || self.peers.iter().any(|peer| peer.transfers.sends.contains_key(&id))
    }

    /// The bytes of all transfers, which may share a network.
    fn bytes_in_transfer(&self) -> usize {
        let received = self.filling.values().filter(|filling| filling.in_transfer).map(|filling| filling.bytes);
        let sent = self.peers.iter().flat_map(|peer| peer.transfers.sends.values()).map(|send| send.bytes);
        received.chain(sent).fold(0, usize::saturating_add)
    }
}

impl<L: Link> Mailbox<L> {
    /// Starts the transfers that wait for it.
    pub(super) fn start_transfers(&self, state: &mut MailboxState, to: usize) {
        let MailboxState { peers, filling, .. } = state;
        let peer = &mut peers[to];
        while let Some((id, slot)) = peer.transfers.expected.pop_front() {
            // Without a key, the sender ignores the answer if the message was withdrawn meanwhile, and sends frames, which
            // are dropped, if the receive was cancelled.
            let is_for_it = |it: &&mut Filling| it.from == to && it.id == id && !it.in_transfer;
            let key = filling.get_mut(&slot).filter(is_for_it).and_then(|filling| {
                let Filling { recv, bytes, .. } = filling;
                // SAFETY: a receive's memory is valid until it is complete or cancelled, which waits for the transfer
                // (ZCP-3).
                let key = unsafe { self.link.start_receive(to, slot, recv.data, *bytes) };
                filling.in_transfer = key.is_some();
                key
            });
            peer.replies.push_back([FrameKind::Cts as u64, id, slot, key.unwrap_or(0), 0]);
        }
        while let Some((send, key)) = peer.transfers.cleared.pop_front() {
            let (id, data, bytes) = match &send {
                Some(send) => (send.message.id(), send.data, send.bytes),
                // No message has the number 0.
                None => (0, std::ptr::null(), 0),
            };
            // SAFETY: as above; an empty message has no memory.
            let is_started = unsafe { self.link.start_send(to, key, id, data, bytes) };
            if let Some(send) = send.filter(|_| is_started) {
                peer.transfers.sends.insert(id, send);
            }
        }
    }

    /// A transfer has ended; a receive with so many bytes.
    pub(crate) fn end_transfer(&self, message: u64, bytes: usize) {
        let mut state = self.state.lock();
        let sent = |(to, peer): (usize, &mut super::Peer)| Some((to, peer.transfers.sends.remove(&message)?));
        if let Some((to, send)) = state.peers.iter_mut().enumerate().find_map(sent) {
            send.message.complete(Ok(to));
            state.completed = true;
        } else if let Some(filling) = state.filling.get_mut(&message)
            && filling.in_transfer
        {
            filling.in_transfer = false;
            let (from, is_whole) = (filling.from, bytes == filling.bytes);
            if is_whole {
                state.note_received(message, bytes, from);
            } else if let Some(Filling { recv, .. }) = state.filling.remove(&message)
                && !state.cancelling.contains(&message)
            {
                // The send was cancelled (ZCP-2).
                state.rematch(recv, &self.members);
            }
            state.match_unexpected(&self.members);
        }
        self.advance(&mut state);
    }

    /// Waits until no transfer uses the memory of a message that is being cancelled (ZCP-3).
    pub(super) fn await_transfer(&self, state: &mut MutexGuard<'_, MailboxState>, id: u64) {
        if !state.is_in_transfer(id) {
            return;
        }
        let deadline = Instant::now() + cancel_timeout(state.bytes_in_transfer());
        state.cancelling.push(id);
        while state.is_in_transfer(id) {
            let gives_up = Instant::now() >= deadline;
            let goes_on = MutexGuard::unlocked(state, || self.link.has_transfers(gives_up));
            if !goes_on {
                state.peers.iter_mut().for_each(|peer| drop(peer.transfers.sends.remove(&id)));
                state.filling.remove(&id);
            }
        }
        state.cancelling.retain(|cancelling| *cancelling != id);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use parking_lot::Mutex;

    use super::super::{Header, Message, Messages};
    use super::*;
    use crate::transport::{Members, Tag};

    const FRAME: usize = 100;
    const BYTES: usize = 3 * FRAME;
    const KEY: u64 = 17;

    /// Keeps what the mailbox sends and starts; never ends a transfer by itself.
    #[derive(Default)]
    struct ManualLink {
        arriving: Mutex<VecDeque<Header>>,
        sent: Mutex<Vec<Header>>,
        /// Numbers of the messages.
        receives: Mutex<Vec<u64>>,
        /// Keys, numbers and lengths.
        sends: Mutex<Vec<(u64, u64, usize)>>,
        refuses: bool,
    }

    impl Link for ManualLink {
        fn payload_bytes(&self, _peer: usize) -> usize {
            FRAME
        }
        unsafe fn push(&self, _to: usize, header: Header, _payload: *const u8) -> bool {
            self.sent.lock().push(header);
            true
        }
        fn pop(&self, _from: usize, take: &mut dyn FnMut(Header, *const u8)) -> bool {
            let header = self.arriving.lock().pop_front();
            header.is_some_and(|header| {
                take(header, [9u8; FRAME].as_ptr());
                true
            })
        }
        fn is_zero_copy(&self, _peer: usize) -> bool {
            true
        }
        unsafe fn start_receive(&self, _from: usize, message: u64, _data: *mut u8, _bytes: usize) -> Option<u64> {
            self.receives.lock().push(message);
            (!self.refuses).then_some(KEY)
        }
        unsafe fn start_send(&self, _to: usize, key: u64, message: u64, _data: *const u8, bytes: usize) -> bool {
            self.sends.lock().push((key, message, bytes));
            true
        }
        fn has_transfers(&self, gives_up: bool) -> bool {
            std::thread::sleep(Duration::from_millis(1));
            !gives_up
        }
        fn doorbell(&self) -> u32 {
            0
        }
        fn wait_doorbell(&self, _seen: u32, _limit: Duration) {}
        fn ring_own(&self) {}
    }

    fn mailbox(refuses: bool) -> Mailbox<ManualLink> {
        let link = ManualLink { refuses, ..ManualLink::default() };
        Mailbox::new(link, Members { ranks: Arc::new([0, 1]), me: 0 })
    }

    fn arrive(mailbox: &Mailbox<ManualLink>, header: Header) {
        mailbox.link.arriving.lock().push_back(header);
        mailbox.progress();
    }

    fn send(mailbox: &Mailbox<ManualLink>, tag: Tag, memory: &[u8]) -> Message {
        // SAFETY: tests keep the memory until the message is complete or cancelled.
        unsafe { mailbox.post_send(1, tag, memory.as_ptr(), memory.len()) }
    }

    fn recv(mailbox: &Mailbox<ManualLink>, tag: Tag, memory: &mut [u8]) -> Message {
        // SAFETY: as above.
        unsafe { mailbox.post_recv(Some(1), tag, memory.as_mut_ptr(), memory.len()) }
    }

    fn announce(tag: Tag, bytes: usize, id: u64) -> Header {
        [FrameKind::Rts as u64, tag, bytes as u64, id, 0]
    }

    fn clear(message: &Message) -> Header {
        [FrameKind::Cts as u64, message.id(), 5, KEY, 0]
    }

    #[test]
    fn long_messages_are_transferred_and_short_ones_are_not() {
        let (mailbox, long, short) = (mailbox(false), [1; BYTES], [1; FRAME]);
        let (sent, eager) = (send(&mailbox, 3, &long), send(&mailbox, 3, &short));
        assert!(sent.poll().is_none() && matches!(eager.poll(), Some(Ok(1))));
        arrive(&mailbox, clear(&sent));
        assert_eq!(*mailbox.link.sends.lock(), [(KEY, sent.id(), BYTES)]);
        assert!(sent.poll().is_none());
        mailbox.end_transfer(sent.id(), 0);
        assert!(matches!(sent.poll(), Some(Ok(1))));

        let mut memory = [0; BYTES];
        let received = recv(&mailbox, 4, &mut memory);
        arrive(&mailbox, announce(4, BYTES, 99));
        assert_eq!(*mailbox.link.receives.lock(), [received.id()]);
        assert_eq!(mailbox.link.sent.lock().last(), Some(&[FrameKind::Cts as u64, 99, received.id(), KEY, 0]));
        // A forged part of it.
        arrive(&mailbox, [FrameKind::Data as u64, received.id(), 0, 0, FRAME as u64]);
        assert_eq!(mailbox.begin_direct_receive(1, [FrameKind::Data as u64, received.id(), 0, 0, FRAME as u64]), None);
        assert!(received.poll().is_none());
        mailbox.end_transfer(received.id(), BYTES);
        assert!(matches!(received.poll(), Some(Ok(1))) && received.received_bytes() == BYTES);
        assert_eq!(memory, [0; BYTES], "nothing but the transfer writes");
    }

    #[test]
    fn frames_carry_a_message_whose_transfer_cannot_start() {
        let (mailbox, mut memory) = (mailbox(true), [0; BYTES]);
        let received = recv(&mailbox, 4, &mut memory);
        arrive(&mailbox, announce(4, BYTES, 99));
        assert_eq!(mailbox.link.sent.lock().last(), Some(&[FrameKind::Cts as u64, 99, received.id(), 0, 0]));
        for part in 0..3 {
            arrive(&mailbox, [FrameKind::Data as u64, received.id(), part * FRAME as u64, 0, FRAME as u64]);
        }
        assert!(matches!(received.poll(), Some(Ok(1))) && memory == [9; BYTES]);
    }

    /// ZCP-2.
    #[test]
    fn a_cancelled_send_answers_its_key_with_an_empty_message() {
        let (mailbox, memory) = (mailbox(false), [1; BYTES]);
        let sent = send(&mailbox, 3, &memory);
        mailbox.cancel(&sent);
        arrive(&mailbox, clear(&sent));
        assert_eq!(*mailbox.link.sends.lock(), [(KEY, 0, 0)]);
        assert!(sent.poll().is_none());
    }

    /// ZCP-2.
    #[test]
    fn an_empty_message_returns_the_receive_to_its_place() {
        let (mailbox, mut memory) = (mailbox(false), [0; BYTES]);
        let received = recv(&mailbox, 4, &mut memory);
        arrive(&mailbox, announce(4, BYTES, 99));
        arrive(&mailbox, [FrameKind::Withdraw as u64, 99, 0, 0, 0]);
        arrive(&mailbox, announce(4, BYTES, 100));
        assert_eq!(mailbox.link.receives.lock().len(), 1, "the first transfer goes on");
        mailbox.end_transfer(received.id(), 0);
        assert_eq!(*mailbox.link.receives.lock(), [received.id(); 2]);
        mailbox.end_transfer(received.id(), BYTES);
        assert!(matches!(received.poll(), Some(Ok(1))));
    }

    /// A message that is withdrawn before its transfer starts leaves nothing behind.
    #[test]
    fn one_transfer_at_a_time_uses_a_receive() {
        let (mailbox, mut memory) = (mailbox(false), [0; BYTES]);
        let received = recv(&mailbox, 4, &mut memory);
        let frames = [announce(4, BYTES, 99), announce(4, BYTES, 100), [FrameKind::Withdraw as u64, 99, 0, 0, 0]];
        mailbox.link.arriving.lock().extend(frames);
        mailbox.progress();
        assert_eq!(*mailbox.link.receives.lock(), [received.id()]);
        let answers: Vec<_> = mailbox.link.sent.lock().iter().map(|[_, id, _, key, _]| (*id, *key)).collect();
        assert_eq!(answers, [(99, 0), (100, KEY)]);
    }

    /// ZCP-2: messages with equal tags stay in order.
    #[test]
    fn later_receives_wait_for_one_whose_message_was_withdrawn() {
        let (mailbox, mut first, mut second) = (mailbox(false), [0; BYTES], [0; BYTES]);
        let receives = [recv(&mailbox, 4, &mut first), recv(&mailbox, 4, &mut second)];
        arrive(&mailbox, announce(4, BYTES, 99));
        arrive(&mailbox, [FrameKind::Withdraw as u64, 99, 0, 0, 0]);
        arrive(&mailbox, announce(4, BYTES, 100));
        arrive(&mailbox, announce(4, BYTES, 101));
        assert_eq!(*mailbox.link.receives.lock(), [receives[0].id()]);
        mailbox.end_transfer(receives[0].id(), 0);
        assert_eq!(mailbox.link.receives.lock()[1..], [receives[0].id(), receives[1].id()]);
        let answers: Vec<_> = mailbox.link.sent.lock().iter().map(|[_, id, slot, ..]| (*id, *slot)).collect();
        assert_eq!(answers[1..], [(100, receives[0].id()), (101, receives[1].id())]);
    }

    /// The same if both messages were withdrawn, and the second transfer ends first, before the mailbox has learned of the
    /// withdrawal of the first one, or after it.
    #[test]
    fn receives_stay_in_order_if_transfers_end_in_another_one() {
        for is_told in [false, true] {
            let (mailbox, mut first, mut second) = (mailbox(false), [0; BYTES], [0; BYTES]);
            let receives = [recv(&mailbox, 4, &mut first), recv(&mailbox, 4, &mut second)];
            arrive(&mailbox, announce(4, BYTES, 98));
            arrive(&mailbox, announce(4, BYTES, 99));
            for id in [98, 99] {
                if is_told {
                    arrive(&mailbox, [FrameKind::Withdraw as u64, id, 0, 0, 0]);
                }
            }
            arrive(&mailbox, announce(4, BYTES, 100));
            mailbox.end_transfer(receives[1].id(), 0);
            arrive(&mailbox, announce(4, BYTES, 101));
            assert_eq!(mailbox.link.receives.lock().len(), 2, "the messages wait");
            mailbox.end_transfer(receives[0].id(), 0);
            let answers: Vec<_> = mailbox.link.sent.lock().iter().map(|[_, id, slot, ..]| (*id, *slot)).collect();
            assert_eq!(answers[2..], [(100, receives[0].id()), (101, receives[1].id())], "{is_told}");
        }
    }

    /// A receive whose message turns out to be withdrawn while it is cancelled takes no other message.
    #[test]
    fn a_receive_that_is_cancelled_is_not_matched_again() {
        let (mailbox, mut memory) = (mailbox(false), [0; BYTES]);
        let received = recv(&mailbox, 4, &mut memory);
        arrive(&mailbox, announce(4, BYTES, 99));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                arrive(&mailbox, announce(4, BYTES, 100));
                mailbox.end_transfer(received.id(), 0);
            });
            mailbox.cancel(&received);
        });
        assert_eq!(mailbox.link.receives.lock().len(), 1);
        assert!(received.poll().is_none());
    }

    /// ZCP-3.
    #[test]
    fn a_cancellation_waits_for_the_transfer() {
        for sends in [false, true] {
            let (mailbox, mut memory) = (mailbox(false), [1; BYTES]);
            let message = if sends { send(&mailbox, 4, &memory) } else { recv(&mailbox, 4, &mut memory) };
            arrive(&mailbox, if sends { clear(&message) } else { announce(4, BYTES, 99) });
            let (since, mut waited) = (Instant::now(), Duration::ZERO);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(50));
                    mailbox.end_transfer(message.id(), BYTES);
                });
                mailbox.cancel(&message);
                waited = since.elapsed();
            });
            assert!((Duration::from_millis(50)..cancel_timeout(BYTES)).contains(&waited), "{waited:?}");
            assert!(matches!(message.poll(), Some(Ok(1))));
        }
    }

    /// ZCP-3.
    #[test]
    fn a_transfer_that_does_not_end_is_given_up() {
        let (mailbox, mut memory) = (mailbox(false), [1; BYTES]);
        let message = recv(&mailbox, 4, &mut memory);
        arrive(&mailbox, announce(4, BYTES, 99));
        let since = Instant::now();
        mailbox.cancel(&message);
        assert!(since.elapsed() >= cancel_timeout(BYTES) && message.poll().is_none());
        mailbox.end_transfer(message.id(), BYTES);
        assert!(message.poll().is_none());
    }
}
