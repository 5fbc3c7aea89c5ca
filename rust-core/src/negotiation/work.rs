//! Runs one member's negotiation: takes calls and messages, and carries out the decisions of the state machine. One
//! thread at a time does so: the thread of the [`super::Negotiator`], or a caller that waits
//! ([`super::NamedHandle::drive`]).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::description::Description;
use super::factors::{Factors, Scaled, scale};
use super::machine::{Machine, NegotiationAction, Operand, SubmissionId};
use super::message::{NegotiationLimits, NegotiationMessage};
use super::negotiator::{NegotiatorCommand, NegotiatorOptions, NegotiatorState, error_of_call};
use super::neutral::Neutral;
use super::post::Post;
use super::stall::{STUCK_AFTER, StallTimeouts, Waits};
use super::supply::{DeviceHints, NeutralBuffers, NeutralMemory};
use super::timeline::{self, TracedName, Traces};
use super::tree::Tree;
use super::tune::{self, Tuner};
use crate::buffer::TensorView;
use crate::collectives::{Communicator, Done, Kind, PhaseListener, Request};
use crate::error::{Code, Error, Limit, Result};
use crate::metrics;
use crate::transport::{Members, POLL_INTERVAL, Transport};
use crate::world::monitor;

/// Consecutive calls are sent in one message, which is complete after this many polls without a new call ...
const QUIET_POLLS: u32 = 4;
/// ... or after this time.
const LINGER: Duration = Duration::from_micros(400);
/// How long to wait for answers that are in flight although their sender, or a member that forwards them, has departed.
const GRACE: Duration = Duration::from_millis(200);
/// A member gives up by itself this long after the limit if the root has not reported the timeout by then.
const ROOT_GRACE: Duration = Duration::from_secs(10);
const FLUSH_LIMIT: Duration = Duration::from_millis(200);
/// A process that uses a smaller share of a core counts as idle.
const IDLE_SHARE: f64 = 0.05;
/// Operations up to this size run on any calling thread that waits, if the group is otherwise idle. A hand-over to the
/// negotiation's thread would cost more, and other calls wait only briefly.
const INLINE_BYTES: u64 = 256 << 10;

/// A submitted call, and the callers that wait for it.
struct OpenOperation {
    requests: Vec<Request>,
    bytes: u64,
    factors: Factors,
    traced: Option<TracedName>,
    done: Done,
}

/// One member's negotiation: its state machine, its messages, and the operations that it runs.
pub(super) struct Work {
    communicator: Arc<Communicator>,
    transport: Arc<dyn Transport>,
    tree: Tree,
    machine: Machine,
    post: Post,
    /// Calls that have not been answered.
    open: HashMap<SubmissionId, OpenOperation>,
    joining: Option<Done>,
    /// The device on which this member contributes after it has joined.
    device: Option<u16>,
    supply: Option<NeutralMemory>,
    ticket: SubmissionId,
    actions: Vec<NegotiationAction>,
    calls: Vec<NegotiatorCommand>,
    last_tick: Instant,
    /// The file in which the root logs the sizes that autotuning has tried.
    tuning_log: Option<tune::Log>,
    processor: Processor,
    /// When the departure of a member was first seen.
    departed: Option<Instant>,
    /// Whether this process waits for a step of a reducer and not for a named operation.
    waits_for_steps: bool,
}

impl Work {
    pub(super) fn new(shared: &NegotiatorState, communicator: Arc<Communicator>) -> Self {
        let Members { ranks, me } = &shared.members;
        let NegotiatorOptions { cache_capacity, fusion_bytes, stall_warning, stall_limit, ref tuning, .. } =
            shared.options;
        let tree = Tree::new(*me, ranks.len());
        let limits = NegotiationLimits { cache: cache_capacity, fusion_bytes };
        let stall_timeouts = StallTimeouts { warning: stall_warning, limit: stall_limit };
        let transport = communicator.transport().clone();
        let mut machine = Machine::new(tree.clone(), ranks.clone(), limits, stall_timeouts);
        let tuning = tuning.as_ref().filter(|_| tree.parent.is_none());
        tuning.into_iter().for_each(|tuning| machine.tune(Tuner::new(tuning, fusion_bytes)));
        let log = tuning.and_then(|tuning| tuning.log.as_deref()).map(tune::Log::create);
        let tuning_log = log.and_then(|log| log.inspect_err(|error| tracing::warn!("{}", error.text())).ok());
        Self {
            machine,
            tuning_log,
            post: Post::new(transport.clone(), &tree),
            communicator,
            transport,
            tree,
            open: HashMap::new(),
            joining: None,
            device: None,
            supply: None,
            ticket: 0,
            actions: Vec::new(),
            calls: Vec::new(),
            last_tick: Instant::now(),
            processor: Processor::new(),
            departed: None,
            waits_for_steps: false,
        }
    }

