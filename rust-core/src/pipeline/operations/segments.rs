//! Cuts the operations of a step into segments: the units of computation on a rank, and the transfers between ranks.
//!
//! A segment holds the operations of one place, phase and *level*. The level is the number of changes of place on the
//! longest path to an operation. Segments therefore depend on each other in one direction only, whatever the model's
//! structure.
//!
//! - SEG-1: the forward segments are the stages of the pipeline. The last of the backward segments that use a stage's
//!   activations is its backward. Only these are *anchored*: the schedule fixes their place in a rank's order, unless
//!   an earlier segment depends on them.
//! - SEG-2: an operation whose results are only used later, at its own place, is computed later with its users. A
//!   variable is therefore read for a microbatch after the previous one may have changed it.
//! - SEG-3: effects keep the order of the script. Within a microbatch, a segment comes after the segments whose effects
//!   its operations wait for. It also comes after segments of the previous microbatch that share a variable with it, if
//!   either of them changes that variable.

use std::collections::{BTreeMap, BTreeSet};

use super::{OperationPlace, OperationPlacement, OperationRole, Operations, Output};
use crate::error::{Error, Result};

/// The phase of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SegmentPhase {
    /// Computed on all ranks that need it, at any time.
    Shared,
    /// Part of the model's forward.
    Forward,
    /// Part of the model's backward.
    Backward,
    /// The first half of a backward: the gradients that other ranks wait for.
    Input,
    /// The second half: the gradients of weights.
    Weight,
}

impl SegmentPhase {
    /// The letter of the corresponding action in programs.
    pub fn text(self) -> &'static str {
        match self {
            SegmentPhase::Shared => "R",
            SegmentPhase::Forward => "F",
            SegmentPhase::Backward => "B",
            SegmentPhase::Input => "I",
            SegmentPhase::Weight => "W",
        }
    }
}

/// Operations of one place, phase and level, which run as one function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// One partition, or all.
    pub place: OperationPlace,
    /// The phase.
    pub phase: SegmentPhase,
    /// Number of changes of place before it.
    pub level: usize,
    /// The operations, in their order.
    pub operations: Vec<usize>,
    /// The stage of a forward segment. For a backward segment, the stage whose activations it uses.
    pub stage: Option<usize>,
    /// Whether the schedule fixes its place (SEG-1).
    pub anchored: bool,
}

/// A result that is sent to other ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The result.
    pub output: Output,
    /// The partition that sends it.
    pub from: usize,
    /// The partitions that receive it.
    pub to: Vec<usize>,
}

/// A segment that another one comes after without using its results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ControlDependency {
    /// The segment that comes first.
    pub segment: usize,
    /// 0 for the same microbatch, 1 for the previous one.
    pub back: usize,
}

/// A message that tells other ranks that the effects of a segment have happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signal {
    /// The segment.
    pub segment: usize,
    /// The partition that computes it.
    pub from: usize,
    /// The partitions that wait for it.
    pub to: Vec<usize>,
}

/// The segments of a step, and the transfers between them.
#[derive(Debug)]
pub struct Segments<'a> {
    pub(super) operations: &'a Operations,
    pub(super) placement: &'a OperationPlacement,
    pub(super) segments: Vec<Segment>,
    /// The forward segments, in order.
    pub(super) stages: Vec<usize>,
    pub(super) trains: bool,
    /// The segment of each operation.
    pub(super) of: Vec<Option<usize>>,
    live: Vec<bool>,
    pub(super) wanted: Vec<BTreeSet<Output>>,
    /// For each rank, the operations that it computes.
    needed: Vec<Vec<bool>>,
    transfers: Vec<Transfer>,
    crossing: BTreeSet<Output>,
    /// For each segment, the segments that share a variable with it which either of the two changes.
    sharing: Vec<BTreeSet<usize>>,
    signals: Vec<Signal>,
}

impl<'a> Segments<'a> {
    /// Cuts the operations. `wanted` gives for each rank the results that the step returns there. With `halves`, each
    /// anchored backward becomes two segments.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a result that cannot pass between ranks would have to.
    pub fn cut(
        operations: &'a Operations,
        placement: &'a OperationPlacement,
        wanted: &[Vec<Output>],
        halves: bool,
    ) -> Result<Self> {
        let effects = (0..operations.all().len()).filter(|&each| operations.all()[each].has_effect);
        let live = operations.needed_by(wanted.iter().flatten().map(|output| output.operation).chain(effects));
        let mut found = Self {
            operations,
            placement,
            segments: Vec::new(),
            stages: Vec::new(),
            trains: false,
            of: vec![None; operations.all().len()],
            live,
            wanted: wanted.iter().map(|outputs| outputs.iter().copied().collect()).collect(),
            needed: Vec::new(),
            transfers: Vec::new(),
            crossing: BTreeSet::new(),
            sharing: Vec::new(),
            signals: Vec::new(),
        };
        found.make_segments();
        found.make_stages();
        found.needed = (0..wanted.len()).map(|rank| found.needed_on(rank)).collect();
        found.find_transfers()?;
        if halves {
            found.halve_backwards();
        }
        found.find_sharing();
        found.find_signals();
        Ok(found)
    }

