//! The state machine of the rendezvous: the sessions of a job, driven by messages. It has no sockets, and time is an
//! argument, so that tests can cover every order of events.
//!
//! ```text
//!   forming --last rank joins--> running --last connection ends--> forgotten
//!      \-----a member departs---> failed ----------/
//! ```
//!
//! In an elastic job, a rank is valid for one session only: workers, which have names, enter, and the launcher
//! assigns ranks to them (`assign_ranks`).
//!
//! ```text
//!   Enter --> entered --assign_ranks()--> assigned --Join--> a member of the session that the assignment is in
//! ```

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

use super::message::{
    HostsUpdated, Join, MAX_KEY, MAX_VALUE, RankAssignment, RankLocation, ToClient, ToServer, Welcome, shorten,
};
use crate::metrics::Snapshot;
use crate::trials::split_mix64;
use crate::world::Departure;

/// Id of a connection; never reused.
pub type ConnectionId = u64;

/// Largest number of bytes in the store of one session.
const MAX_STORE_BYTES: usize = 1 << 28;

/// The action for the connection of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Keep it open.
    Keep,
    /// Close it when its outgoing messages are sent.
    Close,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JobPhase {
    Forming,
    Running,
    /// A rank departed before all had joined: no other rank may join, and the joined ones are told.
    Failed,
}

struct JobSession {
    phase: JobPhase,
    /// By rank; `None` before it joins and after its connection has ended.
    members: Vec<Option<ConnectionId>>,
    joins: Vec<Option<Join>>,
    departed: Vec<Option<Departure>>,
    store: HashMap<String, Vec<u8>>,
    store_bytes: usize,
    /// Prefixes of keys, and the ranks that have released them.
    released: HashMap<String, HashSet<usize>>,
    /// Requests that wait for a key.
    waiting: HashMap<String, Vec<(ConnectionId, u64)>>,
}

/// A connection that ended without a departure message; the launcher may still report the reason.
struct SuspectedRank {
    session: u64,
    rank: usize,
    detail: String,
    until: Instant,
}

/// An event for the launcher of an elastic job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobEvent {
    /// A worker requests a rank.
    Entered(String),
    /// A worker's request is withdrawn, because its connection has ended.
    Withdrew(String),
    /// A worker's host does not answer any more. The process may still run, but the job continues without it.
    Lost {
        /// The worker.
        worker: String,
        /// A description of the event.
        detail: String,
    },
}

#[derive(Default)]
struct Elastic {
    generation: u64,
    entered: HashMap<String, ConnectionId>,
    /// Session and rank of connections that have a rank and have not joined.
    assigned: HashMap<ConnectionId, (u64, usize)>,
    /// The last assignment of each worker.
    workers: HashMap<String, (u64, usize)>,
    events: Vec<JobEvent>,
}

/// The state of one job's rendezvous: which ranks have joined, departed or died, and the messages to send them.
pub struct Job {
    size: usize,
    death_cause_timeout: Duration,
    seed: u64,
    made: u64,
    sessions: HashMap<u64, JobSession>,
    /// Session and rank of each connection that has joined.
    connections: HashMap<ConnectionId, (u64, usize)>,
    /// Ranks whose process is known to have ended, with the reason, first death first. A rank that joins again is
    /// removed.
    gone: Vec<(usize, Departure)>,
    suspects: Vec<SuspectedRank>,
    elastic: Option<Elastic>,
    /// The counters that ranks sent before they left, by rank.
    counters: BTreeMap<usize, Snapshot>,
    outbox: Vec<(ConnectionId, ToClient)>,
}

impl Job {
    /// A job of `size` processes. A lost connection is reported after `death_cause_timeout`, so that
    /// [`Job::report_death`] can provide a better reason. `seed` makes session ids unique.
    pub fn new(size: usize, death_cause_timeout: Duration, seed: u64) -> Self {
        Self {
            size,
            death_cause_timeout,
            seed,
            made: 0,
            sessions: HashMap::new(),
            connections: HashMap::new(),
            gone: Vec::new(),
            suspects: Vec::new(),
            elastic: None,
            counters: BTreeMap::new(),
            outbox: Vec::new(),
        }
    }

