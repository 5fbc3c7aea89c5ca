//! The calls into a negotiation, and the threads that run it.
//!
//! Note "driving". A caller that waits drives (runs) the negotiation itself ([`NamedHandle::drive`]), and executes
//! small operations. Handing over to the negotiation's thread, from there to the communicator's thread, and back takes
//! longer than the messages. Meanwhile and for a short time afterwards, the negotiation's thread sleeps without the
//! doorbell, because the next such call often follows at once and a woken thread would take a core from another one.

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
use crate::transport::{Members, MessagePause, POLL_INTERVAL, Transport};
use crate::world::Monitor;

/// Creates the communicator that only the negotiation uses. Collective.
pub type Connect = Box<dyn FnOnce() -> Result<Arc<Communicator>> + Send>;

/// Settings of a negotiation, named as in `config`.
#[derive(Clone, Debug)]
pub struct NegotiatorOptions {
    /// The capacity of the response cache, in names. The first member's setting counts.
    pub cache_capacity: u32,
    /// The fusion size: names that are ready together run as one operation up to this many bytes. The first member's
    /// setting counts.
    pub fusion_bytes: u64,
    /// The time after which a stall is reported on standard error.
    pub stall_warning: Duration,
    /// The time after which everything that waits fails (NEG-5).
    pub stall_limit: Duration,
    /// Autotuning of the fusion size. The first member's setting counts.
    pub tuning: Option<FusionTuning>,
    /// The CPU core to which the thread is pinned.
    pub core: Option<usize>,
    /// The local rank of this process.
    pub local_rank: usize,
}

/// How long [`Negotiator::close`] waits for the thread, and the thread for its last messages to be sent.
const CLOSE_LIMIT: Duration = Duration::from_secs(3);
/// How long the thread sleeps without the doorbell after a caller has driven.
const CALLER_DRIVES_PAUSE: Duration = Duration::from_millis(2);
/// How long a caller drives before it checks for signals.
const DRIVE_TIME: Duration = Duration::from_millis(50);
/// The sleep of a caller while another one drives.
const TURN_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// The longest sleep of the thread while no call is in flight.
pub(super) const LONG_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Runs collectives by name in one group: each runs when all members have submitted it.
pub struct Negotiator {
    shared: Arc<NegotiatorState>,
}

pub(super) struct NegotiatorState {
    id: u64,
    /// The group's own communicator, which creates the one of the negotiation.
    pub(super) group: Arc<Communicator>,
    pub(super) members: Members,
    pub(super) monitor: Arc<Monitor>,
    pub(super) options: NegotiatorOptions,
    pub(super) other_waits: Option<Box<dyn OtherWaits>>,
    pub(super) start: Instant,
    /// Whether this member tunes the fusion size.
    pub(super) tunes: AtomicBool,
    /// The CUDA device of the last call on one; -1 before the first.
    device: AtomicI32,
    pub(super) inbox: Mutex<NegotiatorInbox>,
    /// Signalled when the thread ends, or need not sleep without the doorbell any more.
    changed: Condvar,
    /// Set after the members are connected, until the negotiation ends.
    work: Mutex<Option<Work>>,
    /// The number of callers that drive.
    drivers: AtomicU32,
    /// When the last caller stopped driving, in nanoseconds after `start`.
    last_drive: AtomicU64,
    /// The error of a caller's turn. The thread ends the negotiation with it.
    failure: OnceLock<Error>,
    /// Set after the members are connected.
    transport: OnceLock<Arc<dyn Transport>>,
    closed: OnceLock<String>,
}

#[derive(Default)]
pub(super) struct NegotiatorInbox {
    pub(super) calls: Vec<NegotiatorCommand>,
    /// Whether the thread sleeps without the doorbell: only `changed` wakes it.
    ignores_doorbell: bool,
    /// Names of [`Negotiator::request`] that are in flight.
    names: HashSet<String>,
    /// The number for the next generated name of each kind (NEG-8).
    pub(super) next_numbers: HashMap<String, u64>,
    thread: Option<ThreadId>,
    /// The error that ended the negotiation.
    pub(super) ended: Option<Error>,
}

