//! A counter in shared memory on which processes can sleep.
//!
//! Note "no lost wake". A waker (1) changes the counter, then (2) reads the number of sleepers, and calls the kernel
//! only if there are any. A sleeper (a) increments the number of sleepers, then (b) calls the kernel, which compares
//! the counter with the value that the sleeper saw, and sleeps if they are equal. All four are sequentially
//! consistent (the kernel compares under the futex's lock, behind a full barrier). If (2) did not see (a), then (1)
//! came before (b), so the comparison fails and the sleeper returns. A process that is killed between incrementing
//! and decrementing leaves the number too high, which only costs unnecessary kernel calls.

use std::time::Duration;

use crate::sync::{AtomicU32, Ordering, between_sequential_accesses, futex_wait, futex_wake_all};

/// A view of the two words, which are in a shared segment.
#[derive(Clone, Copy)]
pub(crate) struct FutexEvent<'a> {
    pub(crate) counter: &'a AtomicU32,
    pub(crate) sleepers: &'a AtomicU32,
}

impl FutexEvent<'_> {
    /// The counter; writes that preceded this value are visible.
    pub(crate) fn value(&self) -> u32 {
        self.counter.load(Ordering::Acquire)
    }

    /// Increments the counter and returns the new value. Does not wake sleepers; see [`FutexEvent::wake`].
    pub(crate) fn add(&self) -> u32 {
        self.counter.fetch_add(1, Ordering::SeqCst).wrapping_add(1)
    }

    /// Wakes all processes that sleep on an older value.
    pub(crate) fn wake(&self) {
        between_sequential_accesses();
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            futex_wake_all(self.counter);
        }
    }

    /// Sleeps while the counter is `seen`, until a wake or for at most `limit`; may return early.
    pub(crate) fn sleep(&self, seen: u32, limit: Duration) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        between_sequential_accesses();
        futex_wait(self.counter, seen, limit);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}
