//! Assigns workers to hosts and decides when a new session begins. A state machine without processes, sockets or a
//! clock, so that tests can cover every order of events.
//!
//! ```text
//!   starting --enters--> waiting --ranks assigned--> training --enters again--> waiting ..
//!       \_________________\____________________\________ended
//! ```
//!
//! - DRV-1: a session begins when every live worker waits for one. So no worker takes part in two sessions.
//! - DRV-2: ranks are assigned host by host, the oldest host first (HSL-1). Hosts with workers of an earlier session
//!   come before all others, and such workers come first on their host. So rank 0 of a later session has the training
//!   state, if any worker has it.
//! - DRV-3: when a worker fails, all workers of its host are ended, and the host is banned (HSL-2).
//! - DRV-4: waits for slots, for started workers and for workers that must return have a time limit.
//! - DRV-5: a worker that has ended with success means that the training is done. No session begins after that.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::hosts::{HostPool, WorkerSlot};

/// Interval at which members of a running session are notified again of changed places, in case a script missed the
/// first notification.
const REPEAT: Duration = Duration::from_secs(5);

/// The user's options.
#[derive(Clone, Debug)]
pub struct ElasticLimits {
    /// Number of slots of the first session.
    pub num_proc: usize,
    /// Smallest number of slots with which training continues.
    pub min_num_proc: usize,
    /// Largest number of slots that are used.
    pub max_num_proc: usize,
    /// Largest number of sessions after the first.
    pub reset_limit: Option<usize>,
    /// Time limit of waits (DRV-4).
    pub timeout: Duration,
}

/// The id of a worker process.
pub type WorkerId = usize;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WorkerState {
    Starting,
    Waiting,
    Training,
    /// The driver ended it, so its exit status does not matter.
    Ending,
}

#[derive(Debug)]
struct Worker {
    id: WorkerId,
    place: WorkerSlot,
    state: WorkerState,
    /// When the worker was started, or when its last request for a rank ended without one.
    silent_since: Instant,
    /// Whether the worker has been in a session, so that it has training state.
    is_old: bool,
}

/// An action that the driver requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerAction {
    /// Start a process.
    Start {
        /// Id.
        worker: WorkerId,
        /// Host and slot.
        place: WorkerSlot,
        /// Expected rank.
        rank: usize,
        /// Expected number of ranks.
        size: usize,
    },
    /// End a process.
    Stop {
        /// Id.
        worker: WorkerId,
    },
    /// Tell a waiting worker that it has been removed from the job.
    Remove {
        /// Id.
        worker: WorkerId,
    },
    /// Begin a session.
    AssignRanks {
        /// The workers in the order of their ranks.
        workers: Vec<WorkerId>,
    },
    /// Notify the workers of the running session.
    Notify {
        /// Places were removed (1), added (2), or both (3).
        kinds: u8,
    },
    /// Log a text for the user.
    Log(String),
}

/// The outcome of the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobOutcome {
    /// The training is done.
    Done,
    /// The reason why it could not continue.
    Failed(String),
}

/// Decides which workers an elastic job starts and stops, and when a new session begins.
#[derive(Debug)]
pub struct Driver {
    limits: ElasticLimits,
    hosts: HostPool,
    /// Workers that have not ended.
    workers: Vec<Worker>,
    made: usize,
    sessions: usize,
    succeeded: bool,
    /// The first failure of a worker since the last session began.
    failure: Option<String>,
    /// When the number of slots became too small.
    short_since: Option<Instant>,
    /// When the first worker began to wait for a session.
    waiting_since: Option<Instant>,
    /// The places of which the running session was notified, and when.
    last_notice: Option<(Vec<WorkerSlot>, Instant)>,
    outcome: Option<JobOutcome>,
    actions: Vec<WorkerAction>,
}

impl Driver {
    /// Creates a job that may use these hosts and discovered ones.
    pub fn new(limits: ElasticLimits, hosts: HostPool) -> Self {
        Self {
            limits,
            hosts,
            workers: Vec::new(),
            made: 0,
            sessions: 0,
            succeeded: false,
            failure: None,
            short_since: None,
            waiting_since: None,
            last_notice: None,
            outcome: None,
            actions: Vec::new(),
        }
    }

    /// Returns the actions since the last call, in order.
    pub fn take_actions(&mut self) -> Vec<WorkerAction> {
        std::mem::take(&mut self.actions)
    }

