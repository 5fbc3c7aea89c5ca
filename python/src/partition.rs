//! Partitions of a model's modules over pipeline ranks.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use smd_core::partition::{self, CostTree, DeviceModel, ModuleCost, Objective, Tasks, Value};

use crate::enter::enter;

/// Mirrors `modelparallel.torch.partitioning.cost_trace.ModuleCost`.
#[derive(FromPyObject)]
struct Module {
    path: String,
    parent: Option<usize>,
    parameter_bytes: u64,
    state_bytes: u64,
    activation_bytes: u64,
    time: u64,
    first_run: Option<u64>,
    follows: Option<usize>,
}

impl From<Module> for ModuleCost {
    fn from(module: Module) -> Self {
        let Module { path, parent, parameter_bytes, state_bytes, activation_bytes, time, first_run, follows } = module;
        Self { path, parent, parameter_bytes, state_bytes, activation_bytes, time, first_run, follows }
    }
}

/// Divides modules over `partitions`: returns the partition of each module, a table, and the costs of each partition.
///
/// `values` pass between modules (producer, consumers, bytes). `tasks` are the costs for the host if modules are
/// split (module, module that runs instead, nanoseconds). `ties` are modules that must be on one partition. If every
/// partition needs at most `memory_bytes`, only time is balanced.
#[pyfunction]
#[pyo3(signature = (modules, values, tasks, ties, partitions, memory_weight, microbatches, active_microbatches, schedule,
    memory_bytes=None))]
#[expect(clippy::too_many_arguments, reason = "Python names them")]
fn partition_modules(
    py: Python<'_>,
    modules: Vec<Module>,
    values: Vec<(usize, Vec<usize>, u64)>,
    tasks: Vec<(usize, usize, u64)>,
    ties: Vec<Vec<usize>>,
    partitions: usize,
    memory_weight: f64,
    microbatches: u64,
    active_microbatches: Option<u64>,
    schedule: &str,
    memory_bytes: Option<u64>,
) -> PyResult<(Vec<u32>, String, Vec<f64>)> {
    enter(py, || {
        let modules = modules.into_iter().map(ModuleCost::from).collect();
        let values = values.into_iter().map(|(from, to, bytes)| Value { from, to, bytes }).collect();
        let tasks = tasks.into_iter().map(|(module, at, time)| Tasks { module, at, time }).collect();
        let tree = CostTree::new(modules, values, tasks, &ties)?;
        let kept = partition::kept_microbatches(partitions, microbatches, active_microbatches, schedule.parse()?);
        let objective = Objective::new(memory_weight, kept, DeviceModel::ACCELERATOR.link)?;
        let found = match memory_bytes {
            Some(bytes) => partition::partition_by_time_if_it_fits(&tree, partitions, &objective, bytes)?,
            None => partition::partition(&tree, partitions, &objective)?,
        };
        let assignment = found.assignment;
        let table = partition::table(&tree, &assignment, &objective);
        let costs =
            partition::stage_costs(&tree, &assignment, &objective).into_iter().map(|stage| stage.cost).collect();
        Ok((assignment, table, costs))
    })
}

/// Estimates the nanoseconds of an operation that computes `flops` and reads and writes `moved_bytes`.
#[pyfunction]
fn operation_nanoseconds(flops: f64, moved_bytes: u64) -> f64 {
    DeviceModel::ACCELERATOR.operation_nanoseconds(flops, moved_bytes)
}

/// The nanoseconds that one task of a pipeline costs the host.
#[pyfunction]
fn task_nanoseconds() -> u64 {
    DeviceModel::ACCELERATOR.task_nanoseconds
}

/// Formats a partition file.
#[pyfunction]
fn partition_to_json(partitions: BTreeMap<String, u32>) -> String {
    partition::to_json(&partitions)
}

/// Parses a partition file into modules and partitions; `name` is the file's name, for errors.
#[pyfunction]
fn partition_from_json(py: Python<'_>, name: &str, text: &str, partitions: u32) -> PyResult<BTreeMap<String, u32>> {
    enter(py, || partition::from_json(name, text, partitions))
}

/// Adds this file's functions.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(partition_modules, module)?)?;
    module.add_function(wrap_pyfunction!(operation_nanoseconds, module)?)?;
    module.add_function(wrap_pyfunction!(task_nanoseconds, module)?)?;
    module.add_function(wrap_pyfunction!(partition_to_json, module)?)?;
    module.add_function(wrap_pyfunction!(partition_from_json, module)?)
}
