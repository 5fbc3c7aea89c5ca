//! Two threads that watch the operations in flight on devices. One looks for departures of members. The other looks for
//! NCCL's errors and for timeouts. The first never calls CUDA: while kernels wait for a dead member, the device's queue
//! may be full, and a call of the driver does not return before the kernels are ended.
//!
//! When an operation has been in flight for part of its timeout, each member writes to the store what it waits in. At
//! the timeout, each compares the others' records with its own. So the error of a stuck operation names the members
//! that are missing or that called another operation. A member that ends its part without an error writes that to the
//! store, too.

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::{Cuda, DeviceCommunicator, is_message};
use crate::collectives::Request;
use crate::device::driver::relaxed;
use crate::device::ending;
use crate::error::{Error, Limit, Result};
use crate::transport::{Members, POLL_INTERVAL};
use crate::world::Departure;

/// How long an operation may stay in flight after one of its members has left in good order.
const LEFT_LIMIT: Duration = Duration::from_secs(5);
/// How long an operation of a group may stay in flight after a rank outside the group has failed.
const OUTSIDE_FAILURE_LIMIT: Duration = Duration::from_secs(2);
/// How long an operation is in flight before members look in the store whether another one has ended its part, and the
/// interval at which they look.
const ENDED_AFTER: Duration = Duration::from_millis(500);
/// The timeout of such a look.
const ENDED_QUERY_TIMEOUT: Duration = Duration::from_millis(5);
/// Additional time after the timeout for the other members' records to arrive.
const RECORDS_TIMEOUT: Duration = Duration::from_secs(1);

struct Watchdog {
    groups: Mutex<Vec<Weak<Cuda>>>,
    added: Condvar,
}

static WATCH: Watchdog = Watchdog { groups: Mutex::new(Vec::new()), added: Condvar::new() };

/// Starts to watch a group that has a device communicator, until it is dropped.
pub(super) fn add(group: &Arc<Cuda>) -> Result<()> {
    static THREAD: OnceLock<Result<()>> = OnceLock::new();
    let mut groups = WATCH.groups.lock();
    if !groups.iter().any(|known| known.ptr_eq(&Arc::downgrade(group))) {
        groups.push(Arc::downgrade(group));
    }
    WATCH.added.notify_all();
    drop(groups);
    let spawn = |name: &str, check: fn(&Arc<Cuda>, &mut WaitRecords)| {
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || work(check));
        thread.map(drop).map_err(|error| Error::io("starting the thread that monitors devices", error))
    };
    // Another thread may capture a stream; queries must not invalidate that capture.
    let start = || {
        spawn("smd-cuda-peers", |group, _| check_departures(group))?;
        spawn("smd-cuda", |group, notes| {
            if let Ok(_guard) = ending::enter_driver() {
                relaxed(|| check_operations(group, notes));
            }
        })
    };
    THREAD.get_or_init(start).clone()
}

fn work(check: fn(&Arc<Cuda>, &mut WaitRecords)) {
    let mut notes = WaitRecords::default();
    loop {
        let groups: Vec<Arc<Cuda>> = {
            let mut groups = WATCH.groups.lock();
            groups.retain(|group| group.strong_count() > 0);
            while groups.is_empty() {
                WATCH.added.wait(&mut groups);
            }
            groups.iter().filter_map(Weak::upgrade).collect()
        };
        // All groups of a session share one monitor. A departure ends the sleep.
        let Some(monitor) = groups.first().map(|group| group.monitor.clone()) else { continue };
        let seen = monitor.generation();
        for group in groups.iter().filter(|group| group.failed.get().is_none()) {
            // If watching a group fails, that group ends; the others are still watched.
            if let Some(error) = Error::of_thread("that watches over devices", || check(group, &mut notes)) {
                group.end(error);
            }
        }
        drop(groups);
        monitor.wait_change(seen, POLL_INTERVAL);
    }
}

fn check_departures(group: &Arc<Cuda>) {
    if let Some(error) = departed(group) {
        fail(group, error);
    }
}

fn check_operations(group: &Arc<Cuda>, notes: &mut WaitRecords) {
    for device_comm in group.all_device_comms() {
        if let Some(error) = device_comm.comm.async_error() {
            // The connection to a member that died may be lost before its death is reported.
            let first = device_comm.flights.lock().first().map(|calls| calls.requests[0].clone());
            let error = match first {
                Some(request) => group.explain(error, &|| group.describe(&request)),
                None => error,
            };
            return fail(group, error);
        }
        if let Some(error) = differing(group, &device_comm) {
            // Other members' kernels may wait elsewhere and must learn of it as well.
            return group.end(error);
        }
        if device_comm.completed() {
            continue;
        }
        let why = left(group, &device_comm)
            .or_else(|| failed_outside(group, &device_comm))
            .or_else(|| ended(group, &device_comm, notes))
            .or_else(|| stuck(group, &device_comm, notes));
        if let Some(error) = why {
            return fail(group, error);
        }
    }
}