    /// The outcome, once the job has ended and no worker is left.
    pub fn outcome(&self) -> Option<&JobOutcome> {
        self.outcome.as_ref().filter(|_| self.workers.is_empty())
    }

    /// The discovery found these hosts.
    pub fn discovered(&mut self, found: Vec<(String, usize)>, now: Instant) {
        self.hosts.discover(found, now);
        self.settle(now);
    }

    /// A worker asks for a place in the next session.
    pub fn worker_ready(&mut self, id: WorkerId, now: Instant) {
        self.enter(id, WorkerState::Waiting);
        self.settle(now);
    }

    /// A worker's request has ended without a place; it asks again or ends.
    pub fn withdrawn(&mut self, id: WorkerId, now: Instant) {
        if let Some(worker) =
            self.workers.iter_mut().find(|worker| worker.id == id && worker.state == WorkerState::Waiting)
        {
            worker.state = WorkerState::Starting;
            worker.silent_since = now;
        }
        self.settle(now);
    }

    /// A worker has ended: with success, or as `failure` says. `jitter`, 0 to 1, spreads the ends of bans.
    pub fn worker_ended(&mut self, id: WorkerId, failure: Option<String>, jitter: f64, now: Instant) {
        let Some(index) = self.workers.iter().position(|worker| worker.id == id) else { return };
        let worker = self.workers.remove(index);
        match failure {
            _ if worker.state == WorkerState::Ending => {}
            None => self.succeeded = true,
            Some(failure) => {
                self.log(format!(
                    "worker {id} on {} failed ({failure}); its host is not used any more",
                    worker.place.host
                ));
                self.failure.get_or_insert(failure);
                self.leave(&worker.place.host, jitter, now);
            }
        }
        self.settle(now);
    }

    /// Bans a host, as if a worker had failed there.
    pub fn ban(&mut self, host: &str, jitter: f64, now: Instant) {
        self.leave(host, jitter, now);
        self.settle(now);
    }

    /// The hosts as they are now.
    pub fn hosts(&self) -> &HostPool {
        &self.hosts
    }

    /// Bans a host and ends its workers (DRV-3).
    fn leave(&mut self, host: &str, jitter: f64, now: Instant) {
        self.hosts.ban(host, now, jitter);
        self.stop(|worker| worker.place.host == host);
    }

    /// Ends the job, for this reason.
    pub fn stop_all(&mut self, why: &str) {
        self.end(JobOutcome::Failed(why.to_owned()));
    }

    /// Advances the time; returns the latest time of the next call.
    pub fn tick(&mut self, now: Instant) -> Option<Instant> {
        self.hosts.refresh(now);
        self.settle(now);
        let limit = |since: Option<Instant>| since.map(|since| since + self.limits.timeout);
        let repeat = self.last_notice.as_ref().map(|(_, at)| *at + REPEAT);
        let limits = [self.short_since, self.waiting_since, self.silent_since()].map(limit);
        [self.hosts.next_end(now), repeat].into_iter().chain(limits).flatten().min()
    }

    fn enter(&mut self, id: WorkerId, state: WorkerState) {
        if let Some(worker) =
            self.workers.iter_mut().find(|worker| worker.id == id && worker.state != WorkerState::Ending)
        {
            worker.state = state;
        }
    }

    fn log(&mut self, text: String) {
        self.actions.push(WorkerAction::Log(text));
    }

    fn stop(&mut self, which: impl Fn(&Worker) -> bool) {
        for worker in self.workers.iter_mut().filter(|worker| worker.state != WorkerState::Ending && which(worker)) {
            worker.state = WorkerState::Ending;
            self.actions.push(WorkerAction::Stop { worker: worker.id });
        }
    }

    fn end(&mut self, outcome: JobOutcome) {
        if self.outcome.is_none() {
            self.outcome = Some(outcome);
            self.stop(|_| true);
        }
    }

    /// Performs all transitions that are possible now.
    fn settle(&mut self, now: Instant) {
        if self.outcome.is_some() {
            return;
        }
        if self.succeeded {
            return self.finish_job();
        }
        self.give_up_silent(now);
        let places = self.hosts.places(self.limits.max_num_proc);
        let needed = if self.sessions == 0 { self.limits.num_proc } else { self.limits.min_num_proc };
        if let Some(why) = self.stop_reason(&places, needed, now) {
            return self.end(JobOutcome::Failed(why));
        }
        if places.len() < needed {
            return;
        }
        self.start_missing(&places, now);
        self.notify(&places, now);
        self.begin(&places, now);
    }

