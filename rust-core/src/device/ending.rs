//! The end of the process. The driver and NCCL end in `exit`, while threads of the core may be about to call them, to free
//! what a group had for example, and would crash.
//!
//! - DEV-5: whoever calls the driver or NCCL is in a [`Visit`] meanwhile; [`Context::enter`](super::Context::enter) begins
//!   one. None begins once the process ends: what is not freed then ends with the process.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// How long [`begin`] waits for visits: some call may wait for a member that is gone.
const LIMIT: Duration = Duration::from_secs(2);
const NAP: Duration = Duration::from_millis(1);

static GATE: Gate = Gate { ending: AtomicBool::new(false), visits: AtomicUsize::new(0) };

struct Gate {
    ending: AtomicBool,
    visits: AtomicUsize,
}

/// While it lives, the process does not end.
#[must_use = "the visit lasts while this lives"]
#[derive(Debug)]
pub(crate) struct Visit(&'static AtomicUsize);

impl Drop for Visit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Gate {
    fn visit(&'static self) -> Result<Visit> {
        // Counted before it looks, so that either this sees the end or the end sees this.
        self.visits.fetch_add(1, Ordering::SeqCst);
        let visit = Visit(&self.visits);
        if self.ending.load(Ordering::SeqCst) {
            return Err(Error::Closed { reason: "the process ends".into() });
        }
        Ok(visit)
    }

    /// Whether all visits were over in time.
    fn close(&self, limit: Duration) -> bool {
        self.ending.store(true, Ordering::SeqCst);
        let start = Instant::now();
        while self.visits.load(Ordering::SeqCst) > 0 {
            if start.elapsed() >= limit {
                return false;
            }
            std::thread::sleep(NAP);
        }
        true
    }
}

/// Begins a visit; one inside another is as good.
///
/// # Errors
/// [`Error::Closed`] when the process ends.
pub(crate) fn visit() -> Result<Visit> {
    GATE.visit()
}

/// Lets no further visit begin, and waits for those that did.
pub(crate) fn begin() {
    if !GATE.close(LIMIT) {
        tracing::debug!("the process ends while a call of CUDA is under way");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_waits_for_visits_and_lets_no_other_begin() {
        let gate: &Gate = Box::leak(Box::new(Gate { ending: AtomicBool::new(false), visits: AtomicUsize::new(0) }));
        let (outer, inner) = (gate.visit().unwrap(), gate.visit().unwrap());
        drop(inner);
        assert!(!gate.close(Duration::ZERO));
        assert!(gate.visit().is_err());
        let visitor = std::thread::spawn(move || {
            std::thread::sleep(5 * NAP);
            drop(outer);
        });
        assert!(gate.close(Duration::from_secs(60)));
        visitor.join().unwrap();
    }
}
