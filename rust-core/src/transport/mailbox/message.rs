//! A message in flight, and its result.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::error::Result;
use crate::transport::Members;

#[derive(Debug)]
struct MessageState {
    /// The other member; `None` for a receive from any member.
    partner: Option<usize>,
    id: u64,
    result: OnceLock<Result<usize>>,
    /// Length of a message that was received.
    received: AtomicUsize,
}

/// A message in flight, from [`Transport::post_send`](crate::transport::Transport::post_send) or
/// [`Transport::post_recv`](crate::transport::Transport::post_recv).
#[derive(Clone, Debug)]
pub struct Message(Arc<MessageState>);

impl Message {
    pub(super) fn new(partner: Option<usize>, id: u64) -> Self {
        Self(Arc::new(MessageState { partner, id, result: OnceLock::new(), received: AtomicUsize::new(0) }))
    }

    /// Its number in the mailbox.
    pub(super) fn id(&self) -> u64 {
        self.0.id
    }

    /// The result, once it is known: the other member, or the error.
    pub fn poll(&self) -> Option<Result<usize>> {
        self.0.result.get().cloned()
    }

    /// The length of the message that a receive has taken, once [`Message::poll`] has returned its result.
    pub(crate) fn received_bytes(&self) -> usize {
        self.0.received.load(Ordering::Relaxed)
    }

    /// Global ranks whose messages may complete this one.
    pub(crate) fn partners(&self, members: &Members) -> Vec<usize> {
        match self.0.partner {
            Some(partner) => vec![members.ranks[partner]],
            None => (0..members.size()).filter(|rank| *rank != members.me).map(|rank| members.ranks[rank]).collect(),
        }
    }

    /// Completes a receive of `bytes` bytes from member `from`.
    pub(super) fn complete_receive(&self, from: usize, bytes: usize) {
        self.0.received.store(bytes, Ordering::Relaxed);
        self.complete(Ok(from));
    }

    pub(super) fn complete(&self, result: Result<usize>) {
        // A second result can only come from a forged frame and is ignored.
        let _ = self.0.result.set(result);
    }
}
