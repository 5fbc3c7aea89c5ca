//! Makes all MPI calls, under one lock: on the thread `smd-mpi`, or on a caller that sends or waits for frames.
//!
//! ```text
//!   port --send--> outbox --> send slots --> MPI --> receive slots --take--> port
//!   (any thread)   (lock)    (the thread that holds the service's lock)
//! ```
//!
//! MPI cannot wake a sleeping thread, so the thread polls: continuously while frames move, often while a caller sleeps
//! until frames arrive ([`Carrier::await_thread`]), and rarely otherwise. While callers poll ([`Carrier::receive`]), it
//! leaves MPI to them (CAL-1).

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::message_length::{self, MessageOptions};
use super::outbox::{Outbox, QueuedMessage};
use super::service::{MpiService, Served};
use crate::error::{Error, Limit, Result};
use crate::transport::callers::{ReceivingCallers, TICK};
use crate::transport::ports::{Carrier, FRAME_BYTES, PREFIX_BYTES, Pool, PortKey, Ports, departed};
use crate::transport::zero_copy::{HARDWARE_TIME, ZeroCopyTransfer};
use crate::transport::{Backoff, POLL_INTERVAL};
use crate::world::Monitor;

/// Largest number of frames for one process that are queued or in flight; the mailbox waits with further ones.
const FRAMES_PER_PEER: usize = 8;
/// Polling intervals while a caller sleeps until frames arrive or messages are being sent, and otherwise.
const SHORT_PAUSE: Duration = Duration::from_micros(30);
const LONG_PAUSE: Duration = Duration::from_millis(1);

/// How long a cancellation waits for a call of MPI to end before it gives up.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// How long to wait after a failure of MPI for the report of a death that explains it.
const DEATH_REPORT_TIMEOUT: Duration = Duration::from_secs(2);

/// The interface to MPI: messages between processes.
pub(crate) trait Wire: Send {
    /// Initialises MPI unless the script has; waits for all processes of the job. Returns whether any thread may call
    /// MPI.
    fn init(&mut self) -> Result<bool, Failure>;
    /// Initialises MPI and joins the job; waits for all of its processes.
    fn start(&mut self, num_slots: usize) -> Result<MpiWorld, Failure>;
    /// Starts a send in a free slot.
    ///
    /// # Safety
    /// The memory stays valid and unchanged until `poll` reports the slot as complete.
    unsafe fn send(&mut self, slot: usize, data: &[u8], to: usize, tag: MessageTag) -> Result<(), Failure>;
    /// Starts a receive in a free slot, from any process if there is no `from`.
    ///
    /// # Safety
    /// No other code accesses the memory until `poll` reports the slot as complete.
    unsafe fn recv(
        &mut self,
        slot: usize,
        data: &mut [u8],
        from: Option<usize>,
        tag: MessageTag,
    ) -> Result<(), Failure>;
    /// Adds completed slots to the list; does not wait.
    fn poll(&mut self, done: &mut Vec<Completed>) -> Result<(), Failure>;
    /// Finalises MPI; waits for all processes of the job.
    fn finish(&mut self) -> Result<(), Failure>;
}

/// What a message is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MessageTag {
    Frames,
    /// To measure the network ([`message_length`]).
    Measurement,
    /// The transfer of a message whose receiver chose this key, from 1 to [`NUM_KEYS`](super::outbox).
    Transfer(u16),
}

impl MessageTag {
    /// The tag in MPI.
    pub(crate) fn value(self) -> i32 {
        match self {
            Self::Frames => 0,
            Self::Measurement => 1,
            Self::Transfer(key) => 1 + i32::from(key),
        }
    }
}

/// Properties of the job in MPI.
#[derive(Clone, Debug)]
pub(crate) struct MpiWorld {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// Whether any thread may call MPI (`MPI_THREAD_MULTIPLE`).
    pub(crate) any_thread: bool,
    pub(crate) library: String,
}

/// A completed slot; for a receive, with the sender and the length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completed {
    pub(crate) slot: usize,
    pub(crate) source: usize,
    pub(crate) bytes: usize,
}

/// MPI's text of an error.
#[derive(Clone, Debug)]
pub(crate) struct Failure(pub(crate) String);

