//! The rendezvous server over TCP: one thread with a mio loop. It limits the resources of unauthenticated connections
//! (RDV-1).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mio::{Events, Interest, Poll, Token, Waker};
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};

use super::frame::{MAX_PAYLOAD, Opener, Sealer};
use super::frame_tag::TagOptions;
use super::handshake::{ANSWER_BYTES, Challenge, JobKey, REFUSAL};
use super::job::{Disposition, Job, JobEvent};
use super::message::{self, HostsUpdated, ToServer};
use super::refusals::Refusals;
use crate::error::{Error, Result};
use crate::metrics::Snapshot;
use crate::world::{fork, socket};

/// Time limit for a connection to authenticate and join.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// Largest number of unauthenticated connections.
const MAX_UNAUTHENTICATED: usize = 256;
/// Age from which an unauthenticated connection may be closed in favour of a new one. A member whose connection is
/// closed in this way retries.
const UNAUTHENTICATED_TIME: Duration = Duration::from_millis(30);
/// Length of the listen queue.
const LISTEN_QUEUE: i32 = 4096;
/// Largest number of connections to accept before members are served again.
const ACCEPT_BATCH: usize = 32;
/// Largest number of bytes to read from one connection before the others are served.
const READ_BATCH: usize = 1 << 18;
/// Largest number of bytes queued for a member that does not read.
const MAX_BACKLOG: usize = 64 * MAX_PAYLOAD;
/// How long to wait for the launcher's report why a process died before the lost connection itself is reported.
const DEATH_CAUSE_TIMEOUT: Duration = Duration::from_millis(200);

const LISTENER: Token = Token(0);
const WAKER: Token = Token(1);
const FIRST_CONNECTION: usize = 2;

/// Options of the server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The key of the job.
    pub key: JobKey,
    /// Number of processes of the job; none for an elastic job, whose launcher assigns the ranks.
    pub size: Option<usize>,
    /// How long to wait for [`Server::report_death`] after a connection was lost.
    pub death_cause_timeout: Duration,
    /// A host that is silent for this long counts as lost.
    pub peer_timeout: Duration,
}

enum Command {
    Death { rank: usize, detail: String },
    WorkerDeath { worker: String, detail: String },
    Assignment(Vec<String>),
    Remove { worker: String, reason: String },
    HostsUpdated(HostsUpdated),
    Stop,
}

struct ServerState {
    commands: Mutex<Vec<Command>>,
    connected: Mutex<usize>,
    changed: Condvar,
    events: Mutex<Vec<JobEvent>>,
    counters: Mutex<BTreeMap<usize, Snapshot>>,
    /// Becomes readable when there are events.
    doorbell: OwnedFd,
}

/// A running rendezvous server, which ends when dropped.
pub struct Server {
    address: SocketAddr,
    shared: Arc<ServerState>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves a job of `world_size` processes at `bind`, for a launcher that monitors its processes and calls
    /// [`Server::report_death`].
    ///
    /// # Errors
    /// [`Error::Io`] if the address cannot be bound; [`Error::Config`] for an invalid timeout in the environment.
    pub fn start(bind: SocketAddr, secret: &[u8], world_size: usize) -> Result<Self> {
        let listener =
            TcpListener::bind(bind).map_err(|e| Error::io(format!("binding the rendezvous to {bind}"), e))?;
        let peer_timeout = crate::config::PEER_TIMEOUT_SECONDS.seconds()?;
        Self::serve(
            listener,
            ServerOptions {
                key: JobKey::new(secret),
                size: Some(world_size),
                death_cause_timeout: DEATH_CAUSE_TIMEOUT,
                peer_timeout,
            },
        )
    }

