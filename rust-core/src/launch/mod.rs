//! `smdrun`: starts the ranks of a job on this host, watches them, and says what went wrong.
//!
//! ```text
//!   smdrun ── fork, exec ──> rank 0 .. rank N-1     environment.rs, process.rs
//!     ^  ^──── pipes <────── their output           output.rs
//!     └─────── SIGCHLD, Ctrl-C                      supervisor.rs, signals.rs
//!   warden <── pipe ── which groups to end          warden.rs
//!   rendezvous (a thread)  <── TCP ── ranks         crate::world::rendezvous
//! ```
//!
//! - RUN-1: no rank outlives `smdrun`, nor does what a rank started. Each rank leads a process group that is ended as
//!   one, what leaves that group is adopted by `smdrun` (child subreaper) and ended with the job, and if `smdrun` is
//!   killed, ranks have a parent-death signal and the warden ends their groups.
//! - RUN-2: a rank is started by `execve` with its arguments as they are; no shell reads them.
//! - RUN-3: when a rank fails, the others get the grace period, then SIGTERM, then SIGKILL. So do they after Ctrl-C.
//! - RUN-4: the exit code is that of the rank that failed first, 128 + signal if a signal ended it. A rank that
//!   failed because a peer was gone is not the first, even if it ended earlier.
//! - RUN-5: one thread reads all output, so lines of two ranks never mix.

mod args;
mod checkpoint;
mod distribution;
mod environment;
mod output;
mod parameters;
mod plan;
mod process;
mod report;
mod signals;
mod supervisor;
mod trace_report;
mod warden;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Error, Result};

use distribution::Distribution;
use environment::Job;

/// What ends `smdrun` when the command line or the configuration is wrong, before any process is started.
const USAGE_EXIT_CODE: i32 = 2;

/// Runs `smdrun` with this command line (the program's name first) and returns its exit code. `python` is the
/// interpreter for the ranks.
pub fn main(argv: Vec<OsString>, python: PathBuf) -> i32 {
    match argv.get(1).and_then(|word| word.to_str()) {
        Some("plan") => return subcommand(&argv[2..], plan::show),
        Some("checkpoint") => return subcommand(&argv[2..], checkpoint::run),
        Some("report") => return subcommand(&argv[2..], trace_report::show),
        _ => {}
    }
    let args = match args::parse(argv) {
        Ok(args) => args,
        Err(usage) => return say(&usage),
    };
    prepare(&args, python).and_then(|(plan, job)| supervisor::run(&plan, job)).unwrap_or_else(complain)
}

/// Prints what `run` makes of the words after a subcommand's name, and returns the exit code.
fn subcommand<A: clap::Parser>(words: &[OsString], run: impl FnOnce(&A) -> Result<String>) -> i32 {
    let name = OsString::from(A::command().get_name());
    let args = match A::try_parse_from([&name].into_iter().chain(words)) {
        Ok(args) => args,
        Err(usage) => return say(&usage),
    };
    let printed = run(&args).map(|text| {
        print!("{text}");
        0
    });
    printed.unwrap_or_else(complain)
}

/// Prints help, or what is wrong with a command line.
fn say(usage: &clap::Error) -> i32 {
    // What is left to say when not even this can be written?
    let _ = usage.print();
    usage.exit_code()
}

fn complain(error: Error) -> i32 {
    eprintln!("smdrun: error: {}", error.report());
    USAGE_EXIT_CODE
}

/// What to start, and how to treat it.
#[derive(Debug)]
struct Plan {
    /// The command of every rank.
    command: Vec<OsString>,
    /// How long ranks may take to end by themselves after a failure or Ctrl-C.
    grace: Duration,
    /// Where each rank's output goes, too.
    output_dir: Option<PathBuf>,
    /// As `horovodrun` shows it.
    horovod: bool,
}

fn prepare(args: &args::Args, python: PathBuf) -> Result<(Plan, Job)> {
    let mut distribution = match &args.config {
        Some(path) => Distribution::read(path)?,
        None => Distribution::default(),
    };
    for warning in distribution.take_warnings() {
        eprintln!("smdrun: warning: {warning}");
    }
    let num_ranks = match (args.num_processes, distribution.processes_per_host) {
        (Some(n), Some(configured)) if n != configured => {
            eprintln!(
                "smdrun: starting {n} processes as -n says; the configuration's `processes_per_host` is {configured}"
            );
            n
        }
        (Some(n), _) | (None, Some(n)) => n,
        (None, None) => {
            return Err(Error::Config(
                "how many processes? pass `-n N`, or `--config` with `mpi.processes_per_host`".into(),
            ));
        }
    };
    distribution.check_world(num_ranks)?;
    let mut command = args.command(&python)?;
    if let Some(parameters) = &distribution.model_parallel {
        command.extend(["--mp_parameters".into(), parameters.argument().into()]);
    }
    let mut job = Job::new(num_ranks, distribution, args.script_dir(), &args.env)?;
    if args.horovod {
        job.add_horovod();
    }
    let output_dir = args.output_dir.clone();
    Ok((Plan { command, grace: args.grace, output_dir, horovod: args.horovod }, job))
}
