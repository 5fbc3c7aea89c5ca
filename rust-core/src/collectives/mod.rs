//! Collectives of a process group: what they mean, and the code that runs them.
//!
//! - COL-1: a reduction is the fold over ranks 0, 1, .. n-1 in the accumulation type of its element type (float32 for
//!   float16 and bfloat16, the type itself otherwise), rounded once at the end. Every algorithm keeps this order, so
//!   the result is bitwise the same on every rank, from run to run, and between algorithms. This includes several
//!   hosts: a host sends its partial result in the accumulation type, and the next host continues with it.
//! - COL-2: average divides the sum by the number of ranks in the accumulation type.
//! - COL-3: every member calls the same operations on a group in the same order. What they call is compared before
//!   data moves; a difference is [`crate::Error::Mismatch`] with the same text on every member, and the group
//!   stays usable.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use crate::buffer::{DType, ReduceOp, TensorView};
use crate::transport::hosts::Hosts;
use crate::transport::shm::SharedMemory;
use crate::transport::{Members, Transport, Wait};

mod agreement;
mod algorithms;
mod batch;
mod call;
mod call_exchange;
pub mod communicator;
mod cuda;
mod depth;
pub(crate) mod kernels;
mod paths;
mod point_to_point;
pub mod reference;
pub(crate) mod result_stores;
pub mod rows;
mod scratch;
mod stores;
pub mod window;

#[cfg(test)]
mod tests;

pub use batch::{BatchPhase, PhaseListener};
pub(crate) use call::{Call, Kind, views};
pub use communicator::{Communicator, Done};
pub(crate) use cuda::SplitColor;
use depth::DepthChooser;
use paths::{PathChooser, PathClass};
use result_stores::ResultStores;
pub use rows::MakeOutputs;
use scratch::ScratchMemory;
use stores::StoreChooser;
pub use window::Window;

/// Whether the device computes something else while a collective runs. NCCL may use more of the device if nothing does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overlap {
    /// A computation runs at the same time.
    Computation,
    /// Nothing runs: the next computation waits for the collective.
    Nothing,
    /// The caller does not know.
    Unknown,
}