    /// Ends all waiting calls with `error`; later calls fail with it.
    pub(super) fn end(mut self, shared: &NegotiatorState, error: &Error) {
        // Later calls fail at once, including calls that the callbacks below make.
        shared.inbox.lock().ended = Some(error.clone());
        for (name, ticket) in self.machine.drain() {
            if let Some(open) = self.open.remove(&ticket) {
                (open.done)(Err(error_of_call(error.clone(), &name)));
            }
        }
        // Operations that were answered but will not run any more.
        for (_, open) in self.open.drain() {
            (open.done)(Err(error.clone()));
        }
        if let Some(done) = self.joining.take() {
            done(Err(error_of_call(error.clone(), "join")));
        }
        self.flush_post();
        if error.code() == Code::Closed {
            self.communicator.close(&error.text());
        }
    }

    /// Whether any call of this member is unanswered.
    pub(super) fn is_waiting(&self) -> bool {
        self.machine.is_waiting()
    }

    /// Whether timeouts apply: this or another member waits.
    pub(super) fn watches(&self) -> bool {
        self.machine.is_waiting() || self.machine.must_tick() || self.departed.is_some() || self.waits_for_steps
    }

    /// Processes pending calls and messages; returns whether there were any. `by_caller` says that this thread waits
    /// for one of the calls, so it may run small operations itself.
    pub(super) fn turn(&mut self, shared: &NegotiatorState, by_caller: bool) -> Result<bool> {
        let mut busy = self.take_calls(shared);
        self.transport.progress();
        while let Some((from, message)) = self.post.receive()? {
            busy = true;
            let now = shared.now();
            self.machine.log_ready(timeline::enabled());
            self.machine.receive(from, message, now, &mut self.actions)?;
            for (name, members) in self.machine.take_log() {
                timeline::note_ready(&name, members, &shared.members.ranks);
            }
        }
        self.post.retire()?;
        if busy {
            self.machine.flush(shared.now(), &mut self.actions);
        }
        self.perform(shared, by_caller)?;
        if self.last_tick.elapsed() >= POLL_INTERVAL {
            self.tick(shared, by_caller)?;
        }
        Ok(busy)
    }

    /// Takes the submitted calls, and those submitted shortly after, for one message.
    fn take_calls(&mut self, shared: &NegotiatorState) -> bool {
        let start = Instant::now();
        let (mut any, mut quiet) = (false, 0);
        loop {
            std::mem::swap(&mut self.calls, &mut shared.inbox.lock().calls);
            let mut urgent = false;
            let took = !self.calls.is_empty();
            for call in std::mem::take(&mut self.calls) {
                urgent |=
                    matches!(call, NegotiatorCommand::Named { blocking: true, .. } | NegotiatorCommand::Join { .. });
                self.take(shared, call);
            }
            any |= took;
            quiet = if took { 0 } else { quiet + 1 };
            if !any || urgent || quiet >= QUIET_POLLS || start.elapsed() >= LINGER {
                return any;
            }
            std::thread::yield_now();
        }
    }

