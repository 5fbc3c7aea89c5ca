//! MPI between hosts. A plug-in ([`plugin`]) is the only thing that sees an MPI library; it is compiled against the one
//! that the job uses ([`provide`]) and loaded when a job first needs it: CPU tensors on several hosts. One thread
//! ([`engine`]) makes all calls of MPI, for all groups of the process.
//!
//! - MPI-1: MPI moves only memory of the engine, one frame a message. So a message can be given up at any time,
//!   which MPI cannot promise for memory that it was handed.
//! - MPI-2: nobody waits inside MPI but the engine's thread. Whatever MPI does, waits keep their deadlines and hear of
//!   departures.
//! - MPI-3: after a process of the job has died or failed, MPI is called no more: the standard promises nothing for that
//!   state. So every wait of a group on several hosts ends with that departure, whoever its members are; groups on one
//!   host go on.
//! - MPI-4: all processes agree that MPI can be used before anybody calls it, since `MPI_Init` waits for all of them.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::world::Monitor;
use holder::Holder;

mod engine;
mod holder;
mod plugin;
mod provide;

pub(crate) use engine::Engine;
#[cfg(test)]
pub(crate) use engine::loopback;
pub use provide::provide;

/// The engine of this process: MPI is initialised once in the life of a process.
static ENGINE: Mutex<Option<Arc<Engine>>> = Mutex::new(None);

/// Starts MPI with the plug-in at `path`, or finds it started. Every process of the job calls it, before [`hold`].
///
/// # Errors
/// [`Error::Unsupported`] with what MPI says; [`Error::Config`] if MPI knows this process as another rank;
/// [`Error::Timeout`] and [`Error::PeerFailed`] if not all come.
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

/// MPI as it is kept initialised for the scripts of a job that moves no tensors with it.
static HOLDER: Mutex<Option<Arc<Holder>>> = Mutex::new(None);

/// Initialises MPI for the script with the plug-in at `path`, or finds it initialised. Every process of the job calls it.
/// MPI moves nothing for the job then. Returns whether any thread may call MPI.
///
/// # Errors
/// [`Error::Unsupported`] with what MPI says; [`Error::Timeout`] and [`Error::PeerFailed`] if not all come.
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

/// Takes part in the end of MPI, when the process is about to end. Returns when all processes of the job have come so far,
/// or when that cannot be.
pub(crate) fn finish(monitor: &Monitor, deadline: Instant) {
    if let Some(engine) = ENGINE.lock().take() {
        engine.finish(monitor, deadline);
    }
    if let Some(holder) = HOLDER.lock().take() {
        holder.finish(monitor, deadline);
    }
}
