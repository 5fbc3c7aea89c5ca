//! A group that can run operations: its members, the transport between them, and the order of what they run.
//!
//! - COM-1: operations of one communicator run one at a time, in the order of [`Communicator::run`] and
//!   [`Communicator::submit`] calls. Point-to-point messages are outside this order.
//! - COM-2: `run` works on the caller's thread when nothing is queued, since a hand-over to another thread costs more
//!   than a small collective.
//! - COM-3: communicators are independent: each has its own worker thread, started by its first `submit`, so that
//!   ranks may interleave two groups differently.
//! - COM-4: a request that one member may not make (a bad argument, an operation that its element type lacks) still
//!   takes its place in the order: the member gets its error at once, the others hear of it (as from
//!   [`Communicator::fail_next`]), and the group stays usable.
//! - COM-5: after an error in the middle of an operation (a departure, a timeout, an interruption) the members may
//!   stand at different places, so every later operation of the group fails too.
//! - COM-6: a batch takes one place in the order and runs its collectives one after the other, small ones together (see
//!   `batch`). The first failure ends it: members that agree see it at the same operation, so they leave the batch at
//!   the same place. A member that cannot take part fails the whole batch with one [`Communicator::fail_next`].
//! - COM-7: a panic ends no thread of the group. A panic inside an operation breaks the group (COM-5). After a panic in a
//!   completion the members still agree on their place, so the group is *spoiled*: every later operation ends at once on
//!   this member with the panic's text, and on the others as after [`Communicator::fail_next`].

use std::any::Any;
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::batch::{self, Phase, Step, Watch};
use super::call::{Call, Kind};
use super::cuda::{self, Cuda, PendingWork, Side};
use super::kernels::copy::Publisher;
use super::point_to_point::PointToPoint;
use super::window::Window;
use super::{Group, Overlap, ReduceOp, Request, agreement, algorithms, rows};
use crate::buffer::{DType, Device, TensorView};
use crate::config;
use crate::device::nccl::Parent;
use crate::device::{Context, Stream};
use crate::error::{Error, Result};
use crate::transport::{Members, Transport, Wait};
use crate::world::{Monitor, Store};

/// Called once, from the worker thread, when an operation has completed or failed; a receive says which member sent.
pub type Done = Box<dyn FnOnce(Result<Option<usize>>) + Send>;

/// How long [`Communicator::close`] waits for its threads: several naps, so only a stuck callback exceeds it.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// See the module's text.
pub struct Communicator {
    shared: Arc<Shared>,
    point_to_point: PointToPoint,
}

/// What the worker thread shares with the callers.
struct Shared {
    id: u64,
    transport: Arc<dyn Transport>,
    cuda: Arc<Cuda>,
    monitor: Arc<Monitor>,
    timeout: Duration,
    turns: Mutex<Turns>,
    changed: Condvar,
    closed: Arc<OnceLock<String>>,
    /// COM-5.
    broken: OnceLock<Error>,
    /// COM-7.
    spoiled: Arc<OnceLock<Error>>,
    /// The last arrival was not waited for (SHM-3).
    unsettled: AtomicBool,
    publisher: Publisher,
    made: Instant,
    /// When the operation under way began, in nanoseconds since then and one more; 0 if there is none.
    entered: AtomicU64,
    /// Operations and windows so far: the same on all members.
    operations: AtomicU64,
    windows: AtomicU64,
}

#[derive(Default)]
struct Turns {
    /// Somebody executes an operation.
    busy: bool,
    queue: VecDeque<(Job, Done)>,
    worker: Option<ThreadId>,
}

enum Job {
    Run(Request, Option<Duration>),
    Batch(Vec<Request>, Option<Duration>, Option<Arc<dyn Watch>>),
    /// On CUDA tensors.
    Launch(Vec<Request>, Option<Duration>),
    Fail(String),
    Window(usize, Arc<OnceLock<Arc<Window>>>),
}

