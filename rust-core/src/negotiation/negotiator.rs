//! Who calls a negotiation, and the threads that bring it on.
//!
//! Note "who drives". A caller that waits brings the negotiation on by itself ([`NamedHandle::drive`]), and runs what is small: a
//! hand-over to the thread of the negotiation, from there to the communicator's, and back would take longer than the messages. That thread
//! keeps out of the way meanwhile, and for a moment after, as the next such call often follows at once: woken, it
//! would take the core from somebody.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::description::Description;
use super::factors::Factors;
use super::supply::DeviceHints;
use super::tune::FusionTuning;
use super::work::Work;
use super::{Gradients, OtherWaits, affinity};
use crate::buffer::Device;
use crate::collectives::{Communicator, Done, Request, views};
use crate::error::{Error, Result};
use crate::transport::{Backoff, Members, NAP, Transport, cores};
use crate::world::Monitor;

/// Makes the communicator that only the negotiation uses: collective.
pub type Connect = Box<dyn FnOnce() -> Result<Arc<Communicator>> + Send>;

/// How a negotiation goes; see the knobs of the same names.
#[derive(Clone, Debug)]
pub struct NegotiatorOptions {
    /// Names that are remembered. The first member's counts.
    pub cache_capacity: u32,
    /// What is ready together runs as one operation up to this size. The first member's counts.
    pub fusion_bytes: u64,
    /// A wait of this length is told on standard error.
    pub stall_warning: Duration,
    /// A wait of this length ends everything that waits.
    pub stall_limit: Duration,
    /// Tries sizes of what runs together. The first member's counts.
    pub tuning: Option<FusionTuning>,
    /// The core that the thread stays on.
    pub core: Option<usize>,
    /// This process's number on its host.
    pub local_rank: usize,
}

/// How long [`Negotiator::close`] waits for the thread, and the thread for its last messages.
const CLOSE_LIMIT: Duration = Duration::from_secs(3);
/// So long after a caller has driven the thread sleeps without the doorbell.
const ASIDE: Duration = Duration::from_millis(2);
/// How long a caller drives before it looks for signals.
const DRIVE: Duration = Duration::from_millis(50);
/// Naps of a caller while another one drives.
const TURN_NAP: Duration = Duration::from_millis(1);
/// Naps of a thread that nobody waits for.
pub(super) const LONG_NAP: Duration = Duration::from_millis(500);

/// Runs collectives by name in one group: each runs when all members have submitted it.
pub struct Negotiator {
    shared: Arc<NegotiatorState>,
}

pub(super) struct NegotiatorState {
    id: u64,
    /// Runs what has no name.
    pub(super) group: Arc<Communicator>,
    pub(super) members: Members,
    pub(super) monitor: Arc<Monitor>,
    pub(super) options: NegotiatorOptions,
    pub(super) elsewhere: Option<Box<dyn OtherWaits>>,
    pub(super) start: Instant,
    /// This member's tuner tries sizes.
    pub(super) tunes: AtomicBool,
    /// The CUDA device of the last call on one; -1 before.
    device: AtomicI32,
    pub(super) inbox: Mutex<NegotiatorInbox>,
    /// The thread has ended, or need not stand aside any more.
    changed: Condvar,
    /// From when the members have met until nothing can be called any more.
    work: Mutex<Option<Work>>,
    /// Callers that drive.
    drivers: AtomicU32,
    /// When the last one stopped, in nanoseconds after `start`.
    driven: AtomicU64,
    /// What a turn of a caller ended with; the thread draws the consequences.
    failure: OnceLock<Error>,
    /// There once the members have met.
    transport: OnceLock<Arc<dyn Transport>>,
    closed: OnceLock<String>,
}

#[derive(Default)]
pub(super) struct NegotiatorInbox {
    pub(super) calls: Vec<NegotiatorCommand>,
    /// The thread stands aside.
    is_aside: bool,
    /// Of [`Negotiator::request`], without an end.
    names: HashSet<String>,
    /// How many names were given to each kind (NEG-8).
    pub(super) given: HashMap<String, u64>,
    thread: Option<ThreadId>,
    /// Why nothing can be called any more.
    pub(super) ended: Option<Error>,
}

