//! A list scheduler: it simulates time, and whenever a rank is free it starts the runnable task that the policy
//! prefers. The order in which tasks start is the program (PIPE-1).

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::{LIGHT_PART, Schedule};
use crate::error::{Error, Result};
use crate::pipeline::{Action, ActionKind, Graph, Program, Stage};

/// Orders the computations of all ranks. `active` gives for each rank the most microbatches in flight; `wished` gives
/// the number for zero bubble.
pub(super) fn order(graph: &Graph, schedule: Schedule, active: &[usize], wished: Option<usize>) -> Result<Program> {
    let mut scheduler = Scheduler::new(graph, schedule, active, wished);
    scheduler.run();
    let planned: usize = scheduler.lists.iter().map(Vec::len).sum();
    let expected =
        graph.microbatches() * graph.stages().iter().map(|stage| scheduler.kinds(stage.backward).len()).sum::<usize>();
    if planned != expected {
        return Err(Error::Internal(format!("the schedule `{schedule}` stopped after {planned} of {expected} tasks")));
    }
    Ok(Program::new(scheduler.lists))
}

/// The progress of a stage. Microbatches come in order (PIPE-4), so counters are enough.
struct StageState {
    /// For each of the next forwards, how many inputs have not arrived; likewise for gradients of the next backwards.
    inputs: Awaited,
    gradients: Awaited,
    /// The next microbatch of each kind of task.
    forward: usize,
    backward: usize,
    weight: usize,
    forward_ended: usize,
    backward_ended: usize,
    /// Number of microbatches whose tasks have all run.
    ended: usize,
    /// How many forwards may be ahead of backwards.
    ahead: usize,
    /// Whether it takes so little time and memory that it runs first and does not count in [`Scheduler::kept`], see
    /// [`light`].
    light: bool,
}

/// Counts what has not arrived for each of the next microbatches.
struct Awaited {
    each: usize,
    left: VecDeque<usize>,
}

impl Awaited {
    fn new(each: usize) -> Self {
        Self { each, left: VecDeque::new() }
    }

    /// Counts an arrival for the microbatch that is `distance` after the next one.
    fn arrive(&mut self, distance: usize) {
        while self.left.len() <= distance {
            self.left.push_back(self.each);
        }
        self.left[distance] -= 1;
    }

    /// Whether everything for the next microbatch has arrived.
    fn complete(&self) -> bool {
        self.left.front().copied().unwrap_or(self.each) == 0
    }

    /// Moves on to the following microbatch.
    fn advance(&mut self) {
        self.left.pop_front();
    }
}

struct Scheduler<'a> {
    graph: &'a Graph,
    schedule: Schedule,
    /// Maximum number of microbatches in flight on each rank.
    active: Vec<usize>,
    /// Maximum number of activations that a rank may keep, in stages that are not light. It applies only where backwards
    /// are split, since a deferred second part keeps activations longer than 1F1B would.
    kept: usize,
    stages: Vec<StageState>,
    /// The stages of each rank.
    own: Vec<Vec<usize>>,
    /// The microbatches that each rank has begun.
    begun: Vec<usize>,
    busy: Vec<bool>,
    events: BinaryHeap<Reverse<(u64, ScheduleEvent)>>,
    lists: Vec<Vec<Action>>,
}

/// An event: the end of a task, or the arrival of an input of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ScheduleEvent {
    End(usize, ActionKind),
    Value(usize, usize),
    Gradient(usize, usize),
}

