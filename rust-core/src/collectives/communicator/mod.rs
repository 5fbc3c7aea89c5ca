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
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::buffer::{DType, Device, ReduceOp, TensorView};
use crate::collectives::batch::PhaseListener;
use crate::collectives::cuda::{self, Cuda, PendingWork, Side};
use crate::collectives::point_to_point::PointToPoint;
use crate::collectives::window::Window;
use crate::collectives::{Overlap, Request};
use crate::config;
use crate::device::nccl::Parent;
use crate::device::{Context, Stream};
use crate::error::{Error, Result};
use crate::streaming_copy::Publisher;
use crate::transport::{Members, Transport};
use crate::world::{Monitor, Store};

use self::queue::{QueuedOperation, Turns};

mod execution;
mod queue;

/// Called once, from the worker thread, when an operation has completed or failed; a receive says which member sent.
pub type Done = Box<dyn FnOnce(Result<Option<usize>>) + Send>;

/// How long [`Communicator::close`] waits for its threads: several naps, so only a stuck callback exceeds it.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// A process group over one transport. It orders and runs the group's collectives and messages (COM-1 to COM-7).
pub struct Communicator {
    shared: Arc<GroupState>,
    point_to_point: PointToPoint,
}

/// What the worker thread shares with the callers.
struct GroupState {
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

impl Communicator {
    /// The communicator over `transport`, which nobody else uses; `id` is the same on all members and unique in the
    /// job.
    pub fn new(id: u64, transport: Arc<dyn Transport>, monitor: Arc<Monitor>, timeout: Duration) -> Arc<Self> {
        let closed = Arc::new(OnceLock::new());
        let spoiled = Arc::new(OnceLock::new());
        let point_to_point =
            PointToPoint::new(id, transport.clone(), monitor.clone(), timeout, closed.clone(), spoiled.clone());
        let cuda = Cuda::new(id, transport.members().clone(), monitor.clone(), timeout, closed.clone());
        let shared = Arc::new(GroupState {
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
            _ => self
                .shared
                .run(|| QueuedOperation::Run(request.clone(), timeout), || self.shared.collective(request, timeout)),
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
                self.shared.queue(QueuedOperation::Run(request, timeout), done);
            }
            _ if cuda::is_on_device(&request) => self.shared.launch(vec![request], timeout, done),
            Request::Send { .. } | Request::Recv { .. } => self.point_to_point.submit(request, timeout, done),
            _ => self.shared.queue(QueuedOperation::Run(request, timeout), done),
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
        self.shared.run(
            || QueuedOperation::Batch(requests.to_vec(), timeout, None),
            || self.shared.batch(requests, timeout, None),
        )
    }

    /// As [`Communicator::run_batch`], on this thread, if the group does nothing else now; None, and nothing done, if it does.
    /// `watch` hears of phases.
    pub fn try_run_batch(&self, requests: &[Request], watch: Option<&dyn PhaseListener>) -> Option<Result<()>> {
        let _turn = self.shared.turn_if_idle()?;
        Some(self.shared.attempt(|| self.shared.batch(requests, None, watch)))
    }

    /// As [`Communicator::run_batch`], queued; `done` is called when all are complete, or one failed. On CUDA tensors,
    /// which all of them must be then, as [`Communicator::run_on_device`] does it.
    pub fn submit_batch(self: &Arc<Self>, requests: Vec<Request>, timeout: Option<Duration>, done: Done) {
        match requests.iter().any(cuda::is_on_device) {
            true => self.shared.launch(requests, timeout, done),
            false => self.shared.queue(QueuedOperation::Batch(requests, timeout, None), done),
        }
    }

    /// As [`Communicator::submit_batch`], of collectives on CPU tensors; `watch` hears of phases.
    pub fn submit_watched(self: &Arc<Self>, requests: Vec<Request>, watch: Arc<dyn PhaseListener>, done: Done) {
        self.shared.queue(QueuedOperation::Batch(requests, None, Some(watch)), done);
    }

    /// What this group has queued into `stream` so far: its end is told from a thread of the core.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub(crate) fn in_flight(&self, during: &str, stream: &Stream) -> Result<PendingWork> {
        self.shared.cuda.in_flight(during, stream)
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
        self.shared.run(|| QueuedOperation::Window(bytes, made.clone()), || self.shared.window(bytes, &made))?;
        made.get().cloned().ok_or_else(|| Error::Internal("a window was made and is not there".into()))
    }

    /// Takes part in the group's next operation by failing it: every other member's next operation ends with
    /// [`Error::PeerFailed`] carrying `message`. The group stays usable. Where memory is shared, `done` is called
    /// without waiting for the others.
    pub fn fail_next(self: &Arc<Self>, message: String, done: Done) {
        self.shared.queue(QueuedOperation::Fail(message), done);
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
pub(in crate::collectives) fn spoil(spoiled: &OnceLock<Error>, id: u64, panic: &(dyn Any + Send)) {
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
