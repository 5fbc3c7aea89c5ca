//! Handles of NCCL communicators, and the communicators from which others are split.

use std::cell::Cell;
use std::ffi::{c_char, c_int};
use std::time::Duration;

use cudarc::nccl::sys::{self, ncclComm_t};
use parking_lot::Mutex;

use super::library::{Functions, IN_PROGRESS, SUCCESS, nccl};
use crate::device::driver::{Context, relaxed};
use crate::device::ending;
use crate::error::{Error, Result};

/// The value of a field of the configuration that NCCL may choose itself.
const UNSET: c_int = c_int::MIN;
/// The color of a member that gets no communicator in a split.
const NO_COLOR: c_int = -1;
/// Polling interval for NCCL's threads, and for threads of the core inside of NCCL.
pub(super) const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// `ncclConfig_t` as of 2.18. Every later version accepts it, because it contains its size and version.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Configuration of a communicator whose calls block.
    pub(super) const BLOCKING: Self = Self {
        size: size_of::<Self>(),
        magic: 0xcafe_beef,
        version: 21800,
        blocking: 1,
        cga_cluster_size: UNSET,
        min_ctas: UNSET,
        max_ctas: UNSET,
        net_name: std::ptr::null(),
        split_share: 0,
    };
    /// Configuration of a communicator that runs no operations, so one channel is enough.
    const PARENT: Self = Self { blocking: 0, min_ctas: 1, max_ctas: 1, ..Self::BLOCKING };
    /// Configuration of a communicator whose splits share its abort flag; they also share its channels.
    pub(super) const SHARED: Self = Self { blocking: 0, split_share: 1, ..Self::BLOCKING };
}

/// NCCL's unique id, which the members of a communicator exchange before they create it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId([u8; 128]);

impl UniqueId {
    /// Creates an id. NCCL starts a thread that serves it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without NCCL, [`Error::Device`].
    pub fn new() -> Result<Self> {
        let nccl = nccl()?;
        let _guard = ending::enter_driver()?;
        let mut id = sys::ncclUniqueId { internal: [0; 128] };
        // SAFETY: `id` is valid for the write.
        let answer = unsafe { (nccl.functions.ncclGetUniqueId)(&mut id) };
        nccl.check(answer, std::ptr::null_mut(), || "creating a unique id for a group".into())?;
        Ok(Self(id.internal.map(|byte| byte as u8)))
    }

    /// The bytes of the id.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Creates the id from bytes that another member sent.
    ///
    /// # Errors
    /// [`Error::Internal`] if the number of bytes is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bytes = bytes.try_into().map_err(|_| Error::Internal(format!("a unique id of {} bytes", bytes.len())))?;
        Ok(Self(bytes))
    }
}

/// A communicator's handle; null once it has been freed or is being freed.
#[derive(Debug)]
pub(super) struct RawComm(pub(super) Cell<ncclComm_t>);

// SAFETY: NCCL accepts calls for a communicator from any thread, one at a time; the mutex around it ensures that.
unsafe impl Send for RawComm {}

/// Calls `call` with a communicator's handle, under its lock.
pub(super) fn call(
    handle: &RawComm,
    context: &Context,
    name: &str,
    call: impl FnOnce(&Functions, ncclComm_t) -> c_int,
) -> Result<()> {
    let nccl = nccl()?;
    let raw = handle.0.get();
    if raw.is_null() {
        return Err(Error::Closed { reason: "the communicator was aborted".into() });
    }
    // The text of an error is read under the lock, too.
    nccl.check(call(&nccl.functions, raw), raw, || format!("{name} on `cuda:{}`", context.device()))
}

/// Returns the state of NCCL's threads: an error, in progress, or done.
pub(super) fn state(handle: &RawComm, context: &Context, during: &str) -> Result<bool> {
    let mut state = SUCCESS;
    // SAFETY: the communicator exists, and `state` is valid for the write.
    call(handle, context, during, |nccl, comm| match unsafe { (nccl.ncclCommGetAsyncError)(comm, &mut state) } {
        SUCCESS => state,
        error => error,
    })?;
    Ok(state == IN_PROGRESS)
}

/// Frees a communicator with the NCCL function `how`, after taking it out of `handle`.
pub(super) fn free(
    handle: &RawComm,
    context: &'static Context,
    how: impl FnOnce(&Functions) -> unsafe extern "C" fn(ncclComm_t) -> c_int,
) {
    let raw = handle.0.replace(std::ptr::null_mut());
    let (Ok(nccl), false) = (nccl(), raw.is_null()) else { return };
    let Ok(_entered) = context.enter() else { return };
    // SAFETY: the handle was taken out under the lock, so no other thread uses or frees the communicator.
    let answer = relaxed(|| unsafe { how(&nccl.functions)(raw) });
    // The caller cannot handle an error.
    if answer != SUCCESS && answer != IN_PROGRESS {
        tracing::debug!("a communicator of `cuda:{}` ended with NCCL's answer {answer}", context.device());
    }
}

