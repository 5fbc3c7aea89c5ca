//! Completion callbacks of operations on devices, for callers that must not make a stream wait.
//!
//! A framework whose kernels all go to one stream must not make that stream wait for communication: ranks queue the
//! operations of several groups in different orders, and a stream that waits for the first keeps the second from
//! starting, on which another rank waits. So such operations run in a stream of their own, and what uses their results is
//! queued when the operations are complete.
//!
//! One thread of the process looks at the events of all groups. Operations of a device that failed, and of a group that was ended, complete
//! too: an abort ends the kernels (CUDA-4).

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::Cuda;
use crate::collectives::Done;
use crate::device::driver::relaxed;
use crate::device::{Context, Event, Stream, ending};
use crate::error::{Error, Result};

/// How long the thread looks without a nap after something happened: most operations take less.
const EAGER: Duration = Duration::from_micros(200);
/// Naps after that. The kernel makes them some 50 us longer.
const NAP: Duration = Duration::from_micros(20);
/// Naps become as long as this part of the time without news, up to a limit: what has taken long may take a little longer, and
/// a process that only waits is not to look like one that computes.
const NAP_PART: u32 = 1000;
const LONGEST_NAP: Duration = Duration::from_millis(2);

/// The work that a group has queued into a stream so far.
pub(crate) struct PendingWork {
    owner: Arc<Cuda>,
    during: String,
    completed: Event,
    /// Why not everything was queued: told when what was has completed, since its memory is in use so long.
    error: Option<Error>,
}

struct CompletionQueue {
    new: Mutex<Vec<(PendingWork, Done)>>,
    added: Condvar,
}

static COMPLETIONS: CompletionQueue = CompletionQueue { new: Mutex::new(Vec::new()), added: Condvar::new() };

impl PendingWork {
    /// Before something is queued whose memory lives until it has completed: what can fail here must not fail then.
    pub(super) fn prepare(owner: &Arc<Cuda>, during: String, context: &'static Context) -> Result<Self> {
        start()?;
        Ok(Self { owner: owner.clone(), during, completed: Event::new(context)?, error: None })
    }

    /// What `stream` was given so far, also if not all of it could be queued.
    pub(super) fn depart(mut self, queued: Result<()>, stream: &Stream) -> Result<Self> {
        self.error = queued.err();
        // A stream that cannot be marked is one of a device that failed, which does not make anybody wait.
        self.completed.record(stream).inspect_err(|_| drop(stream.synchronize()))?;
        Ok(self)
    }

    /// Has `done` called when the device gets there, or with what ended the group's operations before that.
    pub(crate) fn then(self, done: Done) {
        COMPLETIONS.new.lock().push((self, done));
        COMPLETIONS.added.notify_all();
    }

    /// How it went, if it has.
    fn outcome(&self) -> Option<Result<()>> {
        match self.completed.is_done() {
            Ok(false) => None,
            // What was aborted is done as well.
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
    let mut last = Instant::now();
    loop {
        {
            let mut new = COMPLETIONS.new.lock();
            while in_flight.is_empty() && new.is_empty() {
                COMPLETIONS.added.wait(&mut new);
                last = Instant::now();
            }
            in_flight.append(&mut new);
        }
        let Ok(_guard) = ending::enter_driver() else { return };
        // Some stream of the process may be under capture, which must not mind what is asked.
        let outcomes: Vec<_> = relaxed(|| in_flight.iter().map(|(each, _)| each.outcome()).collect());
        if outcomes.iter().all(Option::is_none) {
            if last.elapsed() < EAGER {
                std::thread::yield_now();
            } else {
                std::thread::sleep((last.elapsed() / NAP_PART).clamp(NAP, LONGEST_NAP));
            }
            continue;
        }
        last = Instant::now();
        // In the order in which they were queued.
        for ((each, done), outcome) in std::mem::take(&mut in_flight).into_iter().zip(outcomes) {
            match outcome {
                None => in_flight.push((each, done)),
                Some(outcome) => {
                    let tell = std::panic::AssertUnwindSafe(|| done(outcome.map(|()| None)));
                    if let Err(panic) = std::panic::catch_unwind(tell) {
                        // As COM-7: the members' later operations on devices end with the panic's text.
                        each.owner.end(Error::from_panic(&*panic));
                    }
                }
            }
        }
    }
}
