//! The thread of a negotiation: takes calls and messages, and does what the machine says.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::time::{ClockId, clock_gettime};

use super::description::Description;
use super::factors::{Factors, Scaled, scale};
use super::machine::{Action, Machine, Part, Ticket};
use super::message::{Limits, Message};
use super::neutral::Neutral;
use super::post::Post;
use super::stall::{Patience, STUCK_AFTER, Waits};
use super::tree::Tree;
use crate::buffer::TensorView;
use crate::collectives::{Communicator, Done, Kind, Request};
use crate::error::{Error, Result};
use crate::transport::{Members, NAP, Transport};
use crate::world::Monitor;

/// Makes the communicator that only the negotiation uses: collective.
pub type Connect = Box<dyn FnOnce() -> Result<Arc<Communicator>> + Send>;

/// How a negotiation goes; see the knobs of the same names.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Names that are remembered. The first member's counts.
    pub cache_capacity: u32,
    /// What is ready together runs as one operation up to this size. The first member's counts.
    pub fusion_bytes: u64,
    /// A wait of this length is told on standard error.
    pub stall_warning: Duration,
    /// A wait of this length ends everything that waits.
    pub stall_limit: Duration,
}

/// Calls that come one after the other go into one message, if the thread has seen none for this many looks ..
const QUIET_LOOKS: u32 = 4;
/// .. or for this long.
const LINGER: Duration = Duration::from_micros(400);
/// How long answers may be under way when it is already known that their sender, or who hands them on, has departed.
const GRACE: Duration = Duration::from_millis(200);
/// So much longer than the limit a member waits for the root's word before it gives up by itself.
const ROOT_GRACE: Duration = Duration::from_secs(10);
/// How long [`Negotiator::close`] waits for the thread, and the thread for its last messages.
const CLOSE_LIMIT: Duration = Duration::from_secs(3);
const FLUSH_LIMIT: Duration = Duration::from_millis(200);
/// A process that uses less of a processor computes nothing.
const IDLE_SHARE: f64 = 0.05;
/// Naps of a thread that nobody waits for.
const LONG_NAP: Duration = Duration::from_millis(500);

/// Runs collectives by name; see the module's text.
pub struct Negotiator {
    shared: Arc<Shared>,
}

struct Shared {
    id: u64,
    /// Runs what has no name.
    group: Arc<Communicator>,
    members: Members,
    monitor: Arc<Monitor>,
    options: Options,
    start: Instant,
    inbox: Mutex<Inbox>,
    /// The thread has ended.
    changed: Condvar,
    /// There once the members have met.
    transport: OnceLock<Arc<dyn Transport>>,
    closed: OnceLock<String>,
}

#[derive(Default)]
struct Inbox {
    calls: Vec<Call>,
    /// Of [`Negotiator::ask`], without an end.
    names: HashSet<String>,
    /// How many names were given to each kind (NEG-8).
    given: HashMap<String, u64>,
    thread: Option<ThreadId>,
    /// Why nothing can be called any more.
    ended: Option<Error>,
}

/// What is asked for by [`Negotiator::ask`].
#[derive(Debug)]
pub struct Ask {
    /// Under which name.
    pub name: Name,
    /// Collectives, and the shapes of their tensors; run together or not at all.
    pub tensors: Vec<(Request, Option<Vec<u64>>)>,
    /// Of reductions.
    pub factors: Factors,
    /// This process does nothing else until it is done.
    pub blocking: bool,
}

/// A name, or the wish for one.
#[derive(Debug)]
pub enum Name {
    /// This one, which nothing else of this member has.
    Given(String),
    /// `<kind>.noname.<count>`.
    Next(String),
    /// This one, and what has it already comes first.
    Shared(String),
}

enum Call {
    Named {
        name: String,
        requests: Vec<Request>,
        factors: Factors,
        description: Description,
        blocking: bool,
        since: Instant,
        done: Done,
    },
    Join {
        since: Instant,
        done: Done,
    },
}

