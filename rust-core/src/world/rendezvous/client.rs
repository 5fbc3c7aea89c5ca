//! A rank's connection to the rendezvous. Any thread may write to it; one thread reads.

use std::collections::{HashMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::frame::{Opener, Sealer};
use super::frame_tag::TagOptions;
use super::handshake::{ChallengeResponse, GREETING_BYTES, JobKey, PROOF_BYTES, REFUSAL, SessionKeys};
use super::message::{
    self, HostsUpdated, Join, MAX_KEY, MAX_VALUE, RankAssignment, ToClient, ToServer, Welcome, shorten,
};
use super::owner_socket;
use crate::error::{Error, Limit, Result};
use crate::metrics::Snapshot;
use crate::world::{Departure, Monitor, Store, fork, socket};

/// A time limit longer than any job.
const NEVER: Duration = Duration::from_secs(u32::MAX as u64);
/// Time limit of one step of a handshake, because another program that sends nothing may have the port.
const STEP_TIME: Duration = Duration::from_secs(2);
/// First time limit of a connection attempt, doubled in each round. If the server's listen queue is full, a new
/// attempt succeeds earlier than the kernel's retransmission.
const FIRST_CONNECT_TIME: Duration = Duration::from_millis(250);
/// First and longest pause between two rounds over the addresses.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// After this time without a rendezvous, a rank says once where it looks: the address may be wrong.
const UNUSUAL_SEARCH_TIME: Duration = Duration::from_secs(20);
/// Longest sleep between two checks of the interrupt flag.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long to wait for the server to receive the departure message.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// Candidates for the address of the rendezvous, with its key.
#[derive(Clone, Debug)]
pub enum RendezvousLocation {
    /// One of several addresses.
    At {
        /// As `host:port`; the secret shows which one is right.
        addresses: Vec<String>,
        /// The job's key.
        key: JobKey,
    },
    /// On this host: rank 0's process provides the address and the secret under the job's name ([`owner_socket`]).
    OnThisHost {
        /// The job's name.
        job: String,
    },
}

impl RendezvousLocation {
    /// The addresses to try now. On this host, a process may provide a new ticket at any time.
    fn candidates(&self) -> Result<Vec<(String, JobKey)>, String> {
        match self {
            Self::At { addresses, key } => Ok(addresses.iter().map(|it| (it.clone(), key.clone())).collect()),
            Self::OnThisHost { job } => {
                let servers = owner_socket::find_servers(job)?;
                Ok(servers.iter().map(|it| (it.address.to_string(), JobKey::new(&it.secret))).collect())
            }
        }
    }
}

impl std::fmt::Display for RendezvousLocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::At { addresses, .. } => write!(f, "at {}", addresses.join(", ")),
            Self::OnThisHost { .. } => f.write_str("that rank 0 serves for this user on this host"),
        }
    }
}

/// Options of joining.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// The candidates for the address.
    pub location: RendezvousLocation,
    /// Whether rank 0's process serves the rendezvous, so that losing it means losing rank 0.
    pub served_by_rank_0: bool,
    /// When to give up.
    pub deadline: Instant,
    /// A host that is silent for this long counts as lost.
    pub peer_timeout: Duration,
}

#[derive(Default)]
struct ClientState {
    welcome: Option<Welcome>,
    assignment: Option<RankAssignment>,
    removed: Option<String>,
    hosts_updated: VecDeque<HostsUpdated>,
    refused: Option<String>,
    missing: Option<Vec<u32>>,
    /// Answers of the store, by ticket.
    answers: HashMap<u64, Lookup>,
    next_ticket: u64,
    /// Received notifications that were not returned yet.
    num_notifications: u64,
    /// Whether the reader thread has ended.
    ended: bool,
    /// Whether this side has announced its departure.
    leaving: bool,
}

/// Whether a departure ends a wait whose condition does not hold.
enum Departures {
    Matter,
    Wait,
}