/// The stages that are light, such as an embedding on the rank of the output layer whose parameter it shares. Together,
/// those of a rank need less than one part in [`LIGHT_PART`] of its time and of its activations.
fn light(graph: &Graph) -> Vec<bool> {
    let time = |stage: &Stage| stage.costs.forward + stage.costs.input + stage.costs.weight;
    let mut light = vec![false; graph.stages().len()];
    for rank in 0..graph.ranks() {
        let own = (graph.stages().iter().enumerate()).filter(|(_, stage)| stage.rank == rank && stage.backward);
        let mut own: Vec<(u64, u64, usize)> =
            own.map(|(index, stage)| (time(stage), stage.activation_bytes, index)).collect();
        own.sort_unstable();
        let whole_time: u64 = own.iter().map(|(time, ..)| time).sum();
        let whole_bytes: u64 = own.iter().map(|(_, bytes, _)| bytes).sum();
        let (mut light_time, mut light_bytes) = (0_u64, 0_u64);
        let part = |sum: u64, whole: u64| sum.saturating_mul(LIGHT_PART) < whole;
        for (time, bytes, index) in own {
            light_time += time;
            light[index] = part(light_time, whole_time) && part(light_bytes + bytes, whole_bytes);
            if light[index] {
                light_bytes += bytes;
            }
        }
    }
    light
}

/// How many forwards each stage may be ahead of its backwards if the first stage may be `active` ahead; the others
/// follow in proportion. Twice as many (less one) as in ZB-H1 give ZB-H2, which fills the time until the first gradient
/// arrives.
fn stretched(heights: Vec<usize>, active: usize) -> Vec<usize> {
    let most = heights.iter().copied().max().unwrap_or(1);
    if most < 2 || active <= most {
        return heights;
    }
    heights.into_iter().map(|height| 1 + ((height - 1) * (active - 1)).div_ceil(most - 1)).collect()
}

impl<'a> Scheduler<'a> {
    fn new(graph: &'a Graph, schedule: Schedule, active: &[usize], wished: Option<usize>) -> Self {
        let ranks = graph.ranks();
        // All ranks have the same rounds of forwards and backwards.
        let fewest = active.iter().copied().min().unwrap_or(1);
        let heights = match wished {
            Some(wished) if schedule == Schedule::ZeroBubble => {
                stretched(graph.heights(), wished.min(fewest).min(graph.microbatches()))
            }
            _ => graph.heights(),
        };
        let light = match schedule {
            Schedule::Interleaved | Schedule::ZeroBubble => light(graph),
            Schedule::Simple | Schedule::ForwardOnly => vec![false; graph.stages().len()],
        };
        let mut own = vec![Vec::new(); ranks];
        let mut stages = Vec::with_capacity(graph.stages().len());
        for (index, stage) in graph.stages().iter().enumerate() {
            own[stage.rank].push(index);
            let ahead = match schedule {
                Schedule::Simple | Schedule::ForwardOnly => usize::MAX,
                // The result of its forward travels to the first rank, and the gradient comes back from there.
                Schedule::Interleaved | Schedule::ZeroBubble if light[index] => heights[index] + ranks,
                Schedule::Interleaved | Schedule::ZeroBubble => heights[index],
            };
            stages.push(StageState {
                inputs: Awaited::new(stage.inputs.len()),
                gradients: Awaited::new(graph.consumers(index).len()),
                forward: 0,
                backward: 0,
                weight: 0,
                forward_ended: 0,
                backward_ended: 0,
                ended: 0,
                ahead,
                light: light[index],
            });
        }
        let heavy = |own: &Vec<usize>| own.iter().filter(|&&stage| !light[stage]).map(|&stage| heights[stage]).sum();
        let kept = own.iter().map(heavy).max();
        let active = if schedule == Schedule::Simple { vec![fewest; ranks] } else { active.to_vec() };
        Self {
            graph,
            schedule,
            active,
            kept: kept.unwrap_or(1),
            stages,
            own,
            begun: vec![0; ranks],
            busy: vec![false; ranks],
            events: BinaryHeap::new(),
            lists: vec![Vec::new(); ranks],
        }
    }