pub(super) struct EngineState {
    pub(super) outbox: Mutex<Outbox>,
    pub(super) ports: Ports,
    pub(super) send_buffers: Pool,
    /// How this process sends.
    pub(super) options: Mutex<MessageOptions>,
    /// None before MPI has started and after it has ended.
    service: Mutex<Option<MpiService>>,
    callers: Mutex<ReceivingCallers>,
    /// How often callers have looked for frames.
    looks: AtomicU64,
    /// Wakes the thread.
    outbox_changed: Condvar,
    /// The result of the start.
    world: OnceLock<Result<MpiWorld, Failure>>,
    /// The process with which to measure messages, if any; set when frames may be moved.
    partner: OnceLock<Option<usize>>,
    /// The fastest way to send; none if this process does not measure it.
    measured: OnceLock<Option<MessageOptions>>,
    /// Whether the wait for the measurement has ended with an error.
    gave_up: AtomicBool,
    /// Why MPI is not called any more, and the service with the memory that MPI may still access.
    failed: OnceLock<Failure>,
    abandoned: Mutex<Option<MpiService>>,
    given_up_at: OnceLock<Instant>,
    /// Set when the thread has ended.
    ended: OnceLock<()>,
    changed: Condvar,
    change: Mutex<()>,
}

impl Drop for EngineState {
    fn drop(&mut self) {
        // The thread has panicked: MPI may still access the memory.
        std::mem::forget((self.service.get_mut().take(), self.abandoned.get_mut().take()));
    }
}

/// Sends and receives the frames of this process by MPI.
pub(crate) struct Engine {
    shared: Arc<EngineState>,
}

impl Engine {
    /// Starts the thread, which initialises MPI; [`Engine::world`] returns the result. Frames move after
    /// [`Engine::measure`].
    pub(crate) fn start(wire: Box<dyn Wire>) -> Result<Arc<Self>> {
        let shared = Arc::new(EngineState {
            outbox: Mutex::default(),
            ports: Ports::new(FRAME_BYTES),
            send_buffers: Pool::new(0),
            options: Mutex::default(),
            service: Mutex::new(None),
            callers: Mutex::default(),
            looks: AtomicU64::new(0),
            outbox_changed: Condvar::new(),
            world: OnceLock::new(),
            partner: OnceLock::new(),
            measured: OnceLock::new(),
            gave_up: AtomicBool::new(false),
            failed: OnceLock::new(),
            abandoned: Mutex::new(None),
            given_up_at: OnceLock::new(),
            ended: OnceLock::new(),
            changed: Condvar::new(),
            change: Mutex::default(),
        });
        let thread = std::thread::Builder::new().name("smd-mpi".into());
        let own = shared.clone();
        let work = move || own.ports.serve("smd-mpi", || own.work(wire));
        thread.spawn(work).map_err(|error| Error::io("starting a thread for MPI", error))?;
        Ok(Arc::new(Self { shared }))
    }

    /// Properties of the job of `size` processes in MPI, once all have initialised it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with MPI's text; the errors of a wait for all ranks.
    pub(crate) fn world(&self, size: usize, monitor: &Monitor, deadline: Instant) -> Result<MpiWorld> {
        let others: Vec<usize> = (0..size).filter(|rank| *rank != monitor.me()).collect();
        let outcome = self.wait_for("starting MPI", &others, monitor, deadline, || self.shared.world.get().cloned())?;
        outcome.map_err(|Failure(text)| Error::Unsupported(format!("MPI did not start: {text}")))
    }

    /// Measures the fastest messages between this process and `partner`, which calls this function, too; nothing
    /// without one. From now on, frames may be moved. Only the first call measures; later ones return its result.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with MPI's text; the errors of a wait for the partner.
    pub(crate) fn measure(
        &self,
        partner: Option<usize>,
        monitor: &Monitor,
        deadline: Instant,
    ) -> Result<Option<MessageOptions>> {
        let shared = &self.shared;
        let _ = shared.partner.set(partner);
        shared.wake_thread();
        let found = || match (shared.failed.get(), shared.measured.get()) {
            (Some(Failure(text)), _) => Some(Err(Error::Unsupported(format!("MPI cannot be used any more: {text}")))),
            (None, Some(measured)) => Some(Ok(*measured)),
            (None, None) => None,
        };
        let others: Vec<usize> = partner.into_iter().collect();
        let outcome = self.wait_for("measuring messages of MPI", &others, monitor, deadline, found);
        if outcome.is_err() {
            shared.gave_up.store(true, Ordering::Relaxed);
        }
        outcome?
    }

