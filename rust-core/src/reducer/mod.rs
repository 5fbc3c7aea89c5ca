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
//! - RED-1: all ranks derive the same [`BucketPlan`] from the same parameters, and compare what they derive it from once,
//!   when the reducer is made ([`fingerprint`]). A difference is an error on every rank.
//! - RED-2: buckets are reduced in plan order, one after the other, on a communicator that nothing else uses while
//!   backward runs. So the order needs no messages, and a bucket that fails ends the step after the same number of
//!   operations on every rank.
//! - RED-3: a slot belongs to at most one tensor at a time ([`Arena`]). A slot that a tensor of the caller still
//!   refers to is never overwritten: that gradient takes the parameter's other slot. If that one is taken, too, or not all
//!   gradients of a bucket are in the same set of slots, the bucket is reduced by way of the spare range.
//! - RED-4: a step ends in one of two ways on every rank: all buckets are reduced, or an error names the rank that
//!   could not go on. Either way the next step starts afresh.
//! - RED-5: the plan is made anew once, after the first step, in the order in which rank 0 saw the gradients.
//! - RED-6: a parameter whose gradients are sparse has an empty slot: it is counted like any other, and what there is
//!   to exchange is exchanged between steps.
//! - RED-7: on a CUDA device, a bucket counts as reduced when its reduction is queued ([`Reducer::follow`] makes a stream
//!   wait for the values). The host of a rank does not wait for the others, so one that cannot go on before it has
//!   queued all buckets reduces no more: its next step raises, and what the others have under way ends with its name
//!   about a second later (CUDA-4). Gradients of graphs are kept, and count as reduced, until the device is done: their
//!   framework's one stream must not wait for communication.
//!
//! - RED-8: a step whose members need not all take part is a *round*: it begins with a vote ([`ballot`]), before whose end
//!   nothing is reduced. Whoever drives it says when it begins and when it ends; a backward may end in between.
//!
//! [`plan`], [`step`], [`history`], [`gradient_placement`] and [`op_placement`] are values without threads or memory; [`Reducer`] joins them to a
//! communicator. A framework that has a backward drives it (`begin` .. `finish`); where gradients come one by one from
//! the operations of a graph, [`arrival`] does, with a reducer for each [`spec`].

use crate::buffer::{DType, ReduceOp};
use crate::error::{Error, Result};

mod arena;
pub mod arrival;
pub mod ballot;
mod copy;
mod device_queue;
pub mod fingerprint;
pub mod gradient_placement;
pub mod history;
pub mod op_placement;
pub mod plan;
mod runner;
mod sizes;
pub mod spec;
mod state;
pub mod step;
#[cfg(test)]
mod tests;

pub use arena::{Arena, SlotLease};
pub use device_queue::DeviceBucket;
pub use plan::{Bucket, BucketPlan, Slot};
pub use runner::{Listener, Reducer, ReducerEvent};
pub use sizes::{bucket_bytes, bucket_sizes};
pub use state::Record;
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
    /// Whether its gradients are sparse. They take no part in buckets.
    pub sparse: bool,
    /// Whether it is reduced after all parameters that are not delayed, and may stay without a gradient.
    pub delayed: bool,
}

impl ParamSpec {
    /// A parameter with dense gradients, reduced as soon as they are there.
    pub fn dense(name: impl Into<String>, shape: impl Into<Vec<u64>>, dtype: DType) -> Self {
        Self { name: name.into(), shape: shape.into(), dtype, sparse: false, delayed: false }
    }

    /// Number of elements that its slot holds.
    pub fn elems(&self) -> usize {
        if self.sparse { 0 } else { self.shape.iter().product::<u64>() as usize }
    }

    /// Number of bytes of its slot.
    pub fn bytes(&self) -> usize {
        self.elems() * self.dtype.size()
    }
}

/// What happens to a full bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum BucketReduction {
    /// It becomes the average over the members, or their sum.
    Average,
    /// The same, but floating-point values wider than this type are rounded to it before they travel. The sum is
    /// still taken as COL-1 says, and rounded once more.
    Compressed(DType),
    /// The caller reduces it ([`Reducer::mark_ready`] says when) and tells ([`Reducer::reduced_by_caller`]).
    ByCaller,
}

impl std::fmt::Display for BucketReduction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Average => write!(f, "the average"),
            Self::Compressed(dtype) => write!(f, "the average in {dtype}"),
            Self::ByCaller => write!(f, "a hook's"),
        }
    }
}

