//! The scope of a pipeline step on this rank, for which the other ranks wait.
//!
//! An operation of the step may fail on this rank alone. The step's other operations here then wait for other ranks,
//! which wait for the result of the failed operation. A script that catches the error may never call them again.
//!
//! - SCOPE-1: a step that fails and has not ended [`FAILED_STEP_TIMEOUT`] later has failed on all ranks; at once, if it
//!   fails because another rank did. Its waits here end, and so does this process's part in the job.
//! - SCOPE-2: the code that runs the step may tell the other ranks before that, or within [`DRAIN_TIMEOUT`] of the end
//!   of the waits, with a more specific message. Then nothing is added.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::Session;
use crate::error::Result;
use crate::metrics;

/// How long a failed step is left alone. If all ranks fail alike, each raises its own error in this time.
const FAILED_STEP_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the script may take to tell the other ranks after its waits have ended.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The scope of one step. Any thread may end or fail it.
pub struct StepScope {
    progress: Arc<ScopeProgress>,
    job: Arc<dyn JobLink>,
    timeout: Duration,
}

/// The operations of a session that a step needs; replaced in tests.
trait JobLink: Send + Sync {
    /// The failure of another rank, if there is one.
    fn failure(&self) -> Option<String>;
    /// Whether the failure of this rank has been reported to the other ranks, or cannot be reported any more.
    fn has_reported(&self) -> bool;
    /// Ends this process's waits.
    fn end_waits(&self);
    /// Reports the failure to the other ranks, unless that has been done, and ends this process's part in the job.
    fn give_up(&self, message: &str);
}

#[derive(Default)]
struct ScopeProgress {
    state: Mutex<ScopeState>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum ScopeState {
    #[default]
    UnderWay,
    Failed,
    Ended,
}

impl StepScope {
    /// Begins the scope of a step.
    ///
    /// # Errors
    /// [`crate::Error::NotInitialized`] without a session.
    pub fn begin() -> Result<Self> {
        let session = Arc::downgrade(&super::current("step")?);
        metrics::note_pipeline_step();
        Ok(Self { progress: Arc::default(), job: Arc::new(session), timeout: FAILED_STEP_TIMEOUT })
    }

    /// Ends the scope: the step's operations here are complete, or all ranks know that they will not complete.
    pub fn end(&self) {
        *self.progress.state.lock() = ScopeState::Ended;
        self.progress.changed.notify_all();
    }

    /// Reports that an operation of the step failed, or that the step was cancelled. Returns at once.
    pub fn fail(&self) {
        {
            let mut state = self.progress.state.lock();
            if *state != ScopeState::UnderWay {
                return;
            }
            *state = ScopeState::Failed;
        }
        let (progress, job, timeout) = (self.progress.clone(), self.job.clone(), self.timeout);
        let watch = move || progress.watch(&*job, timeout);
        if thread::Builder::new().name("smd-step".to_owned()).spawn(watch).is_err() {
            // No thread could be started for the wait.
            self.job.give_up(OWN_FAILURE);
        }
    }
}

/// The message to the other ranks if the step fails here first.
const OWN_FAILURE: &str = "an operation of its step failed";

impl JobLink for Weak<Session> {
    fn failure(&self) -> Option<String> {
        let (rank, how) = self.upgrade()?.monitor.first_failure()?;
        Some(format!("rank {rank} {how}"))
    }

    fn has_reported(&self) -> bool {
        self.upgrade().is_none_or(|session| session.has_reported())
    }

    fn end_waits(&self) {
        if let Some(session) = self.upgrade() {
            session.monitor.close(REASON);
        }
    }

    fn give_up(&self, message: &str) {
        if let Some(session) = self.upgrade() {
            session.give_up(message, REASON);
        }
    }
}

/// The error with which this process's waits end.
const REASON: &str = "an operation of this step failed, and other ranks wait for its result";

impl ScopeProgress {
    fn wait_for_end(&self, deadline: Instant) -> bool {
        let mut state = self.state.lock();
        while *state != ScopeState::Ended {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return *state == ScopeState::Ended;
            }
        }
        true
    }