    /// An elastic job.
    pub fn elastic(death_cause_timeout: Duration, seed: u64) -> Self {
        Self { elastic: Some(Elastic::default()), ..Self::new(0, death_cause_timeout, seed) }
    }

    /// Returns the events for the launcher since the last call, in order.
    pub fn take_events(&mut self) -> Vec<JobEvent> {
        self.elastic.as_mut().map(|elastic| std::mem::take(&mut elastic.events)).unwrap_or_default()
    }

    /// Begins a session of these workers, in the order of ranks. A worker that has gone meanwhile counts as dead in
    /// it.
    pub fn assign_ranks(&mut self, workers: &[String]) {
        let id = self.new_session(workers.len());
        let Some(elastic) = &mut self.elastic else { return };
        elastic.generation += 1;
        let mut absent = Vec::new();
        for (rank, worker) in workers.iter().enumerate() {
            elastic.workers.insert(worker.clone(), (id, rank));
            let Some(connection) = elastic.entered.remove(worker) else {
                absent.push(rank);
                continue;
            };
            elastic.assigned.insert(connection, (id, rank));
            let assignment =
                RankAssignment { generation: elastic.generation, rank: rank as u32, size: workers.len() as u32 };
            self.outbox.push((connection, ToClient::Assignment(assignment)));
        }
        for rank in absent {
            self.depart(id, rank, Departure::Died { detail: "it left before the session began".to_owned() });
        }
    }

    /// Notifies a waiting worker that it has been removed from the job.
    pub fn remove(&mut self, worker: &str, reason: &str) {
        if let Some(connection) = self.elastic.as_mut().and_then(|elastic| elastic.entered.remove(worker)) {
            self.outbox.push((connection, ToClient::Removed { reason: reason.to_owned() }));
        }
    }

    /// Notifies all members of sessions of changed hosts.
    pub fn hosts_updated(&mut self, update: HostsUpdated) {
        self.outbox.extend(self.connections.keys().map(|to| (*to, ToClient::HostsUpdated(update))));
    }

    /// As [`Job::report_death`], for a worker.
    pub fn report_worker_death(&mut self, worker: &str, detail: &str) {
        let Some((session, rank)) = self.elastic.as_mut().and_then(|elastic| elastic.workers.remove(worker)) else {
            return;
        };
        self.suspects.retain(|suspect| (suspect.session, suspect.rank) != (session, rank));
        self.depart(session, rank, Departure::Died { detail: shorten(detail) });
    }

    fn enter(&mut self, from: ConnectionId, worker: String) -> Disposition {
        let Some(elastic) = &mut self.elastic else {
            let reason =
                format!("worker `{worker}` requests a rank, but ranks come from the launcher's variables here");
            self.outbox.push((from, ToClient::Refused { reason }));
            return Disposition::Close;
        };
        elastic.entered.insert(worker.clone(), from);
        elastic.events.push(JobEvent::Entered(worker));
        Disposition::Keep
    }

    /// Removes a connection that is in no session.
    fn withdraw(&mut self, from: ConnectionId, departure: Departure) {
        let Some(elastic) = &mut self.elastic else { return };
        if let Some(worker) =
            elastic.entered.iter().find(|(_, connection)| **connection == from).map(|(name, _)| name.clone())
        {
            elastic.entered.remove(&worker);
            elastic.events.push(JobEvent::Withdrew(worker));
        }
        if let Some((id, rank)) = elastic.assigned.remove(&from) {
            self.depart(id, rank, departure);
            self.forget_if_empty(id);
        }
    }

    /// Returns the messages to send since the last call, in order.
    pub fn take_outbox(&mut self) -> Vec<(ConnectionId, ToClient)> {
        std::mem::take(&mut self.outbox)
    }

