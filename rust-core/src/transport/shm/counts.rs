//! The counts of a ring with one producer and one consumer. Frame k lies in slot k % `SLOTS`.
//!
//! The release store of `head` orders a frame's bytes before the consumer's acquire load; the release store of `tail`
//! orders the consumer's reads before the producer reuses the slot.

use crate::sync::{AtomicU64, Ordering};

/// Both counts of a ring, in shared memory. Each side keeps its own count in private memory and only publishes it, so
/// a corrupt peer can corrupt frames but not this side's position (TRA-2).
#[derive(Clone, Copy)]
pub(crate) struct Counts<'a, const SLOTS: usize> {
    /// Frames written so far, by the producer.
    pub(crate) head: &'a AtomicU64,
    /// Frames read so far, by the consumer.
    pub(crate) tail: &'a AtomicU64,
}

impl<const SLOTS: usize> Counts<'_, SLOTS> {
    /// The producer's slot for frame number `written`, if the ring has room. The consumer does not touch it until
    /// [`Counts::publish`].
    pub(crate) fn free_slot(&self, written: u64) -> Option<usize> {
        let has_room = written.wrapping_sub(self.tail.load(Ordering::Acquire)) < SLOTS as u64;
        has_room.then_some(written as usize % SLOTS)
    }

    /// Publishes frame number `written`, which is in its slot.
    pub(crate) fn publish(&self, written: u64) {
        self.head.store(written.wrapping_add(1), Ordering::Release);
    }

    /// The consumer's slot of frame number `taken`, if the frame is there. The producer does not access it until
    /// [`Counts::release`].
    pub(crate) fn full_slot(&self, taken: u64) -> Option<usize> {
        (self.head.load(Ordering::Acquire) != taken).then_some(taken as usize % SLOTS)
    }

    /// Frees the slot of frame number `taken`, which has been read.
    pub(crate) fn release(&self, taken: u64) {
        self.tail.store(taken.wrapping_add(1), Ordering::Release);
    }
}
