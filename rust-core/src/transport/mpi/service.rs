//! The operations in flight, and the calls of MPI for them.
//!
//! A frame may be longer than messages are to be ([`super::message_length`]). Then several messages carry it, one after the
//! other. The first one begins with the frame's prefix, which states the frame's length. Each sender chooses the length of
//! its messages.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::engine::{Completed, EngineState, Failure, MessageTag, Wire};
use crate::transport::ports::{DirectReceiveHandle, FRAME_BYTES, PREFIX_BYTES, PortKey, Ports, frame_bytes};

/// Number of receives that are always posted.
const RECV_SLOTS: usize = 16;
/// Enough that a few receivers that do not receive leave slots for others, also with many messages for a frame.
const MAX_SEND_SLOTS: usize = 4096;

/// Which thread calls MPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Served {
    ByThread,
    /// A caller does not pass the first frame to a process to MPI, which may wait for its address in that call (MPI-2).
    ByCaller,
}

/// A frame that is being sent.
struct OutgoingFrame {
    to: usize,
    bytes: Arc<Vec<u8>>,
    /// How many bytes were passed to MPI.
    sent: usize,
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
    /// The receiver and the frame of each message that is being sent.
    sends: Vec<Option<(usize, Arc<Vec<u8>>)>>,
    /// Free slots of sends; the one to use next comes last.
    free: Vec<usize>,
    outgoing: Option<OutgoingFrame>,
    /// Processes to which frames were sent.
    known: HashSet<usize>,
    /// Kept for their memory.
    done: Vec<Completed>,
    touched: HashSet<PortKey>,
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
                Some(slot) => self.end_send(slot, shared),
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
        if !self.touched.is_empty() {
            shared.ports.progress(self.touched.drain());
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

    /// Passes queued frames to MPI; returns whether there was one.
    pub(super) fn send_waiting(&mut self, shared: &EngineState, served: Served) -> Result<bool, Failure> {
        let mut moved = false;
        // The receiver reads the frame's length from the first message.
        let message_bytes = shared.message_bytes.load(Ordering::Relaxed).max(PREFIX_BYTES);
        while let Some(slot) = self.free.last().copied() {
            let mut frame = match self.outgoing.take() {
                Some(frame) => frame,
                None => match self.next_frame(shared, served) {
                    Some(frame) => frame,
                    None => break,
                },
            };
            self.free.pop();
            let start = frame.sent;
            frame.sent = frame.bytes.len().min(start.saturating_add(message_bytes));
            let (_, bytes) = self.sends[slot].insert((frame.to, frame.bytes.clone()));
            let message = &bytes[start..frame.sent];
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

    fn next_frame(&mut self, shared: &EngineState, served: Served) -> Option<OutgoingFrame> {
        let mut outbox = shared.outbox.lock();
        let (to, _) = outbox.frames.front()?;
        if served == Served::ByCaller && !self.known.contains(to) {
            return None;
        }
        let (to, bytes) = outbox.frames.pop_front()?;
        self.known.insert(to);
        Some(OutgoingFrame { to, bytes: Arc::new(bytes), sent: 0 })
    }

    /// Ends a send that is complete; with the last message of a frame, there is space for another one.
    fn end_send(&mut self, slot: usize, shared: &EngineState) {
        let Some((to, bytes)) = self.sends[slot].take() else { return };
        self.free.push(slot);
        let Ok(buffer) = Arc::try_unwrap(bytes) else { return };
        shared.send_buffers.put(buffer);
        let mut outbox = shared.outbox.lock();
        outbox.pending.entry(to).and_modify(|pending| *pending = pending.saturating_sub(1));
        self.touched.extend(outbox.refused.drain());
    }

    fn receive(&mut self, slot: usize, mut buffer: Vec<u8>) -> Result<(), Failure> {
        buffer.resize(FRAME_BYTES, 0);
        self.receives[slot] = buffer;
        self.started.push_back(slot);
        // SAFETY: as in `send_waiting`.
        unsafe { self.wire.recv(slot, &mut self.receives[slot], MessageTag::Frames) }
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
