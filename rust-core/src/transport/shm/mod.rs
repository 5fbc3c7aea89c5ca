//! Shared memory between the processes (or threads) of one host.
//!
//! The group's leader, member 0, makes one segment ([`segment`]); the others find it through the job's store and
//! attach. In it ([`layout`]) lie rings for messages ([`ring`]) and what [`SharedMemory`] offers to the collectives:
//!
//! - *Arrivals*: one counter of the whole group. Phase k is over when it has reached k times the number of members.
//! - *Arenas*: memory that one member writes and all read, in two parities by phase.
//!
//! Invariants:
//! - SHM-1: between its arrival at phase k and its arrival at phase k+1 a member reads arenas of phase k only, and
//!   results written before phase k.
//! - SHM-2: so what a member writes for phase k+2 into the memory of phase k disturbs nobody: it writes after phase
//!   k+1 is over, that is after everybody's arrival at k+1, which by SHM-1 follows everybody's reads of phase k.
//! - SHM-3: a member may arrive without waiting for the others ([`SharedMemory::arrive`]), but waits before it
//!   arrives again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::mailbox::{Link as _, Mailbox, Message};
use super::{Backoff, Members, NAP, Tag, Transport, Wait};
use crate::error::{Code, Error, Result};
use crate::world::{Monitor, Store};

pub(crate) mod event;
pub(crate) mod layout;
mod ring;
pub(crate) mod segment;

use event::Event;
use layout::{CALL_WORDS, Layout, RING_BYTES};
use segment::Segment;

/// The transport over one segment; see the module's text.
pub struct ShmTransport {
    memory: Arc<SharedMemory>,
    mailbox: Mailbox<ring::Rings>,
}

impl ShmTransport {
    /// Joins the group `name`, which every member calls with the same `members.ranks`. The name is used once in the
    /// life of `store`.
    ///
    /// # Errors
    /// [`Error::Timeout`] or [`Error::PeerFailed`] when a member does not come; [`Error::Io`] when the system refuses
    /// shared memory.
    pub fn join(
        name: &str,
        members: Members,
        store: &dyn Store,
        monitor: &Monitor,
        timeout: Duration,
    ) -> Result<Arc<Self>> {
        let start = Instant::now();
        let leader = members.ranks[0];
        let layout = Layout::new(members.size());
        let prefix = format!("shm/{name}/");
        let key = format!("{prefix}segment");
        let segment;
        if members.me == 0 {
            segment = Segment::create(&format!("opensmd-{name}"), layout.bytes())?;
            let nonce = getrandom::u64().map_err(|error| Error::Internal(format!("no random number: {error}")))? | 1;
            // SAFETY: the header lies inside the new segment, aligned; nobody else knows the segment yet.
            unsafe { segment.start().add(layout::header::NONCE).cast::<u64>().write(nonce) };
            let [pid, fd, bytes] = segment.address();
            let value: Vec<u8> = [pid, fd, bytes, nonce].iter().flat_map(|word| word.to_le_bytes()).collect();
            store.set(&key, &value)?;
        } else {
            let value = store.get(&key, &[leader], timeout)?;
            let words: Vec<u64> = value.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
            let [pid, fd, bytes, nonce] = words[..] else {
                return Err(Error::Rendezvous(format!("rank {leader} announced its shared memory as {value:?}")));
            };
            segment = Segment::attach([pid, fd, bytes], layout.bytes())
                .map_err(|error| explained(error, leader, monitor, &format!("joining group `{name}`")))?;
            // SAFETY: the header lies inside the segment, whose size was checked, aligned.
            let found = unsafe { segment.start().add(layout::header::NONCE).cast::<u64>().read_volatile() };
            if found != nonce {
                return Err(Error::Rendezvous(format!(
                    "`/proc/{pid}/fd/{fd}` is not the shared memory of rank {leader}: are all ranks in one PID namespace?"
                )));
            }
        }
        let mut memory = SharedMemory { segment, layout, members: members.clone(), phase: AtomicU32::new(0) };
        let during = || format!("joining group `{name}`");
        let closed = Default::default();
        let wait = Wait {
            during: &during,
            start,
            deadline: start + timeout,
            monitor,
            members: &members.ranks,
            closed: &closed,
        };
        memory.sync(&wait)?;
        if members.me == 0 {
            // All have attached.
            memory.segment.seal();
            store.remove_prefix(&prefix)?;
        }
        let memory = Arc::new(memory);
        let mailbox = Mailbox::new(ring::Rings::new(memory.clone()), members);
        Ok(Arc::new(Self { memory, mailbox }))
    }
}

/// A leader that died took its descriptor along, and the failure to open it may come before the news of the death:
/// waits a moment for them.
fn explained(error: Error, leader: usize, monitor: &Monitor, during: &str) -> Error {
    const NEWS_TIME: Duration = Duration::from_secs(2);
    let start = Instant::now();
    while error.code() == Code::Io && start.elapsed() < NEWS_TIME {
        let seen = monitor.generation();
        if let Err(departed) = monitor.check(&[leader], during) {
            return departed;
        }
        monitor.wait_change(seen, NEWS_TIME / 20);
    }
    error
}

impl Transport for ShmTransport {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn members(&self) -> &Members {
        &self.memory.members
    }

    unsafe fn post_send(&self, to: usize, tag: Tag, data: *const u8, bytes: usize) -> Message {
        // SAFETY: the caller's promise is the callee's.
        unsafe { self.mailbox.post_send(to, tag, data, bytes) }
    }

    unsafe fn post_recv(&self, from: Option<usize>, tag: Tag, data: *mut u8, bytes: usize) -> Message {
        // SAFETY: the caller's promise is the callee's.
        unsafe { self.mailbox.post_recv(from, tag, data, bytes) }
    }