impl Communicator {
    /// The communicator over `transport`, which nobody else uses; `id` is the same on all members and unique in the
    /// job.
    pub fn new(id: u64, transport: Arc<dyn Transport>, monitor: Arc<Monitor>, timeout: Duration) -> Arc<Self> {
        let closed = Arc::new(OnceLock::new());
        let spoiled = Arc::new(OnceLock::new());
        let point_to_point =
            PointToPoint::new(id, transport.clone(), monitor.clone(), timeout, closed.clone(), spoiled.clone());
        let cuda = Cuda::new(id, transport.members().clone(), monitor.clone(), timeout, closed.clone());
        let shared = Arc::new(Shared {
            id,
            transport,
            cuda,
            monitor,
            timeout,
            turns: Mutex::default(),
            changed: Condvar::new(),
            closed,
            broken: OnceLock::new(),
            spoiled,
            unsettled: AtomicBool::new(false),
            publisher: Publisher::default(),
            made: Instant::now(),
            entered: AtomicU64::new(0),
            operations: AtomicU64::new(0),
            windows: AtomicU64::new(0),
        });
        Arc::new(Self { shared, point_to_point })
    }

    /// Says where the members meet before their first operation on CUDA tensors.
    pub fn set_store(&self, store: Arc<dyn Store>) {
        self.shared.cuda.set_store(store);
    }

    /// The job-wide name of the group; 0 is the world.
    pub fn id(&self) -> u64 {
        self.shared.id
    }

    /// Its transport, whose messages with tags of their own may be used beside the operations.
    pub(crate) fn transport(&self) -> &Arc<dyn Transport> {
        &self.shared.transport
    }

    /// For how long the operation under way on CPU tensors has been, if there is one.
    pub(crate) fn under_way(&self) -> Option<Duration> {
        let entered = self.shared.entered.load(Ordering::Relaxed).checked_sub(1)?;
        Some(self.shared.made.elapsed().saturating_sub(Duration::from_nanos(entered)))
    }

    /// The members.
    pub fn members(&self) -> &Members {
        self.shared.transport.members()
    }

    /// Runs `request` and returns when this member's part is complete; on CUDA tensors, when it is queued into the stream
    /// that they name ([`super::cuda`]).
    ///
    /// # Errors
    /// See COL-3, COM-4, COM-5 and [`Wait::check`].
    pub fn run(&self, request: &Request) -> Result<()> {
        self.run_within(request, None)
    }

    /// As [`Communicator::run`], waiting for other members for `timeout` instead of the group's own.
    pub fn run_within(&self, request: &Request, timeout: Option<Duration>) -> Result<()> {
        match request {
            Request::AllGatherRows { .. } | Request::AllToAllRows { .. } if cuda::is_on_device(request) => {
                Err(Error::Unsupported("operations on rows of CUDA tensors are submitted, not run".into()))
            }
            _ if cuda::is_on_device(request) => {
                self.shared.cuda.run(std::slice::from_ref(request), timeout, Overlap::Unknown)
            }
            Request::Send { .. } | Request::Recv { .. } => self.point_to_point.run(request, timeout),
            _ => self.shared.run(|| Job::Run(request.clone(), timeout), || self.shared.collective(request, timeout)),
        }
    }

    /// Queues `request`; `done` is called when it is complete, on CUDA tensors: when the device is done. The views' promise
    /// must hold until then.
    pub fn submit(self: &Arc<Self>, request: Request, done: Done) {
        self.submit_within(request, None, done);
    }

    /// As [`Communicator::submit`], with a timeout as [`Communicator::run_within`] has; it begins when the operation
    /// does.
    pub fn submit_within(self: &Arc<Self>, request: Request, timeout: Option<Duration>, done: Done) {
        match request {
            // The worker learns the numbers of rows first.
            Request::AllGatherRows { .. } | Request::AllToAllRows { .. } => {
                self.shared.queue(Job::Run(request, timeout), done);
            }
            _ if cuda::is_on_device(&request) => self.shared.launch(vec![request], timeout, done),
            Request::Send { .. } | Request::Recv { .. } => self.point_to_point.submit(request, timeout, done),
            _ => self.shared.queue(Job::Run(request, timeout), done),
        }
    }

