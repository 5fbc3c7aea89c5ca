//! The rendezvous over TCP: one thread, a mio loop. What unauthenticated connections can cost is bounded here (RDV-1).

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
use super::handshake::{ANSWER_BYTES, Challenge, JobKey, REFUSAL};
use super::job::{Disposition, Job, JobEvent};
use super::message::{self, HostsUpdated, ToServer};
use super::refusals::Refusals;
use crate::error::{Error, Result};
use crate::world::{fork, socket};

/// How long a connection may take to prove itself and join.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// Connections that have not proved themselves, at most.
const MAX_UNAUTHENTICATED: usize = 256;
/// An unauthenticated connection of this age may be closed for a new one. A member whose connection is closed so tries again.
const UNAUTHENTICATED_TIME: Duration = Duration::from_millis(30);
/// Connections that wait to be accepted.
const LISTEN_QUEUE: i32 = 4096;
/// Connections accepted before members are served again.
const ACCEPT_BATCH: usize = 32;
/// Bytes read from one connection before the others are served again.
const READ_BATCH: usize = 1 << 18;
/// Bytes that may wait for a member that does not read them.
const MAX_BACKLOG: usize = 64 * MAX_PAYLOAD;
/// How long the launcher has to tell why a process died before the lost connection alone is told.
const PATIENCE: Duration = Duration::from_millis(200);

const LISTENER: Token = Token(0);
const WAKER: Token = Token(1);
const FIRST_CONNECTION: usize = 2;

/// How to serve.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Who may join.
    pub key: JobKey,
    /// Processes of the job; none: the launcher of an elastic job gives out the ranks.
    pub size: Option<usize>,
    /// How long to wait for [`Server::report_death`] after a connection was lost.
    pub patience: Duration,
    /// Silence after which a host counts as vanished.
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
    /// Becomes readable when there are events.
    bell: OwnedFd,
}

/// A running rendezvous; dropping it ends it.
pub struct Server {
    address: SocketAddr,
    shared: Arc<ServerState>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves a job of `world_size` processes at `bind`, for a launcher that watches its processes and calls
    /// [`Server::report_death`].
    ///
    /// # Errors
    /// [`Error::Io`] if the address cannot be bound; [`Error::Config`] for a bad timeout in the environment.
    pub fn start(bind: SocketAddr, secret: &[u8], world_size: usize) -> Result<Self> {
        let listener =
            TcpListener::bind(bind).map_err(|e| Error::io(format!("binding the rendezvous to {bind}"), e))?;
        let peer_timeout = crate::config::PEER_TIMEOUT_SECONDS.seconds()?;
        Self::serve(
            listener,
            ServerOptions { key: JobKey::new(secret), size: Some(world_size), patience: PATIENCE, peer_timeout },
        )
    }

    /// As [`Server::start`], for a job whose processes come and go: [`Server::seat`] gives out the ranks of each session.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start_elastic(bind: SocketAddr, secret: &[u8]) -> Result<Self> {
        let listener =
            TcpListener::bind(bind).map_err(|e| Error::io(format!("binding the rendezvous to {bind}"), e))?;
        let peer_timeout = crate::config::PEER_TIMEOUT_SECONDS.seconds()?;
        Self::serve(listener, ServerOptions { key: JobKey::new(secret), size: None, patience: PATIENCE, peer_timeout })
    }

    /// Serves at `listener`.
    ///
    /// # Errors
    /// [`Error::Io`] if the system refuses the loop's resources.
    pub fn serve(listener: TcpListener, options: ServerOptions) -> Result<Self> {
        let io = |error| Error::io("starting the rendezvous", error);
        let address = listener.local_addr().map_err(io)?;
        listener.set_nonblocking(true).map_err(io)?;
        // The standard library's queue is short.
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
            bell: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(|error| io(error.into()))?,
        });
        let server = Loop {
            _guard: fork::Guard::new(&listener),
            listener,
            poll,
            job: match options.size {
                Some(size) => Job::new(size, options.patience, u64::from_le_bytes(seed)),
                None => Job::elastic(options.patience, u64::from_le_bytes(seed)),
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

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Tells the job that the process of `rank` ended, as `detail` says (`killed by signal 9`), whether it had joined
    /// or not. Ranks that said goodbye before are not affected.
    pub fn report_death(&self, rank: usize, detail: &str) {
        self.command(Command::Death { rank, detail: detail.to_owned() });
    }

    /// What workers of an elastic job have asked for since the last call.
    pub fn take_events(&self) -> Vec<JobEvent> {
        // The counter only wakes who waits; what it says does not matter.
        let _ = rustix::io::read(&self.shared.bell, &mut [0; 8]);
        std::mem::take(&mut *self.shared.events.lock())
    }

    /// Is readable while there may be events.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.shared.bell.as_fd()
    }

    /// Begins a session of these workers, in the order of ranks.
    pub fn seat(&self, workers: Vec<String>) {
        self.command(Command::Assignment(workers));
    }

    /// Tells a worker that waits for a rank that there is none.
    pub fn remove(&self, worker: &str, reason: &str) {
        self.command(Command::Remove { worker: worker.to_owned(), reason: reason.to_owned() });
    }

    /// Tells all members that hosts have come or gone.
    pub fn hosts_updated(&self, update: HostsUpdated) {
        self.command(Command::HostsUpdated(update));
    }

    /// As [`Server::report_death`], of a worker of an elastic job.
    pub fn report_worker_death(&self, worker: &str, detail: &str) {
        self.command(Command::WorkerDeath { worker: worker.to_owned(), detail: detail.to_owned() });
    }

    /// Waits until no member is connected, at most until `deadline` or until `stop` says so. Whether that is so.
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
        // A forked child has no such thread.
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
    /// Must prove that it knows the secret.
    Unauthenticated { challenge: Challenge, answer: Vec<u8> },
    /// Has proved it.
    Open { sealer: Sealer, opener: Opener },
}

