//! What the lock-free code of shared memory is made of: atomics and the futex. `loom/` compiles that code with loom's
//! instead, and tries every order in which threads can run it.

use std::time::Duration;

use rustix::thread::futex;

pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Sleeps while `counter` is `seen`, until a wake or for at most `limit`; may return early.
pub(crate) fn futex_wait(counter: &AtomicU32, seen: u32, limit: Duration) {
    let limit = futex::Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
    // Not private: the waker is another process. Every outcome (woken, value changed, timed out, signal) has the same
    // answer: the caller looks again.
    let _ = futex::wait(counter, futex::Flags::empty(), seen, Some(&limit));
}

/// Wakes all that sleep on `counter`.
pub(crate) fn futex_wake_all(counter: &AtomicU32) {
    // Not private, as above. The only possible error is a bad address.
    let _ = futex::wake(counter, futex::Flags::empty(), i32::MAX as u32);
}

/// Between two accesses of different words that are both sequentially consistent. The language orders them already; loom,
/// which gives such accesses no more than acquire and release, has a fence here.
#[inline(always)]
pub(crate) fn between_sequential_accesses() {}
