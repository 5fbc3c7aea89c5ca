//! Opens and accepts connections, reads incoming data, and writes queued data.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::ErrorKind;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use mio::{Events, Interest, Poll, Token};

use super::dial::Dial;
use super::inbound::{self, InboundConnection, ReadExtent, ReadOutcome, TcpFrame};
use super::send_queue::OutboundConnection;
use super::{PROTOCOL, TcpCommand, TcpOptions, TcpState};
use crate::error::{Error, Result};
use crate::transport::ports::PortKey;
use crate::world::fork;
use crate::world::rendezvous::JobKey;
use crate::world::rendezvous::refusals::Refusals;

const LISTENER: Token = Token(0);
const FIRST_CONNECTION: usize = 1;

/// Limits for connections before authentication: their number, the time that each may take, and the age from which
/// one may be closed in favour of a new one.
const MAX_UNAUTHENTICATED: usize = 256;
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
const UNAUTHENTICATED_TIME: Duration = Duration::from_millis(30);
/// Length of the listen queue: many ranks may start to send at the same time.
const LISTEN_QUEUE: i32 = 4096;
/// Delay before a connection is retried, or accepted again after the system had no free descriptor.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// Largest number of connections to accept before the others are served.
const ACCEPT_BATCH: usize = 32;

enum TcpConnection {
    Dial(Dial),
    /// The queue to this rank, which owns the connection.
    Outbound(usize),
    Inbound(InboundConnection),
}

/// A connection that could not be established and is retried.
struct Redial {
    at: Instant,
    rank: usize,
    /// When the first attempt began.
    since: Instant,
}

/// A lost connection that no departure has explained so far (TCP-4).
struct LostConnection {
    rank: usize,
    why: String,
    judge_at: Instant,
}

/// The TCP connections; the thread `smd-tcp` or a waiting caller serves them under a lock.
pub(super) struct Service {
    _guard: fork::Guard,
    listener: mio::net::TcpListener,
    poll: Poll,
    events: Events,
    key: JobKey,
    options: TcpOptions,
    connections: HashMap<Token, TcpConnection>,
    /// Connections before authentication, oldest first.
    unauthenticated: BTreeMap<Token, Instant>,
    /// Ranks that have an incoming connection. Frames of one rank come over one connection, in order (TCP-1).
    introduced: HashSet<usize>,
    next: usize,
    accept_at: Option<Instant>,
    /// Connections with more to do.
    again: Vec<Token>,
    redials: Vec<Redial>,
    losses: Vec<LostConnection>,
    refusals: Refusals,
}

