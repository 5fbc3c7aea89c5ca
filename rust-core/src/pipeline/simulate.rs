//! Simulates a program: when each task starts and ends, and what it waits for.
//!
//! Each rank has a clock and a position in its list. A task starts when its rank is free and its inputs have arrived; a
//! transfer occupies the link and no rank. Since lists fix the order, no event queue is needed: ranks are run one after
//! the other, each until it waits for another rank.

use std::collections::{HashMap, VecDeque};

use super::{Action, ActionKind, Graph, Program};
use crate::error::{Error, Result};

/// The time span of one task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskSpan {
    /// The task.
    pub action: Action,
    /// Start, in the unit of the graph's costs.
    pub start: u64,
    /// End, in the same unit.
    pub end: u64,
}

/// The result of [`simulate`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeline {
    /// For each rank its tasks in order, without transfers.
    pub spans: Vec<Vec<TaskSpan>>,
    /// Time from the start of the first task to the end of the last one.
    pub step_time: u64,
    /// For each rank, the time that it computes.
    pub busy: Vec<u64>,
    /// For each rank, the peak of saved activations, in bytes.
    pub peak_bytes: Vec<u64>,
    /// For each rank, the most microbatches in flight at once: begun and not ended.
    pub active_microbatches: Vec<usize>,
}

impl Timeline {
    /// The share of the ranks' time spent waiting, from 0 to 1.
    pub fn bubble(&self) -> f64 {
        let whole = self.step_time as f64 * self.busy.len() as f64;
        if whole == 0.0 { 0.0 } else { 1.0 - self.busy.iter().sum::<u64>() as f64 / whole }
    }
}

/// Simulates `program`. If it has no transfers, values arrive as soon as the link allows.
///
/// # Errors
/// [`Error::InvalidArgument`] if the program does not belong to the graph, runs a task twice, or deadlocks; the text
/// names the tasks that wait.
pub fn simulate(graph: &Graph, program: &Program) -> Result<Timeline> {
    let mut machine = SimulatedRanks::new(graph, program)?;
    // Last in, first out: the rank that was woken last runs on while its lists are in the cache.
    let mut runnable: Vec<usize> = (0..graph.ranks()).rev().collect();
    while let Some(rank) = runnable.pop() {
        machine.run(rank, &mut runnable)?;
    }
    machine.finish()
}

/// The end of a task that has not run.
const NEVER: u64 = u64::MAX;

struct SimulatedRanks<'a> {
    graph: &'a Graph,
    program: &'a Program,
    /// Whether the program has transfers. Otherwise tasks read the end times of their inputs' tasks.
    sends: bool,
    clocks: Vec<u64>,
    places: Vec<usize>,
    /// Ranks that wait for another rank.
    blocked: Vec<bool>,
    /// End times of forwards, of backwards (of their first part, where they are split) and of their second part, by
    /// stage and microbatch.
    forwards: Vec<u64>,
    backwards: Vec<u64>,
    weights: Vec<u64>,
    /// Messages in flight with their arrival times, by source and destination rank.
    channels: HashMap<(usize, usize), VecDeque<(Action, u64)>>,
    /// Values and gradients that have arrived from other ranks, by stage and microbatch.
    values: Vec<u16>,
    gradients: Vec<u16>,
    kept_bytes: Vec<u64>,
    active: ActiveMicrobatches,
    timeline: Timeline,
}

/// Counts the microbatches in flight on each rank: begun and not ended.
struct ActiveMicrobatches {
    /// Whether the program has backwards, which need the saved activations.
    backwards: bool,
    /// Number of forwards and backwards that a rank runs for each microbatch.
    per_microbatch: Vec<u32>,
    /// How many of them are left, by rank and microbatch.
    left: Vec<Vec<u32>>,
    now: Vec<usize>,
}

impl ActiveMicrobatches {
    fn new(graph: &Graph, program: &Program) -> Self {
        let mut backwards = program.ranks().iter().flatten();
        let backwards = backwards.any(|action| matches!(action.kind, ActionKind::Backward | ActionKind::Weight));
        let mut per_microbatch = vec![0; graph.ranks()];
        for stage in graph.stages() {
            per_microbatch[stage.rank] += 1 + u32::from(backwards && stage.backward);
        }
        let left = per_microbatch.iter().map(|&count| vec![count; graph.microbatches()]).collect();
        Self { backwards, per_microbatch, left, now: vec![0; graph.ranks()] }
    }

