//! `smdrun`: starts the ranks of a job on this host, monitors them, and reports failures.
//!
//! ```text
//!   smdrun ── fork, exec ──> rank 0 .. rank N-1     environment.rs, process.rs
//!     ^  ^──── pipes <────── their output           output.rs
//!     └─────── SIGCHLD, Ctrl-C                      supervisor.rs, signals.rs
//!   reaper <── pipe ── process groups          orphan_reaper.rs
//!   rendezvous (a thread)  <── TCP ── ranks         crate::world::rendezvous
//! ```
//!
//! - RUN-1: no rank, and no process that a rank started, outlives `smdrun`. Each rank leads a process group, which is
//!   ended as a whole. `smdrun` adopts processes that leave their group (child subreaper) and ends them with the job.
//!   If `smdrun` is killed, ranks have a parent-death signal, and the orphan reaper ends their groups.
//! - RUN-2: a rank is started by `execve` with its arguments unchanged; no shell interprets them.
//! - RUN-3: when a rank fails, or after Ctrl-C, the other ranks get the grace period, then SIGTERM, then SIGKILL.
//! - RUN-4: the exit code is that of the rank that failed first, 128 + signal if a signal ended it. A rank that
//!   failed because a peer was gone does not count as first, even if it ended earlier.
//! - RUN-5: one thread reads all output, so lines of different ranks never mix.

mod args;
mod checkpoint;
mod distribution;
pub mod elastic;
mod environment;
mod orphan_reaper;
mod output;
mod plan;
mod process;
mod remote;
mod report;
mod signals;
mod streams;
mod summary;
mod supervisor;
mod top;
mod training;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;

use crate::config;
use crate::error::{Error, Result};

pub use top::running_ranks;

use distribution::Distribution;
use environment::HostJob;
use output::{LineStyle, Sink};
use process::{Input, Pipes, Process};
use remote::Ssh;

/// The exit code if the command line or the configuration is wrong; no process is started.
const USAGE_EXIT_CODE: i32 = 2;

/// Runs `smdrun` with this command line (the program's name first) and returns its exit code. `python` is the
/// interpreter for the ranks.
pub fn main(argv: Vec<OsString>, python: PathBuf) -> i32 {
    match argv.get(1).and_then(|word| word.to_str()) {
        Some("plan") => return subcommand(&argv[2..], plan::show),
        Some("checkpoint") => return subcommand(&argv[2..], checkpoint::run),
        Some("elastic") => return elastic::main(&argv[1..]),
        Some("top") => return subcommand(&argv[2..], top::run),
        Some("report") => return subcommand(&argv[2..], crate::pipeline::report::show),
        _ => {}
    }
    let args = match args::parse(argv) {
        Ok(args) => args,
        Err(usage) => return print_usage(&usage),
    };
    prepare(&args, python).and_then(|(plan, job)| supervisor::run(&plan, job)).unwrap_or_else(print_error)
}

/// Runs a subcommand with its arguments, prints the result, and returns the exit code.
fn subcommand<A: clap::Parser>(words: &[OsString], run: impl FnOnce(&A) -> Result<String>) -> i32 {
    let name = OsString::from(A::command().get_name());
    let args = match A::try_parse_from([&name].into_iter().chain(words)) {
        Ok(args) => args,
        Err(usage) => return print_usage(&usage),
    };
    let printed = run(&args).map(|text| {
        print!("{text}");
        0
    });
    printed.unwrap_or_else(print_error)
}

/// Prints help, or the error of a command line.
fn print_usage(usage: &clap::Error) -> i32 {
    // Nothing can be reported if writing to standard error fails.
    let _ = usage.print();
    usage.exit_code()
}

fn print_error(error: Error) -> i32 {
    eprintln!("smdrun: error: {}", error.report());
    USAGE_EXIT_CODE
}

/// Whether `name` is this host's, or one of its addresses.
pub fn is_this_host(name: &str) -> bool {
    remote::is_here(name)
}

