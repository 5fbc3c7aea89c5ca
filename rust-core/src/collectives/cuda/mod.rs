//! Operations on CUDA tensors: queued into a stream by the caller's thread, run by NCCL, or, on one host where that is
//! faster, by the core's own kernels ([`p2p`]).
//!
//! - CUDA-1: an operation is queued into the stream that its views name, without waiting for the device. Later work in
//!   that stream sees the result. A caller whose stream must not wait for other members launches the operation in the
//!   group's own stream instead, which first waits for the views' streams. It is notified when the device has finished
//!   ([`completion`]).
//! - CUDA-2: a group creates its device communicator at its first operation on CUDA tensors, which all members call
//!   and which waits for them. Messages to oneself need none. A device communicator has one device per member; another
//!   device needs another one.
//! - CUDA-3: members call the same operations in the same order. Calls are not compared before data moves, because that
//!   would wait for the device. They are compared when an operation is stuck ([`watch`]), or when the core's own
//!   kernels find that they differ.
//! - CUDA-4: a failed communicator (a member died, NCCL reports an error, an operation is stuck) is aborted on every
//!   member, so that no kernel spins forever. Queued operations then have undefined results, and every later call
//!   returns the reason.
//! - CUDA-5: where NCCL runs an operation, the order of summation is its own: the same on all members, and from run to
//!   run on the same machines, but not that of COL-1. Averages multiply by the reciprocal of the number of members
//!   before they add. The core's own kernels keep COL-1.

mod completion;
mod device_communicator;
mod measure;
mod p2p;
mod queue;
mod split;
mod tune;
mod watch;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};

use super::call::{self, Call};
use super::{Overlap, Request};
use crate::buffer::Device;
use crate::config;
use crate::device::nccl::{self, Comm, Parent, UniqueId};
use crate::device::{Context, Event, Priority, Stream, memory};
use crate::error::{Error, Limit, Result};
use crate::metrics;
use crate::transport::{Members, Wait};
use crate::world::{Monitor, Store, host};
pub(crate) use completion::PendingWork;
use device_communicator::DeviceCommunicator;
use p2p::Peers;
pub(crate) use split::SplitColor;

/// Up to this many members, each compares the devices of all others. Above that, NCCL's own check has to do.
const COMPARED: usize = 64;
/// How long to wait for the report of a rank's death after NCCL has lost a connection.
const DEATH_REPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit of the last query of the store after the deadline.
const LAST_QUERY_TIMEOUT: Duration = Duration::from_millis(100);
/// How long a member waits for NCCL's threads to end after an abort.
const ABORT_LIMIT: Duration = Duration::from_secs(5);
/// Polling interval of [`Cuda::close`].
const CLOSE_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// How long [`Cuda::close`] waits for the device.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);
/// How long a member that has finished keeps its memory for the others. After that, the memory is freed when the
/// process ends.
const RETIRE_LIMIT: Duration = Duration::from_secs(60);

/// The CUDA part of one group.
pub(super) struct Cuda {
    id: u64,
    members: Members,
    monitor: Arc<Monitor>,
    timeout: Duration,
    closed: Arc<OnceLock<String>>,
    store: OnceLock<Arc<dyn Store>>,
    device_comms: RwLock<Vec<Arc<DeviceCommunicator>>>,
    /// Communicators whose operations [`Cuda::close`] waits for. Calls no longer use them, but the watch checks them.
    closing: RwLock<Vec<Arc<DeviceCommunicator>>>,
    /// Held while a communicator is created.
    making: Mutex<()>,
    /// Number of communicators created so far; the same on all members.
    made: AtomicU64,
    /// The communicator for the first device, split from another group's, if there is one (SPL-3).
    split_comm: Mutex<Option<Parent>>,
    /// Why the group has failed (CUDA-4).
    failed: OnceLock<Error>,
    /// The measured bucket size for reducers.
    bucket_bytes: OnceLock<usize>,
}

