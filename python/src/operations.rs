//! Steps that are recorded as one graph of operations: their placement, and the segments of each rank.

use pyo3::prelude::*;
use smd_core::partition::{self, PartitionRequest};
use smd_core::pipeline::operations::{
    ControlDependency, ModuleRanks, Operation, OperationPlace, OperationPlacement, OperationRole, Operations, Output,
    ResultSpec, Segments, Signal, Transfer, Variable,
};
use smd_core::pipeline::schedule::Schedule;
use smd_core::{Error, Result};

use crate::enter::enter;

/// A result: the operation's number, and the index of the result.
type OutputRow = (usize, usize);
/// A segment on one rank: its phase, stage and level; whether it is anchored; whether it is on this rank alone; its
/// operations; its inputs and outputs; and further segments that come before it (segment, and how many microbatches
/// earlier).
type SegmentRow =
    (&'static str, Option<usize>, usize, bool, bool, Vec<usize>, Vec<OutputRow>, Vec<OutputRow>, Vec<(usize, usize)>);
/// Results that pass between ranks (from, to).
type TransferRoute = (usize, Vec<usize>);

/// Mirrors `modelparallel.tensorflow.tracing.operations.Operation`.
#[derive(FromPyObject)]
struct Row {
    name: String,
    kind: String,
    role: String,
    inputs: Vec<OutputRow>,
    control_inputs: Vec<usize>,
    outputs: Vec<(String, u64, Option<String>)>,
    variables: Vec<usize>,
    in_model: bool,
    layer: Option<(usize, usize)>,
    requested: Option<usize>,
    gradient_of: Vec<usize>,
    created: usize,
    has_effect: bool,
    assigns: bool,
    flops: u64,
}

fn operation(row: Row) -> Result<Operation> {
    let role = match row.role.as_str() {
        "constant" => OperationRole::Constant,
        "input" => OperationRole::Input,
        "model_result" => OperationRole::ModelResult,
        "computes" => OperationRole::Computes,
        other => return Err(Error::InvalidArgument(format!("`{other}` is not a role of an operation"))),
    };
    Ok(Operation {
        name: row.name,
        kind: row.kind,
        role,
        inputs: row.inputs.into_iter().map(output).collect(),
        control_inputs: row.control_inputs,
        outputs: row
            .outputs
            .into_iter()
            .map(|(text, bytes, not_transferable)| ResultSpec { text, bytes, not_transferable })
            .collect(),
        variables: row.variables,
        in_model: row.in_model,
        layer: row.layer,
        requested: row.requested,
        gradient_of: row.gradient_of,
        created: row.created,
        has_effect: row.has_effect,
        assigns: row.assigns,
        flops: row.flops,
    })
}

fn output((operation, index): OutputRow) -> Output {
    Output { operation, index }
}

fn rows(outputs: Vec<Output>) -> Vec<OutputRow> {
    outputs.into_iter().map(|output| (output.operation, output.index)).collect()
}

/// The operations of a step in topological order, and the variables that they use: for each its shape as text, its
/// bytes, and whether it binds a layer to a partition.
#[pyclass(module = "smdistributed._core", frozen)]
pub struct StepOperations {
    operations: Operations,
}

#[pymethods]
impl StepOperations {
    #[new]
    fn new(py: Python<'_>, operations: Vec<Row>, variables: Vec<(String, u64, bool)>) -> PyResult<Self> {
        enter(py, || {
            let operations = operations.into_iter().map(operation).collect::<Result<_>>()?;
            let variables = variables.into_iter().map(|(text, bytes, binds)| Variable { text, bytes, binds });
            Ok(Self { operations: Operations::new(operations, variables.collect())? })
        })
    }

    /// Partitions layers, whose paths are in the order of their first calls: returns the partition of each layer with
    /// variables, and a table.
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn partition_layers(
        &self,
        py: Python<'_>,
        layers: Vec<String>,
        partitions: usize,
        memory_weight: f64,
        microbatches: u64,
        active_microbatches: Option<u64>,
        schedule: &str,
    ) -> PyResult<(Vec<Option<u32>>, String)> {
        enter(py, || {
            let schedule = schedule.parse()?;
            let request = PartitionRequest { partitions, memory_weight, microbatches, active_microbatches, schedule };
            partition::partition_layers(&self.operations, &layers, request)
        })
    }

    /// Assigns every operation to a place, given the partitions of layers and of variables. If the script assigns
    /// every operation, `default` is the partition of those for which it requests none.
    fn place(
        slf: Py<Self>,
        py: Python<'_>,
        layers: Vec<Option<usize>>,
        default: Option<usize>,
        variables: Vec<Option<usize>>,
    ) -> PyResult<StepPlacement> {
        let homes = ModuleRanks { layers, default, variables };
        let operations = &slf.get().operations;
        let placement = enter(py, || OperationPlacement::new(operations, &homes))?;
        Ok(StepPlacement { of: slf, placement })
    }
}

/// The placement of a step's operations.
#[pyclass(module = "smdistributed._core", frozen)]
pub struct StepPlacement {
    of: Py<StepOperations>,
    placement: OperationPlacement,
}

#[pymethods]
impl StepPlacement {
    /// Partitions of the variables; a variable without one is on every rank.
    fn variables(&self) -> Vec<Option<usize>> {
        self.placement.variables().to_vec()
    }

    /// Numbers of the operations that every rank computes where it needs them.
    fn free(&self) -> Vec<usize> {
        let count = self.of.get().operations.all().len();
        (0..count).filter(|&each| self.placement.place(each) == OperationPlace::Free).collect()
    }

    /// Cuts the step for `rank`. Returns its segments in topological order; the order of its anchored segments
    /// (segment and microbatch); results that pass between ranks; those of them that anchored segments compute, in
    /// order (number and microbatch); segments whose effects are signalled to other ranks; and lines of text that
    /// must be equal on all ranks.
    #[expect(clippy::type_complexity, reason = "Python unpacks it")]
    fn cut(
        &self,
        py: Python<'_>,
        wanted: Vec<Vec<OutputRow>>,
        rank: usize,
        microbatches: usize,
        schedule: &str,
        active_microbatches: Option<usize>,
    ) -> PyResult<(
        Vec<SegmentRow>,
        Vec<(usize, usize)>,
        Vec<(OutputRow, TransferRoute)>,
        Vec<(usize, usize)>,
        Vec<(usize, TransferRoute)>,
        Vec<String>,
    )> {
        let operations = &self.of.get().operations;
        let wanted: Vec<Vec<Output>> =
            wanted.into_iter().map(|outputs| outputs.into_iter().map(output).collect()).collect();
        enter(py, || {
            let schedule: Schedule = schedule.parse()?;
            let halves = schedule == Schedule::ZeroBubble;
            let mut segments = Segments::cut(operations, &self.placement, &wanted, halves)?;
            let mut orders = segments.plan(microbatches, schedule, active_microbatches)?;
            let (lines, messages) = (segments.lines(&orders), segments.messages(&orders));
            let found = (0..segments.all().len()).map(|number| segment(&segments, number, rank)).collect();
            let own = orders.get_mut(rank).map(std::mem::take).unwrap_or_default();
            let transfers = segments.transfers().iter().map(transfer).collect();
            let signals = segments.signals().iter().map(signal).collect();
            Ok((found, own, transfers, messages, signals, lines))
        })
    }
}

fn segment(segments: &Segments<'_>, number: usize, rank: usize) -> SegmentRow {
    let whole = &segments.all()[number];
    let here = segments.on(number, rank);
    let (inputs, outputs) = (segments.inputs_of(&here), segments.outputs_of(&here, rank));
    let alone = whole.place == OperationPlace::On(rank);
    let after =
        segments.after(number, rank).into_iter().map(|ControlDependency { segment, back }| (segment, back)).collect();
    (whole.phase.text(), whole.stage, whole.level, whole.anchored, alone, here, rows(inputs), rows(outputs), after)
}

fn transfer(transfer: &Transfer) -> (OutputRow, TransferRoute) {
    ((transfer.output.operation, transfer.output.index), (transfer.from, transfer.to.clone()))
}

fn signal(signal: &Signal) -> (usize, TransferRoute) {
    (signal.segment, (signal.from, signal.to.clone()))
}