impl Negotiator {
    /// For the members of `group`. Starts the thread, which first lets `connect` find the other members: their threads do the same when they are
    /// first called there. `id` is for names of threads.
    ///
    /// # Errors
    /// [`Error::Io`] if there can be no thread.
    pub fn start(
        id: u64,
        group: Arc<Communicator>,
        monitor: Arc<Monitor>,
        options: Options,
        connect: Connect,
    ) -> Result<Arc<Self>> {
        let (inbox, changed) = Default::default();
        let (transport, closed, start) = (OnceLock::new(), OnceLock::new(), Instant::now());
        let members = group.members().clone();
        let shared =
            Arc::new(Shared { id, group, members, monitor, options, start, inbox, changed, transport, closed });
        let own = shared.clone();
        let mut inbox = shared.inbox.lock();
        let thread = std::thread::Builder::new()
            .name(format!("smd-names-{id:x}"))
            .spawn(move || own.run(connect))
            .map_err(|error| Error::io("starting the thread that negotiates", error))?;
        inbox.thread = Some(thread.thread().id());
        drop(inbox);
        Ok(Arc::new(Self { shared }))
    }

    /// Has `request` run once every rank has asked for the same under `name`; `done` is called when it is complete. The
    /// views' promise must hold until then. A second call of a name before the first is complete comes after it.
    ///
    /// `shape` is the tensor's, if it has one; it is compared. `blocking` says that this process does nothing else until
    /// `done` is called, so that ranks which wait for different names hear of it soon.
    pub fn submit(&self, name: &str, shape: Option<&[u64]>, request: Request, blocking: bool, done: Done) {
        let Members { ranks, me } = &self.shared.members;
        let (description, done) = match Description::of(&request, shape, *me, ranks.len()) {
            Ok(description) => (description, done),
            // The others are told through the name, and this member what it did wrong.
            Err(error) => (Description::poison(error.to_string()), Box::new(move |_| done(Err(error))) as Done),
        };
        let (name, since) = (name.to_owned(), Instant::now());
        let (requests, factors) = (vec![request], Factors::default());
        self.shared.call(Call::Named { name, requests, factors, description, blocking, since, done });
    }

    /// As [`Negotiator::submit`], for callers that hear of their own mistakes at once (NEG-8), and that may ask for several
    /// collectives together.
    ///
    /// # Errors
    /// What this member cannot ask for, with `done` not being called: [`Error::InvalidArgument`], also for a name that is
    /// under way; [`Error::Unsupported`]; whatever ended the negotiation.
    pub fn ask(&self, ask: Ask, done: Done) -> Result<()> {
        let Ask { name, tensors, factors, blocking } = ask;
        let Members { ranks, me } = &self.shared.members;
        let description = Description::of_all(&tensors, factors, *me, ranks.len())?;
        let requests = tensors.into_iter().map(|(request, _)| request).collect();
        let shared = self.shared.clone();
        let mut inbox = self.shared.inbox.lock();
        if let Some(error) = &inbox.ended {
            return Err(told_of(error.clone(), name.text()));
        }
        let unique = !matches!(name, Name::Shared(_));
        let (name, kind) = match name {
            Name::Given(name) | Name::Shared(name) => (name, None),
            Name::Next(kind) => (format!("{kind}.noname.{}", inbox.given.get(&kind).copied().unwrap_or(0)), Some(kind)),
        };
        if unique && !inbox.names.insert(name.clone()) {
            return Err(Error::InvalidArgument(format!(
                "`{name}`: requested to work on a tensor with the same name as another tensor that is currently being \
                 processed"
            )));
        }
        if let Some(kind) = kind {
            *inbox.given.entry(kind).or_default() += 1;
        }
        let free = name.clone();
        let done: Done = Box::new(move |result| {
            if unique {
                // Before the caller hears of it, who may use the name again.
                shared.inbox.lock().names.remove(&free);
            }
            done(result);
        });
        inbox.calls.push(Call::Named { name, requests, factors, description, blocking, since: Instant::now(), done });
        drop(inbox);
        self.shared.ring();
        Ok(())
    }

    /// This rank has nothing more to submit: `done` is called, with the rank that joined last, when no rank has. Until
    /// then it contributes to the others' all-reduces what changes nothing; their other collectives fail.
    pub fn join(&self, done: Done) {
        self.shared.call(Call::Join { since: Instant::now(), done });
    }

    /// Ends the thread; whatever waits or runs fails with [`Error::Closed`].
    pub fn close(&self, reason: &str) {
        let shared = &self.shared;
        let _ = shared.closed.set(reason.to_owned());
        shared.ring();
        let deadline = Instant::now() + CLOSE_LIMIT;
        let me = std::thread::current().id();
        let mut inbox = shared.inbox.lock();
        while inbox.thread.is_some_and(|thread| thread != me) {
            if shared.changed.wait_until(&mut inbox, deadline).timed_out() {
                return;
            }
        }
    }
}

impl Drop for Negotiator {
    fn drop(&mut self) {
        self.close("the group was dropped");
    }
}

