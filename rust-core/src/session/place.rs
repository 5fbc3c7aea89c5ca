//! The ranks and sizes of this process, which a forked child knows, too: data loaders choose samples by rank.
//!
//! - PLC-1: the parent copies the place before it forks. So the child needs no lock that another thread may have held
//!   at that moment, and no access to the session, in which it takes no part (SES-2).

use std::cell::Cell;
use std::sync::OnceLock;

use super::{RanksAndSizes, STATE, SessionState, is_running};
use crate::error::{Error, Result};
use crate::world::fork;

/// Ranks and sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Global rank.
    pub rank: usize,
    /// Number of processes of the job.
    pub size: usize,
    /// Rank on this host.
    pub local_rank: usize,
    /// Number of processes on this host.
    pub local_size: usize,
    /// The world of Horovod's API, once it is created.
    pub world: Option<World>,
}

/// The world of Horovod's API, which may have fewer ranks than the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// Ranks, as ranks of the job.
    pub ranks: Vec<usize>,
    /// This rank's place in it.
    pub place: RanksAndSizes,
    /// Ids and ranks of its process sets.
    pub sets: Vec<(u32, Vec<usize>)>,
}

impl World {
    /// The world of Horovod's API.
    ///
    /// # Errors
    /// [`Error::NotInitialized`] naming `call`.
    pub fn of(place: Place, call: &'static str) -> Result<Self> {
        place.world.ok_or(Error::NotInitialized { call })
    }
}

/// The place that this process inherited from its parent.
static INHERITED: OnceLock<Place> = OnceLock::new();

thread_local! {
    /// The copy for a child that this thread is forking.
    static COPY: Cell<Option<Place>> = const { Cell::new(None) };
}

/// Returns this process's place; in a forked child, the parent's.
///
/// # Errors
/// [`Error::NotInitialized`] naming `call`.
pub fn place(call: &'static str) -> Result<Place> {
    let place = if fork::is_child() { INHERITED.get().cloned() } else { own() };
    place.ok_or(Error::NotInitialized { call })
}

/// Whether there is a place: in a process with a session, and in its forked children.
pub fn has_place() -> bool {
    if fork::is_child() { INHERITED.get().is_some() } else { is_running() }
}

fn own() -> Option<Place> {
    let session = match &*STATE.lock() {
        SessionState::Running(session) => session.clone(),
        SessionState::Idle | SessionState::Starting => return None,
    };
    let world = || {
        let ranks = session.world_ranks("rank").ok()?;
        Some(World { ranks, place: session.ranks_and_sizes("rank").ok()?, sets: session.process_sets().ok()? })
    };
    Some(Place {
        rank: session.rank(),
        size: session.size(),
        local_rank: session.local_rank(),
        local_size: session.local_size(),
        world: world(),
    })
}

/// Installs the handlers that copy the place in every later fork (PLC-1). For a job of one process, the session
/// itself stays usable in a child, because there is no communication to disturb.
pub(super) fn inherit() {
    fork::on_fork(fork::Hooks {
        before: || COPY.set(own()),
        in_parent: || COPY.set(None),
        in_child: || {
            if let Some(place) = COPY.take() {
                let _ = INHERITED.set(place);
            }
        },
    });
}
