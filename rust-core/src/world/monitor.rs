//! The list of ranks that have departed. Every wait in the core checks it, so that no rank waits for a dead one.
//!
//! - MON-1: a departure is never taken back, and the first one reported for a rank stands.
//! - MON-2: [`Monitor::generation`] changes with every departure, so a wait loop pays one atomic load.
//! - MON-3: departures are reported in the order in which the rendezvous learned of them, so the first one that is no
//!   orderly leave is the cause, and later ones may be its effects.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result};

/// How a rank departed.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Departure {
    /// The process ended without a message: it was killed, crashed, or exited without `shutdown()`.
    Died {
        /// Details, such as `killed by signal 9`; may be empty.
        detail: String,
    },
    /// The process called `shutdown()`.
    Left,
    /// The process reported an error of its own before it left.
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

/// How the host language interrupts waits. Both functions are called without locks of the core.
#[derive(Clone, Copy, Debug)]
pub struct InterruptHooks {
    /// Whether a signal asks the calling thread to end its wait. Asked by every wait of every thread, a few times a
    /// second.
    pub pending: fn() -> bool,
    /// Has the pending signal raised once control returns to the host language, for callers that cannot return its
    /// error. Returns false if that is not possible.
    pub raise_on_return: fn() -> bool,
}

static INTERRUPT_HOOKS: OnceLock<InterruptHooks> = OnceLock::new();

/// Sets the hooks of this process. Only the first ones count.
pub fn set_interrupt_hooks(hooks: InterruptHooks) {
    let _ = INTERRUPT_HOOKS.set(hooks);
}

