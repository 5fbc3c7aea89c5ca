//! Counters of each rank: for Prometheus (`SMD_METRICS`), `smdrun --summary` and `smdrun top`.
//!
//! ```text
//!   operations ──add──> Counters, in a memfd ──read──> /proc/<pid>/fd/<n>: smdrun top, the host's first rank
//!                                  └──at the end──> rendezvous: smdrun --summary
//! ```
//!
//! - MET-1: an operation adds to atomic counters and does nothing else: no lock, no message, no allocation. So counting
//!   is always on, and nothing has to be set before a job starts to look at it.
//! - MET-2: counters lie in an anonymous segment that other processes of the same user map. It has no name, so a killed
//!   rank leaves nothing behind.
//! - MET-3: counters live as long as the process. A later `init()` continues with them.

mod exposition;
mod publisher;
pub mod ranks;
mod snapshot;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::collectives::{Call, Kind};
use crate::transport::shm::segment::SharedSegment;

pub use publisher::{start, stop};
pub use snapshot::Snapshot;
pub(crate) use snapshot::slowest;

/// The name of the segment, as `/proc/<pid>/fd` shows it.
const SEGMENT: &str = "opensmd-counters";
/// Distinguishes a segment of this layout from others.
const MAGIC: u64 = u64::from_le_bytes(*b"smdmet02");
/// Peers with a time of their own; waits for higher ranks are added to the last one.
pub const MAX_PEERS: usize = 4096;
/// Names of operations, in the order of their counters.
pub const OPERATIONS: [&str; 13] = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "window",
    "adasum",
    "send",
    "recv",
];
const SEND: usize = 11;
const RECV: usize = 12;
/// Slower paths, in the order of [`Fallback`].
pub const FALLBACKS: [&str; 18] = [
    "synchronous_call",
    "gradients_one_by_one",
    "tcp_without_mpi",
    "nccl_without_peers",
    "no_direct_reads",
    "through_host_memory",
    "copied_tensor",
    "recorded_before_run",
    "unlike_microbatches",
    "backward_not_split",
    "without_cuda_graph",
    "undivided_module",
    "without_prefetch",
    "reduced_after_backward",
    "dense_attention_bias",
    "without_xla",
    "unaligned_tensor",
    "far_stores",
];

/// A slower path that an operation or a step took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// A call in an `smp.step` function was synchronous: all ranks waited for the rank that ran it.
    SynchronousCall = 0,
    /// Gradients were reduced one by one instead of in buckets.
    GradientsOneByOne = 1,
    /// Hosts are connected by TCP; MPI would know faster networks, too.
    TcpWithoutMpi = 2,
    /// GPUs of one host cannot reach each other's memory.
    NcclWithoutPeers = 3,
    /// Processes of one host cannot read each other's memory.
    NoDirectReads = 4,
    /// An operation on CUDA tensors ran on copies in host memory.
    ThroughHostMemory = 5,
    /// An operation copied a large tensor, because its layout is not row-major or its memory is also an output.
    CopiedTensor = 6,
    /// A step was recorded completely before its first microbatch ran.
    RecordedBeforeRun = 7,
    /// Microbatches of a step went through the pipeline one after the other, because their calls differ.
    UnlikeMicrobatches = 8,
    /// A zero-bubble schedule ran a backward as a whole, because gradients of weights are computed with those of inputs.
    BackwardNotSplit = 9,
    /// A stage or a step ran without the CUDA graphs that were requested.
    WithoutCudaGraph = 10,
    /// The partition does not cut a module, because its cost could not be traced.
    UndividedModule = 11,
    /// Sharded parameters were gathered when they were needed, not ahead.
    WithoutPrefetch = 12,
    /// Gradients were reduced after the whole backward, although parts of them were complete before.
    ReducedAfterBackward = 13,
    /// Attention took a dense bias, because a fused kernel does not know the mask.
    DenseAttentionBias = 14,
    /// Keras compiled a step without XLA.
    WithoutXla = 15,
    /// GPUs loaded a large tensor element by element, because it begins inside of a vector.
    UnalignedTensor = 16,
    /// The cores of a host's ranks were found to share no cache.
    FarStores = 17,
}

