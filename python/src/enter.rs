//! The common entry from Python into the core: it releases the GIL, catches panics, and handles Ctrl-C.
//!
//! - ENT-1: while the core waits, the GIL is released, and the core's own threads never take it.
//! - ENT-2: Python records signals but runs their handlers on its main thread only, between bytecodes. A wait of the
//!   main thread therefore checks for signals a few times a second, through the core's interrupt hook. If a handler
//!   raises, the wait ends and the exception is raised in the caller.
//! - ENT-3: a framework's own C++ functions cannot propagate that exception. They return as soon as possible, and the
//!   interpreter raises it in the Python code that called them.

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::ffi;
use pyo3::prelude::*;
use smd_core::error::Code;
use smd_core::world::monitor::{self, InterruptHooks};
use smd_core::{Error, Result};

use crate::error::to_python;

/// Shortest time between two checks for signals, because each takes the GIL.
const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(20);

thread_local! {
    static IS_MAIN: bool = rustix::thread::gettid() == rustix::process::getpid();
    static LAST_SIGNAL_CHECK: Cell<Option<Instant>> = const { Cell::new(None) };
    /// The exception of a signal handler during a wait of this thread.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// Whether the interpreter will raise it (ENT-3).
    static RAISES: Cell<bool> = const { Cell::new(false) };
}

/// Installs the hooks with which Python's signals end waits of the core.
pub fn install() {
    monitor::set_interrupt_hooks(InterruptHooks { pending: check_signals, raise_on_return });
}

/// Runs `body`, which may wait, without the GIL.
pub fn enter<T: Send>(py: Python<'_>, body: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    // Unwind safety: what the core shares between calls is behind locks that do not poison, or is atomic.
    let outcome = py.detach(|| catch_unwind(AssertUnwindSafe(body)));
    outcome.unwrap_or_else(|panic| Err(Error::from_panic(&*panic))).map_err(|error| match error.code() {
        Code::Interrupted => take_raised().unwrap_or_else(|| PyKeyboardInterrupt::new_err(error.to_string())),
        _ => to_python(py, &error),
    })
}

/// Returns the exception of a signal handler from the last interrupted wait of this thread.
pub fn take_raised() -> Option<PyErr> {
    RAISED.with_borrow_mut(Option::take)
}

fn check_signals() -> bool {
    if !IS_MAIN.with(|&is_main| is_main) {
        return false;
    }
    if RAISES.get() {
        // No wait of this thread begins before that: the caller would continue without the result.
        return true;
    }
    let now = Instant::now();
    if LAST_SIGNAL_CHECK.get().is_some_and(|last| now - last < SIGNAL_CHECK_INTERVAL) {
        return false;
    }
    LAST_SIGNAL_CHECK.set(Some(now));
    // The interpreter is shutting down and cannot be called.
    let Some(Err(raised)) = Python::try_attach(|py| py.check_signals()) else { return false };
    RAISED.set(Some(raised));
    true
}

/// Lets the interpreter raise the exception later (ENT-3).
fn raise_on_return() -> bool {
    extern "C" fn raise(_: *mut c_void) -> c_int {
        // Pending calls run on the main thread, as the wait did.
        RAISES.set(false);
        take_raised().map_or(0, |error| {
            Python::attach(|py| error.restore(py));
            -1
        })
    }
    if RAISES.get() {
        return true;
    }
    // SAFETY: the function may be called at any time, without the GIL as well, and `raise` takes no argument that would
    // have to live.
    let queued = RAISED.with_borrow(Option::is_some)
        && unsafe { ffi::Py_AddPendingCall(Some(raise), std::ptr::null_mut()) } == 0;
    RAISES.set(queued);
    queued
}
