//! Frames between pairs of members, through rings in the segment: one producer, one consumer, fixed slots.
//!
//! [`super::counts`] defines which side owns a slot.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::SharedMemory;
use super::layout::{FRAME_BYTES, SLOT_BYTES};
use crate::bulk_copy;
use crate::transport::mailbox::{Header, Link};

/// The rings from and to this member.
pub(crate) struct Rings {
    memory: Arc<SharedMemory>,
    /// Number of frames written to, and read from, each member. Accessed only under the mailbox's lock; atomics make
    /// the type `Sync` without further proof.
    written: Vec<AtomicU64>,
    taken: Vec<AtomicU64>,
}

impl Rings {
    pub(crate) fn new(memory: Arc<SharedMemory>) -> Self {
        let zeros = |n| (0..n).map(|_| AtomicU64::new(0)).collect();
        let size = memory.size();
        Self { memory, written: zeros(size), taken: zeros(size) }
    }
}

impl Link for Rings {
    fn payload_bytes(&self, _peer: usize) -> usize {
        FRAME_BYTES
    }

    unsafe fn push(&self, to: usize, header: Header, payload: *const u8) -> bool {
        let (counts, slots) = self.memory.ring(self.memory.me(), to);
        let written = self.written[to].load(Ordering::Relaxed);
        let Some(slot) = counts.free_slot(written) else { return false };
        let length = header[4] as usize;
        assert!(length <= FRAME_BYTES, "a frame holds {FRAME_BYTES} bytes");
        // SAFETY: the slot index is below RING_SLOTS, so the slot lies inside the ring; the consumer does not touch
        // it until it is published. The caller promises `length` readable bytes.
        unsafe {
            let slot = slots.add(slot * SLOT_BYTES);
            slot.cast::<Header>().write(header);
            if length > 0 {
                bulk_copy::ordinary(payload, slot.add(64), length);
            }
        }
        self.written[to].store(written + 1, Ordering::Relaxed);
        counts.publish(written);
        self.memory.ring_doorbell(to);
        true
    }

    fn pop(&self, from: usize, take: &mut dyn FnMut(Header, *const u8)) -> bool {
        let (counts, slots) = self.memory.ring(from, self.memory.me());
        let taken = self.taken[from].load(Ordering::Relaxed);
        let Some(slot) = counts.full_slot(taken) else { return false };
        // SAFETY: as in `push`; the header is copied before it is checked, so concurrent changes are harmless.
        let (header, payload) = unsafe {
            let slot = slots.add(slot * SLOT_BYTES);
            (slot.cast::<Header>().read_volatile(), slot.add(64))
        };
        take(header, payload);
        self.taken[from].store(taken + 1, Ordering::Relaxed);
        counts.release(taken);
        // The producer may be waiting for space. It does not record that it waits, so its doorbell is always rung.
        self.memory.ring_doorbell(from);
        true
    }

    fn doorbell(&self) -> u32 {
        self.memory.doorbell(self.memory.me()).value()
    }

    fn wait_doorbell(&self, seen: u32, limit: Duration) {
        self.memory.doorbell(self.memory.me()).sleep(seen, limit);
    }

    fn ring_own(&self) {
        self.memory.ring_doorbell(self.memory.me());
    }
}