    /// Waits until `found` returns something. `others` are the ranks on which that depends.
    fn wait_for<T>(
        &self,
        during: &str,
        others: &[usize],
        monitor: &Monitor,
        deadline: Instant,
        found: impl Fn() -> Option<T>,
    ) -> Result<T> {
        let start = Instant::now();
        let mut lock = self.shared.change.lock();
        loop {
            if let Some(found) = found() {
                return Ok(found);
            }
            monitor.check(others, during)?;
            if Instant::now() >= deadline {
                let (during, waited, missing) = (during.to_owned(), start.elapsed(), others.to_vec());
                return Err(Error::Timeout { during, waited, missing, limit: Limit::Init });
            }
            if monitor.interrupted() {
                return Err(Error::Interrupted { during: during.to_owned() });
            }
            self.shared.changed.wait_for(&mut lock, POLL_INTERVAL);
        }
    }

    /// Sets how messages are sent. Groups that exist already keep their choice between zero copy and frames.
    pub(crate) fn set_options(&self, options: MessageOptions) {
        *self.shared.options.lock() = options;
    }

    /// Finalises MPI: waits until the other processes finalise it too, unless a process has died, and at most until
    /// the deadline.
    pub(crate) fn finish(&self, monitor: &Monitor, deadline: Instant) {
        let Some(Ok(world)) = self.shared.world.get() else { return };
        self.shared.outbox.lock().finish = true;
        self.shared.outbox_changed.notify_all();
        let mut lock = self.shared.change.lock();
        while self.shared.ended.get().is_none() {
            let failed = (0..world.size).any(|rank| departed(monitor, rank));
            if failed || Instant::now() >= deadline || monitor.interrupted() {
                return;
            }
            self.shared.changed.wait_for(&mut lock, POLL_INTERVAL);
        }
    }
}

fn not_cancelled() -> Failure {
    Failure("a message could not be cancelled".to_owned())
}

impl Carrier for Engine {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn ports(&self) -> &Ports {
        &self.shared.ports
    }

    fn send(&self, from: PortKey, to: usize, prefix: &[u8; PREFIX_BYTES], payload: &[u8]) -> bool {
        let shared = &self.shared;
        let mut outbox = shared.outbox.lock();
        let pending = outbox.pending.entry(to).or_default();
        if *pending >= FRAMES_PER_PEER {
            outbox.refused.insert(from);
            return false;
        }
        *pending += 1;
        drop(outbox);
        // The mailbox's lock keeps the frames of one port in order, so the outbox's lock is not held while bytes are
        // copied.
        let mut bytes = shared.send_buffers.take();
        bytes.clear();
        bytes.extend_from_slice(prefix);
        bytes.extend_from_slice(payload);
        shared.outbox.lock().queue.push_back(QueuedMessage::Frame(to, bytes));
        shared.start_queued();
        true
    }

    fn is_zero_copy(&self) -> bool {
        self.shared.options.lock().zero_copy
    }

    unsafe fn start_receive(&self, transfer: ZeroCopyTransfer) -> Option<u64> {
        let key = self.shared.outbox.lock().queue_receive(transfer)?;
        self.shared.start_queued();
        Some(key.into())
    }

    unsafe fn start_send(&self, transfer: ZeroCopyTransfer, key: u64) -> bool {
        let is_valid = self.shared.outbox.lock().queue_send(transfer, key);
        if is_valid {
            self.shared.start_queued();
        }
        is_valid
    }