    /// Queues several requests on CUDA tensors as one operation: they start together, so that messages in both
    /// directions do not wait for each other. All members say the same of what is done `beside`.
    ///
    /// # Errors
    /// As [`Communicator::run`]; [`Error::InvalidArgument`] for tensors in CPU memory.
    pub fn run_on_device(&self, requests: &[Request], timeout: Option<Duration>, overlap: Overlap) -> Result<()> {
        self.shared.cuda.run(requests, timeout, overlap)
    }

    /// What ended the group's operations on CUDA tensors, if something did: those that were queued before it have no
    /// result.
    ///
    /// # Errors
    /// That, told of `during`.
    pub fn check_device(&self, during: &str) -> Result<()> {
        self.shared.cuda.check(|| during.to_owned())
    }

    /// Runs collectives as one operation (COM-6); returns when this member's part of all is complete.
    ///
    /// # Errors
    /// As [`Communicator::run`]; [`Error::Internal`] for a message between pairs.
    pub fn run_batch(&self, requests: &[Request], timeout: Option<Duration>) -> Result<()> {
        self.shared.run(|| Job::Batch(requests.to_vec(), timeout, None), || self.shared.batch(requests, timeout, None))
    }

    /// As [`Communicator::run_batch`], on this thread, if the group does nothing else now; None, and nothing done, if it does.
    /// `watch` hears of phases.
    pub fn try_run_batch(&self, requests: &[Request], watch: Option<&dyn Watch>) -> Option<Result<()>> {
        let _turn = self.shared.turn_if_idle()?;
        Some(self.shared.attempt(|| self.shared.batch(requests, None, watch)))
    }

    /// As [`Communicator::run_batch`], queued; `done` is called when all are complete, or one failed. On CUDA tensors,
    /// which all of them must be then, as [`Communicator::run_on_device`] does it.
    pub fn submit_batch(self: &Arc<Self>, requests: Vec<Request>, timeout: Option<Duration>, done: Done) {
        match requests.iter().any(cuda::is_on_device) {
            true => self.shared.launch(requests, timeout, done),
            false => self.shared.queue(Job::Batch(requests, timeout, None), done),
        }
    }

    /// As [`Communicator::submit_batch`], of collectives on CPU tensors; `watch` hears of phases.
    pub fn submit_watched(self: &Arc<Self>, requests: Vec<Request>, watch: Arc<dyn Watch>, done: Done) {
        self.shared.queue(Job::Batch(requests, None, Some(watch)), done);
    }

