//! OpenSMD's core: everything that decides.
//!
//! Data flows one way and back: script -> Python facade -> framework op -> `smd-bridge` -> this crate ->
//! transport. Nothing here knows PyTorch, TensorFlow or Python; a tensor is a [`buffer::TensorView`].
//!
//! | folder | what it answers |
//! | --- | --- |
//! | [`session`] | is the library initialised, and who owns the rest |
//! | [`world`] | who am I, who are my peers, who has died |
//! | [`transport`] | how bytes move |
//! | [`collectives`] | what a collective means, and which algorithm runs it |
//! | [`device`] | CUDA: streams, events, memory, kernels |
//! | [`negotiation`] | which collectives of the same name go together, and in what order |
//! | [`reducer`] | planned gradient reduction |
//! | [`pipeline`] | who does what in which order when a model is spread over ranks |
//! | [`partition`] | which module of a model lies on which of these ranks |
//! | [`sharding`] | which rank holds which part of sharded parameters and optimizer states |
//! | [`loss_scale`] | the factor of losses of 16-bit training |
//! | [`checkpoint`] | what is on the disk, complete whenever somebody is killed |
//! | [`launch`] | `smdrun` |

pub mod buffer;
pub mod cache;
pub mod checkpoint;
mod clock;
pub mod collectives;
pub mod config;
pub mod device;
pub mod error;
pub mod launch;
pub(crate) mod log;
pub mod loss_scale;
pub mod negotiation;
pub mod partition;
pub mod pipeline;
pub mod reducer;
pub mod session;
pub mod sharding;
pub mod smp_config;
mod streaming_copy;
mod sync;
pub mod trace;
pub mod transport;
pub mod world;

pub use error::{Error, Result};

/// The version of this package; all ranks of a job have the same.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
