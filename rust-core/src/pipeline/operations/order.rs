//! The order in which each rank computes its anchored segments.

use std::collections::{BTreeMap, BTreeSet};

use super::{Phase, Place, Segments};
use crate::error::{Error, Result};
use crate::pipeline::schedule::{Bounds, Schedule, plan};
use crate::pipeline::{Costs, Edge, Graph, Kind, Link, Stage};

/// A segment, by its number, for a microbatch.
type Node = (usize, usize);

impl Segments<'_> {
    /// For each rank, its anchored segments with their microbatches, in the schedule's order. Without a backward, `schedule` is that
    /// of an evaluation.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the order of the schedule and what depends on what contradict each other; as
    /// [`plan`] else.
    pub fn plan(&self, microbatches: usize, schedule: Schedule, active: usize) -> Result<Vec<Vec<Node>>> {
        if self.stages.is_empty() {
            return Ok(vec![Vec::new(); self.ranks()]);
        }
        let schedule = if self.trains { schedule } else { Schedule::ForwardOnly };
        let graph = Graph::new(self.ranks(), microbatches, self.scheduled(), Link::default())?;
        let program = plan(&graph, schedule, Bounds { active_microbatches: Some(active), memory_bytes: None })?;
        let anchored: BTreeMap<(Phase, usize), usize> = (self.segments.iter().enumerate())
            .filter(|(_, segment)| segment.anchored)
            .filter_map(|(number, segment)| Some(((segment.phase, segment.stage?), number)))
            .collect();
        let segment = |kind, stage| anchored.get(&(phase(kind)?, stage)).copied();
        let orders: Vec<Vec<Node>> = (program.ranks().iter())
            .map(|actions| {
                let found = actions.iter().filter_map(|action| {
                    Some((segment(action.kind, action.stage as usize)?, action.microbatch as usize))
                });
                found.collect()
            })
            .collect();
        self.check(&orders, microbatches)?;
        Ok(orders)
    }

    /// What schedules are made for: the stages, and the loss, if it waits for several of them.
    fn scheduled(&self) -> Vec<Stage> {
        let mut rows: Vec<Stage> = Vec::with_capacity(self.stages.len() + 1);
        let mut ends = Vec::new();
        for (stage, &number) in self.stages.iter().enumerate() {
            let segment = &self.segments[number];
            let made: u64 = segment
                .operations
                .iter()
                .flat_map(|&each| &self.operations.all()[each].makes)
                .map(|made| made.bytes)
                .sum();
            let cost = 1 + made / 1024;
            rows.push(Stage {
                rank: segment.place.partition().expect("a forward segment is on a partition"),
                costs: Costs { forward: cost, input: cost, weight: cost },
                activation_bytes: cost,
                inputs: self.edges_to(number),
                backward: self.trains,
            });
            let mut takers = segment.operations.iter().flat_map(|&each| self.operations.takers(each));
            if takers.any(|&taker| self.placement.place(taker) == Place::All) {
                ends.push(stage);
            }
        }
        if self.trains && ends.len() > 1 {
            // All backwards wait for it.
            rows.push(Stage {
                rank: rows[ends[ends.len() - 1]].rank,
                costs: Costs::UNIT,
                activation_bytes: 0,
                inputs: ends.into_iter().map(|from| Edge { from, bytes: 0 }).collect(),
                backward: true,
            });
        }
        rows
    }

    /// Stages that a forward segment takes results of, by way of all ranks or not.
    fn edges_to(&self, number: usize) -> Vec<Edge> {
        let mut edges: BTreeMap<usize, u64> = BTreeMap::new();
        let mut seen = BTreeSet::new();
        let mut pending = self.inputs_of(&self.segments[number].operations);
        while let Some(taken) = pending.pop() {
            if !seen.insert(taken) {
                continue;
            }
            match self.of[taken.operation].map(|maker| &self.segments[maker]) {
                Some(maker) if maker.phase == Phase::Forward => {
                    *edges.entry(maker.stage.expect("a forward segment has one")).or_default() += self.bytes(taken);
                }
                Some(maker) if maker.phase == Phase::Shared => pending.extend(self.inputs_of(&[taken.operation])),
                _ => {}
            }
        }
        edges.into_iter().map(|(from, bytes)| Edge { from, bytes }).collect()
    }

    /// Runs the orders of all ranks without computing.
    fn check(&self, orders: &[Vec<Node>], microbatches: usize) -> Result<()> {
        let mut before: BTreeMap<Node, BTreeSet<Node>> = BTreeMap::new();
        for (number, segment) in self.segments.iter().enumerate() {
            let inputs = self.inputs_of(&segment.operations);
            let makers: BTreeSet<usize> = inputs.iter().filter_map(|taken| self.of[taken.operation]).collect();
            for mb in 0..microbatches {
                let nodes = before.entry((number, mb)).or_default();
                nodes.extend(makers.iter().map(|&maker| (maker, mb)));
                if mb > 0 && !segment.anchored {
                    nodes.insert((number, mb - 1));
                }
            }
        }
        for pair in orders.iter().flat_map(|order| order.windows(2)) {
            before.entry(pair[1]).or_default().insert(pair[0]);
        }
        let mut after: BTreeMap<Node, Vec<Node>> = BTreeMap::new();
        for (&node, nodes) in &before {
            nodes.iter().for_each(|&each| after.entry(each).or_default().push(node));
        }
        let mut waiting: BTreeMap<Node, usize> = before.iter().map(|(&node, nodes)| (node, nodes.len())).collect();
        let mut ready: Vec<Node> = waiting.iter().filter(|(_, count)| **count == 0).map(|(&node, _)| node).collect();
        while let Some(node) = ready.pop() {
            waiting.remove(&node);
            for next in after.get(&node).into_iter().flatten() {
                let count = waiting.get_mut(next).expect("what waits has not been done");
                *count -= 1;
                if *count == 0 {
                    ready.push(*next);
                }
            }
        }
        let Some(((number, mb), _)) = waiting.pop_first() else { return Ok(()) };
        let segment = &self.segments[number];
        let place = segment.place.partition().map_or("all".to_owned(), |partition| partition.to_string());
        Err(Error::Unsupported(format!(
            "the schedule cannot order this step: {} of level {} on {place} of microbatch {mb} would wait for itself; with \
             `pipeline: 'simple'` fewer steps do",
            segment.phase.text(),
            segment.level
        )))
    }

    /// A line for each operation and for each rank's returned results and order, the same on all ranks if they have the same
    /// step: for comparing, and to read.
    pub fn lines(&self, orders: &[Vec<Node>]) -> Vec<String> {
        let mut lines = Vec::with_capacity(self.operations.all().len() + 2 * self.ranks());
        for (number, operation) in self.operations.all().iter().enumerate() {
            let takes: Vec<String> =
                operation.takes.iter().map(|taken| format!("%{}:{}", taken.operation, taken.index)).collect();
            let makes: Vec<&str> = operation.makes.iter().map(|made| made.text.as_str()).collect();
            let place = match self.placement.place(number) {
                Place::Free => String::new(),
                Place::All => " on all".to_owned(),
                Place::On(partition) => format!(" on {partition}"),
            };
            let (takes, makes) = (takes.join(", "), makes.join(", "));
            lines.push(format!("%{number}: {}({takes}) -> {makes}{place}", operation.kind));
        }
        for (rank, outputs) in self.wanted.iter().enumerate() {
            let outputs: Vec<String> =
                outputs.iter().map(|output| format!("%{}:{}", output.operation, output.index)).collect();
            lines.push(format!("returned on {rank}: {}", outputs.join(", ")));
        }
        for (rank, order) in orders.iter().enumerate() {
            let nodes: Vec<String> = (order.iter())
                .map(|&(number, mb)| {
                    let segment = &self.segments[number];
                    format!("{}{}{mb}", segment.stage.unwrap_or_default(), segment.phase.text())
                })
                .collect();
            lines.push(format!("order of {rank}: {}", nodes.join(" ")));
        }
        lines
    }
}

/// The phase of the segment that an action computes.
fn phase(kind: Kind) -> Option<Phase> {
    match kind {
        Kind::Forward => Some(Phase::Forward),
        Kind::Backward => Some(Phase::Backward),
        Kind::Input => Some(Phase::Input),
        Kind::Weight => Some(Phase::Weight),
        Kind::SendForward | Kind::RecvForward | Kind::SendBackward | Kind::RecvBackward => None,
    }
}
