//! Assigns the operations of a step to partitions.
//!
//! - PLACE-1: an operation of the model is on one partition: that of its layer, or the one that the script requests.
//! - PLACE-2: without either (a layer without variables, an operation between layers, a gradient), a gradient is
//!   where its forward operation is, and any other operation where its last operand is.
//! - PLACE-3: an operation without an operand on a partition is on all ranks: every rank that needs it computes it.
//!   The same holds for operations on the model's results, which every rank gets.
//! - PLACE-4: a variable is on the partition of the model's operations that use it; all of them are on one partition.
//!   The state of a random generator is where its first operation is, and its other operations are there, too; their
//!   results are small and are sent.
//! - PLACE-5: operations on all ranks (PLACE-3) must compute the same everywhere. So an operation of the model that
//!   draws random numbers, prints or calls Python is on the first partition instead, with its whole layer call.

use std::collections::BTreeMap;

use super::{OperationRole, Operations};
use crate::error::{Error, Result};

/// Where an operation is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OperationPlace {
    /// On any rank that needs it, because it costs nothing.
    Free,
    /// On every rank that needs it.
    All,
    /// On one partition.
    On(usize),
}

impl OperationPlace {
    /// The partition, if it is on one.
    pub fn partition(self) -> Option<usize> {
        match self {
            OperationPlace::On(partition) => Some(partition),
            OperationPlace::Free | OperationPlace::All => None,
        }
    }
}

/// Placements that are known before operations are assigned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModuleRanks {
    /// Partitions of layers; a layer without one is placed by its operations.
    pub layers: Vec<Option<usize>>,
    /// If the script places every operation: the partition of those for which it requests none.
    pub default: Option<usize>,
    /// Partitions of variables, where they are known.
    pub variables: Vec<Option<usize>>,
}

/// The place of every operation.
#[derive(Clone, Debug)]
pub struct OperationPlacement {
    places: Vec<OperationPlace>,
    /// For each operation, the number of changes of place on the longest path to it.
    levels: Vec<usize>,
    variables: Vec<Option<usize>>,
}

impl OperationPlacement {
    /// Assigns every operation to a place.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a variable would be on two partitions.
    pub fn new(operations: &Operations, homes: &ModuleRanks) -> Result<Self> {
        let mut variables = homes.variables.clone();
        variables.resize(operations.variables().len(), None);
        let mut found = Self { places: Vec::new(), levels: Vec::new(), variables };
        // Decided first, because the script may use the variable outside of the model before, such as for a penalty.
        for number in 0..operations.all().len() {
            if let Some(partition) = requested(operations, homes, number) {
                found.settle_variables(operations, number, partition)?;
            }
        }
        let mut calls: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (number, operation) in operations.all().iter().enumerate() {
            if let Some((_, call)) = operation.layer {
                calls.entry(call).or_default().push(number);
            }
        }
        let mut places_of_calls = BTreeMap::new();
        for number in 0..operations.all().len() {
            let place = found.choose(operations, homes, &calls, &mut places_of_calls, number);
            found.places.push(place);
            if let OperationPlace::On(partition) = place {
                found.settle_variables(operations, number, partition)?;
            }
            let before = operations.before(number);
            let levels = before.map(|other| found.levels[other] + found.changes(operations, other, number));
            let level = levels.max().unwrap_or(0);
            found.levels.push(level);
        }
        Ok(found)
    }

    /// The place of an operation.
    pub fn place(&self, operation: usize) -> OperationPlace {
        self.places[operation]
    }

    /// The number of changes of place on the longest path to an operation.
    pub fn level(&self, operation: usize) -> usize {
        self.levels[operation]
    }

    /// The place of each variable; all ranks if it is on no partition.
    pub fn variables(&self) -> &[Option<usize>] {
        &self.variables
    }

    /// Whether an operation is part of the model's forward and on one partition.
    pub fn is_forward(&self, operations: &Operations, operation: usize) -> bool {
        operations.is_of_model(operation) && self.places[operation].partition().is_some()
    }

    /// The number of changes of place, 0 or 1, from `before` to an operation that uses it. A forward operation after
    /// one that is not counts as a change, so that each stage is one segment.
    pub(super) fn changes(&self, operations: &Operations, before: usize, operation: usize) -> usize {
        let leaves = self.places[before] != self.places[operation]
            || self.is_forward(operations, operation) && !self.is_forward(operations, before);
        usize::from(self.places[before].partition().is_some() && leaves)
    }

