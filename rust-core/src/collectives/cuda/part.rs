//! What a group has on one device, and what is under way there.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::p2p::Peers;
use super::{Cuda, is_message, queue, watch};
use crate::collectives::{Beside, Request};
use crate::device::nccl::Comm;
use crate::device::{Event, Stream};
use crate::error::{Error, Result};
use crate::transport::Wait;

/// One device's communicator, and what is under way on it.
pub(super) struct Part {
    pub(super) number: u64,
    pub(super) comm: Comm,
    /// Where the members' devices reach each other.
    pub(super) peers: Option<Peers>,
    /// For operations that do not go to their views' stream.
    pub(super) stream: OnceLock<Stream>,
    turn: Mutex<()>,
    pub(super) flights: Mutex<Flights>,
}

/// What was queued and may still be under way.
#[derive(Default)]
pub(super) struct Flights {
    pub(super) queue: VecDeque<Flight>,
    /// Operations so far, without messages, of which every pair has its own number.
    collectives: u64,
    /// Events of flights that have landed.
    events: Vec<Event>,
}

/// Operations that were queued together and are not known to be done.
pub(super) struct Flight {
    pub(super) requests: Box<[Request]>,
    /// How many collectives were called before it.
    pub(super) position: u64,
    /// How many calls each of them made this member's peers see so far, where they are such calls.
    pub(super) peer_calls: Box<[u32]>,
    pub(super) since: Instant,
    pub(super) timeout: Duration,
    done: Event,
}

impl Part {
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
        beside: Beside,
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
        let chunked = self.peers.as_ref().filter(|peers| peers.accepts_chunks(requests, beside));
        let all_accepted = |peers: &&Peers| requests.iter().all(|request| peers.accepts(request));
        if let Some(peers) = chunked {
            // SAFETY: as below.
            let calls = unsafe { peers.queue_chunks(requests, beside, stream) }?;
            peer_calls.resize(requests.len(), calls);
        } else if let Some(peers) = self.peers.as_ref().filter(all_accepted) {
            for request in requests {
                // SAFETY: as below.
                peer_calls.push(unsafe { peers.queue(request, stream) }?);
            }
        } else {
            // SAFETY: `run` has checked the requests, and that all views are on this device and its stream.
            let one = |request: &Request| unsafe { queue::queue(&self.comm, request, me, size, stream) };
            match requests {
                [request] => one(request)?,
                several => self.comm.group(|| several.iter().try_for_each(one))?,
            }
            // The first operation waits here for the members, with whom NCCL connects.
            let start = Instant::now();
            let during = || owner.describe(&requests[0]);
            let wait = Wait { deadline: start + timeout, ..owner.wait(&during, start) };
            let settled = self.comm.settle("queueing an operation", || {
                owner.check(during)?;
                wait.check(|| owner.others())
            });
            if let Err(error) = &settled
                && !matches!(error, Error::Device { .. })
            {
                // NCCL still waits for the members, and no event says for how long: CUDA-4.
                watch::fail(owner, error.clone());
            }
            settled?;
        }
        if capturing {
            // Nothing is under way before the graph is launched, and then nobody tells.
            return Ok(());
        }
        // Not while the flights are locked: a device whose queue is full makes this wait, and the watch must see why.
        done.record(stream)?;
        let mut flights = self.flights.lock();
        let position = flights.collectives;
        flights.collectives += requests.iter().filter(|request| !is_message(request)).count() as u64;
        let since = Instant::now();
        let peer_calls = peer_calls.into();
        flights.queue.push_back(Flight { requests: requests.into(), position, peer_calls, since, timeout, done });
        Ok(())
    }

    /// See [`Comm::split`].
    pub(super) fn split(
        &self,
        color_and_key: Option<(usize, usize)>,
        check: impl FnMut() -> Result<()>,
    ) -> Result<Option<Comm>> {
        let _turn = self.turn.lock();
        self.comm.split(color_and_key, check)
    }

    /// Forgets what is done; whether nothing is under way.
    pub(super) fn landed(&self) -> bool {
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
        flights.queue.is_empty()
    }

    /// Ends what is under way, also under a thread that is inside an operation (NCL-2).
    pub(super) fn abort(&self) {
        if let Some(peers) = &self.peers {
            peers.abort();
        }
        self.comm.abort();
    }
}
