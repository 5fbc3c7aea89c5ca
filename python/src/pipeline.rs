//! Programs of pipelines, and what their execution leaves in the timeline.

use pyo3::prelude::*;
use smd_core::Error;
use smd_core::pipeline::schedule::{self, Bounds, Schedule};
use smd_core::pipeline::{Costs, Edge, Graph, Link, Stage};
use smd_core::trace::{self, Track};

use crate::enter::enter;

/// A stage as Python has it: its rank, the prices of its forward, of its gradients of inputs and of weights, the bytes
/// that it keeps, the stages that it takes values from with their bytes, and whether it has a backward.
type StageRow = (usize, (u64, u64, u64), u64, Vec<(usize, u64)>, bool);
/// An action: what it does, the stage, the microbatch, and the stage at the other end of a transfer.
type ActionRow = (String, u32, u32, Option<u32>);

/// What `rank` of a pipeline does, in its order: kind (`F`, `B`, `I`, `W`, `SF`, `RF`, `SB`, `RB`), stage, microbatch and,
/// of a transfer, the stage at its other end. All ranks pass the same arguments and get parts of one program.
#[pyfunction]
pub fn plan_pipeline(
    py: Python<'_>,
    rank: usize,
    ranks: usize,
    microbatches: usize,
    stages: Vec<StageRow>,
    schedule: String,
    active_microbatches: Option<usize>,
) -> PyResult<Vec<ActionRow>> {
    enter(py, || {
        let stages = stages.into_iter().map(stage).collect();
        let graph = Graph::new(ranks, microbatches, stages, Link::default())?;
        let bounds = Bounds { active_microbatches, memory_bytes: None };
        let schedule: Schedule = schedule.parse()?;
        let program = schedule::plan(&graph, schedule, bounds)?;
        let own = program
            .ranks()
            .get(rank)
            .ok_or_else(|| Error::InvalidArgument(format!("there is no rank {rank} in a pipeline of {ranks}")))?;
        Ok(own.iter().map(|action| (action.kind.to_string(), action.stage, action.microbatch, action.peer)).collect())
    })
}

fn stage((rank, (forward, input, weight), activation_bytes, inputs, backward): StageRow) -> Stage {
    Stage {
        rank,
        costs: Costs { forward, input, weight },
        activation_bytes,
        inputs: inputs.into_iter().map(|(from, bytes)| Edge { from, bytes }).collect(),
        backward,
    }
}

/// Nanoseconds on the timeline's clock, or 0 while no timeline is written.
#[pyfunction]
pub fn timeline_now() -> u64 {
    if trace::enabled() { trace::now() } else { 0 }
}

/// Records that what the pipeline did for a microbatch lasted from `start` (of `timeline_now`) until now. `kind` is
/// `forward`, `backward`, `input`, `weight`, `send`, `receive` or `wait`.
///
/// # Errors
/// `ValueError` for another kind.
#[pyfunction]
pub fn timeline_stage(py: Python<'_>, kind: &str, stage: u64, microbatch: u64, start: u64) -> PyResult<()> {
    if start == 0 {
        return Ok(());
    }
    let end = trace::now();
    const KINDS: [&str; 7] = ["forward", "backward", "input", "weight", "send", "receive", "wait"];
    enter(py, || {
        let name = KINDS.into_iter().find(|name| *name == kind);
        let name = name.ok_or_else(|| Error::InvalidArgument(format!("`{kind}` is nothing that a pipeline does")))?;
        trace::complete(name, Track::Stage(stage), start, end, Some(("microbatch", microbatch)));
        Ok(())
    })
}
