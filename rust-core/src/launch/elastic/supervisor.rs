//! Carries out the driver's actions: starts and ends workers, forwards their output, and assigns ranks.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::io::{self, Stderr, Stdout};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;

use super::super::LaunchPlan;
use super::super::environment::{self, LocalPosition};
use super::super::orphan_reaper::OrphanReaper;
use super::super::output::{OutputPiece, Printer, Sink};
use super::super::process::{self, Exit, Input, Process};
use super::super::remote::Ssh;
use super::super::report::Tail;
use super::super::signals::{self, Signals};
use super::super::streams::{self, Streams};
use super::super::supervisor::{output_folder, style};
use super::args::ElasticArgs;
use super::discovery::{Discovery, Script};
use super::driver::{Driver, JobOutcome, WorkerAction, WorkerId};
use super::hosts::{HostPool, WorkerSlot, jitter};
use crate::config;
use crate::error::{Error, Result};
use crate::world::rendezvous::Server;
use crate::world::rendezvous::job::JobEvent;
use crate::world::rendezvous::message::HostsUpdated;

/// The longest sleep: the end of a child is noticed within this time even if its SIGCHLD was delivered to another
/// thread.
const LONGEST_SLEEP: Duration = Duration::from_millis(250);
/// Time between SIGTERM and SIGKILL.
const TERMINATE_TIME: Duration = Duration::from_secs(5);
/// How long a worker without a place has to end by itself.
const UNASSIGNED_EXIT_TIME: Duration = Duration::from_secs(30);
/// Why a worker that the job continues without gets no rank.
const GIVEN_UP: &str = "its host did not answer, or the `ssh` that started it has ended";

/// Runs the job to its end and returns the exit code.
///
/// # Errors
/// [`Error::Config`] for options that do not fit and for a discovery that never works; [`Error::Io`] if workers could
/// not be watched. None runs any more then.
pub(super) fn run(args: &ElasticArgs) -> Result<i32> {
    let limits = args.limits()?;
    let timeout = limits.timeout;
    let driver = Driver::new(limits, HostPool::new(args.cooldown()?));
    let discovery = match (&args.host_discovery_script, &args.hosts) {
        (Some(script), _) => Discovery::Script(Script::new(script, args.slots_per_host)),
        (None, hosts) => Discovery::Fixed(hosts.clone()),
    };
    // Before any thread is started: later threads inherit the signal mask, so signals arrive only here.
    let signals = Signals::take().map_err(|error| Error::io("taking over the signals", error))?;
    let reaper = OrphanReaper::start().map_err(|error| Error::io("starting the orphan reaper", error))?;
    crate::log::start(None);
    let plan = LaunchPlan {
        command: args.command.clone(),
        grace: TERMINATE_TIME,
        output_dir: args.output_dir.clone(),
        horovod: args.horovod,
        timestamp: args.prefix_timestamp,
        // The report of a job names several workers, so the job has a text of its own.
        reason_file: None,
        summary: false,
        ssh: Ssh { port: args.ssh_port, identity: args.ssh_identity_file.clone() },
        start_timeout: config::INIT_TIMEOUT_SECONDS.seconds()?,
    };
    let secret = environment::random_hex(32)?;
    // Discovered hosts may be remote at any time; a fixed list shows whether any is.
    let listed = args.hosts.iter().flatten().map(|(host, _)| host.as_str());
    let bind = match args.hosts {
        Some(_) => plan.addresses(listed)?.0,
        None => IpAddr::from([0, 0, 0, 0]),
    };
    let server = Server::start_elastic((bind, 0).into(), secret.as_bytes())?;
    process::adopt_orphans(true);
    let mut supervisor = ElasticSupervisor {
        max_np: args.max_np as usize,
        timeout,
        driver,
        discovery,
        server,
        secret,
        reaper,
        workers: BTreeMap::new(),
        printer: Printer::new(
            (io::stdout(), style(&io::stdout(), 1, plan.line_style(Sink::Stdout))),
            (io::stderr(), style(&io::stderr(), 1, plan.line_style(Sink::Stderr))),
        ),
        plan,
        ranks: HashSet::new(),
        start: Instant::now(),
        is_stopping: false,
    };
    let result = supervisor.watch(&signals);
    drop(supervisor);
    process::adopt_orphans(false);
    match result? {
        JobOutcome::Done => Ok(0),
        JobOutcome::Failed(why) => {
            eprintln!("smdrun: {why}");
            if let Some(file) = &args.reason_file {
                std::fs::write(file, &why).map_err(|error| Error::io("writing the reason of the failure", error))?;
            }
            Ok(1)
        }
    }
}

