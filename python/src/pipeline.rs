//! Stages and programs of pipelines, and their events in the timeline.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use smd_core::metrics::{self, Fallback};
use smd_core::partition::DeviceModel;
use smd_core::pipeline::schedule::{self, Bounds, Schedule};
use smd_core::pipeline::{self, Costs, Graph, ProducedTensor, Section, Task};
use smd_core::trace::{self, Track};
use smd_core::{Error, Result};

use crate::enter::enter;

/// A value that a task computes: its bytes, and whether it requires a gradient.
type ProducedRow = (u64, bool);
/// A task: its rank and level; its inputs, the tasks that it follows and its outputs; the costs of its forward, its
/// gradients of inputs and its gradients of weights; and the bytes that it keeps from the forward to the gradients of
/// inputs, and from there to those of weights.
type TaskRow = (usize, usize, Vec<usize>, Vec<usize>, Vec<ProducedRow>, (u64, u64, u64), (u64, u64));
/// A stage's attributes in the order of `modelparallel.torch.runtime.stage_graph.Stage`.
type Edges = BTreeMap<usize, Vec<usize>>;
type StageRow = (usize, Vec<usize>, Edges, Edges, Edges, Vec<usize>, Vec<usize>, bool, bool);
/// An action: its kind, the stage, the microbatch, and the stage at the other end of a transfer.
type ActionRow = (String, u32, u32, Option<u32>);

/// Groups the tasks of a microbatch into stages, which a rank computes without waiting for another.
#[pyclass(module = "smdistributed._core")]
pub struct StageGraph {
    graph: pipeline::StageGraph,
}

#[pymethods]
impl StageGraph {
    #[new]
    fn new() -> Self {
        Self { graph: pipeline::StageGraph::new() }
    }

    /// Adds tasks after the existing ones: for each its rank and level, its inputs, the earlier tasks that it follows
    /// without using their values, for its outputs the bytes and whether they require gradients, its costs, and the
    /// bytes that it keeps. Returns the numbers of their stages.
    fn extend(&mut self, py: Python<'_>, tasks: Vec<TaskRow>, early: bool) -> PyResult<Vec<usize>> {
        let tasks = tasks.into_iter().map(task).collect();
        enter(py, || self.graph.extend(tasks, early).map(Iterator::collect))
    }

    /// Sets the outputs of a task that was added before they were known; returns its stage.
    fn set_outputs(&mut self, py: Python<'_>, task: usize, outputs: Vec<ProducedRow>) -> PyResult<usize> {
        let outputs = outputs.into_iter().map(produced).collect();
        enter(py, || self.graph.set_outputs(task, outputs))
    }

    /// Sets the backward roots, and the values that are returned.
    fn finish(&mut self, py: Python<'_>, backward_roots: Vec<usize>, returned: Vec<usize>) -> PyResult<()> {
        enter(py, || self.graph.finish(&backward_roots, &returned))
    }

    /// The stage that computes a value.
    fn stage_of(&self, py: Python<'_>, value: usize) -> PyResult<usize> {
        enter(py, || self.graph.stage_of(value))
    }

    /// For every stage: its rank, tasks, inputs, outputs and gradients that it receives (each with the other stage),
    /// values that it returns, backward roots, whether it runs early, and whether it has a backward.
    fn stages(&self) -> Vec<StageRow> {
        let row = |(number, stage): (usize, &Section)| {
            let returning = stage.outputs.keys().map(|&consumer| (consumer, self.graph.gradients(number, consumer)));
            (
                stage.rank,
                stage.tasks.clone(),
                stage.inputs.clone(),
                stage.outputs.clone(),
                returning.collect(),
                stage.exports.clone(),
                stage.backward_roots.clone(),
                stage.early,
                stage.has_backward,
            )
        };
        self.graph.stages().iter().enumerate().map(row).collect()
    }

    /// The program of `rank` in a pipeline, in order: kind (`F`, `B`, `I`, `W`, `SF`, `RF`, `SB`, `RB`), stage,
    /// microbatch, and for a transfer the stage at the other end. All ranks must pass the same arguments.
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn plan(
        &self,
        py: Python<'_>,
        rank: usize,
        ranks: usize,
        microbatches: usize,
        schedule: &str,
        active_microbatches: Option<usize>,
        memory_bytes: Option<u64>,
    ) -> PyResult<Vec<ActionRow>> {
        enter(py, || {
            let graph = self.graph.graph(ranks, microbatches, DeviceModel::ACCELERATOR.link)?;
            planned(&graph, rank, schedule, Bounds { active_microbatches, memory_bytes })
        })
    }
}

fn planned(graph: &Graph, rank: usize, schedule: &str, bounds: Bounds) -> Result<Vec<ActionRow>> {
    let schedule: Schedule = schedule.parse()?;
    let program = schedule::plan(graph, schedule, bounds)?;
    let own = program
        .ranks()
        .get(rank)
        .ok_or_else(|| Error::InvalidArgument(format!("there is no rank {rank} in a pipeline of {}", graph.ranks())))?;
    Ok(own.iter().map(|action| (action.kind.to_string(), action.stage, action.microbatch, action.peer)).collect())
}

fn task(
    (rank, level, inputs, follows, outputs, (forward, input, weight), (kept_bytes, waiting_bytes)): TaskRow,
) -> Task {
    let outputs = outputs.into_iter().map(produced).collect();
    Task { rank, level, inputs, follows, outputs, costs: Costs { forward, input, weight }, kept_bytes, waiting_bytes }
}

fn produced((bytes, requires_grad): ProducedRow) -> ProducedTensor {
    ProducedTensor { bytes, requires_grad }
}

/// Nanoseconds on the timeline's clock, or 0 if no timeline is written.
#[pyfunction]
pub fn timeline_now() -> u64 {
    if trace::enabled() { trace::now() } else { 0 }
}

/// Records an event of the pipeline for a microbatch, from `start` (of `timeline_now`) until `end`, or until now if
/// that is 0. `kind` is `forward`, `backward`, `input`, `weight`, `send`, `receive`, `wait` or `synchronous` (a call
/// that could not be pipelined); `input_stages` are the stages whose values it used.
///
/// # Errors
/// `ValueError` for another kind.
#[pyfunction]
#[pyo3(signature = (kind, stage, microbatch, start, input_stages=Vec::new(), end=0))]
pub fn timeline_stage(
    py: Python<'_>,
    kind: &str,
    stage: u64,
    microbatch: u64,
    start: u64,
    input_stages: Vec<u64>,
    end: u64,
) -> PyResult<()> {
    if kind == trace::SYNCHRONOUS {
        metrics::note_fallback(Fallback::SynchronousCall);
    }
    if start == 0 {
        return Ok(());
    }
    let end = if end == 0 { trace::now() } else { end };
    const KINDS: [&str; 8] = ["forward", "backward", "input", "weight", "send", "receive", "wait", trace::SYNCHRONOUS];
    enter(py, || {
        let name = KINDS.into_iter().find(|name| *name == kind);
        let name = name.ok_or_else(|| Error::InvalidArgument(format!("`{kind}` is not an action of a pipeline")))?;
        trace::complete(name, Track::Stage(stage), start, end, Some(("microbatch", microbatch)));
        for from in input_stages {
            // Follows its forward, with the same start: `smdrun report` treats both as one.
            trace::complete(trace::STAGE_INPUT, Track::Stage(stage), start, start, Some((trace::INPUT_STAGE, from)));
        }
        Ok(())
    })
}
