//! The decisions of `smdrun elastic`, for programs that start workers themselves.

use std::time::{Duration, Instant};

use pyo3::prelude::*;
use smd_core::launch::elastic::{
    Cooldown, Driver, ElasticLimits, HostPool, JobOutcome, WorkerAction, WorkerId, jitter,
};

/// Kind, workers, host and slot, number, text.
type WorkerActionRow = (&'static str, Vec<WorkerId>, Option<(String, usize)>, u8, String);

fn seconds(number: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(number).map_err(|error| {
        pyo3::exceptions::PyValueError::new_err(format!("{number} is not a number of seconds: {error}"))
    })
}

/// The hosts that a job may use, oldest first, and banned hosts.
#[pyclass(module = "smdistributed._core")]
pub struct ElasticHosts {
    hosts: HostPool,
}

#[pymethods]
impl ElasticHosts {
    /// `cooldown`: shortest and longest time in seconds for which a host is banned.
    #[new]
    #[pyo3(signature = (cooldown=None))]
    fn new(cooldown: Option<(f64, f64)>) -> PyResult<Self> {
        let range = |(low, high)| Ok::<_, PyErr>(Cooldown { low: seconds(low)?, high: seconds(high)? });
        Ok(Self { hosts: HostPool::new(cooldown.map(range).transpose()?) })
    }

    /// Updates the discovered hosts: names and slots.
    fn discover(&mut self, found: Vec<(String, usize)>) {
        self.hosts.discover(found, Instant::now());
    }

    /// Bans the host of a failed worker.
    fn ban(&mut self, host: &str) {
        self.hosts.ban(host, Instant::now(), jitter());
    }

    /// Whether a host is banned.
    fn is_banned(&self, host: &str) -> bool {
        self.hosts.is_banned(host, Instant::now())
    }

    /// Names and slots of the hosts that may be used, oldest first.
    fn usable(&mut self) -> Vec<(String, usize)> {
        self.hosts.refresh(Instant::now());
        self.hosts.usable().to_vec()
    }
}

/// Assigns workers to hosts and decides when a session begins. It starts no process, but returns actions.
#[pyclass(module = "smdistributed._core")]
pub struct ElasticDriver {
    driver: Driver,
}

#[pymethods]
impl ElasticDriver {
    /// `hosts` are the known hosts. The first session starts with `num_proc` slots; training continues with at least
    /// `min_num_proc` and uses at most `max_num_proc`. At most `reset_limit` sessions follow the first one. `timeout`
    /// limits the wait for slots or for a worker, in seconds.
    #[new]
    fn new(
        hosts: &ElasticHosts,
        num_proc: usize,
        min_num_proc: usize,
        max_num_proc: usize,
        reset_limit: Option<usize>,
        timeout: f64,
    ) -> PyResult<Self> {
        let limits = ElasticLimits { num_proc, min_num_proc, max_num_proc, reset_limit, timeout: seconds(timeout)? };
        Ok(Self { driver: Driver::new(limits, hosts.hosts.clone()) })
    }

    /// Updates the discovered hosts: names and slots.
    fn discover(&mut self, found: Vec<(String, usize)>) {
        self.driver.discovered(found, Instant::now());
    }

    /// Bans a host and ends its workers.
    fn ban(&mut self, host: &str) {
        self.driver.ban(host, jitter(), Instant::now());
    }

    /// Whether a host is banned.
    fn is_banned(&self, host: &str) -> bool {
        self.driver.hosts().is_banned(host, Instant::now())
    }

    /// Names and slots of the hosts that may be used, oldest first.
    fn usable(&self) -> Vec<(String, usize)> {
        self.driver.hosts().usable().to_vec()
    }

    /// A worker asks for a place in the next session.
    fn worker_ready(&mut self, worker: WorkerId) {
        self.driver.worker_ready(worker, Instant::now());
    }

    /// A worker has ended: with success, or as `failure` says.
    #[pyo3(signature = (worker, failure=None))]
    fn worker_ended(&mut self, worker: WorkerId, failure: Option<String>) {
        self.driver.worker_ended(worker, failure, jitter(), Instant::now());
    }

    /// Ends the job, for this reason.
    fn stop_all(&mut self, why: &str) {
        self.driver.stop_all(why);
    }

    /// Advances the time; returns the number of seconds until the next call at the latest, if any.
    fn tick(&mut self) -> Option<f64> {
        let now = Instant::now();
        self.driver.tick(now).map(|next| next.saturating_duration_since(now).as_secs_f64())
    }

    /// Returns the actions since the last call, in order: kind, workers, host and slot of `start`, a number
    /// (`notify`: 1 for removed, 2 for added), a text (`log`). Kinds are `start`, `stop`, `remove`, `assign_ranks`
    /// (workers by rank), `notify` and `log`.
    fn take_actions(&mut self) -> Vec<WorkerActionRow> {
        let plain = |kind, workers| (kind, workers, None, 0, String::new());
        let rows = self.driver.take_actions().into_iter().map(|action| match action {
            WorkerAction::Start { worker, place, .. } => {
                ("start", vec![worker], Some((place.host, place.slot)), 0, String::new())
            }
            WorkerAction::Stop { worker } => plain("stop", vec![worker]),
            WorkerAction::Remove { worker } => plain("remove", vec![worker]),
            WorkerAction::AssignRanks { workers } => plain("assign_ranks", workers),
            WorkerAction::Notify { kinds } => ("notify", Vec::new(), None, kinds, String::new()),
            WorkerAction::Log(text) => ("log", Vec::new(), None, 0, text),
        });
        rows.collect()
    }

    /// Once the job has ended and no worker is left: whether it succeeded, and otherwise the reason.
    fn outcome(&self) -> Option<(bool, String)> {
        Some(match self.driver.outcome()? {
            JobOutcome::Done => (true, String::new()),
            JobOutcome::Failed(why) => (false, why.clone()),
        })
    }
}