/// A non-blocking communicator that runs no operations; a [`Comm`] and other groups' communicators are split from it.
/// If it is dropped without an abort, it stays until the process ends: an abort may wait, and a drop must not.
#[derive(Debug)]
pub struct Parent {
    handle: Mutex<RawComm>,
    pub(super) context: &'static Context,
}

impl Parent {
    /// Starts to join a group as member `rank` of `size`, on the device of `context`. Returns at once. Until
    /// [`Parent::settle`] has succeeded, only it and [`Parent::abort`] may be called.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without NCCL, [`Error::Device`].
    pub fn init(context: &'static Context, id: UniqueId, rank: usize, size: usize) -> Result<Self> {
        let nccl = nccl()?;
        let too_many = |_| Error::InvalidArgument(format!("a group of {size} is too large for NCCL"));
        let (rank, size) = (c_int::try_from(rank).map_err(too_many)?, c_int::try_from(size).map_err(too_many)?);
        let mut config = Config::PARENT;
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        let id = sys::ncclUniqueId { internal: id.0.map(|byte| byte as c_char) };
        // SAFETY: `raw` and `config` are valid for reads and writes; the device of the group is current.
        let answer =
            relaxed(|| unsafe { (nccl.functions.ncclCommInitRankConfig)(&mut raw, size, id, rank, &mut config) });
        nccl.check(answer, std::ptr::null_mut(), || {
            format!("joining a group of {size} on `cuda:{}` as its rank {rank}", context.device())
        })?;
        Ok(Self::new(raw, context))
    }

    pub(super) fn new(raw: ncclComm_t, context: &'static Context) -> Self {
        Self { handle: Mutex::new(RawComm(Cell::new(raw))), context }
    }

    /// The device's context.
    pub fn context(&self) -> &'static Context {
        self.context
    }

    /// Splits the communicator: members with the same color form a new communicator, in the order of their keys; a
    /// member without a color gets none. Collective. Waits for all members until `check` fails; after that, this
    /// communicator must be aborted.
    ///
    /// # Errors
    /// [`Error::Device`]; [`Error::Closed`] if the communicator was freed; those of `check`.
    pub fn split(
        &self,
        color_and_key: Option<(usize, usize)>,
        mut check: impl FnMut() -> Result<()>,
    ) -> Result<Option<Self>> {
        let Some(raw) = self.split_raw(color_and_key, Config::PARENT, &mut check)? else { return Ok(None) };
        let new = Self::new(raw, self.context);
        new.settle("joining a group that was split from another one", check).inspect_err(|_| new.abort())?;
        Ok(Some(new))
    }

    /// Returns the handle of the new communicator, which is not settled yet if it is non-blocking.
    pub(super) fn split_raw(
        &self,
        color_and_key: Option<(usize, usize)>,
        config: Config,
        check: impl FnMut() -> Result<()>,
    ) -> Result<Option<ncclComm_t>> {
        let count = |number| {
            c_int::try_from(number)
                .map_err(|_| Error::Internal(format!("{number} is not a rank for NCCL: it does not fit into an int")))
        };
        let (color, key) = match color_and_key {
            Some((color, key)) => (count(color)?, count(key)?),
            None => (NO_COLOR, 0),
        };
        let _entered = self.context.enter()?;
        // NCCL writes the new handle from a thread of its own, until this communicator has settled.
        let place = Box::into_raw(Box::new((std::ptr::null_mut(), config)));
        self.call("splitting a group", |nccl, comm| {
            // SAFETY: `place` is valid for the writes, the communicator exists and its device is current.
            relaxed(|| unsafe { (nccl.ncclCommSplit)(comm, color, key, &raw mut (*place).0, &raw mut (*place).1) })
        })?;
        // On failure the box is leaked: a thread of NCCL may write to it until the abort.
        self.settle("splitting a group", check)?;
        // SAFETY: the pointer came from a box, and NCCL does not write to it any more.
        let raw: ncclComm_t = unsafe { Box::from_raw(place) }.0;
        Ok((!raw.is_null()).then_some(raw))
    }

    /// Waits until NCCL's threads have completed the last call. Polls `check` meanwhile, and returns its error.
    ///
    /// # Errors
    /// [`Error::Device`]; [`Error::Closed`] if another thread has freed the communicator; those of `check`.
    pub fn settle(&self, during: &str, mut check: impl FnMut() -> Result<()>) -> Result<()> {
        while state(&self.handle.lock(), self.context, during)? {
            check()?;
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Aborts NCCL's threads for the communicator, and frees it. Does nothing on a second call.
    pub fn abort(&self) {
        free(&self.handle.lock(), self.context, |functions| functions.ncclCommAbort);
    }

    fn call(&self, name: &str, function: impl FnOnce(&Functions, ncclComm_t) -> c_int) -> Result<()> {
        call(&self.handle.lock(), self.context, name, function)
    }
}