    /// Counts a finished forward or backward of `microbatch`. Returns how many microbatches were in flight during it.
    fn note(&mut self, rank: usize, microbatch: usize) -> usize {
        let left = &mut self.left[rank][microbatch];
        self.now[rank] += usize::from(*left == self.per_microbatch[rank]);
        let now = self.now[rank];
        *left -= 1;
        self.now[rank] -= usize::from(*left == 0);
        now
    }
}

impl<'a> SimulatedRanks<'a> {
    fn new(graph: &'a Graph, program: &'a Program) -> Result<Self> {
        if program.ranks().len() != graph.ranks() {
            return Err(Error::InvalidArgument(format!(
                "a program of {} ranks for a pipeline of {}",
                program.ranks().len(),
                graph.ranks()
            )));
        }
        let sends = program.ranks().iter().flatten().any(|action| !action.kind.computes());
        let tasks = graph.stages().len() * graph.microbatches();
        let ranks = graph.ranks();
        let received = if sends { tasks } else { 0 };
        Ok(Self {
            graph,
            program,
            sends,
            clocks: vec![0; ranks],
            places: vec![0; ranks],
            blocked: vec![false; ranks],
            forwards: vec![NEVER; tasks],
            backwards: vec![NEVER; tasks],
            weights: vec![NEVER; tasks],
            channels: HashMap::new(),
            values: vec![0; received],
            gradients: vec![0; received],
            kept_bytes: vec![0; ranks],
            active: ActiveMicrobatches::new(graph, program),
            timeline: Timeline {
                spans: program.ranks().iter().map(|actions| Vec::with_capacity(actions.len())).collect(),
                step_time: 0,
                busy: vec![0; ranks],
                peak_bytes: vec![0; ranks],
                active_microbatches: vec![0; ranks],
            },
        })
    }

    fn index(&self, stage: usize, microbatch: usize) -> usize {
        stage * self.graph.microbatches() + microbatch
    }

    /// Runs `rank` until it waits or its list is done. Ranks that waited for its tasks become runnable.
    fn run(&mut self, rank: usize, runnable: &mut Vec<usize>) -> Result<()> {
        self.blocked[rank] = false;
        while let Some(&action) = self.program.rank(rank).get(self.places[rank]) {
            self.check(rank, action)?;
            let ready = match self.ready(rank, action)? {
                Some(ready) => ready,
                None => {
                    self.blocked[rank] = true;
                    return Ok(());
                }
            };
            self.places[rank] += 1;
            self.perform(rank, action, ready, runnable);
        }
        Ok(())
    }

    /// Checks that the action belongs to this rank and graph.
    fn check(&self, rank: usize, action: Action) -> Result<()> {
        let stages = self.graph.stages().len();
        let wrong = |what: &str| Err(Error::InvalidArgument(format!("rank {rank} has `{action}`: {what}")));
        if action.stage as usize >= stages || action.peer.is_some_and(|peer| peer as usize >= stages) {
            return wrong(&format!("there are {stages} stages"));
        }
        if action.microbatch as usize >= self.graph.microbatches() {
            return wrong(&format!("there are {} microbatches", self.graph.microbatches()));
        }
        let stage = self.graph.stage(action.stage as usize);
        if stage.rank != rank {
            return wrong(&format!("the stage is on rank {}", stage.rank));
        }
        if matches!(action.kind, ActionKind::Backward | ActionKind::Input | ActionKind::Weight) && !stage.backward {
            return wrong("the stage has no backward");
        }
        if let Some(peer) = action.peer {
            let (from, to) = match action.kind {
                ActionKind::SendForward | ActionKind::RecvBackward => (action.stage as usize, peer as usize),
                _ => (peer as usize, action.stage as usize),
            };
            let known = self.graph.stage(to).inputs.iter().any(|edge| edge.from == from);
            if !known || self.graph.stage(peer as usize).rank == rank {
                return wrong("no message passes between these stages");
            }
        }
        Ok(())
    }