    fn take(&mut self, shared: &NegotiatorState, call: NegotiatorCommand) {
        let since = |since: Instant| since.saturating_duration_since(shared.start);
        match call {
            NegotiatorCommand::Named { name, requests, factors, description, blocking, since: called, done } => {
                self.ticket += 1;
                let bytes = description.all_bytes();
                let traced = TracedName::new(&name, &description);
                traced.iter().for_each(|traced| timeline::negotiates(traced, shared.monitor.me()));
                match self.machine.submit(self.ticket, &name, *description, blocking, since(called)) {
                    Ok(()) => {
                        drop(self.open.insert(self.ticket, OpenOperation { requests, bytes, factors, traced, done }))
                    }
                    Err(error) => done(Err(error)),
                }
            }
            NegotiatorCommand::Join { hints, since: called, done } => {
                let used = self.communicator.device_in_use(hints.used);
                let device = DeviceHints { used, ..hints }.device();
                match self.machine.join(device.is_some(), since(called)) {
                    Ok(()) => (self.device, self.joining) = (device, Some(done)),
                    Err(error) => done(Err(error)),
                }
            }
        }
    }

    fn perform(&mut self, shared: &NegotiatorState, by_caller: bool) -> Result<()> {
        let mut actions = std::mem::take(&mut self.actions);
        for action in actions.drain(..) {
            match action {
                NegotiationAction::Up(up) => {
                    self.post.send(self.tree.parent.into_iter(), &NegotiationMessage::Up(up))?
                }
                NegotiationAction::Down(down) => {
                    let children = self.tree.children.iter().map(|child| child.start);
                    self.post.send(children, &NegotiationMessage::Down(down))?;
                }
                NegotiationAction::Run(parts) => self.operate(parts, by_caller)?,
                NegotiationAction::Fail(ticket, error) => {
                    if let Some(open) = self.open.remove(&ticket) {
                        open.traced.iter().for_each(timeline::fails);
                        (open.done)(Err(error));
                    }
                }
                NegotiationAction::EndSteps(end) => {
                    if let Some(other) = &shared.other_waits {
                        other.end(end);
                    }
                }
                NegotiationAction::Joined(last) => {
                    // Cleared on every member before its next call.
                    shared.inbox.lock().next_numbers.clear();
                    self.supply = None;
                    if let Some(done) = self.joining.take() {
                        done(Ok(Some(last)));
                    }
                }
                NegotiationAction::Warn(text) => {
                    metrics::note_stall();
                    tracing::warn!("{text}");
                }
                NegotiationAction::Blame(text) => tracing::error!("{text}"),
                NegotiationAction::Tried(trial) => {
                    if trial.is_last {
                        shared.tunes.store(false, Ordering::Relaxed);
                    }
                    if let Some(log) = &mut self.tuning_log {
                        log.write(&trial, shared.options.cache_capacity > 0);
                    }
                }
            }
        }
        // Keeps the allocation for the next turn.
        self.actions = actions;
        Ok(())
    }

