//! `smdrun top`: what the ranks of this host's jobs do now.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use clap::Parser;

use crate::error::{Error, Result};
use crate::metrics::Snapshot;
use crate::metrics::ranks::{self, RankCounters};

/// Shows what the ranks of jobs on this host do now: step rate, communication, and the rank that each waits for.
#[derive(Debug, Parser)]
#[command(
    name = "smdrun top",
    after_help = "Jobs of every launcher are found: `smdrun`, torchrun, mpirun and srun. Only processes of this user\n\
                  are shown. Nothing has to be set before the job starts."
)]
pub(super) struct TopArgs {
    /// Only the job that this process started or is a rank of; by default all jobs of this user on this host
    #[arg(value_name = "PID")]
    pid: Option<u64>,

    /// Shows one interval as plain text and exits
    #[arg(long)]
    once: bool,

    /// Seconds between two updates; rates are averaged over this time
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = super::args::seconds)]
    interval: Duration,
}

/// Runs the view until all ranks have ended, or prints it once.
///
/// # Errors
/// [`Error::Config`] if there is no such job; [`Error::Io`] if nothing can be printed.
pub(super) fn run(args: &TopArgs) -> Result<String> {
    let mut found = find(args.pid);
    if found.is_empty() {
        return Err(Error::Config(match args.pid {
            Some(pid) => {
                format!("process {pid} is not a rank, or the launcher of a rank, of a job of this user on this host")
            }
            None => "no job of this user runs on this host".to_owned(),
        }));
    }
    let live = std::io::stdout().is_terminal() && !args.once;
    loop {
        let start = Instant::now();
        let before = read(&found);
        std::thread::sleep(args.interval);
        let text = view(&before, &read(&found), start.elapsed());
        if args.once {
            return Ok(text);
        }
        // Home, the text, and whatever was below it before is cleared.
        let text = if live { format!("\x1b[H\x1b[J{text}") } else { format!("{text}\n") };
        let mut out = std::io::stdout();
        let printed = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        printed.map_err(|error| Error::io("printing the view", error))?;
        // Ranks come and go in elastic jobs.
        found = find(args.pid);
        if found.is_empty() {
            return Ok(String::new());
        }
    }
}

/// The counters of the ranks of this user that run on this host: all, or those that `pid` has started or is.
pub fn running_ranks(pid: Option<u64>) -> Vec<Snapshot> {
    read(&find(pid)).into_values().collect()
}

fn find(pid: Option<u64>) -> Vec<RankCounters> {
    let mut all = ranks::all();
    if let Some(pid) = pid {
        all.retain(|rank| rank.read().is_some_and(|snapshot| is_descendant(snapshot.pid, pid)));
    }
    all
}

/// Whether `process` is `ancestor`, or descends from it.
fn is_descendant(mut process: u64, ancestor: u64) -> bool {
    while process > 1 && process != ancestor {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        // The name, in parentheses, may contain anything; state and parent follow it.
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1)?.parse().ok());
        process = parent.unwrap_or(0);
    }
    process == ancestor
}

/// The counters by session and rank.
fn read(found: &[RankCounters]) -> BTreeMap<(u64, u64), Snapshot> {
    let alive = found.iter().filter(|rank| rank.is_alive()).filter_map(RankCounters::read);
    alive.map(|snapshot| ((snapshot.session, snapshot.rank), snapshot)).collect()
}

/// A table for each job.
fn view(before: &BTreeMap<(u64, u64), Snapshot>, now: &BTreeMap<(u64, u64), Snapshot>, elapsed: Duration) -> String {
    let mut text = String::new();
    let mut session = None;
    for (key, rank) in now {
        if session.replace(key.0) != Some(key.0) {
            let here = now.keys().filter(|other| other.0 == key.0).count();
            let gap = if text.is_empty() { "" } else { "\n" };
            let _ = writeln!(text, "{gap}job {:x}: {here} of {} ranks on this host", key.0, rank.size);
            let _ = writeln!(
                text,
                "{:>5} {:>8} {:>8} {:>8} {:>8} {:>9} {:>6} {:>8}  waits for",
                "rank", "pid", "steps", "steps/s", "calls/s", "MiB/s", "comm", "exposed"
            );
        }
        let zero = Snapshot::default();
        let old = before.get(key).unwrap_or(&zero);
        let seconds = elapsed.as_secs_f64().max(1e-9);
        let rate = |now: u64, old: u64| now.saturating_sub(old) as f64 / seconds;
        let share = |now: Duration, old: Duration| now.saturating_sub(old).as_secs_f64() / seconds * 100.0;
        let waits = rank.waiting_for.map_or_else(|| "-".to_owned(), |peer| format!("rank {peer}"));
        let _ = writeln!(
            text,
            "{:>5} {:>8} {:>8} {:>8.1} {:>8.1} {:>9.1} {:>5.0}% {:>7.0}%  {waits}",
            rank.rank,
            rank.pid,
            rank.steps(),
            rate(rank.steps(), old.steps()),
            rate(rank.total_calls(), old.total_calls()),
            rate(rank.total_bytes(), old.total_bytes()) / (1 << 20) as f64,
            share(rank.communication(), old.communication()),
            share(rank.exposed(), old.exposed()),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_descends_from_its_parent() {
        let (me, parent) = (u64::from(std::process::id()), u64::from(std::os::unix::process::parent_id()));
        assert!(is_descendant(me, me) && is_descendant(me, parent));
        assert!(!is_descendant(parent, me));
    }

    #[test]
    fn rates_are_those_of_the_interval() {
        let rank = |steps, exposed_ns, waiting_for| Snapshot {
            pid: 77,
            rank: 1,
            size: 2,
            session: 0xab,
            reducer_steps: steps,
            exposed_ns,
            waiting_for,
            ..Snapshot::default()
        };
        let at = |snapshot: Snapshot| BTreeMap::from([((snapshot.session, snapshot.rank), snapshot)]);
        let text = view(&at(rank(10, 0, None)), &at(rank(14, 1_000_000_000, Some(0))), Duration::from_secs(2));
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "job ab: 1 of 2 ranks on this host");
        let words: Vec<_> = lines[2].split_whitespace().collect();
        assert_eq!(words, ["1", "77", "14", "2.0", "0.0", "0.0", "0%", "50%", "rank", "0"]);
    }
}