    /// What this group has queued into `stream` so far: its end is told from a thread of the core.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub(crate) fn flying(&self, during: &str, stream: &Stream) -> Result<PendingWork> {
        self.shared.cuda.flying(during, stream)
    }

    /// Makes ready for operations on a CUDA device, which the first one would do: all members call it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without CUDA or NCCL; [`Error::InvalidArgument`] for a device that there is not; what the
    /// wait for the members ends with.
    pub fn connect_device(&self, device: u16) -> Result<()> {
        self.shared.cuda.connect(Context::primary(device)?)
    }

    /// The CUDA device on which the group is connected, if it is; of several `last`, if that is among them. `last` otherwise.
    pub(crate) fn device_in_use(&self, last: Option<u16>) -> Option<u16> {
        let devices = self.shared.cuda.devices();
        let newest = devices.last().copied();
        last.filter(|last| devices.contains(last)).or(newest).or(last)
    }

    /// How many bytes of gradients on devices a reducer had best send at once, if that is measured (`SMD_AUTOTUNE`): when the
    /// group is used on its devices first. If it was not so far and member 0 says that something is measured, all members
    /// connect theirs. The same on all members; collective.
    ///
    /// # Errors
    /// As [`Communicator::connect_device`].
    pub fn measure_bucket_bytes(&self, device: u16) -> Result<Option<usize>> {
        if self.members().size() > 1 && !self.shared.cuda.was_used() {
            let wanted = config::AUTOTUNE.flag()? || config::AUTOTUNE_FILE.text().is_some();
            let mut said = [i64::from(wanted)];
            let data = numbers(&mut said)?;
            self.run(&Request::Broadcast { data, root: 0 })?;
            if said == [1] {
                self.connect_device(device)?;
            }
        }
        Ok(self.shared.cuda.measured_bucket_bytes())
    }

    /// A communicator of NCCL for a group that is made out of this one ([`cuda::Side`]); `None` where there can be none.
    /// Collective.
    ///
    /// # Errors
    /// As [`Communicator::run`].
    pub(crate) fn split_devices(&self, side: Side) -> Result<Option<Parent>> {
        if !self.shared.cuda.was_used() {
            return Ok(None);
        }
        let agree = |number: i64| {
            let mut bounds = [number, -number];
            let data = numbers(&mut bounds)?;
            self.run(&Request::AllReduce { input: data, output: data, op: ReduceOp::Min })?;
            Ok(bounds[0] == -bounds[1] && bounds[0] >= 0)
        };
        match self.shared.cuda.split(side, agree) {
            // A group whose operations have failed is not divided.
            Err(Error::Closed { .. }) => Ok(None),
            outcome => outcome,
        }
    }

    /// What the first operation on CUDA tensors begins with instead of a communicator of its own making.
    pub(crate) fn adopt(&self, split_comm: Parent) {
        self.shared.cuda.adopt(split_comm);
    }

    /// Ends the group's operations on CUDA tensors, because the members' no longer fit together: every later one of this
    /// member fails with `reason`. What the others have under way ends with this member's name about a second later (CUDA-4).
    pub fn end_devices(&self, reason: Error) {
        self.shared.cuda.end(reason);
    }

    /// A barrier that says who does not come, even if members are stuck in another operation: the first member hears
    /// from every other one, and answers. Stands outside the order of operations, as messages do; a group that fails it
    /// stays usable.
    ///
    /// # Errors
    /// On the first member, [`Error::Timeout`] naming the first one that is missing, or `all` of them; on those who came,
    /// [`Error::Timeout`] that sends the reader there. The words are those of torch's `monitored_barrier`.
    pub fn monitored_barrier(&self, timeout: Option<Duration>, all: bool) -> Result<()> {
        self.point_to_point.monitored_barrier(timeout, all)
    }

    /// Memory of `bytes` bytes that every member contributes and, on one host, every member sees. Collective.
    ///
    /// # Errors
    /// As [`Communicator::run`]; [`Error::Io`] or [`Error::Unsupported`] when the system refuses the memory.
    pub fn window(&self, bytes: usize) -> Result<Arc<Window>> {
        let made = Arc::new(OnceLock::new());
        self.shared.run(|| Job::Window(bytes, made.clone()), || self.shared.window(bytes, &made))?;
        made.get().cloned().ok_or_else(|| Error::Internal("a window was made and is not there".into()))
    }

    /// Takes part in the group's next operation by failing it: every other member's next operation ends with
    /// [`Error::PeerFailed`] carrying `message`. The group stays usable. Where memory is shared, `done` is called
    /// without waiting for the others.
    pub fn fail_next(self: &Arc<Self>, message: String, done: Done) {
        self.shared.queue(Job::Fail(message), done);
    }

    /// Ends the worker thread; queued operations fail with [`Error::Closed`], and so does a running one that waits.
    pub fn close(&self, reason: &str) {
        let _ = self.shared.closed.set(reason.to_owned());
        self.point_to_point.wake();
        let deadline = Instant::now() + CLOSE_LIMIT;
        let mut turns = self.shared.turns.lock();
        self.shared.changed.notify_all();
        let me = std::thread::current().id();
        while turns.worker.is_some_and(|worker| worker != me) {
            if self.shared.changed.wait_until(&mut turns, deadline).timed_out() {
                break;
            }
        }
        drop(turns);
        self.point_to_point.wait_ended(deadline);
        self.shared.cuda.close();
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.close("the group was dropped");
    }
}

/// Takes note of a panic in a completion of group `id` (COM-7).
pub(super) fn spoil(spoiled: &OnceLock<Error>, id: u64, panic: &(dyn Any + Send)) {
    let error = match Error::from_panic(panic) {
        Error::Internal(text) => Error::Internal(format!("a completion of group {id} panicked: {text}")),
        other => other,
    };
    tracing::error!("{error}");
    let _ = spoiled.set(error);
}