/// The counters of one process. All fields are atomics, so any contents of the memory are a value.
#[repr(C)]
pub(crate) struct Counters {
    magic: AtomicU64,
    pid: AtomicU64,
    session: AtomicU64,
    rank: AtomicU64,
    size: AtomicU64,
    reducer_steps: AtomicU64,
    pipeline_steps: AtomicU64,
    calls: [AtomicU64; OPERATIONS.len()],
    bytes: [AtomicU64; OPERATIONS.len()],
    communication_ns: AtomicU64,
    exposed_ns: AtomicU64,
    stalls: AtomicU64,
    fallbacks: [AtomicU64; FALLBACKS.len()],
    segment_bytes: AtomicU64,
    /// The rank that a thread waits for now, plus one.
    waiting_for: AtomicU64,
    /// Nanoseconds that threads slept because a rank was missing.
    waited_ns: [AtomicU64; MAX_PEERS],
}

impl Counters {
    const BYTES: usize = size_of::<Self>();

    const fn new() -> Self {
        Self {
            magic: AtomicU64::new(0),
            pid: AtomicU64::new(0),
            session: AtomicU64::new(0),
            rank: AtomicU64::new(0),
            size: AtomicU64::new(0),
            reducer_steps: AtomicU64::new(0),
            pipeline_steps: AtomicU64::new(0),
            calls: [const { AtomicU64::new(0) }; OPERATIONS.len()],
            bytes: [const { AtomicU64::new(0) }; OPERATIONS.len()],
            communication_ns: AtomicU64::new(0),
            exposed_ns: AtomicU64::new(0),
            stalls: AtomicU64::new(0),
            fallbacks: [const { AtomicU64::new(0) }; FALLBACKS.len()],
            segment_bytes: AtomicU64::new(0),
            waiting_for: AtomicU64::new(0),
            waited_ns: [const { AtomicU64::new(0) }; MAX_PEERS],
        }
    }

    /// The counters in a mapped segment.
    fn in_segment(segment: &SharedSegment) -> &Self {
        // SAFETY: the segment has at least `BYTES` bytes, is aligned to a page, and is used as atomics only.
        unsafe { &*segment.start().cast::<Self>() }
    }

    /// The size of the segment: whole pages.
    fn segment_bytes() -> usize {
        Self::BYTES.next_multiple_of(4096)
    }
}

/// Counts until there is a segment, and where the system refuses one.
static PRIVATE: Counters = Counters::new();
static SHARED: OnceLock<SharedSegment> = OnceLock::new();

fn counters() -> &'static Counters {
    SHARED.get().map_or(&PRIVATE, Counters::in_segment)
}

fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

/// Shows the counters to other processes of this user, as those of `rank` in a session (MET-2).
pub(crate) fn share(session: u64, rank: usize, size: usize) {
    if SHARED.get().is_none() {
        match SharedSegment::create(SEGMENT, Counters::segment_bytes()) {
            Ok(segment) => {
                add(&Counters::in_segment(&segment).segment_bytes, PRIVATE.segment_bytes.load(Ordering::Relaxed));
                let _ = SHARED.set(segment);
            }
            Err(error) => tracing::warn!("`smdrun top` and `SMD_METRICS` do not see this rank: {}", error.text()),
        }
    }
    let counters = counters();
    let all = [
        (&counters.pid, u64::from(std::process::id())),
        (&counters.session, session),
        (&counters.rank, rank as u64),
        (&counters.size, size as u64),
        (&counters.magic, MAGIC),
    ];
    all.iter().for_each(|(word, value)| word.store(*value, Ordering::Release));
}

