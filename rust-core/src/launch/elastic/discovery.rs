//! Runs the user's host discovery script once a second. It runs as a child process that the driver does not wait for.

use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::super::process::{Exit, Input, Pipes, Process};
use super::args::HostList;
use super::hosts::parse;
use crate::error::{Error, Result};

/// Interval between the starts of two runs.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time limit of one run.
const LONGEST_RUN: Duration = Duration::from_secs(60);

/// The source of hosts.
pub(super) enum Discovery {
    /// A fixed list, which is reported once.
    Fixed(Option<HostList>),
    Script(Script),
}

/// The user's discovery script, run once a second.
pub(super) struct Script {
    command: Vec<OsString>,
    slots_per_host: Option<usize>,
    run: Option<ScriptRun>,
    next: Instant,
    /// Whether a run has found hosts before.
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
    /// The script's path, or a command for the shell.
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
    /// When to call again if nothing else happens.
    pub fn next(&self) -> Option<Instant> {
        match self {
            Discovery::Fixed(_) => None,
            Discovery::Script(script) => Some(script.run.as_ref().map_or(script.next, |run| run.start + LONGEST_RUN)),
        }
    }

    /// Returns the hosts, if a run has ended since the last call. A failed run returns a text to log, and is an error
    /// if no run has succeeded before.
    ///
    /// # Errors
    /// [`Error::Config`] if the first run fails.
    pub fn poll(&mut self, now: Instant, log: &mut dyn FnMut(String)) -> Result<Option<HostList>> {
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
                    log(format!("the discovery of hosts failed, so the previous hosts stay in use: {why}"));
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
        // Checks for the end first and reads the output afterwards, so that all of it is read.
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
