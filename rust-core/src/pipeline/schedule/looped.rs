//! Interleaved 1F1B for a chain in which each rank has several stages (Narayanan et al. 2021, section 2.2).
//!
//! Microbatches are processed in groups of as many as there are ranks: a group passes the first stage of a rank, then
//! its second one, and so on. Each rank runs some forwards as warm-up, then alternates forwards and backwards, then
//! runs the remaining backwards.

use crate::pipeline::{Action, ActionKind, Graph, Program};

/// The order of computations, if `graph` is such a chain; it may exceed the bounds.
pub(super) fn order(graph: &Graph) -> Option<Program> {
    let (ranks, stages) = (graph.ranks(), graph.stages());
    let chunks = stages.len() / ranks;
    let loops = |(index, stage): (usize, &crate::pipeline::Stage)| {
        let before = stage.inputs.iter().map(|edge| edge.from);
        stage.rank == index % ranks && stage.backward && before.eq(index.checked_sub(1))
    };
    if chunks < 2 || stages.len() % ranks != 0 || !stages.iter().enumerate().all(loops) {
        return None;
    }
    let per_rank = chunks * graph.microbatches();
    let groups: Vec<(usize, usize)> = (0..graph.microbatches())
        .step_by(ranks)
        .map(|start| (start, (start + ranks).min(graph.microbatches())))
        .collect();
    let tasks = |rank: usize, kind: ActionKind| {
        let mut tasks = Vec::with_capacity(per_rank);
        for &(start, end) in &groups {
            for lap in 0..chunks {
                let chunk = if kind == ActionKind::Forward { lap } else { chunks - 1 - lap };
                tasks.extend((start..end).map(|microbatch| Action::compute(kind, chunk * ranks + rank, microbatch)));
            }
        }
        tasks
    };
    let list = |rank: usize| {
        let (forwards, backwards) = (tasks(rank, ActionKind::Forward), tasks(rank, ActionKind::Backward));
        let ahead = (2 * (ranks - 1 - rank) + (chunks - 1) * ranks).min(per_rank);
        let mut actions = forwards[..ahead].to_vec();
        for (forward, backward) in forwards[ahead..].iter().zip(&backwards) {
            actions.extend([forward, backward]);
        }
        actions.extend(&backwards[per_rank - ahead..]);
        actions
    };
    Some(Program::new((0..ranks).map(list).collect()))
}