    fn progress(&self) {
        self.mailbox.progress();
    }

    fn cancel(&self, message: &Message) {
        self.mailbox.cancel(message);
    }

    fn doorbell(&self) -> u32 {
        self.mailbox.link.doorbell()
    }

    fn doze(&self, seen: u32, limit: Duration) {
        self.mailbox.link.doze(seen, limit);
    }

    fn ring(&self) {
        self.mailbox.link.ring_own();
    }

    fn shared(&self) -> Option<&SharedMemory> {
        Some(&self.memory)
    }
}

/// The memory that all members of a group see; see the module's text. One operation of the group uses it at a time.
pub struct SharedMemory {
    segment: Segment,
    layout: Layout,
    members: Members,
    /// The phase of this member's last arrival.
    phase: AtomicU32,
}

impl SharedMemory {
    /// Number of members.
    pub(crate) fn size(&self) -> usize {
        self.members.size()
    }

    /// This member.
    pub(crate) fn me(&self) -> usize {
        self.members.me
    }

    /// The phase of this member's last arrival.
    pub(crate) fn phase(&self) -> u32 {
        self.phase.load(Ordering::Relaxed)
    }

    /// Arrives at the next phase: what this member wrote before is visible to whoever sees the phase over.
    pub(crate) fn arrive(&self) {
        let phase = self.phase().wrapping_add(1);
        self.phase.store(phase, Ordering::Relaxed);
        self.word(self.layout.phase(self.me())).store(phase, Ordering::Relaxed);
        let arrivals = self.arrivals();
        // Each arrival is a read-modify-write of the same word, so they form one release sequence: who reads the
        // last value has everything that any member wrote before its own arrival.
        if arrivals.add() == self.target() {
            arrivals.wake();
        }
    }

    /// Waits until every member has arrived at this member's phase.
    pub(crate) fn await_all(&self, wait: &Wait<'_>) -> Result<()> {
        let arrivals = self.arrivals();
        let target = self.target();
        // A peer can be at most one phase ahead, so the distance is small and the sign survives wrapping.
        let over = |value: u32| value.wrapping_sub(target) as i32 >= 0;
        let mut backoff = Backoff::new(self.size());
        loop {
            let seen = arrivals.value();
            if over(seen) {
                return Ok(());
            }
            if backoff.pause() {
                continue;
            }
            if let Err(error) = wait.check(|| self.missing()) {
                return if over(arrivals.value()) { Ok(()) } else { Err(error) };
            }
            arrivals.sleep(seen, NAP);
        }
    }

    /// [`SharedMemory::arrive`] and [`SharedMemory::await_all`].
    pub(crate) fn sync(&self, wait: &Wait<'_>) -> Result<()> {
        self.arrive();
        self.await_all(wait)
    }

    /// [`layout::ARENA_BYTES`] bytes that `rank` writes before `phase` and all read after it.
    pub(crate) fn arena(&self, rank: usize, phase: u32) -> *mut u8 {
        self.at(self.layout.arena(rank, phase as usize % 2))
    }

    /// [`layout::ARENA_BYTES`] bytes that `rank` writes between `phase` and the next, and all read in the next.
    pub(crate) fn results(&self, rank: usize, phase: u32) -> *mut u8 {
        self.at(self.layout.results(rank, phase as usize % 2))
    }

    /// The words that describe what `rank` calls at `phase`.
    pub(crate) fn call(&self, rank: usize, phase: u32) -> *mut [u64; CALL_WORDS] {
        self.at(self.layout.call(rank, phase as usize % 2)).cast()
    }

    /// Room for two words a member that go with the call.
    pub(crate) fn rows(&self, rank: usize, phase: u32) -> *mut u64 {
        self.at(self.layout.rows(rank, phase as usize % 2)).cast()
    }

    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.layout.bytes());
        // SAFETY: the layout's offsets lie inside the segment, which has the layout's size.
        unsafe { self.segment.start().add(offset) }
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: inside the segment, aligned by the layout, and only ever used as an atomic.
        unsafe { AtomicU32::from_ptr(self.at(offset).cast()) }
    }

    fn arrivals(&self) -> Event<'_> {
        Event { counter: self.word(layout::header::ARRIVED), sleepers: self.word(layout::header::SLEEPERS) }
    }

    fn target(&self) -> u32 {
        self.phase().wrapping_mul(self.size() as u32)
    }

    /// Global ranks that have not arrived at this member's phase.
    fn missing(&self) -> Vec<usize> {
        let phase = self.phase();
        let late =
            |rank: &usize| (self.word(self.layout.phase(*rank)).load(Ordering::Relaxed).wrapping_sub(phase) as i32) < 0;
        (0..self.size()).filter(late).map(|rank| self.members.ranks[rank]).collect()
    }

    fn doorbell(&self, rank: usize) -> Event<'_> {
        Event { counter: self.word(self.layout.doorbell(rank)), sleepers: self.word(self.layout.dozers(rank)) }
    }

    fn ring_doorbell(&self, rank: usize) {
        let doorbell = self.doorbell(rank);
        doorbell.add();
        doorbell.wake();
    }

    /// Head, tail and slots of the ring between two members.
    fn ring(&self, from: usize, to: usize) -> (&AtomicU64, &AtomicU64, *mut u8) {
        let start = self.layout.ring(from, to);
        debug_assert!(start + RING_BYTES <= self.layout.bytes());
        // SAFETY: inside the segment, aligned to 8 by the layout, and only ever used as atomics.
        unsafe {
            let at = self.at(start);
            (AtomicU64::from_ptr(at.cast()), AtomicU64::from_ptr(at.add(128).cast()), at.add(256))
        }
    }
}
