//! What a process knows of its place in the job, in a forked child too: data loaders ask for the rank to choose their samples.
//!
//! - PLC-1: a fork takes a copy of the place along, made before the process is copied. The child needs no lock for it that
//!   another thread may have held at that moment, and nothing of the session, which it has no part in (SES-2).

use std::cell::Cell;
use std::sync::OnceLock;

use super::{STATE, SessionState, WorldPlace, is_running};
use crate::error::{Error, Result};
use crate::world::fork;

/// Ranks and sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Global rank.
    pub rank: usize,
    /// Processes of the job.
    pub size: usize,
    /// Rank on this host.
    pub local_rank: usize,
    /// Processes on this host.
    pub local_size: usize,
    /// The world of Horovod's API, once it is made.
    pub world: Option<World>,
}

/// The world of Horovod's API, which may be a part of the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// Its ranks, by their numbers in the job.
    pub ranks: Vec<usize>,
    /// This rank's place in it.
    pub place: WorldPlace,
    /// Numbers and ranks of its process sets.
    pub sets: Vec<(u32, Vec<usize>)>,
}

impl World {
    /// Of a place that has one.
    ///
    /// # Errors
    /// [`Error::NotInitialized`] naming `call`.
    pub fn of(place: Place, call: &'static str) -> Result<Self> {
        place.world.ok_or(Error::NotInitialized { call })
    }
}

/// What this process was forked with.
static INHERITED: OnceLock<Place> = OnceLock::new();

thread_local! {
    /// The copy, while this thread forks.
    static COPY: Cell<Option<Place>> = const { Cell::new(None) };
}

/// This process's place; in a forked child the parent's.
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
        Some(World { ranks, place: session.world_place("rank").ok()?, sets: session.process_sets().ok()? })
    };
    Some(Place {
        rank: session.rank(),
        size: session.size(),
        local_rank: session.local_rank(),
        local_size: session.local_size(),
        world: world(),
    })
}

/// PLC-1, for every fork from now on. A job of one process has nothing that a child could disturb: it stays whole there.
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