impl Name {
    fn text(&self) -> &str {
        match self {
            Name::Given(name) | Name::Shared(name) => name,
            Name::Next(kind) => kind,
        }
    }
}

impl Call {
    fn done(self) -> Done {
        match self {
            Call::Named { done, .. } | Call::Join { done, .. } => done,
        }
    }

    fn name(&self) -> &str {
        match self {
            Call::Named { name, .. } => name,
            Call::Join { .. } => "join",
        }
    }
}

impl Shared {
    fn ring(&self) {
        if let Some(transport) = self.transport.get() {
            transport.ring();
        }
    }

    fn call(&self, call: Call) {
        let mut inbox = self.inbox.lock();
        if let Some(error) = &inbox.ended {
            let error = told_of(error.clone(), call.name());
            drop(inbox);
            return call.done()(Err(error));
        }
        inbox.calls.push(call);
        drop(inbox);
        self.ring();
    }

    /// The thread.
    fn run(&self, connect: Connect) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.connect(connect).and_then(|it| Work::new(self, it).run())));
        let error = match outcome {
            Ok(Ok(reason)) => Error::Closed { reason },
            Ok(Err(error)) => error,
            Err(panic) => Error::from_panic(&*panic),
        };
        let mut inbox = self.inbox.lock();
        inbox.ended = Some(error.clone());
        let calls = std::mem::take(&mut inbox.calls);
        drop(inbox);
        for call in calls {
            let error = told_of(error.clone(), call.name());
            // What a caller does in there is its own affair.
            let _ = catch_unwind(AssertUnwindSafe(|| call.done()(Err(error))));
        }
        self.inbox.lock().thread = None;
        self.changed.notify_all();
    }

    /// Meets the other members. Those may come late, so waits are told meanwhile.
    fn connect(&self, connect: Connect) -> Result<Arc<Communicator>> {
        let (sender, receiver) = mpsc::channel();
        std::thread::Builder::new()
            .name(format!("smd-names-{:x}", self.id))
            .spawn(move || drop(sender.send(connect())))
            .map_err(|error| Error::io("starting a thread that meets the other ranks", error))?;
        let communicator = loop {
            match receiver.recv_timeout(self.options.stall_warning) {
                Ok(outcome) => break outcome?,
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(Error::Internal("the thread that meets the other ranks ended early".into()));
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let inbox = self.inbox.lock();
                    let Some(first) = inbox.calls.first() else { continue };
                    let (name, seconds) = (first.name().to_owned(), self.start.elapsed().as_secs());
                    drop(inbox);
                    tracing::warn!(
                        "`{name}` has waited for more than {seconds} seconds: some ranks call no collective by name"
                    );
                }
            }
        };
        let _ = self.transport.set(communicator.transport().clone());
        Ok(communicator)
    }
}

/// The error of a call of `name` that came when nothing could be called any more.
fn told_of(error: Error, name: &str) -> Error {
    match error {
        Error::PeerFailed { rank, how, me, .. } => Error::PeerFailed { rank, how, me, during: format!("`{name}`") },
        Error::Timeout { waited, missing, .. } => Error::Timeout { during: format!("`{name}`"), waited, missing },
        Error::Interrupted { .. } => Error::Interrupted { during: format!("`{name}`") },
        other => other,
    }
}

/// What was asked for, and who waits for it.
struct Open {
    requests: Vec<Request>,
    factors: Factors,
    done: Done,
}

/// What only the thread touches.
struct Work<'a> {
    shared: &'a Shared,
    communicator: Arc<Communicator>,
    transport: Arc<dyn Transport>,
    tree: Tree,
    machine: Machine,
    post: Post,
    /// Calls without an answer.
    open: HashMap<Ticket, Open>,
    joining: Option<Done>,
    ticket: Ticket,
    actions: Vec<Action>,
    calls: Vec<Call>,
    last_tick: Instant,
    processor: Processor,
    /// When the departure of a member was seen.
    departed: Option<Instant>,
}

impl<'a> Work<'a> {
    fn new(shared: &'a Shared, communicator: Arc<Communicator>) -> Self {
        let Members { ranks, me } = &shared.members;
        let Options { cache_capacity, fusion_bytes, stall_warning, stall_limit } = shared.options;
        let tree = Tree::new(*me, ranks.len());
        let limits = Limits { cache: cache_capacity, fusion_bytes };
        let patience = Patience { warning: stall_warning, limit: stall_limit };
        let transport = communicator.transport().clone();
        Self {
            shared,
            machine: Machine::new(tree.clone(), ranks.clone(), limits, patience),
            post: Post::new(transport.clone(), &tree),
            communicator,
            transport,
            tree,
            open: HashMap::new(),
            joining: None,
            ticket: 0,
            actions: Vec::new(),
            calls: Vec::new(),
            last_tick: Instant::now(),
            processor: Processor::new(),
            departed: None,
        }
    }

