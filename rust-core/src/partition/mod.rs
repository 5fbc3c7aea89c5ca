//! Partitions: which module of a model lies on which rank of a pipeline.
//!
//! ```text
//!   CostTree ── partition ──> Partition ──> table, file
//!   (modules, what they cost,     |
//!    values between them)         └─ stage_costs: what each partition then costs
//! ```
//!
//! Everything here is a value: no process, no tensor. Modules that cost something stand in a line, in the order in
//! which they first run, and the line is cut into as many pieces as there are partitions.
//!
//! - PART-1: a partition is a function of the tree, the number of partitions and the objective alone, so that every rank comes to
//!   the same one.
//! - PART-2: partitions never decrease along the line. Only modules that share a parameter stand elsewhere: they lie
//!   together, where one of them would be.
//! - PART-3: the largest cost of a partition is the least that any such cut has. Of several, the one is taken in which
//!   least crosses and fewest modules are taken apart. Where the published algorithm, which may come back to an earlier
//!   partition, has a lower one, its division is taken instead of a cut.
//! - PART-4: no partition is empty unless there are fewer modules that cost something than partitions.
//! - PART-5: a module without costs of its own, such as a container, is where its first part is. What lies below it
//!   may be elsewhere.

mod cost;
mod file;
mod layers;
mod line;
mod published;
mod solve;
mod table;
#[cfg(test)]
mod tests;
mod tree;

pub use cost::{Objective, StageCost, kept_microbatches, stage_costs};
pub use file::{from_json, to_json};
pub use layers::{Wish, divide_layers};
pub use table::table;
pub use tree::{CostTree, ModuleCost, Value};

use std::collections::HashSet;

use crate::error::{Error, Result};

/// Costs that differ by less, as a part of either, are equal.
const ROUNDING: f64 = 1e-9;

/// For each module of a tree, in the tree's order, its partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Partitions by module.
    pub assignment: Vec<u32>,
}

/// Divides the modules of `tree` over `partitions`.
///
/// # Errors
/// [`Error::InvalidArgument`] if there are no partitions, or the objective is not for as many.
pub fn partition(tree: &CostTree, partitions: usize, objective: &Objective) -> Result<Partition> {
    if partitions == 0 || objective.kept.len() != partitions {
        return Err(Error::InvalidArgument(format!(
            "an objective for {} partitions does not tell how to find {partitions}",
            objective.kept.len()
        )));
    }
    let best = line::variants(tree, objective.link)
        .map(|line| {
            let cuts = solve::cut(&line, partitions, objective, tree);
            (cuts, line)
        })
        // The first of equals: the order of variants is fixed.
        .reduce(|best, other| if other.0.before(&best.0) { other } else { best });
    let (cuts, line) = best.expect("there is always a variant");
    let at_position: Vec<u32> = (0..line.len())
        .map(|position| cuts.starts.iter().filter(|&&start| start <= position).count() as u32 - 1)
        .collect();
    let cut = tree.spread(|module| line.position(module).map(|position| at_position[position]));
    let published = published::partition(tree, partitions, objective);
    let uses = |assignment: &[u32]| assignment.iter().collect::<HashSet<_>>().len();
    let better = largest(tree, &published, objective) < largest(tree, &cut, objective) * (1.0 - ROUNDING);
    // PART-4
    let assignment = if better && uses(&published) >= uses(&cut) { published } else { cut };
    Ok(Partition { assignment })
}

/// The number that is made small.
fn largest(tree: &CostTree, assignment: &[u32], objective: &Objective) -> f64 {
    stage_costs(tree, assignment, objective).iter().map(|stage| stage.cost).fold(0.0, f64::max)
}
