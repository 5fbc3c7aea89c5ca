//! Who am I, who are my peers, which of them is gone.
//!
//! - [`env`]: what the launcher says.
//! - [`layout`]: which part each rank plays in a model-parallel job.
//! - [`monitor`]: the list of ranks that died, left or failed; every wait in the core looks at it.
//! - [`store`]: the key-value store on which members of a job meet.
//! - [`rendezvous`]: how they find each other, over TCP with a shared secret.
//! - [`fork`]: what a forked child must not do. [`host`]: which host this is.

pub mod env;
pub mod fork;
pub mod host;
pub mod monitor;
pub mod rendezvous;
pub(crate) mod socket;
pub mod store;
pub mod topology;

pub use monitor::{Departure, Monitor};
pub use store::{LocalStore, Store};
