//! A process group that can run operations: its members, the transport between them, and the order of operations.
//!
//! - COM-1: operations of one communicator run one at a time, in the order of the [`Communicator::run`] and
//!   [`Communicator::submit`] calls. Point-to-point messages are not in this order.
//! - COM-2: `run` works on the caller's thread if nothing is queued, because a hand-over to another thread costs more
//!   than a small collective.
//! - COM-3: communicators are independent. Each has its own worker thread, started by its first `submit`, so ranks may
//!   interleave two groups differently.
//! - COM-4: an invalid request (a bad argument, or a reduction that its element type lacks) still takes its place in
//!   the order. The member gets its error at once, the others get one as from [`Communicator::fail_next`], and the
//!   group stays usable.
//! - COM-5: after an error in the middle of an operation (a departure, a timeout, an interruption) the members may be
//!   at different places, so every later operation of the group fails, too.
//! - COM-6: a batch takes one place in the order and runs its collectives one after the other, small ones packed
//!   together (see `batch`). The first failure ends it. All members see the failure at the same operation, so they
//!   leave the batch at the same place. A member that cannot take part fails the whole batch with one
//!   [`Communicator::fail_next`].
//! - COM-7: a panic ends no thread of the group. A panic inside an operation breaks the group (COM-5). After a panic in
//!   a completion the members still agree on their place, so the group is *stopped*: every later operation ends at once
//!   on this member with the panic's text, and on the others as after [`Communicator::fail_next`].

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::buffer::{DType, Device, ReduceOp, TensorView};
use crate::collectives::batch::PhaseListener;
use crate::collectives::cuda::{self, Cuda, PendingWork, SplitColor};
use crate::collectives::depth::DepthChooser;
use crate::collectives::paths::PathChooser;
use crate::collectives::point_to_point::PointToPoint;
use crate::collectives::result_stores::ResultStores;
use crate::collectives::scratch::ScratchMemory;
use crate::collectives::stores::StoreChooser;
use crate::collectives::window::Window;
use crate::collectives::{Overlap, Request};
use crate::config;
use crate::device::nccl::Parent;
use crate::device::{Context, Stream};
use crate::error::{Error, Result};
#[cfg(test)]
use crate::transport::shm::SharedMemory;
use crate::transport::{Members, Transport};
use crate::world::{Monitor, Store};

use self::queue::{QueuedOperation, Turns};

mod execution;
mod queue;

/// A completion callback. It is called once, on a thread of the core, with the result. For a receive, the number is
/// the position of the sender in the group.
pub type Done = Box<dyn FnOnce(Result<Option<usize>>) + Send>;

/// How long [`Communicator::close`] waits for its threads. They wake several times in this period, so only a completion
/// that hangs exceeds it.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// A process group over one transport. It orders and runs the group's collectives and messages (COM-1 to COM-7).
pub struct Communicator {
    shared: Arc<GroupState>,
    point_to_point: PointToPoint,
}

/// The state that the worker thread shares with callers.
struct GroupState {
    id: u64,
    transport: Arc<dyn Transport>,
    cuda: Arc<Cuda>,
    monitor: Arc<Monitor>,
    timeout: Duration,
    turns: Mutex<Turns>,
    changed: Condvar,
    closed: Arc<OnceLock<String>>,
    /// The error of a broken group (COM-5).
    broken: OnceLock<Error>,
    /// The error of a stopped group (COM-7).
    panicked: Arc<OnceLock<Error>>,
    /// Whether the last arrival was not waited for (SHM-3).
    unsettled: AtomicBool,
    paths: PathChooser,
    stores: StoreChooser,
    results: ResultStores,
    depths: DepthChooser,
    scratch: ScratchMemory,
    made: Instant,
    /// When the running operation began, in nanoseconds after `made`, plus one; 0 if none runs.
    entered: AtomicU64,
    /// The numbers of operations and windows so far, which are equal on all members.
    operations: AtomicU64,
    windows: AtomicU64,
}

impl Communicator {
    /// Creates a communicator over `transport`, which must have no other user. `id` is equal on all members and unique
    /// in the job.
    pub fn new(id: u64, transport: Arc<dyn Transport>, monitor: Arc<Monitor>, timeout: Duration) -> Arc<Self> {
        Self::with_choosers(id, transport, monitor, timeout, StoreChooser::default(), PathChooser::default())
    }