/// The command to start, and options for running it.
#[derive(Debug)]
struct LaunchPlan {
    /// The command of every rank.
    command: Vec<OsString>,
    /// The grace period after a failure or Ctrl-C.
    grace: Duration,
    /// The folder for copies of each rank's output.
    output_dir: Option<PathBuf>,
    /// Whether output lines are marked as `horovodrun` marks them.
    horovod: bool,
    /// Whether they begin with the time.
    timestamp: bool,
    /// The file that gets the rank that failed first, and its exit code.
    reason_file: Option<PathBuf>,
    /// Whether a summary ends the output.
    summary: bool,
    ssh: Ssh,
    /// How long an `ssh` has to read the variables of its rank.
    start_timeout: Duration,
}

impl LaunchPlan {
    /// The prefix of output lines for this stream.
    fn line_style(&self, sink: Sink) -> LineStyle {
        let stream = if sink == Sink::Stdout { "stdout" } else { "stderr" };
        if self.horovod { LineStyle::Horovod { stream, timestamp: self.timestamp } } else { LineStyle::Ours }
    }

    /// Starts the command on `host`.
    fn start(&self, host: &str, variables: BTreeMap<OsString, OsString>, input: Input<'_>) -> Result<(Process, Pipes)> {
        let started = if remote::is_here(host) {
            Process::start(&self.command, variables, input)
        } else {
            let (command, script) = self.ssh.wrap(host, &self.command, &variables);
            Process::start(&command, std::env::vars_os().collect(), Input::Text(&script))
        };
        let name = self.command[0].to_string_lossy();
        started.map_err(|error| Error::io(format!("starting `{name}` on `{host}`"), error))
    }

    /// Sends the `ssh` of `host` more of its script. If it has not read the script within the start timeout, kills it
    /// and returns the reason.
    fn send_input(&self, process: &mut Process, host: &str) -> Option<String> {
        if !process.send_input(self.start_timeout) {
            return None;
        }
        process.signal(Signal::KILL);
        let (limit, setting) = (self.start_timeout, config::INIT_TIMEOUT_SECONDS.name);
        Some(format!("`ssh` to host `{host}` did not read the rank's variables within {limit:.0?} (`{setting}`)"))
    }

    /// The address on which the rendezvous listens, and the address for ranks on these hosts.
    fn addresses<'a>(&self, hosts: impl IntoIterator<Item = &'a str>) -> Result<(IpAddr, IpAddr)> {
        match hosts.into_iter().find(|host| !remote::is_here(host)) {
            None => Ok((Ipv4Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into())),
            Some(host) => Ok((Ipv4Addr::UNSPECIFIED.into(), remote::address_towards(host)?)),
        }
    }
}

/// The number of processes on the command line, or else in the configuration, or else one for each GPU, as in a
/// container.
fn num_ranks(args: &args::LauncherArgs, distribution: &Distribution) -> Result<usize> {
    let slots =
        args.hosts.as_ref().map(|hosts| hosts.iter().fold(0_usize, |sum, (_, slots)| sum.saturating_add(*slots)));
    let num_hosts = args.hosts.as_ref().map_or(1, Vec::len);
    let configured = distribution.processes_per_host.map(|each| each * num_hosts);
    let found = match (args.num_processes.or(slots), configured) {
        (Some(n), Some(configured)) if n != configured => {
            let option = if args.num_processes.is_some() { "-n" } else { "--hosts" };
            let each = configured / num_hosts;
            eprintln!(
                "smdrun: starting {n} processes as {option} says; the configuration's `processes_per_host` is {each}"
            );
            n
        }
        (Some(n), _) | (None, Some(n)) => n,
        (None, None) if distribution.is_on() => training::count_gpus().max(1),
        (None, None) => {
            return Err(Error::Config(
                "how many processes? pass `-n N`, or `--config` with `mpi.processes_per_host`".into(),
            ));
        }
    };
    if found > args::MAX_PROCESSES {
        return Err(Error::Config(format!("{found} processes are more than a job may have: {}", args::MAX_PROCESSES)));
    }
    Ok(found)
}

