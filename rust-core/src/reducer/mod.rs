//! Planned gradient reduction: what DistributedDataParallel and DistributedGradientTape share.
//!
//! ```text
//! parameters --plan--> buckets        one window of shared memory holds a slot for every parameter:
//!
//!   window   | bucket 0            | bucket 1                     | ...  | spare |
//!            | slot  | slot  |pad  | slot | slot | slot    |pad   |      |       |
//!
//! backward:  gradient ready -> its slot (often it was made there) -> bucket full -> all-reduce in place -> done
//! ```
//!
//! - RED-1: all ranks derive the same [`Plan`] from the same parameters, and compare what they derive it from once,
//!   when the reducer is made ([`fingerprint`]). A difference is an error on every rank.
//! - RED-2: buckets are reduced in plan order, one after the other, on a communicator that nothing else uses while
//!   backward runs. So the order needs no messages, and a bucket that fails ends the step after the same number of
//!   operations on every rank.
//! - RED-3: a slot belongs to at most one tensor at a time ([`Arena`]). A slot that a tensor of the caller still
//!   refers to is never overwritten: that gradient is reduced by way of the spare range instead.
//! - RED-4: a step ends in one of two ways on every rank: all buckets are reduced, or an error names the rank that
//!   could not go on. Either way the next step starts afresh.
//! - RED-5: the plan is made anew once, after the first step, in the order in which rank 0 saw the gradients.
//!
//! [`plan`], [`step`] and [`lending`] are values without threads or memory; [`Reducer`] joins them to a communicator.

use crate::buffer::DType;

mod arena;
mod copy;
pub mod fingerprint;
pub mod lending;
pub mod plan;
mod runner;
pub mod step;
#[cfg(test)]
mod tests;

pub use arena::{Arena, SlotLease};
pub use plan::{Bucket, Plan, Slot};
pub use runner::Reducer;
pub use step::Step;

/// What the plan needs to know of a parameter.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ParamSpec {
    /// Its name, for messages.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its element type.
    pub dtype: DType,
}

impl ParamSpec {
    /// Number of elements.
    pub fn elems(&self) -> usize {
        self.shape.iter().product::<u64>() as usize
    }

    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.elems() * self.dtype.size()
    }
}

/// What the caller chooses. All ranks choose the same.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Options {
    /// Largest bucket, in bytes. A parameter that is larger gets a bucket of its own.
    pub bucket_bytes: usize,
    /// Largest first bucket, in bytes: a small one lets the reduction start early.
    pub first_bucket_bytes: usize,
    /// Whether a parameter may stay without a gradient. It then counts as zero.
    pub find_unused_parameters: bool,
    /// Reduce in every n-th backward only; the others accumulate locally.
    pub accumulation_steps: u32,
}

impl Options {
    /// 25 MiB: large enough that a reduction is bound by bandwidth, small enough to overlap.
    pub const DEFAULT_BUCKET_BYTES: usize = 25 << 20;
    /// 1 MiB.
    pub const DEFAULT_FIRST_BUCKET_BYTES: usize = 1 << 20;
}

impl Default for Options {
    fn default() -> Self {
        Self {
            bucket_bytes: Self::DEFAULT_BUCKET_BYTES,
            first_bucket_bytes: Self::DEFAULT_FIRST_BUCKET_BYTES,
            find_unused_parameters: false,
            accumulation_steps: 1,
        }
    }
}
