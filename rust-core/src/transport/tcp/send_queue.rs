//! The send queue to one process: frames that leave, and the connection that carries them.
//!
//! Whoever sends writes to the connection himself as long as the system takes all; what it does not take, the thread writes
//! when there is room again.

use std::collections::{HashSet, VecDeque};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::fd::AsRawFd;

use mio::net::TcpStream;

use crate::transport::ports::{Pool, PortKey};
use crate::world::fork;
use crate::world::rendezvous::frame::{HEADER_BYTES, Sealer};

/// Frames that may wait.
pub(super) const FRAMES: usize = 8;

/// An open connection, in the direction away from here.
pub(super) struct OutboundConnection {
    /// Dropped first.
    pub(super) _guard: fork::Guard,
    pub(super) stream: TcpStream,
    pub(super) sealer: Sealer,
}

#[derive(Default)]
enum SendStage {
    /// Nothing was ever sent.
    #[default]
    Unused,
    /// The connection is being made.
    Sought,
    /// If frames wait, then because the system took no more.
    Open(OutboundConnection),
    /// For good; frames are dropped.
    Lost,
}

/// See the module's text.
#[derive(Default)]
pub(super) struct SendQueue {
    stage: SendStage,
    /// Each with room for its header before it.
    frames: VecDeque<Vec<u8>>,
    /// Of the first frame: whether its header is there, and how much of it is written.
    sealed: bool,
    written: usize,
    /// Ports whose frame found no room.
    refused: HashSet<PortKey>,
}

/// What became of a frame.
pub(super) enum Sent {
    Taken,
    /// It was not taken.
    Full,
    /// It waits for a connection that somebody must make.
    First,
    /// Its connection broke.
    Lost(Error),
}

impl SendQueue {
    /// Takes a frame that `write` writes.
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

    /// Frames may leave on `line`, `first` before all others.
    pub(super) fn open(&mut self, line: OutboundConnection, first: Vec<u8>, buffers: &Pool) -> Result<()> {
        self.stage = SendStage::Open(line);
        self.frames.push_front(first);
        self.write(buffers)
    }

    /// Gives the system what it takes.
    pub(super) fn write(&mut self, buffers: &Pool) -> Result<()> {
        let SendStage::Open(line) = &mut self.stage else { return Ok(()) };
        while let Some(frame) = self.frames.front_mut() {
            if !self.sealed {
                let (header, payload) = frame.split_at_mut(HEADER_BYTES);
                header.copy_from_slice(&line.sealer.header(payload));
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

    /// The other end says nothing on this connection: what can be read from it is its end.
    pub(super) fn look_for_end(&mut self) -> Result<()> {
        let SendStage::Open(line) = &mut self.stage else { return Ok(()) };
        match line.stream.read(&mut [0; 16]) {
            Ok(0) => Err(Error::new(ErrorKind::UnexpectedEof, "the other process ended it")),
            Ok(_) => Err(Error::new(ErrorKind::InvalidData, "the other process broke the protocol")),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Ports for whose frames there is room again.
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

    /// Drops what waits and, from now on, what is sent.
    pub(super) fn lose(&mut self) -> Option<OutboundConnection> {
        self.frames.clear();
        match std::mem::replace(&mut self.stage, SendStage::Lost) {
            SendStage::Open(line) => Some(line),
            _ => None,
        }
    }

    /// Whether something that was sent has not reached the other host.
    pub(super) fn is_sending(&self) -> bool {
        let SendStage::Open(line) = &self.stage else { return !self.frames.is_empty() };
        let mut unacknowledged: libc::c_int = 0;
        // SAFETY: the descriptor is open, and this request writes one int.
        let answer = unsafe { libc::ioctl(line.stream.as_raw_fd(), libc::TIOCOUTQ, &mut unacknowledged) };
        !self.frames.is_empty() || (answer == 0 && unacknowledged > 0)
    }
}