    /// Runs one operation, or queues it.
    fn operate(&mut self, parts: Vec<Operand>, by_caller: bool) -> Result<()> {
        if timeline::enabled() {
            timeline::cycle();
        }
        let mut after = OperationEnd::default();
        let on_device = parts.iter().any(|part| matches!(part, Operand::Neutral(group) if group.on_device));
        // The other members run the operation only if they have received this decision.
        let prepared = self.prepare(parts, &mut after).and_then(|(requests, bytes)| {
            let is_small = by_caller && bytes <= INLINE_BYTES && !requests.iter().any(Description::is_on_device);
            Ok((requests, is_small && self.post.retire()?))
        });
        let (requests, inline) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                after.complete_with(Err(error.clone()));
                if on_device {
                    // The kernels of the other members would wait for this member.
                    self.communicator.end_devices(error.clone());
                }
                return Err(error);
            }
        };
        if requests.is_empty() {
            // A comparison between ranks moves no data.
            after.end(Ok(None));
            return Ok(());
        }
        let traces = after.traces.clone();
        let done = move |result: Result<Option<usize>>| after.end(result);
        if inline {
            let watch = traces.as_deref().map(|traces| traces as &dyn PhaseListener);
            // A signal may interrupt the caller's wait, but an operation that one member abandons would end the group.
            let outcome = monitor::with_signals_waiting(|| self.communicator.try_run_batch(&requests, watch));
            if let Some(outcome) = outcome {
                done(outcome.map(|()| None));
                return Ok(());
            }
        }
        match traces {
            Some(traces) if !requests.iter().any(Description::is_on_device) => {
                self.communicator.submit_watched(requests, traces, Box::new(done));
            }
            _ => self.communicator.submit_batch(requests, None, Box::new(done)),
        }
        Ok(())
    }

    /// Builds the requests of an operation and counts the bytes that move. The waiting callers are in `after`, also if
    /// this fails.
    fn prepare(&mut self, parts: Vec<Operand>, after: &mut OperationEnd) -> Result<(Vec<Request>, u64)> {
        let size = self.tree.size;
        let mut requests = Vec::with_capacity(parts.len());
        let mut bytes = 0;
        let mut traces: Option<Traces> = None;
        let mut buffers = self.allocate(&parts)?;
        for part in parts {
            match part {
                Operand::Own(ticket) => {
                    let Some(mut open) = self.open.remove(&ticket) else { continue };
                    bytes += open.bytes;
                    after.calls.push(open.done);
                    if let Some(traced) = open.traced {
                        let on_device = open.requests.iter().any(Description::is_on_device);
                        let places = requests.len()..requests.len() + open.requests.len();
                        let traces = traces.get_or_insert_with(|| Traces::new(self.transport_name(on_device)));
                        traces.add(traced, places, on_device, &mut open.requests);
                    }
                    for request in open.requests {
                        let scaled = open.factors.apply(request, size)?;
                        requests.push(after.keep(scaled));
                    }
                }
                Operand::Neutral(group) => {
                    bytes += group.all_bytes();
                    for description in group.each().filter(|one| one.kind != Kind::Presence) {
                        let data = match &mut buffers {
                            Some(buffers) => buffers.next(description)?,
                            None => {
                                let elems = description.shape.iter().product::<u64>() as usize;
                                let mut memory = Neutral::new(description.dtype, description.op, elems);
                                let data = memory.view()?;
                                after.neutral.push(memory);
                                data
                            }
                        };
                        let request = match description.kind {
                            Kind::Adasum => Request::Adasum { input: data, output: data },
                            _ => Request::AllReduce { input: data, output: data, op: description.op },
                        };
                        // A neutral contribution needs no scaling. The reduction follows from the factors of the other
                        // members.
                        let factors = Factors { before: 1.0, ..description.factors };
                        requests.push(factors.apply(request, size)?.request);
                    }
                }
            }
        }
        after.traces = traces.map(Arc::new);
        after.buffers = buffers;
        Ok((requests, bytes))
    }

    /// Allocates this member's neutral contribution to an operation on devices, after it has joined. All buffers of an
    /// operation are in one kind of memory.
    fn allocate(&mut self, parts: &[Operand]) -> Result<Option<NeutralBuffers>> {
        let neutral = || {
            let groups = parts.iter().filter_map(|part| match part {
                Operand::Neutral(group) if group.on_device => Some(group),
                _ => None,
            });
            groups.flat_map(|group| group.each())
        };
        if neutral().next().is_none() {
            return Ok(None);
        }
        let supply = match self.supply.take() {
            Some(supply) => supply,
            None => NeutralMemory::of(self.device.ok_or_else(|| {
                Error::Internal("a rank without a device cannot contribute to an operation on devices".into())
            })?)?,
        };
        self.supply.insert(supply).allocate(neutral()).map(Some)
    }

    /// Names the transport of an operation, for the timeline.
    fn transport_name(&self, on_device: bool) -> &'static str {
        match self.transport.name() {
            _ if on_device => "NCCL",
            "tcp" => "TCP",
            "mpi" => "MPI",
            _ => "SHM",
        }
    }

    /// Checks that run a few times a second.
    fn tick(&mut self, shared: &NegotiatorState, by_caller: bool) -> Result<()> {
        self.last_tick = Instant::now();
        let waiting = self.machine.is_waiting();
        // A device may compute while the process is idle.
        let on_device = || self.open.values().any(|open| open.requests.iter().any(Description::is_on_device));
        let elsewhere = shared.group.running_time().is_some_and(|time| time >= STUCK_AFTER);
        let steps = shared.other_waits.as_ref().map_or_else(Vec::new, |other| other.waits());
        self.waits_for_steps = !steps.is_empty();
        let at_rest = || shared.other_waits.as_ref().is_some_and(|other| other.is_at_rest());
        let computes_nothing = self.processor.is_idle() || (self.waits_for_steps && at_rest());
        let idle = computes_nothing && (waiting || elsewhere || self.waits_for_steps) && !on_device();
        let now = shared.now();
        self.machine.tick(now, Waits { idle, elsewhere, steps }, &mut self.actions);
        self.perform(shared, by_caller)?;
        if shared.monitor.generation() != 0
            && let Err(error) = shared.monitor.check(&shared.members.ranks, "`collectives by name`")
        {
            let since = *self.departed.get_or_insert_with(Instant::now);
            let grace = GRACE.max(self.transport.drain_timeout());
            if since.elapsed() >= grace || error.code() == crate::error::Code::Closed {
                return Err(error);
            }
        }
        match self.machine.longest_wait(now) {
            Some((name, waited)) if waited >= shared.options.stall_limit + ROOT_GRACE => {
                let missing = vec![shared.members.ranks[0]];
                Err(Error::Timeout {
                    during: format!("`{name}` (no message from the group's first rank)"),
                    waited,
                    missing,
                    limit: Limit::Stall,
                })
            }
            _ => Ok(()),
        }
    }

    /// Waits a moment for the last messages to be sent.
    fn flush_post(&mut self) {
        let deadline = Instant::now() + FLUSH_LIMIT;
        while matches!(self.post.retire(), Ok(false)) && Instant::now() < deadline {
            let seen = self.transport.doorbell();
            self.transport.progress();
            self.transport.wait_doorbell(seen, Duration::from_millis(5));
        }
    }
}

