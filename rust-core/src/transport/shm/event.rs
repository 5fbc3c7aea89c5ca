//! A counter in shared memory that processes may sleep on.
//!
//! Note "no lost wake". The one who changes the counter does (1) change counter, (2) read sleepers, and calls the
//! kernel only if there are any. The one who sleeps does (a) add itself to sleepers, (b) let the kernel compare the
//! counter with the value it saw, and sleep if they are equal. All four are sequentially consistent (the kernel's
//! comparison is made under the futex's lock, behind a full barrier). If (2) missed (a), then (1) came before (b),
//! so the comparison fails and nobody sleeps. A process killed between adding and subtracting leaves the count too
//! high for ever, which only costs needless calls of the kernel.

use std::time::Duration;

use crate::sync::{AtomicU32, Ordering, between_sequential_accesses, futex_wait, futex_wake_all};

/// A view of the two words; both live in a segment.
#[derive(Clone, Copy)]
pub(crate) struct FutexEvent<'a> {
    pub(crate) counter: &'a AtomicU32,
    pub(crate) sleepers: &'a AtomicU32,
}

impl FutexEvent<'_> {
    /// The counter, with everything that was written before it got this value.
    pub(crate) fn value(&self) -> u32 {
        self.counter.load(Ordering::Acquire)
    }

    /// Adds one and returns the new value. Does not wake; see [`FutexEvent::wake`].
    pub(crate) fn add(&self) -> u32 {
        self.counter.fetch_add(1, Ordering::SeqCst).wrapping_add(1)
    }

    /// Wakes all who sleep on an older value.
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