impl Service {
    pub(super) fn new(poll: Poll, listener: TcpListener, options: TcpOptions) -> Result<Self> {
        let io = |error| Error::io("serving other hosts", error);
        listener.set_nonblocking(true).map_err(io)?;
        // The standard library's listen queue is short.
        rustix::net::listen(&listener, LISTEN_QUEUE).map_err(|error| io(error.into()))?;
        let mut listener = mio::net::TcpListener::from_std(listener);
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE).map_err(io)?;
        Ok(Self {
            _guard: fork::Guard::new(&listener),
            listener,
            poll,
            events: Events::with_capacity(256),
            key: options.key.scoped(PROTOCOL),
            options,
            connections: HashMap::new(),
            unauthenticated: BTreeMap::new(),
            introduced: HashSet::new(),
            next: FIRST_CONNECTION,
            accept_at: None,
            again: Vec::new(),
            redials: Vec::new(),
            losses: Vec::new(),
            refusals: Refusals::default(),
        })
    }

    /// One round of the thread: everything that can be done now. Returns false once it is told to stop. Frames are left to
    /// callers if they receive.
    pub(super) fn serve_all(&mut self, callers_receive: bool, shared: &TcpState) -> bool {
        let ready = self.poll_connections();
        if !self.answer_calls(shared) {
            return false;
        }
        for token in ready {
            match self.connections.get(&token) {
                Some(TcpConnection::Inbound(inbound)) if callers_receive && inbound.rank.is_some() => {
                    self.again.push(token);
                }
                _ => self.serve(token, ReadExtent::Batch, shared),
            }
        }
        let now = Instant::now();
        if self.accept_at.is_some_and(|at| at <= now) {
            self.accept();
        }
        self.expire(now, shared);
        self.check_losses(now);
        self.refusals.summarize(now);
        true
    }

    /// One round of a caller that waits for frames (TCP-7): reads what has arrived on each established connection, at
    /// most up to the end of a frame, which may be what the caller waits for. Returns whether anything was done.
    pub(super) fn receive(&mut self, shared: &TcpState) -> bool {
        let accept_at = self.accept_at;
        let ready = self.poll_connections();
        let mut for_thread = self.accept_at != accept_at;
        let mut done = false;
        for token in ready {
            let is_established = match self.connections.get(&token) {
                Some(TcpConnection::Outbound(_)) => true,
                Some(TcpConnection::Inbound(inbound)) => inbound.rank.is_some(),
                Some(TcpConnection::Dial(_)) => false,
                None => continue,
            };
            if is_established {
                let losses = self.losses.len();
                self.serve(token, ReadExtent::Frame, shared);
                done = true;
                for_thread |= self.losses.len() > losses;
            } else {
                self.again.push(token);
                for_thread = true;
            }
        }
        if for_thread {
            shared.gate.ring();
        }
        done
    }

    /// The connections at which something has happened.
    fn poll_connections(&mut self) -> Vec<Token> {
        let mut ready = std::mem::take(&mut self.again);
        if let Err(error) = self.poll.poll(&mut self.events, Some(Duration::ZERO)) {
            if error.kind() != ErrorKind::Interrupted {
                self.options.monitor.close(&format!("connections from other hosts are not served any more: {error}"));
            }
            return ready;
        }
        for event in &self.events {
            match event.token() {
                LISTENER => self.accept_at = Some(Instant::now()),
                token => {
                    if let Some(TcpConnection::Inbound(inbound)) = self.connections.get_mut(&token) {
                        inbound.ends |= event.is_read_closed() || event.is_error();
                    }
                    ready.push(token);
                }
            }
        }
        ready.sort_unstable();
        ready.dedup();
        ready
    }

    /// Whether there is more to do at once.
    pub(super) fn has_more(&self) -> bool {
        !self.again.is_empty()
    }

    /// The time until the next timer, during which only events can cause work.
    pub(super) fn limit(&self) -> Option<Duration> {
        let now = Instant::now();
        let unauthenticated = self.unauthenticated.values().next().map(|came| *came + HANDSHAKE_TIME);
        let dial = self.connections.values().filter_map(|it| match it {
            TcpConnection::Dial(dial) => Some(dial.deadline),
            TcpConnection::Outbound(_) | TcpConnection::Inbound(_) => None,
        });
        let redial = self.redials.iter().map(|redial| redial.at);
        let loss = self.losses.iter().map(|loss| loss.judge_at);
        let fixed = [unauthenticated, self.accept_at, self.refusals.due()].into_iter().flatten();
        let next = fixed.chain(dial).chain(redial).chain(loss).min()?;
        // The system may round down to milliseconds, so one is added; otherwise the thread would spin during the last
        // one.
        Some(next.saturating_duration_since(now) + Duration::from_millis(1))
    }

    fn answer_calls(&mut self, shared: &TcpState) -> bool {
        let calls = std::mem::take(&mut *shared.calls.lock());
        for call in calls {
            match call {
                TcpCommand::Dial(rank) => self.dial(rank, Instant::now(), shared),
                TcpCommand::Lost(rank, why) => self.fail_connection(rank, &why, shared),
                TcpCommand::Stop => return false,
            }
        }
        true
    }

    fn serve(&mut self, token: Token, extent: ReadExtent, shared: &TcpState) {
        match self.connections.get(&token) {
            Some(TcpConnection::Dial(_)) => self.serve_dial(token, shared),
            Some(TcpConnection::Outbound(rank)) => self.serve_send_queue(*rank, shared),
            Some(TcpConnection::Inbound(_)) => self.serve_inbound(token, extent, shared),
            None => {}
        }
    }

    fn register(&mut self, connection: TcpConnection) -> Option<Token> {
        let token = Token(self.next);
        self.next += 1;
        let connection = self.connections.entry(token).insert_entry(connection).into_mut();
        let stream = match connection {
            TcpConnection::Dial(dial) => dial.stream(),
            TcpConnection::Inbound(inbound) => &mut inbound.stream,
            TcpConnection::Outbound(_) => return Some(token),
        };
        match self.poll.registry().register(stream, token, Interest::READABLE | Interest::WRITABLE) {
            Ok(()) => Some(token),
            Err(error) => {
                tracing::debug!("a connection cannot be watched: {error}");
                self.connections.remove(&token);
                None
            }
        }
    }

    fn dial(&mut self, rank: usize, since: Instant, shared: &TcpState) {
        let address = self.options.book[rank];
        match Dial::start(rank, address, since, &self.options.congestion_control) {
            Ok(dial) => match self.register(TcpConnection::Dial(dial)) {
                Some(token) => self.serve_dial(token, shared),
                None => self.dial_failed(rank, since, "the system does not watch it".to_owned(), shared),
            },
            Err(error) => self.dial_failed(rank, since, error.to_string(), shared),
        }
    }

    fn serve_dial(&mut self, token: Token, shared: &TcpState) {
        let Some(TcpConnection::Dial(dial)) = self.connections.get_mut(&token) else { return };
        let (rank, since) = (dial.rank, dial.since);
        match dial.advance(&self.key, &self.options) {
            Ok(false) => {}
            Ok(true) => {
                let Some(TcpConnection::Dial(dial)) = self.connections.remove(&token) else { return };
                match dial.finish(&self.key, self.options.tags) {
                    Ok(line) => self.open(token, rank, line, shared),
                    Err(error) => self.dial_failed(rank, since, error.to_string(), shared),
                }
            }
            Err(error) => {
                self.connections.remove(&token);
                self.dial_failed(rank, since, error.to_string(), shared);
            }
        }
    }

    fn open(&mut self, token: Token, rank: usize, line: OutboundConnection, shared: &TcpState) {
        self.connections.insert(token, TcpConnection::Outbound(rank));
        let words = [self.options.session, self.options.rank as u64, rank as u64];
        let first = inbound::encode_hello(words).to_vec();
        let (outcome, admitted) = {
            let mut queue = shared.send_queues[rank].lock();
            (queue.open(line, first), queue.admitted())
        };
        shared.ports.progress(admitted);
        if let Err(error) = outcome {
            self.fail_connection(rank, &error.to_string(), shared);
        }
    }

    /// Retries while the other process may still be there.
    fn dial_failed(&mut self, rank: usize, since: Instant, why: String, shared: &TcpState) {
        let now = Instant::now();
        if self.options.monitor.departure(rank).is_none() && now < since + self.options.peer_timeout {
            tracing::trace!("rank {rank} at {}: {why}", self.options.book[rank]);
            self.redials.push(Redial { at: now + RETRY_PAUSE, rank, since });
            return;
        }
        self.fail_connection(rank, &format!("it could not be established: {why}"), shared);
    }

    fn serve_send_queue(&mut self, rank: usize, shared: &TcpState) {
        let (outcome, admitted) = {
            let mut queue = shared.send_queues[rank].lock();
            if queue.is_lost() {
                return;
            }
            let outcome = queue.write().and_then(|()| queue.poll_end());
            (outcome, queue.admitted())
        };
        shared.ports.progress(admitted);
        if let Err(error) = outcome {
            self.fail_connection(rank, &error.to_string(), shared);
        }
    }

    /// Gives up the queue to `rank`, or the connection from it (TCP-4).
    fn fail_connection(&mut self, rank: usize, why: &str, shared: &TcpState) {
        let (line, admitted) = {
            let mut queue = shared.send_queues[rank].lock();
            (queue.disconnect(), queue.admitted())
        };
        if let Some(mut line) = line {
            let _ = self.poll.registry().deregister(&mut line.stream);
        }
        self.connections
            .retain(|_, connection| !matches!(connection, TcpConnection::Outbound(other) if *other == rank));
        // Their frames are dropped from now on, so their senders need not keep them.
        shared.ports.progress(admitted);
        tracing::debug!("the connection to rank {rank} at {}: {why}", self.options.book[rank]);
        let judge_at = Instant::now() + self.options.peer_timeout;
        if !self.losses.iter().any(|loss| loss.rank == rank) {
            self.losses.push(LostConnection { rank, why: why.to_owned(), judge_at });
        }
    }

    /// Ends the session if no departure explains a lost connection in time.
    fn check_losses(&mut self, now: Instant) {
        let monitor = &self.options.monitor;
        self.losses.retain(|loss| monitor.departure(loss.rank).is_none());
        let Some(loss) = self.losses.iter().find(|loss| loss.judge_at <= now) else { return };
        monitor.close(&format!(
            "the connection to rank {} at {} was lost ({}), but its process lives: is the network between the hosts as it \
             should be, and open for all ports?",
            loss.rank, self.options.book[loss.rank], loss.why
        ));
        self.losses.clear();
    }

    fn accept(&mut self) {
        self.accept_at = None;
        for _ in 0..ACCEPT_BATCH {
            if self.unauthenticated.len() >= MAX_UNAUTHENTICATED && !self.evict_oldest() {
                // Further connections stay in the system's listen queue.
                self.accept_at = Some(Instant::now() + UNAUTHENTICATED_TIME);
                return;
            }
            match self.listener.accept() {
                Ok((stream, address)) => match InboundConnection::new(stream, address, self.options.tags) {
                    Ok(inbound) => {
                        let came = inbound.came;
                        if let Some(token) = self.register(TcpConnection::Inbound(inbound)) {
                            self.unauthenticated.insert(token, came);
                        }
                    }
                    Err(error) => tracing::debug!("a connection from {address} could not be served: {error}"),
                },
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // Usually, the process has no free descriptor.
                    self.refusals.note(None, &format!("accepting a connection: {error}"));
                    self.accept_at = Some(Instant::now() + RETRY_PAUSE);
                    return;
                }
            }
        }
        self.accept_at = Some(Instant::now());
    }

    fn evict_oldest(&mut self) -> bool {
        match self.unauthenticated.first_key_value() {
            Some((&token, came)) if came.elapsed() >= UNAUTHENTICATED_TIME => {
                self.dismiss(token, "was closed to make room for others before it proved the job's secret");
                true
            }
            _ => false,
        }
    }

    fn serve_inbound(&mut self, token: Token, extent: ReadExtent, shared: &TcpState) {
        let Some(TcpConnection::Inbound(inbound)) = self.connections.get_mut(&token) else { return };
        let (ports, options, introduced) = (&shared.ports, &self.options, &mut self.introduced);
        let mut touched: Vec<PortKey> = Vec::new();
        let mut take = |rank: &mut Option<usize>, frame: TcpFrame| match *rank {
            Some(source) => {
                let port = ports.take(source, frame.buffer, frame.start, frame.bytes);
                touched.extend(port.filter(|port| !touched.contains(port)));
                Ok(())
            }
            None => match inbound::parse_hello(&frame) {
                Some([session, from, to])
                    if session == options.session
                        && to == options.rank as u64
                        && from != to
                        && from < options.book.len() as u64 =>
                {
                    if !introduced.insert(from as usize) {
                        return Err(format!("is a second connection of rank {from}"));
                    }
                    *rank = Some(from as usize);
                    Ok(())
                }
                Some(_) => Err("belongs to another session of the job".to_owned()),
                None => Err("broke the protocol: it does not name its rank".to_owned()),
            },
        };
        let mut begin_direct_receive =
            |rank: Option<usize>, prefix: &_, bytes| ports.begin_direct_receive(rank?, prefix, bytes);
        let outcome =
            inbound.read(&self.key, options.peer_timeout, extent, &ports.buffers, &mut take, &mut begin_direct_receive);
        let rank = inbound.rank;
        if rank.is_some() {
            self.unauthenticated.remove(&token);
        }
        match outcome {
            Ok(ReadOutcome::Pause) => {}
            Ok(ReadOutcome::More) => {
                self.again.push(token);
            }
            Ok(ReadOutcome::End) => self.dismiss(token, "ended before it named its rank"),
            Err(why) => {
                self.dismiss(token, &why);
                if let Some(rank) = rank {
                    self.fail_connection(rank, &format!("its connection {why}"), shared);
                }
            }
        }
        shared.ports.progress(touched);
    }

    /// Closes an incoming connection.
    fn dismiss(&mut self, token: Token, why: &str) {
        self.unauthenticated.remove(&token);
        if let Some(TcpConnection::Inbound(mut inbound)) = self.connections.remove(&token) {
            let _ = self.poll.registry().deregister(&mut inbound.stream);
            match inbound.rank {
                Some(rank) => drop(self.introduced.remove(&rank)),
                None => self.refusals.note(Some(inbound.address), why),
            }
        }
    }

    fn expire(&mut self, now: Instant, shared: &TcpState) {
        while let Some((&token, &came)) = self.unauthenticated.first_key_value() {
            if came + HANDSHAKE_TIME > now {
                break;
            }
            self.dismiss(token, "did not prove the job's secret in time");
        }
        let late = |(token, connection): (&Token, &TcpConnection)| match connection {
            TcpConnection::Dial(dial) if dial.deadline <= now => Some((*token, dial.rank, dial.since)),
            TcpConnection::Dial(_) | TcpConnection::Outbound(_) | TcpConnection::Inbound(_) => None,
        };
        for (token, rank, since) in self.connections.iter().filter_map(late).collect::<Vec<_>>() {
            self.connections.remove(&token);
            self.dial_failed(rank, since, "it does not answer".to_owned(), shared);
        }
        let (due, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.redials).into_iter().partition(|redial| redial.at <= now);
        self.redials = later;
        for Redial { rank, since, .. } in due {
            self.dial(rank, since, shared);
        }
    }
}
