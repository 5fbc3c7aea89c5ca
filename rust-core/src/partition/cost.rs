//! What a partition costs: memory and time, each as a share of the whole model's.

use super::CostTree;
use crate::error::{Error, Result};
use crate::pipeline::LinkCost;
use crate::pipeline::schedule::Schedule;

/// What is to be balanced.
#[derive(Clone, Debug, PartialEq)]
pub struct Objective {
    /// The weight of memory; that of time is the rest of 1.
    pub memory_weight: f64,
    /// For each partition, of how many microbatches it keeps activations at once.
    pub kept: Vec<u64>,
    /// Transfers between ranks, in nanoseconds.
    pub link: LinkCost,
}

impl Objective {
    /// An objective for as many partitions as `kept` has numbers.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the weight is not between 0 and 1.
    pub fn new(memory_weight: f64, kept: Vec<u64>, link: LinkCost) -> Result<Self> {
        if !(0.0..=1.0).contains(&memory_weight) {
            return Err(Error::InvalidArgument(format!("`memory_weight` is between 0 and 1, not {memory_weight}")));
        }
        Ok(Self { memory_weight, kept, link })
    }
}

/// Of how many microbatches each of `partitions` keeps activations at once, where `active` may be under way: all of them if
/// forwards go first, fewer towards the end of the pipeline in 1F1B, and as many as on the first rank of that, or as may be
/// active, where backwards are in two parts.
pub fn kept_microbatches(partitions: usize, microbatches: u64, active: Option<u64>, schedule: Schedule) -> Vec<u64> {
    let most = microbatches.min(active.unwrap_or(u64::MAX)).max(1);
    let kept = |index: usize| match schedule {
        Schedule::Simple | Schedule::ForwardOnly => most,
        Schedule::Interleaved => most.min((partitions - index) as u64),
        Schedule::ZeroBubble => active.map_or(most.min(partitions as u64), |_| most),
    };
    (0..partitions).map(kept).collect()
}

/// What one partition costs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageCost {
    /// The number that is balanced. All partitions of a model together cost about 1.
    pub cost: f64,
    /// Parameters and buffers.
    pub parameter_bytes: u64,
    /// Gradients and the optimizer's state.
    pub state_bytes: u64,
    /// Of one microbatch.
    pub activation_bytes: u64,
    /// Of one microbatch, in nanoseconds.
    pub time: u64,
    /// Transfers of values that come from other partitions and go there, for one microbatch, in nanoseconds. One that goes
    /// to several counts once.
    pub transfer: u64,
    /// The host's work for what is a task there because a module is taken apart, for one microbatch, in nanoseconds.
    pub tasks: u64,
}

impl StageCost {
    /// Adds what is kept and done there.
    pub(super) fn add(&mut self, module: &super::ModuleCost) {
        self.parameter_bytes += module.parameter_bytes;
        self.state_bytes += module.state_bytes;
        self.activation_bytes += module.activation_bytes;
        self.time += module.time;
    }
}

/// Turns sums into costs. Shares are of the whole model's sums, all modules taken apart: where the host takes longer than the device,
/// memory still has its weight.
pub(super) struct Price<'a> {
    objective: &'a Objective,
    memory: f64,
    time: f64,
}

impl<'a> Price<'a> {
    pub(super) fn new(tree: &CostTree, objective: &'a Objective) -> Self {
        let mut whole = StageCost::default();
        tree.modules().iter().for_each(|module| whole.add(module));
        let kept = objective.kept.iter().sum::<u64>() as f64 / objective.kept.len() as f64;
        let memory = (whole.parameter_bytes + whole.state_bytes) as f64 + whole.activation_bytes as f64 * kept;
        let tasks: u64 = tree.tasks().iter().map(|tasks| tasks.time).sum();
        Self { objective, memory, time: (whole.time + tasks) as f64 }
    }

    /// Of the partition with this index.
    pub(super) fn of(&self, index: usize, sums: &StageCost) -> f64 {
        let weight = self.objective.memory_weight;
        let memory = (sums.parameter_bytes + sums.state_bytes) as f64
            + sums.activation_bytes as f64 * self.objective.kept[index] as f64;
        // Twice: the value and its gradient.
        let transfer = 2.0 * sums.transfer as f64;
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        weight * share(memory, self.memory)
            + (1.0 - weight) * share((sums.time + sums.tasks) as f64 + transfer, self.time)
    }
}

/// What each partition of `assignment` costs, whoever made it.
///
/// # Panics
/// If the assignment is not one of this tree's modules to partitions of the objective.
pub fn stage_costs(tree: &CostTree, assignment: &[u32], objective: &Objective) -> Vec<StageCost> {
    let mut stages = vec![StageCost::default(); objective.kept.len()];
    for (module, &partition) in tree.modules().iter().zip(assignment) {
        stages[partition as usize].add(module);
    }
    for value in tree.values() {
        let home = assignment[value.from];
        let mut takers: Vec<u32> =
            value.to.iter().map(|&module| assignment[module]).filter(|&partition| partition != home).collect();
        takers.sort_unstable();
        takers.dedup();
        if !takers.is_empty() {
            takers.push(home);
        }
        for partition in takers {
            stages[partition as usize].transfer += objective.link.time(value.bytes);
        }
    }
    let extents = tree.extents(|module| Some(assignment[module]));
    for tasks in tree.tasks() {
        if extents[tasks.module].is_some_and(|(first, last)| first != last) {
            stages[assignment[tasks.at] as usize].tasks += tasks.time;
        }
    }
    let price = Price::new(tree, objective);
    for (index, stage) in stages.iter_mut().enumerate() {
        stage.cost = price.of(index, stage);
    }
    stages
}
