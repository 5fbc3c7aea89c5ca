//! MPI between hosts. Only a plug-in ([`plugin`]) uses an MPI library directly. It is compiled against the job's MPI
//! ([`provide`]) and loaded when a job first needs it: for CPU tensors on several hosts. One thread at a time
//! ([`engine`]) makes the calls of MPI, for all groups of the process.
//!
//! - MPI-1: MPI accesses memory of the engine, one frame for each message or a part of one, so that a message of a group
//!   can be cancelled at any time, which MPI does not support for memory that was passed to it. Long messages are the
//!   exception: MPI moves them between the memory of both ends, and a cancellation waits for that (ZCP-3).
//! - MPI-2: only the engine's thread makes calls that may wait: initialising, finalising and the first message to a
//!   process, for which MPI may have to look up its address. Callers that send frames or wait for them make the calls that
//!   do not wait (`MPI_Isend`, `MPI_Irecv`, `MPI_Testsome`), if MPI permits any thread to call it. Waits keep their
//!   deadlines and notice departures as long as MPI keeps to that; if one of these calls waits, so does its caller.
//! - MPI-3: after a process of the job has died or failed, MPI is not called any more, because its standard does not
//!   define that state. So every wait of a group on several hosts ends with that departure, even if the process is
//!   not a member; groups on one host continue.
//! - MPI-4: all processes agree that MPI can be used before any of them calls it, because `MPI_Init` waits for all of
//!   them.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::world::Monitor;
use holder::Holder;

mod engine;
mod holder;
mod message_length;
mod outbox;
mod plugin;
mod provide;
mod service;

pub(crate) use engine::Engine;
#[cfg(test)]
pub(crate) use engine::loopback;
pub(crate) use message_length::MessageOptions;
pub use provide::provide;

/// The engine of this process: a process can initialise MPI only once.
static ENGINE: Mutex<Option<Arc<Engine>>> = Mutex::new(None);

/// Starts MPI with the plug-in at `path`, unless it is started. Every process of the job calls it, before [`hold`], and then
/// [`Engine::measure`].
///
/// # Errors
/// [`Error::Unsupported`] with MPI's text; [`Error::Config`] if MPI has another rank for this process;
/// [`Error::Timeout`] and [`Error::PeerFailed`] if not all processes call it.
pub(crate) fn start(path: &Path, size: usize, monitor: &Monitor, deadline: Instant) -> Result<Arc<Engine>> {
    let rank = monitor.me();
    let engine = {
        let mut engine = ENGINE.lock();
        match &*engine {
            Some(engine) => engine.clone(),
            None => engine.insert(Engine::start(Box::new(plugin::Plugin::load(path)?))?).clone(),
        }
    };
    let world = engine.world(size, monitor, deadline)?;
    if (world.rank, world.size) != (rank, size) {
        return Err(Error::Config(format!(
            "the launcher made this process rank {rank} of {size}, but {} makes it rank {} of {}: start the job with the \
             `mpirun` of the MPI that `mpicc` belongs to (`MPICC` names another one)",
            world.library, world.rank, world.size
        )));
    }
    tracing::info!("{} moves CPU tensors between hosts", world.library);
    Ok(engine)
}

/// MPI that is kept initialised for scripts, in a job whose tensors do not use it.
static HOLDER: Mutex<Option<Arc<Holder>>> = Mutex::new(None);

/// Initialises MPI for the script with the plug-in at `path`, unless it is initialised. Every process of the job
/// calls it. The job's tensors do not use MPI. Returns whether any thread may call MPI.
///
/// # Errors
/// [`Error::Unsupported`] with MPI's text; [`Error::Timeout`] and [`Error::PeerFailed`] if not all processes call it.
pub(crate) fn hold(path: &Path, size: usize, monitor: &Monitor, deadline: Instant) -> Result<bool> {
    let holder = {
        let mut holder = HOLDER.lock();
        match &*holder {
            Some(holder) => holder.clone(),
            None => holder.insert(Holder::start(Box::new(plugin::Plugin::load(path)?))?).clone(),
        }
    };
    holder.outcome(size, monitor, deadline)
}

/// Finalises MPI, when the process is about to end. Returns when all processes of the job finalise it, or when they
/// cannot.
pub(crate) fn finish(monitor: &Monitor, deadline: Instant) {
    if let Some(engine) = ENGINE.lock().take() {
        engine.finish(monitor, deadline);
    }
    if let Some(holder) = HOLDER.lock().take() {
        holder.finish(monitor, deadline);
    }
}