    /// Returns the counters that ranks have sent since the last call.
    pub fn take_counters(&mut self) -> BTreeMap<usize, Snapshot> {
        std::mem::take(&mut self.counters)
    }

    /// Number of connections that have joined and not ended.
    pub fn connected(&self) -> usize {
        self.connections.len()
    }

    /// Handles a message.
    ///
    /// # Errors
    /// If the message violates the protocol; the connection must be closed and reported to [`Job::disconnected`].
    pub fn receive(&mut self, from: ConnectionId, message: ToServer) -> Result<Disposition, String> {
        let Some(&(id, rank)) = self.connections.get(&from) else {
            return match message {
                ToServer::Join(join) => Ok(self.join(from, join)),
                ToServer::Enter { worker } => Ok(self.enter(from, worker)),
                ToServer::Fail { message } if self.elastic.is_some() => {
                    self.withdraw(from, Departure::Failed { message: shorten(&message) });
                    Ok(Disposition::Keep)
                }
                ToServer::Depart if self.elastic.is_some() => {
                    self.withdraw(from, Departure::Left);
                    Ok(Disposition::Close)
                }
                _ => Err("a message came before `Join`".to_owned()),
            };
        };
        let session = self.sessions.get_mut(&id).expect("a connection's session lives as long as the connection");
        match message {
            ToServer::Join(_) | ToServer::Enter { .. } => return Err("a second `Join` came".to_owned()),
            ToServer::Set { key, value } => {
                let outbox = &mut self.outbox;
                session.set(key, value, |to, message| outbox.push((to, message)))?;
            }
            ToServer::Get { ticket, key } => match session.store.get(&key) {
                Some(value) => self.outbox.push((from, ToClient::Value { ticket, value: value.clone() })),
                None => {
                    session.waiting.entry(key).or_default().push((from, ticket));
                    self.outbox.push((from, ToClient::NotYet { ticket }));
                }
            },
            ToServer::Forget { ticket } => session.forget(|waiter| waiter == (from, ticket)),
            ToServer::RemovePrefix { prefix } => session.remove_prefix(&prefix),
            ToServer::Release { prefix, members } => session.release(prefix, rank, members)?,
            ToServer::QueryMissing => {
                let missing = session.joins.iter().enumerate().filter(|(_, join)| join.is_none());
                let ranks = missing.map(|(rank, _)| rank as u32);
                self.outbox.push((from, ToClient::Missing { ranks: ranks.collect() }));
            }
            ToServer::Counters(snapshot) => drop(self.counters.insert(rank, snapshot)),
            ToServer::Fail { message } => self.depart(id, rank, Departure::Failed { message: shorten(&message) }),
            ToServer::Depart => {
                self.depart(id, rank, Departure::Left);
                self.forget_connection(from);
                return Ok(Disposition::Close);
            }
        }
        Ok(Disposition::Keep)
    }

    /// A connection ended without a departure message, for the reason `why`.
    pub fn disconnected(&mut self, connection: ConnectionId, why: &str, now: Instant) {
        let Some(&(session, rank)) = self.connections.get(&connection) else {
            return self.withdraw(connection, Departure::Died { detail: format!("its connection {why}") });
        };
        let join = self.sessions[&session].joins[rank].as_ref().expect("a connection's rank has joined");
        let detail = match self.gone.iter().find(|(gone, _)| *gone == rank) {
            Some((_, Departure::Died { detail })) => detail.clone(),
            _ => format!("process {} on host {} {why}", join.pid, join.hostname),
        };
        self.forget_connection(connection);
        self.suspects.push(SuspectedRank { session, rank, detail, until: now + self.death_cause_timeout });
        self.tick(now);
    }

