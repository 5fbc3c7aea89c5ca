//! Partitions: the assignment of a model's modules to the ranks of a pipeline.
//!
//! ```text
//!   CostTree ── partition ──> Partition ──> table, file
//!   (modules, what they cost,     |
//!    values between them)         └─ stage_costs: what each partition then costs
//! ```
//!
//! All functions here only compute; they use neither processes nor tensors. Modules with costs are ordered in a line,
//! by their first call, and the line is cut into as many pieces as there are partitions.
//!
//! - PART-1: a partition depends only on the tree, the number of partitions and the objective, so that all ranks
//!   compute the same one.
//! - PART-2: partition numbers never decrease along the line. The only exceptions are modules that share a parameter:
//!   they are together, at the position of one of them.
//! - PART-3: the largest cost of a partition is at most [`EQUAL_COST_FACTOR`] times the least that any such cut has.
//!   Among these cuts, the criteria are, in this order: the fewest split modules, the lowest largest cost, the fewest
//!   bytes across partitions, the most equal costs. Of the best cuts with modules that share a parameter at one or the
//!   other position, costs within [`NEARLY_EQUAL_COST_FACTOR`] count as equal, and the one that needs the least memory
//!   is taken. The largest cost never exceeds that of the published algorithm by more than this factor,
//!   which may return to an earlier partition: where its result is better than every cut, it is used instead.
//! - PART-4: no partition is empty unless there are fewer modules with costs than partitions.
//! - PART-5: a module without costs of its own, such as a container, is in the partition of its first part. Modules
//!   below it may be in others.

mod cost;
mod device_model;
mod file;
mod layers;
mod line;
mod published;
mod solve;
mod table;
#[cfg(test)]
mod tests;
mod tree;

pub use cost::{KeptMicrobatches, Objective, StageCost, kept_microbatches, stage_costs};
pub use device_model::DeviceModel;
pub use file::{from_json, to_json};
pub use layers::{PartitionRequest, partition_layers};
pub use table::table;
pub use tree::{CostTree, ModuleCost, Tasks, Value};

use std::cmp::Ordering;
use std::collections::HashSet;

use solve::{CutSearch, Cuts};

use crate::error::{Error, Result};

/// Relative difference below which two costs are considered equal.
const ROUNDING: f64 = 1e-9;
/// Factor up to which a cost counts as equally good, because estimates are not more precise.
const EQUAL_COST_FACTOR: f64 = 1.05;
/// A cut whose largest cost is within this factor of the lowest one is used if it needs less memory.
const NEARLY_EQUAL_COST_FACTOR: f64 = 1.02;

/// The partition of each module of a tree, in the tree's order.
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
    let objective_partitions = objective.kept.without_return.len();
    if partitions == 0 || objective_partitions != partitions {
        return Err(Error::InvalidArgument(format!(
            "the objective is for {objective_partitions} partitions: expected {partitions}"
        )));
    }
    let published = published::partition(tree, partitions, objective);
    let theirs = largest(tree, &published, objective);
    let variants = || line::variants(tree, objective.link);
    let least_of = |line: &line::Line| CutSearch::new(line, partitions, objective, tree).least();
    let each: Vec<f64> = variants().map(|line| least_of(&line)).collect();
    let least = each.iter().copied().fold(f64::INFINITY, f64::min);
    // The fraction of the modules' costs, without transfers, which may be larger.
    let near = least + (EQUAL_COST_FACTOR - 1.0) * least.min(1.0 / partitions as f64);
    let bound = near.min(theirs.max(least));
    let found: Vec<(Cuts, Vec<u32>)> = variants()
        .zip(each)
        .filter(|(_, least)| *least <= bound)
        .map(|(line, least)| {
            let cuts = CutSearch::new(&line, partitions, objective, tree).best(least, bound);
            let at_position: Vec<u32> = (0..line.len())
                .map(|position| cuts.starts.iter().filter(|&&start| start <= position).count() as u32 - 1)
                .collect();
            (cuts, tree.spread(|module| line.position(module).map(|position| at_position[position])))
        })
        .collect();
    let (best, _) = (found.iter())
        // The first of equal results; the order of variants is fixed.
        .reduce(|best, other| if other.0.before(&best.0) { other } else { best })
        .expect("there is always a variant");
    let cut = (found.iter())
        .filter(|(cuts, _)| cuts.num_split == best.num_split && cuts.largest <= best.largest * NEARLY_EQUAL_COST_FACTOR)
        .map(|(cuts, cut)| (cost::peak_bytes(tree, cut, objective), cuts, cut))
        .reduce(|best, other| match other.0.cmp(&best.0) {
            Ordering::Equal if other.1.before(best.1) => other,
            Ordering::Less => other,
            _ => best,
        })
        .map(|(_, _, cut)| cut.clone())
        .expect("the best one is among them");
    let uses = |assignment: &[u32]| assignment.iter().collect::<HashSet<_>>().len();
    let better = theirs < best.largest * (1.0 - ROUNDING);
    // PART-4
    let assignment = if better && uses(&published) >= uses(&cut) { published } else { cut };
    Ok(Partition { assignment })
}

/// Like [`partition`], but ignores memory if the best partition by time alone needs at most `memory_bytes` on every
/// rank.
///
/// # Errors
/// Any error of [`partition`].
pub fn partition_by_time_if_it_fits(
    tree: &CostTree,
    partitions: usize,
    objective: &Objective,
    memory_bytes: u64,
) -> Result<Partition> {
    let time_alone = Objective { memory_weight: 0.0, ..objective.clone() };
    let fastest = partition(tree, partitions, &time_alone)?;
    let fits = cost::peak_bytes(tree, &fastest.assignment, &time_alone) <= memory_bytes;
    if fits { Ok(fastest) } else { partition(tree, partitions, objective) }
}

/// The number that is minimized.
fn largest(tree: &CostTree, assignment: &[u32], objective: &Objective) -> f64 {
    stage_costs(tree, assignment, objective).iter().map(|stage| stage.cost).fold(0.0, f64::max)
}