    /// Works until the group is closed, and returns the reason; after an error nothing can be called any more.
    fn run(mut self) -> Result<String> {
        let outcome = loop {
            let seen = self.transport.doorbell();
            match self.turn() {
                Ok(true) => {}
                Ok(false) => {
                    if let Some(reason) = self.shared.closed.get() {
                        break Ok(reason.clone());
                    }
                    self.transport.doze(seen, if self.watches() { NAP } else { LONG_NAP });
                }
                Err(error) => break Err(error),
            }
        };
        let error = match &outcome {
            Ok(reason) => Error::Closed { reason: reason.clone() },
            Err(error) => error.clone(),
        };
        // Calls from now on fail at once, also those that the ones below make.
        self.shared.inbox.lock().ended = Some(error.clone());
        for (name, ticket) in self.machine.drain() {
            if let Some(open) = self.open.remove(&ticket) {
                (open.done)(Err(told_of(error.clone(), &name)));
            }
        }
        if let Some(done) = self.joining.take() {
            done(Err(told_of(error.clone(), "join")));
        }
        self.flush_post();
        if outcome.is_ok() {
            self.communicator.close(&error.text());
        }
        outcome
    }

    /// Whether time matters: this or another member waits.
    fn watches(&self) -> bool {
        self.machine.is_waiting() || self.machine.has_news() || self.departed.is_some()
    }

    /// Takes and does what there is; whether there was anything.
    fn turn(&mut self) -> Result<bool> {
        let mut busy = self.take_calls();
        self.transport.progress();
        while let Some((from, message)) = self.post.receive()? {
            busy = true;
            let now = self.now();
            self.machine.receive(from, message, now, &mut self.actions)?;
        }
        self.post.retire()?;
        if busy {
            let now = self.now();
            self.machine.flush(now, &mut self.actions);
        }
        self.perform()?;
        if self.last_tick.elapsed() >= NAP {
            self.tick()?;
        }
        Ok(busy)
    }

    fn now(&self) -> Duration {
        self.shared.start.elapsed()
    }

    /// Takes what was called, and what is called right after it, so that it goes into one message.
    fn take_calls(&mut self) -> bool {
        let start = Instant::now();
        let (mut any, mut quiet) = (false, 0);
        loop {
            std::mem::swap(&mut self.calls, &mut self.shared.inbox.lock().calls);
            let mut urgent = false;
            let took = !self.calls.is_empty();
            for call in std::mem::take(&mut self.calls) {
                urgent |= matches!(call, Call::Named { blocking: true, .. } | Call::Join { .. });
                self.take(call);
            }
            any |= took;
            quiet = if took { 0 } else { quiet + 1 };
            if !any || urgent || quiet >= QUIET_LOOKS || start.elapsed() >= LINGER {
                return any;
            }
            std::thread::yield_now();
        }
    }

    fn take(&mut self, call: Call) {
        let since = |since: Instant| since.saturating_duration_since(self.shared.start);
        match call {
            Call::Named { name, requests, factors, description, blocking, since: called, done } => {
                self.ticket += 1;
                match self.machine.submit(self.ticket, &name, description, blocking, since(called)) {
                    Ok(()) => drop(self.open.insert(self.ticket, Open { requests, factors, done })),
                    Err(error) => done(Err(error)),
                }
            }
            Call::Join { since: called, done } => match self.machine.join(since(called)) {
                Ok(()) => self.joining = Some(done),
                Err(error) => done(Err(error)),
            },
        }
    }

    fn perform(&mut self) -> Result<()> {
        let mut actions = std::mem::take(&mut self.actions);
        for action in actions.drain(..) {
            match action {
                Action::Up(up) => self.post.send(self.tree.parent.into_iter(), &Message::Up(up))?,
                Action::Down(down) => {
                    let children = self.tree.children.iter().map(|child| child.start);
                    self.post.send(children, &Message::Down(down))?;
                }
                Action::Run(parts) => self.operate(parts)?,
                Action::Fail(ticket, error) => {
                    if let Some(open) = self.open.remove(&ticket) {
                        (open.done)(Err(error));
                    }
                }
                Action::Joined(last) => {
                    // On every member before its next call.
                    self.shared.inbox.lock().given.clear();
                    if let Some(done) = self.joining.take() {
                        done(Ok(Some(last)));
                    }
                }
                Action::Warn(text) => tracing::warn!("{text}"),
            }
        }
        // The memory is used again.
        self.actions = actions;
        Ok(())
    }