/// Ends a group's operations on devices with `error` (CUDA-4).
pub(super) fn fail(group: &Arc<Cuda>, error: Error) {
    tracing::debug!("group {} ends its operations on devices: {error}", group.id);
    if group.closed.get().is_some() && group.failed.get().is_none() {
        // No later call of the group will raise the error, so it is logged.
        tracing::error!(
            "group {} was closed while operations on devices were running, which were aborted: {error}",
            group.id
        );
    }
    let _ = group.failed.set(error);
    let mut device_comms = std::mem::take(&mut *group.device_comms.write());
    device_comms.append(&mut group.closing.write());
    for device_comm in device_comms {
        // An abort waits for the device, where kernels of other groups may spin that are aborted next; so each has a
        // thread.
        let abort = std::thread::Builder::new().name("smd-cuda-abort".into());
        if let Err(error) = abort.spawn(move || device_comm.abort()) {
            tracing::error!("operations on a device cannot be aborted, because no thread can be started: {error}");
        }
    }
}

/// The error if kernels of two members have found that their calls differ (PEER-2).
fn differing(group: &Cuda, device_comm: &DeviceCommunicator) -> Option<Error> {
    let mismatch = device_comm.peers.as_ref()?.mismatch()?;
    let (me, other) = (group.members.me, mismatch.member);
    // The calls in question, unless calls in CUDA graphs came between.
    let mine = mismatch.call.and_then(|call| {
        let flights = device_comm.flights.lock();
        flights.queue.iter().find_map(|flight| {
            let reaches = |made: &&u32| (made.wrapping_sub(call) as i32) >= 0;
            let count = flight.peer_calls.iter().find(reaches)?;
            let all = flight.calls.requests.iter().zip(&flight.peer_calls).filter(|(_, made)| *made == count);
            Some(all.map(|(request, _)| group.describe(request)).collect::<Vec<_>>())
        })
    });
    let mine = mine.unwrap_or_else(|| vec!["an operation that is not known".to_owned()]);
    let ranks = &group.members.ranks;
    let key = |at: usize| format!("cuda/{:x}/{}/differs/{at}", group.id, device_comm.number);
    // If the store fails, the job is ending, which has its own errors.
    let theirs = group.store.get().and_then(|store| {
        let _ = store.set(&key(me), &postcard::to_stdvec(&mine).ok()?);
        let text = store.get(&key(other), &[ranks[other]], RECORDS_TIMEOUT).ok()?;
        postcard::from_bytes::<Vec<String>>(&text).ok()
    });
    let theirs = theirs.unwrap_or_else(|| vec!["something else".to_owned()]);
    let (mine, theirs) = difference(&mine, &theirs);
    let (low, high) = if me < other { ((me, &mine), (other, &theirs)) } else { ((other, &theirs), (me, &mine)) };
    Some(Error::Mismatch {
        during: format!("{mine} on CUDA tensors"),
        detail: format!("rank {} called {}, rank {} called {}", ranks[low.0], low.1, ranks[high.0], high.1),
    })
}

/// The first position where the calls of two members differ, as texts.
fn difference(mine: &[String], theirs: &[String]) -> (String, String) {
    let common = mine.iter().zip(theirs).position(|(mine, theirs)| mine != theirs);
    // The difference may be one that the texts do not show.
    let at = common.or((mine.len() != theirs.len()).then_some(mine.len().min(theirs.len()))).unwrap_or(0);
    let describe = |calls: &[String]| match (calls.get(at), calls.len()) {
        (Some(call), 1) => call.clone(),
        (Some(call), count) => format!("{call} as number {} of {count} at once", at + 1),
        (None, count) => format!("{} as the last of {count} at once", calls.last().map_or("nothing", String::as_str)),
    };
    (describe(mine), describe(theirs))
}

/// The error if a member of the group died or failed.
pub(super) fn departed(group: &Cuda) -> Option<Error> {
    if group.monitor.generation() == 0 {
        return None;
    }
    let gone = |rank: &&usize| !matches!(group.monitor.departure(**rank), None | Some(Departure::Left));
    let gone: Vec<usize> = group.members.ranks.iter().filter(gone).copied().collect();
    if gone.is_empty() {
        return None;
    }
    group.monitor.check(&gone, "an operation on CUDA tensors").err()
}

