//! The operations in flight, and the calls of MPI for them.
//!
//! A frame may be longer than messages are to be ([`super::message_length`]). Then several messages carry it, one after the
//! other. The first one begins with the frame's prefix, which states the frame's length. Each sender chooses the length of
//! its messages.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use super::engine::{Completed, EngineState, Failure, MessageTag, Wire};
use super::outbox::QueuedMessage;
use crate::transport::ports::{DirectReceiveHandle, FRAME_BYTES, PREFIX_BYTES, PortKey, Ports, frame_bytes};
use crate::transport::zero_copy::ZeroCopyTransfer;

/// Number of receives that are always posted.
const RECV_SLOTS: usize = 16;
/// Enough that a few receivers that do not receive leave slots for others, also with many messages for a frame.
pub(super) const MAX_SEND_SLOTS: usize = 4096;

/// Which thread calls MPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Served {
    ByThread,
    /// A caller does not pass the first message for a process to MPI, which may wait for its address in that call (MPI-2).
    ByCaller,
}

/// A frame that is being sent.
struct OutgoingFrame {
    to: usize,
    bytes: Arc<Vec<u8>>,
    /// How many bytes were passed to MPI.
    sent: usize,
}

/// What a slot of sends is used for. Receives without copies use them, too.
enum SlotUse {
    /// A message of a frame for a process.
    Frame(usize, Arc<Vec<u8>>),
    /// With its key.
    Receive(ZeroCopyTransfer, u16),
    Send(ZeroCopyTransfer),
}

/// A frame of which the first messages have arrived.
struct IncomingFrame {
    bytes: usize,
    arrived: usize,
    target: FrameTarget,
}

enum FrameTarget {
    /// The memory of the receive that waits for the payload.
    Receive(DirectReceiveHandle),
    Buffer(Vec<u8>),
}

impl IncomingFrame {
    /// Begins with a frame's first message, which contains the prefix.
    fn new(ports: &Ports, source: usize, bytes: usize, prefix: &[u8; PREFIX_BYTES]) -> Self {
        let target = match ports.begin_direct_receive(source, prefix, bytes - PREFIX_BYTES) {
            Some(receive) => FrameTarget::Receive(receive),
            None => {
                let mut buffer = ports.buffers.take();
                buffer.resize(FRAME_BYTES, 0);
                FrameTarget::Buffer(buffer)
            }
        };
        Self { bytes, arrived: 0, target }
    }

    /// Takes the next message; returns whether the frame is complete. What exceeds the frame is dropped.
    fn add(&mut self, message: &[u8]) -> bool {
        let message = &message[..message.len().min(self.bytes - self.arrived)];
        let range = self.arrived..self.arrived + message.len();
        match &mut self.target {
            FrameTarget::Buffer(buffer) => buffer[range].copy_from_slice(message),
            FrameTarget::Receive(receive) => {
                let payload = &message[PREFIX_BYTES.saturating_sub(self.arrived).min(message.len())..];
                let end = (self.arrived + message.len()).saturating_sub(PREFIX_BYTES);
                receive.fill(|memory| memory[end - payload.len()..end].copy_from_slice(payload));
            }
        }
        self.arrived += message.len();
        self.arrived == self.bytes
    }

    /// Passes the complete frame on; returns the port that is to be notified.
    fn finish(self, ports: &Ports, source: usize) -> Option<PortKey> {
        match self.target {
            FrameTarget::Buffer(buffer) => ports.take(source, buffer, 0, self.bytes),
            FrameTarget::Receive(receive) => {
                receive.complete();
                None
            }
        }
    }
}

/// The buffers of MPI's operations: by slot, receives first.
///
/// Messages of one process stay in order, because MPI matches messages with receives in the order in which both were
/// started. But MPI reports completions in another order (by slot, and a long message later than a following short
/// one). So a completed receive waits in its slot until all receives that were started before it are complete.
pub(super) struct MpiService {
    wire: Box<dyn Wire>,
    receives: Vec<Vec<u8>>,
    /// Slots of receives, oldest first.
    started: VecDeque<usize>,
    /// For each receive slot that is complete: the sender and the length.
    arrived: [Option<(usize, usize)>; RECV_SLOTS],
    /// By sender.
    incoming: HashMap<usize, IncomingFrame>,
    sends: Vec<Option<SlotUse>>,
    /// Free slots of sends; the one to use next comes last.
    free: Vec<usize>,
    outgoing: Option<OutgoingFrame>,
    /// Processes to which messages were sent.
    known: HashSet<usize>,
    /// Kept for their memory.
    done: Vec<Completed>,
    touched: HashSet<PortKey>,
    /// Transfers that have ended, with the number of bytes of receives.
    ended: Vec<(ZeroCopyTransfer, usize)>,
}

impl MpiService {
    /// Number of slots.
    pub(super) const SLOTS: usize = RECV_SLOTS + MAX_SEND_SLOTS;