/// The state of a request to the store.
enum Lookup {
    /// No answer yet: the server may have a value that a rank wrote before it departed.
    Requested,
    /// The key is not written yet.
    NotYet,
    Value(Vec<u8>),
}

struct Writer {
    stream: TcpStream,
    sealer: Sealer,
    buffer: Vec<u8>,
}

/// A connection that has joined, or is joining.
pub struct Client {
    _guard: fork::Guard,
    address: String,
    served_by_rank_0: bool,
    peer_timeout: Duration,
    key: JobKey,
    ends: (SocketAddr, SocketAddr),
    monitor: Arc<Monitor>,
    writer: Mutex<Writer>,
    state: Mutex<ClientState>,
    changed: Condvar,
    reader: Mutex<Option<JoinHandle<()>>>,
}

impl Client {
    /// Finds the rendezvous, joins, and waits until all ranks have joined. Departures are then reported to `monitor`.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] if the job rejects this rank; [`Error::Timeout`] naming the ranks that did not join;
    /// [`Error::PeerFailed`] if one of them departed; [`Error::Interrupted`].
    pub fn join(options: &ClientOptions, join: Join, monitor: Arc<Monitor>) -> Result<(Arc<Self>, Welcome)> {
        let start = Instant::now();
        let client = Self::connect(options, monitor, start)?;
        let welcome = client.take_place(join, start, options.deadline)?;
        Ok((client, welcome))
    }

    /// Finds the rendezvous of an elastic job. [`Client::wait_for_rank`] follows.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] if the launcher does not answer before the deadline, or has another secret;
    /// [`Error::Interrupted`].
    pub fn reach_launcher(options: &ClientOptions, monitor: Arc<Monitor>) -> Result<Arc<Self>> {
        Self::connect(options, monitor, Instant::now()).map_err(|error| match error {
            // No later attempt would succeed: the launcher has served the rendezvous since before this process began.
            Error::Timeout { during, waited, .. } => Error::Rendezvous(format!(
                "{during}: the launcher of this elastic job, which serves it, did not answer for {waited:.1?}"
            )),
            other => other,
        })
    }

    /// Waits for a rank without a time limit: the launcher ends jobs that wait too long, and its own end is noticed.
    /// [`Client::take_place`] follows.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] if the launcher rejects this worker; [`Error::Removed`] if it has no place for it;
    /// [`Error::Closed`] if the connection ends; [`Error::Interrupted`].
    pub fn wait_for_rank(&self, worker: &str) -> Result<RankAssignment> {
        let start = Instant::now();
        let during = "init(): waiting for a place in the job";
        let outcome = self.send(&ToServer::Enter { worker: worker.to_owned() }).and_then(|()| {
            self.wait(during, start, start + NEVER, &[], |state| {
                if let Some(reason) = state.refused.take() {
                    return Ok(Err(Error::Rendezvous(reason)));
                }
                if let Some(reason) = state.removed.take() {
                    return Ok(Err(Error::Removed(reason)));
                }
                state.assignment.take().map(Ok).ok_or(Departures::Wait)
            })
        });
        outcome.and_then(|assignment| assignment).inspect_err(|_| self.leave())
    }

    fn connect(options: &ClientOptions, monitor: Arc<Monitor>, start: Instant) -> Result<Arc<Self>> {
        let (stream, keys, address, key) = connect(options, &monitor, start)?;
        let io = |error| Error::io(format!("using the connection to the rendezvous at {address}"), error);
        let reading = stream.try_clone().map_err(io)?;
        let client = Arc::new(Self {
            _guard: fork::Guard::new(&stream),
            address: address.clone(),
            served_by_rank_0: options.served_by_rank_0,
            peer_timeout: options.peer_timeout,
            key,
            ends: (stream.local_addr().map_err(io)?, stream.peer_addr().map_err(io)?),
            monitor,
            writer: Mutex::new(Writer {
                stream,
                sealer: Sealer::new(keys.send, TagOptions::CONTROL),
                buffer: Vec::new(),
            }),
            state: Mutex::default(),
            changed: Condvar::new(),
            reader: Mutex::new(None),
        });
        let thread = std::thread::Builder::new().name("smd-control".into());
        let (reader, guard) = (client.clone(), fork::Guard::new(&reading));
        let opener = Opener::new(keys.receive);
        let work = move || {
            // Without the thread, departures would not be reported, so every wait ends.
            if let Some(error) = Error::of_thread("smd-control", || reader.read(guard, reading, opener)) {
                reader.monitor.close(&error.text());
            }
        };
        *client.reader.lock() = Some(thread.spawn(work).map_err(io)?);
        Ok(client)
    }