/// One call of [`Negotiator::request`].
#[derive(Debug)]
pub struct NamedRequest {
    /// The name under which ranks match the call.
    pub name: Name,
    /// Collectives, and the shapes of their tensors, which ranks compare. They run together or not at all.
    pub tensors: Vec<(Request, Option<Vec<u64>>)>,
    /// Prescale and postscale factors of reductions.
    pub factors: Factors,
    /// Whether this process does nothing else until completion.
    pub blocking: bool,
}

/// How a call gets its name.
#[derive(Debug)]
pub enum Name {
    /// This name. An error if another call of this member has it.
    Given(String),
    /// A generated name, `<kind>.noname.<count>`.
    Next(String),
    /// This name. Calls of this member with the same name run one after the other.
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
        /// Hints on which device to take part in the others' operations.
        hints: DeviceHints,
        since: Instant,
        done: Done,
    },
}

impl Negotiator {
    /// Creates a negotiator for the members of `group`. Starts the thread, which first calls `connect`; the other
    /// members' threads do the same at their first call. `id` is for thread names. `other_waits` reports what else this
    /// process waits for.
    ///
    /// # Errors
    /// [`Error::Io`] if no thread can be started.
    pub fn start(
        id: u64,
        group: Arc<Communicator>,
        monitor: Arc<Monitor>,
        options: NegotiatorOptions,
        connect: Connect,
        other_waits: Option<Box<dyn OtherWaits>>,
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
            other_waits,
            start,
            tunes,
            device: AtomicI32::new(-1),
            inbox: Mutex::default(),
            changed: Condvar::new(),
            work: Mutex::default(),
            drivers: AtomicU32::new(0),
            last_drive: AtomicU64::new(0),
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

    /// Submits `request` under `name`. It runs once every rank has submitted an equal request under this name; `done`
    /// is called when it is complete. The views must stay valid until then. A second call of a name runs after the
    /// first.
    ///
    /// `shape` is the tensor's shape, if it has one; ranks compare it. With `blocking`, this process does nothing
    /// else until `done` is called. Ranks that block on different names soon get an error.
    pub fn submit(&self, name: &str, shape: Option<&[u64]>, request: Request, blocking: bool, done: Done) {
        let Members { ranks, me } = &self.shared.members;
        let (description, done) = match Description::of(&request, shape, *me, ranks.len()) {
            Ok(description) => (description, done),
            // The other ranks get the error under this name, and this rank gets its own error.
            Err(error) => (Description::poison(error.to_string()), Box::new(move |_| done(Err(error))) as Done),
        };
        let (name, since) = (name.to_owned(), Instant::now());
        let (requests, factors, description) = (vec![request], Factors::default(), Box::new(description));
        self.shared.note_device(&requests);
        self.shared.call(NegotiatorCommand::Named { name, requests, factors, description, blocking, since, done });
    }

    /// As [`Negotiator::submit`], for callers that want their own mistakes reported at once (NEG-8) and may submit
    /// several collectives together. `done` is called only after all checks have passed, to create the completion.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], also for a name that is in flight; [`Error::Unsupported`]; the error that ended the
    /// negotiation.
    pub fn request(&self, request: NamedRequest, done: impl FnOnce() -> Done) -> Result<NamedHandle> {
        let NamedRequest { name, tensors, factors, blocking } = request;
        let Members { ranks, me } = &self.shared.members;
        let description = Description::of_all(&tensors, factors, *me, ranks.len())?;
        let requests = tensors.into_iter().map(|(request, _)| request).collect::<Vec<_>>();
        self.shared.note_device(&requests);
        self.enqueue_named(name, description, requests, factors, blocking, done)
    }

    /// Compares across ranks which gradients a step has. If they differ, all ranks get an error that names ranks and
    /// parameters.
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
            return Err(error_of_call(error.clone(), name.text()));
        }
        let unique = !matches!(name, Name::Shared(_));
        let (name, kind) = match name {
            Name::Given(name) | Name::Shared(name) => (name, None),
            Name::Next(kind) => {
                (format!("{kind}.noname.{}", inbox.next_numbers.get(&kind).copied().unwrap_or(0)), Some(kind))
            }
        };
        if unique && !inbox.names.insert(name.clone()) {
            return Err(Error::InvalidArgument(format!(
                "`{name}`: requested to work on a tensor with the same name as another tensor that is currently being \
                 processed"
            )));
        }
        if let Some(kind) = kind {
            *inbox.next_numbers.entry(kind).or_default() += 1;
        }
        let free = name.clone();
        let is_complete = Arc::new(AtomicBool::new(false));
        let is_handled = AtomicBool::new(!blocking);
        let handle = NamedHandle { shared: self.shared.clone(), is_complete: is_complete.clone(), is_handled };
        let done = done();
        let done: Done = Box::new(move |result| {
            if unique {
                // Before the completion, because the caller may reuse the name in it.
                shared.inbox.lock().names.remove(&free);
            }
            done(result);
            // Sequentially consistent, as in `NamedHandle::drive`: either this thread sees the caller that drives, or
            // that caller sees the completion before it sleeps.
            is_complete.store(true, Ordering::SeqCst);
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
        // A blocking caller drives the negotiation itself. If it does not, dropping the handle wakes the thread.
        if !blocking {
            self.shared.wake(inbox);
        }
        Ok(handle)
    }

    /// Joins: this rank has nothing more to submit. `done` is called with the rank that joined last, when all ranks
    /// have joined. Until then this rank contributes neutral elements to the others' all-reduces; their other
    /// collectives fail.
    ///
    /// All-reduces on CUDA devices use the device of this rank's last collective by name. Before the first one, they
    /// use `named`, which the script has chosen, then the `current` device, then the device with the local rank's
    /// number. Without a device, the others' all-reduces on devices fail.
    pub fn join(&self, named: Option<u16>, current: Option<u16>, done: Done) {
        let shared = &self.shared;
        let used = u16::try_from(shared.device.load(Ordering::Relaxed)).ok();
        let hints = DeviceHints { used, named, current, local_rank: shared.options.local_rank };
        shared.call(NegotiatorCommand::Join { hints, since: Instant::now(), done });
    }

    /// Whether this member tunes the fusion size and therefore needs collectives by name. True on the first member
    /// until all sizes are tried.
    pub fn is_tuning(&self) -> bool {
        self.shared.tunes.load(Ordering::Relaxed)
    }

    /// Ends the thread. Waiting and running calls fail with [`Error::Closed`].
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

/// A call in flight, for a caller that waits for it.
pub struct NamedHandle {
    shared: Arc<NegotiatorState>,
    is_complete: Arc<AtomicBool>,
    /// Whether the thread was woken for the call, or the caller has run the negotiation.
    is_handled: AtomicBool,
}

impl Drop for NamedHandle {
    fn drop(&mut self) {
        if !self.is_handled.load(Ordering::Relaxed) && !self.is_complete.load(Ordering::Acquire) {
            self.shared.wake(self.shared.inbox.lock());
        }
    }
}

impl NamedHandle {
    /// Runs the negotiation on this thread until the call is complete, for 50 ms at most. Returns false at once if this
    /// thread can do nothing: members are not connected yet, or another thread executes the operation.
    pub fn drive(&self) -> bool {
        let shared = &*self.shared;
        let Some(transport) = shared.transport.get() else { return false };
        self.is_handled.store(true, Ordering::Relaxed);
        shared.drivers.fetch_add(1, Ordering::SeqCst);
        let outcome = self.drive_in_turn(&**transport);
        shared.last_drive.store(shared.now().as_nanos() as u64, Ordering::Relaxed);
        if shared.drivers.fetch_sub(1, Ordering::SeqCst) > 1 {
            // Wakes the caller that drives at present.
            transport.ring();
        }
        outcome
    }

    fn drive_in_turn(&self, transport: &dyn Transport) -> bool {
        let shared = &*self.shared;
        let end = Instant::now() + DRIVE_TIME;
        let mut pause = MessagePause::new(transport);
        loop {
            let seen = transport.doorbell();
            // After `drive` has counted this caller; see where it is stored.
            if self.is_complete.load(Ordering::SeqCst) {
                return true;
            }
            // A turn may execute an operation, whose waits sleep.
            pause.stop_receiving();
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
                Some(Ok((true, _))) => pause.restart(),
                // The thread that executes the operation completes it.
                Some(Ok((false, false))) => return self.is_complete.load(Ordering::Acquire),
                Some(Ok((false, true))) if pause.pause() => {}
                Some(Ok((false, true))) => transport.wait_doorbell(seen, POLL_INTERVAL),
                Some(Err(error)) => {
                    let _ = shared.failure.set(error);
                    shared.wake(shared.inbox.lock());
                    return false;
                }
                None => transport.wait_doorbell(seen, TURN_POLL_INTERVAL),
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

    /// Wakes the caller that drives, or the thread.
    fn wake(&self, inbox: MutexGuard<'_, NegotiatorInbox>) {
        if inbox.ignores_doorbell {
            self.changed.notify_all();
        }
        drop(inbox);
        self.ring();
    }

    /// Whether a caller drives, or has driven a moment ago.
    fn is_driven(&self, inbox: &NegotiatorInbox) -> bool {
        let since = self.now().saturating_sub(Duration::from_nanos(self.last_drive.load(Ordering::Relaxed)));
        let idle = inbox.calls.is_empty() && since < CALLER_DRIVES_PAUSE && self.last_drive.load(Ordering::Relaxed) > 0;
        let ends = self.closed.get().is_some() || self.failure.get().is_some();
        !ends && (self.drivers.load(Ordering::SeqCst) > 0 || idle)
    }

    /// Takes the turn for the thread. A caller may be blocked in an operation; closing the group ends that.
    fn turn_of_thread(&self, communicator: &Communicator) -> MutexGuard<'_, Option<Work>> {
        loop {
            if let Some(work) = self.work.try_lock_for(POLL_INTERVAL) {
                return work;
            }
            if let Some(reason) = self.closed.get() {
                communicator.close(reason);
            }
        }
    }

    /// Works until the group is closed, and returns the reason. After an error the negotiation has ended.
    fn work(&self, communicator: &Communicator) -> Result<String> {
        let transport = &**communicator.transport();
        loop {
            {
                let mut inbox = self.inbox.lock();
                inbox.ignores_doorbell = true;
                while self.is_driven(&inbox) {
                    self.changed.wait_for(&mut inbox, CALLER_DRIVES_PAUSE);
                }
                inbox.ignores_doorbell = false;
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
            transport.wait_doorbell(seen, if watches { POLL_INTERVAL } else { LONG_POLL_INTERVAL });
        }
    }

    fn call(&self, call: NegotiatorCommand) {
        let mut inbox = self.inbox.lock();
        if let Some(error) = &inbox.ended {
            let error = error_of_call(error.clone(), call.name());
            drop(inbox);
            return call.done()(Err(error));
        }
        inbox.calls.push(call);
        self.wake(inbox);
    }

    /// The body of the thread.
    fn run(&self, connect: Connect) {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let communicator = self.connect(connect)?;
            // Pinned only now, because threads inherit the affinity of the thread that starts them.
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
            let error = error_of_call(error.clone(), call.name());
            // A panic in a completion must not end the thread.
            let _ = catch_unwind(AssertUnwindSafe(|| call.done()(Err(error))));
        }
        self.inbox.lock().thread = None;
        self.changed.notify_all();
    }

    /// Connects the members. Some may be late, so waits are reported meanwhile.
    fn connect(&self, connect: Connect) -> Result<Arc<Communicator>> {
        let (sender, receiver) = mpsc::channel();
        std::thread::Builder::new()
            .name(format!("smd-names-{:x}", self.id))
            .spawn(move || drop(sender.send(connect())))
            .map_err(|error| Error::io("starting a thread that connects to the other ranks", error))?;
        let communicator = loop {
            match receiver.recv_timeout(self.options.stall_warning) {
                Ok(outcome) => break outcome?,
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(Error::Internal("the thread that connects to the other ranks ended early".into()));
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

/// The error of a call of `name` after the negotiation has ended.
pub(super) fn error_of_call(error: Error, name: &str) -> Error {
    match error {
        Error::PeerFailed { rank, how, me, .. } => Error::PeerFailed { rank, how, me, during: format!("`{name}`") },
        Error::Timeout { waited, missing, limit, .. } => {
            Error::Timeout { during: format!("`{name}`"), waited, missing, limit }
        }
        Error::Interrupted { .. } => Error::Interrupted { during: format!("`{name}`") },
        other => other,
    }
}
