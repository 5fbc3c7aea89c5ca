//! What a forked child must not do. It has the parent's memory but none of its threads, and it holds the parent's
//! sockets open: as long as it lived, nobody would notice the parent's death (data loaders fork such children).
//!
//! - FORK-1: control sockets are [`Guard`]ed; the child closes its copies before anything else runs in it.
//! - FORK-2: [`is_child`] is true from then on, and every entry to the core refuses politely, but for questions that
//!   [`Hooks`] have prepared an answer to.

use std::cell::Cell;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, OnceLock};

use parking_lot::{Mutex, MutexGuard};

static IS_CHILD: AtomicBool = AtomicBool::new(false);
static SOCKETS: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());
static REGISTERED: Once = Once::new();
static HOOKS: OnceLock<Hooks> = OnceLock::new();

/// What else a fork does, on the thread that forks.
pub struct Hooks {
    /// In the parent, before it is copied.
    pub before: fn(),
    /// In the parent, afterwards.
    pub in_parent: fn(),
    /// In the child, which has this thread only: it must take no lock that another thread may have held.
    pub in_child: fn(),
}

/// Has every later fork do this as well; the first hooks stay.
pub fn on_fork(hooks: Hooks) {
    let _ = HOOKS.set(hooks);
    register();
}

fn register() {
    REGISTERED.call_once(|| {
        // SAFETY: the handlers are functions that live as long as the process. A failure (no memory) only means
        // that children keep copies of the sockets and do not know their place.
        let _ = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    });
}

/// Whether this process was forked from one that used the core.
pub fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

/// Keeps a socket out of forked children. Drop it before the socket, so that a reused number is not closed.
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
    /// The lock that `before` takes, until the fork is done.
    static HELD: Cell<Option<MutexGuard<'static, Vec<RawFd>>>> = const { Cell::new(None) };
}

/// Holds the list still while the process is copied, so that the child finds it whole.
extern "C" fn before() {
    // A child's list stays locked for good, see below; its own children have nothing left to close.
    if is_child() {
        return;
    }
    // Before the lock is held: what the hook asks for may be guarded sockets' own.
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
            // SAFETY: the child's copies of sockets; nothing in the child uses them, since every entry refuses.
            unsafe { libc::close(socket) };
        }
        // Stays locked: unlocking might wait for threads that the child does not have, and nobody asks again.
        std::mem::forget(sockets);
    }
}