thread_local! {
    static SIGNALS_WAIT: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`, on which other ranks depend: signals do not interrupt its waits on this thread. The next wait sees
/// them.
pub fn with_signals_waiting<T>(work: impl FnOnce() -> T) -> T {
    struct RestoreSignalsWait(bool);
    impl Drop for RestoreSignalsWait {
        fn drop(&mut self) {
            SIGNALS_WAIT.set(self.0);
        }
    }
    let _before = RestoreSignalsWait(SIGNALS_WAIT.replace(true));
    work()
}

/// See [`InterruptHooks::pending`].
pub fn interrupt_pending() -> bool {
    !SIGNALS_WAIT.get() && INTERRUPT_HOOKS.get().is_some_and(|hooks| (hooks.pending)())
}

/// See [`InterruptHooks::raise_on_return`].
pub fn raise_on_return() -> bool {
    INTERRUPT_HOOKS.get().is_some_and(|hooks| (hooks.raise_on_return)())
}

/// The departures so far. The control plane writes them, and all waits read them.
#[derive(Debug)]
pub struct Monitor {
    me: AtomicUsize,
    seen: Mutex<Departed>,
    changed: Condvar,
    generation: AtomicU64,
    interrupted: AtomicBool,
}

#[derive(Debug, Default)]
struct Departed {
    /// By rank: the number of earlier departures, how it departed, and when this was reported.
    departed: BTreeMap<usize, (usize, Departure, Instant)>,
    /// Why every wait has to end, and the rank whose departure is the cause, if one is.
    closed: Option<(String, Option<usize>)>,
}

impl Departed {
    /// The first rank that departed without `shutdown()`: its number, how many departed before it, and how it did.
    fn first_failure(&self) -> Option<(usize, usize, &Departure)> {
        let failed = self.departed.iter().filter(|(_, (_, how, _))| *how != Departure::Left);
        failed.min_by_key(|(_, (order, ..))| *order).map(|(rank, (order, how, _))| (*rank, *order, how))
    }

    /// Describes how `rank` departed. It may have ended because another rank had failed, with which this process shares
    /// no operation; then that rank is named too, unless the text of the rank's own error does so.
    fn describe(&self, rank: usize, how: &Departure) -> String {
        let order = self.departed.get(&rank).map(|(order, ..)| *order);
        match self.first_failure() {
            Some((first, earlier, cause))
                if first != rank
                    && order.is_some_and(|order| earlier < order)
                    && !matches!(how, Departure::Failed { message } if message.contains(&format!("rank {first} "))) =>
            {
                format!("{how} after rank {first} {cause}")
            }
            _ => how.to_string(),
        }
    }
}

impl Monitor {
    /// The monitor of global rank `me`.
    pub fn new(me: usize) -> Self {
        Self {
            me: AtomicUsize::new(me),
            seen: Mutex::default(),
            changed: Condvar::new(),
            generation: AtomicU64::new(0),
            interrupted: AtomicBool::new(false),
        }
    }

    /// The global rank that this monitor belongs to.
    pub fn me(&self) -> usize {
        self.me.load(Ordering::Relaxed)
    }

    /// Sets the rank of this process, if it was not known when the monitor was made.
    pub fn set_me(&self, rank: usize) {
        self.me.store(rank, Ordering::Relaxed);
    }

    /// Records a departure (MON-1) and wakes the callers of [`Monitor::wait_change`].
    pub fn report(&self, rank: usize, departure: Departure) {
        let mut seen = self.seen.lock();
        let order = seen.departed.len();
        if let Entry::Vacant(entry) = seen.departed.entry(rank) {
            entry.insert((order, departure, Instant::now()));
            self.generation.fetch_add(1, Ordering::Release);
            self.changed.notify_all();
        }
    }

    /// Ends every wait of this process with [`Error::Closed`], whichever rank it waits for: the session was shut down,
    /// or no connection is left that would report departures.
    pub fn close(&self, reason: &str) {
        self.close_by(reason, None);
    }

    /// Records the departure of a rank without which the session cannot continue, and ends every wait of this process
    /// with [`Error::PeerFailed`] about it, whichever rank it waits for.
    pub fn close_after(&self, rank: usize, departure: Departure, reason: &str) {
        self.report(rank, departure);
        self.close_by(reason, Some(rank));
    }

    fn close_by(&self, reason: &str, cause: Option<usize>) {
        let mut seen = self.seen.lock();
        seen.closed.get_or_insert_with(|| (reason.to_owned(), cause));
        self.generation.fetch_add(1, Ordering::Release);
        self.changed.notify_all();
    }

    /// Changes with every departure.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Fails if a wait for `members` (global ranks), during the operation `during`, can never end.
    ///
    /// # Errors
    /// [`Error::PeerFailed`] naming the member that departed first, and the rank that failed before it, if there is one
    /// (MON-3), or after [`Monitor::close_after`] the cause; [`Error::Closed`] after [`Monitor::close`].
    pub fn check(&self, members: &[usize], during: &str) -> Result<()> {
        if self.generation() == 0 {
            return Ok(());
        }
        let seen = self.seen.lock();
        let failed = |rank: usize, how: &Departure| {
            Err(Error::PeerFailed { rank, how: seen.describe(rank, how), me: self.me(), during: during.to_owned() })
        };
        let departed = members.iter().filter_map(|rank| Some((*rank, seen.departed.get(rank)?)));
        if let Some((rank, (_, how, _))) = departed.min_by_key(|(_, (order, how, _))| (*how == Departure::Left, *order))
        {
            return failed(rank, how);
        }
        let Some((reason, cause)) = &seen.closed else { return Ok(()) };
        match cause.and_then(|rank| Some((rank, seen.departed.get(&rank)?))) {
            Some((rank, (_, how, _))) => failed(rank, how),
            None => Err(Error::Closed { reason: reason.clone() }),
        }
    }

    /// Returns how `rank` departed, if it did.
    pub fn departure(&self, rank: usize) -> Option<Departure> {
        self.seen.lock().departed.get(&rank).map(|(_, how, _)| how.clone())
    }

    /// Returns the first rank that departed without `shutdown()`, and how: the cause of later departures (MON-3).
    pub fn first_failure(&self) -> Option<(usize, Departure)> {
        self.seen.lock().first_failure().map(|(rank, _, how)| (rank, how.clone()))
    }

    /// Adds the first failure to this rank's reason for an error that others will get, unless the reason names it. This
    /// rank may have an error because of it, and the others may share no operation with the rank that failed first.
    pub fn with_cause(&self, reason: &str) -> String {
        match self.seen.lock().first_failure() {
            Some((rank, _, cause)) if rank != self.me() && !reason.contains(&format!("rank {rank} ")) => {
                format!("{reason}, after rank {rank} {cause}")
            }
            _ => reason.to_owned(),
        }
    }

    /// Returns when the departure of `rank` was reported, if it was.
    pub fn departure_time(&self, rank: usize) -> Option<Instant> {
        self.seen.lock().departed.get(&rank).map(|(_, _, time)| *time)
    }

    /// Blocks until the generation differs from `seen` or `timeout` has passed.
    pub fn wait_change(&self, seen: u64, timeout: Duration) {
        let mut lock = self.seen.lock();
        if self.generation() == seen {
            self.changed.wait_for(&mut lock, timeout);
        }
    }

    /// Requests every wait of this process to end with [`Error::Interrupted`] (Ctrl-C), or withdraws the request.
    pub fn set_interrupted(&self, on: bool) {
        self.interrupted.store(on, Ordering::Release);
    }

    /// Whether an interruption is pending, for this process or for the calling thread (see [`InterruptHooks`]).
    pub fn interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Acquire) || interrupt_pending()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_wait_for_what_others_count_on() {
        thread_local! {
            static ASKED: Cell<bool> = const { Cell::new(false) };
        }
        set_interrupt_hooks(InterruptHooks { pending: || ASKED.get(), raise_on_return: || false });
        assert!(!interrupt_pending());
        ASKED.set(true);
        assert!(interrupt_pending());
        let inside = || (with_signals_waiting(interrupt_pending), interrupt_pending(), Monitor::new(0).interrupted());
        assert_eq!(with_signals_waiting(inside), (false, false, false));
        assert!(std::panic::catch_unwind(|| with_signals_waiting(|| panic!("as tests do"))).is_err());
        assert!(Monitor::new(0).interrupted());
    }

    #[test]
    fn the_first_failure_is_named() {
        let monitor = Monitor::new(0);
        monitor.report(1, Departure::Left);
        monitor.report(1, Departure::Died { detail: String::new() });
        assert_eq!(monitor.first_failure(), None);
        monitor.report(3, Departure::Died { detail: "killed by signal 9".into() });
        monitor.report(2, Departure::Failed { message: "rank 3 died".into() });
        assert_eq!(monitor.departure(1), Some(Departure::Left));
        assert_eq!(monitor.first_failure().map(|(rank, _)| rank), Some(3));
        assert!(monitor.check(&[0, 4], "barrier").is_ok());
        let text = |members: &[usize]| monitor.check(members, "barrier").unwrap_err().to_string();
        assert_eq!(text(&[0, 1, 2, 3]), "rank 3 died (killed by signal 9) while rank 0 was in barrier");
        assert_eq!(text(&[0, 1, 2]), "rank 2 failed (rank 3 died) while rank 0 was in barrier");
        assert_eq!(text(&[0, 1]), "rank 1 left the job while rank 0 was in barrier");
        let is_orderly = |members: &[usize]| monitor.check(members, "barrier").unwrap_err().is_orderly_departure();
        assert!(is_orderly(&[0, 1]));
        assert!(!is_orderly(&[0, 1, 2]));
        monitor.report(5, Departure::Left);
        assert_eq!(
            text(&[0, 5]),
            "rank 5 left the job after rank 3 died (killed by signal 9) while rank 0 was in barrier"
        );
        assert!(is_orderly(&[0, 5]));
        monitor.report(6, Departure::Failed { message: "out of memory".into() });
        assert_eq!(
            text(&[0, 6]),
            "rank 6 failed (out of memory) after rank 3 died (killed by signal 9) while rank 0 was in barrier"
        );
        assert_eq!(monitor.with_cause("it raised"), "it raised, after rank 3 died (killed by signal 9)");
        assert_eq!(monitor.with_cause("rank 3 died"), "rank 3 died");
        assert_eq!(Monitor::new(0).with_cause("it raised"), "it raised");
    }

    #[test]
    fn closing_ends_every_wait_but_a_culprit_is_named_first() {
        let monitor = Monitor::new(0);
        monitor.report(1, Departure::Left);
        monitor.close("the rendezvous is gone");
        assert_eq!(monitor.check(&[0, 2], "barrier").unwrap_err().code(), crate::error::Code::Closed);
        assert_eq!(monitor.check(&[0, 1], "barrier").unwrap_err().code(), crate::error::Code::PeerFailed);
    }

    #[test]
    fn a_session_that_ends_with_a_rank_names_it_to_every_wait() {
        let monitor = Monitor::new(1);
        monitor.close_after(0, Departure::Died { detail: "killed by signal 9".into() }, "the rendezvous is gone");
        monitor.close("the rendezvous is gone");
        let text = |members: &[usize]| monitor.check(members, "recv").unwrap_err().to_string();
        assert_eq!(text(&[2]), "rank 0 died (killed by signal 9) while rank 1 was in recv");
    }
}
