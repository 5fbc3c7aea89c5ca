//! Communicators that run operations: how they are created, polled, aborted and closed.

use std::cell::Cell;
use std::ffi::c_int;

use cudarc::nccl::sys::ncclComm_t;
use parking_lot::ReentrantMutex;

use super::library::{Functions, nccl};
use super::parent::{Config, POLL_INTERVAL, Parent, RawComm, call, free, state};
use crate::device::driver::{Context, relaxed};
use crate::error::{Error, Result};

/// This process's communicator of a group, which runs operations. If it is dropped without [`Comm::close`] or
/// [`Comm::abort`], it stays until the process ends: both may wait, and a drop must not.
#[derive(Debug)]
pub struct Comm {
    /// Reentrant, since [`Comm::group`] holds it while its body calls operations.
    operations: ReentrantMutex<RawComm>,
    /// Shares its abort flag with `operations` (NCL-4).
    stop: Parent,
    /// The communicator from which other groups' are split.
    parent: Parent,
    context: &'static Context,
}

impl Comm {
    /// Creates the communicator for the operations of the group that `parent` has joined as its member `rank`.
    /// Collective. Waits for the other members until `check` fails.
    ///
    /// # Errors
    /// [`Error::Device`], or that of `check`, with the communicators that must still be aborted.
    pub fn open(
        parent: Parent,
        rank: usize,
        mut check: impl FnMut() -> Result<()>,
    ) -> std::result::Result<Self, (Vec<Parent>, Error)> {
        let context = parent.context;
        let lost = || Error::Internal("NCCL created no communicator for the operations of a group".into());
        let place = Some((0, rank));
        let shared = parent.split_raw(place, Config::SHARED, &mut check).and_then(|raw| raw.ok_or_else(lost));
        let stop = match shared {
            Ok(raw) => Parent::new(raw, context),
            Err(error) => return Err((vec![parent], error)),
        };
        let joined = stop.settle("joining a group", &mut check);
        let made = joined.and_then(|()| stop.split_raw(place, Config::BLOCKING, &mut check));
        match made.and_then(|raw| raw.ok_or_else(lost)) {
            Ok(raw) => Ok(Self { operations: ReentrantMutex::new(RawComm(Cell::new(raw))), stop, parent, context }),
            Err(error) => Err((vec![stop, parent], error)),
        }
    }

    /// The device's context.
    pub fn context(&self) -> &'static Context {
        self.context
    }

    /// See [`Parent::split`].
    ///
    /// # Errors
    /// As [`Parent::split`].
    pub fn split(
        &self,
        color_and_key: Option<(usize, usize)>,
        check: impl FnMut() -> Result<()>,
    ) -> Result<Option<Parent>> {
        self.parent.split(color_and_key, check)
    }

    /// Returns NCCL's asynchronous error, if there is one. Returns none while a call is running.
    pub fn async_error(&self) -> Option<Error> {
        let handle = self.operations.try_lock()?;
        // A communicator that another thread is aborting has no error of its own.
        state(&handle, self.context, "communicating").err().filter(|error| !matches!(error, Error::Closed { .. }))
    }

    /// Runs `body` on a thread of its own, because its calls may stay inside of NCCL until all members have come. If
    /// `check` fails, the communicator is aborted, which makes `body` return.
    ///
    /// # Errors
    /// Any error of `check` and `body`.
    pub fn interruptible<T: Send>(
        &self,
        mut check: impl FnMut() -> Result<()>,
        body: impl FnOnce() -> Result<T> + Send,
    ) -> Result<T> {
        std::thread::scope(|scope| {
            let body = || {
                let _entered = self.context.enter()?;
                body()
            };
            let thread = std::thread::Builder::new().name("smd-cuda-call".into()).spawn_scoped(scope, body);
            let thread = thread.map_err(|error| Error::io("starting a thread for NCCL", error))?;
            while !thread.is_finished() {
                check().inspect_err(|_| self.abort())?;
                std::thread::sleep(POLL_INTERVAL);
            }
            thread.join().unwrap_or_else(|_| Err(Error::Internal("a thread that calls NCCL panicked".into())))
        })
    }

    /// Aborts every operation, on the host and on the device, and frees the communicator, whatever other threads do
    /// with it (NCL-4). Waits for the device to stop. Does nothing on a second call.
    pub fn abort(&self) {
        self.stop.abort();
        free(&self.operations.lock(), self.context, |functions| functions.ncclCommAbort);
        self.parent.abort();
    }

    /// Frees the communicators beside that for operations, after [`Comm::close`]. No member waits for them, and freeing
    /// takes longer than `close`.
    pub fn free_others(&self) {
        self.stop.abort();
        self.parent.abort();
    }

    /// Frees the communicator when its operations are done and NCCL has sent all of their data. The other members do
    /// the same at about the same time. If `check` fails, the communicator is aborted instead. Does nothing on a
    /// second call, or after [`Comm::abort`].
    ///
    /// # Errors
    /// The error that ended the wait.
    pub fn close(&self, check: impl FnMut() -> Result<()>) -> Result<()> {
        // SAFETY: the communicator exists.
        let finalize = |nccl: &Functions, comm| relaxed(|| unsafe { (nccl.ncclCommFinalize)(comm) });
        match self.interruptible(check, || self.call("closing a group", finalize)) {
            Ok(()) => {
                free(&self.operations.lock(), self.context, |functions| functions.ncclCommDestroy);
            }
            Err(Error::Closed { .. }) => {}
            Err(error) => {
                self.abort();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Runs `body` as an NCCL group: its operations start together and may depend on each other.
    ///
    /// # Errors
    /// Any error of `body`, [`Error::Device`].
    pub fn group(&self, body: impl FnOnce() -> Result<()>) -> Result<()> {
        let nccl = nccl()?;
        // Held until the group's end: NCCL refers to the communicator until then (NCL-2).
        let handle = self.operations.lock();
        // SAFETY: no preconditions.
        let answer = unsafe { (nccl.functions.ncclGroupStart)() };
        nccl.check(answer, handle.0.get(), || "starting a group of operations".into())?;
        let outcome = body();
        // SAFETY: ends what was started above, on the same thread.
        let answer = unsafe { (nccl.functions.ncclGroupEnd)() };
        outcome.and_then(|()| nccl.check(answer, handle.0.get(), || "starting operations of a group".into()))
    }

    pub(super) fn call(&self, name: &str, function: impl FnOnce(&Functions, ncclComm_t) -> c_int) -> Result<()> {
        call(&self.operations.lock(), self.context, name, function)
    }
}
