//! Completion callbacks of operations on devices, for callers that must not make a stream wait.
//!
//! A framework may queue all kernels into one stream, which must not wait for communication. Ranks queue the operations
//! of several groups in different orders: a stream that waits for the first operation delays the second one, for which
//! another rank may wait. Such operations therefore run in a stream of their own, and their consumers are queued when
//! they are complete.
//!
//! One thread of the process polls the events of all groups. Operations of a failed device or of an ended group
//! complete, too: an abort ends the kernels (CUDA-4).

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::Cuda;
use crate::collectives::Done;
use crate::device::driver::relaxed;
use crate::device::{Context, Event, Stream, ending};
use crate::error::{Error, Result};

/// After an event, the thread polls without sleeping for this long: most operations take less.
const EAGER_POLL_TIME: Duration = Duration::from_micros(200);
/// Sleep between later polls. The kernel makes it some 50 us longer.
const POLL_INTERVAL: Duration = Duration::from_micros(20);
/// Sleeps grow to this fraction of the time since the last event, up to a limit. An operation that has taken long may
/// take a little longer, and a process that only waits should not appear to compute.
const POLL_DIVISOR: u32 = 1000;
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// The work that a group has queued into a stream so far.
pub(crate) struct PendingWork {
    owner: Arc<Cuda>,
    during: String,
    completed: Event,
    /// Why some of the work could not be queued. It is reported when the rest has completed, because its memory is in
    /// use until then.
    error: Option<Error>,
}

struct CompletionQueue {
    new: Mutex<Vec<(PendingWork, Done)>>,
    added: Condvar,
}

static COMPLETIONS: CompletionQueue = CompletionQueue { new: Mutex::new(Vec::new()), added: Condvar::new() };

impl PendingWork {
    /// Prepares the callback before any work is queued, so that nothing can fail once memory is in use.
    pub(super) fn prepare(owner: &Arc<Cuda>, during: String, context: &'static Context) -> Result<Self> {
        start()?;
        Ok(Self { owner: owner.clone(), during, completed: Event::new(context)?, error: None })
    }

    /// Marks the work in `stream` so far, also if some of it could not be queued.
    pub(super) fn mark(mut self, queued: Result<()>, stream: &Stream) -> Result<Self> {
        self.error = queued.err();
        // A stream that cannot be marked belongs to a failed device, so synchronizing with it does not block.
        self.completed.record(stream).inspect_err(|_| drop(stream.synchronize()))?;
        Ok(self)
    }

    /// Calls `done` when the device has finished the work, or with the error that ended the group before.
    pub(crate) fn then(self, done: Done) {
        COMPLETIONS.new.lock().push((self, done));
        COMPLETIONS.added.notify_all();
    }

    /// The result, once the work has completed.
    fn outcome(&self) -> Option<Result<()>> {
        match self.completed.is_done() {
            Ok(false) => None,
            // Aborted work has completed as well.
            Ok(true) => Some(self.owner.check(|| self.during.clone()).and(self.error.clone().map_or(Ok(()), Err))),
            Err(error) => Some(self.owner.check(|| self.during.clone()).and(Err(error))),
        }
    }
}

fn start() -> Result<()> {
    static THREAD: OnceLock<Result<()>> = OnceLock::new();
    let spawn = || {
        let thread = std::thread::Builder::new().name("smd-cuda-done".into()).spawn(work);
        thread.map(drop).map_err(|error| Error::io("starting the thread that waits for devices", error))
    };
    THREAD.get_or_init(spawn).clone()
}

fn work() {
    let mut in_flight: Vec<(PendingWork, Done)> = Vec::new();
    let mut last_event = Instant::now();
    loop {
        {
            let mut new = COMPLETIONS.new.lock();
            while in_flight.is_empty() && new.is_empty() {
                COMPLETIONS.added.wait(&mut new);
                last_event = Instant::now();
            }
            in_flight.append(&mut new);
        }
        let Ok(_guard) = ending::enter_driver() else { return };
        // Another stream of the process may be under capture, which these queries must not invalidate.
        let outcomes: Vec<_> = relaxed(|| in_flight.iter().map(|(each, _)| each.outcome()).collect());
        if outcomes.iter().all(Option::is_none) {
            if last_event.elapsed() < EAGER_POLL_TIME {
                std::thread::yield_now();
            } else {
                std::thread::sleep((last_event.elapsed() / POLL_DIVISOR).clamp(POLL_INTERVAL, MAX_POLL_INTERVAL));
            }
            continue;
        }
        last_event = Instant::now();
        // In the order of submission.
        for ((each, done), outcome) in std::mem::take(&mut in_flight).into_iter().zip(outcomes) {
            match outcome {
                None => in_flight.push((each, done)),
                Some(outcome) => {
                    let call = std::panic::AssertUnwindSafe(|| done(outcome.map(|()| None)));
                    if let Err(panic) = std::panic::catch_unwind(call) {
                        // As COM-7: the members' later operations on devices end with the panic's text.
                        each.owner.end(Error::from_panic(&*panic));
                    }
                }
            }
        }
    }
}