    /// After a success, running workers may finish, and the others are ended (DRV-5).
    fn finish_job(&mut self) {
        self.stop(|worker| worker.state == WorkerState::Starting);
        let waiting: Vec<WorkerId> =
            self.workers.iter().filter(|worker| worker.state == WorkerState::Waiting).map(|worker| worker.id).collect();
        for id in waiting {
            self.enter(id, WorkerState::Ending);
            self.actions.push(WorkerAction::Remove { worker: id });
        }
        if self.workers.is_empty() {
            self.outcome = Some(JobOutcome::Done);
        }
    }

    /// The reason why the job cannot continue, if there is one.
    fn stop_reason(&mut self, places: &[WorkerSlot], needed: usize, now: Instant) -> Option<String> {
        let live = || self.workers.iter().filter(|worker| worker.state != WorkerState::Ending);
        let cause = || self.failure.as_ref().map_or_else(String::new, |failure| format!("; first: {failure}"));
        if self.failure.is_some() && self.hosts.all_lost() {
            return Some(format!("workers have failed on all hosts{}", cause()));
        }
        if self.failure.is_some() && live().next().is_none() {
            return Some(format!("all workers have failed{}", cause()));
        }
        if self.sessions > 0 && !live().any(|worker| worker.is_old) {
            return Some(self.state_lost());
        }
        if places.len() >= needed || live().any(|worker| worker.state == WorkerState::Training) {
            self.short_since = None;
        } else {
            let since = *self.short_since.get_or_insert(now);
            if since == now && self.sessions > 0 {
                let text = format!("{} of at least {needed} slots are left: the job waits for more", places.len());
                self.log(text);
            }
            if now >= since + self.limits.timeout {
                return Some(format!(
                    "timed out after {:.0?} waiting for the minimum number of slots to become available: there are {} of \
                     {needed}{}",
                    self.limits.timeout,
                    places.len(),
                    self.failure.as_ref().map_or_else(String::new, |failure| format!("; first: {failure}"))
                ));
            }
        }
        None
    }

    fn state_lost(&self) -> String {
        let cause = self.failure.as_ref().map_or_else(String::new, |failure| format!("; first: {failure}"));
        format!("no worker that has the state is left, so the job is unable to broadcast state to others{cause}")
    }

    fn start_missing(&mut self, places: &[WorkerSlot], now: Instant) {
        let taken: HashSet<WorkerSlot> = self.workers.iter().map(|worker| worker.place.clone()).collect();
        for (rank, place) in places.iter().enumerate().filter(|(_, place)| !taken.contains(place)) {
            let id = self.made;
            self.made += 1;
            let worker =
                Worker { id, place: place.clone(), state: WorkerState::Starting, silent_since: now, is_old: false };
            self.workers.push(worker);
            self.actions.push(WorkerAction::Start { worker: id, place: place.clone(), rank, size: places.len() });
        }
    }

    fn notify(&mut self, places: &[WorkerSlot], now: Instant) {
        let training: HashSet<&WorkerSlot> = self
            .workers
            .iter()
            .filter(|worker| worker.state == WorkerState::Training)
            .map(|worker| &worker.place)
            .collect();
        if training.is_empty()
            || self.workers.iter().any(|worker| worker.state == WorkerState::Waiting && worker.is_old)
        {
            // No worker to notify, or the session has ended already.
            self.last_notice = None;
            return;
        }
        let wanted: HashSet<&WorkerSlot> = places.iter().collect();
        let removed = training.difference(&wanted).next().is_some();
        let added = wanted.difference(&training).next().is_some();
        let kinds = u8::from(removed) + 2 * u8::from(added);
        let is_due = self.last_notice.as_ref().is_none_or(|(notified, at)| notified != places || now >= *at + REPEAT);
        if kinds == 0 {
            self.last_notice = None;
        } else if is_due {
            self.last_notice = Some((places.to_vec(), now));
            self.actions.push(WorkerAction::Notify { kinds });
        }
    }