    /// Queues one operation.
    fn operate(&mut self, parts: Vec<Part>) -> Result<()> {
        let size = self.tree.size;
        let mut requests = Vec::with_capacity(parts.len());
        let mut calls = Vec::with_capacity(parts.len());
        let mut after = After::default();
        for part in parts {
            match part {
                Part::Own(ticket) => {
                    let Some(open) = self.open.remove(&ticket) else { continue };
                    for request in open.requests {
                        let scaled = open.factors.apply(request, size)?;
                        requests.push(after.keep(scaled));
                    }
                    calls.push(open.done);
                }
                Part::Neutral(group) => {
                    for description in group.each() {
                        let elems = description.shape.iter().product::<u64>() as usize;
                        let mut memory = Neutral::new(description.dtype, description.op, elems);
                        let data = memory.view()?;
                        let request = match description.kind {
                            Kind::Adasum => Request::Adasum { input: data, output: data },
                            _ => Request::AllReduce { input: data, output: data, op: description.op },
                        };
                        // What changes nothing needs no scaling; the operator follows from the others' factors.
                        let factors = Factors { before: 1.0, ..description.factors };
                        requests.push(factors.apply(request, size)?.request);
                        after.neutral.push(memory);
                    }
                }
            }
        }
        let done = move |result: Result<Option<usize>>| {
            if result.is_ok() {
                after.scale();
            }
            for done in calls {
                done(result.clone());
            }
        };
        self.communicator.submit_batch(requests, None, Box::new(done));
        Ok(())
    }

    /// What is looked at a few times a second.
    fn tick(&mut self) -> Result<()> {
        self.last_tick = Instant::now();
        let waiting = self.machine.is_waiting();
        // A device may compute while the processor does nothing.
        let on_device = || self.open.values().any(|open| open.requests.iter().any(Description::is_on_device));
        let elsewhere = self.shared.group.under_way().is_some_and(|time| time >= STUCK_AFTER);
        let idle = self.processor.is_idle() && (waiting || elsewhere) && !on_device();
        let now = self.now();
        self.machine.tick(now, Waits { idle, elsewhere }, &mut self.actions);
        self.perform()?;
        let shared = self.shared;
        if shared.monitor.generation() != 0
            && let Err(error) = shared.monitor.check(&shared.members.ranks, "`collectives by name`")
        {
            let since = *self.departed.get_or_insert_with(Instant::now);
            let grace = GRACE.max(self.transport.last_words());
            if since.elapsed() >= grace || error.code() == crate::error::Code::Closed {
                return Err(error);
            }
        }
        if waiting && shared.monitor.interrupted() {
            return Err(Error::Interrupted { during: "collectives by name".into() });
        }
        match self.machine.longest_wait(now) {
            Some((name, waited)) if waited >= shared.options.stall_limit + ROOT_GRACE => {
                let missing = vec![shared.members.ranks[0]];
                Err(Error::Timeout {
                    during: format!("`{name}` (no word from the group's first rank)"),
                    waited,
                    missing,
                })
            }
            _ => Ok(()),
        }
    }

    /// Gives the last messages a moment to go.
    fn flush_post(&mut self) {
        let deadline = Instant::now() + FLUSH_LIMIT;
        while matches!(self.post.retire(), Ok(false)) && Instant::now() < deadline {
            let seen = self.transport.doorbell();
            self.transport.progress();
            self.transport.doze(seen, Duration::from_millis(5));
        }
    }
}

/// What an operation needs besides its tensors, until it is over.
#[derive(Default)]
struct After {
    neutral: Vec<Neutral>,
    memory: Vec<Vec<u64>>,
    factors: Vec<(TensorView, f64)>,
}

impl After {
    fn keep(&mut self, scaled: Scaled) -> Request {
        self.memory.push(scaled.memory);
        self.factors.extend(scaled.after);
        scaled.request
    }

    fn scale(&self) {
        self.factors.iter().for_each(|(view, factor)| scale(view, *factor));
    }
}

/// Whether this process computes.
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

    /// Whether it has not since [`STUCK_AFTER`]. A long time between two looks counts as one.
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