    /// As [`Communicator::new`], with the given choosers: tests pass one whose stores are slow, or one that fixes the
    /// path.
    pub(crate) fn with_choosers(
        id: u64,
        transport: Arc<dyn Transport>,
        monitor: Arc<Monitor>,
        timeout: Duration,
        stores: StoreChooser,
        paths: PathChooser,
    ) -> Arc<Self> {
        let closed = Arc::new(OnceLock::new());
        let panicked = Arc::new(OnceLock::new());
        let point_to_point =
            PointToPoint::new(id, transport.clone(), monitor.clone(), timeout, closed.clone(), panicked.clone());
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
            panicked,
            unsettled: AtomicBool::new(false),
            paths,
            stores,
            results: ResultStores::default(),
            depths: DepthChooser::default(),
            scratch: ScratchMemory::default(),
            made: Instant::now(),
            entered: AtomicU64::new(0),
            operations: AtomicU64::new(0),
            windows: AtomicU64::new(0),
        });
        Arc::new(Self { shared, point_to_point })
    }

    #[cfg(test)]
    pub(crate) fn shared_memory(&self) -> Option<&SharedMemory> {
        self.shared.transport.shared()
    }

    #[cfg(test)]
    pub(crate) fn stores(&self) -> &StoreChooser {
        &self.shared.stores
    }

    /// Sets the store over which members exchange addresses before their first operation on CUDA tensors.
    pub fn set_store(&self, store: Arc<dyn Store>) {
        self.shared.cuda.set_store(store);
    }

    /// The id of the group, unique in the job; 0 is the world.
    pub fn id(&self) -> u64 {
        self.shared.id
    }

    /// The transport, over which other parts of the core may send messages with tags of their own.
    pub(crate) fn transport(&self) -> &Arc<dyn Transport> {
        &self.shared.transport
    }

    /// How long the current operation on CPU tensors has been running, if there is one.
    pub(crate) fn running_time(&self) -> Option<Duration> {
        let entered = self.shared.entered.load(Ordering::Relaxed).checked_sub(1)?;
        Some(self.shared.made.elapsed().saturating_sub(Duration::from_nanos(entered)))
    }

    /// The members of the group.
    pub fn members(&self) -> &Members {
        self.shared.transport.members()
    }

    /// Runs `request`. On CPU tensors it returns when this member's part is complete. On CUDA tensors it returns when
    /// the operation is queued into the stream that the tensors name ([`super::cuda`]).
    ///
    /// # Errors
    /// [`Error::Mismatch`] (COL-3); [`Error::InvalidArgument`] and [`Error::Unsupported`] (COM-4); [`Error::Closed`]
    /// for a broken group (COM-5); the errors of [`crate::transport::Wait::check`].
    pub fn run(&self, request: &Request) -> Result<()> {
        self.run_within(request, None)
    }

    /// As [`Communicator::run`], with a timeout of its own instead of the group's.
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

    /// Queues `request`. `done` is called when it is complete; for CUDA tensors, when the device has completed it. The
    /// tensors must stay valid until then.
    pub fn submit(self: &Arc<Self>, request: Request, done: Done) {
        self.submit_within(request, None, done);
    }

    /// As [`Communicator::submit`], with a timeout of its own, which starts with the operation.
    pub fn submit_within(self: &Arc<Self>, request: Request, timeout: Option<Duration>, done: Done) {
        match request {
            _ if cuda::is_on_device(&request) => self.shared.launch(vec![request], timeout, done),
            Request::Send { .. } | Request::Recv { .. } => self.point_to_point.submit(request, timeout, done),
            _ => self.shared.queue(QueuedOperation::Run(request, timeout), done),
        }
    }

    /// Queues several requests on CUDA tensors as one operation. They start together, so messages in both directions do
    /// not wait for each other. `overlap` must be equal on all members.
    ///
    /// # Errors
    /// As [`Communicator::run`]; [`Error::InvalidArgument`] for tensors in CPU memory.
    pub fn run_on_device(&self, requests: &[Request], timeout: Option<Duration>, overlap: Overlap) -> Result<()> {
        self.shared.cuda.run(requests, timeout, overlap)
    }

    /// Returns the error that ended the group's operations on CUDA tensors, if there is one. Operations that were
    /// queued before it have no result. `during` describes the caller in the error.
    ///
    /// # Errors
    /// That error.
    pub fn check_device(&self, during: &str) -> Result<()> {
        self.shared.cuda.check(|| during.to_owned())
    }

    /// Runs collectives as one batch (COM-6). Returns when this member's part of all is complete.
    ///
    /// # Errors
    /// As [`Communicator::run`]; [`Error::Internal`] for a point-to-point message.
    pub fn run_batch(&self, requests: &[Request], timeout: Option<Duration>) -> Result<()> {
        self.shared.run(
            || QueuedOperation::Batch(requests.to_vec(), timeout, None),
            || self.shared.batch(requests, timeout, None),
        )
    }

    /// As [`Communicator::run_batch`], on this thread, if the group is idle; otherwise returns none and does nothing.
    /// `watch` is called at each phase.
    pub fn try_run_batch(&self, requests: &[Request], watch: Option<&dyn PhaseListener>) -> Option<Result<()>> {
        let _turn = self.shared.turn_if_idle()?;
        Some(self.shared.attempt(|| self.shared.batch(requests, None, watch)))
    }

    /// As [`Communicator::run_batch`], queued. `done` is called when all are complete, or one has failed. Either all
    /// tensors are on CUDA devices, and the batch runs as [`Communicator::run_on_device`] does, or none are.
    pub fn submit_batch(self: &Arc<Self>, requests: Vec<Request>, timeout: Option<Duration>, done: Done) {
        match requests.iter().any(cuda::is_on_device) {
            true => self.shared.launch(requests, timeout, done),
            false => self.shared.queue(QueuedOperation::Batch(requests, timeout, None), done),
        }
    }

    /// As [`Communicator::submit_batch`], for CPU tensors. `watch` is called at each phase.
    pub fn submit_watched(self: &Arc<Self>, requests: Vec<Request>, watch: Arc<dyn PhaseListener>, done: Done) {
        self.shared.queue(QueuedOperation::Batch(requests, None, Some(watch)), done);
    }

    /// A handle for what this group has queued into `stream` so far; a thread of the core reports its end.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub(crate) fn in_flight(&self, during: &str, stream: &Stream) -> Result<PendingWork> {
        self.shared.cuda.in_flight(during, stream)
    }

    /// Connects the members on a CUDA device. Otherwise their first operation on it does so. All members call it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without CUDA or NCCL; [`Error::InvalidArgument`] for a device that does not exist; the
    /// errors of the wait for the other members.
    pub fn connect_device(&self, device: u16) -> Result<()> {
        self.shared.cuda.connect(Context::primary(device)?)
    }

    /// The CUDA device on which the group is connected: `last` if it is one of several, or if there is none.
    pub(crate) fn device_in_use(&self, last: Option<u16>) -> Option<u16> {
        let devices = self.shared.cuda.devices();
        let newest = devices.last().copied();
        last.filter(|last| devices.contains(last)).or(newest).or(last)
    }

    /// Measures the best bucket size for gradients on devices, in bytes, if that is enabled (`SMD_AUTOTUNE`); none if
    /// not. Measured once, before the first use of the group on its devices; the members are connected first. The
    /// result is equal on all members. Collective.
    ///
    /// # Errors
    /// As [`Communicator::connect_device`].
    pub fn measure_bucket_bytes(&self, device: u16) -> Result<Option<usize>> {
        if self.members().size() > 1 && !self.shared.cuda.was_used() {
            let wanted = config::AUTOTUNE.flag()? || config::AUTOTUNE_FILE.text().is_some();
            let mut is_wanted = [i64::from(wanted)];
            let data = numbers(&mut is_wanted)?;
            self.run(&Request::Broadcast { data, root: 0 })?;
            if is_wanted == [1] {
                self.connect_device(device)?;
            }
        }
        Ok(self.shared.cuda.measured_bucket_bytes())
    }

    /// Splits an NCCL communicator for a new group from this group's ([`cuda::SplitColor`]); none if that is not
    /// possible. Collective.
    ///
    /// # Errors
    /// As [`Communicator::run`].
    pub(crate) fn split_devices(&self, color: SplitColor) -> Result<Option<Parent>> {
        if !self.shared.cuda.was_used() {
            return Ok(None);
        }
        let agree = |number: i64| {
            let mut bounds = [number, -number];
            let data = numbers(&mut bounds)?;
            self.run(&Request::AllReduce { input: data, output: data, op: ReduceOp::Min })?;
            Ok(bounds[0] == -bounds[1] && bounds[0] >= 0)
        };
        match self.shared.cuda.split(color, agree) {
            // The operations of this group have failed, so its NCCL communicator cannot be split.
            Err(Error::Closed { .. }) => Ok(None),
            outcome => outcome,
        }
    }

    /// Sets a split NCCL communicator, which the first operation on CUDA tensors uses instead of creating one.
    pub(crate) fn adopt(&self, split_comm: Parent) {
        self.shared.cuda.adopt(split_comm);
    }

    /// Ends the group's operations on CUDA tensors, because the members' operations do not match any more. Every later
    /// one of this member fails with `reason`. Operations of the other members end about a second later with an error
    /// that names this member (CUDA-4).
    pub fn end_devices(&self, reason: Error) {
        self.shared.cuda.end(reason);
    }

    /// A barrier that names the members that do not come, even if they are stuck in another operation: the first member
    /// gets a message from every other one and answers. It is not ordered with operations. The group stays usable after
    /// a failure.
    ///
    /// # Errors
    /// On the first member, [`Error::Timeout`] naming the first missing member, or all of them with `all`. On the
    /// others, [`Error::Timeout`] that refers to the first member. The texts are those of torch's `monitored_barrier`.
    pub fn monitored_barrier(&self, timeout: Option<Duration>, all: bool) -> Result<()> {
        self.point_to_point.monitored_barrier(timeout, all)
    }

    /// Allocates memory to which every member contributes `bytes` bytes. On one host, every member can access all of
    /// it. Collective.
    ///
    /// # Errors
    /// As [`Communicator::run`]; [`Error::Io`] or [`Error::Unsupported`] if the system refuses the memory.
    pub fn window(&self, bytes: usize) -> Result<Arc<Window>> {
        let made = Arc::new(OnceLock::new());
        self.shared.run(|| QueuedOperation::Window(bytes, made.clone()), || self.shared.window(bytes, &made))?;
        made.get().cloned().ok_or_else(|| Error::Internal("a new window is missing".into()))
    }

    /// Fails the group's next operation instead of taking part in it. The other members' next operation ends with
    /// [`Error::PeerFailed`] carrying `message`, with the cause that [`Communicator::with_cause`] adds. The group stays
    /// usable. With shared memory, `done` is called without waiting for the others.
    pub fn fail_next(self: &Arc<Self>, message: &str, done: Done) {
        self.shared.queue(QueuedOperation::Fail(self.with_cause(message)), done);
    }

    /// See [`Monitor::with_cause`].
    pub fn with_cause(&self, reason: &str) -> String {
        self.shared.monitor.with_cause(reason)
    }

    /// Ends the worker thread. Queued operations fail with [`Error::Closed`], and so does a running one that waits.
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

/// Notes a panic in a completion of group `id` (COM-7).
pub(in crate::collectives) fn note_panic(panicked: &OnceLock<Error>, id: u64, panic: &(dyn Any + Send)) {
    let error = match Error::from_panic(panic) {
        Error::Internal(text) => Error::Internal(format!("a completion of group {id} panicked: {text}")),
        other => other,
    };
    tracing::error!("{error}");
    let _ = panicked.set(error);
}

/// A view of `values`, for operations that end before the caller uses `values` again.
fn numbers(values: &mut [i64]) -> Result<TensorView> {
    // SAFETY: callers keep the values, untouched, while `Communicator::run`, which blocks, uses the view.
    unsafe { TensorView::new(values.as_mut_ptr().cast(), values.len(), DType::Int64, Device::Cpu, 0) }
}
