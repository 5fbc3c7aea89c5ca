//! The NCCL communicator of a group on one device, and its operations in flight.

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
    /// Where the members' devices reach each other.
    pub(super) peers: Option<Peers>,
    /// For operations that do not go to their views' stream.
    pub(super) stream: OnceLock<Stream>,
    turn: Mutex<()>,
    pub(super) flights: Mutex<PendingQueue>,
}

/// Operations that were queued and may still run.
#[derive(Default)]
pub(super) struct PendingQueue {
    pub(super) queue: VecDeque<PendingCalls>,
    /// What a thread is queueing, if it may wait for other members meanwhile: NCCL connects with them at the first use.
    starting: Option<Calls>,
    /// Operations so far, without messages, of which every pair has its own number.
    collectives: u64,
    /// Events of flights that have completed.
    events: Vec<Event>,
}

/// Operations that are called together.
#[derive(Clone)]
pub(super) struct Calls {
    pub(super) requests: Arc<[Request]>,
    /// How many collectives were called before them.
    pub(super) position: u64,
    pub(super) since: Instant,
    pub(super) timeout: Duration,
}

/// Operations that were queued and are not known to be done.
pub(super) struct PendingCalls {
    pub(super) calls: Calls,
    /// How many calls each of them made this member's peers see so far, where they are such calls.
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

    /// What was called first of all that is not done.
    pub(super) fn first(&self) -> Option<&Calls> {
        self.queue.front().map(|flight| &flight.calls).or(self.starting.as_ref())
    }
}

impl DeviceCommunicator {
    /// A part of which nothing is under way.
    pub(super) fn new(number: u64, comm: Comm, peers: Option<Peers>) -> Self {
        let (stream, turn, flights) = Default::default();
        Self { number, comm, peers, stream, turn, flights }
    }

    /// Queues `requests` into `stream`, and notes that they are under way unless a graph is to have them.
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
        // Nothing is queued that cannot be watched.
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
                // The watch may have ended the call, for a reason that says more.
                owner.check(|| owner.describe(&requests[0]))?;
            }
            queued?;
        }
        if capturing {
            // Nothing is under way before the graph is launched, and then nobody tells.
            return Ok(());
        }
        // Not while the flights are locked: a device whose queue is full makes this wait, and the watch must see why.
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

    /// Forgets what is done; whether nothing is under way, nor being queued.
    pub(super) fn completed(&self) -> bool {
        const KEPT: usize = 64;
        let mut flights = self.flights.lock();
        // What failed on the device is done as well, and told by CUDA to whoever asks next.
        while flights.queue.front().is_some_and(|flight| flight.done.is_done().unwrap_or(true)) {
            // Its error will speak of a flight that is done.
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

    /// Ends what is under way, also under a thread that is inside an operation (NCL-4).
    pub(super) fn abort(&self) {
        if let Some(peers) = &self.peers {
            peers.abort();
        }
        self.comm.abort();
    }
}
