//! Shared memory between the processes (or threads) of one host.
//!
//! The group's leader, member 0, creates one segment ([`segment`]); the others find it through the job's store and
//! map it. It contains ([`layout`]) rings for messages ([`ring`]) and the memory that [`SharedMemory`] provides for
//! collectives:
//!
//! - *Arrivals*: one counter of the whole group. Phase k is complete when the counter is k times the number of
//!   members.
//! - *Arenas*: memory that one member writes and all read. Each phase has a region of it ([`SharedMemory::reserve`]),
//!   at the same offset on every member.
//!
//! Invariants:
//! - SHM-1: a member writes its region of phase k before its arrival at k, and reads the others' regions of phase k
//!   between its arrivals at k and k+1. In the same interval it writes the results that it computes from them to the
//!   same offset of its results area, which the others read between their arrivals at k+1 and k+2.
//! - SHM-2: regions of phases k and k+1 never overlap; those of k and k+2 may. That is safe: a member writes for
//!   phase k+2 after phase k+1 is complete, that is after all arrivals at k+1, which by SHM-1 follow all reads of
//!   phase k. The same holds for results, one phase later.
//! - SHM-3: a member may arrive without waiting for the others ([`SharedMemory::arrive`]), but waits before it
//!   arrives again.
//!
//! Note "rotation". Two regions would suffice, but regions rotate through an arena that is larger than a core's own
//! cache. A line that a peer has just read is still in that peer's cache, and invalidating it there costs more than
//! fetching a line from the shared cache, to which the peer has evicted it by the time the rotation returns to it.
//! All-reduce of 64 KiB to 4 MiB between two processes takes less than half the time with the rotation.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::mailbox::{Mailbox, Messages};
use super::{Backoff, Members, POLL_INTERVAL, Transport, Wait};
use crate::error::{Code, Error, Result};
use crate::metrics::Sleeps;
use crate::world::{Monitor, Store};

mod arrivals;
mod counts;
pub(crate) mod event;
pub(crate) mod layout;
pub(crate) mod member_memory;
mod placement;
mod ring;
pub(crate) mod segment;

use arrivals::Arrivals;
use counts::Counts;
use event::FutexEvent;
use layout::{ARENA_BYTES, CALL_WORDS, RING_BYTES, RING_SLOTS, SegmentLayout};
use member_memory::MemberMemory;
use placement::core;
pub(super) use ring::Rings;
use segment::SharedSegment;

/// The transport of a group whose members share one memory segment on one host.
pub struct ShmTransport {
    memory: Arc<SharedMemory>,
    mailbox: Mailbox<Rings>,
}

impl ShmTransport {
    /// Joins the group `name`, which every member calls with the same `members.ranks`. A name is used once in the
    /// lifetime of `store`.
    ///
    /// # Errors
    /// [`Error::Timeout`] or [`Error::PeerFailed`] if a member does not join; [`Error::Io`] if the system refuses
    /// shared memory.
    pub fn join(
        name: &str,
        members: Members,
        store: &dyn Store,
        monitor: &Monitor,
        timeout: Duration,
    ) -> Result<Arc<Self>> {
        let memory = SharedMemory::join(name, &members, store, monitor, timeout)?;
        let during = || format!("joining group `{name}`");
        if let Some(direct) = MemberMemory::connect(&memory, &joining(&during, &members, monitor, timeout))? {
            let _ = memory.direct.set(direct);
        }
        let mailbox = Mailbox::new(Rings::new(memory.clone()), members);
        Ok(Arc::new(Self { memory, mailbox }))
    }
}