    /// Joins as a rank, and waits until all ranks have joined.
    ///
    /// # Errors
    /// As [`Client::join`].
    pub fn take_place(&self, join: Join, start: Instant, deadline: Instant) -> Result<Welcome> {
        let size = join.size as usize;
        let outcome = self.send(&ToServer::Join(join)).and_then(|()| self.wait_for_welcome(size, start, deadline));
        outcome.inspect_err(|error| {
            // The other ranks are told why this rank gives up.
            self.fail(&error.text());
            self.leave();
        })
    }

    /// Returns the oldest notification of changed hosts that was not returned yet; waits at most `timeout` for one.
    pub fn next_hosts_updated(&self, timeout: Duration) -> Option<HostsUpdated> {
        let deadline = Instant::now() + timeout;
        let mut state = self.state.lock();
        loop {
            let update = state.hosts_updated.pop_front();
            // Also waits after the end of the connection, so that callers that poll do not spin.
            if update.is_some() || self.changed.wait_until(&mut state, deadline).timed_out() {
                return update;
            }
        }
    }

    fn wait_for_welcome(&self, size: usize, start: Instant, deadline: Instant) -> Result<Welcome> {
        let all: Vec<usize> = (0..size).collect();
        let outcome = self.wait("init()", start, deadline, &all, |state| {
            if let Some(reason) = state.refused.take() {
                return Ok(Err(Error::Rendezvous(reason)));
            }
            state.welcome.take().map(Ok).ok_or(Departures::Matter)
        });
        match outcome {
            Err(Error::Timeout { during, waited, limit, .. }) => {
                Err(Error::Timeout { during, waited, missing: self.missing(), limit })
            }
            other => other?,
        }
    }

    /// The ranks that have not joined; empty if the server does not answer.
    fn missing(&self) -> Vec<usize> {
        let now = Instant::now();
        let answer = self.send(&ToServer::QueryMissing).and_then(|()| {
            self.wait("init()", now, now + LEAVE_TIMEOUT, &[], |state| state.missing.take().ok_or(Departures::Wait))
        });
        answer.unwrap_or_default().into_iter().map(|rank| rank as usize).collect()
    }

    /// The job's key.
    pub fn key(&self) -> &JobKey {
        &self.key
    }

    /// The addresses of this end of the connection and of the server's.
    pub fn ends(&self) -> (SocketAddr, SocketAddr) {
        self.ends
    }

    /// A host that is silent for this long counts as lost.
    pub fn peer_timeout(&self) -> Duration {
        self.peer_timeout
    }

    /// Reports to the other ranks that this one failed.
    pub fn fail(&self, message: &str) {
        let _ = self.send(&ToServer::Fail { message: shorten(message) });
    }

    /// Sends the counters of this rank to the launcher.
    pub fn report_counters(&self, snapshot: &Snapshot) {
        // If the connection is lost, the launcher has no counters of this rank; the job does not depend on them.
        let _ = self.send(&ToServer::Counters(snapshot.clone()));
    }

    /// Announces the departure and closes the connection. Does nothing on a second call.
    pub fn leave(&self) {
        if std::mem::replace(&mut self.state.lock().leaving, true) {
            return;
        }
        let sent = self.send(&ToServer::Depart);
        // Waits until the server has closed its side. Closing this side while bytes are unread could reset the
        // connection before the server reads the departure message, which would count as a death.
        if sent.is_ok() {
            self.await_end();
        }
        let _ = self.writer.lock().stream.shutdown(Shutdown::Both);
        if let Some(reader) = self.reader.lock().take() {
            let _ = reader.join();
        }
    }

