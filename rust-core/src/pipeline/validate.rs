//! Validates a program against its graph before it is executed.

use super::schedule::Bounds;
use super::{ActionKind, Graph, Program, Timeline, simulate};
use crate::error::{Error, Result};

/// Checks that `program` runs every task of `graph` once and after its dependencies, that every sent message is
/// received, in the same order on both sides, that no rank deadlocks, and that the bounds are kept. With `backward`
/// false, only forwards are expected. Returns the result of [`simulate`].
///
/// # Errors
/// [`Error::InvalidArgument`] naming the rank and the action.
pub fn validate(graph: &Graph, program: &Program, bounds: Bounds, backward: bool) -> Result<Timeline> {
    let timeline = simulate(graph, program)?;
    let mut counts = vec![[0_usize; 3]; graph.stages().len()];
    for action in program.ranks().iter().flatten() {
        let count = &mut counts[action.stage as usize];
        match action.kind {
            ActionKind::Forward => count[0] += 1,
            ActionKind::Backward => {
                count[1] += 1;
                count[2] += 1;
            }
            ActionKind::Input => count[1] += 1,
            ActionKind::Weight => count[2] += 1,
            _ => {}
        }
    }
    // `simulate` rejects tasks that occur twice, so comparing the numbers is enough.
    for (index, (stage, count)) in graph.stages().iter().zip(counts).enumerate() {
        let expected = if stage.backward && backward { graph.microbatches() } else { 0 };
        for (what, found, expected) in [
            ("forwards", count[0], graph.microbatches()),
            ("gradients of inputs", count[1], expected),
            ("gradients of weights", count[2], expected),
        ] {
            if found != expected {
                return Err(Error::InvalidArgument(format!(
                    "rank {} has {found} {what} of stage {index} instead of {expected}",
                    stage.rank
                )));
            }
        }
    }
    if let Some(bound) = bounds.active_microbatches
        && let Some((rank, active)) =
            timeline.active_microbatches.iter().enumerate().find(|(_, active)| **active > bound)
    {
        return Err(Error::InvalidArgument(format!(
            "rank {rank} has {active} microbatches under way at once, and the bound is {bound}"
        )));
    }
    if let Some(bound) = bounds.memory_bytes
        && let Some((rank, &peak)) = timeline.peak_bytes.iter().enumerate().find(|(_, peak)| **peak > bound)
    {
        return Err(Error::InvalidArgument(format!(
            "rank {rank} keeps {peak} bytes of activations at once, and the bound is {bound}"
        )));
    }
    Ok(timeline)
}
