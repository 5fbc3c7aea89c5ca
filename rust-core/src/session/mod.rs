//! The library's life cycle in this process: idle, starting, running, and idle again.
//!
//! There is one session per process at a time; Python, the PyTorch ops and the TensorFlow ops all see it through
//! [`current`].
//!
//! - SES-1: [`shutdown`] does not wait for the other ranks' calls. A process that serves the rendezvous continues to
//!   serve it until [`finish`], which a process calls last.
//! - SES-2: a forked child has no session. Its calls return an error, and nothing that it does affects the job. It
//!   still knows its parent's ranks and sizes ([`place`]).
//! - SES-3: group ids are derived from the members and the number of earlier groups with exactly these members.
//!   Members create groups in the same order, so they agree on ids without messages, and other ranks are not
//!   involved.

mod graph_reducers;
mod groups;
mod hosts;
pub mod membership;
pub mod pending_reducer;
pub mod place;
mod process_sets;
pub mod replicas;
mod sealed_secret;
mod serve;
pub mod step_scope;
pub mod store_rendezvous;
mod worker;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::collectives::Communicator;
use crate::config;
use crate::device::ending;
use crate::error::{Error, Limit, Result};
use crate::metrics::{self, Snapshot};
use crate::negotiation::timeline;
use crate::trace;
use crate::world::env::{self, Launch, Launcher};
use crate::world::rendezvous::client::{self, Client};
use crate::world::rendezvous::message::{Join, RankLocation, Welcome};
use crate::world::{LocalStore, Monitor, Store, fork, host};

use graph_reducers::GraphReducers;
use groups::Groups;
use hosts::HostConnection;
use process_sets::ProcessSets;
pub use process_sets::RanksAndSizes;
use replicas::Replicas;
use store_rendezvous::StoreRendezvous;

/// Options of `init` in addition to the environment.
#[derive(Clone, Debug, Default)]
pub struct InitOptions {
    /// Replaces the environment's variables in tests.
    pub variables: Option<env::Variables>,
    /// This process's rank and the rendezvous, if a caller knows them better than the environment.
    pub store_rendezvous: Option<StoreRendezvous>,
}

/// A running session; owns the control connection, the communicators and their threads.
pub struct Session {
    launch: Launch,
    id: u64,
    places: Vec<RankLocation>,
    hosts: Vec<String>,
    monitor: Arc<Monitor>,
    control: Control,
    groups: Groups,
    /// The connection between the hosts of the job; set before the first group is created.
    host_connection: OnceLock<HostConnection>,
    /// Whether the ranks connected through a framework's store. The next rendezvous of this kind replaces this session.
    uses_store_rendezvous: bool,
    /// Processes outside of the job may know its secret.
    open: bool,
    /// Number of open process groups of a framework.
    memberships: AtomicUsize,
    graph_reducers: GraphReducers,
    process_sets: ProcessSets,
    replicas: Replicas,
    /// Whether the failure of this rank has been reported to the other ranks.
    reported: AtomicBool,
}

/// The rendezvous of the job.
enum Control {
    /// A job of one process needs none.
    Alone(Arc<LocalStore>),
    Connected(Arc<Client>),
}

enum SessionState {
    Idle,
    Starting,
    Running(Arc<Session>),
}

static STATE: Mutex<SessionState> = Mutex::new(SessionState::Idle);

/// Joins the job that the launcher's environment describes. Blocks until all ranks have joined.
///
/// # Errors
/// [`Error::AlreadyInitialized`]; [`Error::Config`] for a contradictory environment; [`Error::Rendezvous`] or
/// [`Error::Timeout`] naming the ranks that did not join; [`Error::PeerFailed`] naming one that departed meanwhile.
pub fn init(options: InitOptions) -> Result<Arc<Session>> {
    refuse_child()?;
    {
        let mut state = STATE.lock();
        match *state {
            SessionState::Idle => *state = SessionState::Starting,
            SessionState::Starting | SessionState::Running(_) => return Err(Error::AlreadyInitialized),
        }
    }
    let outcome = Session::start(&options);
    *STATE.lock() = match &outcome {
        Ok(session) => SessionState::Running(session.clone()),
        Err(_) => SessionState::Idle,
    };
    outcome
}