    /// Waits until the reader has seen the end of the connection, which follows soon.
    fn await_end(&self) {
        let deadline = Instant::now() + LEAVE_TIMEOUT;
        let mut state = self.state.lock();
        while !state.ended && !self.changed.wait_until(&mut state, deadline).timed_out() {}
    }

    fn send(&self, message: &ToServer) -> Result<()> {
        let payload = message::encode(message);
        let mut writer = self.writer.lock();
        let Writer { stream, sealer, buffer } = &mut *writer;
        buffer.clear();
        sealer.seal(&payload, buffer);
        stream
            .write_all(buffer)
            .map_err(|error| Error::io(format!("sending to the rendezvous at {}", self.address), error))
    }

    /// Waits until `poll` returns a result. Otherwise `poll` returns whether a departure of `waiting_for` ends the
    /// wait.
    fn wait<T>(
        &self,
        during: &str,
        start: Instant,
        deadline: Instant,
        waiting_for: &[usize],
        mut poll: impl FnMut(&mut ClientState) -> Result<T, Departures>,
    ) -> Result<T> {
        let mut state = self.state.lock();
        loop {
            let seen = state.num_notifications;
            // Departures are read before the condition, so that a result from before a departure is not lost.
            let departed = self.monitor.check(waiting_for, during);
            match poll(&mut state) {
                Ok(found) => return Ok(found),
                Err(Departures::Matter) => departed?,
                Err(Departures::Wait) => {}
            }
            if state.ended {
                return Err(self.closed(waiting_for, during));
            }
            let now = Instant::now();
            if now >= deadline {
                let missing = waiting_for.to_vec();
                let (during, waited) = (during.to_owned(), now - start);
                return Err(Error::Timeout { during, waited, missing, limit: Limit::default() });
            }
            if MutexGuard::unlocked(&mut state, || self.monitor.interrupted()) {
                return Err(Error::Interrupted { during: during.to_owned() });
            }
            // A change while the lock was released would not end the sleep.
            if state.num_notifications == seen {
                self.changed.wait_until(&mut state, deadline.min(now + POLL_INTERVAL));
            }
        }
    }

    /// The error of waits after the connection has ended.
    fn closed(&self, waiting_for: &[usize], during: &str) -> Error {
        let reason = format!("the connection to the rendezvous at {} has ended", self.address);
        self.monitor.check(waiting_for, during).err().unwrap_or(Error::Closed { reason })
    }