    pub(super) fn new(wire: Box<dyn Wire>) -> Self {
        Self {
            wire,
            receives: (0..RECV_SLOTS).map(|_| Vec::new()).collect(),
            started: VecDeque::with_capacity(RECV_SLOTS),
            arrived: [None; RECV_SLOTS],
            incoming: HashMap::new(),
            sends: (0..MAX_SEND_SLOTS).map(|_| None).collect(),
            // Low slots first: MPI looks at all slots up to the highest one in use.
            free: (0..MAX_SEND_SLOTS).rev().collect(),
            outgoing: None,
            known: HashSet::new(),
            done: Vec::new(),
            touched: HashSet::new(),
            ended: Vec::new(),
        }
    }

    pub(super) fn is_sending(&self) -> bool {
        self.free.len() < self.sends.len() || self.outgoing.is_some()
    }

    /// Whether another send can be started.
    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Finalises MPI; waits for all processes of the job.
    pub(super) fn finish(&mut self) -> Result<(), Failure> {
        self.wire.finish()
    }

    /// Keeps the memory that MPI may still use after a failure or its end for ever.
    pub(super) fn leak(mut self) {
        self.incoming.clear();
        std::mem::forget(self);
    }

    pub(super) fn post_receives(&mut self, shared: &EngineState) -> Result<(), Failure> {
        (0..RECV_SLOTS).try_for_each(|slot| self.receive(slot, shared.ports.buffers.take()))
    }

    /// Moves what can be moved without waiting; returns whether anything was.
    pub(super) fn serve(&mut self, shared: &EngineState, served: Served) -> Result<bool, Failure> {
        let mut moved = self.send_waiting(shared, served)?;
        let mut done = std::mem::take(&mut self.done);
        self.wire.poll(&mut done)?;
        for Completed { slot, source, bytes } in done.drain(..) {
            moved = true;
            match slot.checked_sub(RECV_SLOTS) {
                None => self.arrived[slot] = Some((source, bytes)),
                Some(slot) => self.end_slot(slot, bytes, shared),
            }
        }
        self.done = done;
        while let Some(slot) = self.started.front().copied()
            && let Some((source, bytes)) = self.arrived[slot].take()
        {
            self.started.pop_front();
            let message = std::mem::take(&mut self.receives[slot]);
            let key = self.take(shared, source, message, bytes);
            self.touched.extend(key);
            self.receive(slot, shared.ports.buffers.take())?;
        }
        for (transfer, bytes) in self.ended.drain(..) {
            shared.ports.end_transfer(transfer.port, transfer.message, bytes);
        }
        if !self.touched.is_empty() {
            shared.ports.progress(self.touched.drain());
        }
        for (process, key) in shared.ports.take_unanswered() {
            shared.outbox.lock().answer(process, key);
        }
        // Mailboxes may have sent answers.
        moved |= self.send_waiting(shared, served)?;
        Ok(moved)
    }

    /// Takes a message from process `source`; returns the port that is to be notified of a frame.
    fn take(&mut self, shared: &EngineState, source: usize, message: Vec<u8>, bytes: usize) -> Option<PortKey> {
        let content = message.get(..bytes)?;
        if let Entry::Vacant(entry) = self.incoming.entry(source) {
            // A frame of another length is malformed.
            let prefix = content.first_chunk::<PREFIX_BYTES>()?;
            let total = frame_bytes(prefix).filter(|total| (bytes..=FRAME_BYTES).contains(total))?;
            if total == bytes {
                return shared.ports.take(source, message, 0, bytes);
            }
            entry.insert(IncomingFrame::new(&shared.ports, source, total, prefix));
        }
        let is_complete = self.incoming.get_mut(&source)?.add(content);
        shared.ports.buffers.put(message);
        match is_complete {
            true => self.incoming.remove(&source)?.finish(&shared.ports, source),
            false => None,
        }
    }

    /// Passes queued messages to MPI; returns whether there were any.
    pub(super) fn send_waiting(&mut self, shared: &EngineState, served: Served) -> Result<bool, Failure> {
        let mut moved = false;
        // The receiver reads the frame's length from the first message.
        let message_bytes = shared.options.lock().bytes.max(PREFIX_BYTES);
        while let Some(slot) = self.free.last().copied() {
            let mut frame = match self.outgoing.take() {
                Some(frame) => frame,
                None => match self.next_queued(shared, served) {
                    Some(QueuedMessage::Frame(to, bytes)) => OutgoingFrame { to, bytes: Arc::new(bytes), sent: 0 },
                    Some(queued) => {
                        self.free.pop();
                        self.start_transfer(slot, queued)?;
                        moved = true;
                        continue;
                    }
                    None => break,
                },
            };
            self.free.pop();
            let start = frame.sent;
            frame.sent = frame.bytes.len().min(start.saturating_add(message_bytes));
            self.sends[slot] = Some(SlotUse::Frame(frame.to, frame.bytes.clone()));
            let message = &frame.bytes[start..frame.sent];
            // SAFETY: the frame stays in the slot until MPI reports it as complete, and is not changed; otherwise it is
            // leaked.
            unsafe { self.wire.send(RECV_SLOTS + slot, message, frame.to, MessageTag::Frames)? };
            moved = true;
            if frame.sent < frame.bytes.len() {
                self.outgoing = Some(frame);
            }
        }
        Ok(moved)
    }

