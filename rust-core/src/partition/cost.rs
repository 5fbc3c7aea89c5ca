//! The cost of a partition: a weighted sum of memory and time, as fractions of the whole model's.

use super::CostTree;
use crate::error::{Error, Result};
use crate::pipeline::LinkCost;
use crate::pipeline::schedule::{LIGHT_PART, Schedule};

/// The objective that a partition balances.
#[derive(Clone, Debug, PartialEq)]
pub struct Objective {
    /// The weight of memory, from 0 to 1. The weight of time is 1 minus this.
    pub memory_weight: f64,
    /// The number of microbatches whose activations partitions keep at once.
    pub kept: KeptMicrobatches,
    /// The cost of transfers between ranks, in nanoseconds.
    pub link: LinkCost,
}

impl Objective {
    /// An objective for as many partitions as `kept` has.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the weight is not between 0 and 1.
    pub fn new(memory_weight: f64, kept: KeptMicrobatches, link: LinkCost) -> Result<Self> {
        if !(0.0..=1.0).contains(&memory_weight) {
            return Err(Error::InvalidArgument(format!("`memory_weight` is between 0 and 1, not {memory_weight}")));
        }
        Ok(Self { memory_weight, kept, link })
    }
}

/// For each partition: the number of microbatches whose activations it keeps at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptMicrobatches {
    /// If results go to later partitions only.
    pub without_return: Vec<u64>,
    /// If a result of a later partition returns to an earlier one, as for an output layer that is on the partition of
    /// the embedding whose parameter it shares.
    pub with_return: Vec<u64>,
}

/// The microbatches that each of `partitions` keeps. `active` limits the microbatches in flight. With all forwards
/// first, every partition keeps all of them. In 1F1B, later partitions keep fewer. With split backwards, every
/// partition keeps as many as the first one does in 1F1B, or `active`. After a return, a microbatch waits for what the
/// earlier partition is computing, so one more is in flight.
pub fn kept_microbatches(
    partitions: usize,
    microbatches: u64,
    active: Option<u64>,
    schedule: Schedule,
) -> KeptMicrobatches {
    let most = microbatches.min(active.unwrap_or(u64::MAX)).max(1);
    let kept = |index: usize, returned: u64| match schedule {
        Schedule::Simple | Schedule::ForwardOnly => most,
        Schedule::Interleaved => most.min((partitions - index) as u64 + returned),
        Schedule::ZeroBubble => active.map_or(most.min(partitions as u64 + returned), |_| most),
    };
    let all = |returned: u64| (0..partitions).map(|index| kept(index, returned)).collect();
    KeptMicrobatches { without_return: all(0), with_return: all(1) }
}

/// The cost of one partition. Times are in nanoseconds for one microbatch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageCost {
    /// The number that is balanced. The costs of all partitions sum to about 1.
    pub cost: f64,
    /// Bytes of parameters and buffers.
    pub parameter_bytes: u64,
    /// Bytes of gradients and optimizer state.
    pub state_bytes: u64,
    /// Bytes of activations of one microbatch.
    pub activation_bytes: u64,
    /// Compute time of one microbatch.
    pub time: u64,
    /// Time to receive values from other partitions and to send values to them. A value that goes to several partitions
    /// counts once.
    pub transfer: u64,
    /// Time that the host needs to run modules as separate tasks, where a module is split between partitions.
    pub tasks: u64,
}

impl StageCost {
    /// Adds the cost of one module.
    pub(super) fn add(&mut self, module: &super::ModuleCost) {
        self.parameter_bytes += module.parameter_bytes;
        self.state_bytes += module.state_bytes;
        self.activation_bytes += module.activation_bytes;
        self.time += module.time;
    }
}

/// Converts sums to costs. The fractions refer to the whole model with every module split into tasks, so memory keeps
/// its weight where the host takes longer than the device.
pub(super) struct CostModel<'a> {
    objective: &'a Objective,
    memory: f64,
    time: f64,
}