    /// The kinds of tasks of a stage.
    fn kinds(&self, backward: bool) -> &'static [ActionKind] {
        match self.schedule {
            _ if !backward => &[ActionKind::Forward],
            Schedule::ForwardOnly => &[ActionKind::Forward],
            Schedule::ZeroBubble => &[ActionKind::Forward, ActionKind::Input, ActionKind::Weight],
            Schedule::Simple | Schedule::Interleaved => &[ActionKind::Forward, ActionKind::Backward],
        }
    }

    fn run(&mut self) {
        // Ranks for which something has changed at this time.
        let mut touched: Vec<usize> = (0..self.graph.ranks()).collect();
        let mut now = 0;
        loop {
            touched.sort_unstable();
            touched.dedup();
            for rank in touched.drain(..) {
                if !self.busy[rank] {
                    self.start(rank, now);
                }
            }
            let Some(&Reverse((time, _))) = self.events.peek() else { return };
            now = time;
            // All events of one time are applied before any rank chooses its task.
            while let Some(&Reverse((time, event))) = self.events.peek()
                && time == now
            {
                self.events.pop();
                touched.push(self.apply_event(event, now));
            }
        }
    }

    /// Starts the task that the policy prefers for `rank`, if one can run.
    fn start(&mut self, rank: usize, now: u64) {
        let task = match self.schedule {
            Schedule::Simple => self.next_forward(rank).or_else(|| self.next_backward(rank)),
            Schedule::Interleaved => self.next_backward(rank).or_else(|| self.next_forward(rank)),
            Schedule::ZeroBubble => {
                // A runnable forward comes before a weight gradient. So does freeing the memory that a forward lacks,
                // because later ranks wait for it.
                let forward = match self.next_forward(rank) {
                    Some((_, index, _)) if !self.stages[index].light && self.kept(rank) >= self.kept => {
                        self.next_weight(rank)
                    }
                    forward => forward,
                };
                forward.or_else(|| self.next_backward(rank)).or_else(|| self.next_weight(rank))
            }
            Schedule::ForwardOnly => self.next_forward(rank),
        };
        let Some((microbatch, index, kind)) = task else { return };
        let stage = &mut self.stages[index];
        let costs = self.graph.stage(index).costs;
        let cost = match kind {
            ActionKind::Forward => {
                stage.inputs.advance();
                stage.forward += 1;
                self.begun[rank] = self.begun[rank].max(microbatch + 1);
                costs.forward
            }
            ActionKind::Weight => {
                stage.weight += 1;
                costs.weight
            }
            _ => {
                stage.gradients.advance();
                stage.backward += 1;
                if kind == ActionKind::Input { costs.input } else { costs.input + costs.weight }
            }
        };
        self.lists[rank].push(Action::compute(kind, index, microbatch));
        self.busy[rank] = true;
        self.events.push(Reverse((now + cost, ScheduleEvent::End(index, kind))));
    }

    /// Returns the next forward: of the earliest microbatch, the earliest stage. Light stages come first: they hardly
    /// delay this rank, and another one may wait for them.
    fn next_forward(&self, rank: usize) -> Option<(usize, usize, ActionKind)> {
        let microbatches = self.graph.microbatches();
        let candidates = self.own[rank].iter().filter(|&&index| {
            let stage = &self.stages[index];
            stage.forward < microbatches
                && stage.inputs.complete()
                && (!self.graph.stage(index).backward || stage.forward - stage.backward < stage.ahead)
                && self.admits(rank, stage.forward)
        });
        let best = candidates.min_by_key(|&&index| (!self.stages[index].light, self.stages[index].forward, index));
        best.map(|&index| (self.stages[index].forward, index, ActionKind::Forward))
    }

    /// The activations that `rank` keeps, in stages that are not light.
    fn kept(&self, rank: usize) -> usize {
        let own = self.own[rank].iter().filter(|&&index| self.graph.stage(index).backward && !self.stages[index].light);
        own.map(|&index| self.stages[index].forward - self.stages[index].ended).sum()
    }

    /// Whether `rank` may begin `microbatch`, or continue it.
    fn admits(&self, rank: usize, microbatch: usize) -> bool {
        let begun = self.begun[rank];
        if microbatch < begun {
            return true;
        }
        let ended = self.own[rank].iter().map(|&index| self.stages[index].ended).min().unwrap_or(0);
        match self.schedule {
            Schedule::Simple => ended >= microbatch / self.active[rank] * self.active[rank],
            _ => microbatch == begun && begun - ended < self.active[rank],
        }
    }

    /// Returns the next backward: of the earliest microbatch, the latest stage.
    fn next_backward(&self, rank: usize) -> Option<(usize, usize, ActionKind)> {
        let candidates = self.own[rank].iter().filter(|&&index| {
            let stage = &self.stages[index];
            self.graph.stage(index).backward
                && stage.backward < stage.forward_ended
                && stage.gradients.complete()
                && (self.schedule != Schedule::Simple || self.round_is_forward(rank, stage.backward))
        });
        let kind = if self.schedule == Schedule::ZeroBubble { ActionKind::Input } else { ActionKind::Backward };
        let best = candidates.min_by_key(|&&index| (self.stages[index].backward, Reverse(index)));
        best.map(|&index| (self.stages[index].backward, index, kind))
    }

    /// GPipe: whether all forwards of this microbatch's round have ended.
    fn round_is_forward(&self, rank: usize, microbatch: usize) -> bool {
        let active = self.active[rank];
        let end = (microbatch / active).saturating_add(1).saturating_mul(active).min(self.graph.microbatches());
        self.own[rank].iter().all(|&index| self.stages[index].forward_ended >= end)
    }

    fn next_weight(&self, rank: usize) -> Option<(usize, usize, ActionKind)> {
        let candidates =
            self.own[rank].iter().filter(|&&index| self.stages[index].weight < self.stages[index].backward_ended);
        candidates.map(|&index| (self.stages[index].weight, index, ActionKind::Weight)).min()
    }

    /// Applies an event; returns the rank that may have a runnable task now.
    fn apply_event(&mut self, event: ScheduleEvent, now: u64) -> usize {
        match event {
            ScheduleEvent::End(index, kind) => {
                self.end(index, kind, now);
                let rank = self.graph.stage(index).rank;
                self.busy[rank] = false;
                rank
            }
            ScheduleEvent::Value(index, microbatch) => {
                let stage = &mut self.stages[index];
                stage.inputs.arrive(microbatch - stage.forward);
                self.graph.stage(index).rank
            }
            ScheduleEvent::Gradient(index, microbatch) => {
                let stage = &mut self.stages[index];
                stage.gradients.arrive(microbatch - stage.backward);
                self.graph.stage(index).rank
            }
        }
    }

    fn end(&mut self, index: usize, kind: ActionKind, now: u64) {
        let graph = self.graph;
        let last = *self.last_kind(index);
        let stage = &mut self.stages[index];
        stage.ended += usize::from(kind == last);
        match kind {
            ActionKind::Forward => {
                let microbatch = stage.forward_ended;
                stage.forward_ended += 1;
                for &(to, bytes) in graph.consumers(index) {
                    let at = now + graph.transfer(index, to, bytes);
                    self.events.push(Reverse((at, ScheduleEvent::Value(to, microbatch))));
                }
            }
            ActionKind::Weight => {}
            _ => {
                let microbatch = stage.backward_ended;
                stage.backward_ended += 1;
                for edge in graph.stage(index).inputs.iter().filter(|edge| graph.stage(edge.from).backward) {
                    let at = now + graph.transfer(index, edge.from, edge.bytes);
                    self.events.push(Reverse((at, ScheduleEvent::Gradient(edge.from, microbatch))));
                }
            }
        }
    }

    /// The last kind of task of a microbatch in a stage.
    fn last_kind(&self, index: usize) -> &'static ActionKind {
        self.kinds(self.graph.stage(index).backward).last().expect("every stage has a forward")
    }
}
