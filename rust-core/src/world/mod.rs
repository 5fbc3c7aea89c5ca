//! Ranks, groups, the rendezvous, and departures of ranks.
//!
//! - [`env`]: the launcher's variables.
//! - [`topology`]: the coordinates of each rank in a model-parallel job.
//! - [`monitor`]: the ranks that died, left or failed; every wait of the core checks it.
//! - [`store`]: a key-value store for small values that members of a job exchange.
//! - [`rendezvous`]: how ranks find each other, over TCP with a shared secret.
//! - [`fork`]: rules for forked children. [`host`]: the identity of this host. `hydra`: the address of MPICH's
//!   launcher.

pub mod env;
pub mod fork;
pub mod host;
mod hydra;
pub mod monitor;
pub mod rendezvous;
pub(crate) mod socket;
pub mod store;
pub mod topology;

pub use monitor::{Departure, Monitor};
pub use store::{LocalStore, Store};
