//! Payloads that a carrier reads directly to the memory of their receives, instead of to a buffer of its own.
//!
//! - MBX-5: a payload is read directly only where a receive waits for it now. A receive that is cancelled meanwhile
//!   waits for the read in progress, which does not block, and takes the bytes so far to a buffer, where the payload
//!   continues.
//! - MBX-6: a direct receive completes only when the whole payload has arrived and is authenticated. Until then, its
//!   memory may hold bytes whose authentication fails.

use super::{FrameKind, Header, Link, Mailbox, MailboxState, Posted, eager_cost};
use crate::transport::Tag;

/// The payload of a frame that is arriving.
pub(super) struct DirectReceive {
    ticket: u64,
    bytes: usize,
    target: DirectTarget,
    /// Whether a read is in progress.
    busy: bool,
}

enum DirectTarget {
    /// An eager message, and its receive.
    Eager(Posted),
    /// A part of the message for the receive with this id.
    Data { slot: u64, place: *mut u8 },
    /// The receive was cancelled. An eager message is kept under its tag.
    Kept { tag: Option<Tag>, memory: Vec<u8> },
}

impl DirectReceive {
    fn place(&mut self) -> *mut u8 {
        match &mut self.target {
            DirectTarget::Eager(recv) => recv.data,
            DirectTarget::Data { place, .. } => *place,
            DirectTarget::Kept { memory, .. } => memory.as_mut_ptr(),
        }
    }

    fn is_for(&self, id: u64) -> bool {
        match &self.target {
            DirectTarget::Eager(recv) => recv.message.id() == id,
            DirectTarget::Data { slot, .. } => *slot == id,
            DirectTarget::Kept { .. } => false,
        }
    }
}

/// Ends a read, also if it panics.
struct ReadInProgress<'a, L: Link> {
    mailbox: &'a Mailbox<L>,
    from: usize,
}

impl<L: Link> Drop for ReadInProgress<'_, L> {
    fn drop(&mut self) {
        if let Some(receive) = &mut self.mailbox.state.lock().peers[self.from].direct_receive {
            receive.busy = false;
        }
        self.mailbox.direct_read_ended.notify_all();
    }
}

impl<L: Link> Mailbox<L> {
    /// Starts a direct receive for the payload of the next frame from `from`, all of whose earlier frames the link has.
    /// Returns its ticket, or none if no receive waits for the payload.
    pub(crate) fn begin_direct_receive(&self, from: usize, header: Header) -> Option<u64> {
        let mut state = self.state.lock();
        self.advance(&mut state);
        let [kind, a, b, _, length] = header;
        let bytes =
            usize::try_from(length).ok().filter(|bytes| *bytes > 0 && *bytes <= self.link.payload_bytes(from))?;
        if state.peers.get(from)?.direct_receive.is_some() {
            return None;
        }
        let target = match FrameKind::decode(kind)? {
            FrameKind::Eager => {
                // A message of another length takes the usual way to its error.
                let at = state.position_for_arrival(from, a).filter(|at| state.posted[*at].accepts(bytes))?;
                DirectTarget::Eager(state.posted.remove(at)?)
            }
            FrameKind::Data => {
                let filling = state.filling.get(&a).filter(|filling| !filling.in_transfer)?;
                let fits =
                    filling.from == from && b == filling.received as u64 && bytes <= filling.bytes - filling.received;
                DirectTarget::Data { slot: a, place: fits.then(|| filling.recv.data.wrapping_add(filling.received))? }
            }
            _ => return None,
        };
        state.next_id += 1;
        let ticket = state.next_id;
        state.peers[from].direct_receive = Some(DirectReceive { ticket, bytes, target, busy: false });
        Some(ticket)
    }

    /// Passes the memory of a direct receive to `read`, which must not block: as many bytes as the frame's header says.
    pub(crate) fn fill(&self, from: usize, ticket: u64, read: &mut dyn FnMut(*mut u8)) {
        let place = {
            let mut state = self.state.lock();
            let Some(receive) = state.peers[from].direct_receive.as_mut().filter(|it| it.ticket == ticket) else {
                return;
            };
            receive.busy = true;
            receive.place()
        };
        let _read = ReadInProgress { mailbox: self, from };
        read(place);
    }