/// The callers that wait for an operation, and what must live until it has ended. The callers are always notified,
/// whatever happens to the operation.
#[derive(Default)]
struct OperationEnd {
    calls: Vec<Done>,
    traces: Option<Arc<Traces>>,
    neutral: Vec<Neutral>,
    buffers: Option<NeutralBuffers>,
    memory: Vec<Vec<u64>>,
    factors: Vec<(TensorView, f64)>,
}

impl OperationEnd {
    fn keep(&mut self, scaled: Scaled) -> Request {
        self.memory.push(scaled.memory);
        self.factors.extend(scaled.after);
        scaled.request
    }

    fn end(mut self, result: Result<Option<usize>>) {
        if result.is_ok() {
            self.factors.iter().for_each(|(view, factor)| scale(view, *factor));
        }
        self.complete_with(result);
    }

    fn complete_with(&mut self, result: Result<Option<usize>>) {
        self.traces.take().iter().for_each(|traces| traces.end());
        for done in std::mem::take(&mut self.calls) {
            done(result.clone());
        }
    }
}

impl Drop for OperationEnd {
    fn drop(&mut self) {
        if !self.calls.is_empty() {
            self.complete_with(Err(Error::Internal("an operation by name was dropped".into())));
        }
    }
}

/// Measures whether this process uses the CPU.
struct Processor {
    looked: Instant,
    used: Duration,
    last_busy: Instant,
}

impl Processor {
    fn new() -> Self {
        Self { looked: Instant::now(), used: Self::used(), last_busy: Instant::now() }
    }

    fn used() -> Duration {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }

    /// Whether the process has been idle since [`STUCK_AFTER`]. A long time between two checks counts as one check.
    fn is_idle(&mut self) -> bool {
        let (now, used) = (Instant::now(), Self::used());
        let share = used.saturating_sub(self.used).as_secs_f64() / (now - self.looked).as_secs_f64().max(1e-3);
        if share > IDLE_SHARE {
            self.last_busy = now;
        }
        (self.looked, self.used) = (now, used);
        now - self.last_busy >= STUCK_AFTER
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_of_a_dropped_operation_get_an_error() {
        let (sender, outcomes) = std::sync::mpsc::channel();
        let mut after = OperationEnd::default();
        for _ in 0..2 {
            let sender = sender.clone();
            after.calls.push(Box::new(move |result| sender.send(result.is_err()).expect("the test waits")));
        }
        drop((after, sender));
        assert_eq!(outcomes.iter().collect::<Vec<_>>(), [true, true]);
    }
}
