//! The list of ranks that are gone. Every wait in the core looks at it, so that nobody waits for the dead.
//!
//! - MON-1: a departure is never taken back, and the first one reported for a rank stands.
//! - MON-2: [`Monitor::generation`] changes with every departure, so a wait loop pays one atomic load.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result};

/// How a rank went away.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Departure {
    /// The process is gone without a goodbye: killed, crashed, or exited without `shutdown()`.
    Died {
        /// What is known about it, such as `killed by signal 9`; may be empty.
        detail: String,
    },
    /// It called `shutdown()`.
    Left,
    /// It reported an error of its own before it left.
    Failed {
        /// The error's text.
        message: String,
    },
}

impl std::fmt::Display for Departure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Departure::Died { detail } if detail.is_empty() => f.write_str("died"),
            Departure::Died { detail } => write!(f, "died ({detail})"),
            Departure::Left => f.write_str("left the job"),
            Departure::Failed { message } => write!(f, "failed ({message})"),
        }
    }
}

/// Departures seen so far; shared by the control plane, which writes it, and all waits, which read it.
#[derive(Debug)]
pub struct Monitor {
    me: usize,
    departed: Mutex<BTreeMap<usize, Departure>>,
    changed: Condvar,
    generation: AtomicU64,
    interrupted: AtomicBool,
}

impl Monitor {
    /// The monitor of global rank `me`.
    pub fn new(me: usize) -> Self {
        Self {
            me,
            departed: Mutex::default(),
            changed: Condvar::new(),
            generation: AtomicU64::new(0),
            interrupted: AtomicBool::new(false),
        }
    }

    /// The global rank that this monitor belongs to.
    pub fn me(&self) -> usize {
        self.me
    }

    /// Records a departure (MON-1) and wakes those who [`Monitor::wait_change`].
    pub fn report(&self, rank: usize, departure: Departure) {
        let mut departed = self.departed.lock();
        if departed.contains_key(&rank) {
            return;
        }
        departed.insert(rank, departure);
        self.generation.fetch_add(1, Ordering::Release);
        self.changed.notify_all();
    }

    /// Changes with every departure.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The first departed rank among `members` (global ranks) for which `missing` holds, as the error that a
    /// wait in `during` ends with.
    ///
    /// # Errors
    /// [`Error::PeerFailed`] if there is one.
    pub fn check(&self, members: &[usize], during: &str) -> Result<()> {
        if self.generation() == 0 {
            return Ok(());
        }
        let departed = self.departed.lock();
        // A death explains a departure that it caused, not the reverse: name the dead first.
        let culprit = members.iter().filter_map(|rank| departed.get(rank).map(|how| (*rank, how))).min_by_key(
            |(_, how)| match how {
                Departure::Died { .. } => 0,
                Departure::Failed { .. } => 1,
                Departure::Left => 2,
            },
        );
        match culprit {
            None => Ok(()),
            Some((rank, how)) => {
                Err(Error::PeerFailed { rank, how: how.to_string(), me: self.me, during: during.to_owned() })
            }
        }
    }

    /// What is known of `rank`, if it departed.
    pub fn departure(&self, rank: usize) -> Option<Departure> {
        self.departed.lock().get(&rank).cloned()
    }

    /// Blocks until the generation differs from `seen` or `timeout` has passed.
    pub fn wait_change(&self, seen: u64, timeout: std::time::Duration) {
        let mut departed = self.departed.lock();
        if self.generation() == seen {
            self.changed.wait_for(&mut departed, timeout);
        }
    }

    /// Asks every wait of this process to end with [`Error::Interrupted`] (Ctrl-C), or takes the request back.
    pub fn set_interrupted(&self, on: bool) {
        self.interrupted.store(on, Ordering::Release);
    }

    /// Whether an interruption is pending.
    pub fn interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_report_stands_and_the_dead_are_named_first() {
        let monitor = Monitor::new(0);
        monitor.report(1, Departure::Left);
        monitor.report(1, Departure::Died { detail: String::new() });
        monitor.report(2, Departure::Died { detail: "killed by signal 9".into() });
        assert_eq!(monitor.departure(1), Some(Departure::Left));
        assert!(monitor.check(&[0, 3], "barrier").is_ok());
        let error = monitor.check(&[0, 1, 2], "barrier").unwrap_err();
        assert_eq!(error.to_string(), "rank 2 died (killed by signal 9) while rank 0 was in barrier");
    }
}
