//! The counters of a rank at one moment.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Counters, FALLBACKS, MAGIC, MAX_PEERS, OPERATIONS, counters};

/// A copy of one process's counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The process.
    pub pid: u64,
    /// The session that it joined last; equal on all its ranks.
    pub session: u64,
    /// Global rank.
    pub rank: u64,
    /// Number of ranks.
    pub size: u64,
    /// Backwards whose gradients were reduced.
    pub reducer_steps: u64,
    /// Steps of pipelines.
    pub pipeline_steps: u64,
    /// For each of [`OPERATIONS`].
    pub calls: Vec<u64>,
    /// For each of [`OPERATIONS`].
    pub bytes: Vec<u64>,
    /// Time in operations, with their waits, on any thread.
    pub communication_ns: u64,
    /// Time in which threads of the script waited for communication.
    pub exposed_ns: u64,
    /// Stalls that were reported, and waits that reached their limit.
    pub stalls: u64,
    /// For each of [`FALLBACKS`].
    pub fallbacks: Vec<u64>,
    /// Shared memory that the process holds.
    pub segment_bytes: u64,
    /// The rank that a thread waits for at this moment.
    pub waiting_for: Option<u64>,
    /// Ranks that threads slept for, and the nanoseconds.
    pub waited_ns: Vec<(u64, u64)>,
}

impl Snapshot {
    /// The counters of this process.
    pub fn of_this_process() -> Self {
        Self::of(counters())
    }

    /// The counters in a segment of another process, if it has joined a session.
    pub(super) fn of_another(counters: &Counters) -> Option<Self> {
        (counters.magic.load(Ordering::Acquire) == MAGIC).then(|| Self::of(counters))
    }

    fn of(counters: &Counters) -> Self {
        let get = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let all = |words: &[AtomicU64]| words.iter().map(get).collect::<Vec<_>>();
        let size = get(&counters.size);
        let peers = usize::try_from(size).unwrap_or(MAX_PEERS).min(MAX_PEERS);
        let waited = counters.waited_ns[..peers].iter().enumerate().map(|(rank, time)| (rank as u64, get(time)));
        Self {
            pid: get(&counters.pid),
            session: get(&counters.session),
            rank: get(&counters.rank),
            size,
            reducer_steps: get(&counters.reducer_steps),
            pipeline_steps: get(&counters.pipeline_steps),
            calls: all(&counters.calls),
            bytes: all(&counters.bytes),
            communication_ns: get(&counters.communication_ns),
            exposed_ns: get(&counters.exposed_ns),
            stalls: get(&counters.stalls),
            fallbacks: all(&counters.fallbacks),
            segment_bytes: get(&counters.segment_bytes),
            waiting_for: get(&counters.waiting_for).checked_sub(1),
            waited_ns: waited.filter(|(_, time)| *time > 0).collect(),
        }
    }

    /// Steps of whatever kind the script has most of.
    pub fn steps(&self) -> u64 {
        self.reducer_steps.max(self.pipeline_steps)
    }

    /// Collectives and messages.
    pub fn total_calls(&self) -> u64 {
        self.calls.iter().sum()
    }

    /// Bytes of all collectives and messages.
    pub fn total_bytes(&self) -> u64 {
        self.bytes.iter().sum()
    }

    /// See [`Snapshot::exposed_ns`].
    pub fn exposed(&self) -> Duration {
        Duration::from_nanos(self.exposed_ns)
    }

    /// See [`Snapshot::communication_ns`].
    pub fn communication(&self) -> Duration {
        Duration::from_nanos(self.communication_ns)
    }

    /// The operations that were called: name, calls, bytes.
    pub(super) fn operations(&self) -> impl Iterator<Item = (&'static str, u64, u64)> {
        OPERATIONS.iter().zip(self.calls.iter().zip(&self.bytes)).map(|(name, (calls, bytes))| (*name, *calls, *bytes))
    }

    /// The slower paths: name, times.
    pub fn fallback_counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        FALLBACKS.iter().zip(&self.fallbacks).map(|(name, times)| (*name, *times))
    }
}

/// The rank for which the others slept longest, with that time over all of them. Without such sleeps, the rank that
/// waited least itself, if another one waited noticeably longer: the others waited for it in negotiations.
pub(crate) fn slowest(snapshots: &[Snapshot]) -> Option<(u64, Duration)> {
    let mut waited = std::collections::BTreeMap::<u64, u64>::new();
    for (rank, time) in snapshots.iter().flat_map(|snapshot| &snapshot.waited_ns) {
        *waited.entry(*rank).or_default() += time;
    }
    let longest = waited.into_iter().max_by_key(|(_, time)| *time);
    let least = snapshots.iter().min_by_key(|snapshot| snapshot.exposed_ns)?;
    let most = snapshots.iter().map(|snapshot| snapshot.exposed_ns).max()?;
    let spread = most - least.exposed_ns;
    match longest {
        Some((rank, time)) if time >= spread / 2 => Some((rank, Duration::from_nanos(time))),
        _ if spread > 0 => Some((least.rank, Duration::from_nanos(spread))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(rank: u64, exposed_ns: u64, waited_ns: &[(u64, u64)]) -> Snapshot {
        Snapshot { rank, size: 3, exposed_ns, waited_ns: waited_ns.to_vec(), ..Snapshot::default() }
    }

    #[test]
    fn the_rank_that_others_wait_for_is_slowest() {
        let all = [rank(0, 900, &[(1, 5), (2, 800)]), rank(1, 800, &[(2, 700)]), rank(2, 3, &[])];
        assert_eq!(slowest(&all), Some((2, Duration::from_nanos(1500))));
    }

    #[test]
    fn without_sleeps_the_one_that_waits_least_is() {
        let all = [rank(0, 900, &[]), rank(1, 10, &[]), rank(2, 800, &[(0, 1)])];
        assert_eq!(slowest(&all), Some((1, Duration::from_nanos(890))));
        assert_eq!(slowest(&[rank(0, 5, &[])]), None);
        assert_eq!(slowest(&[]), None);
    }
}