impl Cuda {
    pub(super) fn new(
        id: u64,
        members: Members,
        monitor: Arc<Monitor>,
        timeout: Duration,
        closed: Arc<OnceLock<String>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            id,
            members,
            monitor,
            timeout,
            closed,
            store: OnceLock::new(),
            device_comms: RwLock::default(),
            closing: RwLock::default(),
            making: Mutex::default(),
            made: AtomicU64::new(0),
            split_comm: Mutex::default(),
            failed: OnceLock::new(),
            bucket_bytes: OnceLock::new(),
        })
    }

    /// Sets the store through which the members connect. Called before the first operation.
    pub(super) fn set_store(&self, store: Arc<dyn Store>) {
        let _ = self.store.set(store);
    }

    /// Queues `requests` into the stream of their views, several as one NCCL group (CUDA-1).
    pub(super) fn run(
        self: &Arc<Self>,
        requests: &[Request],
        timeout: Option<Duration>,
        overlap: Overlap,
    ) -> Result<()> {
        let Some((first, stream)) = self.accept_all(requests)? else { return Ok(()) };
        if let Some(copies) = queue::to_oneself(requests, self.members.me)? {
            // SAFETY: the requests' promise for their views, all of which are on this device.
            return copies.iter().try_for_each(|(from, to)| unsafe {
                memory::copy(to.ptr() as u64, from.ptr() as u64, from.bytes(), &stream)
            });
        }
        let (context, device) = (stream.context(), stream.context().device());
        let capturing = stream.is_capturing()?;
        let device_comm = match self.device_comm(context) {
            Some(device_comm) => device_comm,
            None if capturing => {
                return Err(Error::Unsupported(format!(
                    "{}: the first operation of a group on `cuda:{device}` cannot be captured in a CUDA graph: run the \
                     step once before",
                    self.describe(first)
                )));
            }
            None => self.create_device_comm(context, &|| self.describe(first))?,
        };
        let timeout = timeout.unwrap_or(self.timeout);
        device_comm
            .queue(requests, &stream, overlap, capturing, timeout, self)
            .map_err(|error| self.explain(error, &|| self.describe(first)))
    }

    /// Creates the communicator on the device of `context` before the first operation, which would otherwise create it
    /// (CUDA-2).
    pub(super) fn connect(self: &Arc<Self>, context: &'static Context) -> Result<()> {
        let during = || format!("connecting `cuda:{}`", context.device());
        self.check(during)?;
        if self.device_comm(context).is_none() {
            self.create_device_comm(context, &during)?;
        }
        Ok(())
    }

    /// Whether the members have begun to create a communicator. All members get the same answer at the same point of
    /// their programs.
    pub(super) fn was_used(&self) -> bool {
        self.made.load(Ordering::Relaxed) > 0
    }

    /// Like [`Cuda::run`], but in the group's own stream, after the work that the views' streams hold now.
    pub(super) fn launch(self: &Arc<Self>, requests: &[Request], timeout: Option<Duration>) -> Result<PendingWork> {
        let Some((first, stream)) = self.accept_all(requests)? else {
            return Err(Error::Internal("a batch for a device has no operations".into()));
        };
        let context = stream.context();
        let device_comm = match self.device_comm(context) {
            Some(device_comm) => device_comm,
            None => self.create_device_comm(context, &|| self.describe(first))?,
        };
        let own = match device_comm.stream.get() {
            Some(own) => own,
            None => {
                let made = Stream::new(context, Priority::High)?;
                device_comm.stream.get_or_init(|| made)
            }
        };
        // Collectives by name may come from several streams of the script. Each event is destroyed at once; the group's
        // stream still waits for it.
        for raw in streams(requests, context.device()) {
            // SAFETY: the views' promise covers their stream.
            let stream = unsafe { Stream::borrowed(context, raw) };
            let ready = Event::new(context)?;
            ready.record(&stream)?;
            own.wait(&ready)?;
        }
        let moved: Vec<Request> = requests.iter().map(|request| call::on_stream(request, own.raw())).collect();
        let timeout = timeout.unwrap_or(self.timeout);
        let in_flight = PendingWork::prepare(self, self.describe(first), context)?;
        let queued = device_comm.queue(&moved, own, Overlap::Unknown, false, timeout, self);
        let queued = queued.map_err(|error| self.explain(error, &|| self.describe(first)));
        in_flight.mark(queued, own)
    }

    /// The work that the group has queued into `stream` so far.
    pub(super) fn in_flight(self: &Arc<Self>, during: &str, stream: &Stream) -> Result<PendingWork> {
        PendingWork::prepare(self, during.to_owned(), stream.context())?.mark(Ok(()), stream)
    }

    /// The devices on which this member has communicators, the newest last.
    pub(super) fn devices(&self) -> Vec<u16> {
        self.device_comms.read().iter().map(|device_comm| device_comm.comm.context().device()).collect()
    }

    /// Whether an operation on the device of `requests` can be queued without waiting for other members.
    pub(super) fn has_device_comm(&self, requests: &[Request]) -> bool {
        let device = place(requests).map(|(device, _)| device);
        device.is_ok_and(|device| {
            self.device_comms.read().iter().any(|device_comm| device_comm.comm.context().device() == device)
        })
    }

    /// Checks all of `requests`; returns the first one and the stream of the views.
    fn accept_all<'a>(&self, requests: &'a [Request]) -> Result<Option<(&'a Request, Stream)>> {
        let Some(first) = requests.first() else { return Ok(None) };
        self.check(|| self.describe(first))?;
        for request in requests {
            self.accept(request)?;
        }
        for request in requests {
            match request {
                Request::Send { data, .. } => metrics::note_message(true, data.bytes()),
                Request::Recv { data, .. } => metrics::note_message(false, data.bytes()),
                _ => Call::describe(request, self.members.me, self.members.size())?.iter().for_each(metrics::note_call),
            }
        }
        let (device, stream) = place(requests)?;
        let context = Context::primary(device)?;
        // SAFETY: the views' promise covers their stream.
        Ok(Some((first, unsafe { Stream::borrowed(context, stream) })))
    }

    /// Fails if the group has failed or members have departed.
    ///
    /// # Errors
    /// The first failure, reported for the operation `during`.
    pub(super) fn check(&self, during: impl Fn() -> String) -> Result<()> {
        if let Some(reason) = self.closed.get() {
            return Err(Error::Closed { reason: reason.clone() });
        }
        match self.failed.get() {
            None => Ok(()),
            Some(Error::PeerFailed { rank, how, me, .. }) => {
                Err(Error::PeerFailed { rank: *rank, how: how.clone(), me: *me, during: during() })
            }
            Some(error) => Err(error.clone()),
        }
    }

    /// The measured bucket size for reducers.
    pub(super) fn measured_bucket_bytes(&self) -> Option<usize> {
        self.bucket_bytes.get().copied()
    }

    /// Ends the group for a reason that only this member knows (CUDA-4). The others' operations end when they read its
    /// note in the store.
    pub(super) fn end(self: &Arc<Self>, reason: Error) {
        if self.failed.get().is_none() {
            watch::report_ended(self, &reason);
        }
        watch::fail(self, reason);
    }

    /// All communicators that the watch checks.
    fn all_device_comms(&self) -> Vec<Arc<DeviceCommunicator>> {
        let device_comms = self.device_comms.read();
        device_comms.iter().chain(self.closing.read().iter()).cloned().collect()
    }

    /// Closes the communicators: queued operations complete first if the other members still take part in them. The
    /// watch aborts the others. Waits up to [`CLOSE_LIMIT`].
    pub(super) fn close(self: &Arc<Self>) {
        let device_comms = {
            let mut device_comms = self.device_comms.write();
            let mut closing = self.closing.write();
            closing.extend(device_comms.iter().cloned());
            std::mem::take(&mut *device_comms)
        };
        let split_comm = self.split_comm.lock().take();
        if (device_comms.is_empty() && split_comm.is_none()) || self.failed.get().is_some() {
            return;
        }
        let (ended, end) = mpsc::channel::<()>();
        let own = self.clone();
        let work = move || {
            let start = Instant::now();
            for device_comm in &device_comms {
                while own.failed.get().is_none() && !device_comm.completed() {
                    std::thread::sleep(CLOSE_POLL_INTERVAL);
                }
                own.close_comm(device_comm);
            }
            own.closing.write().clear();
            drop(ended);
            tracing::debug!(after = ?start.elapsed(), "group {} has closed its communicators", own.id);
            // The caller does not wait for the rest. The end of the process waits for a call that has begun (DEV-5), and
            // then the system frees everything.
            device_comms.iter().for_each(|device_comm| own.retire(device_comm));
            own.forget_keys();
            device_comms.iter().for_each(|device_comm| device_comm.comm.free_others());
            // Other members may have used theirs.
            split_comm.iter().for_each(Parent::abort);
            tracing::debug!(after = ?start.elapsed(), "group {} has freed its communicators", own.id);
        };
        if std::thread::Builder::new().name("smd-cuda-close".into()).spawn(work).is_ok() {
            // Returns when the thread has dropped `ended`.
            let _ = end.recv_timeout(CLOSE_LIMIT);
        }
    }

    /// Destroys a communicator without operations in flight, or of a failed group.
    fn close_comm(&self, device_comm: &DeviceCommunicator) {
        let during = || format!("closing group {} on CUDA devices", self.id);
        let start = Instant::now();
        // This differs from the check of `wait`, because the group is closed already.
        let check = || match (self.failed.get(), watch::departed(self)) {
            (Some(error), _) => Err(error.clone()),
            (None, Some(error)) => Err(error),
            (None, None) if start.elapsed() >= self.timeout => {
                let (waited, missing) = (start.elapsed(), self.others());
                Err(Error::Timeout { during: during(), waited, missing, limit: Limit::Collective })
            }
            (None, None) => Ok(()),
        };
        if let Err(error) = check().and_then(|()| device_comm.comm.close(check)) {
            tracing::debug!("a communicator of group {} was aborted: {error}", self.id);
            device_comm.abort();
        }
    }

    fn device_comm(&self, context: &'static Context) -> Option<Arc<DeviceCommunicator>> {
        self.device_comms
            .read()
            .iter()
            .find(|device_comm| device_comm.comm.context().device() == context.device())
            .cloned()
    }

    fn create_device_comm(
        self: &Arc<Self>,
        context: &'static Context,
        first: &dyn Fn() -> String,
    ) -> Result<Arc<DeviceCommunicator>> {
        let _making = self.making.lock();
        if let Some(device_comm) = self.device_comm(context) {
            return Ok(device_comm);
        }
        // If the group has just failed, no member creates a communicator (CUDA-4).
        self.check(first)?;
        let during = || format!("{} (the first one of group {} on CUDA tensors)", first(), self.id);
        let start = Instant::now();
        let wait = self.wait(&during, start);
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        let split_comm = self.split_comm.lock().take();
        let fits = split_comm.as_ref().is_some_and(|split_comm| split_comm.context().device() == context.device());
        let id = self.exchange_id(number, context, fits, &wait);
        let (me, size) = (self.members.me, self.members.size());
        let parent = match (id, split_comm) {
            (Ok(None), Some(split_comm)) => Ok(split_comm),
            (id, split_comm) => {
                split_comm.iter().for_each(Parent::abort);
                let lost =
                    || Error::Internal("members agreed to split a communicator that this member does not have".into());
                Parent::init(context, id?.ok_or_else(lost)?, me, size)
            }
        };
        let comm = parent.and_then(|parent| self.join(parent, &wait, first));
        let comm = comm.map_err(|error| self.explain(error, first))?;
        tracing::debug!(
            "group {} has a communicator on `cuda:{}` after {:.1?}",
            self.id,
            context.device(),
            start.elapsed()
        );
        let peers = match self.create_peers(number, &comm, &wait) {
            Ok(peers) => peers,
            Err(error) => {
                discard(move || comm.abort());
                return Err(error);
            }
        };
        let device_comm = Arc::new(DeviceCommunicator::new(number, comm, peers));
        self.device_comms.write().push(device_comm.clone());
        watch::add(self)?;
        Ok(device_comm)
    }

    /// Creates the peers' memory of communicator `number`, and tunes its kernels.
    fn create_peers(&self, number: u64, comm: &Comm, wait: &Wait<'_>) -> Result<Option<Peers>> {
        let (context, me, size) = (comm.context(), self.members.me, self.members.size());
        let store = GroupStore { owner: self, number, wait };
        let peers = Peers::join(context, me, size, config::P2P_MAX_BYTES.most_bytes()?, &store)?;
        let choice = tune::agree(me, size, &context.properties().name, &store, |calls| {
            measure::measure(calls, (me, size), comm, peers.as_ref(), wait, &|| self.others())
        })?;
        if let (Some(peers), Some(tuning)) = (&peers, choice.and_then(|choice| choice.peers)) {
            peers.set_tuning(tuning);
        }
        if let Some(choice) = choice {
            let _ = self.bucket_bytes.set(choice.bucket_bytes);
        }
        Ok(peers)
    }

    fn wait<'a>(&'a self, during: &'a dyn Fn() -> String, start: Instant) -> Wait<'a> {
        Wait {
            during,
            start,
            deadline: start + self.timeout,
            monitor: &self.monitor,
            members: &self.members.ranks,
            drain_timeout: Duration::ZERO,
            closed: &self.closed,
        }
    }

    /// Returns the communicator once all members have joined `parent`. After the deadline, NCCL's waiting threads are
    /// ended.
    fn join(&self, parent: Parent, wait: &Wait<'_>, during: &dyn Fn() -> String) -> Result<Comm> {
        let check = || {
            // A member may have noted in the store that it cannot join.
            self.check(during)?;
            wait.check(|| self.others())
        };
        let opened = match parent.settle("joining a group", check) {
            Ok(()) => Comm::open(parent, self.members.me, check),
            Err(error) => Err((vec![parent], error)),
        };
        opened.map_err(|(left, error)| {
            discard(move || left.iter().for_each(Parent::abort));
            error
        })
    }

    /// Exchanges the unique id of communicator `number` after comparing the members' devices. Returns `None` if all
    /// members can split an existing communicator.
    fn exchange_id(
        &self,
        number: u64,
        context: &'static Context,
        split_comm: bool,
        wait: &Wait<'_>,
    ) -> Result<Option<UniqueId>> {
        let (ranks, me) = (&self.members.ranks, self.members.me);
        let key = |what: &str, rank: usize| self.key(number, what, rank);
        let give_id = || self.store()?.set(&key("id", 0), UniqueId::new()?.bytes());
        if me == 0 && !split_comm {
            give_id()?;
        }
        let own = (nccl::host_id().unwrap_or_else(host::identity), context.properties().uuid);
        // In larger groups no member reads the devices of all others, so a member without the communicator to split
        // would not be noticed.
        let mut all_have_split_comms = split_comm && ranks.len() <= COMPARED;
        let text = postcard::to_stdvec(&(&own, split_comm))
            .map_err(|error| Error::Internal(format!("a device cannot be serialized: {error}")))?;
        self.store()?.set(&key("device", me), &text)?;
        if ranks.len() <= COMPARED {
            for other in (0..ranks.len()).filter(|other| *other != me) {
                let text = self.read(&key("device", other), ranks[other], wait)?;
                let (theirs, split_comm) = postcard::from_bytes::<((String, [u8; 16]), bool)>(&text)
                    .map_err(|error| Error::Internal(format!("a member's device cannot be read: {error}")))?;
                all_have_split_comms &= split_comm;
                if theirs == own {
                    return Err(Error::InvalidArgument(format!(
                        "ranks {} and {} use the same device (`cuda:{}` of rank {}): give every rank its own, with \
                         `torch.cuda.set_device(local_rank)`, `tf.config.set_visible_devices(gpus[local_rank], \"GPU\")` \
                         or CUDA_VISIBLE_DEVICES; to share one, give every rank its own NCCL_HOSTID",
                        ranks[me.min(other)],
                        ranks[me.max(other)],
                        context.device(),
                        ranks[me]
                    )));
                }
            }
        }
        if all_have_split_comms {
            return Ok(None);
        }
        if me == 0 && split_comm {
            give_id()?;
        }
        UniqueId::from_bytes(&self.read(&key("id", 0), ranks[0], wait)?).map(Some)
    }

    /// Frees the memory that the members share, once none of them has operations in flight.
    fn retire(&self, device_comm: &DeviceCommunicator) {
        let Some(peers) = &device_comm.peers else { return };
        let (ranks, me) = (&self.members.ranks, self.members.me);
        let read = |store: &Arc<dyn Store>, at: usize| {
            store.get(&self.key(device_comm.number, "retired", at), &[ranks[at]], RETIRE_LIMIT).is_ok()
        };
        if let Ok(store) = self.store()
            && store.set(&self.key(device_comm.number, "retired", me), &[]).is_ok()
            && (0..ranks.len()).all(|at| read(store, at))
        {
            peers.set_unused();
        }
    }

    /// Removes this group's keys from the store once all members have finished reading them.
    fn forget_keys(&self) {
        // A store that cannot be reached is freed with its session.
        if let Ok(store) = self.store() {
            let _ = store.release(&format!("cuda/{:x}/", self.id), self.members.size());
        }
    }

    /// The key under which member `at` publishes `what`.
    fn key(&self, number: u64, what: &str, at: usize) -> String {
        format!("cuda/{:x}/{number}/{what}/{at}", self.id)
    }

    fn store(&self) -> Result<&Arc<dyn Store>> {
        self.store
            .get()
            .ok_or_else(|| Error::Internal(format!("group {} has no store to exchange NCCL's unique id", self.id)))
    }

    /// Reads the value that `rank` writes to `key`.
    fn read(&self, key: &str, rank: usize, wait: &Wait<'_>) -> Result<Vec<u8>> {
        // Values that are present count even after the deadline: this member itself may have caused the delay.
        let remaining = wait.deadline.saturating_duration_since(Instant::now()).max(LAST_QUERY_TIMEOUT);
        self.store()?.get(key, &[rank], remaining).map_err(|error| match error {
            Error::Timeout { missing, limit, .. } => {
                Error::Timeout { during: (wait.during)(), waited: wait.start.elapsed(), missing, limit }
            }
            Error::PeerFailed { rank, how, me, .. } => Error::PeerFailed { rank, how, me, during: (wait.during)() },
            other => other,
        })
    }

    fn others(&self) -> Vec<usize> {
        let Members { ranks, me } = &self.members;
        ranks.iter().enumerate().filter(|(at, _)| at != me).map(|(_, rank)| *rank).collect()
    }

    /// An error of NCCL or CUDA may be the first sign of a member's death, which the rendezvous reports shortly after.
    /// Prefers that report.
    fn explain(&self, error: Error, during: &dyn Fn() -> String) -> Error {
        let Error::Device { .. } = error else { return error };
        let deadline = Instant::now() + DEATH_REPORT_TIMEOUT;
        loop {
            let seen = self.monitor.generation();
            if let Some(error) = watch::departed(self) {
                let Error::PeerFailed { rank, how, me, .. } = error else { return error };
                return Error::PeerFailed { rank, how, me, during: during() };
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return error;
            }
            self.monitor.wait_change(seen, remaining);
        }
    }

    /// Describes the operation, for messages.
    fn describe(&self, request: &Request) -> String {
        match Call::describe(request, self.members.me, self.members.size()) {
            Ok(Some(call)) => call.to_string(),
            Ok(None) => super::point_to_point::describe(request),
            Err(_) => "an operation with arguments that do not fit".to_owned(),
        }
    }

    /// Checks that this member may call `request`.
    fn accept(&self, request: &Request) -> Result<()> {
        let (me, size) = (self.members.me, self.members.size());
        match request {
            Request::Send { to: peer, .. } | Request::Recv { from: Some(peer), .. } if *peer >= size => {
                Err(Error::InvalidArgument(format!(
                    "{}: there is no such rank in a group of {size}",
                    self.describe(request)
                )))
            }
            Request::Recv { from: None, .. } => Err(Error::Unsupported(
                "recv from any rank: NCCL does not support it for CUDA tensors: pass the source rank".into(),
            )),
            Request::AllReduceWindow { .. } => {
                Err(Error::Internal("a window of host memory was passed to an operation on CUDA tensors".into()))
            }
            Request::Send { .. } | Request::Recv { .. } => Ok(()),
            _ => Call::describe(request, me, size).map(drop),
        }
    }
}

