//! Steps that come as one graph of operations, gradients and all, as TensorFlow makes them.
//!
//! ```text
//!   Operations ── place ──> Placement ── cut ──> Segments ── plan ──> orders
//!   (what takes what,       (where each          (what a rank          (of all ranks, run once
//!    layers, variables)      is computed)         computes at a time)   without computing)
//! ```
//!
//! A [`StageGraph`](super::StageGraph) has tasks, whose backward follows from them. Here backwards are operations like others, which anything
//! may take from, so they are cut as well. What is then scheduled is the same: a [`Graph`](super::Graph) of stages.
//!
//! - OPS-1: operations are numbered in an order in which they can be computed.
//! - OPS-2: all of this is a function of the operations, so every rank comes to the same, and knows what others send.

mod order;
mod place;
mod segments;
#[cfg(test)]
mod tests;

pub use place::{ModuleRanks, OperationPlace, OperationPlacement};
pub use segments::{ControlDependency, Segment, SegmentPhase, Segments, Signal, Transfer};

use crate::error::{Error, Result};

/// A result of an operation: the operation's number, and which of its results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Output {
    /// Who makes it.
    pub operation: usize,
    /// Which one.
    pub index: usize,
}

/// What a result is like.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResultSpec {
    /// Its type and shape, for people and for comparing.
    pub text: String,
    /// Its size; dimensions that are not known count as one.
    pub bytes: u64,
    /// Why it cannot pass between ranks: what kind of tensor it is.
    pub stays: Option<String>,
}

/// What an operation is to the cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OperationRole {
    /// Costs nothing and is computed wherever it is needed.
    Constant,
    /// Stands for what is given to the step.
    Input,
    /// Hands out what the model returns, to every rank.
    HandsOut,
    /// Any other.
    #[default]
    Computes,
}

/// One operation of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Operation {
    /// For messages.
    pub name: String,
    /// What it computes, for comparing.
    pub kind: String,
    /// See there.
    pub role: OperationRole,
    /// Results that it takes.
    pub takes: Vec<Output>,
    /// Operations whose effects it waits for.
    pub waits: Vec<usize>,
    /// Its results.
    pub makes: Vec<ResultSpec>,
    /// Variables that it takes.
    pub variables: Vec<usize>,
    /// Whether the model's call made it.
    pub inside: bool,
    /// The layer whose call made it, and the number of that call.
    pub layer: Option<(usize, usize)>,
    /// The partition that the script asks for.
    pub asked: Option<usize>,
    /// The operation whose gradient it is a part of, and whose gradient that one is a part of, and so on.
    pub gradient_of: Vec<usize>,
    /// When it was made, which may be after operations that take its results.
    pub made: usize,
    /// Whether it must run even if nobody takes its results.
    pub has_effect: bool,
    /// Whether it changes a variable.
    pub assigns: bool,
    /// Floating-point operations.
    pub flops: u64,
}

/// A variable that operations take.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Variable {
    /// What it is like, for messages.
    pub text: String,
    /// Its size.
    pub bytes: u64,
    /// Whether it binds a layer to a partition: the state of a random generator does not.
    pub binds: bool,
}

/// The operations and variables of one step's graph, in topological order.
#[derive(Clone, Debug, Default)]
pub struct Operations {
    operations: Vec<Operation>,
    variables: Vec<Variable>,
    takers: Vec<Vec<usize>>,
    given_later: Vec<bool>,
}

impl Operations {
    /// Of these operations and variables.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if an operation takes or waits for something that does not come before it (OPS-1), or there is no
    /// such result or variable.
    pub fn new(operations: Vec<Operation>, variables: Vec<Variable>) -> Result<Self> {
        let mut takers = vec![Vec::new(); operations.len()];
        for (number, operation) in operations.iter().enumerate() {
            let bad = |what: String| Err(Error::InvalidArgument(format!("`{}` {what}", operation.name)));
            for taken in &operation.takes {
                if taken.operation >= number || taken.index >= operations[taken.operation].makes.len() {
                    return bad(format!("takes result {} of operation {}", taken.index, taken.operation));
                }
                if takers[taken.operation].last() != Some(&number) {
                    takers[taken.operation].push(number);
                }
            }
            if let Some(other) = operation.waits.iter().find(|&&other| other >= number) {
                return bad(format!("waits for operation {other}, which comes after it"));
            }
            if let Some(other) = operation.gradient_of.iter().find(|&&other| other >= operations.len()) {
                return bad(format!("is a gradient of operation {other}, which does not exist"));
            }
            if let Some(other) = operation.variables.iter().find(|&&other| other >= variables.len()) {
                return bad(format!("takes variable {other}, which does not exist"));
            }
        }
        let mut found = Self { operations, variables, takers, given_later: Vec::new() };
        found.given_later = found.find_given_later();
        Ok(found)
    }

    /// All of them, in their order.
    pub fn all(&self) -> &[Operation] {
        &self.operations
    }

    /// The variables.
    pub fn variables(&self) -> &[Variable] {
        &self.variables
    }

    /// Operations that take a result of this one.
    pub fn takers(&self, operation: usize) -> &[usize] {
        &self.takers[operation]
    }

    /// Those that come before one: whose results it takes, and whose effects it waits for.
    pub fn before(&self, operation: usize) -> impl Iterator<Item = usize> + '_ {
        let operation = &self.operations[operation];
        operation.takes.iter().map(|taken| taken.operation).chain(operation.waits.iter().copied())
    }

    /// Whether it belongs to the model's forward: made in its call, or made for operations of it that were there before. The
    /// gradient of a loop has the loop keep what it needs, in lists that it gives it; they are computed with the loop.
    pub fn is_of_model(&self, operation: usize) -> bool {
        self.operations[operation].inside || self.given_later[operation]
    }

    fn find_given_later(&self) -> Vec<bool> {
        let mut found = vec![false; self.operations.len()];
        for (number, operation) in self.operations.iter().enumerate().rev() {
            found[number] = !operation.inside
                && operation.role != OperationRole::Input
                && self.takers[number].iter().any(|&taker| {
                    found[taker] || self.operations[taker].inside && self.operations[taker].made < operation.made
                });
        }
        found
    }

    /// Whether something is needed: those that `roots` depend on, themselves included.
    fn needed_by(&self, roots: impl IntoIterator<Item = usize>) -> Vec<bool> {
        let mut found = vec![false; self.operations.len()];
        let mut pending: Vec<usize> = roots.into_iter().collect();
        while let Some(operation) = pending.pop() {
            if !std::mem::replace(&mut found[operation], true) {
                pending.extend(self.before(operation));
            }
        }
        found
    }
}
