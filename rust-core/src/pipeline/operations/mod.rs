//! Steps that are recorded as one graph of operations, including gradients, as TensorFlow records them.
//!
//! ```text
//!   Operations ── place ──> Placement ── cut ──> Segments ── plan ──> orders
//!   (inputs,                 (where each          (what a rank          (of all ranks, run once
//!    layers, variables)      is computed)         computes at a time)   without computing)
//! ```
//!
//! A [`StageGraph`](super::StageGraph) has tasks, from which their backwards follow. Here, backwards consist of
//! ordinary operations, which any other operation may use, so they are divided into segments as well. The result is
//! scheduled in the same way: as a [`Graph`](super::Graph) of stages.
//!
//! - OPS-1: operations are numbered in topological order.
//! - OPS-2: all results depend on the operations only, so every rank computes the same ones and knows what the others
//!   send.

mod order;
mod place;
mod segments;
#[cfg(test)]
mod tests;

pub use place::{ModuleRanks, OperationPlace, OperationPlacement};
pub use segments::{ControlDependency, Segment, SegmentPhase, Segments, Signal, Transfer};

use crate::error::{Error, Result};

/// A result of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Output {
    /// Number of the operation.
    pub operation: usize,
    /// Index of the result among the operation's results.
    pub index: usize,
}

/// Properties of a result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResultSpec {
    /// Type and shape as text, for messages and comparison.
    pub text: String,
    /// Size in bytes; unknown dimensions count as one.
    pub bytes: u64,
    /// Why it cannot be sent between ranks (its kind of tensor); `None` if it can.
    pub not_transferable: Option<String>,
}

/// The kind of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OperationRole {
    /// Costs nothing and is computed wherever it is needed.
    Constant,
    /// A placeholder for an argument of the step.
    Input,
    /// Returns the model's result on every rank.
    ModelResult,
    /// Any other operation.
    #[default]
    Computes,
}

/// One operation of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Operation {
    /// Name for messages.
    pub name: String,
    /// Description of the computation, for comparison.
    pub kind: String,
    /// Kind.
    pub role: OperationRole,
    /// Results that it uses.
    pub inputs: Vec<Output>,
    /// Control dependencies: operations whose effects it waits for.
    pub control_inputs: Vec<usize>,
    /// Results.
    pub outputs: Vec<ResultSpec>,
    /// Variables that it uses.
    pub variables: Vec<usize>,
    /// Whether the model's call created it.
    pub in_model: bool,
    /// The layer whose call created it, and the number of that call.
    pub layer: Option<(usize, usize)>,
    /// The partition that the script requests for it.
    pub requested: Option<usize>,
    /// For an operation of a backward: the operation whose gradient it is a part of. That may itself be part of a
    /// gradient, so this is a chain.
    pub gradient_of: Vec<usize>,
    /// Position in the order of creation, which may be after operations that use its results.
    pub created: usize,
    /// Whether it must run even if no operation uses its results.
    pub has_effect: bool,
    /// Whether it changes a variable.
    pub assigns: bool,
    /// Number of floating-point operations.
    pub flops: u64,
}

/// A variable that operations use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Variable {
    /// Description for messages.
    pub text: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Whether it binds a layer to a partition; the state of a random generator does not.
    pub binds: bool,
}

/// The operations and variables of one step's graph, in topological order.
#[derive(Clone, Debug, Default)]
pub struct Operations {
    operations: Vec<Operation>,
    variables: Vec<Variable>,
    consumers: Vec<Vec<usize>>,
    given_later: Vec<bool>,
}

impl Operations {
    /// A step of these operations and variables.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if an operation uses or waits for one that does not come before it (OPS-1), or
    /// names a result or variable that does not exist.
    pub fn new(operations: Vec<Operation>, variables: Vec<Variable>) -> Result<Self> {
        let mut consumers = vec![Vec::new(); operations.len()];
        for (number, operation) in operations.iter().enumerate() {
            let bad = |what: String| Err(Error::InvalidArgument(format!("`{}` {what}", operation.name)));
            for taken in &operation.inputs {
                if taken.operation >= number || taken.index >= operations[taken.operation].outputs.len() {
                    return bad(format!("takes result {} of operation {}", taken.index, taken.operation));
                }
                if consumers[taken.operation].last() != Some(&number) {
                    consumers[taken.operation].push(number);
                }
            }
            if let Some(other) = operation.control_inputs.iter().find(|&&other| other >= number) {
                return bad(format!("waits for operation {other}, which comes after it"));
            }
            if let Some(other) = operation.gradient_of.iter().find(|&&other| other >= operations.len()) {
                return bad(format!("is a gradient of operation {other}, which does not exist"));
            }
            if let Some(other) = operation.variables.iter().find(|&&other| other >= variables.len()) {
                return bad(format!("takes variable {other}, which does not exist"));
            }
        }
        let mut found = Self { operations, variables, consumers, given_later: Vec::new() };
        found.given_later = found.find_given_later();
        Ok(found)
    }

    /// All operations, in their order.
    pub fn all(&self) -> &[Operation] {
        &self.operations
    }

    /// The variables.
    pub fn variables(&self) -> &[Variable] {
        &self.variables
    }

    /// Operations that use a result of this one.
    pub fn consumers(&self, operation: usize) -> &[usize] {
        &self.consumers[operation]
    }

    /// Operations that must come before one: those whose results it uses and those whose effects it waits for.
    pub fn before(&self, operation: usize) -> impl Iterator<Item = usize> + '_ {
        let operation = &self.operations[operation];
        operation.inputs.iter().map(|taken| taken.operation).chain(operation.control_inputs.iter().copied())
    }

    /// Whether it belongs to the model's forward: it was created in the model's call, or added later for operations
    /// of that call. The latter are lists in which a loop saves values for its gradient; they are computed with the
    /// loop.
    pub fn is_of_model(&self, operation: usize) -> bool {
        self.operations[operation].in_model || self.given_later[operation]
    }

    fn find_given_later(&self) -> Vec<bool> {
        let mut found = vec![false; self.operations.len()];
        for (number, operation) in self.operations.iter().enumerate().rev() {
            found[number] = !operation.in_model
                && operation.role != OperationRole::Input
                && self.consumers[number].iter().any(|&consumer| {
                    found[consumer]
                        || self.operations[consumer].in_model && self.operations[consumer].created < operation.created
                });
        }
        found
    }

    /// For each operation, whether `roots` depend on it, including the roots themselves.
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
