//! The NCCL communicator of a group on one device, and the operations in flight on it.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::p2p::Peers;
use super::{Cuda, is_message, queue};
use crate::collectives::{Overlap, Request};
use crate::device::nccl::{Comm, Parent};
use crate::device::{Event, Stream};
use crate::error::Result;

/// The communicator of one device, and the operations in flight on it.
pub(super) struct DeviceCommunicator {
    pub(super) number: u64,
    pub(super) comm: Comm,
    /// The peer memory of the members' devices, where all of them can access it.
    pub(super) peers: Option<Peers>,
    /// The stream for operations that do not run in their views' stream.
    pub(super) stream: OnceLock<Stream>,
    turn: Mutex<()>,
    pub(super) flights: Mutex<PendingQueue>,
}

/// Operations that were queued and may still run.
#[derive(Default)]
pub(super) struct PendingQueue {
    pub(super) queue: VecDeque<PendingCalls>,
    /// The operation that a thread is queueing, if that may wait for other members: NCCL connects to a peer at the
    /// first use.
    starting: Option<Calls>,
    /// Number of collectives so far. Messages are not counted, because each pair of members has its own number of
    /// them.
    collectives: u64,
    /// Events of completed operations, for reuse.
    events: Vec<Event>,
}

/// Operations that were queued together.
#[derive(Clone)]
pub(super) struct Calls {
    pub(super) requests: Arc<[Request]>,
    /// Number of collectives that were queued before them.
    pub(super) position: u64,
    pub(super) since: Instant,
    pub(super) timeout: Duration,
}

/// Operations that were queued and are not known to be complete.
pub(super) struct PendingCalls {
    pub(super) calls: Calls,
    /// For each operation that runs on peer memory, the number of such calls so far, as counted in `Mismatch::call`.
    pub(super) peer_calls: Box<[u32]>,
    done: Event,
}

impl PendingQueue {
    fn calls(&self, requests: &Arc<[Request]>, timeout: Duration) -> Calls {
        Calls { requests: requests.clone(), position: self.collectives, since: Instant::now(), timeout }
    }

    fn start(&mut self, requests: &Arc<[Request]>, timeout: Duration) {
        self.starting = Some(self.calls(requests, timeout));
    }

    /// Describes the oldest operation that is not complete.
    pub(super) fn first(&self) -> Option<&Calls> {
        self.queue.front().map(|flight| &flight.calls).or(self.starting.as_ref())
    }
}

impl DeviceCommunicator {
    /// Creates a communicator without operations in flight.
    pub(super) fn new(number: u64, comm: Comm, peers: Option<Peers>) -> Self {
        let (stream, turn, flights) = Default::default();
        Self { number, comm, peers, stream, turn, flights }
    }

    /// Queues `requests` into `stream`, and records them as in flight unless the stream is being captured into a
    /// graph.
    pub(super) fn queue(
        &self,
        requests: &[Request],
        stream: &Stream,
        overlap: Overlap,
        capturing: bool,
        timeout: Duration,
        owner: &Arc<Cuda>,
    ) -> Result<()> {
        let (me, size) = (owner.members.me, owner.members.size());
        let _turn = self.turn.lock();
        let _entered = stream.context().enter()?;
        // Prepares the event first: an operation is queued only if its end can be observed.
        let known = self.flights.lock().events.pop();
        let done = known.map_or_else(|| Event::new(stream.context()), Ok)?;
        let mut peer_calls = Vec::new();
        let requests: Arc<[Request]> = requests.into();
        let requests = &requests;
        let chunked = self.peers.as_ref().filter(|peers| peers.accepts_chunks(requests, overlap));
        let all_accepted = |peers: &&Peers| requests.iter().all(|request| peers.accepts(request));
        if let Some(peers) = chunked {
            // SAFETY: as below.
            let calls = unsafe { peers.queue_chunks(requests, overlap, stream) }?;
            peer_calls.resize(requests.len(), calls);
        } else if let Some(peers) = self.peers.as_ref().filter(all_accepted) {
            for request in requests.iter() {
                // SAFETY: as below.
                peer_calls.push(unsafe { peers.queue(request, stream) }?);
            }
        } else {
            // SAFETY: `run` has checked the requests, and that all views are on this device and its stream.
            let one = |request: &Request| unsafe { queue::queue(&self.comm, request, me, size, stream) };
            self.flights.lock().start(requests, timeout);
            let queued = match &requests[..] {
                [request] => one(request),
                several => self.comm.group(|| several.iter().try_for_each(one)),
            };
            self.flights.lock().starting = None;
            if queued.is_err() {
                // The watch may have aborted the call, for a reason that says more.
                owner.check(|| owner.describe(&requests[0]))?;
            }
            queued?;
        }
        if capturing {
            // A captured operation is not in flight before the graph is launched, and its launches cannot be
            // observed.
            return Ok(());
        }
        // Without the lock: if the device's queue is full, this call waits, and the watch must still see the
        // operations in flight.
        done.record(stream)?;
        let mut flights = self.flights.lock();
        let calls = flights.calls(requests, timeout);
        flights.collectives += requests.iter().filter(|request| !is_message(request)).count() as u64;
        flights.queue.push_back(PendingCalls { calls, peer_calls: peer_calls.into(), done });
        Ok(())
    }

    /// See [`Comm::split`].
    pub(super) fn split(
        &self,
        color_and_key: Option<(usize, usize)>,
        check: impl FnMut() -> Result<()>,
    ) -> Result<Option<Parent>> {
        let _turn = self.turn.lock();
        self.comm.split(color_and_key, check)
    }

    /// Removes completed operations; returns whether none is in flight or being queued.
    pub(super) fn completed(&self) -> bool {
        const KEPT: usize = 64;
        let mut flights = self.flights.lock();
        // An operation that failed on the device counts as complete; CUDA reports its error to the next caller.
        while flights.queue.front().is_some_and(|flight| flight.done.is_done().unwrap_or(true)) {
            // The error of the mismatch will name this operation, so it stays in the queue.
            if self.peers.as_ref().is_some_and(|peers| peers.mismatch().is_some()) {
                return false;
            }
            let Some(flight) = flights.queue.pop_front() else { break };
            if flights.events.len() < KEPT {
                flights.events.push(flight.done);
            }
        }
        flights.first().is_none()
    }

    /// Aborts the operations in flight, also while another thread is inside of one (NCL-4).
    pub(super) fn abort(&self) {
        if let Some(peers) = &self.peers {
            peers.abort();
        }
        self.comm.abort();
    }
}