    fn watch(&self, job: &dyn JobLink, timeout: Duration) {
        let timeout = if job.failure().is_some() { Duration::ZERO } else { timeout };
        if self.wait_for_end(Instant::now() + timeout) || job.has_reported() {
            return;
        }
        job.end_waits();
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        while Instant::now() < deadline && !job.has_reported() {
            thread::sleep(POLL_INTERVAL);
        }
        job.give_up(job.failure().as_deref().unwrap_or(OWN_FAILURE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT_TIMEOUT: Duration = Duration::from_millis(50);
    const LATER: Duration = Duration::from_secs(30);

    /// A job whose messages to other ranks are recorded.
    #[derive(Default)]
    struct MockJob {
        failure: Option<String>,
        /// The message of the script when its waits end.
        last_message: Option<String>,
        reports: Mutex<Vec<String>>,
        ended_at: Mutex<Option<Instant>>,
    }

    impl JobLink for MockJob {
        fn failure(&self) -> Option<String> {
            self.failure.clone()
        }

        fn has_reported(&self) -> bool {
            !self.reports.lock().is_empty()
        }

        fn end_waits(&self) {
            self.reports.lock().extend(self.last_message.clone());
        }

        fn give_up(&self, message: &str) {
            let mut reports = self.reports.lock();
            if reports.is_empty() {
                reports.push(message.to_owned());
            }
            assert!(self.ended_at.lock().replace(Instant::now()).is_none(), "it is given up once");
        }
    }

    fn begin(timeout: Duration, job: MockJob) -> (StepScope, Arc<MockJob>) {
        let job = Arc::new(job);
        (StepScope { progress: Arc::default(), job: job.clone(), timeout }, job)
    }

    /// Waits until no thread watches the step any more. Returns how long that took.
    fn wait(scope: StepScope, job: &Arc<MockJob>) -> Duration {
        let began = Instant::now();
        drop(scope);
        while Arc::strong_count(job) > 1 {
            assert!(began.elapsed() < LATER, "the step is watched for ever");
            thread::sleep(POLL_INTERVAL);
        }
        began.elapsed()
    }

    #[test]
    fn a_step_that_fails_ends_the_session() {
        let (scope, job) = begin(SHORT_TIMEOUT, MockJob::default());
        let began = Instant::now();
        scope.fail();
        scope.fail();
        wait(scope, &job);
        assert!(job.ended_at.lock().is_some_and(|at| at >= began + SHORT_TIMEOUT + DRAIN_TIMEOUT));
        assert_eq!(*job.reports.lock(), [OWN_FAILURE]);
    }

    #[test]
    fn the_words_of_the_script_come_first() {
        let (scope, job) =
            begin(SHORT_TIMEOUT, MockJob { last_message: Some("too much".to_owned()), ..MockJob::default() });
        scope.fail();
        wait(scope, &job);
        assert!(job.ended_at.lock().is_some(), "waits on devices end");
        assert_eq!(*job.reports.lock(), ["too much"]);

        let (scope, job) = begin(SHORT_TIMEOUT, MockJob::default());
        scope.fail();
        job.reports.lock().push("too much".to_owned());
        wait(scope, &job);
        assert!(job.ended_at.lock().is_none(), "the other ranks end the waits of this one");
    }

    #[test]
    fn a_step_that_fails_because_of_another_rank_is_reported_at_once() {
        let (scope, job) = begin(LATER, MockJob { failure: Some("rank 0 died".to_owned()), ..MockJob::default() });
        scope.fail();
        assert!(wait(scope, &job) < LATER);
        assert_eq!(*job.reports.lock(), ["rank 0 died"]);
    }

    #[test]
    fn a_step_that_ends_after_a_failure_does_not_end_the_session() {
        let (scope, job) = begin(LATER, MockJob::default());
        scope.fail();
        scope.end();
        scope.fail();
        // The thread ends with the step, long before `FAILED_STEP_TIMEOUT`.
        assert!(wait(scope, &job) < LATER);
        assert!(job.ended_at.lock().is_none() && job.reports.lock().is_empty());
    }

    #[test]
    fn a_step_without_a_failure_does_not_end_the_job() {
        let (scope, job) = begin(Duration::ZERO, MockJob::default());
        wait(scope, &job);
        assert!(job.ended_at.lock().is_none());
    }

    #[test]
    fn a_step_needs_a_session() {
        assert_eq!(StepScope::begin().err().map(|error| error.code()), Some(crate::error::Code::NotInitialized));
    }
}
