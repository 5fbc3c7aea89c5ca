//! The order of a group's operations: the queue, and the worker thread that runs it (COM-1, COM-2).

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;
use std::time::Duration;

use super::{Done, GroupState, note_panic};
use crate::collectives::batch::PhaseListener;
use crate::collectives::window::Window;
use crate::collectives::{Request, rows};
use crate::error::{Error, Result};

#[derive(Default)]
pub(super) struct Turns {
    /// Whether a thread runs an operation.
    pub(super) busy: bool,
    pub(super) queue: VecDeque<(QueuedOperation, Done)>,
    pub(super) worker: Option<ThreadId>,
}

pub(super) enum QueuedOperation {
    Run(Request, Option<Duration>),
    Batch(Vec<Request>, Option<Duration>, Option<Arc<dyn PhaseListener>>),
    /// Operations on CUDA tensors, which start together.
    Launch(Vec<Request>, Option<Duration>),
    Fail(String),
    Window(usize, Arc<OnceLock<Arc<Window>>>),
}

/// The right to run one operation. Dropping it lets the next one run.
pub(super) struct Turn<'a>(&'a GroupState);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut turns = self.0.turns.lock();
        turns.busy = false;
        if !turns.queue.is_empty() || self.0.closed.get().is_some() {
            self.0.changed.notify_all();
        }
    }
}

impl GroupState {
    /// Runs on this thread if the group is idle, otherwise queues and waits (COM-1, COM-2).
    pub(super) fn run(
        self: &Arc<Self>,
        job: impl FnOnce() -> QueuedOperation,
        now: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if let Some(_turn) = self.turn_if_idle() {
            return self.attempt(now);
        }
        let (sender, receiver) = std::sync::mpsc::channel();
        // The send cannot fail, because this function waits for the receiver.
        self.queue(job(), Box::new(move |result| drop(sender.send(result))));
        let outcome = receiver.recv();
        outcome.unwrap_or_else(|_| Err(Error::Internal("the group's worker thread ended early".into()))).map(drop)
    }

    pub(super) fn turn_if_idle(&self) -> Option<Turn<'_>> {
        let mut turns = self.turns.lock();
        if turns.busy || !turns.queue.is_empty() {
            return None;
        }
        turns.busy = true;
        Some(Turn(self))
    }

    pub(super) fn queue(self: &Arc<Self>, job: QueuedOperation, done: Done) {
        let mut turns = self.turns.lock();
        let refusal = match self.closed.get() {
            Some(reason) => Some(Error::Closed { reason: reason.clone() }),
            None if turns.worker.is_none() => {
                let shared = self.clone();
                let thread = std::thread::Builder::new().name(format!("smd-group-{}", self.id));
                match thread.spawn(move || shared.work()) {
                    Ok(handle) => {
                        turns.worker = Some(handle.thread().id());
                        None
                    }
                    Err(error) => Some(Error::io("starting the worker thread of a group", error)),
                }
            }
            None => None,
        };
        if let Some(error) = refusal {
            drop(turns);
            return done(Err(error));
        }
        turns.queue.push_back((job, done));
        self.changed.notify_all();
    }

    /// The body of the worker thread.
    pub(super) fn work(&self) {
        loop {
            let mut turns = self.turns.lock();
            while turns.busy || (turns.queue.is_empty() && self.closed.get().is_none()) {
                self.changed.wait(&mut turns);
            }
            let Some((job, done)) = turns.queue.pop_front() else {
                turns.worker = None;
                self.changed.notify_all();
                return;
            };
            turns.busy = true;
            drop(turns);
            self.execute(&job, done);
        }
    }

    /// Runs an operation whose turn it is, and completes it.
    pub(super) fn execute(&self, job: &QueuedOperation, done: Done) {
        let turn = Turn(self);
        let outcome = self.attempt(|| match job {
            QueuedOperation::Run(request, timeout) => self.collective(request, *timeout).map(|()| None),
            QueuedOperation::Batch(requests, timeout, watch) => {
                self.batch(requests, *timeout, watch.as_deref()).map(|()| None)
            }
            QueuedOperation::Launch(requests, timeout) => self.launch_settled(requests, *timeout).map(Some),
            QueuedOperation::Fail(message) => self.fail(message).map(|()| None),
            QueuedOperation::Window(bytes, made) => self.window(*bytes, made).map(|()| None),
        });
        drop(turn);
        match outcome {
            Ok(None) => self.complete(done, Ok(None)),
            Ok(Some(in_flight)) => in_flight.then(done),
            Err(error) => self.complete(done, Err(error)),
        }
    }

    /// Calls a completion; a panic in it stops the group (COM-7).
    pub(super) fn complete(&self, done: Done, result: Result<Option<usize>>) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| done(result))) {
            note_panic(&self.panicked, self.id, &*panic);
        }
    }

    /// Runs `operation`; a panic in it breaks the group (COM-7).
    pub(super) fn attempt<T>(&self, operation: impl FnOnce() -> Result<T>) -> Result<T> {
        catch_unwind(AssertUnwindSafe(operation)).unwrap_or_else(|panic| {
            let error = Error::from_panic(&*panic);
            let _ = self.broken.set(error.clone());
            Err(error)
        })
    }

    /// Queues operations on CUDA tensors into their stream: on this thread if the group is idle (COM-1) and connected
    /// on the device, otherwise on the worker thread. The worker also exchanges numbers of rows, which waits for the
    /// other members.
    pub(super) fn launch(self: &Arc<Self>, requests: Vec<Request>, timeout: Option<Duration>, done: Done) {
        let waits = requests.iter().any(rows::are_exchanged);
        let ready = !waits && self.closed.get().is_none() && self.cuda.has_device_comm(&requests);
        let job = QueuedOperation::Launch(requests, timeout);
        let mut turns = self.turns.lock();
        if !ready || turns.busy || !turns.queue.is_empty() {
            drop(turns);
            return self.queue(job, done);
        }
        turns.busy = true;
        drop(turns);
        self.execute(&job, done);
    }
}