    /// The body of the reader thread.
    fn read(&self, _guard: fork::Guard, mut stream: TcpStream, mut opener: Opener) {
        let mut piece = [0; 1 << 14];
        let mut silent = false;
        let why = 'connection: loop {
            match stream.read(&mut piece) {
                Ok(0) => break "it was closed".to_owned(),
                Ok(count) => opener.feed(&piece[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => {
                    silent = socket::is_silence(error.kind());
                    break error.to_string();
                }
            }
            loop {
                let message = match opener.next() {
                    Ok(Some(payload)) => message::decode(payload),
                    Ok(None) => break,
                    Err(error) => Err(error.to_string()),
                };
                match message {
                    Ok(message) => self.take(message),
                    Err(error) => break 'connection error,
                }
            }
        };
        let _ = stream.shutdown(Shutdown::Both);
        let mut state = self.state.lock();
        if !state.leaving && state.refused.is_none() {
            self.lost(&why, silent);
        }
        state.ended = true;
        self.changed.notify_all();
    }

    /// Without the rendezvous, further deaths would not be reported, so the session ends.
    fn lost(&self, why: &str, silent: bool) {
        let reason = format!("the connection to the rendezvous at {} was lost: {why}", self.address);
        tracing::debug!("{reason}");
        if self.served_by_rank_0 {
            let detail = match silent {
                true => format!("no sign of its host, which served the rendezvous, for {:.0?}", self.peer_timeout),
                false => {
                    format!("its process, which served the rendezvous at {}, ended without `shutdown()`", self.address)
                }
            };
            self.monitor.close_after(0, Departure::Died { detail }, &reason);
        }
        self.monitor.close(&reason);
    }

    fn take(&self, message: ToClient) {
        let mut state = self.state.lock();
        state.num_notifications += 1;
        match message {
            ToClient::Refused { reason } => state.refused = Some(reason),
            ToClient::Welcome(welcome) => state.welcome = Some(welcome),
            ToClient::Assignment(assignment) => state.assignment = Some(assignment),
            ToClient::Removed { reason } => state.removed = Some(reason),
            ToClient::HostsUpdated(update) => state.hosts_updated.push_back(update),
            ToClient::Missing { ranks } => state.missing = Some(ranks),
            // If the ticket does not exist, the wait for it was given up.
            ToClient::Value { ticket, value } => {
                state.answers.entry(ticket).and_modify(|lookup| *lookup = Lookup::Value(value));
            }
            ToClient::NotYet { ticket } => {
                state.answers.entry(ticket).and_modify(|lookup| *lookup = Lookup::NotYet);
            }
            ToClient::Notice { rank, departure } => {
                tracing::debug!("rank {rank} {departure}");
                self.monitor.report(rank as usize, departure);
            }
        }
        self.changed.notify_all();
    }
}

impl Store for Client {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        if key.len() > MAX_KEY || value.len() > MAX_VALUE {
            let (key, value) = (key.len(), value.len());
            return Err(Error::InvalidArgument(format!(
                "the store takes keys of {MAX_KEY} and values of {MAX_VALUE} bytes at most, not {key} and {value}"
            )));
        }
        self.send(&ToServer::Set { key: key.to_owned(), value: value.to_vec() })
    }

    fn get(&self, key: &str, waiting_for: &[usize], timeout: Duration) -> Result<Vec<u8>> {
        let ticket = {
            let mut state = self.state.lock();
            state.next_ticket += 1;
            let ticket = state.next_ticket;
            state.answers.insert(ticket, Lookup::Requested);
            ticket
        };
        let start = Instant::now();
        let during = format!("waiting for `{key}`");
        let sent = self.send(&ToServer::Get { ticket, key: key.to_owned() });
        let outcome = match sent {
            Ok(()) => {
                self.wait(&during, start, start + timeout, waiting_for, |state| match state.answers.get_mut(&ticket) {
                    Some(Lookup::Value(value)) => Ok(std::mem::take(value)),
                    Some(Lookup::Requested) => Err(Departures::Wait),
                    Some(Lookup::NotYet) | None => Err(Departures::Matter),
                })
            }
            Err(_) => {
                // The reader thread reports the error.
                self.await_end();
                Err(self.closed(waiting_for, &during))
            }
        };
        self.state.lock().answers.remove(&ticket);
        if outcome.is_err() {
            let _ = self.send(&ToServer::Forget { ticket });
        }
        outcome
    }

    fn remove_prefix(&self, prefix: &str) -> Result<()> {
        self.send(&ToServer::RemovePrefix { prefix: prefix.to_owned() })
    }

    fn release(&self, prefix: &str, members: usize) -> Result<()> {
        self.send(&ToServer::Release { prefix: prefix.to_owned(), members: members as u32 })
    }
}

/// A connection to the job's rendezvous, with its keys, its address and the job's key.
type Connected = (TcpStream, SessionKeys, String, JobKey);