/// One member's part in an operation of its group. Roots and peers are ranks inside the group. Counts and sizes are in
/// elements. Input and output may be the same memory (in place) where both have the same shape; otherwise they must not
/// overlap. All tensors of a request have one element type and lie on one device.
#[derive(Clone, Debug)]
pub enum Request {
    /// All-reduce: `output = op over ranks (input)`.
    AllReduce {
        /// n elements.
        input: TensorView,
        /// n elements.
        output: TensorView,
        /// The reduction.
        op: ReduceOp,
    },
    /// All-reduce with Adasum: orthogonal vectors are added, parallel ones averaged, and others combined to `(1 - ab /
    /// 2aa) a + (1 - ab / 2bb) b`. Ranks are combined in pairs, pairs in fours and so on, so the number of ranks must
    /// be a power of 2.
    Adasum {
        /// n floating-point elements.
        input: TensorView,
        /// n elements.
        output: TensorView,
    },
    /// As [`Request::AllReduce`], in place, over a range of each member's part of `window`. The members' offsets may
    /// differ. When it returns, no member reads or writes this member's range any more.
    AllReduceWindow {
        /// A window of this group, from [`Communicator::window`].
        window: Arc<Window>,
        /// The start of the range in this member's part, in bytes; a multiple of 64. Not compared across members.
        offset_bytes: usize,
        /// The length of the range, in elements.
        elems: usize,
        /// The element type.
        dtype: DType,
        /// The reduction.
        op: ReduceOp,
    },
    /// As [`Request::AllReduce`], but only `root` gets `output`.
    Reduce {
        /// n elements.
        input: TensorView,
        /// n elements on the root; empty elsewhere.
        output: TensorView,
        /// The reduction.
        op: ReduceOp,
        /// The member that gets the result.
        root: usize,
    },
    /// Broadcast: `data` of `root` on every member.
    Broadcast {
        /// n elements, in place.
        data: TensorView,
        /// The member whose data is sent.
        root: usize,
    },
    /// All-gather: rank i's input becomes block i of every output. Block i has `counts[i]` elements.
    AllGather {
        /// `counts[me]` elements.
        input: TensorView,
        /// Block i has `counts[i]` elements; blocks need not be adjacent.
        outputs: Vec<TensorView>,
    },
    /// As [`Request::AllGather`], but only `root` gets the outputs.
    Gather {
        /// This member's block.
        input: TensorView,
        /// One block for each member on the root; empty elsewhere.
        outputs: Vec<TensorView>,
        /// The member that gets the blocks.
        root: usize,
    },
    /// Scatter: block i of `root` becomes rank i's output.
    Scatter {
        /// One block for each member on the root; empty elsewhere.
        inputs: Vec<TensorView>,
        /// This member's block.
        output: TensorView,
        /// The member whose blocks are sent.
        root: usize,
    },
    /// Reduce-scatter: `output = op over ranks r (inputs[me] of r)`.
    ReduceScatter {
        /// One block for each member.
        inputs: Vec<TensorView>,
        /// As long as `inputs[me]`.
        output: TensorView,
        /// The reduction.
        op: ReduceOp,
    },
    /// All-to-all: block j of rank i becomes block i of rank j. Blocks may differ in size.
    AllToAll {
        /// Block j goes to rank j.
        inputs: Vec<TensorView>,
        /// Block i comes from rank i.
        outputs: Vec<TensorView>,
    },
    /// As [`Request::AllGather`], for rows whose number the other members do not know. Members exchange the numbers
    /// first, then allocate the outputs.
    AllGatherRows {
        /// `rows` rows.
        input: TensorView,
        /// The number of rows; rows may have no elements.
        rows: usize,
        /// Elements of one row; equal on all members.
        row_elems: usize,
        /// Allocates one output for each member.
        outputs: Arc<dyn MakeOutputs>,
    },
    /// As [`Request::AllToAll`], for rows: a member knows how many rows it sends, but not how many it receives.
    AllToAllRows {
        /// Block j, `rows[j]` rows, goes to rank j.
        inputs: Vec<TensorView>,
        /// The number of rows for each member.
        rows: Vec<usize>,
        /// Elements of one row; equal on all members.
        row_elems: usize,
        /// Allocates one output for each member.
        outputs: Arc<dyn MakeOutputs>,
    },
    /// Barrier: completes when every member has called it.
    Barrier,
    /// A message to one member; see [`Request::Recv`]. Not compared across members.
    Send {
        /// n elements.
        data: TensorView,
        /// The receiver.
        to: usize,
        /// The tag, equal to the receiver's.
        tag: u32,
    },
    /// A message from one member. Messages between two members under one tag arrive in order.
    Recv {
        /// n elements, as many as were sent.
        data: TensorView,
        /// The sender; `None` takes the next message with the tag from any member.
        from: Option<usize>,
        /// The tag, equal to the sender's.
        tag: u32,
    },
}

/// The properties of the group that a running operation uses.
pub(crate) struct Group<'a> {
    transport: &'a dyn Transport,
    /// Memory that all members share, if they are on one host.
    memory: Option<&'a SharedMemory>,
    /// The layout of ranks on hosts, and the memory that the members of this host share, if the group is on several
    /// hosts.
    hosts: Option<&'a Hosts>,
    members: &'a Members,
    /// By which path bytes get from one member to another.
    paths: &'a PathChooser,
    /// The class of the running operation, if its time is measured.
    timed_class: Cell<Option<PathClass>>,
    /// How long the running operation has waited until all members called it, if its time is measured.
    waited: Cell<Duration>,
    /// How members write the chunks that peers read.
    stores: &'a StoreChooser,
    /// How this member writes its results.
    results: &'a ResultStores,
    /// How many pieces this member has in flight between hosts.
    depths: &'a DepthChooser,
    /// Memory for values on their way between hosts.
    scratch: &'a ScratchMemory,
    wait: Wait<'a>,
    id: u64,
    /// The number of operations of the group before this one; equal on all members.
    operation: u64,
    /// Set if the operation has failed and all members are at the same place: the group stays usable.
    in_step: Cell<bool>,
}

impl Group<'_> {
    /// A name for the operation that is equal on all members.
    fn title(&self) -> String {
        format!("operation {} of group {}", self.operation, self.id)
    }

    /// The shared memory; for algorithms that accept only groups that have it.
    fn shared(&self) -> &SharedMemory {
        self.memory.expect("the algorithm accepted a group with shared memory")
    }

    /// The layout on hosts; for algorithms that accept only groups on several hosts.
    fn several_hosts(&self) -> &Hosts {
        self.hosts.expect("the algorithm accepted a group on several hosts")
    }
}
