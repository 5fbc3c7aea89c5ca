//! The end of the process. The driver and NCCL shut down in `exit`. A thread of the core that calls them afterwards,
//! to free a group's memory for example, would crash.
//!
//! - DEV-5: a thread holds a [`DriverCallGuard`] during each call of the driver or NCCL;
//!   [`Context::enter`](super::Context::enter) takes one. No guard is given once the process ends; memory that is not
//!   freed then is freed by the system.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// How long [`begin`] waits for running calls. One of them may be waiting for a departed member, or freeing a
/// communicator, which takes up to 2 s.
const LIMIT: Duration = Duration::from_secs(4);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

static GATE: Gate = Gate { ending: AtomicBool::new(false), calls: AtomicUsize::new(0) };

/// Counts the running calls, and refuses new ones once the process ends.
struct Gate {
    ending: AtomicBool,
    calls: AtomicUsize,
}

/// A running call of the driver or NCCL. The process waits for it before it shuts down.
#[must_use = "the call counts as running while the guard lives"]
#[derive(Debug)]
pub(crate) struct DriverCallGuard(&'static AtomicUsize);

impl Drop for DriverCallGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Gate {
    fn enter(&'static self) -> Result<DriverCallGuard> {
        // Counted before the flag is read, so that this thread sees the flag, or `begin` sees the count.
        self.calls.fetch_add(1, Ordering::SeqCst);
        let guard = DriverCallGuard(&self.calls);
        if self.ending.load(Ordering::SeqCst) {
            return Err(Error::Closed { reason: "the process ends".into() });
        }
        Ok(guard)
    }

    /// Returns whether all calls ended within the limit.
    fn close(&self, limit: Duration) -> bool {
        self.ending.store(true, Ordering::SeqCst);
        let start = Instant::now();
        while self.calls.load(Ordering::SeqCst) > 0 {
            if start.elapsed() >= limit {
                return false;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        true
    }
}

/// Takes a guard for a call of the driver or NCCL. Guards may nest.
///
/// # Errors
/// [`Error::Closed`] when the process ends.
pub(crate) fn enter_driver() -> Result<DriverCallGuard> {
    GATE.enter()
}

/// Refuses further calls of the driver and NCCL, and waits for those that run.
pub(crate) fn begin() {
    if !GATE.close(LIMIT) {
        tracing::debug!("the process ends while a call of CUDA is under way");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_waits_for_calls_and_lets_no_other_begin() {
        let gate: &Gate = Box::leak(Box::new(Gate { ending: AtomicBool::new(false), calls: AtomicUsize::new(0) }));
        let (outer, inner) = (gate.enter().unwrap(), gate.enter().unwrap());
        drop(inner);
        assert!(!gate.close(Duration::ZERO));
        assert!(gate.enter().is_err());
        let caller = std::thread::spawn(move || {
            std::thread::sleep(5 * POLL_INTERVAL);
            drop(outer);
        });
        assert!(gate.close(Duration::from_secs(60)));
        caller.join().unwrap();
    }
}