/// A worker's process.
struct Running {
    process: Process,
    host: String,
    streams: Streams,
    tail: Tail,
    /// The rank for which it was started; its output lines are marked with it.
    rank: usize,
    /// When it gets SIGKILL.
    deadline: Option<(Instant, Signal)>,
    /// Why the worker was abandoned, if it was.
    lost: Option<String>,
}

struct ElasticSupervisor {
    plan: LaunchPlan,
    max_np: usize,
    /// The grace period of workers, from the command line.
    timeout: Duration,
    driver: Driver,
    discovery: Discovery,
    server: Server,
    secret: String,
    reaper: OrphanReaper,
    workers: BTreeMap<WorkerId, Running>,
    printer: Printer<Stdout, Stderr>,
    /// The hosts for which workers were started.
    ranks: HashSet<usize>,
    start: Instant,
    /// A signal has asked the job to stop.
    is_stopping: bool,
}

impl ElasticSupervisor {
    fn watch(&mut self, signals: &Signals) -> Result<JobOutcome> {
        loop {
            let now = Instant::now();
            let next = [self.driver.tick(now), self.discovery.next(), self.next_deadline()].into_iter().flatten().min();
            self.perform_actions();
            if let Some(outcome) = self.driver.outcome() {
                return Ok(outcome.clone());
            }
            let sleep = next.map_or(LONGEST_SLEEP, |next| next.saturating_duration_since(now).min(LONGEST_SLEEP));
            self.wait_for_events(signals, sleep)?;
            while let Some(signal) = signals.next() {
                self.handle(signal);
            }
            self.read_output();
            self.send_inputs();
            self.take_events();
            self.notice_ends()?;
            self.keep_deadlines();
            let mut messages = Vec::new();
            let found = self.discovery.poll(Instant::now(), &mut |text| messages.push(text));
            messages.iter().for_each(|text| self.log(text));
            match found {
                Ok(Some(hosts)) => self.driver.discovered(hosts, Instant::now()),
                Ok(None) => {}
                Err(error) => self.driver.stop_all(&error.text()),
            }
        }
    }

