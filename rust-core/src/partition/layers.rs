//! Partitions the layers of a traced step, by the costs of their operations.
//!
//! A layer takes part if operations use a variable of it. An operation without a layer counts for the layer that
//! computed the newest of its operands, because it runs there.

use std::collections::{BTreeMap, BTreeSet};

use super::{CostTree, DeviceModel, ModuleCost, Objective, Value, kept_microbatches, partition, table};
use crate::error::{Error, Result};
use crate::pipeline::operations::{Operations, Output};
use crate::pipeline::schedule::Schedule;

const DEVICE: DeviceModel = DeviceModel::PROCESSOR;

/// The parameters of a partition.
#[derive(Clone, Copy, Debug)]
pub struct PartitionRequest {
    /// Number of partitions.
    pub partitions: usize,
    /// The weight of memory, from 0 to 1; the weight of time is 1 minus this.
    pub memory_weight: f64,
    /// Number of microbatches of a step.
    pub microbatches: u64,
    /// Number of microbatches that may be in progress.
    pub active_microbatches: Option<u64>,
    /// The schedule; schedules differ in the number of microbatches whose activations they keep.
    pub schedule: Schedule,
}

/// Partitions the layers with the paths `layers`, in the order of their first calls. Returns the partition of each
/// layer that has variables, and a table.
///
/// # Errors
/// [`Error::InvalidArgument`] if there are no layers, or the parameters are invalid.
pub fn partition_layers(
    operations: &Operations,
    layers: &[String],
    request: PartitionRequest,
) -> Result<(Vec<Option<u32>>, String)> {
    let costs = ModuleCosts::of(operations, layers.len());
    if costs.modules.iter().all(Option::is_none) && request.partitions > 1 {
        return Err(Error::InvalidArgument(
            "no layer of the model has variables: there is nothing to partition".to_owned(),
        ));
    }
    let tree = costs.tree(operations, layers)?;
    let kept =
        kept_microbatches(request.partitions, request.microbatches, request.active_microbatches, request.schedule);
    let objective = Objective::new(request.memory_weight, kept, DEVICE.link)?;
    let assignment = partition(&tree, request.partitions, &objective)?.assignment;
    let table = table(&tree, &assignment, &objective);
    Ok((costs.modules.iter().map(|module| module.map(|module| assignment[module])).collect(), table))
}

/// Sums over the operations of each module. Module 0 is the model and has no operations.
struct ModuleCosts {
    /// For each layer that takes part, its module.
    modules: Vec<Option<usize>>,
    own: Vec<BTreeSet<usize>>,
    flops: Vec<u64>,
    kept: Vec<u64>,
    first_run: Vec<Option<u64>>,
    values: BTreeMap<Output, (usize, BTreeSet<usize>)>,
}

impl ModuleCosts {
    fn of(operations: &Operations, layers: usize) -> Self {
        let mut taken = vec![BTreeSet::new(); layers];
        for operation in operations.all() {
            if let Some((layer, _)) = operation.layer
                && operation.variables.iter().any(|&variable| operations.variables()[variable].binds)
            {
                taken[layer].extend(operation.variables.iter().copied());
            }
        }
        let mut count = 0;
        let modules: Vec<Option<usize>> = (taken.iter())
            .map(|variables| {
                (!variables.is_empty()).then(|| {
                    count += 1;
                    count
                })
            })
            .collect();
        let own = std::iter::once(BTreeSet::new()).chain(taken.into_iter().filter(|own| !own.is_empty())).collect();
        let mut found = Self {
            modules,
            own,
            flops: vec![0; count + 1],
            kept: vec![0; count + 1],
            first_run: vec![None; count + 1],
            values: BTreeMap::new(),
        };
        found.count(operations);
        found
    }

    fn count(&mut self, operations: &Operations) {
        let mut owners: Vec<Option<usize>> = vec![None; operations.all().len()];
        for (number, operation) in operations.all().iter().enumerate().filter(|(_, operation)| operation.in_model) {
            let layer = operation.layer.and_then(|(layer, _)| self.modules[layer]);
            let producers = operation.inputs.iter().filter_map(|taken| owners[taken.operation]);
            let newest =
                || producers.reduce(|best, each| if self.first_run[each] > self.first_run[best] { each } else { best });
            let Some(module) = layer.or_else(newest) else { continue };
            owners[number] = Some(module);
            self.first_run[module].get_or_insert(number as u64);
            // The backward is estimated at twice the time of the forward.
            self.flops[module] += 3 * operation.flops;
            for &taken in &operation.inputs {
                if let Some(producer) = owners[taken.operation].filter(|&producer| producer != module) {
                    self.values.entry(taken).or_insert((producer, BTreeSet::new())).1.insert(module);
                }
            }
            for (index, result) in operation.outputs.iter().enumerate() {
                let output = Output { operation: number, index };
                let mut consumers = operations.consumers(number).iter().map(|&consumer| &operations.all()[consumer]);
                if consumers.any(|consumer| !consumer.in_model && consumer.inputs.contains(&output)) {
                    self.kept[module] += result.bytes;
                }
            }
        }
    }

    fn tree(&self, operations: &Operations, layers: &[String]) -> Result<CostTree> {
        let mut sharers: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (module, variables) in self.own.iter().enumerate() {
            variables.iter().for_each(|&variable| sharers.entry(variable).or_default().push(module));
        }
        let mut parameter_bytes = vec![0; self.own.len()];
        for (&variable, modules) in &sharers {
            parameter_bytes[modules[0]] += operations.variables()[variable].bytes;
        }
        let mut modules = vec![ModuleCost::default()];
        for (path, module) in layers.iter().zip(&self.modules) {
            let Some(module) = *module else { continue };
            modules.push(ModuleCost {
                path: path.clone(),
                parent: Some(0),
                parameter_bytes: parameter_bytes[module],
                // Memory of the gradient and of Adam's state.
                state_bytes: 3 * parameter_bytes[module],
                activation_bytes: self.kept[module],
                time: (self.flops[module] as f64 / DEVICE.flops_per_nanosecond) as u64 + 1,
                first_run: self.first_run[module],
                follows: None,
            });
        }
        let values = self.values.iter().map(|(output, (from, to))| Value {
            from: *from,
            to: to.iter().copied().collect(),
            bytes: operations.all()[output.operation].outputs[output.index].bytes,
        });
        let ties: Vec<Vec<usize>> = sharers.into_values().filter(|modules| modules.len() > 1).collect();
        CostTree::new(modules, values.collect(), Vec::new(), &ties)
    }
}
