//! The thread that makes all MPI calls.
//!
//! ```text
//!   port --send--> outbox --> send slots --> MPI --> receive slots --take--> port
//!   (any thread)   (lock)     (engine's thread)                    (engine's thread too)
//! ```
//!
//! MPI cannot wake a sleeping thread, so the thread polls: continuously while frames move, often while a caller waits
//! ([`Carrier::await_thread`]), and rarely otherwise.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Limit, Result};
use crate::transport::ports::{Carrier, FRAME_BYTES, PREFIX_BYTES, Pool, PortKey, Ports, departed};
use crate::transport::{Backoff, POLL_INTERVAL};
use crate::world::Monitor;

/// Number of receives that are always posted.
const RECV_SLOTS: usize = 16;
/// Largest number of frames for one process that are queued or in flight; the mailbox waits with further ones.
const FRAMES_PER_PEER: usize = 8;
const MAX_SEND_SLOTS: usize = 256;
/// Polling intervals while a caller waits, and otherwise.
const SHORT_PAUSE: Duration = Duration::from_micros(30);
const LONG_PAUSE: Duration = Duration::from_millis(1);

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
}

struct EngineState {
    outbox: Mutex<Outbox>,
    ports: Ports,
    send_buffers: Pool,
    outbox_changed: Condvar,
    waiters: AtomicUsize,
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
            outbox: Mutex::default(),
            ports: Ports::new(FRAME_BYTES),
            send_buffers: Pool::new(0),
            outbox_changed: Condvar::new(),
            waiters: AtomicUsize::new(0),
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
        self.shared.outbox_changed.notify_one();
        true
    }

    fn await_thread(&self, waits: bool) {
        let waiters = &self.shared.waiters;
        if !waits {
            waiters.fetch_sub(1, Ordering::Relaxed);
        } else if waiters.fetch_add(1, Ordering::Relaxed) == 0 {
            // With the lock, the thread either sees the waiter before it sleeps, or sleeps already.
            let _outbox = self.shared.outbox.lock();
            self.shared.outbox_changed.notify_one();
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
        let mut slots = Slots::new();
        match slots.run(self, &mut *wire) {
            Ok(()) => {
                if let Err(Failure(text)) = wire.finish() {
                    tracing::debug!("MPI could not be finalized: {text}");
                }
                let _ = self.ended.set(());
                self.announce();
            }
            Err(Failure(text)) => self.fail(&text),
        }
        // Memory of operations in flight is leaked, because MPI cannot return it after a failure.
        std::mem::forget(slots);
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

impl Slots {
    fn new() -> Self {
        Self {
            receives: (0..RECV_SLOTS).map(|_| Vec::new()).collect(),
            started: VecDeque::with_capacity(RECV_SLOTS),
            arrived: [None; RECV_SLOTS],
            sends: (0..MAX_SEND_SLOTS).map(|_| None).collect(),
            free: (0..MAX_SEND_SLOTS).collect(),
        }
    }

    /// Moves frames until the engine is to stop and all frames are sent.
    fn run(&mut self, shared: &EngineState, wire: &mut dyn Wire) -> Result<(), Failure> {
        for slot in 0..RECV_SLOTS {
            self.receive(slot, shared.ports.buffers.take(), wire)?;
        }
        let mut pause = Backoff::of_polling_thread();
        let mut done = Vec::new();
        let mut touched: HashSet<PortKey> = HashSet::new();
        let mut seen = Instant::now();
        loop {
            let mut moved = self.send_waiting(shared, wire)?;
            wire.poll(&mut done)?;
            for Completed { slot, source, bytes } in done.drain(..) {
                moved = true;
                if slot < RECV_SLOTS {
                    self.arrived[slot] = Some((source, bytes));
                } else if let Some((to, buffer)) = self.sends[slot - RECV_SLOTS].take() {
                    self.free.push(slot - RECV_SLOTS);
                    shared.send_buffers.put(buffer);
                    let mut outbox = shared.outbox.lock();
                    outbox.pending.entry(to).and_modify(|pending| *pending = pending.saturating_sub(1));
                    touched.extend(outbox.refused.drain());
                }
            }
            while let Some(slot) = self.started.front().copied()
                && let Some((source, bytes)) = self.arrived[slot].take()
            {
                self.started.pop_front();
                let frame = std::mem::take(&mut self.receives[slot]);
                self.receive(slot, shared.ports.buffers.take(), wire)?;
                touched.extend(shared.ports.take(source, frame, 0, bytes));
            }
            shared.ports.progress(touched.drain());
            if moved {
                pause = Backoff::of_polling_thread();
                continue;
            }
            let sending = self.free.len() < self.sends.len();
            let is_busy = || sending || shared.waiters.load(Ordering::Relaxed) > 0;
            if is_busy() && pause.pause(|| false) {
                continue;
            }
            let mut outbox = shared.outbox.lock();
            if outbox.finish && outbox.frames.is_empty() && !sending {
                return Ok(());
            }
            if outbox.frames.is_empty() || self.free.is_empty() {
                shared.outbox_changed.wait_for(&mut outbox, if is_busy() { SHORT_PAUSE } else { LONG_PAUSE });
            }
            drop(outbox);
            if seen.elapsed() > POLL_INTERVAL {
                seen = Instant::now();
                if shared.ports.somebody_departed() {
                    return Err(Failure("a process of the job has ended".to_owned()));
                }
            }
        }
    }

    fn send_waiting(&mut self, shared: &EngineState, wire: &mut dyn Wire) -> Result<bool, Failure> {
        let mut moved = false;
        while let Some(slot) = self.free.last().copied() {
            let Some((to, bytes)) = shared.outbox.lock().frames.pop_front() else { break };
            self.free.pop();
            let (_, data) = self.sends[slot].insert((to, bytes));
            // SAFETY: the buffer stays in the slot until MPI reports it as complete; otherwise it is leaked.
            unsafe { wire.send(RECV_SLOTS + slot, data, to)? };
            moved = true;
        }
        Ok(moved)
    }

    fn receive(&mut self, slot: usize, mut buffer: Vec<u8>, wire: &mut dyn Wire) -> Result<(), Failure> {
        buffer.resize(FRAME_BYTES, 0);
        self.receives[slot] = buffer;
        self.started.push_back(slot);
        // SAFETY: as in `send_waiting`.
        unsafe { wire.recv(slot, &mut self.receives[slot]) }
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
