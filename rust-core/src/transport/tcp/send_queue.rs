//! The queue of frames to one process, and the connection that carries them.
//!
//! A sender writes to the connection directly, from the memory where the payload lies, as long as the system accepts
//! all bytes. The rest of a frame that it accepts only in part is copied here, and the thread writes it when the
//! connection has room again. No other frame is taken before that.

use std::collections::{HashSet, VecDeque};
use std::io::{Error, ErrorKind, IoSlice, Read, Result, Write};
use std::os::fd::AsRawFd;

use mio::net::TcpStream;

use crate::transport::ports::{PREFIX_BYTES, PortKey};
use crate::world::fork;
use crate::world::rendezvous::frame::{HEAD_BYTES, Sealer};

/// The number of frames that may wait for the connection to be established.
pub(super) const FRAMES: usize = 8;

/// A frame's head is its prefix, so the payload of a port is authenticated where it lies.
const _: () = assert!(PREFIX_BYTES == HEAD_BYTES);

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
    /// Established. If bytes wait, the system has accepted no more.
    Open(OutboundConnection),
    /// Lost for good; frames are dropped.
    Lost,
}

/// Frames that wait to be sent to one process, and the connection to it.
#[derive(Default)]
pub(super) struct SendQueue {
    stage: SendStage,
    /// Payloads of frames that wait for the connection.
    frames: VecDeque<Vec<u8>>,
    /// The frame that the system has accepted in part, and how many of these bytes it has accepted.
    rest: Vec<u8>,
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
    /// Sends or queues the frame of `prefix` and `payload`.
    pub(super) fn send(&mut self, from: PortKey, prefix: &[u8; PREFIX_BYTES], payload: &[u8]) -> Sent {
        if matches!(self.stage, SendStage::Lost) {
            return Sent::Taken;
        }
        if !self.has_room() {
            self.refused.insert(from);
            return Sent::Full;
        }
        match self.stage {
            SendStage::Open(_) => match self.write_frame(prefix, payload) {
                Ok(()) => Sent::Taken,
                Err(error) => Sent::Lost(error),
            },
            SendStage::Unused | SendStage::Sought | SendStage::Lost => {
                self.frames.push_back([prefix, payload].concat());
                match std::mem::replace(&mut self.stage, SendStage::Sought) {
                    SendStage::Unused => Sent::First,
                    _ => Sent::Taken,
                }
            }
        }
    }

    /// Sets the established connection and sends `first`, then the waiting frames.
    pub(super) fn open(&mut self, line: OutboundConnection, first: Vec<u8>) -> Result<()> {
        self.stage = SendStage::Open(line);
        self.frames.push_front(first);
        self.write()
    }

    /// Writes waiting bytes until the system accepts no more.
    pub(super) fn write(&mut self) -> Result<()> {
        let SendStage::Open(line) = &mut self.stage else { return Ok(()) };
        self.written += write(&mut line.stream, &[&self.rest[self.written..]])?;
        if self.written < self.rest.len() {
            return Ok(());
        }
        self.rest.clear();
        self.written = 0;
        while self.rest.is_empty()
            && let Some(frame) = self.frames.pop_front()
        {
            let (head, body) = frame.split_at(frame.len().min(HEAD_BYTES));
            self.write_frame(head, body)?;
        }
        Ok(())
    }

    /// Writes a frame, and keeps what the system does not accept.
    fn write_frame(&mut self, head: &[u8], body: &[u8]) -> Result<()> {
        let SendStage::Open(line) = &mut self.stage else { return Ok(()) };
        let header = line.sealer.header(head, body);
        let parts = [&header, head, body];
        let mut written = write(&mut line.stream, &parts)?;
        for part in parts {
            let accepted = written.min(part.len());
            self.rest.extend_from_slice(&part[accepted..]);
            written -= accepted;
        }
        Ok(())
    }

    fn has_room(&self) -> bool {
        match self.stage {
            SendStage::Open(_) => self.rest.is_empty() && self.frames.is_empty(),
            SendStage::Unused | SendStage::Sought | SendStage::Lost => self.frames.len() < FRAMES,
        }
    }

    /// Reads from the connection. The other end sends nothing on it, so anything but "would block" is the connection's
    /// end.
    pub(super) fn poll_end(&mut self) -> Result<()> {
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
        match self.has_room() {
            true => std::mem::take(&mut self.refused),
            false => HashSet::new(),
        }
    }

    /// Whether the connection is lost.
    pub(super) fn is_lost(&self) -> bool {
        matches!(self.stage, SendStage::Lost)
    }

    /// Drops the connection and the waiting frames; later frames are dropped, too.
    pub(super) fn disconnect(&mut self) -> Option<OutboundConnection> {
        self.frames.clear();
        self.rest = Vec::new();
        self.written = 0;
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
        !self.has_room() || (answer == 0 && unacknowledged > 0)
    }
}

/// Writes the concatenated `parts` until the system accepts no more; returns how many bytes it has accepted.
fn write(stream: &mut TcpStream, parts: &[&[u8]]) -> Result<usize> {
    let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
    let (mut slices, mut written) = (&mut slices[..], 0);
    // Removes empty slices at the front.
    IoSlice::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        match stream.write_vectored(slices) {
            Ok(count) => {
                written += count;
                IoSlice::advance_slices(&mut slices, count);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(written)
}
