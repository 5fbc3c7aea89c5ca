//! Pipelines: the order of computations and transfers on each rank, when a model is spread over ranks and a batch is
//! split into microbatches.
//!
//! ```text
//!   StageGraph ──> Graph ── schedule::plan ──> Program ── validate ──> executed
//!   (tasks in   (stages, edges,            (one list of              |
//!    stages)     microbatches)              actions per rank)          └─ simulate ──> Timeline: bubble, memory, picture
//! ```
//!
//! `operations` derives the stages for steps that are recorded as one graph with gradients.
//!
//! All types here are values, without processes or tensors. Every rank computes the same program by itself, so no
//! messages are needed to agree on it.
//!
//! - PIPE-1: there is one order of all actions of all ranks that respects every dependency, and each rank's list is
//!   its part of that order. So a program cannot deadlock, whatever its tasks and transfers cost.
//! - PIPE-2: messages between two ranks are sent and received in the same order, in each direction.
//! - PIPE-3: a program depends on the graph, the schedule and the bounds only, and not on a clock or the order of a
//!   hash map.
//! - PIPE-4: microbatches pass each stage in order, in forwards and backwards, so that gradients are always
//!   accumulated in the same order.

mod action;
mod draw;
mod graph;
pub mod operations;
mod program;
pub(crate) mod report;
pub mod schedule;
mod simulate;
mod stage_graph;
#[cfg(test)]
mod tests;
mod transfers;
mod validate;

pub use action::{Action, ActionKind};
pub use draw::{grid, svg};
pub use graph::{Costs, Edge, Graph, LinkCost, Stage, StagePlacement};
pub use program::Program;
pub use simulate::{TaskSpan, Timeline, simulate};
pub use stage_graph::{ProducedTensor, Section, StageGraph, Task};
pub use validate::validate;