    /// Begins a session, if all live workers wait for one (DRV-1).
    fn begin(&mut self, places: &[WorkerSlot], now: Instant) {
        let waits = |worker: &Worker| worker.state == WorkerState::Waiting;
        if !self.workers.iter().any(waits) {
            self.waiting_since = None;
            return;
        }
        if !self.workers.iter().all(waits) {
            let trains = self.workers.iter().any(|worker| worker.state == WorkerState::Training);
            if trains && !self.workers.iter().any(|worker| waits(worker) && worker.is_old) {
                // A session is running: new workers wait for its end without a time limit.
                self.waiting_since = None;
                return;
            }
            let since = *self.waiting_since.get_or_insert(now);
            if now >= since + self.limits.timeout {
                self.give_up_late();
                self.waiting_since = Some(now);
            }
            return;
        }
        self.waiting_since = None;
        if self.sessions > self.limits.reset_limit.unwrap_or(usize::MAX) {
            let limit = self.sessions - 1;
            return self
                .end(JobOutcome::Failed(format!("number of resets during elastic job exceeded limit: {limit}")));
        }
        let has_place = |worker: &Worker| places.contains(&worker.place);
        let with_state: HashSet<String> = self
            .workers
            .iter()
            .filter(|worker| worker.is_old && has_place(worker))
            .map(|worker| worker.place.host.clone())
            .collect();
        if self.sessions > 0 && with_state.is_empty() {
            return self.end(JobOutcome::Failed(self.state_lost()));
        }
        let mut assignments = Vec::new();
        for worker in &mut self.workers {
            let WorkerSlot { host, slot } = &worker.place;
            if has_place(worker) {
                // Orders the workers by rank (DRV-2).
                let age = places.iter().position(|place| place.host == *host);
                assignments.push(((!with_state.contains(host), age, !worker.is_old, *slot), worker.id));
            } else {
                worker.state = WorkerState::Ending;
                self.actions.push(WorkerAction::Remove { worker: worker.id });
            }
        }
        assignments.sort_unstable();
        for (_, id) in &assignments {
            self.enter(*id, WorkerState::Training);
        }
        for worker in self.workers.iter_mut().filter(|worker| worker.state == WorkerState::Training) {
            worker.is_old = true;
        }
        self.sessions += 1;
        self.failure = None;
        self.last_notice = None;
        self.actions.push(WorkerAction::AssignRanks { workers: assignments.into_iter().map(|(_, id)| id).collect() });
    }

    /// The earliest time since which a started worker has not asked for a rank. None while another worker waits,
    /// because the limit of that wait applies, and while a session runs.
    fn silent_since(&self) -> Option<Instant> {
        let is_heard = |worker: &Worker| matches!(worker.state, WorkerState::Waiting | WorkerState::Training);
        if self.workers.iter().any(is_heard) {
            return None;
        }
        let silent = self.workers.iter().filter(|worker| worker.state == WorkerState::Starting);
        silent.map(|worker| worker.silent_since).min()
    }

    /// If no worker has asked for a rank, those that were started too long ago count as failed (DRV-3, DRV-4). Their
    /// hosts may have vanished, or `ssh` may be stuck.
    fn give_up_silent(&mut self, now: Instant) {
        let timeout = self.limits.timeout;
        if self.silent_since().is_none_or(|since| now < since + timeout) {
            return;
        }
        let mut hosts: Vec<String> = Vec::new();
        for worker in &self.workers {
            let is_late = worker.state == WorkerState::Starting && now >= worker.silent_since + timeout;
            if is_late && !hosts.contains(&worker.place.host) {
                hosts.push(worker.place.host.clone());
            }
        }
        let failure = format!(
            "workers on `{}` did not call `init()` within the elastic timeout of {timeout:.0?}",
            hosts.join("`, `")
        );
        self.log(format!("{failure}; these hosts are not used any more"));
        self.failure.get_or_insert(failure);
        // The hosts may return together, because the job needs as many slots as before.
        hosts.iter().for_each(|host| self.leave(host, 0.0, now));
    }

    /// A worker that has not returned in time is ended (DRV-4).
    fn give_up_late(&mut self) {
        let late: Vec<WorkerId> =
            self.workers.iter().filter(|worker| worker.state != WorkerState::Waiting).map(|worker| worker.id).collect();
        for id in late {
            self.log(format!(
                "worker {id} has not come back to the job for {:.0?}: it is terminated",
                self.limits.timeout
            ));
            self.stop(|worker| worker.id == id);
        }
    }
}

#[cfg(test)]
#[path = "driver_tests.rs"]
mod tests;
