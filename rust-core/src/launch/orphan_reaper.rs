//! The orphan reaper: a small process that ends the ranks' process groups if `smdrun` is killed before it can
//! (RUN-1).
//!
//! A rank itself has a parent-death signal, but processes that it started (data loaders, for example) have not. The
//! orphan reaper reads from a pipe to which only `smdrun` writes. Each record is the number of a process group: a
//! positive number adds it, a negative one removes it. When the pipe is closed, `smdrun` has ended, in whatever way.

use std::io::{self, PipeWriter, Write};
use std::os::fd::AsRawFd;

/// Largest number of process groups; the command line allows no more ranks.
const MAX_GROUPS: usize = 4096;

/// The connection to the orphan reaper. Dropping it ends the remaining process groups.
#[derive(Debug)]
pub(super) struct OrphanReaper {
    pipe: PipeWriter,
    pid: libc::pid_t,
}

impl OrphanReaper {
    /// Starts the orphan reaper. Called while this process has one thread.
    pub fn start() -> io::Result<Self> {
        let (reader, pipe) = io::pipe()?;
        // SAFETY: the child makes only async-signal-safe calls, touches no memory but its own stack, and never
        // returns from `keep_watch`.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            // SAFETY: this is the child, and the descriptor is the pipe's reading end.
            0 => unsafe { keep_watch(reader.as_raw_fd()) },
            pid => Ok(Self { pipe, pid }),
        }
    }

    /// Adds a process group.
    pub fn add(&self, group: i32) {
        self.tell(group);
    }

    /// Removes a process group. Must be called before its leader is reaped, because the number may be reused
    /// afterwards.
    pub fn remove(&self, group: i32) {
        self.tell(-group);
    }

    /// Process id.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    fn tell(&self, number: i32) {
        // A write of four bytes to a pipe is atomic. If the orphan reaper has died, the error cannot be handled.
        let _ = (&self.pipe).write_all(&number.to_ne_bytes());
    }
}

/// The main loop of the orphan reaper.
///
/// # Safety
/// Runs in a freshly forked child; `pipe` is a descriptor of it. Calls async-signal-safe functions only.
unsafe fn keep_watch(pipe: libc::c_int) -> ! {
    let mut groups = [0_i32; MAX_GROUPS];
    // SAFETY: system calls on numbers, and on buffers of this frame with their right sizes.
    unsafe {
        // Signals for `smdrun`'s group or terminal are not for the orphan reaper.
        libc::setsid();
        // Readers of `smdrun`'s output must see its end when the ranks and `smdrun` have ended, and only `smdrun` may
        // hold the writing end of the pipe.
        libc::dup2(pipe, 0);
        libc::syscall(libc::SYS_close_range, 1, libc::c_uint::MAX, 0);
        libc::prctl(libc::PR_SET_NAME, c"smdrun-reaper".as_ptr());
        loop {
            let mut number = [0_u8; 4];
            let read = libc::read(0, number.as_mut_ptr().cast(), number.len());
            if read < 0 && *libc::__errno_location() == libc::EINTR {
                continue;
            }
            if read != number.len() as isize {
                break;
            }
            let number = i32::from_ne_bytes(number);
            let (old, new) = if number > 0 { (0, number) } else { (-number, 0) };
            if let Some(slot) = groups.iter_mut().find(|slot| **slot == old) {
                *slot = new;
            }
        }
        for group in groups {
            if group > 1 {
                libc::kill(-group, libc::SIGKILL);
            }
        }
        libc::_exit(0)
    }
}

impl Drop for OrphanReaper {
    fn drop(&mut self) {
        // Ends when the pipe is closed, or at an incomplete record.
        let _ = (&self.pipe).write_all(&[0]);
        // The reaper ends at once; an error means that it was reaped already.
        // SAFETY: a null status pointer is allowed.
        unsafe { libc::waitpid(self.pid, std::ptr::null_mut(), 0) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::process::{Input, Process};
    use super::*;

    fn sleeper() -> Process {
        let (process, _pipes) =
            Process::start(&["sleep".into(), "60".into()], std::env::vars_os().collect(), Input::Nothing)
                .expect("sleep starts");
        process
    }

    #[test]
    fn only_groups_under_watch_end_with_the_warden() {
        let (watched, released) = (sleeper(), sleeper());
        let reaper = OrphanReaper::start().expect("a process can be started");
        reaper.add(watched.pid());
        reaper.add(released.pid());
        reaper.remove(released.pid());
        drop(reaper);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
        while watched.exit().expect("it is our child").is_none() && std::time::Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert!(watched.exit().expect("it is our child").is_some_and(|exit| exit.code() == 137));
        assert_eq!(released.exit().expect("it is our child"), None);
    }
}
