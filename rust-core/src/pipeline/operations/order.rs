//! The order in which each rank computes its anchored segments.

use std::collections::{BTreeMap, BTreeSet};

use super::{OperationPlace, SegmentPhase, Segments};
use crate::error::Result;
use crate::pipeline::schedule::{Bounds, Schedule, plan};
use crate::pipeline::{ActionKind, Costs, Edge, Graph, LinkCost, Stage};

/// A segment and a microbatch.
type Node = (usize, usize);

impl Segments<'_> {
    /// For each rank, its anchored segments with their microbatches, in the order of `schedule`. For a step without a
    /// backward, `schedule` is that of an evaluation.
    ///
    /// If a segment's place in that order contradicts dependencies through segments that are not anchored, the
    /// segment becomes not anchored.
    ///
    /// # Errors
    /// As [`plan`].
    pub fn plan(&mut self, microbatches: usize, schedule: Schedule, active: Option<usize>) -> Result<Vec<Vec<Node>>> {
        if self.stages.is_empty() {
            return Ok(vec![Vec::new(); self.ranks()]);
        }
        let schedule = if self.trains { schedule } else { Schedule::ForwardOnly };
        let graph = Graph::new(self.ranks(), microbatches, self.scheduled(), LinkCost::default())?;
        let program = plan(&graph, schedule, Bounds { active_microbatches: active, memory_bytes: None })?;
        let anchored: BTreeMap<(SegmentPhase, usize), usize> = (self.segments.iter().enumerate())
            .filter(|(_, segment)| segment.anchored)
            .filter_map(|(number, segment)| Some(((segment.phase, segment.stage?), number)))
            .collect();
        let segment = |kind, stage| anchored.get(&(phase(kind)?, stage)).copied();
        let mut orders: Vec<Vec<Node>> = (program.ranks().iter())
            .map(|actions| {
                let found = actions.iter().filter_map(|action| {
                    Some((segment(action.kind, action.stage as usize)?, action.microbatch as usize))
                });
                found.collect()
            })
            .collect();
        while let Some(find_cycle) = self.find_cycle(&orders, microbatches) {
            let anchored = find_cycle.into_iter().filter(|&each| self.segments[each].anchored);
            let key =
                |&each: &usize| (self.segments[each].phase == SegmentPhase::Forward, self.segments[each].level, each);
            let free = anchored.min_by_key(key).expect("segments alone depend on each other in one direction");
            self.segments[free].anchored = false;
            orders.iter_mut().for_each(|order| order.retain(|&(segment, _)| segment != free));
        }
        Ok(orders)
    }

    /// The results that anchored segments compute for other ranks, as transfer numbers with microbatches: for each
    /// rank, in the order in which it computes them.
    pub fn messages(&self, orders: &[Vec<Node>]) -> Vec<(usize, usize)> {
        let mut made: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (number, transfer) in self.transfers().iter().enumerate() {
            if let Some(segment) = self.of[transfer.output.operation] {
                made.entry(segment).or_default().push(number);
            }
        }
        let of = |&(segment, mb): &Node| made.get(&segment).into_iter().flatten().map(move |&number| (number, mb));
        orders.iter().flatten().flat_map(of).collect()
    }

    /// The graph for the schedule: the stages, and the loss as one more stage if it depends on several of them.
    fn scheduled(&self) -> Vec<Stage> {
        let mut rows: Vec<Stage> = Vec::with_capacity(self.stages.len() + 1);
        let mut ends = Vec::new();
        for (stage, &number) in self.stages.iter().enumerate() {
            let segment = &self.segments[number];
            let made: u64 = segment
                .operations
                .iter()
                .flat_map(|&each| &self.operations.all()[each].outputs)
                .map(|made| made.bytes)
                .sum();
            let cost = 1 + made / 1024;
            rows.push(Stage {
                rank: segment.place.partition().expect("a forward segment is on a partition"),
                costs: Costs { forward: cost, input: cost, weight: cost },
                activation_bytes: cost,
                waiting_bytes: cost,
                inputs: self.edges_to(number),
                backward: self.trains,
            });
            let mut consumers = segment.operations.iter().flat_map(|&each| self.operations.consumers(each));
            if consumers.any(|&consumer| self.placement.place(consumer) == OperationPlace::All) {
                ends.push(stage);
            }
        }
        if self.trains && ends.len() > 1 {
            // All backwards depend on it.
            rows.push(Stage {
                rank: rows[ends[ends.len() - 1]].rank,
                costs: Costs::UNIT,
                activation_bytes: 0,
                waiting_bytes: 0,
                inputs: ends.into_iter().map(|from| Edge { from, bytes: 0 }).collect(),
                backward: true,
            });
        }
        rows
    }

    /// The stages on which a forward segment depends, directly or through other segments, with the bytes that it uses
    /// of each.
    fn edges_to(&self, number: usize) -> Vec<Edge> {
        let mut edges: BTreeMap<usize, u64> = BTreeMap::new();
        let mut seen = BTreeSet::new();
        // A result, or an operation whose effects the segment waits for.
        let before = |operations: &[usize]| {
            let inputs = self.inputs_of(operations).into_iter().map(|taken| (taken.operation, Some(taken)));
            let waits = operations.iter().flat_map(|&each| &self.operations.all()[each].control_inputs);
            inputs.chain(waits.map(|&other| (other, None))).collect::<Vec<_>>()
        };
        let mut pending = before(&self.segments[number].operations);
        while let Some((operation, taken)) = pending.pop() {
            if !seen.insert((operation, taken)) {
                continue;
            }
            let Some(producer) = self.of[operation].filter(|&producer| producer != number) else { continue };
            if let Some(stage) =
                self.segments[producer].stage.filter(|_| self.segments[producer].phase == SegmentPhase::Forward)
            {
                *edges.entry(stage).or_default() += taken.map_or(0, |taken| self.bytes(taken));
            } else {
                pending.extend(before(&[operation]));
            }
        }
        edges.into_iter().map(|(from, bytes)| Edge { from, bytes }).collect()
    }

    /// Simulates the orders of all ranks; returns segments that wait for each other in a cycle, if there are any.
    fn find_cycle(&self, orders: &[Vec<Node>], microbatches: usize) -> Option<Vec<usize>> {
        let before = self.before(orders, microbatches);
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
        // Every waiting segment waits for another waiting one, so following them leads into a cycle.
        let mut way = vec![*waiting.first_key_value()?.0];
        loop {
            let last = way[way.len() - 1];
            let next = before[&last]
                .iter()
                .find(|each| waiting.contains_key(each))
                .expect("a waiting operation waits for another one");
            if let Some(start) = way.iter().position(|each| each == next) {
                return Some(way[start..].iter().map(|&(segment, _)| segment).collect());
            }
            way.push(*next);
        }
    }

    /// For each microbatch, the segments that must come before each segment.
    fn before(&self, orders: &[Vec<Node>], microbatches: usize) -> BTreeMap<Node, BTreeSet<Node>> {
        let mut before: BTreeMap<Node, BTreeSet<Node>> = BTreeMap::new();
        for (number, segment) in self.segments.iter().enumerate() {
            let inputs = self.inputs_of(&segment.operations);
            let mut same: BTreeSet<usize> = inputs.iter().filter_map(|taken| self.of[taken.operation]).collect();
            same.extend(self.waits_of(number, &segment.operations));
            for mb in 0..microbatches {
                let nodes = before.entry((number, mb)).or_default();
                nodes.extend(same.iter().map(|&other| (other, mb)));
                if mb > 0 {
                    nodes.extend(self.sharing(number).iter().map(|&other| (other, mb - 1)));
                    if !segment.anchored {
                        nodes.insert((number, mb - 1));
                    }
                }
            }
        }
        for pair in orders.iter().flat_map(|order| order.windows(2)) {
            before.entry(pair[1]).or_default().insert(pair[0]);
        }
        before
    }

    /// One line for each operation and for each rank's returned results and order. Ranks with the same step have the
    /// same lines, which are compared and can be printed.
    pub fn lines(&self, orders: &[Vec<Node>]) -> Vec<String> {
        let mut lines = Vec::with_capacity(self.operations.all().len() + 2 * self.ranks());
        for (number, operation) in self.operations.all().iter().enumerate() {
            let inputs: Vec<String> =
                operation.inputs.iter().map(|taken| format!("%{}:{}", taken.operation, taken.index)).collect();
            let outputs: Vec<&str> = operation.outputs.iter().map(|made| made.text.as_str()).collect();
            let place = match self.placement.place(number) {
                OperationPlace::Free => String::new(),
                OperationPlace::All => " on all".to_owned(),
                OperationPlace::On(partition) => format!(" on {partition}"),
            };
            let (inputs, outputs) = (inputs.join(", "), outputs.join(", "));
            let waits: String = operation.control_inputs.iter().map(|other| format!(" after %{other}")).collect();
            lines.push(format!("%{number}: {}({inputs}) -> {outputs}{place}{waits}", operation.kind));
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

/// The phase of the segment that an action runs.
fn phase(kind: ActionKind) -> Option<SegmentPhase> {
    match kind {
        ActionKind::Forward => Some(SegmentPhase::Forward),
        ActionKind::Backward => Some(SegmentPhase::Backward),
        ActionKind::Input => Some(SegmentPhase::Input),
        ActionKind::Weight => Some(SegmentPhase::Weight),
        ActionKind::SendForward | ActionKind::RecvForward | ActionKind::SendBackward | ActionKind::RecvBackward => None,
    }
}