/// Returns the running session. After a failure, it stays the running session, and its calls return the failure.
///
/// # Errors
/// [`Error::NotInitialized`] naming `call`; [`Error::Closed`] in a forked child.
pub fn current(call: &'static str) -> Result<Arc<Session>> {
    refuse_child()?;
    match &*STATE.lock() {
        SessionState::Running(session) => Ok(session.clone()),
        SessionState::Idle | SessionState::Starting => Err(Error::NotInitialized { call }),
    }
}

/// Whether this process is in a job: it has a session ([`current`]), or was forked from a process that has one
/// ([`place::place`]).
pub fn is_initialized() -> bool {
    place::has_place()
}

fn is_running() -> bool {
    matches!(*STATE.lock(), SessionState::Running(_))
}

/// Leaves the job; does nothing if there is no session. Afterwards `init` may be called again.
pub fn shutdown() {
    if fork::is_child() {
        return;
    }
    let session = {
        let mut state = STATE.lock();
        match std::mem::replace(&mut *state, SessionState::Idle) {
            SessionState::Running(session) => session,
            other => {
                *state = other;
                return;
            }
        }
    };
    session.close();
}

/// Called before a process ends: [`shutdown`], and then, if this process serves the rendezvous, waits until the other
/// ranks have left too, because they could not be notified of departures otherwise. After a failure, it waits only a
/// moment. A process that uses MPI finalises it here, together with the others. No device is used after this.
pub fn finish() {
    if fork::is_child() {
        return;
    }
    hosts::leave_mpi();
    shutdown();
    serve::linger();
    ending::begin();
}

fn refuse_child() -> Result<()> {
    if !fork::is_child() {
        return Ok(());
    }
    Err(Error::Closed {
        reason: "this process was forked from one that uses the library, and has no part in the job; start processes \
                 that need it with the `spawn` method, or before `init()`"
            .to_owned(),
    })
}

fn join_request(launch: &Launch) -> Join {
    Join {
        version: crate::VERSION.to_owned(),
        rank: launch.rank as u32,
        size: launch.size as u32,
        host: host::identity(),
        hostname: host::name(),
        pid: std::process::id(),
        local: launch.local.map(|(rank, size)| (rank as u32, size as u32)),
    }
}

impl Session {
    fn start(options: &InitOptions) -> Result<Arc<Self>> {
        let start = Instant::now();
        let variables = options.variables.clone().unwrap_or_else(env::variables);
        let store_rendezvous = options.store_rendezvous.as_ref();
        if let (None, Some(worker)) = (store_rendezvous, config::WORKER.text()) {
            return Self::start_as_worker(&worker, &variables).map_err(|error| error.limited_by(Limit::Init));
        }
        let limit = if store_rendezvous.is_some() { Limit::Rendezvous } else { Limit::Init };
        Self::start_as_rank(options, &variables, start).map_err(|error| error.limited_by(limit))
    }

    fn start_as_rank(options: &InitOptions, variables: &env::Variables, start: Instant) -> Result<Arc<Self>> {
        let store_rendezvous = options.store_rendezvous.as_ref();
        let launch = match store_rendezvous {
            Some(store_rendezvous) => store_rendezvous.launch(variables),
            None => env::detect(variables)?,
        };
        crate::log::start((launch.size > 1).then_some(launch.rank));
        let monitor = Arc::new(Monitor::new(launch.rank));
        config::check_unread()?;
        let timeout = config::TIMEOUT_SECONDS.seconds()?;
        let init_timeout = match store_rendezvous {
            Some(store_rendezvous) => store_rendezvous.timeout,
            None => config::INIT_TIMEOUT_SECONDS.seconds()?,
        };
        let alone = launch.size == 1 && (config::RENDEZVOUS.text().is_none() || launch.launcher == Launcher::Single);
        let session = if alone {
            Self::alone(launch, monitor, timeout, store_rendezvous.is_some())
        } else {
            let deadline = start + init_timeout;
            let rendezvous = match store_rendezvous {
                Some(store_rendezvous) => store_rendezvous.find(&launch, &monitor, deadline)?,
                None => serve::find(&launch)?,
            };
            let session = Self::join(launch, monitor, timeout, deadline, rendezvous, store_rendezvous.is_some())?;
            if let Some(store_rendezvous) = store_rendezvous {
                // `init` returns on no rank before rank 0 has created the world below.
                store_rendezvous.clear();
            }
            session
        };
        if let Err(error) = session.make_world(variables, start + init_timeout) {
            session.report_failure(&error.text());
            session.close();
            return Err(error);
        }
        session.log_joined(start);
        Ok(Arc::new(session))
    }

