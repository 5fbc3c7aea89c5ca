//! Pipelines: which rank does what, in which order, when a model is spread over ranks and a batch is cut into
//! microbatches.
//!
//! ```text
//!   StageGraph ──> Graph ── schedule::plan ──> Program ── validate ──> executed
//!   (tasks in   (stages, edges,            (one list of              |
//!    stages)     microbatches)              actions a rank)          └─ simulate ──> Timeline: bubble, memory, picture
//! ```
//!
//! `operations` does the first part for steps that come as one graph, gradients and all.
//!
//! Everything here is a value: no process, no tensor. Every rank plans for itself and comes to the same program, so
//! nobody asks anybody for an order.
//!
//! - PIPE-1: a program is a projection of one order of all actions of all ranks that respects every dependency.
//!   So it cannot deadlock, whatever tasks and transfers cost when it is executed.
//! - PIPE-2: messages between two ranks are sent and received in the same order, in each direction.
//! - PIPE-3: a program is a function of the graph, the schedule and the bounds alone; no clock, no hash order.
//! - PIPE-4: microbatches pass each stage in order, forwards and backwards, so that gradients are always added up in
//!   the same order.

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