/// Tries the addresses until one proves that it is the job's rendezvous.
fn connect(options: &ClientOptions, monitor: &Monitor, start: Instant) -> Result<Connected> {
    let mut pause = FIRST_PAUSE;
    let mut connect_time = FIRST_CONNECT_TIME;
    let mut problem = String::from("no server listens");
    // The first error says more than the following ones.
    let mut refusal = None;
    let mut has_warned = false;
    loop {
        let candidates = options.location.candidates().unwrap_or_else(|error| {
            problem = error;
            Vec::new()
        });
        for (address, key) in candidates {
            match try_address(&address, &key, options, connect_time) {
                Ok(FoundServer::Rendezvous(stream, keys)) => return Ok((stream, keys, address, key)),
                Ok(FoundServer::Unauthenticated) => problem = format!("{address} belongs to another job"),
                Ok(FoundServer::OtherSecret) => {
                    if let RendezvousLocation::At { addresses, .. } = &options.location
                        && addresses.len() == 1
                    {
                        return Err(Error::Rendezvous(format!(
                            "the rendezvous at {address} does not accept this process's secret (`SMD_SECRET`)"
                        )));
                    }
                    refusal = Some(format!("{address} does not accept this job's secret"));
                }
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
                Err(error) => problem = format!("{address}: {error}"),
            }
            if monitor.interrupted() {
                return Err(Error::Interrupted { during: "init()".to_owned() });
            }
        }
        if monitor.interrupted() {
            return Err(Error::Interrupted { during: "init()".to_owned() });
        }
        let problem = refusal.as_ref().unwrap_or(&problem);
        if Instant::now() >= options.deadline {
            let during = format!("init(): finding the rendezvous {} ({problem}){}", options.location, hint(options));
            return Err(Error::Timeout { during, waited: start.elapsed(), missing: vec![0], limit: Limit::Init });
        }
        if !has_warned && start.elapsed() > UNUSUAL_SEARCH_TIME {
            has_warned = true;
            tracing::warn!(
                "after {} s, the rendezvous {} is not found: {problem}{}; trying for {:.0?} more",
                UNUSUAL_SEARCH_TIME.as_secs(),
                options.location,
                hint(options),
                options.deadline.saturating_duration_since(Instant::now()),
            );
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
        connect_time = (connect_time * 2).min(STEP_TIME);
    }
}

/// What to check if no rendezvous is at the address that a launcher's variables give.
fn hint(options: &ClientOptions) -> &'static str {
    match &options.location {
        RendezvousLocation::At { .. } if options.served_by_rank_0 => {
            "; rank 0 may still be starting; `MASTER_ADDR` must be an address of its host, whose ports this host can reach"
        }
        _ => "",
    }
}

enum FoundServer {
    /// A rendezvous with the job's secret.
    Rendezvous(TcpStream, SessionKeys),
    /// A rendezvous with another secret.
    OtherSecret,
    /// Another program.
    Unauthenticated,
}

/// Connects to `address` and identifies the server.
fn try_address(
    address: &str,
    key: &JobKey,
    options: &ClientOptions,
    connect_time: Duration,
) -> std::io::Result<FoundServer> {
    let addresses: Vec<SocketAddr> = address.to_socket_addrs()?.collect();
    let mut outcome = Err(std::io::Error::new(ErrorKind::NotFound, "the name has no address"));
    for address in addresses {
        let remaining = options.deadline.saturating_duration_since(Instant::now()).max(POLL_INTERVAL);
        outcome = TcpStream::connect_timeout(&address, remaining.min(connect_time));
        if outcome.is_ok() {
            break;
        }
    }
    let mut stream = outcome?;
    socket::configure(&stream, options.peer_timeout).map_err(std::io::Error::other)?;
    stream.set_read_timeout(Some(STEP_TIME))?;
    let mut greeting = [0; GREETING_BYTES];
    stream.read_exact(&mut greeting)?;
    let Some(answer) = ChallengeResponse::new(&greeting).map_err(std::io::Error::other)? else {
        return Ok(FoundServer::Unauthenticated);
    };
    stream.write_all(&answer.bytes(key))?;
    let mut proof = [0; PROOF_BYTES];
    stream.read_exact(&mut proof)?;
    let Some(keys) = answer.verify(key, &proof) else {
        return Ok(if proof == REFUSAL { FoundServer::OtherSecret } else { FoundServer::Unauthenticated });
    };
    stream.set_read_timeout(None)?;
    Ok(FoundServer::Rendezvous(stream, keys))
}