    /// The host of a connection has not answered for `silence`: all of its ranks count as dead.
    pub fn host_lost(&mut self, connection: ConnectionId, silence: Duration) {
        self.report_lost_worker(connection, silence);
        let Some((id, rank)) = self.forget_connection(connection) else {
            return self
                .withdraw(connection, Departure::Died { detail: format!("no sign of its host for {silence:.0?}") });
        };
        let Some(session) = self.sessions.get(&id) else { return };
        let lost = session.joins[rank].as_ref().expect("a connection's rank has joined");
        let is_there = |rank: &usize| {
            session.joins[*rank].as_ref().is_some_and(|join| join.host == lost.host)
                && session.departed[*rank].is_none()
        };
        let ranks: Vec<usize> = (0..session.members.len()).filter(is_there).collect();
        let detail = format!("no sign of host {}, where ranks {ranks:?} ran, for {silence:.0?}", lost.hostname);
        for rank in ranks {
            let departure = Departure::Died { detail: detail.clone() };
            self.note_gone(rank, &departure);
            self.depart(id, rank, departure);
        }
    }

    /// Notifies the launcher of an elastic job, which cannot detect that the host of a process is gone.
    fn report_lost_worker(&mut self, connection: ConnectionId, silence: Duration) {
        let Some(elastic) = &mut self.elastic else { return };
        let place = self.connections.get(&connection).or_else(|| elastic.assigned.get(&connection));
        let is_assigned =
            || elastic.workers.iter().find(|(_, assignment)| Some(*assignment) == place).map(|(worker, _)| worker);
        let entered = elastic.entered.iter().find(|(_, from)| **from == connection).map(|(worker, _)| worker);
        // A worker that has entered again since, by another connection, is there.
        let is_there = |worker: &&String| elastic.entered.get(*worker).is_some_and(|from| *from != connection);
        if let Some(worker) = entered.or_else(is_assigned).filter(|worker| !is_there(worker)).cloned() {
            let detail = format!("no sign of its host for {silence:.0?}");
            elastic.events.push(JobEvent::Lost { worker, detail });
        }
    }

    /// The launcher saw the process of `rank` end.
    pub fn report_death(&mut self, rank: usize, detail: &str) {
        let departure = Departure::Died { detail: shorten(detail) };
        self.note_gone(rank, &departure);
        self.suspects.retain(|suspect| suspect.rank != rank);
        let sessions: Vec<u64> = self.sessions.keys().copied().collect();
        for session in sessions {
            self.depart(session, rank, departure.clone());
        }
    }

    fn note_gone(&mut self, rank: usize, departure: &Departure) {
        if self.elastic.is_some() {
            // The same rank of the next session is another process.
            return;
        }
        match self.gone.iter_mut().find(|(gone, _)| *gone == rank) {
            Some((_, known)) => known.clone_from(departure),
            None => self.gone.push((rank, departure.clone())),
        }
    }

    /// Advances the time: reports lost connections for which no better reason came.
    pub fn tick(&mut self, now: Instant) {
        let due = self.suspects.extract_if(.., |suspect| suspect.until <= now).collect::<Vec<_>>();
        for SuspectedRank { session, rank, detail, .. } in due {
            let departure = Departure::Died { detail };
            self.note_gone(rank, &departure);
            self.depart(session, rank, departure);
        }
    }

    /// When [`Job::tick`] is next needed.
    pub fn next_tick(&self) -> Option<Instant> {
        self.suspects.iter().map(|suspect| suspect.until).min()
    }

