//! Life cycle of the library in this process: init, running, draining, closed.
//!
//! There is one session per process at a time; Python, the PyTorch ops and the TensorFlow ops all see it through
//! [`current`].

use std::sync::Arc;

use crate::collectives::Communicator;
use crate::error::Result;

/// What `init` may be told beyond the environment.
#[derive(Clone, Debug, Default)]
pub struct InitOptions {}

/// A running session; owns the control connection, the communicators and their threads.
pub struct Session {}

/// Joins the job that the launcher's environment describes. Blocks until all ranks have joined.
///
/// # Errors
/// [`crate::Error::AlreadyInitialized`]; [`crate::Error::Config`] for a contradictory environment;
/// [`crate::Error::Rendezvous`] or [`crate::Error::Timeout`] naming the ranks that did not come.
pub fn init(options: InitOptions) -> Result<Arc<Session>> {
    let _ = options;
    todo!()
}

/// The running session.
///
/// # Errors
/// [`crate::Error::NotInitialized`] naming `call`; [`crate::Error::Closed`] with the reason after a failure.
pub fn current(call: &'static str) -> Result<Arc<Session>> {
    let _ = call;
    todo!()
}

/// Leaves the job; does nothing if there is no session. Afterwards `init` may be called again.
pub fn shutdown() -> Result<()> {
    todo!()
}

impl Session {
    /// Global rank, 0..size.
    pub fn rank(&self) -> usize {
        todo!()
    }
    /// Processes of the job.
    pub fn size(&self) -> usize {
        todo!()
    }
    /// Rank on this host.
    pub fn local_rank(&self) -> usize {
        todo!()
    }
    /// Processes on this host.
    pub fn local_size(&self) -> usize {
        todo!()
    }
    /// A name for this session that is the same on all ranks and new for each `init`.
    pub fn id(&self) -> u64 {
        todo!()
    }
    /// The communicator of all ranks.
    pub fn world(&self) -> Arc<Communicator> {
        todo!()
    }
    /// The communicator with this id; 0 is the world.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] if this process is in no such group.
    pub fn communicator(&self, id: u64) -> Result<Arc<Communicator>> {
        let _ = id;
        todo!()
    }
    /// Makes a group of `ranks` (global ranks, in the order they get inside the group). Its members call it, in the
    /// same order where they are members of several new groups; others need not.
    pub fn new_group(&self, ranks: &[usize]) -> Result<Arc<Communicator>> {
        let _ = ranks;
        todo!()
    }
    /// Forgets a group. Its members call it.
    pub fn remove_group(&self, id: u64) -> Result<()> {
        let _ = id;
        todo!()
    }
    /// Tells the job that this rank failed with `message` (an uncaught exception); waits of others end with it.
    pub fn report_failure(&self, message: &str) {
        let _ = message;
        todo!()
    }
}
