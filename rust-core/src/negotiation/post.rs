//! Messages between neighbours in the tree, over the group's transport. A message has a head of fixed size, which
//! contains all of it in the steady state; the rest of a longer message follows separately.

use std::sync::Arc;

use super::message::NegotiationMessage;
use super::tree::Tree;
use crate::error::{Error, Result};
use crate::transport::{self, Tag, Transport};

/// Tags from here on; those of collectives and of point-to-point messages are smaller.
const TAG_NEGOTIATION: Tag = 5 << 40;
/// Size of the head: enough for the bits of some 1,500 cached names.
const HEAD_BYTES: usize = 256;
/// Bytes of the length before the message.
const LENGTH_BYTES: usize = 4;
/// A larger length is an error: the descriptions of all names of a large model take a hundredth of it.
const MAX_BYTES: usize = 256 << 20;

/// Sends and receives negotiation messages between a member and its neighbours in the tree.
pub(super) struct Post {
    transport: Arc<dyn Transport>,
    neighbours: Vec<Incoming>,
    outgoing: Vec<QueuedPost>,
}

/// The receive of a neighbour's next message.
struct Incoming {
    from: usize,
    /// Head and rest; the memory does not move until `in_flight` has ended.
    bytes: Vec<u8>,
    in_flight: transport::Message,
}

struct QueuedPost {
    in_flight: transport::Message,
    _bytes: Arc<[u8]>,
}

impl Post {
    pub(super) fn new(transport: Arc<dyn Transport>, tree: &Tree) -> Self {
        let from = tree.parent.into_iter().chain(tree.children.iter().map(|child| child.start));
        let neighbours = from.map(|from| Incoming::new(&*transport, from)).collect();
        Self { transport, neighbours, outgoing: Vec::new() }
    }

    /// Starts sending `message` to each of these members.
    ///
    /// # Errors
    /// [`Error::Internal`] if it cannot be serialized.
    pub(super) fn send(&mut self, to: impl Iterator<Item = usize>, message: &NegotiationMessage) -> Result<()> {
        let mut bytes = vec![0; LENGTH_BYTES];
        bytes = postcard::to_extend(message, bytes)
            .map_err(|error| Error::Internal(format!("a message of the negotiation cannot be serialized: {error}")))?;
        let length = (bytes.len() - LENGTH_BYTES) as u32;
        bytes[..LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
        bytes.resize(bytes.len().max(HEAD_BYTES), 0);
        let bytes: Arc<[u8]> = bytes.into();
        for to in to {
            for part in [&bytes[..HEAD_BYTES], &bytes[HEAD_BYTES..]].into_iter().filter(|part| !part.is_empty()) {
                // SAFETY: the bytes live, unchanged, until the message has ended, which `retire` and `drop` ensure.
                let in_flight = unsafe { self.transport.post_send(to, TAG_NEGOTIATION, part.as_ptr(), part.len()) };
                self.outgoing.push(QueuedPost { in_flight, _bytes: bytes.clone() });
            }
        }
        Ok(())
    }

    /// Returns the next message that has arrived.
    ///
    /// # Errors
    /// The transport's, or [`Error::Internal`] for an invalid message.
    pub(super) fn receive(&mut self) -> Result<Option<(usize, NegotiationMessage)>> {
        for neighbour in &mut self.neighbours {
            if let Some(message) = neighbour.take(&*self.transport)? {
                return Ok(Some((neighbour.from, message)));
            }
        }
        Ok(None)
    }

    /// Frees the memory of messages that have been sent; returns whether all have been.
    ///
    /// # Errors
    /// The transport's.
    pub(super) fn retire(&mut self) -> Result<bool> {
        let mut failure = Ok(());
        self.outgoing.retain(|outgoing| match outgoing.in_flight.poll() {
            None => true,
            Some(Ok(_)) => false,
            Some(Err(error)) => {
                failure = Err(error);
                false
            }
        });
        failure.map(|()| self.outgoing.is_empty())
    }
}

impl Drop for Post {
    fn drop(&mut self) {
        self.neighbours.iter().for_each(|neighbour| self.transport.cancel(&neighbour.in_flight));
        self.outgoing.iter().for_each(|outgoing| self.transport.cancel(&outgoing.in_flight));
    }
}

impl Incoming {
    fn new(transport: &dyn Transport, from: usize) -> Self {
        let mut bytes = vec![0; HEAD_BYTES];
        let in_flight = post_receive(transport, from, &mut bytes);
        Self { from, bytes, in_flight }
    }

    fn take(&mut self, transport: &dyn Transport) -> Result<Option<NegotiationMessage>> {
        loop {
            match self.in_flight.poll() {
                None => return Ok(None),
                Some(result) => result?,
            };
            let length = self.bytes.first_chunk::<LENGTH_BYTES>().expect("a head is longer");
            let end = LENGTH_BYTES + u32::from_le_bytes(*length) as usize;
            if end > self.bytes.len() {
                if end > MAX_BYTES {
                    return Err(self.unreadable(&format!("it has {end} bytes")));
                }
                self.bytes.resize(end, 0);
                self.in_flight = post_receive(transport, self.from, &mut self.bytes[HEAD_BYTES..]);
                continue;
            }
            let message = postcard::from_bytes(&self.bytes[LENGTH_BYTES..end]);
            let message = message.map_err(|error| self.unreadable(&error.to_string()))?;
            self.bytes.truncate(HEAD_BYTES);
            self.bytes.shrink_to(1 << 16);
            self.in_flight = post_receive(transport, self.from, &mut self.bytes);
            return Ok(Some(message));
        }
    }

    fn unreadable(&self, why: &str) -> Error {
        Error::Internal(format!("member {} sent a message that cannot be read: {why}", self.from))
    }
}

fn post_receive(transport: &dyn Transport, from: usize, bytes: &mut [u8]) -> transport::Message {
    // SAFETY: the bytes are on the heap and are not accessed before the message has ended, which `Post` waits for or
    // causes by cancelling it.
    unsafe { transport.post_recv(Some(from), TAG_NEGOTIATION, bytes.as_mut_ptr(), bytes.len()) }
}