    fn has_transfers(&self, gives_up: bool) -> bool {
        let shared = &self.shared;
        // A death ends the use of MPI (MPI-3), also if another thread is in a call that has not noticed it.
        let gives_up = gives_up || shared.ports.somebody_departed();
        // A thread has the lock during a call, which may wait, such as the end of MPI.
        let patience = if gives_up { LOCK_TIMEOUT } else { SHORT_PAUSE };
        let is_given_up = || shared.failed.get().is_some();
        let lock = if is_given_up() { shared.service.try_lock() } else { shared.service.try_lock_for(patience) };
        let Some(mut service) = lock else {
            if gives_up {
                let _ = shared.failed.set(not_cancelled());
            }
            if is_given_up() {
                // That call is the last one ([`EngineState::guard`]).
                shared.await_hardware();
                return false;
            }
            return true;
        };
        if gives_up && service.is_some() {
            shared.abandon(&mut service, not_cancelled());
        }
        if service.is_none() {
            drop(service);
            if shared.failed.get().is_some() {
                shared.await_hardware();
            }
            return false;
        }
        drop(service);
        if !shared.any_thread() || !shared.serve_as_caller() {
            shared.wake_thread();
            std::thread::sleep(SHORT_PAUSE);
        }
        true
    }

    fn await_thread(&self, waits: bool) {
        self.shared.callers.lock().await_thread(waits);
        if waits {
            self.shared.wake_thread();
        }
    }

    fn receives(&self, begins: bool) -> bool {
        // Only the thread calls an MPI that was built without support for others.
        if !self.shared.any_thread() {
            return false;
        }
        let mut callers = self.shared.callers.lock();
        match begins {
            true => callers.enter(),
            false => callers.leave(),
        }
        let need_thread = callers.need_thread();
        drop(callers);
        if need_thread {
            self.shared.wake_thread();
        }
        true
    }

    fn receive(&self) -> bool {
        self.shared.looks.fetch_add(1, Ordering::Relaxed);
        self.shared.serve_as_caller()
    }

    fn flush(&self, deadline: Instant) {
        while self.shared.ended.get().is_none() && Instant::now() < deadline {
            if self.shared.outbox.lock().is_sent() {
                return;
            }
            std::thread::sleep(LONG_PAUSE);
        }
    }

    /// True: after a death, no process calls MPI any more (MPI-3).
    fn needs_all_members(&self) -> bool {
        true
    }
}

impl EngineState {
    fn announce(&self) {
        let _lock = self.change.lock();
        self.changed.notify_all();
    }

    /// Wakes the thread. With the lock, it either sees what has changed before it sleeps, or sleeps already.
    fn wake_thread(&self) {
        let _outbox = self.outbox.lock();
        self.outbox_changed.notify_one();
    }

    fn any_thread(&self) -> bool {
        matches!(self.world.get(), Some(Ok(world)) if world.any_thread)
    }

    /// Moves frames on a thread that waits for some. Returns whether any moved.
    fn serve_as_caller(&self) -> bool {
        let Some(mut service) = self.service.try_lock() else { return false };
        let moved = self.guard(&mut service, |service| service.serve(self, Served::ByCaller));
        drop(service);
        self.send_as_caller();
        moved
    }

    /// Passes what a caller has queued to MPI, or leaves it to another thread.
    fn start_queued(&self) {
        self.send_as_caller();
        // What MPI has not moved at once, it moves when it is called again: soon by this caller, or by the thread.
        if !self.any_thread() || !self.callers.lock().receive_soon(self.looks.load(Ordering::Relaxed)) {
            self.wake_thread();
        }
    }

    /// Passes queued messages to MPI. If another thread has the service's lock, this does nothing: that thread checks the
    /// queue again after it has released the lock.
    fn send_as_caller(&self) {
        while self.any_thread() && !self.outbox.lock().queue.is_empty() {
            let Some(mut service) = self.service.try_lock() else { return };
            if !self.guard(&mut service, |service| service.send_waiting(self, Served::ByCaller)) {
                drop(service);
                // The first frame to a process, or there are too many messages.
                self.wake_thread();
                return;
            }
        }
    }

