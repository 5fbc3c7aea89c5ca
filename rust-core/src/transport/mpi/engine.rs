//! Makes all MPI calls of frames between hosts, one at a time.
//!
//! ```text
//!   port --send--> outbox --> send slots --> MPI --> receive slots --take--> port
//!   (any thread)   (lock)     (whoever holds the lock of the operations)
//! ```
//!
//! MPI cannot wake a sleeping thread, so somebody has to poll. While a caller waits for frames and receives them itself
//! ([`Carrier::receives`]), the caller polls: a thread beside it would need a core, which the waiting caller or another
//! process has. Otherwise the engine's thread polls: continuously while frames move, often while a caller waits
//! ([`Carrier::busy_poll`]), and rarely otherwise.

use std::collections::{HashMap, HashSet, VecDeque};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Limit, Result};
use crate::transport::ports::{Carrier, FRAME_BYTES, PREFIX_BYTES, Pool, PortKey, Ports, departed};
use crate::transport::{POLL_INTERVAL, cores};
use crate::world::{Monitor, fork};

/// Number of receives that are always posted.
const RECV_SLOTS: usize = 16;
/// Largest number of frames for one process that are queued or in flight; the mailbox waits with further ones.
const FRAMES_PER_PEER: usize = 8;
const MAX_SEND_SLOTS: usize = 256;
/// Polling intervals while a caller waits, and otherwise.
const SHORT_PAUSE: Duration = Duration::from_micros(30);
const LONG_PAUSE: Duration = Duration::from_millis(1);
/// Number of polls before the first pause: without yielding if there is a core for this thread, and with yielding.
const SPINS: u32 = 2000;
const YIELDS: u32 = 20;

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
    unsafe fn send(&mut self, slot: usize, data: &[u8], to: usize) -> Result<(), Failure>;
    /// Starts a receive from any process in a free slot.
    ///
    /// # Safety
    /// No other code accesses the memory until `poll` reports the slot as complete.
    unsafe fn recv(&mut self, slot: usize, data: &mut [u8]) -> Result<(), Failure>;
    /// Adds completed slots to the list; does not wait.
    fn poll(&mut self, done: &mut Vec<Completed>) -> Result<(), Failure>;
    /// Finalises MPI; waits for all processes of the job.
    fn finish(&mut self) -> Result<(), Failure>;
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

#[derive(Default)]
struct Outbox {
    frames: VecDeque<(usize, Vec<u8>)>,
    /// By rank: frames that are queued or in flight.
    pending: HashMap<usize, usize>,
    /// Ports whose frame was refused because the queue was full.
    refused: HashSet<PortKey>,
    finish: bool,
    /// Whether the engine's thread is to look again before it waits.
    changed: bool,
}

struct EngineState {
    /// None before MPI is started, and after it has failed or is finalised. Held while a mailbox makes progress, which
    /// may send; so whoever may hold a mailbox's lock only tries to take this one.
    operations: Mutex<Option<MpiOperations>>,
    /// Why MPI has failed, until the engine's thread reports it.
    failure: Mutex<Option<Failure>>,
    outbox: Mutex<Outbox>,
    ports: Ports,
    send_buffers: Pool,
    outbox_changed: Condvar,
    waiters: AtomicUsize,
    /// The number of callers that receive.
    receivers: AtomicUsize,
    /// The result of `start`, and whether MPI is finalised.
    world: OnceLock<Result<MpiWorld, Failure>>,
    ended: OnceLock<()>,
    changed: Condvar,
    change: Mutex<()>,
}

/// The thread through which this process sends and receives frames by MPI.
pub(crate) struct Engine {
    shared: Arc<EngineState>,
}

