//! What `smdrun elastic` decides with, for programs that start workers by themselves.

use std::time::{Duration, Instant};

use pyo3::prelude::*;
use smd_core::launch::elastic::{
    Cooldown, Driver, ElasticLimits, HostPool, JobOutcome, WorkerAction, WorkerId, jitter,
};

/// A kind, workers, a host and slot, a number, a text.
type WorkerActionRow = (&'static str, Vec<WorkerId>, Option<(String, usize)>, u8, String);

fn seconds(number: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(number)
        .map_err(|error| pyo3::exceptions::PyValueError::new_err(format!("{number} is no number of seconds: {error}")))
}

/// The hosts that a job may use, oldest first, and those that it may not use for a while, or ever again.
#[pyclass(module = "smdistributed._core")]
pub struct ElasticHosts {
    hosts: HostPool,
}

#[pymethods]
impl ElasticHosts {
    /// `cooldown`: how long a host is not used the first time and at most, in seconds.
    #[new]
    #[pyo3(signature = (cooldown=None))]
    fn new(cooldown: Option<(f64, f64)>) -> PyResult<Self> {
        let range = |(low, high)| Ok::<_, PyErr>(Cooldown { low: seconds(low)?, high: seconds(high)? });
        Ok(Self { hosts: HostPool::new(cooldown.map(range).transpose()?) })
    }

    /// These hosts were found: names and slots.
    fn discover(&mut self, found: Vec<(String, usize)>) {
        self.hosts.discover(found, Instant::now());
    }

    /// A worker failed there.
    fn ban(&mut self, host: &str) {
        self.hosts.ban(host, Instant::now(), jitter());
    }

    /// Whether a host may not be used now.
    fn is_banned(&self, host: &str) -> bool {
        self.hosts.is_banned(host, Instant::now())
    }

    /// Names and slots of the hosts that may be used, oldest first.
    fn usable(&mut self) -> Vec<(String, usize)> {
        self.hosts.refresh(Instant::now());
        self.hosts.usable().to_vec()
    }
}

/// Who works where, and when a session begins. It starts nothing: it says what is to be done.
#[pyclass(module = "smdistributed._core")]
pub struct ElasticDriver {
    driver: Driver,
}

#[pymethods]
impl ElasticDriver {
    /// `hosts` are those that are known; `first` slots begin, `least` go on, `most` are used; `resets` sessions come after the
    /// first, at most; `timeout` is the longest wait for slots or for a worker, in seconds.
    #[new]
    fn new(
        hosts: &ElasticHosts,
        first: usize,
        least: usize,
        most: usize,
        resets: Option<usize>,
        timeout: f64,
    ) -> PyResult<Self> {
        let limits = ElasticLimits { first, least, most, resets, timeout: seconds(timeout)? };
        Ok(Self { driver: Driver::new(limits, hosts.hosts.clone()) })
    }

    /// These hosts were found: names and slots.
    fn discover(&mut self, found: Vec<(String, usize)>) {
        self.driver.discovered(found, Instant::now());
    }

    /// A host is not used any more, and its workers are ended.
    fn ban(&mut self, host: &str) {
        self.driver.ban(host, jitter(), Instant::now());
    }

    /// Whether a host may not be used now.
    fn is_banned(&self, host: &str) -> bool {
        self.driver.hosts().is_banned(host, Instant::now())
    }

    /// Names and slots of the hosts that may be used, oldest first.
    fn usable(&self) -> Vec<(String, usize)> {
        self.driver.hosts().usable().to_vec()
    }

    /// A worker asks for a place in the next session.
    fn entered(&mut self, worker: WorkerId) {
        self.driver.entered(worker, Instant::now());
    }

    /// A worker has ended: well, or as `failure` says.
    #[pyo3(signature = (worker, failure=None))]
    fn ended(&mut self, worker: WorkerId, failure: Option<String>) {
        self.driver.ended(worker, failure, jitter(), Instant::now());
    }

    /// The job is to end, for this reason.
    fn stop_all(&mut self, why: &str) {
        self.driver.stop_all(why);
    }

    /// Lets time pass; returns after how many seconds to call again, at the latest, if ever.
    fn tick(&mut self) -> Option<f64> {
        let now = Instant::now();
        self.driver.tick(now).map(|next| next.saturating_duration_since(now).as_secs_f64())
    }

    /// What is to be done since the last call, in order: a kind, workers, the host and slot of `start`, a number (`notify`: 1 for
    /// removed, 2 for added), a text (`say`). Kinds are `start`, `stop`, `remove`, `seat` (by rank), `notify` and `say`.
    fn take_actions(&mut self) -> Vec<WorkerActionRow> {
        let plain = |kind, workers| (kind, workers, None, 0, String::new());
        let rows = self.driver.take_actions().into_iter().map(|action| match action {
            WorkerAction::Start { worker, place, .. } => {
                ("start", vec![worker], Some((place.host, place.slot)), 0, String::new())
            }
            WorkerAction::Stop { worker } => plain("stop", vec![worker]),
            WorkerAction::Remove { worker } => plain("remove", vec![worker]),
            WorkerAction::Seat { workers } => plain("seat", workers),
            WorkerAction::Notify { kinds } => ("notify", Vec::new(), None, kinds, String::new()),
            WorkerAction::Say(text) => ("say", Vec::new(), None, 0, text),
        });
        rows.collect()
    }

    /// Once the job has ended and no worker is left: whether it is done, and else why not.
    fn outcome(&self) -> Option<(bool, String)> {
        Some(match self.driver.outcome()? {
            JobOutcome::Done => (true, String::new()),
            JobOutcome::Failed(why) => (false, why.clone()),
        })
    }
}