    /// Returns the earliest start of the action, or `None` if it waits for another rank.
    fn ready(&self, rank: usize, action: Action) -> Result<Option<u64>> {
        let (stage, microbatch) = (action.stage as usize, action.microbatch as usize);
        let index = self.index(stage, microbatch);
        let twice = || Err(Error::InvalidArgument(format!("rank {rank} has `{action}` twice")));
        let early = |what: &str| Err(Error::InvalidArgument(format!("rank {rank} has `{action}` before {what}")));
        match action.kind {
            ActionKind::Forward => {
                if self.forwards[index] != NEVER {
                    return twice();
                }
                let inputs = &self.graph.stage(stage).inputs;
                let ends = inputs.iter().map(|edge| (edge.from, edge.bytes, &self.forwards));
                self.arrived(rank, stage, microbatch, ends, self.values.get(index).copied())
            }
            ActionKind::Backward | ActionKind::Input => {
                if self.backwards[index] != NEVER {
                    return twice();
                }
                if self.forwards[index] == NEVER {
                    return early("its forward");
                }
                let consumers = self.graph.consumers(stage).iter();
                let ends = consumers.map(|&(to, bytes)| (to, bytes, &self.backwards));
                self.arrived(rank, stage, microbatch, ends, self.gradients.get(index).copied())
            }
            ActionKind::Weight => {
                if self.weights[index] != NEVER {
                    return twice();
                }
                if self.backwards[index] == NEVER {
                    return early("the gradients of its inputs");
                }
                Ok(Some(self.clocks[rank]))
            }
            ActionKind::SendForward if self.forwards[index] == NEVER => early("the forward that computes the value"),
            ActionKind::SendBackward if self.backwards[index] == NEVER => {
                early("the backward that computes the gradient")
            }
            ActionKind::SendForward | ActionKind::SendBackward => Ok(Some(self.clocks[rank])),
            ActionKind::RecvForward | ActionKind::RecvBackward => {
                let sender = self.graph.stage(action.peer.expect("a receive has a peer") as usize).rank;
                match self.channels.get(&(sender, rank)).and_then(VecDeque::front) {
                    None => Ok(None),
                    Some(&(message, at)) if Some(message) == action.counterpart() => Ok(Some(at)),
                    Some((message, _)) => Err(Error::InvalidArgument(format!(
                        "rank {rank} has `{action}`, but rank {sender}'s next message to it is `{message}`"
                    ))),
                }
            }
        }
    }

    /// Returns when all of `sources` (stages, bytes, and where their end times are) have arrived at `stage`.
    fn arrived<'b>(
        &self,
        rank: usize,
        stage: usize,
        microbatch: usize,
        sources: impl Iterator<Item = (usize, u64, &'b Vec<u64>)>,
        received: Option<u16>,
    ) -> Result<Option<u64>> {
        let mut at = self.clocks[rank];
        let mut messages = 0;
        for (source, bytes, ends) in sources {
            let local = self.graph.stage(source).rank == rank;
            if !local && self.sends {
                messages += 1;
                continue;
            }
            let end = ends[self.index(source, microbatch)];
            if end == NEVER {
                // No other rank can produce what this rank itself has yet to compute.
                return if local { self.deadlock(&[rank]) } else { Ok(None) };
            }
            at = at.max(end + self.graph.transfer(source, stage, bytes));
        }
        match received {
            Some(received) if received < messages => Err(Error::InvalidArgument(format!(
                "rank {rank} has `{}` before its inputs are received",
                self.program.rank(rank)[self.places[rank]]
            ))),
            _ => Ok(Some(at)),
        }
    }

    fn keep(&mut self, rank: usize, bytes: u64) {
        self.kept_bytes[rank] += bytes;
        let peak = &mut self.timeline.peak_bytes[rank];
        *peak = (*peak).max(self.kept_bytes[rank]);
    }

