//! A group that can run operations: its members, the transport between them, and the order of what they run.
//!
//! - COM-1: operations of one communicator run one at a time, in the order of [`Communicator::run`] and
//!   [`Communicator::submit`] calls. Point-to-point messages are outside this order.
//! - COM-2: `run` works on the caller's thread when nothing is queued, since a hand-over to another thread costs more
//!   than a small collective.
//! - COM-3: communicators are independent: each has its own worker thread, started by its first `submit`, so that
//!   ranks may interleave two groups differently.

use std::sync::Arc;
use std::time::Duration;

use super::Request;
use super::window::Window;
use crate::error::Result;
use crate::transport::{Members, Transport};
use crate::world::Monitor;

/// Called once, from the worker thread, when an operation has completed or failed.
pub type Done = Box<dyn FnOnce(Result<()>) + Send>;

/// See the module's text.
pub struct Communicator {
    transport: Arc<dyn Transport>,
}

impl Communicator {
    /// The communicator over `transport`; `id` is the same on all members and unique in the job.
    pub fn new(id: u64, transport: Arc<dyn Transport>, monitor: Arc<Monitor>, timeout: Duration) -> Arc<Self> {
        let _ = (id, monitor, timeout);
        Arc::new(Self { transport })
    }

    /// The job-wide name of the group; 0 is the world.
    pub fn id(&self) -> u64 {
        todo!()
    }

    /// The members.
    pub fn members(&self) -> &Members {
        self.transport.members()
    }

    /// Runs `request` and returns when this member's part is complete.
    ///
    /// # Errors
    /// See COL-3 and [`crate::transport::Wait::check`].
    pub fn run(&self, request: &Request) -> Result<()> {
        let _ = request;
        todo!()
    }

    /// Queues `request`; `done` is called when it is complete. The views' promise must hold until then.
    pub fn submit(self: &Arc<Self>, request: Request, done: Done) {
        let _ = (request, done);
        todo!()
    }

    /// Memory of `bytes` bytes that every member contributes and, on one host, every member sees. Collective.
    pub fn window(&self, bytes: usize) -> Result<Arc<Window>> {
        let _ = bytes;
        todo!()
    }

    /// Takes part in the group's next operation by failing it: every other member's next operation ends with
    /// [`crate::Error::PeerFailed`] carrying `message`. The group stays usable.
    pub fn fail_next(self: &Arc<Self>, message: String, done: Done) {
        let _ = (message, done);
        todo!()
    }

    /// Ends the worker thread; queued operations fail with [`crate::Error::Closed`].
    pub fn close(&self, reason: &str) {
        let _ = reason;
        todo!()
    }
}