/// Runs `abort`, which ends a communicator that belongs to no group, in a thread of its own: this member has waited to
/// its limit already.
fn discard(abort: impl FnOnce() + Send + 'static) {
    let (ended, end) = mpsc::channel::<()>();
    let work = move || {
        abort();
        drop(ended);
    };
    match std::thread::Builder::new().name("smd-cuda-abort".into()).spawn(work) {
        Err(error) => {
            tracing::error!("an NCCL communicator cannot be aborted, because no thread can be started: {error}")
        }
        Ok(_) if end.recv_timeout(ABORT_LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) => {
            tracing::warn!(
                "NCCL has not aborted a communicator within {ABORT_LIMIT:?}; the abort continues in the background"
            );
        }
        Ok(_) => {}
    }
}

/// The store, as seen by the members that create a communicator.
struct GroupStore<'a> {
    owner: &'a Cuda,
    number: u64,
    wait: &'a Wait<'a>,
}

impl p2p::MemberStore for GroupStore<'_> {
    fn write(&self, what: &str, value: &[u8]) -> Result<()> {
        self.owner.store()?.set(&self.owner.key(self.number, what, self.owner.members.me), value)
    }

    fn read(&self, what: &str, member: usize) -> Result<Vec<u8>> {
        self.owner.read(&self.owner.key(self.number, what, member), self.owner.members.ranks[member], self.wait)
    }
}