    fn join(&mut self, from: ConnectionId, join: Join) -> Disposition {
        let rank = join.rank as usize;
        let place = format!("rank {rank} (process {} on host {})", join.pid, join.hostname);
        let assignment = self.elastic.as_mut().and_then(|elastic| elastic.assigned.remove(&from));
        let size =
            assignment.map_or(self.size, |(id, _)| self.sessions.get(&id).map_or(0, |session| session.members.len()));
        if rank >= size || join.size as usize != size || assignment.is_some_and(|(_, assignment)| assignment != rank) {
            let reason = format!("{place} expects {} processes, but the job has {size}", join.size);
            return self.refuse(from, rank, reason, true);
        }
        if join.version != crate::VERSION {
            let (theirs, ours) = (&join.version, crate::VERSION);
            let reason = format!("{place} has version {theirs} of the library, but the rendezvous has {ours}");
            return self.refuse(from, rank, reason, true);
        }
        let forming =
            || self.sessions.iter().find(|(_, session)| session.phase == JobPhase::Forming).map(|(&id, _)| id);
        let id = assignment.map(|(id, _)| id).or_else(forming);
        let id = id.unwrap_or_else(|| self.new_session(self.size));
        let session = self.sessions.get_mut(&id).expect("it was found or made above");
        if let Some(first) = &session.joins[rank] {
            let reason =
                format!("{place} came after process {} on host {} as the same rank", first.pid, first.hostname);
            // The newer one may be a process left from an earlier run, so the other ranks do not fail.
            return self.refuse(from, rank, reason, false);
        }
        session.members[rank] = Some(from);
        session.joins[rank] = Some(join);
        self.connections.insert(from, (id, rank));
        self.gone.retain(|(gone, _)| *gone != rank);
        for (rank, departure) in self.gone.clone() {
            self.depart(id, rank, departure);
        }
        if assignment.is_some() {
            // Ranks that departed before this one joined, of which it was not told.
            self.repeat_departures(id, from);
        }
        self.start_if_complete(id);
        Disposition::Keep
    }

    fn refuse(&mut self, from: ConnectionId, rank: usize, reason: String, tell_all: bool) -> Disposition {
        if tell_all {
            // The other ranks would wait for a rank that cannot join.
            let forming =
                self.sessions.iter().find(|(_, session)| session.phase == JobPhase::Forming).map(|(&id, _)| id);
            if let Some(id) = forming {
                self.depart(id, rank, Departure::Failed { message: reason.clone() });
            }
        }
        self.outbox.push((from, ToClient::Refused { reason }));
        Disposition::Close
    }

    fn new_session(&mut self, size: usize) -> u64 {
        self.made += 1;
        // Of a random seed: different for each session, with 63 bits, so that it fits every language's integers.
        let id = split_mix64(self.seed, self.made) >> 1;
        self.sessions.insert(
            id,
            JobSession {
                phase: JobPhase::Forming,
                members: vec![None; size],
                joins: vec![None; size],
                departed: vec![None; size],
                store: HashMap::new(),
                store_bytes: 0,
                released: HashMap::new(),
                waiting: HashMap::new(),
            },
        );
        id
    }

    fn start_if_complete(&mut self, id: u64) {
        let session = self.sessions.get_mut(&id).expect("the caller has just used it");
        if session.phase != JobPhase::Forming || session.joins.iter().any(Option::is_none) {
            return;
        }
        session.phase = JobPhase::Running;
        let joins: Vec<&Join> = session.joins.iter().flatten().collect();
        let (hosts, places) = places(&joins);
        let welcome = Welcome { session: id, hosts, places };
        for &to in session.members.iter().flatten() {
            self.outbox.push((to, ToClient::Welcome(welcome.clone())));
        }
    }

    /// Records and reports that `rank` departed from a session; only the first departure counts.
    fn depart(&mut self, id: u64, rank: usize, departure: Departure) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if let Some(known) = session.departed.get_mut(rank) {
            if known.is_some() {
                return;
            }
            *known = Some(departure.clone());
        }
        if session.phase == JobPhase::Forming {
            session.phase = JobPhase::Failed;
        }
        for (member, to) in session.members.iter().enumerate() {
            if let (true, &Some(to)) = (member != rank, to) {
                let notice = ToClient::Notice { rank: rank as u32, departure: departure.clone() };
                self.outbox.push((to, notice));
            }
        }
    }

    fn repeat_departures(&mut self, id: u64, to: ConnectionId) {
        let Some(session) = self.sessions.get(&id) else { return };
        for (rank, departure) in session.departed.iter().enumerate() {
            if let Some(departure) = departure {
                self.outbox.push((to, ToClient::Notice { rank: rank as u32, departure: departure.clone() }));
            }
        }
    }

    fn forget_connection(&mut self, connection: ConnectionId) -> Option<(u64, usize)> {
        let (id, rank) = self.connections.remove(&connection)?;
        let session = self.sessions.get_mut(&id).expect("a connection's session lives as long as the connection");
        session.members[rank] = None;
        session.forget(|(waiter, _)| waiter == connection);
        self.forget_if_empty(id);
        Some((id, rank))
    }

    fn forget_if_empty(&mut self, id: u64) {
        let awaited = self
            .elastic
            .as_ref()
            .is_some_and(|elastic| elastic.assigned.values().any(|(assignment, _)| *assignment == id));
        if !awaited && self.sessions.get(&id).is_some_and(|session| session.members.iter().all(Option::is_none)) {
            self.sessions.remove(&id);
        }
    }
}