/// The place of a collective in [`OPERATIONS`]; none for those that only prepare or compare.
fn place(kind: Kind) -> Option<usize> {
    Some(match kind {
        Kind::AllReduce | Kind::AllReduceWindow => 0,
        Kind::Reduce => 1,
        Kind::Broadcast => 2,
        Kind::AllGather => 3,
        Kind::Gather => 4,
        Kind::Scatter => 5,
        Kind::ReduceScatter => 6,
        Kind::AllToAll => 7,
        Kind::Barrier => 8,
        Kind::Window => 9,
        Kind::Adasum => 10,
        // Later ones are counted.
        Kind::AllGatherRows | Kind::AllToAllRows | Kind::Presence | Kind::Poison => return None,
    })
}

/// Counts a collective that this member has begun.
pub(crate) fn note_call(call: &Call) {
    let Some(place) = place(call.kind) else { return };
    let elems = if call.sent.is_empty() { call.elems } else { call.sent.iter().sum() };
    let counters = counters();
    add(&counters.calls[place], 1);
    add(&counters.bytes[place], (elems * call.dtype.size()) as u64);
}

/// Counts a message between two members.
pub(crate) fn note_message(sends: bool, bytes: usize) {
    let counters = counters();
    let place = if sends { SEND } else { RECV };
    add(&counters.calls[place], 1);
    add(&counters.bytes[place], bytes as u64);
}

/// Adds the time that an operation took, with its waits for other members.
pub(crate) fn note_communication(time: Duration) {
    add(&counters().communication_ns, time.as_nanos() as u64);
}

/// Adds time in which a thread of the script could not continue because of communication.
pub fn note_exposed(time: Duration) {
    add(&counters().exposed_ns, time.as_nanos() as u64);
}

/// Counts a stall that was reported, or a wait that reached its limit.
pub(crate) fn note_stall() {
    add(&counters().stalls, 1);
}

/// Counts a slower path.
pub fn note_fallback(fallback: Fallback) {
    add(&counters().fallbacks[fallback as usize], 1);
}

/// Counts a slower path by its name in [`FALLBACKS`]. Returns whether there is one.
pub fn note_fallback_named(name: &str) -> bool {
    let place = FALLBACKS.iter().position(|known| *known == name);
    place.iter().for_each(|place| add(&counters().fallbacks[*place], 1));
    place.is_some()
}

/// Counts a backward whose gradients are reduced.
pub(crate) fn note_reducer_step() {
    add(&counters().reducer_steps, 1);
}

/// Counts a step of a pipeline.
pub(crate) fn note_pipeline_step() {
    add(&counters().pipeline_steps, 1);
}

/// Shared memory that this process has created, or has freed.
pub(crate) fn note_segment(bytes: usize, created: bool) {
    let counter = &counters().segment_bytes;
    match created {
        true => add(counter, bytes as u64),
        false => drop(counter.fetch_sub(bytes as u64, Ordering::Relaxed)),
    }
}

/// Adds the time until it is dropped to the exposed time ([`note_exposed`]).
#[derive(Debug)]
#[must_use = "the time ends when the value is dropped"]
pub struct Exposed(Instant);

/// Begins a time in which a thread of the script waits for communication.
pub fn exposed() -> Exposed {
    Exposed(Instant::now())
}

impl Drop for Exposed {
    fn drop(&mut self) {
        note_exposed(self.0.elapsed());
    }
}

/// The sleeps of one wait for other ranks.
#[derive(Default)]
pub(crate) struct Sleeps {
    slept: bool,
}

impl Sleeps {
    /// Sleeps, and adds the time to the first of the `missing` ranks.
    pub(crate) fn sleep(&mut self, missing: impl FnOnce() -> Vec<usize>, sleep: impl FnOnce()) {
        let Some(peer) = missing().first().copied() else { return sleep() };
        let counters = counters();
        self.slept = true;
        counters.waiting_for.store(peer as u64 + 1, Ordering::Relaxed);
        let start = Instant::now();
        sleep();
        add(&counters.waited_ns[peer.min(MAX_PEERS - 1)], start.elapsed().as_nanos() as u64);
    }
}

impl Drop for Sleeps {
    fn drop(&mut self) {
        if self.slept {
            counters().waiting_for.store(0, Ordering::Relaxed);
        }
    }
}