/// A view of numbers in host memory, for operations that have ended before these are used again.
fn numbers(values: &mut [i64]) -> Result<TensorView> {
    // SAFETY: callers keep the values, untouched, while `Communicator::run`, which blocks, uses the view.
    unsafe { TensorView::new(values.as_mut_ptr().cast(), values.len(), DType::Int64, Device::Cpu, 0) }
}

/// Gives the turn back.
struct Turn<'a>(&'a Shared);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut turns = self.0.turns.lock();
        turns.busy = false;
        if !turns.queue.is_empty() || self.0.closed.get().is_some() {
            self.0.changed.notify_all();
        }
    }
}

impl Shared {
    /// Runs on this thread if nothing is before it, otherwise queues and waits (COM-1, COM-2).
    fn run(self: &Arc<Self>, job: impl FnOnce() -> Job, now: impl FnOnce() -> Result<()>) -> Result<()> {
        if let Some(_turn) = self.turn_if_idle() {
            return self.attempt(now);
        }
        let (sender, receiver) = std::sync::mpsc::channel();
        // The receiver is there: this function waits for it.
        self.queue(job(), Box::new(move |result| drop(sender.send(result))));
        let outcome = receiver.recv();
        outcome.unwrap_or_else(|_| Err(Error::Internal("the group's worker thread ended early".into()))).map(drop)
    }