impl SharedMemory {
    /// Maps the memory of the group `name`; see [`ShmTransport::join`].
    pub(crate) fn join(
        name: &str,
        members: &Members,
        store: &dyn Store,
        monitor: &Monitor,
        timeout: Duration,
    ) -> Result<Arc<Self>> {
        super::wake_up::measure_once();
        let start = Instant::now();
        let leader = members.ranks[0];
        let layout = SegmentLayout::new(members.size());
        let prefix = format!("shm/{name}/");
        let key = format!("{prefix}segment");
        let segment;
        if members.me == 0 {
            segment = SharedSegment::create(&format!("opensmd-{name}"), layout.bytes())?;
            let nonce = getrandom::u64().map_err(|error| Error::Internal(format!("no random number: {error}")))? | 1;
            // SAFETY: the header lies inside the new segment, aligned; no other process knows the segment yet.
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
            segment = SharedSegment::attach([pid, fd, bytes], layout.bytes())
                .map_err(|error| explained(error, leader, monitor, &format!("joining group `{name}`")))?;
            // SAFETY: the header lies inside the segment, whose size was checked, aligned.
            let found = unsafe { segment.start().add(layout::header::NONCE).cast::<u64>().read_volatile() };
            if found != nonce {
                return Err(Error::Rendezvous(format!(
                    "`/proc/{pid}/fd/{fd}` is not the shared memory of rank {leader}: are all ranks in one PID namespace?"
                )));
            }
        }
        let mut memory = Self {
            segment,
            layout,
            members: members.clone(),
            phase: AtomicU32::new(0),
            cursor: AtomicUsize::new(0),
            rounds: AtomicUsize::new(0),
            direct: OnceLock::new(),
        };
        let during = || format!("joining group `{name}`");
        let wait = Wait { start, deadline: start + timeout, ..joining(&during, members, monitor, timeout) };
        memory.sync(&wait)?;
        if members.me == 0 {
            // All members have mapped the segment.
            memory.segment.close_descriptor();
            store.remove_prefix(&prefix)?;
        }
        Ok(Arc::new(memory))
    }
}

/// The conditions that end the waits of a group that is being made.
fn joining<'a>(
    during: &'a dyn Fn() -> String,
    members: &'a Members,
    monitor: &'a Monitor,
    timeout: Duration,
) -> Wait<'a> {
    static NOT_CLOSED: OnceLock<String> = OnceLock::new();
    let start = Instant::now();
    let (deadline, drain_timeout) = (start + timeout, Duration::ZERO);
    Wait { during, start, deadline, monitor, members: &members.ranks, drain_timeout, closed: &NOT_CLOSED }
}