    fn choose(
        &self,
        operations: &Operations,
        homes: &ModuleRanks,
        calls: &BTreeMap<usize, Vec<usize>>,
        places_of_calls: &mut BTreeMap<usize, OperationPlace>,
        number: usize,
    ) -> OperationPlace {
        let operation = &operations.all()[number];
        match operation.role {
            OperationRole::Constant => return OperationPlace::Free,
            OperationRole::Input | OperationRole::ModelResult => return OperationPlace::All,
            OperationRole::Computes => {}
        }
        let home = || operation.variables.iter().find_map(|&variable| self.variables[variable]);
        let draws = draws(operations, number);
        let requested = requested(operations, homes, number);
        if let Some(partition) = if draws { home().or(requested) } else { requested.or_else(home) } {
            return OperationPlace::On(partition);
        }
        if operation.in_model
            && let Some((_, call)) = operation.layer
        {
            // All operations of a layer call are in one place: that of the call's last operand.
            return *places_of_calls.entry(call).or_insert_with(|| {
                let taken = calls[&call].iter().flat_map(|&each| &operations.all()[each].inputs);
                let last = self.last(taken.map(|taken| taken.operation).filter(|&other| other < number));
                let varies = || calls[&call].iter().any(|&each| varies(operations, each));
                if last == OperationPlace::All && varies() { OperationPlace::On(0) } else { last }
            });
        }
        if operation.assigns && !(operation.in_model && draws) {
            // A variable that every rank has, such as that of a metric.
            return OperationPlace::All;
        }
        let known = |other: &&usize| self.places.get(**other).is_some_and(|place| place.partition().is_some());
        if let Some(&origin) = operation.gradient_of.iter().find(known) {
            return self.places[origin];
        }
        let operands = || operation.inputs.iter().map(|taken| taken.operation);
        let of_model = operands().filter(|&other| self.is_forward(operations, other));
        match (self.last(of_model), self.last(operands())) {
            (OperationPlace::On(partition), _) if !operation.in_model => OperationPlace::On(partition),
            (_, OperationPlace::All) if operation.in_model && varies(operations, number) => OperationPlace::On(0),
            (_, last) => last,
        }
    }

    /// The place of the operand at the highest level; the first of several.
    fn last(&self, operations: impl Iterator<Item = usize>) -> OperationPlace {
        let located = operations.filter(|&each| self.places[each].partition().is_some());
        let best = located.reduce(|best, each| if self.levels[each] > self.levels[best] { each } else { best });
        best.map_or(OperationPlace::All, |each| self.places[each])
    }

    /// Operations of random generators (PLACE-4).
    fn settle_variables(&mut self, operations: &Operations, number: usize, partition: usize) -> Result<()> {
        let operation = &operations.all()[number];
        for &variable in &operation.variables {
            let home = *self.variables[variable].get_or_insert(partition);
            if home != partition && operations.variables()[variable].binds {
                return Err(Error::InvalidArgument(format!(
                    "a variable of shape {} is used on partition {home} and by `{}` on partition {partition}: layers and \
                     operations that share a variable go to one partition",
                    operations.variables()[variable].text,
                    operation.name
                )));
            }
        }
        Ok(())
    }
}

/// Whether an operation uses a variable that does not bind a layer, such as the state of a random generator.
fn draws(operations: &Operations, number: usize) -> bool {
    operations.all()[number].variables.iter().any(|&variable| !operations.variables()[variable].binds)
}

/// Operations that must not run on several ranks (PLACE-5).
fn varies(operations: &Operations, number: usize) -> bool {
    let operation = &operations.all()[number];
    draws(operations, number) || operation.has_effect && !operation.assigns
}

/// Operations of layers with a partition (PLACE-1).
fn requested(operations: &Operations, homes: &ModuleRanks, number: usize) -> Option<usize> {
    let operation = &operations.all()[number];
    match (operation.in_model, homes.default, operation.layer) {
        (false, _, _) => None,
        (true, Some(default), _) => Some(operation.requested.unwrap_or(default)),
        (true, None, Some((layer, _))) => homes.layers.get(layer).copied().flatten(),
        (true, None, None) => None,
    }
}