    fn perform(&mut self, rank: usize, action: Action, ready: u64, runnable: &mut Vec<usize>) {
        let (stage, microbatch) = (action.stage as usize, action.microbatch as usize);
        let index = self.index(stage, microbatch);
        let description = self.graph.stage(stage);
        let start = self.clocks[rank].max(ready);
        let cost = match action.kind {
            ActionKind::Forward => description.costs.forward,
            ActionKind::Backward => description.costs.input + description.costs.weight,
            ActionKind::Input => description.costs.input,
            ActionKind::Weight => description.costs.weight,
            _ => 0,
        };
        let end = start + cost;
        self.clocks[rank] = end;
        if action.kind.computes() {
            self.timeline.spans[rank].push(TaskSpan { action, start, end });
            self.timeline.busy[rank] += cost;
            self.timeline.step_time = self.timeline.step_time.max(end);
        }
        match action.kind {
            ActionKind::Forward => {
                self.forwards[index] = end;
                if description.backward && self.active.backwards {
                    self.keep(rank, description.activation_bytes);
                }
            }
            ActionKind::Backward => {
                self.backwards[index] = end;
                self.kept_bytes[rank] -= description.activation_bytes;
            }
            ActionKind::Input => {
                self.backwards[index] = end;
                self.kept_bytes[rank] -= description.activation_bytes;
                self.keep(rank, description.waiting_bytes);
            }
            ActionKind::Weight => self.kept_bytes[rank] -= description.waiting_bytes,
            ActionKind::RecvForward => self.values[index] += 1,
            ActionKind::RecvBackward => self.gradients[index] += 1,
            ActionKind::SendForward | ActionKind::SendBackward => {}
        }
        if matches!(action.kind, ActionKind::Backward | ActionKind::Weight) {
            self.weights[index] = end;
        }
        if matches!(action.kind, ActionKind::Forward | ActionKind::Backward | ActionKind::Weight) {
            let active = self.active.note(rank, microbatch);
            let most = &mut self.timeline.active_microbatches[rank];
            *most = (*most).max(active);
        }
        if let Some(peer) = action.peer {
            let other = self.graph.stage(peer as usize).rank;
            if action.kind.sends() {
                let (from, to) =
                    if action.kind == ActionKind::SendForward { (stage, peer) } else { (peer as usize, stage as u32) };
                let consumers = self.graph.consumers(from).iter();
                let bytes = consumers.filter(|consumer| consumer.0 == to as usize).map(|consumer| consumer.1).sum();
                let queue = self.channels.entry((rank, other)).or_default();
                let before = queue.back().map_or(0, |&(_, at)| at);
                queue.push_back((action, before.max(end + self.graph.link().time(bytes))));
                self.wake(other, runnable);
            } else {
                let queue = self.channels.get_mut(&(other, rank)).expect("a message was looked at");
                queue.pop_front();
            }
        } else if !self.sends {
            let graph = self.graph;
            match action.kind {
                ActionKind::Forward => {
                    graph.consumers(stage).iter().for_each(|&(to, _)| self.wake(graph.stage(to).rank, runnable))
                }
                ActionKind::Backward | ActionKind::Input => {
                    description.inputs.iter().for_each(|edge| self.wake(graph.stage(edge.from).rank, runnable));
                }
                _ => {}
            }
        }
    }

    fn wake(&mut self, rank: usize, runnable: &mut Vec<usize>) {
        if std::mem::take(&mut self.blocked[rank]) {
            runnable.push(rank);
        }
    }

    /// Reports a deadlock.
    fn deadlock<T>(&self, ranks: &[usize]) -> Result<T> {
        let waits: Vec<String> = ranks
            .iter()
            .map(|&rank| format!("rank {rank} at `{}`", self.program.rank(rank)[self.places[rank]]))
            .collect();
        Err(Error::InvalidArgument(format!("the program deadlocks: {}", waits.join(", "))))
    }

    fn finish(self) -> Result<Timeline> {
        let waiting: Vec<usize> =
            (0..self.graph.ranks()).filter(|&rank| self.places[rank] < self.program.rank(rank).len()).collect();
        if !waiting.is_empty() {
            return self.deadlock(&waiting[..waiting.len().min(8)]);
        }
        if let Some(((_, rank), queue)) =
            self.channels.iter().filter(|(_, queue)| !queue.is_empty()).min_by_key(|(key, _)| **key)
        {
            return Err(Error::InvalidArgument(format!("rank {rank} never receives `{}`", queue[0].0)));
        }
        Ok(self.timeline)
    }
}