/// Returns the streams of all views on `device`, each once. Views without elements may name another device.
fn streams(requests: &[Request], device: u16) -> Vec<usize> {
    let mut found = Vec::new();
    for view in requests.iter().flat_map(call::views).filter(|view| view.device() == Device::Cuda(device)) {
        if !found.contains(&view.stream()) {
            found.push(view.stream());
        }
    }
    found
}

/// Returns the device, which all views share, and the stream of the first view.
fn place(requests: &[Request]) -> Result<(u16, usize)> {
    let mut place = None;
    for view in requests.iter().flat_map(call::views).filter(|view| view.elems() > 0) {
        let Device::Cuda(index) = view.device() else {
            return Err(Error::InvalidArgument("tensors on the CPU and on a CUDA device are mixed".into()));
        };
        match place {
            None => place = Some((index, view.stream())),
            Some((other, _)) if other != index => {
                return Err(Error::InvalidArgument(format!("tensors on `cuda:{other}` and `cuda:{index}` are mixed")));
            }
            Some(_) => {}
        }
    }
    // Views without elements may name a device as well.
    let empty = || {
        requests.iter().flat_map(call::views).find_map(|view| match view.device() {
            Device::Cuda(index) => Some((index, view.stream())),
            Device::Cpu => None,
        })
    };
    place
        .or_else(empty)
        .ok_or_else(|| Error::Internal("an operation without CUDA tensors was queued on a device".into()))
}

/// Whether `request` is about CUDA tensors. The first view decides; all must agree.
pub(super) fn is_on_device(request: &Request) -> bool {
    let view = match request {
        Request::AllReduce { input, .. }
        | Request::Adasum { input, .. }
        | Request::Reduce { input, .. }
        | Request::AllGather { input, .. }
        | Request::Gather { input, .. } => Some(input),
        Request::Broadcast { data, .. } | Request::Send { data, .. } | Request::Recv { data, .. } => Some(data),
        Request::Scatter { output, .. } | Request::ReduceScatter { output, .. } => Some(output),
        Request::AllToAll { outputs, .. } => outputs.first(),
        Request::AllGatherRows { input, .. } => Some(input),
        Request::AllToAllRows { inputs, .. } => inputs.first(),
        Request::AllReduceWindow { .. } | Request::Barrier => None,
    };
    view.is_some_and(|view| view.device() != Device::Cpu)
}

fn is_message(request: &Request) -> bool {
    matches!(request, Request::Send { .. } | Request::Recv { .. })
}

#[cfg(test)]
mod tests;
