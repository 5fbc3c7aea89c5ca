//! Who am I, who are my peers, which of them is gone.
//!
//! - [`monitor`]: the list of ranks that died, left or failed; every wait in the core looks at it.
//! - [`store`]: the key-value board on which members of a job meet.

pub mod monitor;
pub mod store;

pub use monitor::{Departure, Monitor};
pub use store::{LocalStore, Store};
