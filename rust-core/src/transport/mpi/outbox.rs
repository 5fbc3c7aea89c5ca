//! What waits for MPI, and the keys of transfers without copies (transport/zero_copy.rs).

use std::collections::{HashMap, HashSet, VecDeque};

use super::service::MAX_SEND_SLOTS;
use crate::transport::ports::PortKey;
use crate::transport::zero_copy::ZeroCopyTransfer;

/// Keys are tags in MPI, which permits numbers up to 32767 everywhere.
const NUM_KEYS: u16 = 32_000;
/// Largest number of receives without copies in progress. Their slots are those of sends.
const MAX_OPEN_RECEIVES: usize = MAX_SEND_SLOTS / 4;

pub(super) enum QueuedMessage {
    /// A frame for a process.
    Frame(usize, Vec<u8>),
    /// A transfer, and its key.
    Receive(ZeroCopyTransfer, u16),
    Send(ZeroCopyTransfer, u16),
}

#[derive(Default)]
pub(super) struct Outbox {
    pub(super) queue: VecDeque<QueuedMessage>,
    /// By rank: frames that are queued or in flight.
    pub(super) pending: HashMap<usize, usize>,
    /// The keys of receives without copies that are queued or in progress, and the number of such sends.
    open_keys: HashSet<u16>,
    open_sends: usize,
    last_key: u16,
    /// Ports whose frame was refused because the queue was full.
    pub(super) refused: HashSet<PortKey>,
    /// Whether MPI is to be finalised.
    pub(super) finish: bool,
}

impl Outbox {
    /// Whether MPI has completed everything that this process sends.
    pub(super) fn is_sent(&self) -> bool {
        self.open_sends == 0 && self.pending.values().all(|pending| *pending == 0)
    }

    /// Queues a receive. Returns its key, or none if there are too many.
    pub(super) fn queue_receive(&mut self, transfer: ZeroCopyTransfer) -> Option<u16> {
        if self.open_keys.len() >= MAX_OPEN_RECEIVES {
            return None;
        }
        loop {
            self.last_key = self.last_key % NUM_KEYS + 1;
            if self.open_keys.insert(self.last_key) {
                break;
            }
        }
        self.queue.push_back(QueuedMessage::Receive(transfer, self.last_key));
        Some(self.last_key)
    }

    /// Queues a send under a key of its receiver. Returns false if there is no such key.
    pub(super) fn queue_send(&mut self, transfer: ZeroCopyTransfer, key: u64) -> bool {
        let Ok(key @ 1..=NUM_KEYS) = u16::try_from(key) else { return false };
        self.open_sends += 1;
        self.queue.push_back(QueuedMessage::Send(transfer, key));
        true
    }

    /// Answers a key that was sent to a closed port, with an empty message (ZCP-2).
    pub(super) fn answer(&mut self, process: usize, key: u64) {
        // No port has this key.
        let nobody = (0, usize::MAX);
        self.queue_send(
            ZeroCopyTransfer { port: nobody, message: 0, process, data: std::ptr::null_mut(), bytes: 0 },
            key,
        );
    }

    pub(super) fn end_receive(&mut self, key: u16) {
        self.open_keys.remove(&key);
    }

    pub(super) fn end_send(&mut self) {
        self.open_sends -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transfer() -> ZeroCopyTransfer {
        ZeroCopyTransfer { port: (1, 0), message: 1, process: 0, data: std::ptr::null_mut(), bytes: 0 }
    }

    #[test]
    fn a_key_in_use_is_not_given_again() {
        let mut outbox = Outbox::default();
        let kept = outbox.queue_receive(transfer()).expect("there are none yet");
        for _ in 0..2 * NUM_KEYS {
            let key = outbox.queue_receive(transfer()).expect("there are two");
            assert!(key != kept && (1..=NUM_KEYS).contains(&key));
            outbox.end_receive(key);
        }
        let others = (0..).map_while(|_| outbox.queue_receive(transfer())).count();
        assert_eq!(others, MAX_OPEN_RECEIVES - 1);
    }

    #[test]
    fn only_keys_that_receivers_give_are_answered() {
        let mut outbox = Outbox::default();
        for key in [0, u64::from(NUM_KEYS) + 1, u64::MAX] {
            assert!(!outbox.queue_send(transfer(), key));
        }
        assert!(outbox.is_sent());
        outbox.answer(3, 7);
        assert!(
            !outbox.is_sent()
                && matches!(outbox.queue.front(), Some(QueuedMessage::Send(ZeroCopyTransfer { bytes: 0, .. }, 7)))
        );
        outbox.end_send();
        assert!(outbox.is_sent());
    }
}