    fn turn_if_idle(&self) -> Option<Turn<'_>> {
        let mut turns = self.turns.lock();
        if turns.busy || !turns.queue.is_empty() {
            return None;
        }
        turns.busy = true;
        Some(Turn(self))
    }

    fn queue(self: &Arc<Self>, job: Job, done: Done) {
        let mut turns = self.turns.lock();
        let refusal = match self.closed.get() {
            Some(reason) => Some(Error::Closed { reason: reason.clone() }),
            None if turns.worker.is_none() => {
                let shared = self.clone();
                let thread = std::thread::Builder::new().name(format!("smd-group-{}", self.id));
                match thread.spawn(move || shared.work()) {
                    Ok(handle) => {
                        turns.worker = Some(handle.thread().id());
                        None
                    }
                    Err(error) => Some(Error::io("starting the worker thread of a group", error)),
                }
            }
            None => None,
        };
        if let Some(error) = refusal {
            drop(turns);
            return done(Err(error));
        }
        turns.queue.push_back((job, done));
        self.changed.notify_all();
    }

    /// The worker thread.
    fn work(&self) {
        loop {
            let mut turns = self.turns.lock();
            while turns.busy || (turns.queue.is_empty() && self.closed.get().is_none()) {
                self.changed.wait(&mut turns);
            }
            let Some((job, done)) = turns.queue.pop_front() else {
                turns.worker = None;
                self.changed.notify_all();
                return;
            };
            turns.busy = true;
            drop(turns);
            self.execute(&job, done);
        }
    }

    /// Runs a job whose turn it is.
    fn execute(&self, job: &Job, done: Done) {
        let turn = Turn(self);
        let outcome = self.attempt(|| match job {
            Job::Run(request, timeout) if cuda::is_on_device(request) => {
                self.rows_on_device(request, *timeout).map(Some)
            }
            Job::Run(request, timeout) => self.collective(request, *timeout).map(|()| None),
            Job::Batch(requests, timeout, watch) => self.batch(requests, *timeout, watch.as_deref()).map(|()| None),
            Job::Launch(requests, timeout) => self.cuda.launch(requests, *timeout).map(Some),
            Job::Fail(message) => self.fail(message).map(|()| None),
            Job::Window(bytes, made) => self.window(*bytes, made).map(|()| None),
        });
        drop(turn);
        match outcome {
            Ok(None) => self.complete(done, Ok(None)),
            Ok(Some(flying)) => flying.then(done),
            Err(error) => self.complete(done, Err(error)),
        }
    }

    /// Calls a completion (COM-7).
    fn complete(&self, done: Done, result: Result<Option<usize>>) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| done(result))) {
            spoil(&self.spoiled, self.id, &*panic);
        }
    }

    /// What `operation` gives; a panic in it breaks the group (COM-7).
    fn attempt<T>(&self, operation: impl FnOnce() -> Result<T>) -> Result<T> {
        catch_unwind(AssertUnwindSafe(operation)).unwrap_or_else(|panic| {
            let error = Error::from_panic(&*panic);
            let _ = self.broken.set(error.clone());
            Err(error)
        })
    }

    /// Queues operations on CUDA tensors: on this thread, if nothing is before them (COM-1) and no member is waited for.
    fn launch(self: &Arc<Self>, requests: Vec<Request>, timeout: Option<Duration>, done: Done) {
        let ready = self.closed.get().is_none() && self.cuda.has_part(&requests);
        let job = Job::Launch(requests, timeout);
        let mut turns = self.turns.lock();
        if !ready || turns.busy || !turns.queue.is_empty() {
            drop(turns);
            return self.queue(job, done);
        }
        turns.busy = true;
        drop(turns);
        self.execute(&job, done);
    }

    fn collective(&self, request: &Request, timeout: Option<Duration>) -> Result<()> {
        let members = self.transport.members();
        let call = self.check_window(request).and_then(|()| Call::of(request, members.me, members.size()));
        match call {
            Ok(Some(call)) if matches!(call.kind, Kind::AllGatherRows | Kind::AllToAllRows) => {
                self.rows(request, &call, timeout)
            }
            Ok(Some(call)) => self.enter(&call, timeout, |group| algorithms::run(request, &call, group)),
            Ok(None) => Err(Error::Internal("a message between pairs was queued as a collective".into())),
            Err(error) => {
                self.fail(&error.to_string())?;
                Err(error)
            }
        }
    }

    /// ROW-1, ROW-2.
    fn rows(&self, request: &Request, call: &Call, timeout: Option<Duration>) -> Result<()> {
        let mut rows = Vec::new();
        self.enter(call, timeout, |group| {
            rows = algorithms::sizes::tell(call, group)?;
            Ok(())
        })?;
        match rows::settle(request, &rows) {
            Ok(settled) => self.collective(&settled, timeout),
            Err(error) => {
                self.fail(&error.to_string())?;
                Err(error)
            }
        }
    }

    /// The same on CUDA tensors: the numbers are told between the CPUs.
    fn rows_on_device(&self, request: &Request, timeout: Option<Duration>) -> Result<PendingWork> {
        let members = self.transport.members();
        let call = match Call::describe(request, members.me, members.size()) {
            Ok(Some(call)) if matches!(call.kind, Kind::AllGatherRows | Kind::AllToAllRows) => call,
            Ok(_) => return Err(Error::Internal("an operation on CUDA tensors was queued as one on the CPU".into())),
            Err(error) => {
                self.fail(&error.to_string())?;
                return Err(error);
            }
        };
        let mut rows = Vec::new();
        self.enter(&call, timeout, |group| {
            rows = algorithms::sizes::tell(&call, group)?;
            Ok(())
        })?;
        // On devices nobody would hear of a member whose outputs cannot be made (ROW-2).
        match rows::settle(request, &rows) {
            Ok(settled) => {
                self.collective(&Request::Barrier, timeout)?;
                self.cuda.launch(&[settled], timeout)
            }
            Err(error) => {
                self.fail(&error.to_string())?;
                Err(error)
            }
        }
    }

    fn batch(&self, requests: &[Request], timeout: Option<Duration>, watch: Option<&dyn Watch>) -> Result<()> {
        let members = self.transport.members();
        let enter = |phase, places: &Range<usize>| watch.iter().for_each(|watch| watch.enters(phase, places));
        for step in batch::plan(requests, members.me, members.size()) {
            match step {
                Step::One(at) => {
                    let places = at..at + 1;
                    enter(Phase::Run, &places);
                    let outcome = self.collective(&requests[at], timeout);
                    enter(Phase::Over, &places);
                    outcome?;
                }
                Step::Together(places) => {
                    enter(Phase::CopyIn, &places);
                    let together = batch::Together::new(&requests[places.clone()]);
                    enter(Phase::Run, &places);
                    let outcome = self.collective(together.request(), timeout);
                    if outcome.is_ok() {
                        enter(Phase::CopyOut, &places);
                        together.hand_out();
                    }
                    enter(Phase::Over, &places);
                    outcome.map_err(|error| together.explain(error))?;
                }
            }
        }
        Ok(())
    }

    /// A window is memory of one group only.
    fn check_window(&self, request: &Request) -> Result<()> {
        match request {
            Request::AllReduceWindow { window, .. } if window.group() != self.id => Err(Error::InvalidArgument(
                format!("a window of group {} was passed to an operation of group {}", window.group(), self.id),
            )),
            _ => Ok(()),
        }
    }

    fn fail(&self, message: &str) -> Result<()> {
        let call = Call { message: message.to_owned(), ..Call::new(Kind::Poison) };
        self.enter(&call, None, |group| match group.memory {
            Some(memory) => {
                agreement::publish(memory, &call);
                memory.arrive();
                memory.reset_regions();
                self.unsettled.store(true, Ordering::Relaxed);
                Ok(())
            }
            // The verdict is this member's own message.
            None => agreement::agree_without_memory(&call, group).or_else(|error| match error {
                Error::PeerFailed { .. } if group.in_step.get() => Ok(()),
                other => Err(other),
            }),
        })
    }

    fn window(&self, bytes: usize, made: &OnceLock<Arc<Window>>) -> Result<()> {
        let number = self.windows.fetch_add(1, Ordering::Relaxed);
        let call = Call { elems: bytes, window: number, ..Call::new(Kind::Window) };
        self.enter(&call, None, |group| {
            // A barrier that compares the sizes.
            algorithms::run(&Request::Barrier, &call, group)?;
            let window = Window::create(number, bytes, group)?;
            let _ = made.set(Arc::new(window));
            Ok(())
        })
    }

    /// Runs one operation as the group's next.
    fn enter(
        &self,
        call: &Call,
        timeout: Option<Duration>,
        operation: impl FnOnce(&Group<'_>) -> Result<()>,
    ) -> Result<()> {
        let members = self.transport.members();
        if let Some(reason) = self.closed.get() {
            return Err(Error::Closed { reason: reason.clone() });
        }
        match self.broken.get() {
            None => {}
            Some(Error::PeerFailed { rank, how, me, .. }) => {
                return Err(Error::PeerFailed { rank: *rank, how: how.clone(), me: *me, during: call.to_string() });
            }
            Some(error) => {
                return Err(Error::Closed { reason: format!("an earlier operation of the group failed: {error}") });
            }
        }
        if let Some(error) = self.spoiled.get().filter(|_| !matches!(call.kind, Kind::Poison)) {
            self.fail(&error.to_string())?;
            return Err(error.clone());
        }
        let start = Instant::now();
        let during = || call.to_string();
        let wait = Wait {
            during: &during,
            start,
            deadline: start + timeout.unwrap_or(self.timeout),
            monitor: &self.monitor,
            members: self.transport.depends_on().unwrap_or(&members.ranks),
            drain_timeout: self.transport.drain_timeout(),
            closed: &self.closed,
        };
        let group = Group {
            transport: &*self.transport,
            memory: self.transport.shared(),
            hosts: self.transport.hosts(),
            members,
            publisher: &self.publisher,
            wait,
            id: self.id,
            operation: self.operations.fetch_add(1, Ordering::Relaxed),
            in_step: Default::default(),
        };
        let entered = start.saturating_duration_since(self.made).as_nanos() as u64 + 1;
        self.entered.store(entered, Ordering::Relaxed);
        let outcome = match group.memory.filter(|_| self.unsettled.swap(false, Ordering::Relaxed)) {
            Some(memory) => memory.await_all(&wait).and_then(|()| operation(&group)),
            None => operation(&group),
        };
        self.entered.store(0, Ordering::Relaxed);
        if let Err(error) = &outcome
            && !group.in_step.get()
        {
            let _ = self.broken.set(error.clone());
        }
        outcome
    }
}
