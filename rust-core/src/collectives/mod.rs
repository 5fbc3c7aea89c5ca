//! What a collective means.
//!
//! - COL-1: a reduction is the fold over ranks 0, 1, .. n-1 in the accumulation type of its element type
//!   (float32 for float16 and bfloat16, the type itself otherwise), rounded once at the end. Every algorithm keeps
//!   this order, so the result is bitwise the same on every rank, from run to run, and between algorithms. That holds on
//!   several hosts too: what a host has folded travels in the accumulation type, and the next host takes the fold up.
//! - COL-2: average divides the sum by the number of ranks in the accumulation type.
//! - COL-3: every member calls the same operations on a group in the same order. What they call is compared before
//!   data moves; a difference is [`crate::Error::Mismatch`] with the same text on every member, and the group
//!   stays usable.

use std::cell::Cell;
use std::sync::Arc;

use crate::buffer::{DType, ReduceOp, TensorView};
use crate::streaming_copy::Publisher;
use crate::transport::hosts::Hosts;
use crate::transport::shm::SharedMemory;
use crate::transport::{Members, Transport, Wait};

mod agreement;
mod algorithms;
mod batch;
mod call;
pub mod communicator;
mod cuda;
pub(crate) mod kernels;
mod point_to_point;
pub mod reference;
pub mod rows;
pub mod window;

#[cfg(test)]
mod tests;

pub use batch::{BatchPhase, PhaseListener};
pub(crate) use call::{Call, Kind, views};
pub use communicator::{Communicator, Done};
pub(crate) use cuda::Side;
pub use rows::MakeOutputs;
pub use window::Window;

/// What the device computes while a collective runs. It decides how much of the device the collective may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overlap {
    /// A computation.
    Computation,
    /// Nothing: what comes next waits for the operation.
    Nothing,
    /// The caller of the operation does not say.
    Unknown,
}