    /// Passes the memory of a message to MPI.
    fn start_transfer(&mut self, slot: usize, queued: QueuedMessage) -> Result<(), Failure> {
        let (tag, slot_use) = match queued {
            QueuedMessage::Receive(transfer, key) => (MessageTag::Transfer(key), SlotUse::Receive(transfer, key)),
            QueuedMessage::Send(transfer, key) => (MessageTag::Transfer(key), SlotUse::Send(transfer)),
            QueuedMessage::Frame(..) => return Ok(()),
        };
        match self.sends[slot].insert(slot_use) {
            SlotUse::Receive(transfer, _) => {
                // SAFETY: no other code accesses the memory until the transfer has ended, or MPI is given up (ZCP-3). It
                // is not empty.
                unsafe {
                    let memory = std::slice::from_raw_parts_mut(transfer.data, transfer.bytes);
                    self.wire.recv(RECV_SLOTS + slot, memory, Some(transfer.process), tag)
                }
            }
            SlotUse::Send(transfer) => {
                let memory: &[u8] = match transfer.bytes {
                    0 => &[],
                    // SAFETY: nothing changes the memory until then.
                    bytes => unsafe { std::slice::from_raw_parts(transfer.data, bytes) },
                };
                // SAFETY: as above.
                unsafe { self.wire.send(RECV_SLOTS + slot, memory, transfer.process, tag) }
            }
            SlotUse::Frame(..) => Ok(()),
        }
    }

    fn next_queued(&mut self, shared: &EngineState, served: Served) -> Option<QueuedMessage> {
        let mut outbox = shared.outbox.lock();
        let (process, is_send) = match outbox.queue.front()? {
            QueuedMessage::Frame(to, _) => (*to, true),
            QueuedMessage::Receive(transfer, _) => (transfer.process, false),
            QueuedMessage::Send(transfer, _) => (transfer.process, true),
        };
        if served == Served::ByCaller && !self.known.contains(&process) {
            return None;
        }
        if is_send {
            self.known.insert(process);
        }
        outbox.queue.pop_front()
    }

    /// Ends the use of a slot whose message is complete; with the last message of a frame, there is space for another one.
    fn end_slot(&mut self, slot: usize, bytes: usize, shared: &EngineState) {
        let Some(slot_use) = self.sends[slot].take() else { return };
        self.free.push(slot);
        match slot_use {
            SlotUse::Frame(to, bytes) => {
                let Ok(buffer) = Arc::try_unwrap(bytes) else { return };
                shared.send_buffers.put(buffer);
                let mut outbox = shared.outbox.lock();
                outbox.pending.entry(to).and_modify(|pending| *pending = pending.saturating_sub(1));
                self.touched.extend(outbox.refused.drain());
            }
            SlotUse::Receive(transfer, key) => {
                shared.outbox.lock().end_receive(key);
                self.ended.push((transfer, bytes));
            }
            SlotUse::Send(transfer) => {
                shared.outbox.lock().end_send();
                self.ended.push((transfer, 0));
            }
        }
    }

    fn receive(&mut self, slot: usize, mut buffer: Vec<u8>) -> Result<(), Failure> {
        buffer.resize(FRAME_BYTES, 0);
        self.receives[slot] = buffer;
        self.started.push_back(slot);
        // SAFETY: as in `send_waiting`.
        unsafe { self.wire.recv(slot, &mut self.receives[slot], None, MessageTag::Frames) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// A frame without a waiting receive is put together in a buffer, however it is cut.
        #[test]
        fn a_frame_in_several_messages_is_put_together(
            payload in 1..2000usize, cuts in prop::collection::vec(1..700usize, 1..40), excess in 0..100usize,
        ) {
            let ports = Ports::new(FRAME_BYTES);
            let mut frame = vec![0u8; PREFIX_BYTES];
            frame[PREFIX_BYTES - 8..].copy_from_slice(&(payload as u64).to_le_bytes());
            frame.extend((0..payload).map(|at| at as u8));
            let prefix = frame.first_chunk::<PREFIX_BYTES>().unwrap();
            let total = frame_bytes(prefix).unwrap();
            prop_assert_eq!(total, frame.len());
            let mut incoming = IncomingFrame::new(&ports, 0, total, prefix);
            frame.resize(total + excess, 99);
            let (mut rest, mut cuts) = (&frame[..], cuts.iter().cycle());
            while incoming.arrived < total {
                let (message, behind) = rest.split_at(rest.len().min(*cuts.next().unwrap()));
                let is_complete = incoming.add(message);
                prop_assert_eq!(is_complete, total + excess - behind.len() >= total);
                rest = behind;
            }
            let FrameTarget::Buffer(buffer) = &incoming.target else { panic!("no receive waits") };
            prop_assert!(buffer[..total] == frame[..total]);
        }
    }
}
