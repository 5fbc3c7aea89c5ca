//! The main loop of `smdrun`: starts the ranks, forwards their output, and ends them.

use std::io::{self, IsTerminal, Stderr, Stdout};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;

use super::LaunchPlan;
use super::environment::{self, HostJob};
use super::orphan_reaper::OrphanReaper;
use super::output::{LineStyle, OutputPiece, Printer, Sink, Style};
use super::process::{self, Exit, Input, Process};
use super::report::{self, RankExit, Tail};
use super::signals::{self, Signals};
use super::streams::{self, Streams};
use super::summary;
use crate::error::{Error, Result};
use crate::world::rendezvous::Server;

/// The longest sleep: the end of a child is noticed within this time even if its SIGCHLD was delivered to another
/// thread.
const LONGEST_SLEEP: Duration = Duration::from_millis(250);
/// Time between SIGTERM and SIGKILL.
const TERMINATE_TIME: Duration = Duration::from_secs(5);
/// How long processes that ranks left behind have to end by themselves.
const ORPHAN_TIME: Duration = Duration::from_secs(1);

/// Runs the job to its end and returns the exit code (RUN-4).
///
/// # Errors
/// [`Error::Io`] if the ranks could not be started or monitored; all that were started have been ended.
pub(super) fn run(plan: &LaunchPlan, mut job: HostJob) -> Result<i32> {
    // Before any thread is started: later threads inherit the signal mask, so signals arrive only here.
    let signals = Signals::take().map_err(|error| Error::io("taking over the signals", error))?;
    let reaper = OrphanReaper::start().map_err(|error| Error::io("starting the orphan reaper", error))?;
    // The rendezvous logs connections that it rejects.
    crate::log::start(None);
    let secret = environment::random_hex(32)?;
    let (bind, reach) = plan.addresses(job.hosts())?;
    let server = Server::start((bind, 0).into(), secret.as_bytes(), job.num_ranks)?;
    job.set_rendezvous(SocketAddr::new(reach, server.address().port()).to_string(), secret);
    let children_before = process::children();
    process::adopt_orphans(true);
    let result = Supervisor::start(plan, &job, server, reaper, children_before).and_then(|mut supervisor| {
        supervisor.watch(&signals)?;
        supervisor.end_orphans()?;
        supervisor.conclude()
    });
    process::adopt_orphans(false);
    result
}

/// One rank.
struct SupervisedRank {
    process: Process,
    host: String,
    streams: Streams,
    ended: bool,
}

/// The phase of ending the job (RUN-3).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ShutdownStep {
    Running,
    Grace,
    Terminate,
    Kill,
}

struct Supervisor<'a> {
    plan: &'a LaunchPlan,
    /// The rendezvous, which also reports deaths to the ranks.
    server: Server,
    reaper: OrphanReaper,
    start: Instant,
    ranks: Vec<SupervisedRank>,
    tails: Vec<Tail>,
    ends: Vec<RankExit>,
    printer: Printer<Stdout, Stderr>,
    step: ShutdownStep,
    /// When the next phase begins; none while the job runs and in the last phase.
    deadline: Option<Instant>,
    /// The signal that asked `smdrun` to stop.
    stopped_by: Option<i32>,
    children_before: Vec<i32>,
}

impl<'a> Supervisor<'a> {
    fn start(
        plan: &'a LaunchPlan,
        job: &HostJob,
        server: Server,
        reaper: OrphanReaper,
        children_before: Vec<i32>,
    ) -> Result<Self> {
        let start = Instant::now();
        // A terminal can have one reader only, and the ranks are not in its foreground process group.
        let input = !io::stdin().is_terminal();
        let mut ranks = Vec::with_capacity(job.num_ranks);
        for rank in 0..job.num_ranks {
            let variables = job.variables(rank, std::env::vars_os());
            // Ranks that run already are ended when `ranks` is dropped.
            let input = if input && rank == 0 { Input::Ours } else { Input::Nothing };
            let host = job.host(rank);
            let (process, pipes) = plan.start(host, variables, input)?;
            reaper.add(process.pid());
            let folder = output_folder(plan, rank, job.num_ranks);
            if let Some(folder) = &folder {
                streams::remove_files(folder);
            }
            let streams = Streams::new(pipes, folder.as_deref())?;
            ranks.push(SupervisedRank { process, host: host.to_owned(), streams, ended: false });
        }
        let width = (job.num_ranks - 1).to_string().len();
        Ok(Self {
            plan,
            server,
            reaper,
            start,
            tails: (0..job.num_ranks).map(|_| Tail::default()).collect(),
            ranks,
            ends: Vec::new(),
            printer: Printer::new(
                (io::stdout(), style(&io::stdout(), width, plan.line_style(Sink::Stdout))),
                (io::stderr(), style(&io::stderr(), width, plan.line_style(Sink::Stderr))),
            ),
            step: ShutdownStep::Running,
            deadline: None,
            stopped_by: None,
            children_before,
        })
    }

