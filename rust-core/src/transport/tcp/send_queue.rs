//! The queue of frames to one process, and the connection that carries them.
//!
//! A sender writes to the connection directly as long as the system accepts all bytes. The thread writes the rest when
//! the connection has room again.

use std::collections::{HashSet, VecDeque};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::fd::AsRawFd;

use mio::net::TcpStream;

use crate::transport::ports::{Pool, PortKey};
use crate::world::fork;
use crate::world::rendezvous::frame::{HEAD_BYTES, HEADER_BYTES, Sealer};

/// The number of frames that may wait.
pub(super) const FRAMES: usize = 8;

/// An open connection on which this process only sends.
pub(super) struct OutboundConnection {
    /// Declared first, so that it is dropped first.
    pub(super) _guard: fork::Guard,
    pub(super) stream: TcpStream,
    pub(super) sealer: Sealer,
}

#[derive(Default)]
enum SendStage {
    /// No frame was ever sent.
    #[default]
    Unused,
    /// The connection is being established.
    Sought,
    /// Established. If frames wait, the system has accepted no more bytes.
    Open(OutboundConnection),
    /// Lost for good; frames are dropped.
    Lost,
}

/// Frames that wait to be sent to one process, and the connection to it.
#[derive(Default)]
pub(super) struct SendQueue {
    stage: SendStage,
    /// Waiting frames, each with room for its header in front.
    frames: VecDeque<Vec<u8>>,
    /// State of the first frame: whether its header is filled in, and how many bytes are written.
    sealed: bool,
    written: usize,
    /// Ports whose frame was refused because the queue was full.
    refused: HashSet<PortKey>,
}

/// The result of [`SendQueue::send`].
pub(super) enum Sent {
    Taken,
    /// The queue is full, and the frame was refused.
    Full,
    /// The frame waits, and the caller must have a connection established.
    First,
    /// The connection broke.
    Lost(Error),
}

impl SendQueue {
    /// Queues a frame whose bytes `write` appends, and sends what the system accepts.
    pub(super) fn send(&mut self, from: PortKey, buffers: &Pool, write: impl FnOnce(&mut Vec<u8>)) -> Sent {
        if matches!(self.stage, SendStage::Lost) {
            return Sent::Taken;
        }
        if self.frames.len() >= FRAMES {
            self.refused.insert(from);
            return Sent::Full;
        }
        let mut buffer = buffers.take();
        buffer.clear();
        write(&mut buffer);
        self.frames.push_back(buffer);
        match self.stage {
            SendStage::Unused => {
                self.stage = SendStage::Sought;
                Sent::First
            }
            SendStage::Open(_) if self.frames.len() == 1 => match self.write(buffers) {
                Ok(()) => Sent::Taken,
                Err(error) => Sent::Lost(error),
            },
            SendStage::Open(_) | SendStage::Sought | SendStage::Lost => Sent::Taken,
        }
    }

    /// Sets the established connection and sends `first`, then the waiting frames.
    pub(super) fn open(&mut self, line: OutboundConnection, first: Vec<u8>, buffers: &Pool) -> Result<()> {
        self.stage = SendStage::Open(line);
        self.frames.push_front(first);
        self.write(buffers)
    }

    /// Writes waiting frames until the system accepts no more.
    pub(super) fn write(&mut self, buffers: &Pool) -> Result<()> {
        let SendStage::Open(line) = &mut self.stage else { return Ok(()) };
        while let Some(frame) = self.frames.front_mut() {
            if !self.sealed {
                let (header, payload) = frame.split_at_mut(HEADER_BYTES);
                let (head, body) = payload.split_at(payload.len().min(HEAD_BYTES));
                header.copy_from_slice(&line.sealer.header(head, body));
                self.sealed = true;
            }
            match line.stream.write(&frame[self.written..]) {
                Ok(count) => self.written += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if self.written == frame.len() {
                buffers.put(self.frames.pop_front().expect("it was at the front"));
                (self.sealed, self.written) = (false, 0);
            }
        }
        Ok(())
    }

    /// Reads from the connection. The other end sends nothing on it, so anything but "would block" is the connection's
    /// end.
    pub(super) fn look_for_end(&mut self) -> Result<()> {
        let SendStage::Open(line) = &mut self.stage else { return Ok(()) };
        match line.stream.read(&mut [0; 16]) {
            Ok(0) => Err(Error::new(ErrorKind::UnexpectedEof, "the other process ended it")),
            Ok(_) => Err(Error::new(ErrorKind::InvalidData, "the other process broke the protocol")),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Returns the refused ports once there is room again.
    pub(super) fn admitted(&mut self) -> HashSet<PortKey> {
        match self.frames.len() < FRAMES {
            true => std::mem::take(&mut self.refused),
            false => HashSet::new(),
        }
    }

    /// Whether the connection is lost.
    pub(super) fn is_lost(&self) -> bool {
        matches!(self.stage, SendStage::Lost)
    }

    /// Drops the connection and the waiting frames; later frames are dropped, too.
    pub(super) fn lose(&mut self) -> Option<OutboundConnection> {
        self.frames.clear();
        match std::mem::replace(&mut self.stage, SendStage::Lost) {
            SendStage::Open(line) => Some(line),
            _ => None,
        }
    }

    /// Whether bytes have not yet been acknowledged by the other host.
    pub(super) fn is_sending(&self) -> bool {
        let SendStage::Open(line) = &self.stage else { return !self.frames.is_empty() };
        let mut unacknowledged: libc::c_int = 0;
        // SAFETY: the descriptor is open, and this request writes one int.
        let answer = unsafe { libc::ioctl(line.stream.as_raw_fd(), libc::TIOCOUTQ, &mut unacknowledged) };
        !self.frames.is_empty() || (answer == 0 && unacknowledged > 0)
    }
}