impl JobSession {
    fn set(&mut self, key: String, value: Vec<u8>, mut send: impl FnMut(ConnectionId, ToClient)) -> Result<(), String> {
        if key.len() > MAX_KEY || value.len() > MAX_VALUE {
            return Err(format!("the store takes keys of {MAX_KEY} and values of {MAX_VALUE} bytes at most"));
        }
        let replaced = self.store.get(&key).map_or(0, |old| key.len() + old.len());
        let bytes = self.store_bytes - replaced + key.len() + value.len();
        if bytes > MAX_STORE_BYTES {
            return Err(format!("the store of a session holds {MAX_STORE_BYTES} bytes at most"));
        }
        self.store_bytes = bytes;
        for (to, ticket) in self.waiting.remove(&key).unwrap_or_default() {
            send(to, ToClient::Value { ticket, value: value.clone() });
        }
        self.store.insert(key, value);
        Ok(())
    }

    fn remove_prefix(&mut self, prefix: &str) {
        self.store.retain(|key, _| !key.starts_with(prefix));
        self.store_bytes = self.store.iter().map(|(key, value)| key.len() + value.len()).sum();
    }

    /// Records that `rank` has released the keys of `prefix`; removes them when `members` ranks have.
    fn release(&mut self, prefix: String, rank: usize, members: u32) -> Result<(), String> {
        if prefix.len() > MAX_KEY {
            return Err(format!("the store takes keys of {MAX_KEY} bytes at most"));
        }
        let ranks = self.released.entry(prefix.clone()).or_default();
        ranks.insert(rank);
        if ranks.len() >= members as usize {
            self.released.remove(&prefix);
            self.remove_prefix(&prefix);
        }
        Ok(())
    }

    fn forget(&mut self, gone: impl Fn((ConnectionId, u64)) -> bool) {
        self.waiting.retain(|_, waiters| {
            waiters.retain(|&waiter| !gone(waiter));
            !waiters.is_empty()
        });
    }
}

/// The hosts' names in the order of their first ranks, and each rank's place. If the launcher did not tell all ranks
/// of a host their local ranks, they get them in the order of global ranks.
fn places(joins: &[&Join]) -> (Vec<String>, Vec<RankLocation>) {
    let mut index: HashMap<&str, usize> = HashMap::new();
    let mut names = Vec::new();
    let mut on_host: Vec<Vec<usize>> = Vec::new();
    for (rank, join) in joins.iter().enumerate() {
        let host = *index.entry(&join.host).or_insert_with(|| {
            names.push(join.hostname.clone());
            on_host.push(Vec::new());
            on_host.len() - 1
        });
        on_host[host].push(rank);
    }
    let mut places = vec![RankLocation { host: 0, local_rank: 0, local_size: 1, pid: 0 }; joins.len()];
    for (host, ranks) in on_host.iter().enumerate() {
        let all_known = ranks.iter().all(|&rank| joins[rank].local.is_some());
        for (position, &rank) in ranks.iter().enumerate() {
            let counted = (position as u32, ranks.len() as u32);
            let (local_rank, local_size) = joins[rank].local.filter(|_| all_known).unwrap_or(counted);
            places[rank] = RankLocation { host: host as u32, local_rank, local_size, pid: joins[rank].pid };
        }
    }
    (names, places)
}

#[cfg(test)]
#[path = "job_tests.rs"]
mod tests;
