//! An outgoing connection to the process of another rank, established without blocking. This side is the handshake's
//! client.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::net::TcpStream;

use super::TcpOptions;
use super::congestion::CongestionControl;
use super::send_queue::OutboundConnection;
use crate::world::rendezvous::JobKey;
use crate::world::rendezvous::frame::Sealer;
use crate::world::rendezvous::frame_tag::TagOptions;
use crate::world::rendezvous::handshake::{ChallengeResponse, GREETING_BYTES, PROOF_BYTES, REFUSAL};
use crate::world::{fork, socket};

/// Time limit of one attempt.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(5);

/// An outbound connection during its handshake.
pub(super) struct Dial {
    /// Declared first, so that it is dropped first.
    guard: fork::Guard,
    stream: TcpStream,
    pub(super) rank: usize,
    /// When the first attempt for this rank began.
    pub(super) since: Instant,
    /// When this attempt is abandoned.
    pub(super) deadline: Instant,
    stage: DialStage,
    /// Bytes of the handshake that are being received.
    bytes: Vec<u8>,
}

enum DialStage {
    Connecting,
    Greeting,
    Proof(ChallengeResponse),
}

impl Dial {
    /// Starts the connection.
    pub(super) fn start(
        rank: usize,
        address: SocketAddr,
        since: Instant,
        congestion_control: &CongestionControl,
    ) -> Result<Self> {
        let stream = congestion_control.connect(address)?;
        let guard = fork::Guard::new(&stream);
        let deadline = Instant::now() + ATTEMPT_TIMEOUT;
        Ok(Self { guard, stream, rank, since, deadline, stage: DialStage::Connecting, bytes: Vec::new() })
    }

    pub(super) fn stream(&mut self) -> &mut TcpStream {
        &mut self.stream
    }

    /// Continues the handshake without blocking; returns true once [`Dial::finish`] may be called.
    pub(super) fn advance(&mut self, key: &JobKey, options: &TcpOptions) -> Result<bool> {
        if matches!(self.stage, DialStage::Connecting) {
            if let Some(error) = self.stream.take_error()? {
                return Err(error);
            }
            match self.stream.peer_addr() {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::NotConnected => return Ok(false),
                Err(error) => return Err(error),
            }
            socket::configure(&self.stream, options.peer_timeout).map_err(Error::other)?;
            self.stage = DialStage::Greeting;
        }
        if matches!(self.stage, DialStage::Greeting) {
            if !self.read(GREETING_BYTES)? {
                return Ok(false);
            }
            let greeting = self.bytes.as_slice().try_into().expect("that many bytes were read");
            let answer = ChallengeResponse::new(greeting).map_err(Error::other)?.ok_or_else(not_a_peer)?;
            // The send buffer of a new connection has space for this.
            self.stream.write_all(&answer.bytes(key))?;
            self.bytes.clear();
            self.stage = DialStage::Proof(answer);
        }
        let is_complete = self.read(PROOF_BYTES)?;
        if is_complete {
            options.congestion_control.adapt(&self.stream);
        }
        Ok(is_complete)
    }

    /// Returns the connection, if the other side has proved that it knows the secret.
    pub(super) fn finish(self, key: &JobKey, tags: TagOptions) -> Result<OutboundConnection> {
        let proof: &[u8; PROOF_BYTES] = self.bytes.as_slice().try_into().map_err(|_| not_a_peer())?;
        let DialStage::Proof(answer) = &self.stage else { return Err(not_a_peer()) };
        let keys = answer.verify(key, proof).ok_or_else(|| match *proof == REFUSAL {
            true => Error::new(ErrorKind::PermissionDenied, "it does not accept this job's secret"),
            false => not_a_peer(),
        })?;
        Ok(OutboundConnection { _guard: self.guard, stream: self.stream, sealer: Sealer::new(keys.send, tags) })
    }

    /// Reads until `bytes` bytes are there; returns whether they are.
    fn read(&mut self, bytes: usize) -> Result<bool> {
        let mut piece = [0; GREETING_BYTES];
        while self.bytes.len() < bytes {
            match self.stream.read(&mut piece[..bytes - self.bytes.len()]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.bytes.extend_from_slice(&piece[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

fn not_a_peer() -> Error {
    Error::new(ErrorKind::InvalidData, "it belongs to another job")
}