/// One member's part in an operation of its group. Roots and peers are ranks inside the group; counts and sizes are
/// in elements. Input and output may be the same memory (in place) where both have the same shape; they must not
/// overlap otherwise.
#[derive(Clone, Debug)]
pub enum Request {
    /// `output = op over ranks (input)`.
    AllReduce {
        /// n elements.
        input: TensorView,
        /// n elements.
        output: TensorView,
        /// How.
        op: ReduceOp,
    },
    /// As [`Request::AllReduce`], where vectors are added that are orthogonal, averaged that are parallel, and mixed
    /// otherwise: of `a` and `b`, `(1 - ab / 2aa) a + (1 - ab / 2bb) b`. Ranks are combined in pairs, pairs in fours and so
    /// on, so there is a power of 2 of them.
    Adasum {
        /// n floats.
        input: TensorView,
        /// n elements.
        output: TensorView,
    },
    /// As [`Request::AllReduce`], in place, over a range of each member's part of `window`. Every member says where
    /// its own range starts, and these offsets may differ: a member whose usual place is taken uses another one.
    /// When it returns, nobody reads or writes this member's range any more.
    AllReduceWindow {
        /// Made by [`Communicator::window`] of this group.
        window: Arc<Window>,
        /// Start of this member's range in its own part, in bytes; a multiple of 64. Not compared across members.
        offset_bytes: usize,
        /// Length of the range.
        elems: usize,
        /// Element type.
        dtype: DType,
        /// How.
        op: ReduceOp,
    },
    /// As [`Request::AllReduce`], but only `root` gets `output`.
    Reduce {
        /// n elements.
        input: TensorView,
        /// n elements on the root; empty elsewhere.
        output: TensorView,
        /// How.
        op: ReduceOp,
        /// Who gets the result.
        root: usize,
    },
    /// `data` of `root` everywhere.
    Broadcast {
        /// n elements, in place.
        data: TensorView,
        /// Whose.
        root: usize,
    },
    /// Rank i's input becomes block i of every output. Blocks may differ in size: `counts[i]` elements.
    AllGather {
        /// `counts[me]` elements.
        input: TensorView,
        /// Block i, `counts[i]` elements, for every member; blocks need not be adjacent.
        outputs: Vec<TensorView>,
    },
    /// As [`Request::AllGather`], but only `root` gets the outputs.
    Gather {
        /// This rank's block.
        input: TensorView,
        /// One block a member on the root; empty elsewhere.
        outputs: Vec<TensorView>,
        /// Who gets them.
        root: usize,
    },
    /// Block i of `root` becomes rank i's output.
    Scatter {
        /// One block a member on the root; empty elsewhere.
        inputs: Vec<TensorView>,
        /// This rank's block.
        output: TensorView,
        /// Whose.
        root: usize,
    },
    /// `output = op over ranks r (inputs[me] of r)`.
    ReduceScatter {
        /// One block a member.
        inputs: Vec<TensorView>,
        /// As long as `inputs[me]`.
        output: TensorView,
        /// How.
        op: ReduceOp,
    },
    /// Block j of rank i becomes block i of rank j. Blocks may differ in size.
    AllToAll {
        /// Block j goes to rank j.
        inputs: Vec<TensorView>,
        /// Block i comes from rank i.
        outputs: Vec<TensorView>,
    },
    /// As [`Request::AllGather`], of rows, where a member knows how many it has and not how many the others have: the
    /// members tell each other first, and the outputs are made then.
    AllGatherRows {
        /// `rows` rows.
        input: TensorView,
        /// Any number, also of rows that have no elements.
        rows: usize,
        /// Elements of one; the same on all members.
        row_elems: usize,
        /// Makes the memory for everybody's rows.
        outputs: Arc<dyn MakeOutputs>,
    },
    /// As [`Request::AllToAll`], of rows, where a member knows what it sends and not what it gets.
    AllToAllRows {
        /// Block j, `rows[j]` rows, goes to rank j.
        inputs: Vec<TensorView>,
        /// Any numbers.
        rows: Vec<usize>,
        /// Elements of one row; the same on all members.
        row_elems: usize,
        /// Makes the memory for what comes.
        outputs: Arc<dyn MakeOutputs>,
    },
    /// Returns when every member has called it.
    Barrier,
    /// A message to one member; see [`Request::Recv`]. Not compared across ranks.
    Send {
        /// n elements.
        data: TensorView,
        /// To whom.
        to: usize,
        /// Matches the receiver's.
        tag: u32,
    },
    /// A message from one member. Messages of one pair and tag arrive in order.
    Recv {
        /// n elements, as many as were sent.
        data: TensorView,
        /// From whom; `None` takes the next message with the tag from anybody.
        from: Option<usize>,
        /// Matches the sender's.
        tag: u32,
    },
}

/// What one running operation needs to know of its group.
pub(crate) struct Group<'a> {
    transport: &'a dyn Transport,
    /// Memory that all members see, if the transport has it.
    memory: Option<&'a SharedMemory>,
    /// Who is where, and the memory that the members of this host see, if the members are on several.
    hosts: Option<&'a Hosts>,
    members: &'a Members,
    publisher: &'a Publisher,
    wait: Wait<'a>,
    id: u64,
    /// Operations of the group before this one; the same on all members.
    operation: u64,
    /// All members are at the same place although the operation failed: the group can go on.
    in_step: Cell<bool>,
}

impl Group<'_> {
    /// A name for the operation that is the same on all members.
    fn title(&self) -> String {
        format!("operation {} of group {}", self.operation, self.id)
    }

    /// For algorithms that accept only groups with shared memory.
    fn shared(&self) -> &SharedMemory {
        self.memory.expect("the algorithm accepted a group with shared memory")
    }

    /// For algorithms that accept only groups on several hosts.
    fn several_hosts(&self) -> &Hosts {
        self.hosts.expect("the algorithm accepted a group on several hosts")
    }
}