struct Connection {
    _guard: fork::Guard,
    stream: mio::net::TcpStream,
    peer: SocketAddr,
    stage: ConnectionStage,
    /// Until when it must have joined.
    deadline: Option<Instant>,
    out: Vec<u8>,
    sent: usize,
    /// It is not read any more, and closed when `out` is sent.
    closing: bool,
}

struct Loop {
    _guard: fork::Guard,
    listener: mio::net::TcpListener,
    poll: Poll,
    job: Job,
    options: ServerOptions,
    connections: HashMap<Token, Connection>,
    /// Those that have not joined, oldest first, with the time they came.
    unauthenticated: BTreeMap<Token, Instant>,
    next: usize,
    /// The listener has more, or could not accept for want of a slot.
    accept_again: bool,
    /// Connections that have more to read.
    again: HashSet<Token>,
    /// Connections to close when their last words are sent.
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

    /// How long nothing can happen that no event tells.
    fn timeout(&self) -> Option<Duration> {
        let now = Instant::now();
        if !self.again.is_empty() {
            return Some(Duration::ZERO);
        }
        let accept = self.accept_again.then(|| now + Duration::from_millis(5));
        let handshake = self.unauthenticated.values().next().map(|came| *came + HANDSHAKE_TIME);
        let next = [accept, handshake, self.job.next_tick(), self.refusals.due()].into_iter().flatten().min()?;
        // mio rounds down to milliseconds: one more, or the loop would spin through the last one.
        Some(next.saturating_duration_since(now) + Duration::from_millis(1))
    }

    fn run_commands(&mut self) -> bool {
        for command in std::mem::take(&mut *self.shared.commands.lock()) {
            match command {
                Command::Death { rank, detail } => self.job.report_death(rank, &detail),
                Command::WorkerDeath { worker, detail } => self.job.report_worker_death(&worker, &detail),
                Command::Assignment(workers) => self.job.seat(&workers),
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
                    // Out of file descriptors, most likely: the loop tries again a little later.
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

    /// Makes room for a new unauthenticated connection, if the oldest one is old enough to be closed.
    fn evict_oldest(&mut self) -> bool {
        match self.unauthenticated.first_key_value() {
            Some((&token, came)) if came.elapsed() >= UNAUTHENTICATED_TIME => {
                self.drop_connection(token, "made room for others before it proved the job's secret");
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
                        self.drop_connection(token, "does not read what it is sent");
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

    /// Ends a connection on which the system reports an error.
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

    /// Ends a connection that did not end in good order.
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
        let events = self.job.take_events();
        if !events.is_empty() {
            self.shared.events.lock().extend(events);
            // It can only fail by being full, and then it is readable.
            let _ = rustix::io::write(&self.shared.bell, &1u64.to_ne_bytes());
        }
        let mut connected = self.shared.connected.lock();
        if *connected != self.job.connected() {
            *connected = self.job.connected();
            self.shared.changed.notify_all();
        }
    }
}

/// Takes bytes that `connection` sent.
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
        connection.stage = ConnectionStage::Open { sealer: Sealer::new(keys.send), opener: Opener::new(keys.receive) };
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