fn prepare(args: &args::LauncherArgs, python: PathBuf) -> Result<(LaunchPlan, HostJob)> {
    let mut distribution = match &args.config {
        Some(path) => Distribution::read(path)?,
        None => Distribution::default(),
    };
    for warning in distribution.take_warnings() {
        eprintln!("smdrun: warning: {warning}");
    }
    let num_ranks = num_ranks(args, &distribution)?;
    distribution.check_world(num_ranks)?;
    let mut command = args.command(&python)?;
    if let Some(parameters) = &distribution.model_parallel {
        command.extend(["--mp_parameters".into(), parameters.argument().into()]);
    }
    let mut job = HostJob::new(num_ranks, distribution, args.script_dir(), &args.arguments(), &args.env)?;
    if let Some(hosts) = &args.hosts {
        job.spread(hosts)?;
    }
    let (here, num_gpus) = (job.num_here(), training::count_gpus());
    if args.config.is_some() && here > 0 && here < num_gpus {
        eprintln!(
            "smdrun: warning: {here} of {num_gpus} GPUs of this host will work: `processes_per_host` counts processes of all \
             kinds of parallelism"
        );
    }
    if here > 0 {
        job.make_folders(std::env::vars_os());
    }
    let plan = LaunchPlan {
        command,
        grace: args.grace,
        output_dir: args.output_dir.clone(),
        horovod: args.horovod,
        timestamp: args.prefix_timestamp,
        reason_file: args.reason_file.clone(),
        summary: args.summary,
        ssh: Ssh { port: args.ssh_port, identity: args.ssh_identity_file.clone() },
        start_timeout: config::INIT_TIMEOUT_SECONDS.seconds()?,
    };
    Ok((plan, job))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ssh_that_does_not_read_is_killed_and_the_reason_names_its_host() {
        let plan = LaunchPlan {
            command: Vec::new(),
            grace: Duration::ZERO,
            output_dir: None,
            horovod: false,
            timestamp: false,
            reason_file: None,
            summary: false,
            ssh: Ssh::default(),
            start_timeout: Duration::from_secs(60),
        };
        let start = || {
            let variables = std::env::vars_os().collect();
            Process::start(&["sleep".into(), "20".into()], variables, Input::Text(&[b'x'; 1 << 20])).expect("it starts")
        };
        let (mut process, _pipes) = start();
        assert_eq!(plan.send_input(&mut process, "node-1"), None);
        let plan = LaunchPlan { start_timeout: Duration::ZERO, ..plan };
        let reason = "`ssh` to host `node-1` did not read the rank's variables within 0ns (`SMD_INIT_TIMEOUT_SECONDS`)";
        assert_eq!(plan.send_input(&mut process, "node-1").as_deref(), Some(reason));
        assert_eq!(plan.send_input(&mut process, "node-1"), None);
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        let killed = process::Exit::Signal(libc::SIGKILL);
        while process.exit().expect("it is our child") != Some(killed) {
            assert!(std::time::Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn the_number_of_processes_is_found() {
        let found = |line: &str, config: &str| {
            let args = args::parse(line.split(' ').map(OsString::from).collect()).expect("the line is valid");
            num_ranks(&args, &Distribution::parse(config).expect("a valid configuration"))
        };
        let two = r#"{"mpi": {"enabled": true, "processes_per_host": 2}}"#;
        let unsaid = r#"{"mpi": {"enabled": true}}"#;
        for (line, config, expected) in [
            ("smdrun a.py", two, Some(2)),
            ("smdrun --hosts a:2,b:2 a.py", two, Some(4)),
            ("smdrun --hosts a:2,b:1 a.py", "{}", Some(3)),
            ("smdrun -n 3 --hosts a:2,b:2 a.py", two, Some(3)),
            ("smdrun a.py", unsaid, Some(training::count_gpus().max(1))),
            ("smdrun a.py", "{}", None),
            ("smdrun --hosts a:4096 a.py", "{}", Some(4096)),
            ("smdrun -n 2 --hosts a:4096,b:1 a.py", "{}", Some(2)),
        ] {
            assert_eq!(found(line, config).ok(), expected, "{line} with {config}");
        }
        for (hosts, found_there) in [("a:4096,b:1", "4097"), ("a:18446744073709551615,b:2", "18446744073709551615")] {
            let error = found(&format!("smdrun --hosts {hosts} a.py"), "{}").unwrap_err().to_string();
            assert_eq!(error, format!("{found_there} processes are more than a job may have: 4096"));
        }
    }
}