    /// Ends a direct receive: the payload is complete and authentic, or it will never be.
    pub(crate) fn end_direct_receive(&self, from: usize, ticket: u64, is_whole: bool) {
        let mut state = self.state.lock();
        let Some(receive) = state.peers[from].direct_receive.take_if(|it| it.ticket == ticket) else { return };
        let bytes = receive.bytes;
        match receive.target {
            DirectTarget::Eager(recv) if is_whole => {
                state.peers[from].eager_kept += eager_cost(bytes);
                state.note_taken(from, bytes, &self.members);
                recv.message.complete_receive(from, bytes);
                state.completed = true;
            }
            DirectTarget::Eager(recv) => state.repost(recv),
            DirectTarget::Data { slot, .. } if is_whole => state.note_received(slot, bytes, from),
            DirectTarget::Kept { tag: Some(tag), memory } if is_whole => {
                let header = [FrameKind::Eager as u64, tag, 0, 0, bytes as u64];
                // SAFETY: the memory has that many bytes.
                unsafe { state.take(from, header, memory.as_ptr(), bytes, &self.members) };
            }
            DirectTarget::Data { .. } | DirectTarget::Kept { .. } => {}
        }
        self.advance(&mut state);
    }

    /// Takes a direct receive away from the memory of the message `id`, which is being cancelled (MBX-5).
    pub(super) fn detach(&self, state: &mut parking_lot::MutexGuard<'_, MailboxState>, id: u64) {
        let find = |state: &MailboxState| {
            state.peers.iter().position(|peer| peer.direct_receive.as_ref().is_some_and(|receive| receive.is_for(id)))
        };
        while let Some(from) = find(state) {
            let receive = state.peers[from].direct_receive.as_mut().expect("it was found");
            if receive.busy {
                self.direct_read_ended.wait(state);
                continue;
            }
            let tag = match &receive.target {
                DirectTarget::Eager(recv) => Some(recv.tag),
                _ => None,
            };
            // SAFETY: the memory of a receive is valid for its length until the message is cancelled, and no read is
            // in progress.
            let memory = unsafe { std::slice::from_raw_parts(receive.place(), receive.bytes) }.to_vec();
            receive.target = DirectTarget::Kept { tag, memory };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;
    use std::time::Duration;

    use parking_lot::Mutex;

    use super::*;
    use crate::transport::Members;
    use crate::transport::mailbox::{Message, Messages};

    const BYTES: usize = 100;

    /// Keeps the frames that the mailbox sends; frames with payloads arrive as direct receives only.
    #[derive(Default)]
    struct SilentLink {
        arriving: Mutex<VecDeque<Header>>,
        sent: Mutex<Vec<Header>>,
    }

    impl Link for SilentLink {
        fn payload_bytes(&self, _peer: usize) -> usize {
            BYTES
        }
        unsafe fn push(&self, _to: usize, header: Header, _payload: *const u8) -> bool {
            self.sent.lock().push(header);
            true
        }
        fn pop(&self, _from: usize, take: &mut dyn FnMut(Header, *const u8)) -> bool {
            let header = self.arriving.lock().pop_front();
            header.is_some_and(|header| {
                take(header, [9u8; BYTES].as_ptr());
                true
            })
        }
        fn doorbell(&self) -> u32 {
            0
        }
        fn wait_doorbell(&self, _seen: u32, _limit: Duration) {}
        fn ring_own(&self) {}
    }

    fn mailbox() -> Mailbox<SilentLink> {
        Mailbox::new(SilentLink::default(), Members { ranks: Arc::new([0, 1]), me: 0 })
    }

    fn eager(tag: Tag, bytes: usize) -> Header {
        [FrameKind::Eager as u64, tag, 0, 0, bytes as u64]
    }

    fn recv(mailbox: &Mailbox<SilentLink>, tag: Tag, memory: &mut [u8]) -> Message {
        // SAFETY: tests keep the memory until the message is complete or cancelled.
        unsafe { mailbox.post_recv(Some(1), tag, memory.as_mut_ptr(), memory.len()) }
    }

    fn write(mailbox: &Mailbox<SilentLink>, ticket: u64, range: std::ops::Range<usize>, value: u8) {
        // SAFETY: a direct receive's memory has BYTES bytes.
        mailbox.fill(1, ticket, &mut |place| unsafe { place.add(range.start).write_bytes(value, range.len()) });
    }

    #[test]
    fn an_eager_payload_lands_only_where_a_receive_of_its_length_waits() {
        let (mailbox, mut memory) = (mailbox(), [0; BYTES]);
        assert_eq!(mailbox.begin_direct_receive(1, eager(3, BYTES)), None, "nothing is posted");
        let message = recv(&mailbox, 3, &mut memory);
        assert_eq!(mailbox.begin_direct_receive(1, eager(4, BYTES)), None, "another tag");
        assert_eq!(mailbox.begin_direct_receive(1, eager(3, BYTES - 1)), None, "another length");
        assert_eq!(mailbox.begin_direct_receive(1, eager(3, BYTES + 1)), None, "longer than a frame");
        let ticket = mailbox.begin_direct_receive(1, eager(3, BYTES)).expect("it waits");
        assert_eq!(mailbox.begin_direct_receive(1, eager(3, BYTES)), None, "one direct receive at a time");
        write(&mailbox, ticket, 0..BYTES, 5);
        assert!(message.poll().is_none(), "it is not known to be authentic");
        mailbox.end_direct_receive(1, ticket, true);
        assert!(matches!(message.poll(), Some(Ok(1))));
        assert_eq!((memory, mailbox.state.lock().peers[1].eager_kept), ([5; BYTES], 0));
    }

    #[test]
    fn earlier_frames_take_their_receives_first() {
        let (mailbox, mut first, mut second) = (mailbox(), [0; BYTES], [0; BYTES]);
        let messages = [recv(&mailbox, 3, &mut first), recv(&mailbox, 3, &mut second)];
        mailbox.link.arriving.lock().push_back(eager(3, BYTES));
        let ticket = mailbox.begin_direct_receive(1, eager(3, BYTES)).expect("the second one waits");
        write(&mailbox, ticket, 0..BYTES, 5);
        mailbox.end_direct_receive(1, ticket, true);
        assert!(messages.iter().all(|message| matches!(message.poll(), Some(Ok(1)))));
        assert_eq!((first, second), ([9; BYTES], [5; BYTES]));
    }

    #[test]
    fn parts_of_a_message_land_at_their_offsets() {
        let (mailbox, mut memory) = (mailbox(), [0; 2 * BYTES]);
        let message = recv(&mailbox, 3, &mut memory);
        mailbox.link.arriving.lock().push_back([FrameKind::Rts as u64, 3, 2 * BYTES as u64, 77, 0]);
        mailbox.progress();
        let [_, _, slot, ..] = mailbox.link.sent.lock()[0];
        let data = |offset: usize| [FrameKind::Data as u64, slot, offset as u64, 0, BYTES as u64];
        assert_eq!(mailbox.begin_direct_receive(1, data(BYTES)), None, "parts come in order");
        for part in 0..2 {
            let ticket = mailbox.begin_direct_receive(1, data(part * BYTES)).expect("it waits");
            write(&mailbox, ticket, 0..BYTES, part as u8 + 1);
            mailbox.end_direct_receive(1, ticket, true);
        }
        assert!(matches!(message.poll(), Some(Ok(1))));
        assert!(memory[..BYTES].iter().all(|byte| *byte == 1) && memory[BYTES..].iter().all(|byte| *byte == 2));
    }

    #[test]
    fn a_cancelled_receive_leaves_its_message_to_the_next_one() {
        let (mailbox, mut memory, mut next) = (mailbox(), [0; BYTES], [0; BYTES]);
        let message = recv(&mailbox, 3, &mut memory);
        let ticket = mailbox.begin_direct_receive(1, eager(3, BYTES)).expect("it waits");
        write(&mailbox, ticket, 0..40, 5);
        mailbox.cancel(&message);
        write(&mailbox, ticket, 40..BYTES, 6);
        assert!(memory[40..].iter().all(|byte| *byte == 0), "nothing is written after the cancellation");
        mailbox.end_direct_receive(1, ticket, true);
        assert!(matches!(recv(&mailbox, 3, &mut next).poll(), Some(Ok(1))));
        assert!(next[..40].iter().all(|byte| *byte == 5) && next[40..].iter().all(|byte| *byte == 6));
    }

    #[test]
    fn a_cancellation_waits_for_the_read_in_progress() {
        let (mailbox, mut memory) = (mailbox(), [0; BYTES]);
        let message = recv(&mailbox, 3, &mut memory);
        let ticket = mailbox.begin_direct_receive(1, eager(3, BYTES)).expect("it waits");
        let reading = std::sync::Barrier::new(2);
        let read_ended = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                mailbox.fill(1, ticket, &mut |_| {
                    reading.wait();
                    std::thread::sleep(Duration::from_millis(20));
                    read_ended.store(true, std::sync::atomic::Ordering::SeqCst);
                });
            });
            reading.wait();
            mailbox.cancel(&message);
            assert!(read_ended.load(std::sync::atomic::Ordering::SeqCst));
        });
    }

    #[test]
    fn a_payload_that_is_not_authentic_completes_nothing() {
        let (mailbox, mut memory) = (mailbox(), [0; BYTES]);
        let message = recv(&mailbox, 3, &mut memory);
        let ticket = mailbox.begin_direct_receive(1, eager(3, BYTES)).expect("it waits");
        write(&mailbox, ticket, 0..BYTES, 5);
        mailbox.end_direct_receive(1, ticket, false);
        assert!(message.poll().is_none());
        mailbox.link.arriving.lock().push_back(eager(3, BYTES));
        mailbox.progress();
        assert!(matches!(message.poll(), Some(Ok(1))) && memory == [9; BYTES]);
    }
}
