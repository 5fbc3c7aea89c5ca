//! Asks the user's script for hosts, once a second. The script is a child as others are: nobody waits for it.

use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::super::process::{Exit, Input, Pipes, Process};
use super::args::HostList;
use super::hosts::parse;
use crate::error::{Error, Result};

/// From the start of one run to the start of the next.
const INTERVAL: Duration = Duration::from_secs(1);
/// A script that takes longer is ended.
const LONGEST_RUN: Duration = Duration::from_secs(60);

/// Where hosts come from.
pub(super) enum Discovery {
    /// They are always the same, and told once.
    Fixed(Option<HostList>),
    Script(Script),
}

/// The user's discovery script, run once a second.
pub(super) struct Script {
    command: Vec<OsString>,
    slots_per_host: Option<usize>,
    run: Option<ScriptRun>,
    next: Instant,
    /// It has found hosts before.
    has_worked: bool,
    last_failure: String,
}

struct ScriptRun {
    process: Process,
    pipes: Pipes,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    start: Instant,
}

impl Script {
    /// A script by its path, or a command for the shell.
    pub fn new(script: &OsString, slots_per_host: Option<usize>) -> Self {
        let command = match std::path::absolute(script) {
            Ok(path) if Path::new(script).is_file() => vec![path.into_os_string()],
            _ => vec!["sh".into(), "-c".into(), script.clone()],
        };
        let next = Instant::now();
        Self { command, slots_per_host, run: None, next, has_worked: false, last_failure: String::new() }
    }
}

impl Discovery {
    /// When to look again if nothing happens before.
    pub fn next(&self) -> Option<Instant> {
        match self {
            Discovery::Fixed(_) => None,
            Discovery::Script(script) => Some(script.run.as_ref().map_or(script.next, |run| run.start + LONGEST_RUN)),
        }
    }

    /// The hosts, if a run has ended since the last call. A failure is passed on as a text to show, and ends the job if the
    /// script has not worked before.
    ///
    /// # Errors
    /// [`Error::Config`] for that first failure.
    pub fn poll(&mut self, now: Instant, say: &mut dyn FnMut(String)) -> Result<Option<HostList>> {
        let script = match self {
            Discovery::Fixed(hosts) => return Ok(hosts.take()),
            Discovery::Script(script) => script,
        };
        let Some(found) = script.poll(now) else { return Ok(None) };
        match found {
            Ok(hosts) => {
                script.has_worked = true;
                script.last_failure.clear();
                Ok(Some(hosts))
            }
            Err(why) if script.has_worked => {
                if script.last_failure != why {
                    say(format!("the discovery of hosts failed, the last ones stay: {why}"));
                    script.last_failure = why;
                }
                Ok(None)
            }
            Err(why) => Err(Error::Config(format!(
                "the discovery of hosts, `{}`, failed: {why}",
                script.command.last().expect("a command has words").to_string_lossy()
            ))),
        }
    }
}

impl Script {
    fn poll(&mut self, now: Instant) -> Option<std::result::Result<HostList, String>> {
        if self.run.is_none() {
            if now < self.next {
                return None;
            }
            self.next = now + INTERVAL;
            let variables = std::env::vars_os().collect();
            match Process::start(&self.command, variables, Input::Nothing) {
                Ok((process, pipes)) => {
                    self.run = Some(ScriptRun { process, pipes, stdout: Vec::new(), stderr: Vec::new(), start: now });
                }
                Err(error) => return Some(Err(error.to_string())),
            }
        }
        let run = self.run.as_mut().expect("it was made above");
        // The end first, then the output: what it printed before it ended is all there.
        let exit = run.process.exit();
        run.read();
        let exit = match exit {
            Ok(None) if now < run.start + LONGEST_RUN => return None,
            Ok(None) => {
                run.process.signal(Signal::KILL);
                self.run = None;
                return Some(Err(format!("it took longer than {LONGEST_RUN:?}")));
            }
            Ok(Some(exit)) => exit,
            Err(error) => return Some(Err(error.to_string())),
        };
        let run = self.run.take().expect("it is there");
        let stderr = String::from_utf8_lossy(&run.stderr).trim().to_owned();
        Some(match exit {
            Exit::Code(0) => parse(&String::from_utf8_lossy(&run.stdout), self.slots_per_host),
            exit if stderr.is_empty() => Err(exit.to_string()),
            exit => Err(format!("{exit}: {stderr}")),
        })
    }
}

impl ScriptRun {
    fn read(&mut self) {
        let mut buffer = [0; 4096];
        for (pipe, text) in [(&self.pipes.stdout, &mut self.stdout), (&self.pipes.stderr, &mut self.stderr)] {
            while let Ok(read @ 1..) = rustix::io::read(pipe, &mut buffer) {
                text.extend_from_slice(&buffer[..read]);
            }
        }
    }
}