    /// Calls MPI. After a failure it is not called again; the thread then ends the waits.
    fn guard(
        &self,
        service: &mut Option<MpiService>,
        call: impl FnOnce(&mut MpiService) -> Result<bool, Failure>,
    ) -> bool {
        if let Some(failure) = self.failed.get() {
            self.abandon(service, failure.clone());
        }
        let Some(serving) = service.as_mut() else { return false };
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| call(serving)));
        let failure = match outcome {
            Ok(Ok(moved)) => return moved,
            Ok(Err(failure)) => failure,
            Err(panic) => Failure(Error::from_panic(&*panic).text()),
        };
        self.abandon(service, failure);
        false
    }

    fn abandon(&self, service: &mut Option<MpiService>, failure: Failure) {
        // The first failure has taken the service. The thread ends its receives later, because this may be a caller that
        // holds the lock of a mailbox.
        if let Some(service) = service.take() {
            *self.abandoned.lock() = Some(service);
            self.given_up_at.get_or_init(Instant::now);
        }
        let _ = self.failed.set(failure);
        self.wake_thread();
    }

    /// Waits until [`HARDWARE_TIME`] has passed since MPI was last called, for transfers by network cards.
    fn await_hardware(&self) {
        let given_up_at = *self.given_up_at.get_or_init(Instant::now);
        std::thread::sleep((given_up_at + HARDWARE_TIME).saturating_duration_since(Instant::now()));
    }

    fn abandon_after_departure(&self, service: &mut Option<MpiService>) {
        self.abandon(service, Failure("a process of the job has ended".to_owned()));
    }

    /// The body of the thread.
    fn work(&self, mut wire: Box<dyn Wire>) {
        let started = wire.start(MpiService::SLOTS);
        let is_started = started.is_ok();
        let _ = self.world.set(started);
        self.announce();
        if !is_started {
            return;
        }
        let partner = {
            let mut outbox = self.outbox.lock();
            while self.partner.get().is_none() && !outbox.finish {
                self.outbox_changed.wait(&mut outbox);
            }
            self.partner.get().copied().flatten()
        };
        let measured = partner.map(|partner| message_length::measure(&mut *wire, partner, &self.gave_up)).transpose();
        *self.service.lock() = Some(MpiService::new(wire));
        match measured {
            Ok(measured) => drop(self.measured.set(measured)),
            Err(failure) => self.abandon(&mut self.service.lock(), failure),
        }
        self.announce();
        self.serve();
        if let Some(Failure(text)) = self.failed.get() {
            if let Some(abandoned) = self.abandoned.lock().take() {
                abandoned.leak();
            }
            return self.fail(text);
        }
        // With the lock, so that other threads see whether MPI is being called ([`Carrier::has_transfers`]).
        let mut service = self.service.lock();
        if let Some(Err(Failure(text))) = service.as_mut().map(MpiService::finish) {
            tracing::debug!("MPI could not be finalized: {text}");
        }
        if let Some(service) = service.take() {
            service.leak();
        }
        drop(service);
        let _ = self.ended.set(());
        self.announce();
    }

    /// Moves frames until MPI is to be finalised and all frames are sent, or MPI has failed.
    fn serve(&self) {
        self.guard(&mut self.service.lock(), |service| service.post_receives(self).map(|()| true));
        let mut pause = Backoff::of_polling_thread();
        let mut seen = Instant::now();
        while self.failed.get().is_none() {
            let callers_receive = self.callers.lock().receive(self.looks.load(Ordering::Relaxed));
            let (mut moved, mut sending, mut has_room) = (false, false, true);
            // Frames that callers leave are the first ones to a process.
            let is_needed = {
                let outbox = self.outbox.lock();
                outbox.finish || !outbox.queue.is_empty()
            };
            if !callers_receive || is_needed {
                let mut service = self.service.lock();
                moved = self.guard(&mut service, |service| service.serve(self, Served::ByThread));
                (sending, has_room) = service.as_ref().map_or((false, true), |it| (it.is_sending(), it.has_room()));
            }
            if seen.elapsed() > POLL_INTERVAL {
                seen = Instant::now();
                if self.ports.somebody_departed() {
                    self.abandon_after_departure(&mut self.service.lock());
                    return;
                }
            }
            if moved {
                pause = Backoff::of_polling_thread();
                continue;
            }
            let is_busy = || sending || self.callers.lock().sleep();
            if !callers_receive && is_busy() && pause.pause(|| false) {
                continue;
            }
            let mut outbox = self.outbox.lock();
            let is_empty = outbox.queue.is_empty();
            if outbox.finish && outbox.is_sent() && !self.ports.has_unanswered() {
                return;
            }
            if is_empty || !has_room {
                let limit = match callers_receive {
                    true => TICK,
                    false if is_busy() => SHORT_PAUSE,
                    false => LONG_PAUSE,
                };
                self.outbox_changed.wait_for(&mut outbox, limit);
            }
        }
    }

    /// Ends the waits of this process, unless a departure explains the failure and ends the affected waits.
    fn fail(&self, text: &str) {
        let _ = self.ended.set(());
        self.announce();
        let monitors = self.ports.monitors();
        let deadline = Instant::now() + DEATH_REPORT_TIMEOUT;
        while !self.ports.somebody_departed() {
            if Instant::now() >= deadline {
                monitors.iter().for_each(|monitor| monitor.close(&format!("MPI failed: {text}")));
                return;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// A wire that leads back to its own process, for tests whose ranks are threads that share an engine; each group
/// member has a port of its own.
#[cfg(test)]
pub(crate) mod loopback {
    use std::collections::VecDeque;

    use super::*;

    #[derive(Default)]
    pub(crate) struct Loopback {
        sent: VecDeque<(usize, Vec<u8>, MessageTag)>,
        open: VecDeque<(usize, *mut u8, usize, MessageTag)>,
        /// Transfers whose bytes the next `poll` moves: the receive's slot and memory, and the bytes.
        moving: Vec<(usize, *mut u8, Vec<u8>)>,
        /// Completions for the next `poll`.
        late: Vec<Completed>,
    }

    /// Longer messages are reported late, like messages that MPI sends in several steps.
    const LONG_BYTES: usize = 4096;

    // SAFETY: the pointers are receive buffers of the engine, which keeps them until they are done.
    unsafe impl Send for Loopback {}

    impl Wire for Loopback {
        fn init(&mut self) -> Result<bool, Failure> {
            Ok(true)
        }
        fn start(&mut self, _num_slots: usize) -> Result<MpiWorld, Failure> {
            Ok(MpiWorld { rank: 0, size: 1, any_thread: true, library: "loopback".into() })
        }
        unsafe fn send(&mut self, slot: usize, data: &[u8], _to: usize, tag: MessageTag) -> Result<(), Failure> {
            self.sent.push_back((slot, data.to_vec(), tag));
            Ok(())
        }
        unsafe fn recv(
            &mut self,
            slot: usize,
            data: &mut [u8],
            _from: Option<usize>,
            tag: MessageTag,
        ) -> Result<(), Failure> {
            self.open.push_back((slot, data.as_mut_ptr(), data.len(), tag));
            Ok(())
        }
        fn poll(&mut self, done: &mut Vec<Completed>) -> Result<(), Failure> {
            let first = done.len();
            done.append(&mut self.late);
            for (slot, data, bytes) in self.moving.drain(..) {
                // SAFETY: as below.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), data, bytes.len()) };
                done.push(Completed { slot, source: 0, bytes: bytes.len() });
            }
            let find = |(_, _, tag): &(usize, Vec<u8>, MessageTag),
                        open: &VecDeque<(usize, *mut u8, usize, MessageTag)>| {
                open.iter().position(|(.., wanted)| wanted == tag)
            };
            let next =
                |wire: &Self| wire.sent.iter().enumerate().find_map(|(at, sent)| Some((at, find(sent, &wire.open)?)));
            while let Some((sent, open)) = next(self) {
                let (from, bytes, tag) = self.sent.remove(sent).expect("it was found");
                let (slot, data, room, _) = self.open.remove(open).expect("it was found");
                assert!(bytes.len() <= room);
                if let MessageTag::Transfer(_) = tag {
                    self.moving.push((slot, data, bytes));
                    self.late.push(Completed { slot: from, source: 0, bytes: 0 });
                    continue;
                }
                // SAFETY: the buffer has `room` bytes and is this wire's until it is done.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), data, bytes.len()) };
                let received = Completed { slot, source: 0, bytes: bytes.len() };
                if bytes.len() > LONG_BYTES {
                    self.late.push(received)
                } else {
                    done.push(received)
                }
                // A send completes a little later than its receive, as with a network.
                self.late.push(Completed { slot: from, source: 0, bytes: 0 });
            }
            done[first..].sort_by_key(|completed| completed.slot);
            Ok(())
        }
        fn finish(&mut self) -> Result<(), Failure> {
            Ok(())
        }
    }
}
