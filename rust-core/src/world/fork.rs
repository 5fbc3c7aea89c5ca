//! Rules for forked children. A child has the parent's memory but none of its threads, and it inherits the parent's
//! open sockets: while it lives, peers could not notice the parent's death (data loaders fork such children).
//!
//! - FORK-1: control sockets are [`Guard`]ed: the child closes its copies before any other code runs in it.
//! - FORK-2: from then on [`is_child`] is true, and every entry to the core returns an error, except queries whose
//!   answers [`Hooks`] have prepared.

use std::cell::Cell;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, OnceLock};

use parking_lot::{Mutex, MutexGuard};

static IS_CHILD: AtomicBool = AtomicBool::new(false);
static SOCKETS: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());
static REGISTERED: Once = Once::new();
static HOOKS: OnceLock<Hooks> = OnceLock::new();

/// Functions that every fork calls on the forking thread.
pub struct Hooks {
    /// Called in the parent before the fork.
    pub before: fn(),
    /// Called in the parent after the fork.
    pub in_parent: fn(),
    /// Called in the child, which has only this thread, so it must take no lock that another thread may have held.
    pub in_child: fn(),
}

/// Installs hooks for every later fork; only the first call has an effect.
pub fn on_fork(hooks: Hooks) {
    let _ = HOOKS.set(hooks);
    register();
}

fn register() {
    REGISTERED.call_once(|| {
        // SAFETY: the handlers are functions that live as long as the process. If registration fails (no memory),
        // children keep copies of the sockets and do not know their ranks.
        let _ = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    });
}

/// Whether this process was forked from one that used the core.
pub fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

/// Closes a socket's copy in forked children. Drop the guard before the socket, so that a reused descriptor is not
/// closed.
#[derive(Debug)]
pub struct Guard(RawFd);

impl Guard {
    /// Guards `socket`.
    pub fn new(socket: &impl AsRawFd) -> Self {
        register();
        let socket = socket.as_raw_fd();
        SOCKETS.lock().push(socket);
        Self(socket)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if is_child() {
            return;
        }
        let mut sockets = SOCKETS.lock();
        if let Some(position) = sockets.iter().position(|&socket| socket == self.0) {
            sockets.swap_remove(position);
        }
    }
}

thread_local! {
    /// The lock that `before` takes and that is held during the fork.
    static HELD: Cell<Option<MutexGuard<'static, Vec<RawFd>>>> = const { Cell::new(None) };
}

/// Locks the list during the fork, so that the child's copy is consistent.
extern "C" fn before() {
    // In a child, the list stays locked, see below; its own children have nothing left to close.
    if is_child() {
        return;
    }
    // Before the lock is taken, because the hook may open or close guarded sockets.
    if let Some(hooks) = HOOKS.get() {
        (hooks.before)();
    }
    HELD.set(Some(SOCKETS.lock()));
}

extern "C" fn in_parent() {
    HELD.set(None);
    if !is_child()
        && let Some(hooks) = HOOKS.get()
    {
        (hooks.in_parent)();
    }
}

extern "C" fn in_child() {
    let is_first = !IS_CHILD.swap(true, Ordering::Relaxed);
    if let Some(hooks) = HOOKS.get().filter(|_| is_first) {
        (hooks.in_child)();
    }
    if let Some(sockets) = HELD.take() {
        for &socket in sockets.iter() {
            // SAFETY: these are the child's copies of sockets; no code in the child uses them, because every entry
            // returns an error.
            unsafe { libc::close(socket) };
        }
        // Stays locked: unlocking might wake threads that do not exist in the child, and the lock is not used again.
        std::mem::forget(sockets);
    }
}
