//! OpenSMD's core, which contains all logic that is independent of a framework.
//!
//! Data flows one way and back: script -> Python facade -> framework op -> `smd-bridge` -> this crate ->
//! transport. Nothing here knows PyTorch, TensorFlow or Python; a tensor is a [`buffer::TensorView`].
//!
//! | folder | what it contains |
//! | --- | --- |
//! | [`session`] | the life of the library between `init` and `shutdown`; owns the other parts |
//! | [`world`] | ranks, groups, the rendezvous, and reports of departed ranks |
//! | [`transport`] | transports, which move bytes |
//! | [`collectives`] | the definition of collectives, and their algorithms |
//! | [`device`] | CUDA: streams, events, memory, kernels |
//! | [`negotiation`] | matching of collectives by name, and their common order |
//! | [`reducer`] | planned gradient reduction |
//! | [`pipeline`] | schedules of pipeline parallelism |
//! | [`partition`] | assignment of a model's modules to pipeline ranks |
//! | [`sharding`] | division of sharded parameters and optimizer states |
//! | [`chunk_trial`] | division of a product and the exchange of its result into chunks |
//! | [`loss_scale`] | the loss scale of 16-bit training |
//! | [`checkpoint`] | checkpoints that are complete or absent, whenever a process is killed |
//! | [`metrics`] | what each rank has done so far, in numbers |
//! | [`launch`] | `smdrun` |

pub mod buffer;
mod bulk_copy;
pub mod cache;
pub mod checkpoint;
pub mod chunk_trial;
mod clock;
pub mod collectives;
pub mod config;
pub mod device;
pub mod error;
pub mod launch;
pub(crate) mod log;
pub mod loss_scale;
pub mod metrics;
pub mod negotiation;
pub mod partition;
pub mod pipeline;
pub mod reducer;
pub mod session;
pub mod sharding;
pub mod smp_config;
mod sync;
pub mod trace;
pub mod transport;
mod trials;
pub mod world;

pub use error::{Error, Result};

/// The version of this package; it must be equal on all ranks of a job.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