/// The error if a member left in good order while this one waits for it.
fn left(group: &Cuda, device_comm: &DeviceCommunicator) -> Option<Error> {
    let flights = device_comm.flights.lock();
    let calls = flights.first()?;
    if group.monitor.generation() == 0 || calls.since.elapsed() < LEFT_LIMIT {
        return None;
    }
    let left = |rank: &&usize| matches!(group.monitor.departure(**rank), Some(Departure::Left));
    let left: Vec<usize> = group.members.ranks.iter().filter(left).copied().collect();
    if left.is_empty() {
        return None;
    }
    group.monitor.check(&left, &group.describe(&calls.requests[0])).err()
}

/// The error if an operation was queued before members could know that a rank outside the group had failed, and does
/// not complete: another member may wait for that rank in another group, and so never take part. Operations that a
/// script queues later, among the ranks that are left, have no such limit.
fn failed_outside(group: &Cuda, device_comm: &DeviceCommunicator) -> Option<Error> {
    let (rank, how) = group.monitor.first_failure()?;
    let failed_at = group.monitor.departure_time(rank)?;
    let flights = device_comm.flights.lock();
    let calls = flights.first().filter(|calls| calls.since < failed_at + OUTSIDE_FAILURE_LIMIT)?;
    if calls.since.max(failed_at).elapsed() < OUTSIDE_FAILURE_LIMIT {
        return None;
    }
    let (me, during) = (group.monitor.me(), group.describe(&calls.requests[0]));
    Some(Error::PeerFailed { rank, how: how.to_string(), me, during })
}

/// The key under which the first member to end its part says so.
fn ended_key(group: &Cuda) -> String {
    format!("cuda/{:x}/ended", group.id)
}

/// Notifies the other members that this one takes no part in further operations.
pub(super) fn report_ended(group: &Cuda, reason: &Error) {
    if let Some(store) = group.store.get()
        && let Ok(text) = postcard::to_stdvec(&(group.members.me, reason.to_string()))
    {
        // If the store fails, the job is ending, which has its own errors.
        let _ = store.set(&ended_key(group), &text);
    }
}

/// The error if another member has ended its part.
fn ended(group: &Cuda, device_comm: &DeviceCommunicator, notes: &mut WaitRecords) -> Option<Error> {
    let during = {
        let flights = device_comm.flights.lock();
        let calls = flights.first().filter(|calls| calls.since.elapsed() >= ENDED_AFTER)?;
        group.describe(&calls.requests[0])
    };
    let key = ended_key(group);
    if !notes.is_time(&key, ENDED_AFTER) {
        return None;
    }
    let text = group.store.get()?.get(&key, &[], ENDED_QUERY_TIMEOUT).ok()?;
    let (member, reason) = postcard::from_bytes::<(usize, String)>(&text).ok()?;
    let Members { ranks, me } = &group.members;
    let rank = ranks.get(member).copied().filter(|_| member != *me)?;
    Some(Error::PeerFailed { rank, how: format!("failed ({reason})"), me: ranks[*me], during })
}

/// A member's record of the operation that it waits in.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct WaitRecord {
    /// The number of collectives that the member called before.
    position: u64,
    /// The operation as text.
    text: String,
    /// Whether all members take part in it.
    collective: bool,
}

/// The records that this process has written, and the times of its looks in the store.
#[derive(Default)]
struct WaitRecords {
    written: Vec<(String, Instant)>,
}

impl WaitRecords {
    /// Whether at least `interval` has passed since the last call with `key` that returned true.
    fn is_time(&mut self, key: &str, interval: Duration) -> bool {
        let now = Instant::now();
        let last = self.written.iter().find(|(known, _)| known == key).map(|(_, last)| *last);
        last.is_none_or(|last| now.duration_since(last) >= interval) && self.is_new(key, now)
    }

    /// Whether `key` has no record yet of the operation that began at `since`.
    fn is_new(&mut self, key: &str, since: Instant) -> bool {
        match self.written.iter_mut().find(|(known, _)| known == key) {
            Some((_, last)) if *last == since => false,
            Some((_, last)) => {
                *last = since;
                true
            }
            None => {
                self.written.push((key.to_owned(), since));
                true
            }
        }
    }
}

fn stuck(group: &Cuda, device_comm: &DeviceCommunicator, notes: &mut WaitRecords) -> Option<Error> {
    let (note, since, timeout, partners) = {
        let flights = device_comm.flights.lock();
        let calls = flights.first()?;
        if calls.since.elapsed() < calls.timeout / 2 {
            return None;
        }
        let first = &calls.requests[0];
        let collective = !is_message(first);
        let partners = if collective { group.others() } else { partners(group, &calls.requests) };
        let note = WaitRecord { position: calls.position, text: group.describe(first), collective };
        (note, calls.since, calls.timeout, partners)
    };
    let store = group.store.get()?;
    let key = |rank: usize| format!("cuda/{:x}/{}/stuck/{rank}", group.id, device_comm.number);
    let me = group.members.ranks[group.members.me];
    if notes.is_new(&key(me), since)
        && let Ok(text) = postcard::to_stdvec(&note)
    {
        // If the store fails, the job is ending, which has its own errors.
        let _ = store.set(&key(me), &text);
    }
    if since.elapsed() < timeout {
        return None;
    }
    let deadline = Instant::now() + RECORDS_TIMEOUT;
    let read = |rank: usize| {
        let remaining = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let text = store.get(&key(rank), &[], remaining).ok()?;
        postcard::from_bytes::<WaitRecord>(&text).ok()
    };
    let others: Vec<(usize, Option<WaitRecord>)> = partners.into_iter().map(|rank| (rank, read(rank))).collect();
    Some(compare(me, &note, since.elapsed(), &others))
}