    /// All segments, in an order in which they can be computed.
    pub fn all(&self) -> &[Segment] {
        &self.segments
    }

    /// The results that are sent to other ranks, in the same order on all ranks.
    pub fn transfers(&self) -> &[Transfer] {
        &self.transfers
    }

    /// The signals of effects, in the same order on all ranks.
    pub fn signals(&self) -> &[Signal] {
        &self.signals
    }

    /// Number of ranks of the pipeline.
    pub fn ranks(&self) -> usize {
        self.needed.len()
    }

    /// The operations of a segment that `rank` computes.
    pub fn on(&self, segment: usize, rank: usize) -> Vec<usize> {
        let segment = &self.segments[segment];
        let here = |&&operation: &&usize| match segment.place {
            OperationPlace::On(partition) => partition == rank,
            OperationPlace::Free | OperationPlace::All => self.needed[rank][operation],
        };
        segment.operations.iter().filter(here).copied().collect()
    }

    /// The results that `operations` use and do not compute, in order of use. Results that every rank can compute are
    /// left out.
    pub fn inputs_of(&self, operations: &[usize]) -> Vec<Output> {
        let made: BTreeSet<usize> = operations.iter().copied().collect();
        let mut seen = BTreeSet::new();
        let inputs = operations.iter().flat_map(|&each| &self.operations.all()[each].inputs).copied();
        inputs
            .filter(|taken| !made.contains(&taken.operation))
            .filter(|taken| self.placement.place(taken.operation) != OperationPlace::Free)
            .filter(|taken| seen.insert(*taken))
            .collect()
    }

    /// The segments after which `rank` computes its part of a segment (SEG-3).
    pub fn after(&self, segment: usize, rank: usize) -> Vec<ControlDependency> {
        let here = self.on(segment, rank);
        if here.is_empty() {
            return Vec::new();
        }
        let waits = self.waits_of(segment, &here).into_iter().map(|segment| ControlDependency { segment, back: 0 });
        let shares = self.sharing[segment].iter().filter(|&&other| !self.on(other, rank).is_empty());
        waits.chain(shares.map(|&segment| ControlDependency { segment, back: 1 })).collect()
    }

    /// The segments whose effects `operations`, all of one segment, wait for.
    pub(super) fn waits_of(&self, segment: usize, operations: &[usize]) -> BTreeSet<usize> {
        let waits = operations.iter().flat_map(|&each| &self.operations.all()[each].control_inputs);
        waits.filter_map(|&other| self.of[other]).filter(|&other| other != segment).collect()
    }

    /// The segments that share a variable with this one which either of the two changes.
    pub(super) fn sharing(&self, segment: usize) -> &BTreeSet<usize> {
        &self.sharing[segment]
    }

    /// The results of `operations`, a segment that `rank` computes, that it or other ranks use.
    pub fn outputs_of(&self, operations: &[usize], rank: usize) -> Vec<Output> {
        let made: BTreeSet<usize> = operations.iter().copied().collect();
        let outputs = operations.iter().flat_map(|&each| self.outputs(each));
        let needed = outputs.filter(|output| {
            let mut consumers = self.consumers_of(*output).filter(|consumer| !made.contains(consumer));
            self.wanted[rank].contains(output)
                || self.crossing.contains(output)
                || consumers.any(|consumer| self.needed[rank][consumer])
        });
        needed.collect()
    }

    fn outputs(&self, operation: usize) -> impl Iterator<Item = Output> + use<> {
        (0..self.operations.all()[operation].outputs.len()).map(move |index| Output { operation, index })
    }