    /// Sleeps until there is a signal, output, room for input, an event, or `sleep` has passed.
    fn wait_for_events(&self, signals: &Signals, sleep: Duration) -> Result<()> {
        let pipes = self.workers.values().flat_map(|worker| worker.streams.pipes());
        let inputs = self.workers.values().filter_map(|worker| worker.process.unsent_input());
        let mut fds: Vec<_> = [signals.as_fd(), self.server.doorbell()]
            .into_iter()
            .chain(pipes)
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .chain(inputs.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::OUT)))
            .collect();
        let timeout = Timespec { tv_sec: sleep.as_secs() as i64, tv_nsec: sleep.subsec_nanos().into() };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(Error::io("waiting for the workers", error)),
        }
    }

    fn handle(&mut self, signal: i32) {
        match signal {
            libc::SIGCHLD | libc::SIGTSTP => {}
            other if !self.is_stopping => {
                self.is_stopping = true;
                self.driver.stop_all(&format!("stopped by {}", signals::name(other)));
            }
            // A second Ctrl-C ends the job at once.
            _ => self.workers.values().for_each(|worker| worker.process.signal(Signal::KILL)),
        }
    }

    fn take_events(&mut self) {
        for event in self.server.take_events() {
            let now = Instant::now();
            match event {
                JobEvent::Entered(name) => match id(&name).filter(|id| self.workers.contains_key(id)) {
                    Some(id) => self.driver.worker_ready(id, now),
                    None => self.server.remove(&name, GIVEN_UP),
                },
                JobEvent::Withdrew(name) => id(&name).into_iter().for_each(|id| self.driver.withdrawn(id, now)),
                // The `ssh` that started it may wait for its host for ever.
                JobEvent::Lost { worker, detail } => {
                    if let Some(worker) = id(&worker).and_then(|id| self.workers.get_mut(&id)) {
                        worker.lost = Some(detail);
                        worker.process.signal(Signal::KILL);
                    }
                }
            }
        }
    }

    /// Sends waiting input to the `ssh` of workers on other hosts. A worker fails if `ssh` does not read it in time.
    fn send_inputs(&mut self) {
        for worker in self.workers.values_mut() {
            if let Some(reason) = self.plan.send_input(&mut worker.process, &worker.host) {
                worker.lost = Some(reason);
            }
        }
    }

    fn notice_ends(&mut self) -> Result<()> {
        let mut ended = Vec::new();
        for (id, worker) in &self.workers {
            let exit = worker.process.exit();
            if let Some(exit) = exit.map_err(|error| Error::io(format!("waiting for worker {id}"), error))? {
                ended.push((*id, exit));
            }
        }
        if !ended.is_empty() {
            // The workers' remaining output.
            self.read_output();
        }
        for (id, exit) in ended {
            self.server.report_worker_death(&name(id), &exit.to_string());
            // The process that has ended may be the `ssh` of a worker that lives and waits for a rank.
            self.server.remove(&name(id), GIVEN_UP);
            let Some(worker) = self.workers.remove(&id) else { continue };
            let failure = (!exit.success()).then(|| describe(&worker, exit));
            self.release(worker);
            self.driver.worker_ended(id, failure, jitter(), Instant::now());
        }
        Ok(())
    }

    /// Ends the remaining processes of a worker's group.
    fn release(&self, worker: Running) {
        worker.process.signal(Signal::KILL);
        self.reaper.remove(worker.process.pid());
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.workers.values().filter_map(|worker| worker.deadline.map(|(at, _)| at)).min()
    }

    fn keep_deadlines(&mut self) {
        let now = Instant::now();
        for worker in self.workers.values_mut() {
            let Some((at, signal)) = worker.deadline.filter(|(at, _)| *at <= now) else { continue };
            worker.process.signal(signal);
            worker.deadline = (signal != Signal::KILL).then_some((at + TERMINATE_TIME, Signal::KILL));
        }
    }

    fn read_output(&mut self) {
        let mut pieces = Vec::new();
        let mut buffer = vec![0; 64 * 1024];
        for (id, worker) in &mut self.workers {
            let rank = worker.rank;
            worker.streams.read(&mut buffer, &mut |sink, piece| pieces.push((*id, rank, sink, piece)));
        }
        let at = self.start.elapsed();
        for (id, rank, sink, piece) in pieces {
            if let (Sink::Stderr, OutputPiece::Line(line), Some(worker)) = (sink, &piece, self.workers.get_mut(&id)) {
                worker.tail.push(line, at);
            }
            // Output can no longer be written, but the training continues.
            let _ = self.printer.rank(sink, rank, &piece);
        }
    }

    fn log(&mut self, text: &str) {
        let _ = self.printer.log(text);
    }

    fn perform_actions(&mut self) {
        for action in self.driver.take_actions() {
            match action {
                WorkerAction::Start { worker, place, rank, size } => match self.start(worker, &place, rank, size) {
                    Ok(started) => drop(self.workers.insert(worker, started)),
                    // The worker could not be started here; other hosts may succeed.
                    Err(error) => self.driver.worker_ended(worker, Some(error.text()), jitter(), Instant::now()),
                },
                WorkerAction::Stop { worker } => self.end_at(worker, Instant::now(), Signal::TERM),
                WorkerAction::Remove { worker } => {
                    self.server.remove(&name(worker), "its host has no slot for it any more");
                    self.end_at(worker, Instant::now() + UNASSIGNED_EXIT_TIME, Signal::TERM);
                }
                WorkerAction::AssignRanks { workers } => {
                    self.server.assign_ranks(workers.into_iter().map(name).collect())
                }
                WorkerAction::Notify { kinds } => {
                    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                    self.server.hosts_updated(HostsUpdated { at_micros: since.as_micros() as u64, kinds });
                }
                WorkerAction::Log(text) => self.log(&text),
            }
        }
    }

    fn end_at(&mut self, id: WorkerId, at: Instant, signal: Signal) {
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.deadline = Some((at, signal));
            self.keep_deadlines();
        }
    }

    fn start(&mut self, id: WorkerId, place: &WorkerSlot, rank: usize, size: usize) -> Result<Running> {
        let (_, reach) = self.plan.addresses([place.host.as_str()])?;
        let address = SocketAddr::new(reach, self.server.address().port()).to_string();
        let variables = self.variables(id, place, rank, size, address);
        let (process, pipes) = self.plan.start(&place.host, variables, Input::Nothing)?;
        let folder = output_folder(&self.plan, rank, self.max_np);
        if let Some(folder) = folder.as_ref().filter(|_| self.ranks.insert(rank)) {
            streams::remove_files(folder);
        }
        let streams = Streams::new(pipes, folder.as_deref())?;
        self.reaper.add(process.pid());
        let host = place.host.clone();
        Ok(Running { process, host, streams, tail: Tail::default(), rank, deadline: None, lost: None })
    }

    fn variables(
        &self,
        id: WorkerId,
        place: &WorkerSlot,
        rank: usize,
        size: usize,
        address: String,
    ) -> BTreeMap<OsString, OsString> {
        const TORCHRUN: [&str; 6] =
            ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];
        let mut variables = environment::without_launchers(std::env::vars_os());
        // The rank may change later; scripts ask the session for it.
        TORCHRUN.iter().for_each(|name| drop(variables.remove(std::ffi::OsStr::new(name))));
        variables.entry("OMP_NUM_THREADS".into()).or_insert_with(|| "1".into());
        let position = LocalPosition {
            host: place.host.clone(),
            host_index: 0,
            local: (place.slot, place.slot + 1),
            cross: (0, 1),
        };
        let own = position.horovod_variables().into_iter().chain([
            // The initial rank, which scripts log.
            ("HOROVOD_RANK", rank.to_string()),
            ("HOROVOD_SIZE", size.to_string()),
            ("HOROVOD_CONTROLLER", "gloo".to_owned()),
            ("HOROVOD_CPU_OPERATIONS", "gloo".to_owned()),
            ("HOROVOD_ELASTIC", "1".to_owned()),
            ("PYTHONUNBUFFERED", "1".to_owned()),
            (config::WORKER.name, name(id)),
            (config::RENDEZVOUS.name, address),
            (config::SECRET.name, self.secret.clone()),
            (config::ELASTIC_TIMEOUT_SECONDS.name, self.timeout.as_secs_f64().to_string()),
        ]);
        variables.extend(own.map(|(name, value)| (name.into(), value.into())));
        variables
    }
}

impl Drop for ElasticSupervisor {
    fn drop(&mut self) {
        for worker in std::mem::take(&mut self.workers).into_values() {
            self.release(worker);
        }
    }
}

fn name(id: WorkerId) -> String {
    format!("worker-{id}")
}

fn id(name: &str) -> Option<WorkerId> {
    name.strip_prefix("worker-")?.parse().ok()
}

/// How a worker failed, in one line.
fn describe(worker: &Running, exit: Exit) -> String {
    let rank = worker.rank;
    if let Some(lost) = &worker.lost {
        return format!("process {rank} was abandoned: {lost}");
    }
    match worker.tail.exception() {
        Some(exception) => format!("process {rank} exit with status code {}: {exception}", exit.code()),
        None => format!("process {rank} exit with status code {}", exit.code()),
    }
}
