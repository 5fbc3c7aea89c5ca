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
//! - RED-1: all ranks derive the same [`BucketPlan`] from the same parameters. They compare the inputs once, when the
//!   reducer is created ([`fingerprint`]). A difference is an error on every rank.
//! - RED-2: buckets are reduced in plan order, one after the other, on a communicator without other users during
//!   backward. So the order needs no messages, and a failed bucket ends the step after the same number of operations on
//!   every rank.
//! - RED-3: a slot belongs to at most one tensor at a time ([`Arena`]). A slot that a tensor of the caller refers to is
//!   never overwritten: the gradient takes the parameter's other slot. If that one is in use, too, or a bucket's
//!   gradients are in different sets of slots, the bucket is reduced in the spare range.
//! - RED-4: a step ends in one of two ways on every rank: all buckets are reduced, or an error names the rank that
//!   could not continue. Either way the next step is independent of it.
//! - RED-5: the plan is rebuilt once, after the first step, in the order in which rank 0's gradients arrived.
//! - RED-6: a parameter with sparse gradients has an empty slot. It is counted like any other, and its gradients are
//!   exchanged between steps.
//! - RED-7: on a CUDA device, a bucket counts as reduced when its reduction is queued ([`Reducer::follow`] makes a
//!   stream wait for the values). A rank's host does not wait for the other ranks. If a rank cannot continue before it
//!   has queued all buckets, its reducer reduces no more: its next step raises an error, and the others' reductions end
//!   about a second later with an error that names this rank (CUDA-4). Gradients of graphs count as reduced when the
//!   device has completed the reduction, because the framework's one stream must not wait for communication.
//! - RED-8: a *round* is a step that its caller begins and ends; a backward may end in between. If members need not all
//!   take part, it begins with a vote ([`ballot`]), before whose result nothing is reduced. On a device, full buckets
//!   are packed before the result, which changes no gradient's values, and `vote_gate` holds their reductions.
//!
//! [`plan`], [`step`], [`history`], `vote_gate`, [`gradient_placement`] and [`op_placement`] are values without threads
//! or memory; [`Reducer`] connects them with a communicator. A framework with a backward drives it (`begin` ..
//! `finish`). Where the operations of a graph produce gradients one by one, [`arrival`] drives it, with one reducer for
//! each [`spec`].

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
mod vote_gate;

pub use arena::{Arena, SlotLease};
pub use device_queue::DeviceBucket;
pub use plan::{Bucket, BucketPlan, Slot};
pub use runner::{Listener, Reducer, ReducerEvent};
pub use sizes::{bucket_bytes, bucket_sizes};
pub use state::Record;
pub use step::Step;

/// The properties of a parameter that the plan depends on.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ParamSpec {
    /// The name, for messages.
    pub name: String,
    /// The shape.
    pub shape: Vec<u64>,
    /// The element type.
    pub dtype: DType,
    /// Whether its gradients are sparse. Sparse gradients are not in buckets.
    pub sparse: bool,
    /// Whether it is reduced after all other parameters and may stay without a gradient.
    pub delayed: bool,
}

impl ParamSpec {
    /// A parameter with dense gradients that is not delayed.
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

/// How a full bucket is reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum BucketReduction {
    /// Averaged over the members, or summed ([`ReducerOptions::sum`]).
    Average,
    /// Averaged or summed after wider floating-point elements are rounded to this type. The sum follows COL-1 and is
    /// rounded once more.
    Compressed(DType),
    /// Reduced by the caller: [`Reducer::mark_ready`] returns full buckets to it, and it reports the reduced ones with
    /// [`Reducer::reduced_by_caller`].
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

/// The options of a reducer; equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ReducerOptions {
    /// The largest sizes of the first bucket, the second, and so on, in bytes; the last one is also that of all further
    /// buckets. A larger parameter gets a bucket of its own. A small first bucket lets the reduction start early.
    pub bucket_bytes: Vec<usize>,
    /// Whether a parameter may stay without a gradient, which then counts as zero.
    pub find_unused_parameters: bool,
    /// Reduces every n-th backward only; the others accumulate locally.
    pub accumulation_steps: u32,
    /// Whether every backward repeats the first one ([`history`]). A gradient may then arrive in several parts, and the
    /// unused parameters are known.
    pub static_graph: bool,
    /// How a full bucket is reduced.
    pub reduction: BucketReduction,
    /// Whether gradients are summed instead of averaged.
    pub sum: bool,
    /// Names of parameters that never get a gradient. They are not in the plan, but ranks compare them.
    pub absent: Vec<String>,
    /// Whether gradients are on a CUDA device. Buckets then lie in the caller's memory; the caller packs and launches
    /// them with [`Reducer::launch`] when [`Reducer::mark_ready`] returns them. [`arrival`] does so by itself.
    pub on_device: bool,
}

impl ReducerOptions {
    /// 25 MiB: large enough to be bound by bandwidth, small enough to overlap.
    pub const DEFAULT_BUCKET_BYTES: usize = 25 << 20;
    /// The same on devices. Large gradients are reduced in place there, so a bucket needs little memory, and few long
    /// reductions leave more of the device to the computation than many short ones.
    pub const DEFAULT_DEVICE_BUCKET_BYTES: usize = 100 << 20;
    /// 1 MiB: the first reduction starts early.
    pub const DEFAULT_FIRST_BUCKET_BYTES: usize = 1 << 20;
    /// The smallest gradient that is reduced in place ([`ReducerOptions::reduces_in_place`]).
    const IN_PLACE_BYTES: usize = 1 << 20;

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

    /// Whether [`Reducer::mark_ready`] returns full buckets to the caller.
    fn gives_buckets(&self) -> bool {
        self.on_device || self.reduction == BucketReduction::ByCaller
    }

    /// Whether [`Reducer::launch`] reduces full buckets.
    fn reduces_on_device(&self) -> bool {
        self.on_device && self.reduction != BucketReduction::ByCaller
    }

    /// Whether the gradient of `param` is reduced in place, outside of its bucket's memory. This is so for large
    /// gradients on a device, where a copy costs more than another entry in the reduction.
    pub fn reduces_in_place(&self, param: &ParamSpec) -> bool {
        self.on_device && self.reduction == BucketReduction::Average && param.bytes() >= Self::IN_PLACE_BYTES
    }

    /// The largest size, in bytes, of the bucket after `full` others.
    fn cap_of(&self, full: usize) -> usize {
        self.bucket_bytes[full.min(self.bucket_bytes.len() - 1)]
    }

    /// Whether a parameter may stay without a gradient, so that ranks must exchange which are used.
    fn may_leave_unused(&self) -> bool {
        self.find_unused_parameters || self.static_graph
    }

    /// The reduction of gradients.
    fn op(&self) -> ReduceOp {
        if self.sum { ReduceOp::Sum } else { ReduceOp::Average }
    }

    /// The element type in which a bucket of `dtype` elements is reduced.
    pub fn wire_dtype(&self, dtype: DType) -> DType {
        match self.reduction {
            // The packing kernels cast float32 only.
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