/// What is asked for by [`Negotiator::request`].
#[derive(Debug)]
pub struct NamedRequest {
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

pub(super) enum NegotiatorCommand {
    Named {
        name: String,
        requests: Vec<Request>,
        factors: Factors,
        description: Box<Description>,
        blocking: bool,
        since: Instant,
        done: Done,
    },
    Join {
        /// Where to take part on devices meanwhile.
        signs: DeviceHints,
        since: Instant,
        done: Done,
    },
}

impl Negotiator {
    /// For the members of `group`. Starts the thread, which first lets `connect` find the other members: their threads do the same when they are
    /// first called there. `id` is for names of threads; `elsewhere` tells what else this process waits for.
    ///
    /// # Errors
    /// [`Error::Io`] if there can be no thread.
    pub fn start(
        id: u64,
        group: Arc<Communicator>,
        monitor: Arc<Monitor>,
        options: NegotiatorOptions,
        connect: Connect,
        elsewhere: Option<Box<dyn OtherWaits>>,
    ) -> Result<Arc<Self>> {
        let start = Instant::now();
        let members = group.members().clone();
        let tunes = AtomicBool::new(members.me == 0 && options.tuning.is_some());
        let shared = Arc::new(NegotiatorState {
            id,
            group,
            members,
            monitor,
            options,
            elsewhere,
            start,
            tunes,
            device: AtomicI32::new(-1),
            inbox: Mutex::default(),
            changed: Condvar::new(),
            work: Mutex::default(),
            drivers: AtomicU32::new(0),
            driven: AtomicU64::new(0),
            failure: OnceLock::new(),
            transport: OnceLock::new(),
            closed: OnceLock::new(),
        });
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
        let (requests, factors, description) = (vec![request], Factors::default(), Box::new(description));
        self.shared.note_device(&requests);
        self.shared.call(NegotiatorCommand::Named { name, requests, factors, description, blocking, since, done });
    }

    /// As [`Negotiator::submit`], for callers that hear of their own mistakes at once (NEG-8), and that may ask for several
    /// collectives together. `done` is made once nothing can be refused any more.
    ///
    /// # Errors
    /// What this member cannot ask for: [`Error::InvalidArgument`], also for a name that is
    /// under way; [`Error::Unsupported`]; whatever ended the negotiation.
    pub fn request(&self, request: NamedRequest, done: impl FnOnce() -> Done) -> Result<NamedHandle> {
        let NamedRequest { name, tensors, factors, blocking } = request;
        let Members { ranks, me } = &self.shared.members;
        let description = Description::of_all(&tensors, factors, *me, ranks.len())?;
        let requests = tensors.into_iter().map(|(request, _)| request).collect::<Vec<_>>();
        self.shared.note_device(&requests);
        self.enqueue_named(name, description, requests, factors, blocking, done)
    }

    /// Has all ranks compare which gradients a step has. If they differ, all of them get an error that names ranks and parameters.
    ///
    /// # Errors
    /// As [`Negotiator::request`].
    pub fn compare_gradients(
        &self,
        name: Name,
        gradients: &Gradients<'_>,
        blocking: bool,
        done: impl FnOnce() -> Done,
    ) -> Result<NamedHandle> {
        self.enqueue_named(name, Description::presence(gradients), Vec::new(), Factors::default(), blocking, done)
    }

    fn enqueue_named(
        &self,
        name: Name,
        description: Description,
        requests: Vec<Request>,
        factors: Factors,
        blocking: bool,
        done: impl FnOnce() -> Done,
    ) -> Result<NamedHandle> {
        let description = Box::new(description);
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
        let is_over = Arc::new(AtomicBool::new(false));
        let is_seen_to = AtomicBool::new(!blocking);
        let handle = NamedHandle { shared: self.shared.clone(), is_over: is_over.clone(), is_seen_to };
        let done = done();
        let done: Done = Box::new(move |result| {
            if unique {
                // Before the caller hears of it, who may use the name again.
                shared.inbox.lock().names.remove(&free);
            }
            done(result);
            is_over.store(true, Ordering::Release);
            if shared.drivers.load(Ordering::SeqCst) > 0 {
                shared.ring();
            }
        });
        inbox.calls.push(NegotiatorCommand::Named {
            name,
            requests,
            factors,
            description,
            blocking,
            since: Instant::now(),
            done,
        });
        // A caller that is going to wait comes to drive; should it not, dropping the handle wakes the thread.
        if !blocking {
            self.shared.wake(inbox);
        }
        Ok(handle)
    }

