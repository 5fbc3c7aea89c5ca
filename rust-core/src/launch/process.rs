//! A rank as a process, which is guaranteed to end.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions};

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exit {
    /// With this exit code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

impl Exit {
    /// Whether it ended with exit code 0.
    pub fn success(self) -> bool {
        self == Exit::Code(0)
    }

    /// The exit code that a shell would report.
    pub fn code(self) -> i32 {
        match self {
            Exit::Code(code) => code,
            Exit::Signal(signal) => 128 + signal,
        }
    }
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Exit::Code(code) => write!(f, "exit code {code}"),
            Exit::Signal(signal) => write!(f, "killed by {}", super::signals::name(*signal)),
        }
    }
}

/// A running rank: the leader of its own process group.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    group: Pid,
    /// Text for standard input that the pipe has not taken yet.
    unsent: Option<Box<UnsentInput>>,
}

/// Text for a process that has not read all of it. The launcher never blocks in a write, because a process that is
/// stuck, such as an `ssh` without a connection, would block the other ranks with it.
#[derive(Debug)]
struct UnsentInput {
    text: Vec<u8>,
    num_sent: usize,
    /// When the process was started.
    start: Instant,
}

/// The standard input of a process.
#[derive(Clone, Copy, Debug)]
pub(super) enum Input<'a> {
    Nothing,
    /// That of `smdrun`.
    Ours,
    /// This text; the input stays open while the process runs. [`Process::send_input`] sends what the pipe does not
    /// take at the start.
    Text(&'a [u8]),
}

/// The output pipes of a process.
pub(super) struct Pipes {
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
}

impl Process {
    /// Starts `command` with exactly the environment `variables` (RUN-2).
    pub fn start(
        command: &[OsString],
        variables: BTreeMap<OsString, OsString>,
        input: Input<'_>,
    ) -> io::Result<(Self, Pipes)> {
        let (program, args) = command.split_first().expect("a command has a program");
        let parent = std::process::id();
        let mut builder = Command::new(program);
        builder
            .args(args)
            .env_clear()
            .envs(variables)
            .stdin(match input {
                Input::Nothing => Stdio::null(),
                Input::Ours => Stdio::inherit(),
                Input::Text(_) => Stdio::piped(),
            })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A process group of its own, so that a rank and the processes that it started can be signalled together
            // (RUN-1).
            .process_group(0);
        // SAFETY: between fork and exec the closure makes only async-signal-safe calls and does not allocate.
        unsafe {
            builder.pre_exec(move || {
                let mut none = std::mem::MaybeUninit::uninit();
                libc::sigemptyset(none.as_mut_ptr());
                libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut());
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                    return Err(io::Error::last_os_error());
                }
                // The parent may have died before the line above.
                if libc::getppid() as u32 != parent {
                    libc::_exit(128 + libc::SIGKILL);
                }
                Ok(())
            });
        }
        let mut child = builder.spawn()?;
        let group = Pid::from_child(&child);
        let unsent = match input {
            Input::Text(text) => Some(UnsentInput { text: text.to_owned(), num_sent: 0, start: Instant::now() }.into()),
            Input::Nothing | Input::Ours => None,
        };
        let stdout = child.stdout.take().expect("asked for a pipe").into();
        let stderr = child.stderr.take().expect("asked for a pipe").into();
        // From here on, an error ends the process.
        let mut process = Self { child, group, unsent };
        for pipe in [&stdout, &stderr] {
            rustix::io::ioctl_fionbio(pipe, true)?;
        }
        if let Some(pipe) = &process.child.stdin {
            rustix::io::ioctl_fionbio(pipe, true)?;
        }
        process.write_input();
        Ok((process, Pipes { stdout, stderr }))
    }

    /// The input pipe, to poll for writing while text is left for it.
    pub fn unsent_input(&self) -> Option<BorrowedFd<'_>> {
        self.unsent.as_ref().and(self.child.stdin.as_ref()).map(AsFd::as_fd)
    }

    /// Sends more of the text for standard input. Returns whether the process is too slow: it has not read the text
    /// within `limit` of its start. The rest of the text is then discarded.
    pub fn send_input(&mut self, limit: Duration) -> bool {
        self.write_input();
        self.unsent.take_if(|unsent| unsent.start.elapsed() >= limit).is_some()
    }

    /// Writes as much as the input pipe takes without blocking. The pipe stays open as long as the process runs.
    fn write_input(&mut self) {
        let (Some(unsent), Some(pipe)) = (&mut self.unsent, &self.child.stdin) else { return };
        while unsent.num_sent < unsent.text.len() {
            match rustix::io::write(pipe, &unsent.text[unsent.num_sent..]) {
                Ok(written) => unsent.num_sent += written,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return,
                // A process that has closed its input is about to end, which the supervisor notices.
                Err(_) => break,
            }
        }
        self.unsent = None;
    }

    /// Returns how the process ended, if it has. It stays a zombie until the value is dropped, so that its number
    /// cannot be reused as a process group before the last process of the group has ended.
    pub fn exit(&self) -> io::Result<Option<Exit>> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = rustix::process::waitid(WaitId::Pid(self.group), options)?;
        Ok(status.map(|status| match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Exit::Code(code),
            (None, Some(signal)) => Exit::Signal(signal),
            (None, None) => unreachable!("only ends were asked for"),
        }))
    }

    /// The process id.
    pub fn pid(&self) -> i32 {
        self.group.as_raw_pid()
    }

    /// Sends `signal` to the rank's process group.
    pub fn signal(&self, signal: Signal) {
        // An error means that no process is left.
        let _ = rustix::process::kill_process_group(self.group, signal);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        // The process cannot outlive SIGKILL, so the wait is short; an error means that the process was reaped already.
        let _ = self.child.wait();
    }
}