/// What the caller chooses. All ranks choose the same.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ReducerOptions {
    /// Largest size of the first bucket, the second, and so on, in bytes; the last one is also that of all others. A
    /// parameter that is larger gets a bucket of its own. A small first bucket lets the reduction start early.
    pub bucket_bytes: Vec<usize>,
    /// Whether a parameter may stay without a gradient. It then counts as zero.
    pub find_unused_parameters: bool,
    /// Reduce in every n-th backward only; the others accumulate locally.
    pub accumulation_steps: u32,
    /// Whether every backward does what the first one did ([`history`]): a gradient may come in several parts, and
    /// parameters that get none are known.
    pub static_graph: bool,
    /// What happens to a full bucket.
    pub reduction: BucketReduction,
    /// Whether gradients are added up, instead of averaged.
    pub sum: bool,
    /// Names of parameters that never get a gradient. They are no part of the plan; ranks compare them.
    pub absent: Vec<String>,
    /// Whether gradients are on a CUDA device. Buckets then lie in memory of the caller, who packs and launches them
    /// with [`Reducer::launch`] when [`Reducer::mark_ready`] says that they are full; [`arrival`] does so by itself.
    pub on_device: bool,
}

impl ReducerOptions {
    /// 25 MiB: large enough that a reduction is bound by bandwidth, small enough to overlap.
    pub const DEFAULT_BUCKET_BYTES: usize = 25 << 20;
    /// The same on devices, where gradients of some size are reduced where they lie, so that a bucket is hardly any memory:
    /// few long reductions leave more of the device to the computation than many short ones.
    pub const DEFAULT_DEVICE_BUCKET_BYTES: usize = 100 << 20;
    /// 1 MiB.
    pub const DEFAULT_FIRST_BUCKET_BYTES: usize = 1 << 20;
    /// See [`ReducerOptions::sets_apart`].
    const APART_BYTES: usize = 1 << 20;

    fn check(&self) -> Result<()> {
        if self.bucket_bytes.is_empty() || self.bucket_bytes.contains(&0) || self.accumulation_steps == 0 {
            return Err(Error::InvalidArgument(format!(
                "a gradient reducer needs bucket sizes and a number of accumulation steps above zero, not {:?} and {}",
                self.bucket_bytes, self.accumulation_steps
            )));
        }
        if self.sum && self.reduction == BucketReduction::ByCaller {
            return Err(Error::Unsupported("gradients that a hook reduces are averaged, not added up".to_owned()));
        }
        match self.reduction {
            BucketReduction::Compressed(dtype) if !matches!(dtype, DType::Float16 | DType::BFloat16) => {
                Err(Error::InvalidArgument(format!("gradients are compressed to float16 or bfloat16, not to {dtype}")))
            }
            _ => Ok(()),
        }
    }

    /// Whether the caller does something for every full bucket.
    fn gives_buckets(&self) -> bool {
        self.on_device || self.reduction == BucketReduction::ByCaller
    }

    /// Whether the gradient of `param` is reduced where it lies, without a place in its bucket's memory: on a device,
    /// large ones, which cost more to copy than to name.
    pub fn sets_apart(&self, param: &ParamSpec) -> bool {
        self.on_device && self.reduction == BucketReduction::Average && param.bytes() >= Self::APART_BYTES
    }

    /// The largest size of a bucket that follows `full` others.
    fn cap_of(&self, full: usize) -> usize {
        self.bucket_bytes[full.min(self.bucket_bytes.len() - 1)]
    }

    /// Whether a parameter may stay without a gradient, so that ranks have to ask each other.
    fn may_leave_unused(&self) -> bool {
        self.find_unused_parameters || self.static_graph
    }

    /// How the members' values become one.
    fn op(&self) -> ReduceOp {
        if self.sum { ReduceOp::Sum } else { ReduceOp::Average }
    }

    /// What a bucket of `dtype` values travels as.
    pub fn wire_dtype(&self, dtype: DType) -> DType {
        match self.reduction {
            // The packing kernels cast 32-bit floats only.
            BucketReduction::Compressed(_) if self.on_device && dtype != DType::Float32 => dtype,
            BucketReduction::Compressed(wire) => copy::wire_dtype(dtype, wire),
            BucketReduction::Average | BucketReduction::ByCaller => dtype,
        }
    }
}

impl Default for ReducerOptions {
    fn default() -> Self {
        Self {
            bucket_bytes: vec![Self::DEFAULT_FIRST_BUCKET_BYTES, Self::DEFAULT_BUCKET_BYTES],
            find_unused_parameters: false,
            accumulation_steps: 1,
            static_graph: false,
            reduction: BucketReduction::Average,
            sum: false,
            absent: Vec::new(),
            on_device: false,
        }
    }
}