    fn log_joined(&self, start: Instant) {
        tracing::info!(
            "joined a job of {} processes on {} hosts in {:.1?}",
            self.size(),
            self.hosts.len(),
            start.elapsed()
        );
    }

    fn alone(mut launch: Launch, monitor: Arc<Monitor>, timeout: Duration, uses_store_rendezvous: bool) -> Self {
        // Launchers that do not say it leave it to the rendezvous, which a single process does not need.
        launch.local.get_or_insert((0, 1));
        let id = getrandom::u64().unwrap_or_else(|_| u64::from(std::process::id())) >> 1;
        Self {
            launch,
            id,
            places: vec![RankLocation { host: 0, local_rank: 0, local_size: 1, pid: std::process::id() }],
            hosts: vec![host::name()],
            monitor,
            control: Control::Alone(Arc::default()),
            groups: Groups::new(timeout),
            host_connection: OnceLock::new(),
            uses_store_rendezvous,
            open: false,
            memberships: AtomicUsize::new(0),
            graph_reducers: GraphReducers::default(),
            process_sets: ProcessSets::default(),
            replicas: Replicas::default(),
            reported: AtomicBool::new(false),
        }
    }

    fn join(
        launch: Launch,
        monitor: Arc<Monitor>,
        timeout: Duration,
        deadline: Instant,
        rendezvous: serve::Rendezvous,
        uses_store_rendezvous: bool,
    ) -> Result<Self> {
        let peer_timeout = config::PEER_TIMEOUT_SECONDS.seconds()?;
        let serve::Rendezvous { location, served_by_rank_0, open } = rendezvous;
        let options = client::ClientOptions { location, served_by_rank_0, deadline, peer_timeout };
        let join = join_request(&launch);
        let (client, welcome) = Client::join(&options, join, monitor.clone())?;
        Ok(Self { open, ..Self::connected(launch, monitor, timeout, client, welcome, uses_store_rendezvous) })
    }

    fn connected(
        launch: Launch,
        monitor: Arc<Monitor>,
        timeout: Duration,
        client: Arc<Client>,
        welcome: Welcome,
        uses_store_rendezvous: bool,
    ) -> Self {
        place::inherit();
        let place = welcome.places[launch.rank];
        let launch = Launch { local: Some((place.local_rank as usize, place.local_size as usize)), ..launch };
        Self {
            launch,
            id: welcome.session,
            places: welcome.places,
            hosts: welcome.hosts,
            monitor,
            control: Control::Connected(client),
            groups: Groups::new(timeout),
            host_connection: OnceLock::new(),
            uses_store_rendezvous,
            open: false,
            memberships: AtomicUsize::new(0),
            graph_reducers: GraphReducers::default(),
            process_sets: ProcessSets::default(),
            replicas: Replicas::default(),
            reported: AtomicBool::new(false),
        }
    }

    /// Creates the group of all ranks, and starts the timeline: on the first rank of a host before the group is
    /// created, on the others afterwards.
    fn make_world(&self, variables: &env::Variables, deadline: Instant) -> Result<()> {
        let between = self.meet_hosts(variables, deadline)?;
        self.host_connection.get_or_init(|| between);
        let timeout = deadline.saturating_duration_since(Instant::now());
        let first = self.local_rank() == 0;
        // Before the group exists, so that the publisher finds the counters of all ranks of the host after that.
        metrics::share(self.id, self.rank(), self.size());
        if first {
            trace::start(self.rank(), first)?;
        }
        let ranks: Vec<usize> = (0..self.size()).collect();
        let communicator = self.connect(groups::WORLD, &ranks, timeout)?;
        self.groups.insert(groups::WORLD, communicator);
        self.start_asked_timeline()?;
        if first {
            let here = self.places[self.rank()].host;
            let pids: Vec<u32> = self.places.iter().filter(|place| place.host == here).map(|place| place.pid).collect();
            metrics::start(&pids)?;
        } else {
            trace::start(self.rank(), first)?;
        }
        Ok(())
    }

