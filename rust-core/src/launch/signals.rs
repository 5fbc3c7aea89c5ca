//! Signals that are polled (`signalfd`), instead of handlers that interrupt.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Signals that `smdrun` handles, besides SIGCHLD. A signal that was ignored at the start (`nohup`, a shell's `&`)
/// stays ignored.
const REQUESTS: [libc::c_int; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGTSTP];

/// While this value lives, the handled signals are blocked in this thread and in threads that it starts, and are read
/// here.
pub(super) struct Signals {
    fd: OwnedFd,
    before: libc::sigset_t,
}

impl Signals {
    /// Blocks the handled signals.
    pub fn take() -> io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigemptyset` initialises `set` before the others read it; both point to memory of this frame.
        let failed = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            // If SIGCHLD is ignored, the kernel reaps children, and their exit codes are lost.
            libc::signal(libc::SIGCHLD, libc::SIG_DFL);
            libc::sigaddset(set.as_mut_ptr(), libc::SIGCHLD);
            for signal in REQUESTS.into_iter().filter(|signal| !is_ignored(*signal)) {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), before.as_mut_ptr())
        };
        if failed != 0 {
            return Err(io::Error::from_raw_os_error(failed));
        }
        // SAFETY: `set` was initialised above.
        let fd = unsafe { libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call returned a new descriptor that no other code owns; `pthread_sigmask` initialised `before`.
        Ok(unsafe { Self { fd: OwnedFd::from_raw_fd(fd), before: before.assume_init() } })
    }

    /// Returns the next pending signal.
    pub fn next(&self) -> Option<i32> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        // SAFETY: the buffer is of the size that is passed; the kernel writes whole records.
        let read =
            unsafe { libc::read(self.fd.as_raw_fd(), info.as_mut_ptr().cast(), size_of::<libc::signalfd_siginfo>()) };
        // SAFETY: a positive result is a whole record.
        (read > 0).then(|| unsafe { info.assume_init() }.ssi_signo as i32)
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // Signals that arrived after the last read must not reach the handlers of the calling program.
        while self.next().is_some() {}
        // SAFETY: `before` is the mask that `take` found.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }
}

fn is_ignored(signal: libc::c_int) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: without a new action the call only fills `action`, which is read if it succeeded.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

/// The usual name of a signal.
pub(super) fn name(signal: i32) -> String {
    let known = match signal {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGTERM => "SIGTERM",
        libc::SIGXCPU => "SIGXCPU",
        other => return format!("signal {other}"),
    };
    format!("{known} (signal {signal})")
}