impl Engine {
    /// Starts the thread, which initialises MPI; [`Engine::world`] returns the result.
    pub(crate) fn start(wire: Box<dyn Wire>) -> Result<Arc<Self>> {
        let shared = Arc::new(EngineState {
            operations: Mutex::default(),
            failure: Mutex::default(),
            outbox: Mutex::default(),
            ports: Ports::new(FRAME_BYTES),
            send_buffers: Pool::new(0),
            outbox_changed: Condvar::new(),
            waiters: AtomicUsize::new(0),
            receivers: AtomicUsize::new(0),
            world: OnceLock::new(),
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
        let start = Instant::now();
        let all: Vec<usize> = (0..size).collect();
        let during = "starting MPI";
        let mut lock = self.shared.change.lock();
        loop {
            if let Some(outcome) = self.shared.world.get() {
                return outcome
                    .clone()
                    .map_err(|Failure(text)| Error::Unsupported(format!("MPI did not start: {text}")));
            }
            monitor.check(&all, during)?;
            if Instant::now() >= deadline {
                let missing = all.iter().copied().filter(|rank| *rank != monitor.me()).collect();
                let (during, waited) = (during.to_owned(), start.elapsed());
                return Err(Error::Timeout { during, waited, missing, limit: Limit::Init });
            }
            if monitor.interrupted() {
                return Err(Error::Interrupted { during: during.to_owned() });
            }
            self.shared.changed.wait_for(&mut lock, POLL_INTERVAL);
        }
    }

    /// Finalises MPI: waits until the other processes finalise it too, unless a process has died, and at most until
    /// the deadline.
    pub(crate) fn finish(&self, monitor: &Monitor, deadline: Instant) {
        let Some(Ok(world)) = self.shared.world.get() else { return };
        self.shared.outbox.lock().finish = true;
        self.shared.wake_thread();
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

impl Carrier for Engine {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn ports(&self) -> &Ports {
        &self.shared.ports
    }

    fn send(&self, from: PortKey, to: usize, prefix: &[u8; PREFIX_BYTES], payload: &[u8]) -> bool {
        let mut outbox = self.shared.outbox.lock();
        let pending = outbox.pending.entry(to).or_default();
        if *pending >= FRAMES_PER_PEER {
            outbox.refused.insert(from);
            return false;
        }
        *pending += 1;
        drop(outbox);
        // The mailbox's lock keeps the frames of one port in order, so the outbox's lock is not held while bytes are
        // copied.
        let mut bytes = self.shared.send_buffers.take();
        bytes.clear();
        bytes.extend_from_slice(prefix);
        bytes.extend_from_slice(payload);
        self.shared.outbox.lock().frames.push_back((to, bytes));
        self.shared.send_now();
        // Even if MPI has the frame now, somebody must make its progress. A caller that receives does, and also sends
        // what this thread could not.
        if self.shared.receivers.load(Ordering::Relaxed) == 0 {
            self.shared.wake_thread();
        }
        true
    }

    fn receives(&self, begins: bool) -> bool {
        if !self.shared.any_thread() {
            return false;
        }
        // The engine's thread takes over after its pause. To wake it would take this thread's core, at each end of a wait.
        match begins {
            true => self.shared.receivers.fetch_add(1, Ordering::Relaxed),
            false => self.shared.receivers.fetch_sub(1, Ordering::Relaxed),
        };
        true
    }

    fn receive(&self) -> bool {
        self.shared.try_operate(|operations, shared| operations.advance(shared)).unwrap_or(false)
    }

    fn busy_poll(&self, waits: bool) {
        let waiters = &self.shared.waiters;
        if !waits {
            waiters.fetch_sub(1, Ordering::Relaxed);
        } else if waiters.fetch_add(1, Ordering::Relaxed) == 0 {
            self.shared.wake_thread();
        }
    }

    fn flush(&self, deadline: Instant) {
        while self.shared.ended.get().is_none() && Instant::now() < deadline {
            if self.shared.outbox.lock().pending.values().all(|pending| *pending == 0) {
                return;
            }
            std::thread::sleep(LONG_PAUSE);
        }
    }

    /// Stops the use of MPI after a death (MPI-3).
    fn needs_all_members(&self) -> bool {
        true
    }
}

impl EngineState {
    fn announce(&self) {
        let _lock = self.change.lock();
        self.changed.notify_all();
    }

    /// The body of the thread.
    fn work(&self, mut wire: Box<dyn Wire>) {
        let slots = RECV_SLOTS + MAX_SEND_SLOTS;
        let started = wire.start(slots);
        let failed = started.is_err();
        let _ = self.world.set(started);
        self.announce();
        if failed {
            return;
        }
        let ended = match MpiOperations::start(wire, &self.ports) {
            Ok(operations) => {
                *self.operations.lock() = Some(operations);
                self.run()
            }
            Err(failure) => Err(failure),
        };
        match ended {
            Ok(mut operations) => {
                if let Err(Failure(text)) = operations.wire.finish() {
                    tracing::debug!("MPI could not be finalized: {text}");
                }
                let _ = self.ended.set(());
                self.announce();
            }
            Err(Failure(text)) => self.fail(&text),
        }
    }

    /// Whether any thread may call MPI.
    fn any_thread(&self) -> bool {
        matches!(self.world.get(), Some(Ok(world)) if world.any_thread)
    }

    /// Calls `operate` unless another thread makes MPI calls, or MPI is not to be called (MPI-3). Waits for nothing.
    fn try_operate<T>(&self, operate: impl FnOnce(&mut MpiOperations, &Self) -> Result<T, Failure>) -> Option<T> {
        if fork::is_child() || self.ports.somebody_departed() {
            return None;
        }
        let mut guard = self.operations.try_lock()?;
        let operations = guard.as_mut()?;
        // A panic concerns all groups, as on the engine's thread, and not only the one of this caller.
        let mut outcome = None;
        let panic = Error::of_thread("smd-mpi", || outcome = Some(operate(operations, self)));
        match outcome.unwrap_or_else(|| Err(Failure(panic.map_or_else(String::new, |error| error.text())))) {
            Ok(value) => Some(value),
            Err(failure) => {
                *self.failure.lock() = Some(failure);
                *guard = None;
                drop(guard);
                self.wake_thread();
                None
            }
        }
    }

    /// Passes waiting frames to MPI, if this thread may call it now.
    fn send_now(&self) {
        if self.any_thread() {
            let _ = self.try_operate(|operations, shared| operations.send_waiting(shared));
        }
    }

    fn wake_thread(&self) {
        self.outbox.lock().changed = true;
        self.outbox_changed.notify_one();
    }

    /// Moves frames until the engine is to stop and all frames are sent. Afterwards, no other thread calls MPI.
    fn run(&self) -> Result<MpiOperations, Failure> {
        let spins = if cores() > 2 { SPINS } else { 0 };
        let mut idle = 0u32;
        let mut seen = Instant::now();
        loop {
            let callers_receive = self.receivers.load(Ordering::Relaxed) > 0;
            // Beside callers that receive, this thread does not wait for the lock.
            let guard = match callers_receive {
                true => self.operations.try_lock(),
                false => Some(self.operations.lock()),
            };
            let (mut moved, mut sending, mut has_room) = (false, true, true);
            if let Some(mut guard) = guard {
                let Some(operations) = guard.as_mut() else {
                    let failure = self.failure.lock().take();
                    return Err(failure.unwrap_or_else(|| Failure("another thread has ended it".to_owned())));
                };
                match operations.advance(self) {
                    Ok(any) => moved = any,
                    Err(failure) => {
                        *guard = None;
                        return Err(failure);
                    }
                }
                (sending, has_room) = (operations.is_sending(), operations.has_room());
                let finishes = || {
                    let outbox = self.outbox.lock();
                    outbox.finish && outbox.frames.is_empty()
                };
                if !sending
                    && finishes()
                    && let Some(operations) = guard.take()
                {
                    return Ok(operations);
                }
            }
            if moved && !callers_receive {
                idle = 0;
                continue;
            }
            idle += 1;
            let busy_poll = !callers_receive && (sending || self.waiters.load(Ordering::Relaxed) > 0);
            if busy_poll && idle < spins {
                std::hint::spin_loop();
                continue;
            }
            if busy_poll && idle < spins + YIELDS {
                std::thread::yield_now();
                continue;
            }
            let mut outbox = self.outbox.lock();
            if !outbox.changed && (outbox.frames.is_empty() || !has_room || callers_receive) {
                self.outbox_changed.wait_for(&mut outbox, if busy_poll { SHORT_PAUSE } else { LONG_PAUSE });
            }
            outbox.changed = false;
            drop(outbox);
            if seen.elapsed() > POLL_INTERVAL {
                seen = Instant::now();
                if self.ports.somebody_departed() {
                    *self.operations.lock() = None;
                    return Err(Failure("a process of the job has ended".to_owned()));
                }
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

/// MPI and its operations.
struct MpiOperations {
    wire: Box<dyn Wire>,
    /// Never freed, because MPI cannot return memory of operations in flight after a failure.
    slots: ManuallyDrop<Slots>,
    done: Vec<Completed>,
    /// Ports to notify.
    touched: HashSet<PortKey>,
}

/// The buffers of MPI's operations: by slot, receives first.
///
/// Frames of one process stay in order, because MPI matches messages with receives in the order in which both were
/// started. But MPI reports completions in another order (by slot, and a long message later than a following short
/// one). So a completed receive waits in its slot until all receives that were started before it are complete.
struct Slots {
    receives: Vec<Vec<u8>>,
    /// Slots of receives, oldest first.
    started: VecDeque<usize>,
    /// For each receive slot that is complete: the sender and the length.
    arrived: [Option<(usize, usize)>; RECV_SLOTS],
    sends: Vec<Option<(usize, Vec<u8>)>>,
    free: Vec<usize>,
}

impl MpiOperations {
    /// Starts all receives.
    fn start(wire: Box<dyn Wire>, ports: &Ports) -> Result<Self, Failure> {
        let slots = Slots {
            receives: (0..RECV_SLOTS).map(|_| Vec::new()).collect(),
            started: VecDeque::with_capacity(RECV_SLOTS),
            arrived: [None; RECV_SLOTS],
            sends: (0..MAX_SEND_SLOTS).map(|_| None).collect(),
            free: (0..MAX_SEND_SLOTS).collect(),
        };
        let mut operations = Self { wire, slots: ManuallyDrop::new(slots), done: Vec::new(), touched: HashSet::new() };
        for slot in 0..RECV_SLOTS {
            operations.receive(slot, ports.buffers.take())?;
        }
        Ok(operations)
    }

    fn is_sending(&self) -> bool {
        self.slots.free.len() < self.slots.sends.len()
    }

    fn has_room(&self) -> bool {
        !self.slots.free.is_empty()
    }

    /// Sends waiting frames, and passes on what has arrived; waits for nothing. Returns whether there was anything.
    fn advance(&mut self, shared: &EngineState) -> Result<bool, Failure> {
        let mut moved = self.send_waiting(shared)?;
        self.wire.poll(&mut self.done)?;
        let slots = &mut *self.slots;
        for Completed { slot, source, bytes } in self.done.drain(..) {
            moved = true;
            if slot < RECV_SLOTS {
                slots.arrived[slot] = Some((source, bytes));
            } else if let Some((to, buffer)) = slots.sends[slot - RECV_SLOTS].take() {
                slots.free.push(slot - RECV_SLOTS);
                shared.send_buffers.put(buffer);
                let mut outbox = shared.outbox.lock();
                outbox.pending.entry(to).and_modify(|pending| *pending = pending.saturating_sub(1));
                self.touched.extend(outbox.refused.drain());
            }
        }
        while let Some(slot) = self.slots.started.front().copied()
            && let Some((source, bytes)) = self.slots.arrived[slot].take()
        {
            self.slots.started.pop_front();
            let frame = std::mem::take(&mut self.slots.receives[slot]);
            self.receive(slot, shared.ports.buffers.take())?;
            self.touched.extend(shared.ports.take(source, frame, 0, bytes));
        }
        if !self.touched.is_empty() {
            shared.ports.progress(self.touched.drain());
            // Mailboxes may have sent frames.
            self.send_waiting(shared)?;
        }
        Ok(moved)
    }

    fn send_waiting(&mut self, shared: &EngineState) -> Result<bool, Failure> {
        let mut moved = false;
        while let Some(slot) = self.slots.free.last().copied() {
            let Some((to, bytes)) = shared.outbox.lock().frames.pop_front() else { break };
            let slots = &mut *self.slots;
            slots.free.pop();
            let (_, data) = slots.sends[slot].insert((to, bytes));
            // SAFETY: the buffer stays in the slot until MPI reports it as complete; otherwise it is leaked.
            unsafe { self.wire.send(RECV_SLOTS + slot, data, to)? };
            moved = true;
        }
        Ok(moved)
    }

    fn receive(&mut self, slot: usize, mut buffer: Vec<u8>) -> Result<(), Failure> {
        buffer.resize(FRAME_BYTES, 0);
        let slots = &mut *self.slots;
        slots.receives[slot] = buffer;
        slots.started.push_back(slot);
        // SAFETY: as in `send_waiting`.
        unsafe { self.wire.recv(slot, &mut slots.receives[slot]) }
    }
}

/// A wire that leads back to its own process, for tests whose ranks are threads that share an engine; each group
/// member has a port of its own.
#[cfg(test)]
pub(crate) mod loopback {
    use super::*;

    #[derive(Default)]
    pub(crate) struct Loopback {
        sent: VecDeque<(usize, Vec<u8>)>,
        open: VecDeque<(usize, *mut u8, usize)>,
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
        unsafe fn send(&mut self, slot: usize, data: &[u8], _to: usize) -> Result<(), Failure> {
            self.sent.push_back((slot, data.to_vec()));
            Ok(())
        }
        unsafe fn recv(&mut self, slot: usize, data: &mut [u8]) -> Result<(), Failure> {
            self.open.push_back((slot, data.as_mut_ptr(), data.len()));
            Ok(())
        }
        fn poll(&mut self, done: &mut Vec<Completed>) -> Result<(), Failure> {
            let first = done.len();
            done.append(&mut self.late);
            while !self.sent.is_empty() && !self.open.is_empty() {
                let (from, bytes) = self.sent.pop_front().expect("it is not empty");
                let (slot, data, room) = self.open.pop_front().expect("it is not empty");
                assert!(bytes.len() <= room);
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::transport::Members;
    use crate::transport::ports::Port;

    const LIMIT: Duration = Duration::from_secs(20);

    /// How a wire ends.
    #[derive(Clone, Copy)]
    enum End {
        Failure,
        Panic,
    }

    /// A wire that moves nothing. On a thread other than the engine's, its next poll is its end, which `ended` notes;
    /// any later call is noted in `called_after`.
    struct Ending {
        end: End,
        engine: Option<std::thread::ThreadId>,
        ended: Arc<AtomicBool>,
        called_after: Arc<AtomicBool>,
    }

    impl Ending {
        fn note(&self) {
            if self.ended.load(Ordering::SeqCst) {
                self.called_after.store(true, Ordering::SeqCst);
            }
        }
    }

    impl Wire for Ending {
        fn init(&mut self) -> Result<bool, Failure> {
            Ok(true)
        }
        fn start(&mut self, _num_slots: usize) -> Result<MpiWorld, Failure> {
            self.engine = Some(std::thread::current().id());
            Ok(MpiWorld { rank: 0, size: 2, any_thread: true, library: "ending".into() })
        }
        unsafe fn send(&mut self, _slot: usize, _data: &[u8], _to: usize) -> Result<(), Failure> {
            self.note();
            Ok(())
        }
        unsafe fn recv(&mut self, _slot: usize, _data: &mut [u8]) -> Result<(), Failure> {
            self.note();
            Ok(())
        }
        fn poll(&mut self, _done: &mut Vec<Completed>) -> Result<(), Failure> {
            self.note();
            if self.engine == Some(std::thread::current().id()) {
                return Ok(());
            }
            self.ended.store(true, Ordering::SeqCst);
            match self.end {
                End::Failure => Err(Failure("the wire broke".to_owned())),
                End::Panic => panic!("the wire broke"),
            }
        }
        fn finish(&mut self) -> Result<(), Failure> {
            self.note();
            Ok(())
        }
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn an_end_in_a_callers_hands_ends_all_waits_and_all_calls() {
        for end in [End::Failure, End::Panic] {
            let (ended, called_after) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
            let wire = Ending { end, engine: None, ended: ended.clone(), called_after: called_after.clone() };
            let engine = Engine::start(Box::new(wire)).unwrap();
            let monitor = Arc::new(Monitor::new(0));
            engine.world(2, &monitor, Instant::now() + LIMIT).unwrap();
            let carrier: Arc<dyn Carrier> = engine.clone();
            let members = Members { ranks: [0, 1].into(), me: 0 };
            let _port = Port::open(&carrier, 7, &members, [0, 1].into(), monitor.clone());
            assert!(engine.receives(true));
            let start = Instant::now();
            while !ended.load(Ordering::SeqCst) && start.elapsed() < LIMIT {
                // The engine's thread may make MPI calls at the moment.
                engine.receive();
            }
            while monitor.check(&[0, 1], "waiting").is_ok() && start.elapsed() < LIMIT {
                assert!(!engine.receive());
                // Refused when the queue is full.
                let _ = engine.send((7, 0), 1, &[0; PREFIX_BYTES], &[1, 2, 3]);
                std::thread::sleep(Duration::from_millis(1));
            }
            engine.receives(false);
            let text = monitor.check(&[0, 1], "waiting").unwrap_err().to_string();
            assert!(text.contains("MPI failed") && text.contains("the wire broke"), "{text}");
            assert!(!called_after.load(Ordering::SeqCst), "MPI was called afterwards");
        }
    }
}