    /// Starts the timeline of collectives by name, if the settings request it.
    fn start_asked_timeline(&self) -> Result<()> {
        let Some(path) = config::NAMES_TIMELINE.text().filter(|path| path != "DYNAMIC") else { return Ok(()) };
        self.start_horovod_timeline(&path, config::NAMES_TIMELINE_MARK_CYCLES.flag()?);
        Ok(())
    }

    /// On rank 0, starts the timeline of collectives by name ([`timeline::start`]). If it cannot be written, a
    /// warning is logged and training continues.
    pub fn start_horovod_timeline(&self, path: &str, mark_cycles: bool) {
        if self.rank() == 0
            && let Err(error) = timeline::start(path, mark_cycles)
        {
            tracing::warn!("{}", error.text());
        }
    }

    /// Leaves the job: waits of other threads end, communicators stop, and the other ranks are told.
    fn close(&self) {
        let reason = "`shutdown()` was called";
        self.replicas.close();
        self.monitor.close(reason);
        self.replicas.join();
        self.groups.close(reason);
        self.graph_reducers.close();
        if let Some(between) = self.host_connection.get() {
            between.flush();
        }
        if let Control::Connected(client) = &self.control {
            client.report_counters(&Snapshot::of_this_process());
            client.leave();
        }
        // The other ranks learn of the leave before, or soon after, they see this rank's connections close.
        if let Some(between) = self.host_connection.get() {
            between.close();
        }
        metrics::stop();
        trace::stop();
        timeline::stop();
    }

    fn store(&self) -> Arc<dyn Store> {
        match &self.control {
            Control::Alone(store) => store.clone(),
            Control::Connected(client) => client.clone(),
        }
    }

    /// Global rank, 0..size.
    pub fn rank(&self) -> usize {
        self.launch.rank
    }
    /// Number of processes of the job.
    pub fn size(&self) -> usize {
        self.launch.size
    }
    /// Rank on this host.
    pub fn local_rank(&self) -> usize {
        self.local().0
    }
    /// Number of processes on this host.
    pub fn local_size(&self) -> usize {
        self.local().1
    }
    fn local(&self) -> (usize, usize) {
        self.launch.local.expect("a session knows the place of its rank")
    }
    /// A number of this session that is equal on all ranks and new for each `init`; 63 bits.
    pub fn id(&self) -> u64 {
        self.id
    }
    /// Whether members have proved that they know a secret of this job.
    pub fn is_authenticated(&self) -> bool {
        !self.open
    }
    /// The variables of the launcher, with what the rendezvous added.
    pub fn launch(&self) -> &Launch {
        &self.launch
    }
    /// The departures of ranks.
    pub fn monitor(&self) -> &Arc<Monitor> {
        &self.monitor
    }
    /// The communicator of all ranks.
    pub fn world(&self) -> Arc<Communicator> {
        self.groups.get(groups::WORLD).expect("a session is made with its world")
    }
    /// Ends every wait of this process, because its user has requested that; the other ranks are told that this one
    /// failed.
    pub fn interrupt(&self) {
        self.give_up("interrupted", "the process was interrupted");
    }

    /// Ends every wait of this process with `reason`, and its part in the job; the other ranks are told that it
    /// failed with `message`.
    pub fn give_up(&self, message: &str, reason: &str) {
        self.report_failure(message);
        self.monitor.close(reason);
        self.groups.close(reason);
    }

    /// Reports to the job that this rank failed with `message` (an uncaught exception); the other ranks' waits end with
    /// it. Only the first failure counts (MON-1) and is sent.
    pub fn report_failure(&self, message: &str) {
        serve::note_failure();
        if !self.reported.swap(true, Ordering::Relaxed)
            && let Control::Connected(client) = &self.control
        {
            client.fail(message);
        }
    }

    /// Whether the job was told so (see [`Session::report_failure`]).
    fn has_reported(&self) -> bool {
        self.reported.load(Ordering::Relaxed)
    }
}