fn partners(group: &Cuda, requests: &[Request]) -> Vec<usize> {
    let peers = requests.iter().filter_map(|request| match request {
        Request::Send { to, .. } => Some(*to),
        Request::Recv { from, .. } => *from,
        _ => None,
    });
    let mut ranks: Vec<usize> =
        peers.filter(|peer| *peer != group.members.me).map(|peer| group.members.ranks[peer]).collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// The error of rank `me`, which has waited in `mine` for `waited`: a mismatch, or a timeout that names the missing
/// ranks.
fn compare(me: usize, mine: &WaitRecord, waited: Duration, others: &[(usize, Option<WaitRecord>)]) -> Error {
    let differs = |theirs: &WaitRecord| {
        mine.collective && theirs.collective && (theirs.position != mine.position || theirs.text != mine.text)
    };
    let other = others.iter().find_map(|(rank, note)| Some((*rank, note.as_ref().filter(|note| differs(note))?)));
    if let Some((rank, theirs)) = other {
        let describe =
            |rank, note: &WaitRecord| format!("rank {rank} waits in {} after {} others", note.text, note.position);
        let (low, high) = if me < rank { ((me, mine), (rank, theirs)) } else { ((rank, theirs), (me, mine)) };
        return Error::Mismatch {
            during: format!("{} on CUDA tensors, stuck for {waited:.1?}", mine.text),
            detail: format!("{}, {}", describe(low.0, low.1), describe(high.0, high.1)),
        };
    }
    let missing: Vec<usize> = others.iter().filter(|(_, note)| note.is_none()).map(|(rank, _)| *rank).collect();
    Error::Timeout { during: format!("{} on CUDA tensors", mine.text), waited, missing, limit: Limit::Collective }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(position: u64, text: &str) -> WaitRecord {
        WaitRecord { position, text: text.into(), collective: true }
    }

    #[test]
    fn a_stuck_operation_names_who_is_missing_or_called_something_else() {
        let waited = Duration::from_secs(30);
        let mine = note(4, "all_reduce(sum) of 10 float32");
        let same = (0, Some(mine.clone()));
        let error = compare(1, &mine, waited, &[same.clone(), (2, None), (3, None)]);
        assert_eq!(
            error.to_string(),
            "all_reduce(sum) of 10 float32 on CUDA tensors timed out after 30.0s: no sign of rank(s) [2, 3] before the timeout passed; \
             to wait longer, set `SMD_TIMEOUT_SECONDS`, or the process group's `timeout` where it has one"
        );
        let error = compare(1, &mine, waited, &[same, (2, Some(note(4, "broadcast of 3 int64")))]);
        assert_eq!(
            error.to_string(),
            "all_reduce(sum) of 10 float32 on CUDA tensors, stuck for 30.0s: ranks disagree: rank 1 waits in \
             all_reduce(sum) of 10 float32 after 4 others, rank 2 waits in broadcast of 3 int64 after 4 others"
        );
    }

    #[test]
    fn the_first_of_several_calls_that_differs_is_named() {
        let calls = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let difference = |mine: &[&str], theirs: &[&str]| difference(&calls(mine), &calls(theirs));
        let named = |mine: &str, theirs: &str| (mine.to_owned(), theirs.to_owned());
        assert_eq!(difference(&["a"], &["b"]), named("a", "b"));
        let several = named("b as number 2 of 3 at once", "d as number 2 of 3 at once");
        assert_eq!(difference(&["a", "b", "c"], &["a", "d", "e"]), several);
        let fewer = named("a as the last of 1 at once", "b as number 2 of 2 at once");
        assert_eq!(difference(&["a"], &["a", "b"]), fewer);
        assert_eq!(difference(&["a"], &["a"]), named("a", "a"));
    }

    #[test]
    fn a_note_is_written_once_for_each_operation() {
        let (mut notes, now) = (WaitRecords::default(), Instant::now());
        assert!(notes.is_new("a", now) && !notes.is_new("a", now) && notes.is_new("b", now));
        assert!(notes.is_new("a", now + Duration::from_secs(1)));
    }
}
