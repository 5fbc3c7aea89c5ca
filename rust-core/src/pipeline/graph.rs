//! The stages of a model with their costs and dependencies, from which schedules are made.
//!
//! - GRAPH-1: an edge leads from a stage to a later one in the list, so the list is a topological order.

use crate::error::{Error, Result};

/// Costs of one stage for one microbatch, in nanoseconds or in any unit that all stages share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// The forward.
    pub forward: u64,
    /// The first part of the backward: the gradients of the stage's inputs, which other ranks wait for.
    pub input: u64,
    /// The second part of the backward: the gradients of its parameters, which no other rank waits for.
    pub weight: u64,
}

impl Costs {
    /// One unit each, as assumed by published formulas for pipeline schedules.
    pub const UNIT: Self = Self { forward: 1, input: 1, weight: 1 };

    /// The sum of the three costs.
    pub fn total(&self) -> u64 {
        self.forward + self.input + self.weight
    }
}

/// A value that a stage gets from an earlier stage, and whose gradient it sends back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The stage that computes it.
    pub from: usize,
    /// Size for one microbatch.
    pub bytes: u64,
}

/// A part of the model that runs on one rank without transfers in between.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// The rank that runs it.
    pub rank: usize,
    /// Costs for one microbatch.
    pub costs: Costs,
    /// Bytes that it keeps from a microbatch's forward to its backward.
    pub activation_bytes: u64,
    /// Bytes that it keeps from the first part of a backward to the second one, if they run separately.
    pub waiting_bytes: u64,
    /// Values from other stages.
    pub inputs: Vec<Edge>,
    /// Whether it has a backward. It has none if neither it nor a stage before it needs gradients.
    pub backward: bool,
}

/// Transfers between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkCost {
    /// Latency: time from the end of the sender's task to the start of the receiver's, in the unit of [`Costs`].
    pub latency: u64,
    /// Bandwidth: bytes in one unit of time; 0 means unlimited.
    pub bytes_per_tick: u64,
}

impl LinkCost {
    /// Time to transfer `bytes` bytes.
    pub fn time(&self, bytes: u64) -> u64 {
        self.latency + bytes.checked_div(self.bytes_per_tick).unwrap_or(0)
    }
}

/// The assignment of a chain's stages to ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StagePlacement {
    /// Stage `i` is on rank `i % ranks`: 0 1 2 0 1 2.
    Looped,
    /// V-shaped, forth and back: 0 1 2 2 1 0, so that the rank with the input also computes the loss.
    VShaped,
}

/// The stages of a pipeline, the edges between them, their costs, and the number of microbatches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Graph {
    ranks: usize,
    microbatches: usize,
    stages: Vec<Stage>,
    /// For each stage, the stages that use its value, with the value's size.
    consumers: Vec<Vec<(usize, u64)>>,
    link: LinkCost,
}

impl Graph {
    /// A graph of `stages` (GRAPH-1) for `microbatches` microbatches.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a stage is on no rank, an edge leads backwards or is listed twice, or a stage
    /// without a backward uses the value of a stage with one.
    pub fn new(ranks: usize, microbatches: usize, stages: Vec<Stage>, link: LinkCost) -> Result<Self> {
        let mut consumers = vec![Vec::new(); stages.len()];
        if ranks == 0 || microbatches == 0 || stages.is_empty() {
            return Err(Error::InvalidArgument(format!(
                "a pipeline needs ranks, microbatches and stages, not {ranks}, {microbatches} and {}",
                stages.len()
            )));
        }
        for (index, stage) in stages.iter().enumerate() {
            if stage.rank >= ranks {
                return Err(Error::InvalidArgument(format!("stage {index} is on rank {} of {ranks}", stage.rank)));
            }
            for edge in &stage.inputs {
                if edge.from >= index {
                    return Err(Error::InvalidArgument(format!(
                        "stage {index} has an input from stage {}, which does not precede it",
                        edge.from
                    )));
                }
                if stage.inputs.iter().filter(|other| other.from == edge.from).count() > 1 {
                    return Err(Error::InvalidArgument(format!(
                        "stage {index} has two edges from stage {}: one edge carries all of its inputs",
                        edge.from
                    )));
                }
                if stages[edge.from].backward && !stage.backward {
                    return Err(Error::InvalidArgument(format!(
                        "stage {} has a backward, but stage {index}, which uses its value, has none",
                        edge.from
                    )));
                }
                consumers[edge.from].push((index, edge.bytes));
            }
        }
        Ok(Self { ranks, microbatches, stages, consumers, link })
    }

    /// A chain with `chunks` equal stages on each of `ranks` ranks.
    ///
    /// # Errors
    /// As [`Graph::new`].
    pub fn chain(
        ranks: usize,
        chunks: usize,
        placement: StagePlacement,
        microbatches: usize,
        costs: Costs,
    ) -> Result<Self> {
        let stages = (0..ranks * chunks)
            .map(|index| {
                let (lap, place) = (index / ranks, index % ranks);
                let back = placement == StagePlacement::VShaped && lap % 2 == 1;
                Stage {
                    rank: if back { ranks - 1 - place } else { place },
                    costs,
                    activation_bytes: 1,
                    waiting_bytes: 1,
                    inputs: index.checked_sub(1).map(|from| Edge { from, bytes: 0 }).into_iter().collect(),
                    backward: true,
                }
            })
            .collect();
        Self::new(ranks, microbatches, stages, LinkCost::default())
    }

    /// The same graph with another cost of transfers.
    pub fn with_link(mut self, link: LinkCost) -> Self {
        self.link = link;
        self
    }

    /// Number of ranks of the pipeline.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Number of microbatches of a step.
    pub fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// All stages, in a topological order.
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    /// The stage with this index.
    pub fn stage(&self, index: usize) -> &Stage {
        &self.stages[index]
    }

    /// Stages that use a value of `stage`, with its size.
    pub fn consumers(&self, stage: usize) -> &[(usize, u64)] {
        &self.consumers[stage]
    }

    /// Cost of transfers.
    pub fn link(&self) -> LinkCost {
        self.link
    }

    /// Time from the end of a task of stage `from` until its value of `bytes` is at stage `to`.
    pub fn transfer(&self, from: usize, to: usize, bytes: u64) -> u64 {
        if self.stages[from].rank == self.stages[to].rank { 0 } else { self.link.time(bytes) }
    }

    /// Compute time of each rank in one step.
    pub fn work(&self) -> Vec<u64> {
        let mut work = vec![0; self.ranks];
        for stage in &self.stages {
            let cost = if stage.backward { stage.costs.total() } else { stage.costs.forward };
            work[stage.rank] += cost * self.microbatches as u64;
        }
        work
    }

    /// For each stage, the number of consecutive ranks on which its value is processed until the loss, including its
    /// own: 1 for a stage whose values no other stage uses.
    pub fn heights(&self) -> Vec<usize> {
        let mut heights = vec![1; self.stages.len()];
        for index in (0..self.stages.len()).rev() {
            for &(to, _) in &self.consumers[index] {
                let hop = usize::from(self.stages[to].rank != self.stages[index].rank);
                heights[index] = heights[index].max(heights[to] + hop);
            }
        }
        heights
    }
}