    /// As [`Server::start`], for an elastic job: [`Server::assign_ranks`] assigns the ranks of each session.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start_elastic(bind: SocketAddr, secret: &[u8]) -> Result<Self> {
        let listener =
            TcpListener::bind(bind).map_err(|e| Error::io(format!("binding the rendezvous to {bind}"), e))?;
        let peer_timeout = crate::config::PEER_TIMEOUT_SECONDS.seconds()?;
        Self::serve(
            listener,
            ServerOptions {
                key: JobKey::new(secret),
                size: None,
                death_cause_timeout: DEATH_CAUSE_TIMEOUT,
                peer_timeout,
            },
        )
    }

    /// Serves on `listener`.
    ///
    /// # Errors
    /// [`Error::Io`] if the system has no resources for the loop.
    pub fn serve(listener: TcpListener, options: ServerOptions) -> Result<Self> {
        let io = |error| Error::io("starting the rendezvous", error);
        let address = listener.local_addr().map_err(io)?;
        listener.set_nonblocking(true).map_err(io)?;
        // The standard library's listen queue is short.
        rustix::net::listen(&listener, LISTEN_QUEUE).map_err(|error| io(error.into()))?;
        let mut listener = mio::net::TcpListener::from_std(listener);
        let poll = Poll::new().map_err(io)?;
        poll.registry().register(&mut listener, LISTENER, Interest::READABLE).map_err(io)?;
        let waker = Waker::new(poll.registry(), WAKER).map_err(io)?;
        let mut seed = [0; 8];
        getrandom::fill(&mut seed).map_err(|error| io(std::io::Error::other(error)))?;
        let shared = Arc::new(ServerState {
            commands: Mutex::default(),
            connected: Mutex::default(),
            changed: Condvar::new(),
            events: Mutex::default(),
            counters: Mutex::default(),
            doorbell: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(|error| io(error.into()))?,
        });
        let server = Loop {
            _guard: fork::Guard::new(&listener),
            listener,
            poll,
            job: match options.size {
                Some(size) => Job::new(size, options.death_cause_timeout, u64::from_le_bytes(seed)),
                None => Job::elastic(options.death_cause_timeout, u64::from_le_bytes(seed)),
            },
            options,
            connections: HashMap::new(),
            unauthenticated: BTreeMap::new(),
            next: FIRST_CONNECTION,
            accept_again: false,
            again: HashSet::new(),
            closing: HashSet::new(),
            refusals: Refusals::default(),
            shared: shared.clone(),
        };
        let thread =
            std::thread::Builder::new().name("smd-rendezvous".into()).spawn(move || server.run()).map_err(io)?;
        Ok(Self { address, shared, waker, thread: Some(thread) })
    }

    /// The address of the listener.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Reports that the process of `rank` has ended, as `detail` says (`killed by signal 9`), whether or not it had
    /// joined. Has no effect for a rank that has announced its departure.
    pub fn report_death(&self, rank: usize, detail: &str) {
        self.command(Command::Death { rank, detail: detail.to_owned() });
    }

    /// The events of an elastic job since the last call.
    pub fn take_events(&self) -> Vec<JobEvent> {
        // The counter only serves to wake the poller; its value does not matter.
        let _ = rustix::io::read(&self.shared.doorbell, &mut [0; 8]);
        std::mem::take(&mut *self.shared.events.lock())
    }

    /// The counters that ranks sent before they left, by rank, since the last call.
    pub fn take_counters(&self) -> BTreeMap<usize, Snapshot> {
        std::mem::take(&mut *self.shared.counters.lock())
    }

    /// A descriptor that is readable while there may be events.
    pub fn doorbell(&self) -> BorrowedFd<'_> {
        self.shared.doorbell.as_fd()
    }

    /// Begins a session of these workers, in the order of ranks.
    pub fn assign_ranks(&self, workers: Vec<String>) {
        self.command(Command::Assignment(workers));
    }

    /// Notifies a waiting worker that it has been removed from the job.
    pub fn remove(&self, worker: &str, reason: &str) {
        self.command(Command::Remove { worker: worker.to_owned(), reason: reason.to_owned() });
    }

    /// Notifies all members of changed hosts.
    pub fn hosts_updated(&self, update: HostsUpdated) {
        self.command(Command::HostsUpdated(update));
    }

    /// As [`Server::report_death`], of a worker of an elastic job.
    pub fn report_worker_death(&self, worker: &str, detail: &str) {
        self.command(Command::WorkerDeath { worker: worker.to_owned(), detail: detail.to_owned() });
    }

    /// Waits until no member is connected, at most until `deadline` or until `stop` returns true. Returns whether
    /// that is so.
    pub fn wait_until_empty(&self, deadline: Instant, stop: impl Fn() -> bool) -> bool {
        let mut connected = self.shared.connected.lock();
        while *connected > 0 && Instant::now() < deadline {
            if parking_lot::MutexGuard::unlocked(&mut connected, &stop) {
                break;
            }
            let nap = deadline.min(Instant::now() + Duration::from_millis(50));
            self.shared.changed.wait_until(&mut connected, nap);
        }
        *connected == 0
    }

    fn command(&self, command: Command) {
        self.shared.commands.lock().push(command);
        if let Err(error) = self.waker.wake() {
            tracing::error!("waking the rendezvous: {error}");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The thread does not exist in a forked child.
        if fork::is_child() {
            return;
        }
        self.command(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

enum ConnectionStage {
    /// The client has not proved that it knows the secret.
    Unauthenticated { challenge: Challenge, answer: Vec<u8> },
    /// The client has proved it.
    Open { sealer: Sealer, opener: Opener },
}

struct Connection {
    _guard: fork::Guard,
    stream: mio::net::TcpStream,
    peer: SocketAddr,
    stage: ConnectionStage,
    /// When it must have joined.
    deadline: Option<Instant>,
    out: Vec<u8>,
    sent: usize,
    /// Whether the connection is not read any more, and is closed when `out` is sent.
    closing: bool,
}

struct Loop {
    _guard: fork::Guard,
    listener: mio::net::TcpListener,
    poll: Poll,
    job: Job,
    options: ServerOptions,
    connections: HashMap<Token, Connection>,
    /// Connections that have not joined, oldest first, with the time of their arrival.
    unauthenticated: BTreeMap<Token, Instant>,
    next: usize,
    /// Whether the listener may have more connections, or could not accept for lack of a slot.
    accept_again: bool,
    /// Connections with more data to read.
    again: HashSet<Token>,
    /// Connections to close when their output is sent.
    closing: HashSet<Token>,
    refusals: Refusals,
    shared: Arc<ServerState>,
}

impl Loop {
    fn run(mut self) {
        let mut events = Events::with_capacity(256);
        loop {
            if let Err(error) = self.poll.poll(&mut events, self.timeout()) {
                if error.kind() == ErrorKind::Interrupted {
                    continue;
                }
                tracing::error!("the rendezvous ends: {error}");
                return;
            }
            let mut ready: HashSet<Token> = std::mem::take(&mut self.again);
            for event in &events {
                match event.token() {
                    LISTENER => self.accept_again = true,
                    WAKER => {}
                    token => {
                        ready.insert(token);
                    }
                }
            }
            if !self.run_commands() {
                return;
            }
            for token in ready {
                self.serve_connection(token);
            }
            if self.accept_again {
                self.accept();
            }
            let now = Instant::now();
            self.job.tick(now);
            self.expire(now);
            self.send_outbox();
            self.refusals.summarize(now);
            self.publish();
        }
    }

    /// The time until the next timer, during which only events can cause work.
    fn timeout(&self) -> Option<Duration> {
        let now = Instant::now();
        if !self.again.is_empty() {
            return Some(Duration::ZERO);
        }
        let accept = self.accept_again.then(|| now + Duration::from_millis(5));
        let handshake = self.unauthenticated.values().next().map(|came| *came + HANDSHAKE_TIME);
        let next = [accept, handshake, self.job.next_tick(), self.refusals.due()].into_iter().flatten().min()?;
        // mio rounds down to milliseconds, so one is added; otherwise the loop would spin during the last one.
        Some(next.saturating_duration_since(now) + Duration::from_millis(1))
    }

    fn run_commands(&mut self) -> bool {
        for command in std::mem::take(&mut *self.shared.commands.lock()) {
            match command {
                Command::Death { rank, detail } => self.job.report_death(rank, &detail),
                Command::WorkerDeath { worker, detail } => self.job.report_worker_death(&worker, &detail),
                Command::Assignment(workers) => self.job.assign_ranks(&workers),
                Command::Remove { worker, reason } => self.job.remove(&worker, &reason),
                Command::HostsUpdated(update) => self.job.hosts_updated(update),
                Command::Stop => return false,
            }
        }
        true
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPT_BATCH {
            if self.unauthenticated.len() >= MAX_UNAUTHENTICATED && !self.evict_oldest() {
                return; // the rest waits in the listen queue
            }
            match self.listener.accept() {
                Ok((stream, peer)) => {
                    if let Err(error) = self.admit(stream, peer) {
                        tracing::debug!("a connection from {peer} could not be served: {error}");
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.accept_again = false;
                    return;
                }
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // Usually, the process has no free descriptor: the loop tries again a little later.
                    self.refusals.note(None, &format!("accepting a connection: {error}"));
                    return;
                }
            }
        }
    }

    fn admit(&mut self, mut stream: mio::net::TcpStream, peer: SocketAddr) -> Result<()> {
        let token = Token(self.next);
        self.next += 1;
        let guard = fork::Guard::new(&stream);
        self.poll
            .registry()
            .register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)
            .map_err(|error| Error::io("watching a connection", error))?;
        let challenge = Challenge::new()?;
        let now = Instant::now();
        let connection = Connection {
            _guard: guard,
            stream,
            peer,
            out: challenge.greeting().to_vec(),
            sent: 0,
            stage: ConnectionStage::Unauthenticated { challenge, answer: Vec::new() },
            deadline: Some(now + HANDSHAKE_TIME),
            closing: false,
        };
        self.connections.insert(token, connection);
        self.unauthenticated.insert(token, now);
        self.flush(token);
        Ok(())
    }

    /// Closes the oldest unauthenticated connection in favour of a new one, if it is old enough.
    fn evict_oldest(&mut self) -> bool {
        match self.unauthenticated.first_key_value() {
            Some((&token, came)) if came.elapsed() >= UNAUTHENTICATED_TIME => {
                self.drop_connection(token, "was closed to make room for others before it proved the job's secret");
                true
            }
            _ => false,
        }
    }

    fn expire(&mut self, now: Instant) {
        while let Some((&token, &came)) = self.unauthenticated.first_key_value() {
            if came + HANDSHAKE_TIME > now {
                return;
            }
            self.drop_connection(token, "did not prove the job's secret and join in time");
        }
    }

    fn serve_connection(&mut self, token: Token) {
        self.flush(token);
        let Some(connection) = self.connections.get_mut(&token).filter(|connection| !connection.closing) else {
            return;
        };
        let mut piece = [0; 1 << 14];
        let mut read = 0;
        while read < READ_BATCH {
            match connection.stream.read(&mut piece) {
                Ok(0) => return self.drop_connection(token, "ended without `shutdown()`"),
                Ok(count) => {
                    read += count;
                    if let Err(why) = take(token, connection, &self.options, &mut self.job, &piece[..count]) {
                        self.flush(token);
                        return self.drop_connection(token, &why);
                    }
                    if connection.closing {
                        self.closing.insert(token);
                        break;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return self.lose_connection(token, &error),
            }
        }
        if connection.deadline.is_none() {
            self.unauthenticated.remove(&token);
        }
        if read >= READ_BATCH {
            self.again.insert(token);
        }
        self.flush(token);
    }

    fn send_outbox(&mut self) {
        let mut touched = Vec::new();
        for (to, message) in self.job.take_outbox() {
            let token = Token(to as usize);
            let Some(connection) = self.connections.get_mut(&token) else { continue };
            if let ConnectionStage::Open { sealer, .. } = &mut connection.stage {
                sealer.seal(&message::encode(&message), &mut connection.out);
                touched.push(token);
            }
        }
        for token in touched {
            self.flush(token);
        }
        for token in std::mem::take(&mut self.closing) {
            match self.connections.get(&token) {
                Some(connection) if connection.sent < connection.out.len() => drop(self.closing.insert(token)),
                _ => drop(self.close(token)),
            }
        }
    }

    fn flush(&mut self, token: Token) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        while connection.sent < connection.out.len() {
            match connection.stream.write(&connection.out[connection.sent..]) {
                Ok(count) => connection.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if connection.out.len() - connection.sent > MAX_BACKLOG {
                        self.drop_connection(token, "does not read the messages that it is sent");
                    }
                    return;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return self.lose_connection(token, &error),
            }
        }
        connection.out.clear();
        connection.sent = 0;
    }

    /// Closes a connection on which the system reports an error.
    fn lose_connection(&mut self, token: Token, error: &std::io::Error) {
        let joined = self
            .connections
            .get(&token)
            .is_some_and(|it| matches!(it.stage, ConnectionStage::Open { .. }) && !it.closing);
        if joined && socket::is_silence(error.kind()) {
            self.close(token);
            return self.job.host_lost(token.0 as u64, self.options.peer_timeout);
        }
        self.drop_connection(token, &format!("was lost: {error}"));
    }

    /// Closes a connection that did not end in good order.
    fn drop_connection(&mut self, token: Token, why: &str) {
        let Some(connection) = self.close(token) else { return };
        match connection.stage {
            ConnectionStage::Unauthenticated { .. } => self.refusals.note(Some(connection.peer), why),
            ConnectionStage::Open { .. } if connection.closing => {}
            ConnectionStage::Open { .. } => {
                tracing::debug!("the connection from {} {why}", connection.peer);
                self.job.disconnected(token.0 as u64, why, Instant::now());
            }
        }
    }

    fn close(&mut self, token: Token) -> Option<Connection> {
        self.unauthenticated.remove(&token);
        self.again.remove(&token);
        let mut connection = self.connections.remove(&token)?;
        let _ = self.poll.registry().deregister(&mut connection.stream);
        Some(connection)
    }

    fn publish(&mut self) {
        let counters = self.job.take_counters();
        if !counters.is_empty() {
            self.shared.counters.lock().extend(counters);
        }
        let events = self.job.take_events();
        if !events.is_empty() {
            self.shared.events.lock().extend(events);
            // The write fails only if the pipe is full, and then it is readable.
            let _ = rustix::io::write(&self.shared.doorbell, &1u64.to_ne_bytes());
        }
        let mut connected = self.shared.connected.lock();
        if *connected != self.job.connected() {
            *connected = self.job.connected();
            self.shared.changed.notify_all();
        }
    }
}

/// Handles bytes from `connection`.
fn take(
    token: Token,
    connection: &mut Connection,
    options: &ServerOptions,
    job: &mut Job,
    mut bytes: &[u8],
) -> Result<(), String> {
    if let ConnectionStage::Unauthenticated { challenge, answer } = &mut connection.stage {
        let (head, rest) = bytes.split_at(bytes.len().min(ANSWER_BYTES - answer.len()));
        answer.extend_from_slice(head);
        let Ok(answer) = <&[u8; ANSWER_BYTES]>::try_from(answer.as_slice()) else { return Ok(()) };
        let Some((proof, keys)) = challenge.verify(&options.key, answer) else {
            connection.out.extend_from_slice(&REFUSAL);
            return Err("does not know the job's secret".to_owned());
        };
        socket::configure(&connection.stream, options.peer_timeout).map_err(|error| error.report())?;
        connection.out.extend_from_slice(&proof);
        connection.stage = ConnectionStage::Open {
            sealer: Sealer::new(keys.send, TagOptions::CONTROL),
            opener: Opener::new(keys.receive),
        };
        bytes = rest;
    }
    let ConnectionStage::Open { opener, .. } = &mut connection.stage else { return Ok(()) };
    opener.feed(bytes);
    loop {
        let payload = match opener.next() {
            Ok(Some(payload)) => payload,
            Ok(None) => return Ok(()),
            Err(error) => return Err(format!("broke the protocol: {error}")),
        };
        let message = message::decode::<ToServer>(payload).map_err(|error| format!("broke the protocol: {error}"))?;
        match job.receive(token.0 as u64, message).map_err(|error| format!("broke the protocol: {error}"))? {
            Disposition::Keep => connection.deadline = None,
            Disposition::Close => {
                connection.closing = true;
                return Ok(());
            }
        }
    }
}