impl<'a> CostModel<'a> {
    pub(super) fn new(tree: &CostTree, objective: &'a Objective) -> Self {
        let mut whole = StageCost::default();
        tree.modules().iter().for_each(|module| whole.add(module));
        let each = &objective.kept.without_return;
        let kept = each.iter().sum::<u64>() as f64 / each.len() as f64;
        let memory = (whole.parameter_bytes + whole.state_bytes) as f64 + whole.activation_bytes as f64 * kept;
        let tasks: u64 = tree.tasks().iter().map(|tasks| tasks.time).sum();
        Self { objective, memory, time: (whole.time + tasks) as f64 }
    }

    /// The cost of the partition with this index.
    pub(super) fn of(&self, index: usize, sums: &StageCost) -> f64 {
        let weight = self.objective.memory_weight;
        let memory = (sums.parameter_bytes + sums.state_bytes) as f64
            + sums.activation_bytes as f64 * self.objective.kept.without_return[index] as f64;
        // Counted twice: for the value in the forward and its gradient in the backward.
        let transfer = 2.0 * sums.transfer as f64;
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        weight * share(memory, self.memory)
            + (1.0 - weight) * share((sums.time + sums.tasks) as f64 + transfer, self.time)
    }
}

impl StageCost {
    /// Peak bytes on the rank that runs this partition, with the activations of `kept` microbatches.
    fn peak_bytes(&self, kept: u64) -> u64 {
        self.parameter_bytes + self.state_bytes + self.activation_bytes * kept
    }
}

/// The largest number of bytes that a rank needs with this `assignment`.
///
/// # Panics
/// As [`stage_costs`].
pub(super) fn peak_bytes(tree: &CostTree, assignment: &[u32], objective: &Objective) -> u64 {
    let kept = &objective.kept;
    let kept =
        if returns(tree, assignment, kept.without_return.len()) { &kept.with_return } else { &kept.without_return };
    let stages = stage_costs(tree, assignment, objective);
    stages.iter().zip(kept).map(|(stage, &kept)| stage.peak_bytes(kept)).max().unwrap_or(0)
}

/// Whether an earlier partition needs the result of a later one. It does not count where the later partition has hardly
/// computed anything before: an embedding that is beside the output layer, and not beside the layers that need it.
pub(super) fn returns(tree: &CostTree, assignment: &[u32], partitions: usize) -> bool {
    let modules = tree.modules();
    let equal_part = modules.iter().map(|module| module.time).sum::<u64>() / partitions as u64;
    tree.values().iter().any(|value| {
        value.to.iter().any(|&to| {
            let until_then = (modules.iter().zip(assignment))
                .filter(|(module, partition)| **partition > assignment[to] && module.first_run.is_some())
                .filter(|(module, _)| module.first_run <= modules[value.from].first_run);
            assignment[to] < assignment[value.from]
                && until_then.map(|(module, _)| module.time).sum::<u64>().saturating_mul(LIGHT_PART) > equal_part
        })
    })
}

/// The cost of each partition of any `assignment`.
///
/// # Panics
/// If `assignment` has another number of modules than the tree, or a partition that `objective` does not have.
pub fn stage_costs(tree: &CostTree, assignment: &[u32], objective: &Objective) -> Vec<StageCost> {
    let mut stages = vec![StageCost::default(); objective.kept.without_return.len()];
    for (module, &partition) in tree.modules().iter().zip(assignment) {
        stages[partition as usize].add(module);
    }
    for value in tree.values() {
        let home = assignment[value.from];
        let mut consumers: Vec<u32> =
            value.to.iter().map(|&module| assignment[module]).filter(|&partition| partition != home).collect();
        consumers.sort_unstable();
        consumers.dedup();
        if !consumers.is_empty() {
            consumers.push(home);
        }
        for partition in consumers {
            stages[partition as usize].transfer += objective.link.time(value.bytes);
        }
    }
    let extents = tree.extents(|module| Some(assignment[module]));
    for tasks in tree.tasks() {
        if extents[tasks.module].is_some_and(|(first, last)| first != last) {
            stages[assignment[tasks.at] as usize].tasks += tasks.time;
        }
    }
    let cost_model = CostModel::new(tree, objective);
    for (index, stage) in stages.iter_mut().enumerate() {
        stage.cost = cost_model.of(index, stage);
    }
    stages
}
