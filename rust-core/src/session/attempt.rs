//! A step of a pipeline that runs here, while the other ranks wait for what comes of it.
//!
//! An operation of it may fail on this rank alone. What else the step has under way here then waits for the others, and they wait
//! for what the operation would have become; and a script that catches the error may never meet them again.
//!
//! - ATT-1: a step that fails and has not ended [`PATIENCE`] later has failed for all. This process's part in the job ends, so what waits here
//!   ends too.
//! - ATT-2: who runs the step may tell the others before, in words that say more. Then there is nothing to add: what waits here ends
//!   when the others depart.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::Result;

/// How long a step that has failed here is left alone: where all ranks fail alike, each has an error of its own to raise.
const PATIENCE: Duration = Duration::from_secs(1);

/// A step that has begun. Any thread may say what becomes of it.
pub struct Attempt {
    progress: Arc<Progress>,
    patience: Duration,
    give_up: Arc<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum State {
    #[default]
    UnderWay,
    Failed,
    Ended,
}

impl Attempt {
    /// A step begins.
    ///
    /// # Errors
    /// [`crate::Error::NotInitialized`] without a session.
    pub fn begin() -> Result<Self> {
        let session = Arc::downgrade(&super::current("step")?);
        Ok(Self::new(PATIENCE, move || {
            if let Some(session) = session.upgrade()
                && !session.has_reported()
            {
                let reason = "an operation of this step failed, and the others wait for what comes of it";
                session.give_up("an operation of its step failed", reason);
            }
        }))
    }

    fn new(patience: Duration, give_up: impl Fn() + Send + Sync + 'static) -> Self {
        Self { progress: Arc::default(), patience, give_up: Arc::new(give_up) }
    }

    /// All that the step had to do here is done, or all ranks know that it will not be.
    pub fn end(&self) {
        *self.progress.state.lock() = State::Ended;
        self.progress.changed.notify_all();
    }

    /// An operation of the step failed, or the step was cancelled. Returns at once.
    pub fn fail(&self) {
        {
            let mut state = self.progress.state.lock();
            if *state != State::UnderWay {
                return;
            }
            *state = State::Failed;
        }
        let (progress, give_up) = (self.progress.clone(), self.give_up.clone());
        let deadline = Instant::now() + self.patience;
        let watch = move || {
            if !progress.ends_by(deadline) {
                give_up();
            }
        };
        if thread::Builder::new().name("smd-step".to_owned()).spawn(watch).is_err() {
            // Nobody is there to wait.
            (self.give_up)();
        }
    }
}

impl Progress {
    fn ends_by(&self, deadline: Instant) -> bool {
        let mut state = self.state.lock();
        while *state != State::Ended {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return *state == State::Ended;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

    use super::*;

    const SOON: Duration = Duration::from_millis(50);
    const LATER: Duration = Duration::from_secs(30);

    /// An attempt, and how often it was given up; the other end closes when nobody can give it up any more.
    fn begin(patience: Duration) -> (Attempt, Receiver<()>) {
        let (sender, given_up) = channel();
        (Attempt::new(patience, move || sender.send(()).expect("the test listens")), given_up)
    }

    #[test]
    fn one_that_fails_is_given_up_once() {
        let (attempt, given_up) = begin(SOON);
        let began = Instant::now();
        attempt.fail();
        attempt.fail();
        assert!(began.elapsed() < LATER);
        given_up.recv_timeout(LATER).expect("it did not end");
        assert!(began.elapsed() >= SOON);
        attempt.end();
        drop(attempt);
        assert_eq!(given_up.recv_timeout(LATER), Err(RecvTimeoutError::Disconnected));
    }

    #[test]
    fn one_that_ends_is_not() {
        let (attempt, given_up) = begin(LATER);
        attempt.fail();
        attempt.end();
        attempt.fail();
        // Long before the patience is over: the watch ends with the step.
        let began = Instant::now();
        drop(attempt);
        assert_eq!(given_up.recv_timeout(LATER), Err(RecvTimeoutError::Disconnected));
        assert!(began.elapsed() < LATER);
    }

    #[test]
    fn one_that_nobody_says_anything_of_is_not() {
        let (attempt, given_up) = begin(Duration::ZERO);
        drop(attempt);
        assert_eq!(given_up.recv_timeout(LATER), Err(RecvTimeoutError::Disconnected));
    }

    #[test]
    fn there_is_none_without_a_session() {
        assert_eq!(Attempt::begin().err().map(|error| error.code()), Some(crate::error::Code::NotInitialized));
    }
}