    /// This rank has nothing more to submit: `done` is called, with the rank that joined last, when no rank has. Until
    /// then it contributes to the others' all-reduces what changes nothing; their other collectives fail.
    ///
    /// All-reduces on CUDA devices take place on the device that collectives by name were called on; before there were any, on the
    /// one that the script has `named`, on the `current` one, or on the one with this process's number on its host. If there is
    /// none, the others' all-reduces on devices fail.
    pub fn join(&self, named: Option<u16>, current: Option<u16>, done: Done) {
        let shared = &self.shared;
        let used = u16::try_from(shared.device.load(Ordering::Relaxed)).ok();
        let signs = DeviceHints { used, named, current, local_rank: shared.options.local_rank };
        shared.call(NegotiatorCommand::Join { signs, since: Instant::now(), done });
    }

    /// Whether this member tries sizes of what runs together, and so needs collectives by name: the first one does, until it
    /// has tried all.
    pub fn is_tuning(&self) -> bool {
        self.shared.tunes.load(Ordering::Relaxed)
    }

    /// Ends the thread; whatever waits or runs fails with [`Error::Closed`].
    pub fn close(&self, reason: &str) {
        let shared = &self.shared;
        let _ = shared.closed.set(reason.to_owned());
        shared.wake(shared.inbox.lock());
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

impl NegotiatorCommand {
    fn done(self) -> Done {
        match self {
            NegotiatorCommand::Named { done, .. } | NegotiatorCommand::Join { done, .. } => done,
        }
    }

    fn name(&self) -> &str {
        match self {
            NegotiatorCommand::Named { name, .. } => name,
            NegotiatorCommand::Join { .. } => "join",
        }
    }
}

/// A call that is under way, for a caller that waits for it.
pub struct NamedHandle {
    shared: Arc<NegotiatorState>,
    is_over: Arc<AtomicBool>,
    /// Whether the thread was woken for it, or the caller came to drive.
    is_seen_to: AtomicBool,
}

impl Drop for NamedHandle {
    fn drop(&mut self) {
        if !self.is_seen_to.load(Ordering::Relaxed) && !self.is_over.load(Ordering::Acquire) {
            self.shared.wake(self.shared.inbox.lock());
        }
    }
}

impl NamedHandle {
    /// Brings the negotiation on until the call is over, for 50 ms at most. False at once if there is nothing that
    /// this thread could do: the others have not been met yet, or the operation is one that another thread runs.
    pub fn drive(&self) -> bool {
        let shared = &*self.shared;
        let Some(transport) = shared.transport.get() else { return false };
        self.is_seen_to.store(true, Ordering::Relaxed);
        shared.drivers.fetch_add(1, Ordering::SeqCst);
        let outcome = self.take_turns(&**transport);
        shared.driven.store(shared.now().as_nanos() as u64, Ordering::Relaxed);
        if shared.drivers.fetch_sub(1, Ordering::SeqCst) > 1 {
            // Another caller's turn.
            transport.ring();
        }
        outcome
    }

    fn take_turns(&self, transport: &dyn Transport) -> bool {
        let shared = &*self.shared;
        let end = Instant::now() + DRIVE;
        let crowded = transport.members().size() > cores();
        let mut backoff = Backoff::new();
        loop {
            let seen = transport.doorbell();
            if self.is_over.load(Ordering::Acquire) {
                return true;
            }
            let turn = match shared.work.try_lock() {
                Some(mut work) => match work.as_mut() {
                    Some(work) => {
                        let turn = catch_unwind(AssertUnwindSafe(|| work.turn(shared, true)));
                        let turn = turn.unwrap_or_else(|panic| Err(Error::from_panic(&*panic)));
                        Some(turn.map(|busy| (busy, work.is_waiting())))
                    }
                    None => return false,
                },
                None => None,
            };
            match turn {
                Some(Ok((true, _))) => backoff = Backoff::new(),
                // What runs is told by whoever runs it.
                Some(Ok((false, false))) => return self.is_over.load(Ordering::Acquire),
                Some(Ok((false, true))) if backoff.pause(|| crowded) => {}
                Some(Ok((false, true))) => transport.doze(seen, NAP),
                Some(Err(error)) => {
                    let _ = shared.failure.set(error);
                    shared.wake(shared.inbox.lock());
                    return false;
                }
                None => transport.doze(seen, TURN_NAP),
            }
            if Instant::now() >= end {
                return true;
            }
        }
    }
}

impl NegotiatorState {
    pub(super) fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn note_device(&self, requests: &[Request]) {
        let view = requests.first().and_then(|request| views(request).first().copied());
        if let Some(Device::Cuda(device)) = view.map(|view| view.device()) {
            self.device.store(device.into(), Ordering::Relaxed);
        }
    }

    fn ring(&self) {
        if let Some(transport) = self.transport.get() {
            transport.ring();
        }
    }

    /// Has whoever drives, or the thread, look at what is new.
    fn wake(&self, inbox: MutexGuard<'_, NegotiatorInbox>) {
        if inbox.is_aside {
            self.changed.notify_all();
        }
        drop(inbox);
        self.ring();
    }

    /// Whether a caller drives, or did a moment ago.
    fn is_driven(&self, inbox: &NegotiatorInbox) -> bool {
        let since = self.now().saturating_sub(Duration::from_nanos(self.driven.load(Ordering::Relaxed)));
        let idle = inbox.calls.is_empty() && since < ASIDE && self.driven.load(Ordering::Relaxed) > 0;
        let ends = self.closed.get().is_some() || self.failure.get().is_some();
        !ends && (self.drivers.load(Ordering::SeqCst) > 0 || idle)
    }

    /// A caller may be in an operation, which the end of the group ends.
    fn turn_of_thread(&self, communicator: &Communicator) -> MutexGuard<'_, Option<Work>> {
        loop {
            if let Some(work) = self.work.try_lock_for(NAP) {
                return work;
            }
            if let Some(reason) = self.closed.get() {
                communicator.close(reason);
            }
        }
    }

    /// Works until the group is closed, and returns the reason; after an error nothing can be called any more.
    fn work(&self, communicator: &Communicator) -> Result<String> {
        let transport = &**communicator.transport();
        loop {
            {
                let mut inbox = self.inbox.lock();
                inbox.is_aside = true;
                while self.is_driven(&inbox) {
                    self.changed.wait_for(&mut inbox, ASIDE);
                }
                inbox.is_aside = false;
            }
            let seen = transport.doorbell();
            let (busy, watches) = {
                let mut work = self.turn_of_thread(communicator);
                let work = work.as_mut().expect("only this thread takes it away");
                if let Some(error) = self.failure.get() {
                    return Err(error.clone());
                }
                (work.turn(self, false)?, work.watches())
            };
            if busy {
                continue;
            }
            if let Some(reason) = self.closed.get() {
                return Ok(reason.clone());
            }
            transport.doze(seen, if watches { NAP } else { LONG_NAP });
        }
    }

    fn call(&self, call: NegotiatorCommand) {
        let mut inbox = self.inbox.lock();
        if let Some(error) = &inbox.ended {
            let error = told_of(error.clone(), call.name());
            drop(inbox);
            return call.done()(Err(error));
        }
        inbox.calls.push(call);
        self.wake(inbox);
    }

    /// The thread.
    fn run(&self, connect: Connect) {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let communicator = self.connect(connect)?;
            // Only now, since threads run where those that start them do.
            self.options.core.into_iter().for_each(affinity::pin);
            *self.work.lock() = Some(Work::new(self, communicator.clone()));
            let _ = self.transport.set(communicator.transport().clone());
            self.work(&communicator)
        }));
        let error = match outcome {
            Ok(Ok(reason)) => Error::Closed { reason },
            Ok(Err(error)) => error,
            Err(panic) => Error::from_panic(&*panic),
        };
        let work = self.work.lock().take();
        if let Some(work) = work {
            let ended = catch_unwind(AssertUnwindSafe(|| work.end(self, &error)));
            if ended.is_err() {
                tracing::error!("the end of a negotiation panicked");
            }
        }
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
        Ok(communicator)
    }
}

/// The error of a call of `name` that came when nothing could be called any more.
pub(super) fn told_of(error: Error, name: &str) -> Error {
    match error {
        Error::PeerFailed { rank, how, me, .. } => Error::PeerFailed { rank, how, me, during: format!("`{name}`") },
        Error::Timeout { waited, missing, limit, .. } => {
            Error::Timeout { during: format!("`{name}`"), waited, missing, limit }
        }
        Error::Interrupted { .. } => Error::Interrupted { during: format!("`{name}`") },
        other => other,
    }
}
