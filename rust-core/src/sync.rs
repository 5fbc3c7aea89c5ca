//! The primitives of the lock-free code in shared memory: atomics and the futex. `loom/` compiles that code with
//! loom's primitives instead, and explores all thread interleavings.

use std::time::Duration;

use rustix::thread::futex;

pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Sleeps while `counter` is `seen`, until a wake or for at most `limit`; may return early.
pub(crate) fn futex_wait(counter: &AtomicU32, seen: u32, limit: Duration) {
    let limit = futex::Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
    // Not private, because the waker is another process. After any result (woken, value changed, timeout, signal) the
    // caller checks the counter again.
    let _ = futex::wait(counter, futex::Flags::empty(), seen, Some(&limit));
}

/// Wakes all threads that sleep on `counter`.
pub(crate) fn futex_wake_all(counter: &AtomicU32) {
    // Not private, as above. The only possible error is a bad address.
    let _ = futex::wake(counter, futex::Flags::empty(), i32::MAX as u32);
}

/// A fence between sequentially consistent accesses of different words. The memory model orders them already. loom
/// implements such accesses with acquire and release only, so it needs the fence.
#[inline(always)]
pub(crate) fn between_sequential_accesses() {}