    fn consumers_of(&self, output: Output) -> impl Iterator<Item = usize> + '_ {
        let consumers = self.operations.consumers(output.operation).iter().copied();
        consumers.filter(move |&consumer| self.operations.all()[consumer].inputs.contains(&output))
    }

    /// Placeholders are not computed.
    fn is_computed(&self, operation: usize) -> bool {
        self.live[operation] && self.operations.all()[operation].role != OperationRole::Input
    }

    fn make_segments(&mut self) {
        let (operations, placement) = (self.operations, self.placement);
        let count = operations.all().len();
        let phase = |each: usize| match placement.place(each) {
            OperationPlace::Free | OperationPlace::All => SegmentPhase::Shared,
            OperationPlace::On(_) if placement.is_forward(operations, each) => SegmentPhase::Forward,
            OperationPlace::On(_) => SegmentPhase::Backward,
        };
        let home = |each: usize| (placement.place(each), phase(each));
        let computed: Vec<usize> = (0..count).filter(|&each| self.is_computed(each)).collect();
        let mut consumers = vec![Vec::new(); count];
        for &each in &computed {
            operations.before(each).for_each(|other| consumers[other].push(each));
        }
        let mut levels: Vec<usize> = (0..count).map(|each| placement.level(each)).collect();
        // SEG-2. First the forward, whose users in the backward come later anyway, but not before its inputs; then the
        // rest.
        let movable = |&&each: &&usize| !operations.all()[each].has_effect && !consumers[each].is_empty();
        for &each in computed.iter().rev().filter(movable).filter(|&&each| phase(each) == SegmentPhase::Forward) {
            let ours = consumers[each].iter().filter(|&&consumer| phase(consumer) == SegmentPhase::Forward);
            if consumers[each].iter().all(|&consumer| placement.place(consumer) == placement.place(each))
                && let Some(level) = ours.map(|&consumer| levels[consumer]).min()
            {
                levels[each] = level;
            }
        }
        for &each in &computed {
            let after = operations.before(each).map(|other| levels[other] + placement.changes(operations, other, each));
            levels[each] = after.fold(levels[each], usize::max);
        }
        for &each in computed.iter().rev().filter(movable).filter(|&&each| phase(each) != SegmentPhase::Forward) {
            if consumers[each].iter().all(|&consumer| home(consumer) == home(each))
                && let Some(level) = consumers[each].iter().map(|&consumer| levels[consumer]).min()
            {
                levels[each] = level;
            }
        }
        let mut groups: BTreeMap<(usize, SegmentPhase, OperationPlace), Vec<usize>> = BTreeMap::new();
        for each in computed.into_iter().filter(|&each| placement.place(each) != OperationPlace::Free) {
            groups.entry((levels[each], phase(each), placement.place(each))).or_default().push(each);
        }
        for (number, ((level, phase, place), operations)) in groups.into_iter().enumerate() {
            operations.iter().for_each(|&each| self.of[each] = Some(number));
            self.segments.push(Segment { place, phase, level, operations, stage: None, anchored: false });
        }
    }

    fn make_stages(&mut self) {
        self.stages =
            (0..self.segments.len()).filter(|&each| self.segments[each].phase == SegmentPhase::Forward).collect();
        for (stage, &segment) in self.stages.iter().enumerate() {
            (self.segments[segment].stage, self.segments[segment].anchored) = (Some(stage), true);
        }
        let mut last: BTreeMap<usize, usize> = BTreeMap::new();
        for number in 0..self.segments.len() {
            if self.segments[number].phase == SegmentPhase::Backward
                && let Some(stage) = self.stage_used_by(number)
            {
                self.segments[number].stage = Some(stage);
                last.insert(stage, number);
            }
        }
        self.trains = !last.is_empty();
        last.into_values().for_each(|number| self.segments[number].anchored = true);
    }

    /// The stage of its own place from which a segment uses most results; the first one of equals.
    fn stage_used_by(&self, number: usize) -> Option<usize> {
        let mut used: Vec<(usize, u64)> = Vec::new();
        for taken in self.inputs_of(&self.segments[number].operations) {
            let Some(producer) = self.of[taken.operation].map(|producer| &self.segments[producer]) else { continue };
            if producer.phase == SegmentPhase::Forward
                && producer.place == self.segments[number].place
                && let Some(stage) = producer.stage
            {
                let bytes = self.bytes(taken) + 1;
                match used.iter_mut().find(|(other, _)| *other == stage) {
                    Some((_, sum)) => *sum += bytes,
                    None => used.push((stage, bytes)),
                }
            }
        }
        used.into_iter().reduce(|most, each| if each.1 > most.1 { each } else { most }).map(|(stage, _)| stage)
    }

    pub(super) fn bytes(&self, output: Output) -> u64 {
        self.operations.all()[output.operation].outputs[output.index].bytes
    }

    /// The operations of a rank, and those on all ranks that it computes.
    fn needed_on(&self, rank: usize) -> Vec<bool> {
        let place = |each: usize| self.placement.place(each);
        let all = 0..self.operations.all().len();
        let own = all.clone().filter(|&each| self.is_computed(each) && place(each) == OperationPlace::On(rank));
        let effects = all.filter(|&each| self.operations.all()[each].has_effect && place(each) == OperationPlace::All);
        let wanted = self.wanted[rank].iter().map(|output| output.operation);
        let mut pending: Vec<usize> = wanted.chain(effects).filter(|&each| place(each).partition().is_none()).collect();
        pending.extend(own);
        let mut found = vec![false; self.operations.all().len()];
        while let Some(each) = pending.pop() {
            if !std::mem::replace(&mut found[each], true) {
                pending.extend(self.operations.before(each).filter(|&other| place(other).partition().is_none()));
            }
        }
        found
    }

    fn find_transfers(&mut self) -> Result<()> {
        for operation in 0..self.operations.all().len() {
            let (true, OperationPlace::On(from)) = (self.is_computed(operation), self.placement.place(operation))
            else {
                continue;
            };
            for output in self.outputs(operation) {
                let consumers: Vec<usize> = self.consumers_of(output).filter(|&consumer| self.live[consumer]).collect();
                let receives = |rank: &usize| {
                    self.wanted[*rank].contains(&output)
                        || consumers.iter().any(|&consumer| self.needed[*rank][consumer])
                };
                let to: Vec<usize> = (0..self.ranks()).filter(|&rank| rank != from).filter(receives).collect();
                let Some(first) = to.first() else { continue };
                let producer = &self.operations.all()[operation];
                if let Some(what) = &producer.outputs[output.index].not_transferable {
                    return Err(Error::Unsupported(format!(
                        "`{}:{}`, a tensor {what}, would pass from partition {from} to {first}: put the operations around it \
                         on one partition",
                        producer.name, output.index
                    )));
                }
                self.crossing.insert(output);
                self.transfers.push(Transfer { output, from, to });
            }
        }
        Ok(())
    }

    fn find_sharing(&mut self) {
        let mut users: BTreeMap<usize, (BTreeSet<usize>, BTreeSet<usize>)> = BTreeMap::new();
        for (number, operation) in self.operations.all().iter().enumerate() {
            let Some(segment) = self.of[number] else { continue };
            for &variable in &operation.variables {
                let (all, changing) = users.entry(variable).or_default();
                all.insert(segment);
                if operation.assigns {
                    changing.insert(segment);
                }
            }
        }
        self.sharing = vec![BTreeSet::new(); self.segments.len()];
        for (all, changing) in users.values() {
            for (&one, &other) in changing.iter().flat_map(|one| all.iter().map(move |other| (one, other))) {
                if one != other {
                    self.sharing[one].insert(other);
                    self.sharing[other].insert(one);
                }
            }
        }
    }

    fn find_signals(&mut self) {
        let mut signalled: BTreeMap<(usize, usize), BTreeSet<usize>> = BTreeMap::new();
        for segment in 0..self.segments.len() {
            for rank in 0..self.ranks() {
                for other in self.waits_of(segment, &self.on(segment, rank)) {
                    if let OperationPlace::On(from) = self.segments[other].place
                        && from != rank
                    {
                        signalled.entry((other, from)).or_default().insert(rank);
                    }
                }
            }
        }
        let signal =
            |((segment, from), to): (_, BTreeSet<usize>)| Signal { segment, from, to: to.into_iter().collect() };
        self.signals = signalled.into_iter().map(signal).collect();
    }

    /// Divides anchored backwards into the gradients that other ranks wait for, and the gradients of variables.
    fn halve_backwards(&mut self) {
        let mut halved = Vec::new();
        for mut segment in std::mem::take(&mut self.segments) {
            if segment.phase != SegmentPhase::Backward || !segment.anchored {
                halved.push(segment);
                continue;
            }
            let inside: BTreeSet<usize> = segment.operations.iter().copied().collect();
            let goes_out = |&each: &usize| {
                let mut consumers = self.operations.consumers(each).iter();
                consumers.any(|consumer| !inside.contains(consumer) && self.of[*consumer].is_some())
            };
            let first = self.operations.needed_by(segment.operations.iter().copied().filter(goes_out));
            segment.phase = SegmentPhase::Weight;
            let (waited_for, rest) = segment.operations.iter().partition(|&&each| first[each]);
            segment.operations = rest;
            let half = Segment { phase: SegmentPhase::Input, operations: waited_for, ..segment.clone() };
            halved.extend([half, segment].into_iter().filter(|half| !half.operations.is_empty()));
        }
        self.segments = halved;
        for (number, segment) in self.segments.iter().enumerate() {
            segment.operations.iter().for_each(|&each| self.of[each] = Some(number));
        }
        self.stages =
            (0..self.segments.len()).filter(|&each| self.segments[each].phase == SegmentPhase::Forward).collect();
    }
}
