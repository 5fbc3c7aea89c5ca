//! Keeps MPI initialised for the script, if all ranks are on one host and shared memory carries their tensors.
//!
//! One thread initialises and finalises MPI, because the standard requires the same thread for both. It sleeps in
//! between.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::engine::{Failure, Wire};
use crate::error::{Error, Limit, Result};
use crate::transport::POLL_INTERVAL;
use crate::transport::ports::departed;
use crate::world::Monitor;

#[derive(Default)]
struct EngineProgress {
    /// The result of the initialisation: whether any thread may call MPI.
    outcome: Option<Result<bool, Failure>>,
    /// Whether the process is about to end.
    finish: bool,
    ended: bool,
    /// Number of processes of the job.
    size: usize,
}

/// Keeps MPI initialised until it is dropped.
pub(crate) struct Holder {
    progress: Mutex<EngineProgress>,
    changed: Condvar,
}

impl Holder {
    /// Starts the thread, which initialises MPI; [`Holder::outcome`] returns the result.
    pub(crate) fn start(mut wire: Box<dyn Wire>) -> Result<Arc<Self>> {
        let holder = Arc::new(Self { progress: Mutex::default(), changed: Condvar::new() });
        let own = holder.clone();
        let work = move || {
            let outcome = wire.init();
            let failed = outcome.is_err();
            let mut progress = own.progress.lock();
            progress.outcome = Some(outcome);
            own.changed.notify_all();
            while !failed && !progress.finish {
                own.changed.wait(&mut progress);
            }
            drop(progress);
            if !failed && let Err(Failure(text)) = wire.finish() {
                tracing::debug!("MPI could not be finalized: {text}");
            }
            own.progress.lock().ended = true;
            own.changed.notify_all();
        };
        let thread = std::thread::Builder::new().name("smd-mpi".into());
        thread.spawn(work).map_err(|error| Error::io("starting a thread for MPI", error))?;
        Ok(holder)
    }

    /// Returns whether any thread may call MPI, once all `size` processes of the job have initialised it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with MPI's text; the errors of a wait for all ranks.
    pub(crate) fn outcome(&self, size: usize, monitor: &Monitor, deadline: Instant) -> Result<bool> {
        let start = Instant::now();
        let all: Vec<usize> = (0..size).collect();
        let during = "initialising MPI";
        let mut progress = self.progress.lock();
        progress.size = size;
        loop {
            if let Some(outcome) = progress.outcome.clone() {
                return outcome.map_err(|Failure(text)| Error::Unsupported(format!("MPI did not start: {text}")));
            }
            monitor.check(&all, during)?;
            if Instant::now() >= deadline {
                let missing = all.iter().copied().filter(|rank| *rank != monitor.me()).collect();
                let (during, waited) = (during.to_owned(), start.elapsed());
                return Err(Error::Timeout { during, waited, missing, limit: Limit::Init });
            }
            if monitor.interrupted() {
                return Err(Error::Interrupted { during: during.to_owned() });
            }
            self.changed.wait_for(&mut progress, POLL_INTERVAL);
        }
    }

    /// Finalises MPI: waits until the other processes finalise it too, unless a process has died, and at most until
    /// the deadline.
    pub(crate) fn finish(&self, monitor: &Monitor, deadline: Instant) {
        let mut progress = self.progress.lock();
        progress.finish = true;
        self.changed.notify_all();
        while !progress.ended {
            let failed = (0..progress.size).any(|rank| departed(monitor, rank));
            if failed || Instant::now() >= deadline || monitor.interrupted() || progress.outcome.is_none() {
                return;
            }
            self.changed.wait_for(&mut progress, POLL_INTERVAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::engine::loopback::Loopback;
    use super::*;

    #[test]
    fn mpi_is_initialised_and_ends_with_the_process() {
        let holder = Holder::start(Box::new(Loopback::default())).expect("a thread can be started");
        let (monitor, deadline) = (Monitor::new(0), Instant::now() + Duration::from_secs(30));
        assert!(holder.outcome(1, &monitor, deadline).expect("the loopback starts"));
        assert!(holder.outcome(1, &monitor, deadline).expect("it is started"), "a second session finds it");
        assert!(!holder.progress.lock().ended);
        holder.finish(&monitor, deadline);
        assert!(holder.progress.lock().ended);
    }
}