/// Makes this process the parent of all orphans among its descendants (RUN-1).
pub(super) fn adopt_orphans(on: bool) {
    // SAFETY: the call changes an attribute of this process and takes no pointer. If the kernel refuses, only the
    // second half of RUN-1 is lost, so the result is ignored.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, libc::c_ulong::from(on), 0, 0, 0) };
}

/// Processes whose parent is this process.
pub(super) fn children() -> Vec<i32> {
    let me = std::process::id();
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid: &i32| {
            // `pid (name) state ppid ...`, where the name may contain any character.
            std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
                let rest = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
                rest.split(' ').nth(1).and_then(|ppid| ppid.parse().ok()) == Some(me)
            })
        })
        .collect()
}

/// Sends `signal`, if any, to an adopted process, and reaps it if it has ended.
pub(super) fn end_orphan(pid: i32, signal: Option<Signal>) {
    let Some(pid) = Pid::from_raw(pid) else { return };
    // An error means that the process is gone.
    if let Some(signal) = signal {
        let _ = rustix::process::kill_process(pid, signal);
    }
    let _ = rustix::process::waitpid(Some(pid), WaitOptions::NOHANG);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_read_as_a_shell_reports_them() {
        assert_eq!((Exit::Code(3).code(), Exit::Code(3).to_string()), (3, "exit code 3".into()));
        assert_eq!((Exit::Signal(9).code(), Exit::Signal(9).to_string()), (137, "killed by SIGKILL (signal 9)".into()));
        assert!(Exit::Code(0).success() && !Exit::Signal(15).success());
    }

    #[test]
    fn a_process_has_its_own_group_and_ends_when_dropped() {
        let (process, _pipes) =
            Process::start(&["sleep".into(), "60".into()], std::env::vars_os().collect(), Input::Nothing)
                .expect("sleep starts");
        let pid = process.pid();
        assert!(children().contains(&pid));
        assert_eq!(rustix::process::getpgid(Pid::from_raw(pid)).expect("it runs"), process.group);
        assert_eq!(process.exit().expect("it is our child"), None);
        drop(process);
        assert!(!children().contains(&pid));
    }

    fn start(command: &str, input: &[u8]) -> (Process, Pipes) {
        let variables = std::env::vars_os().collect();
        Process::start(&["sh".into(), "-c".into(), command.into()], variables, Input::Text(input)).expect("sh starts")
    }

    #[test]
    fn a_process_that_does_not_read_its_input_blocks_neither_the_start_nor_the_end() {
        let begin = Instant::now();
        let (mut process, _pipes) = start("exec sleep 20", &[b'x'; 1 << 20]);
        assert!(process.unsent_input().is_some());
        assert!(!process.send_input(Duration::from_secs(3600)));
        assert!(process.send_input(Duration::ZERO), "the limit is over");
        assert!(process.unsent_input().is_none() && !process.send_input(Duration::ZERO), "the process is late once");
        drop(process);
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    }

    #[test]
    fn a_process_gets_all_of_a_long_input_and_the_pipe_stays_open() {
        let text: Vec<u8> = (0..1 << 20).map(|index| b'a' + (index % 23) as u8).collect();
        let (mut process, pipes) = start("sleep 0.1; head -c 1048576; read rest || echo end", &text);
        let mut read = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(30);
        while read.len() < text.len() {
            assert!(Instant::now() < deadline && !process.send_input(Duration::from_secs(60)), "{} bytes", read.len());
            let mut buffer = [0; 64 * 1024];
            match rustix::io::read(&pipes.stdout, &mut buffer) {
                Ok(count) => read.extend_from_slice(&buffer[..count]),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        assert!(read == text && process.unsent_input().is_none());
        assert_eq!(process.exit().expect("it is our child"), None, "the shell waits for more input");
    }

    #[test]
    fn a_process_that_closes_its_input_is_not_late() {
        let (mut process, _pipes) = start("exec <&-; sleep 20", &[b'x'; 1 << 20]);
        let deadline = Instant::now() + Duration::from_secs(10);
        while process.unsent_input().is_some() {
            assert!(Instant::now() < deadline && !process.send_input(Duration::from_secs(60)));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