    /// Returns when every rank has ended.
    fn watch(&mut self, signals: &Signals) -> Result<()> {
        while self.ranks.iter().any(|rank| !rank.ended) {
            let sleep = self.deadline.map_or(LONGEST_SLEEP, |deadline| {
                deadline.saturating_duration_since(Instant::now()).min(LONGEST_SLEEP)
            });
            self.wait_for_events(Some(signals), sleep)?;
            while let Some(signal) = signals.next() {
                self.handle(signal);
            }
            self.read_output();
            self.send_inputs();
            self.notice_ends()?;
            if self.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                self.advance();
            }
        }
        Ok(())
    }

    /// Sleeps until there is a signal, output, room for input, or `sleep` has passed.
    fn wait_for_events(&self, signals: Option<&Signals>, sleep: Duration) -> Result<()> {
        let pipes = self.ranks.iter().flat_map(|rank| rank.streams.pipes());
        let inputs = self.ranks.iter().filter(|rank| !rank.ended).filter_map(|rank| rank.process.unsent_input());
        let mut fds: Vec<_> = signals
            .map(AsFd::as_fd)
            .into_iter()
            .chain(pipes)
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .chain(inputs.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::OUT)))
            .collect();
        let timeout = Timespec { tv_sec: sleep.as_secs() as i64, tv_nsec: sleep.subsec_nanos().into() };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(Error::io("waiting for the ranks", error)),
        }
    }

    fn handle(&mut self, signal: i32) {
        match signal {
            libc::SIGCHLD => {}
            libc::SIGTSTP => self.pause(),
            // The ranks may handle the first Ctrl-C themselves; a second one ends the job at once.
            libc::SIGINT if self.stopped_by.is_none() => {
                self.stopped_by = Some(signal);
                self.signal_ranks(Signal::INT);
                self.log(&format!("Ctrl-C forwarded; the ranks have {} s to end", self.plan.grace.as_secs_f64()));
                self.enter(ShutdownStep::Grace);
            }
            libc::SIGINT => self.advance(),
            other => {
                self.stopped_by.get_or_insert(other);
                if self.step < ShutdownStep::Terminate {
                    self.enter(ShutdownStep::Terminate);
                }
            }
        }
    }

    /// Handles Ctrl-Z: the ranks are not in the terminal's foreground process group, so `smdrun` stops them and then
    /// itself.
    fn pause(&mut self) {
        self.signal_ranks(Signal::STOP);
        // If stopping fails, `smdrun` and the ranks simply continue.
        let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::STOP);
        self.signal_ranks(Signal::CONT);
    }

    fn enter(&mut self, step: ShutdownStep) {
        self.step = step;
        let time = match step {
            ShutdownStep::Running => None,
            ShutdownStep::Grace => Some(self.plan.grace),
            ShutdownStep::Terminate => {
                self.signal_ranks(Signal::TERM);
                Some(TERMINATE_TIME)
            }
            ShutdownStep::Kill => {
                self.signal_ranks(Signal::KILL);
                None
            }
        };
        self.deadline = time.map(|time| Instant::now() + time);
    }

    fn advance(&mut self) {
        match self.step {
            ShutdownStep::Running => self.enter(ShutdownStep::Grace),
            ShutdownStep::Grace => {
                self.log(&format!("rank(s) {} did not end: sending SIGTERM", self.running()));
                self.enter(ShutdownStep::Terminate);
            }
            ShutdownStep::Terminate => {
                self.log(&format!("rank(s) {} did not end: sending SIGKILL", self.running()));
                self.enter(ShutdownStep::Kill);
            }
            ShutdownStep::Kill => {}
        }
    }

    fn running(&self) -> String {
        let ranks = self.ranks.iter().enumerate().filter(|(_, rank)| !rank.ended);
        ranks.map(|(rank, _)| rank.to_string()).collect::<Vec<_>>().join(", ")
    }

    fn signal_ranks(&self, signal: Signal) {
        for rank in self.ranks.iter().filter(|rank| !rank.ended) {
            rank.process.signal(signal);
        }
    }

    /// Sends waiting input to the `ssh` of ranks on other hosts. A rank fails if its `ssh` does not read it in time.
    fn send_inputs(&mut self) {
        for index in 0..self.ranks.len() {
            let rank = &mut self.ranks[index];
            if rank.ended {
                continue;
            }
            if let Some(reason) = self.plan.send_input(&mut rank.process, &rank.host) {
                // The final report then shows the reason beside the exit code of `ssh`.
                self.tails[index].push(reason.as_bytes(), self.start.elapsed());
                self.log(&format!("rank {index}: {reason}"));
            }
        }
    }

    fn notice_ends(&mut self) -> Result<()> {
        for index in 0..self.ranks.len() {
            if self.ranks[index].ended {
                continue;
            }
            let exit = self.ranks[index].process.exit();
            if let Some(exit) = exit.map_err(|error| Error::io(format!("waiting for rank {index}"), error))? {
                self.ranks[index].ended = true;
                self.rank_ended(index, exit);
            }
        }
        Ok(())
    }

    fn rank_ended(&mut self, rank: usize, exit: Exit) {
        self.server.report_death(rank, &exit.to_string());
        let was_signaled = self.stopped_by.is_some() || self.step >= ShutdownStep::Terminate;
        self.ends.push(RankExit { rank, exit, at: self.start.elapsed(), was_signaled });
        if !exit.success() && self.step == ShutdownStep::Running {
            if self.ranks.iter().any(|rank| !rank.ended) {
                self.log(&format!(
                    "rank {rank} failed ({exit}); the others have {} s to end",
                    self.plan.grace.as_secs_f64()
                ));
            }
            self.enter(ShutdownStep::Grace);
        }
    }

    /// Forwards available output; returns whether a stream is still open.
    fn read_output(&mut self) -> bool {
        let mut pieces = Vec::new();
        let mut buffer = vec![0; 64 * 1024];
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            rank.streams.read(&mut buffer, &mut |sink, piece| pieces.push((index, sink, piece)));
        }
        let at = self.start.elapsed();
        for (rank, sink, piece) in pieces {
            if let (Sink::Stderr, OutputPiece::Line(line)) = (sink, &piece) {
                self.tails[rank].push(line, at);
            }
            let shown = self.printer.rank(sink, rank, &piece);
            self.check_shown(shown);
        }
        self.ranks.iter().any(|rank| !rank.streams.ended())
    }

    fn log(&mut self, text: &str) {
        let shown = self.printer.log(text);
        self.check_shown(shown);
    }

    /// Handles a closed standard output (`smdrun ... | head`): ends the job, as other programs do.
    fn check_shown(&mut self, shown: io::Result<()>) {
        if shown.is_err() && self.stopped_by.is_none() {
            self.handle(libc::SIGPIPE);
        }
    }

    /// Ends processes that ranks left behind, then reads the remaining output.
    fn end_orphans(&mut self) -> Result<()> {
        let start = Instant::now();
        let mut seen = 0;
        loop {
            let open = self.read_output();
            let orphans = self.orphans();
            let late = start.elapsed() >= ORPHAN_TIME;
            if orphans.is_empty() && (!open || late) {
                break;
            }
            let signal = match late {
                true => Some(Signal::KILL),
                false => (orphans.len() > seen).then_some(Signal::TERM),
            };
            seen = seen.max(orphans.len());
            orphans.iter().for_each(|pid| process::end_orphan(*pid, signal));
            self.wait_for_events(None, Duration::from_millis(10))?;
        }
        if seen > 0 {
            self.log(&format!("ended {seen} process(es) that ranks had left behind"));
        }
        Ok(())
    }

    /// Descendants that `smdrun` adopted when their parents ended.
    fn orphans(&self) -> Vec<i32> {
        let ours = |pid: &i32| *pid == self.reaper.pid() || self.ranks.iter().any(|rank| rank.process.pid() == *pid);
        process::children().into_iter().filter(|pid| !self.children_before.contains(pid) && !ours(pid)).collect()
    }

    /// The final report and the exit code.
    fn conclude(&mut self) -> Result<i32> {
        if self.plan.summary {
            let text =
                summary::text(&self.server.take_counters(), self.ranks.len(), self.start.elapsed().as_secs_f64());
            self.log(&text);
        }
        Ok(match (report::first_failure(&self.ends, &self.tails), self.stopped_by) {
            (Some(first), _) => {
                let code = first.exit.code();
                let text = report::failure(first, &self.ends, &self.tails);
                if let Some(file) = &self.plan.reason_file {
                    let reason = format!("{} {code}", first.rank);
                    std::fs::write(file, reason)
                        .map_err(|error| Error::io("writing the reason of the failure", error))?;
                }
                self.log(&text);
                code
            }
            (None, Some(signal)) if self.ends.iter().any(|end| !end.exit.success()) => {
                self.log(&format!("stopped by {}", signals::name(signal)));
                128 + signal
            }
            _ => 0,
        })
    }
}

impl Drop for Supervisor<'_> {
    fn drop(&mut self) {
        for rank in self.ranks.drain(..) {
            // Dropping the value ends the group and reaps its leader; the orphan reaper must have removed the group
            // before.
            rank.process.signal(Signal::KILL);
            self.reaper.remove(rank.process.pid());
        }
    }
}

/// The folder for copies of a rank's output.
pub(super) fn output_folder(plan: &LaunchPlan, rank: usize, num_ranks: usize) -> Option<PathBuf> {
    let width = num_ranks.saturating_sub(1).to_string().len();
    plan.output_dir.as_ref().map(|folder| folder.join(format!("rank.{rank:0width$}")))
}

pub(super) fn style(stream: &impl IsTerminal, width: usize, line_style: LineStyle) -> Style {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let live = stream.is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
    Style { colour: live && !set("NO_COLOR"), live, width, line_style }
}