/// When the leader dies, its descriptor is closed, and opening it may fail before its death is reported: waits a
/// moment for the report.
fn explained(error: Error, leader: usize, monitor: &Monitor, during: &str) -> Error {
    const DEATH_REPORT_TIMEOUT: Duration = Duration::from_secs(2);
    let start = Instant::now();
    while error.code() == Code::Io && start.elapsed() < DEATH_REPORT_TIMEOUT {
        let seen = monitor.generation();
        if let Err(departed) = monitor.check(&[leader], during) {
            return departed;
        }
        monitor.wait_change(seen, DEATH_REPORT_TIMEOUT / 20);
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

    fn messages(&self) -> &dyn Messages {
        &self.mailbox
    }

    fn shared(&self) -> Option<&SharedMemory> {
        Some(&self.memory)
    }
}

/// Number of phases between two checks of the members' cores (note "three and one").
const PHASES_PER_CORE_CHECK: u32 = 64;

/// The shared memory that a group's collectives use: arenas, regions and arrival counters. One operation of the group
/// uses it at a time.
pub struct SharedMemory {
    segment: SharedSegment,
    layout: SegmentLayout,
    members: Members,
    /// The phase of this member's last arrival.
    phase: AtomicU32,
    /// The lowest offset of the next region; equal on all members.
    cursor: AtomicUsize,
    /// How often regions have rotated through the arenas.
    rounds: AtomicUsize,
    /// Access to the members' own memory, if the system permits it to all.
    direct: OnceLock<MemberMemory>,
}

impl SharedMemory {
    /// Number of members.
    pub(crate) fn size(&self) -> usize {
        self.members.size()
    }

    /// This member's rank in the group.
    pub(crate) fn me(&self) -> usize {
        self.members.me
    }

    /// The phase of this member's last arrival.
    pub(crate) fn phase(&self) -> u32 {
        self.phase.load(Ordering::Relaxed)
    }

    /// Arrives at the next phase. Earlier writes of this member are visible to every member that sees the phase
    /// complete.
    pub(crate) fn arrive(&self) {
        let phase = self.phase().wrapping_add(1);
        self.phase.store(phase, Ordering::Relaxed);
        self.word(self.layout.phase(self.me())).store(phase, Ordering::Relaxed);
        self.word(self.layout.core(self.me())).store(core(), Ordering::Relaxed);
        if phase.is_multiple_of(PHASES_PER_CORE_CHECK) && self.size() > super::cores() {
            let seen = |rank| self.word(self.layout.core(rank)).load(Ordering::Relaxed);
            placement::spread(self.me(), seen, self.size());
        }
        self.arrivals().arrive(phase);
    }

    /// Waits until every member has arrived at this member's phase.
    pub(crate) fn await_all(&self, wait: &Wait<'_>) -> Result<()> {
        let (arrivals, phase) = (self.arrivals(), self.phase());
        let mut backoff = Backoff::new(self.size(), true);
        let mut sleeps = Sleeps::default();
        loop {
            let Err(seen) = arrivals.poll(phase) else { return Ok(()) };
            if backoff.pause(|| self.shares_core()) {
                continue;
            }
            if let Err(error) = wait.check(|| self.missing()).and_then(|()| self.check_withdrawn(wait)) {
                return arrivals.poll(phase).map_err(|_| error);
            }
            sleeps.sleep(|| self.missing(), || arrivals.event.sleep(seen, POLL_INTERVAL));
        }
    }

    /// [`SharedMemory::arrive`] and [`SharedMemory::await_all`].
    pub(crate) fn sync(&self, wait: &Wait<'_>) -> Result<()> {
        self.arrive();
        self.await_all(wait)
    }

    /// Bytes of every arena through which regions rotate. All members' arenas together are larger than a core's own
    /// cache (see the note "rotation"), but not much: with 1 MiB each, 4 processes on 2 cores need 0.6 times the time
    /// for 4 MiB as with 4 MiB each.
    fn rotation_bytes(&self) -> usize {
        (2 * ARENA_BYTES / self.size()).clamp(ARENA_BYTES / 2, ARENA_BYTES) & !63
    }

    /// The largest region.
    pub(crate) fn region_limit(&self) -> usize {
        self.rotation_bytes() / 4
    }

    /// Returns the offset of the next phase's region of `bytes` bytes, at most [`SharedMemory::region_limit`]. Called
    /// once for each phase, with the same `bytes` on all members.
    pub(crate) fn reserve(&self, bytes: usize) -> usize {
        assert!(bytes <= self.region_limit(), "a region of {bytes} bytes exceeds {}", self.region_limit());
        let bytes = bytes.next_multiple_of(64);
        let cursor = self.cursor.load(Ordering::Relaxed);
        // A region that does not fit behind the last one starts at 0. It does not overlap the last one, because both
        // are at most a quarter of the arena (SHM-2).
        let start = if cursor + bytes <= self.rotation_bytes() { cursor } else { 0 };
        if start < cursor {
            self.rounds.fetch_add(1, Ordering::Relaxed);
        }
        self.cursor.store(start + bytes, Ordering::Relaxed);
        start
    }

    /// Whether the pages of all regions exist: the first access to a page takes longer than a later one.
    pub(crate) fn has_touched_all(&self) -> bool {
        self.rounds.load(Ordering::Relaxed) > 0
    }

    /// Restarts the rotation. If members' calls differed, they may have reserved different sizes for that phase; its
    /// regions are not used, so all members can restart.
    pub(crate) fn reset_regions(&self) {
        self.cursor.store(0, Ordering::Relaxed);
    }

    /// The region of `rank` at `offset`.
    pub(crate) fn arena(&self, rank: usize, offset: usize) -> *mut u8 {
        debug_assert!(offset < ARENA_BYTES);
        self.at(self.layout.arena(rank) + offset)
    }

    /// The results of `rank` beside the region at `offset`.
    pub(crate) fn results(&self, rank: usize, offset: usize) -> *mut u8 {
        debug_assert!(offset < ARENA_BYTES);
        self.at(self.layout.results(rank) + offset)
    }

    /// [`layout::MESSAGE_BYTES`] bytes of text that belong to the call.
    pub(crate) fn message(&self, rank: usize, phase: u32) -> *mut u8 {
        self.at(self.layout.message(rank, phase as usize % 2))
    }

    /// The words that describe the call of `rank` at `phase`.
    pub(crate) fn call(&self, rank: usize, phase: u32) -> *mut [u64; CALL_WORDS] {
        self.at(self.layout.call(rank, phase as usize % 2)).cast()
    }

    /// Access to the members' own memory, if the system permits it to all.
    pub(crate) fn direct(&self) -> Option<&MemberMemory> {
        self.direct.get()
    }

    /// A word for the times of the two paths of a call of `rank` at `phase`, and one for each member for addresses.
    pub(crate) fn direct_words(&self, rank: usize, phase: u32) -> *mut u64 {
        self.at(self.layout.direct(rank, phase as usize % 2)).cast()
    }

    /// Tells the others that this member fails in an operation in which they may still read its memory, because of
    /// `culprit`, a global rank.
    pub(crate) fn withdraw(&self, culprit: usize) {
        self.word(self.layout.withdrawn(self.me())).store(culprit as u32 + 1, Ordering::SeqCst);
        // Before the caller changes what others read.
        fence(Ordering::SeqCst);
    }

    /// The global rank that made a member withdraw, if one has; called after this member's reads.
    pub(crate) fn withdrawn(&self) -> Option<usize> {
        fence(Ordering::SeqCst);
        let culprit = |rank| self.word(self.layout.withdrawn(rank)).load(Ordering::SeqCst);
        (0..self.size()).map(culprit).find(|culprit| *culprit != 0).map(|culprit| culprit as usize - 1)
    }

    /// The error of an operation in which a member has withdrawn.
    pub(crate) fn check_withdrawn(&self, wait: &Wait<'_>) -> Result<()> {
        let Some(rank) = self.withdrawn() else { return Ok(()) };
        Err(Error::PeerFailed {
            rank,
            how: "failed, or could not be read, in an operation in which ranks read each other's memory".into(),
            me: self.members.ranks[self.me()],
            during: (wait.during)(),
        })
    }

    /// Space for two words for each member that belong to the call.
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

    fn arrivals(&self) -> Arrivals<'_> {
        let event =
            FutexEvent { counter: self.word(layout::header::ARRIVED), sleepers: self.word(layout::header::SLEEPERS) };
        Arrivals { event, size: self.size() as u32 }
    }

    /// Global ranks that have not arrived at this member's phase.
    fn missing(&self) -> Vec<usize> {
        let phase = self.phase();
        let late =
            |rank: &usize| (self.word(self.layout.phase(*rank)).load(Ordering::Relaxed).wrapping_sub(phase) as i32) < 0;
        (0..self.size()).filter(late).map(|rank| self.members.ranks[rank]).collect()
    }

    /// Whether a member that has not arrived was last seen on this core, so that it can only arrive if this thread
    /// yields. The result may be wrong, because threads move; it is only used to choose how to wait.
    fn shares_core(&self) -> bool {
        let (phase, own) = (self.phase(), core());
        (0..self.size()).any(|rank| {
            let late = (self.word(self.layout.phase(rank)).load(Ordering::Relaxed).wrapping_sub(phase) as i32) < 0;
            late && self.word(self.layout.core(rank)).load(Ordering::Relaxed) == own
        })
    }

    fn doorbell(&self, rank: usize) -> FutexEvent<'_> {
        FutexEvent {
            counter: self.word(self.layout.doorbell(rank)),
            sleepers: self.word(self.layout.doorbell_sleepers(rank)),
        }
    }

    fn ring_doorbell(&self, rank: usize) {
        let doorbell = self.doorbell(rank);
        doorbell.add();
        doorbell.wake();
    }

    /// Counts and slots of the ring between two members.
    fn ring(&self, from: usize, to: usize) -> (Counts<'_, RING_SLOTS>, *mut u8) {
        let start = self.layout.ring(from, to);
        debug_assert!(start + RING_BYTES <= self.layout.bytes());
        // SAFETY: inside the segment, aligned to 8 by the layout, and only ever used as atomics.
        unsafe {
            let at = self.at(start);
            let (head, tail) = (AtomicU64::from_ptr(at.cast()), AtomicU64::from_ptr(at.add(128).cast()));
            (Counts { head, tail }, at.add(256))
        }
    }
}
