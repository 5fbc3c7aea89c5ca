//! NCCL: the library, communicators and what they run.
//!
//! - NCL-1: the library is the one that a framework has loaded, if one has. Two copies in a process would each take
//!   memory, and settings of the one would not reach the other.
//! - NCL-2: every use of a communicator holds its lock. What frees one takes the handle out under the lock first, so no thread
//!   passes a freed one to NCCL.
//! - NCL-3: members join in non-blocking communicators ([`Parent`], `ncclConfig_t::blocking` is 0): NCCL waits for the others on
//!   threads of its own, the caller polls, and an abort ends the wait.
//! - NCL-4: operations run on a blocking communicator, since a non-blocking one starts a thread for each operation, which
//!   takes several times as much of the caller's time. A call may stay inside of NCCL while it connects to other members. It is a split of a
//!   non-blocking communicator with `splitShare`, so that both have one abort flag: [`Comm::abort`] aborts that one, which no
//!   thread uses, the call returns with an error, and then nothing holds the lock.

use std::cell::Cell;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use cudarc::nccl::sys::{self, ncclComm_t, ncclDataType_t, ncclRedOp_t};
use libloading::os::unix::Library;
use parking_lot::{Mutex, ReentrantMutex};

use super::driver::{Context, relaxed};
use super::ending;
use super::stream::Stream;
use crate::buffer::{DType, TensorView};
use crate::collectives::ReduceOp;
use crate::error::{Error, Result};

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
/// Marks a field of the configuration that NCCL may choose.
const UNSET: c_int = c_int::MIN;
/// The color of a member that gets no communicator.
const NO_COLOR: c_int = -1;
/// The sleep between two looks at what NCCL's threads, or one of ours, are doing.
const POLL_NAP: Duration = Duration::from_micros(200);

/// The host that NCCL takes this process to be on, if its variable `NCCL_HOSTID` says so. NCCL refuses two ranks of one host on one device;
/// ranks that share a device say by it that they are on different hosts, and NCCL connects them by the network.
pub fn host_id() -> Option<String> {
    std::env::var("NCCL_HOSTID").ok().filter(|id| !id.is_empty())
}

macro_rules! functions {
    ($($name:ident($($argument:ty),*) -> $answer:ty;)*) => {
        /// NCCL's functions, as its header declares them; answers are numbers here, since a newer NCCL may have more
        /// of them than an enum lists.
        #[expect(non_snake_case, reason = "NCCL's names")]
        struct Functions { $($name: unsafe extern "C" fn($($argument),*) -> $answer,)* }

        impl Functions {
            fn find(library: &Library) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the signatures are those of nccl.h since 2.18.
                unsafe { Ok(Self { $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())?,)* }) }
            }
        }
    };
}

functions! {
    ncclGetVersion(*mut c_int) -> c_int;
    ncclGetErrorString(c_int) -> *const c_char;
    ncclGetLastError(ncclComm_t) -> *const c_char;
    ncclGetUniqueId(*mut sys::ncclUniqueId) -> c_int;
    ncclCommInitRankConfig(*mut ncclComm_t, c_int, sys::ncclUniqueId, c_int, *mut Config) -> c_int;
    ncclCommSplit(ncclComm_t, c_int, c_int, *mut ncclComm_t, *mut Config) -> c_int;
    ncclCommFinalize(ncclComm_t) -> c_int;
    ncclCommDestroy(ncclComm_t) -> c_int;
    ncclCommAbort(ncclComm_t) -> c_int;
    ncclCommGetAsyncError(ncclComm_t, *mut c_int) -> c_int;
    ncclGroupStart() -> c_int;
    ncclGroupEnd() -> c_int;
    ncclAllReduce(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, sys::cudaStream_t) -> c_int;
    ncclReduce(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, c_int, ncclComm_t, sys::cudaStream_t) -> c_int;
    ncclBroadcast(*const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, sys::cudaStream_t) -> c_int;
    ncclAllGather(*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, sys::cudaStream_t) -> c_int;
    ncclReduceScatter(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, sys::cudaStream_t) -> c_int;
    ncclSend(*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, sys::cudaStream_t) -> c_int;
    ncclRecv(*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, sys::cudaStream_t) -> c_int;
}

/// `ncclConfig_t` as of 2.18, which every later version accepts: it goes by the size and version inside.
#[repr(C)]
struct Config {
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
    /// Of a communicator whose calls wait for what they ask for.
    const BLOCKING: Self = Self {
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
    /// Of one that runs no operations, and so needs no more than one channel.
    const PARENT: Self = Self { blocking: 0, min_ctas: 1, max_ctas: 1, ..Self::BLOCKING };
    /// Of one whose splits share its abort flag; they also share its channels.
    const SHARED: Self = Self { blocking: 0, split_share: 1, ..Self::BLOCKING };
}

/// The loaded library.
struct Nccl {
    functions: Functions,
    version: (u32, u32, u32),
    path: String,
}

/// Loads NCCL; the answer of the first call stays.
fn nccl() -> Result<&'static Nccl> {
    static ANSWER: OnceLock<Result<Nccl>> = OnceLock::new();
    ANSWER.get_or_init(load).as_ref().map_err(Clone::clone)
}

fn load() -> Result<Nccl> {
    const NAME: &str = "libnccl.so.2";
    let flags = libc::RTLD_NOW | libc::RTLD_LOCAL;
    // SAFETY: without loading anything (NCL-1).
    let mut found = unsafe { Library::open(Some(OsStr::new(NAME)), flags | libc::RTLD_NOLOAD) };
    let mut path = format!("the `{NAME}` of a framework");
    for candidate in wheels().into_iter().chain([PathBuf::from(NAME)]) {
        if found.is_ok() {
            break;
        }
        // SAFETY: running NCCL's initialisers is what loading it is for.
        found = unsafe { Library::open(Some(&candidate), flags) };
        path = candidate.display().to_string();
    }
    let library = found.map_err(|error| {
        Error::Unsupported(format!("NCCL was not found, which operations on CUDA tensors need: {error}"))
    })?;
    let functions = Functions::find(&library)
        .map_err(|error| Error::Unsupported(format!("NCCL at `{path}` is older than 2.18: {error}")))?;
    // Kept until the process ends.
    std::mem::forget(library);
    let mut code = 0;
    // SAFETY: `code` is valid for the write.
    if unsafe { (functions.ncclGetVersion)(&mut code) } != SUCCESS || code < 21800 {
        return Err(Error::Unsupported(format!("NCCL at `{path}` has version {code}, expected at least 21800")));
    }
    let code = code.unsigned_abs();
    let version = (code / 10000, code / 100 % 100, code % 100);
    tracing::debug!("NCCL {}.{}.{} is {path}", version.0, version.1, version.2);
    Ok(Nccl { functions, version, path })
}

/// Where NVIDIA's wheel puts NCCL, if this library lies in a `site-packages`.
fn wheels() -> Option<PathBuf> {
    // SAFETY: an all-zero `Dl_info` is a valid value of it.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the address is one of this library, and `info` is valid for the write.
    if unsafe { libc::dladdr(load as fn() -> Result<Nccl> as *const c_void, &mut info) } == 0
        || info.dli_fname.is_null()
    {
        return None;
    }
    // SAFETY: the loader's string ends with a zero and lives as long as the library.
    let own = PathBuf::from(unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned());
    // .../site-packages/smdistributed/_core.abi3.so
    let wheel = own.parent()?.parent()?.join("nvidia/nccl/lib/libnccl.so.2");
    wheel.exists().then_some(wheel)
}

/// The version of NCCL and where it comes from, for `smdrun doctor`.
///
/// # Errors
/// [`Error::Unsupported`] without NCCL.
pub fn describe() -> Result<String> {
    let Nccl { version: (major, minor, patch), path, .. } = nccl()?;
    Ok(format!("{major}.{minor}.{patch} ({path})"))
}

impl Nccl {
    fn check(&self, answer: c_int, comm: ncclComm_t, doing: impl FnOnce() -> String) -> Result<()> {
        // What is in progress is waited for by `Parent::settle`.
        if answer == SUCCESS || answer == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: NCCL's strings are static or live until the next error of the thread, and end with a zero.
        let text =
            unsafe { CStr::from_ptr((self.functions.ncclGetErrorString)(answer)) }.to_string_lossy().into_owned();
        // SAFETY: NCCL accepts null here, and asks no more of a communicator than that it exists.
        let last = unsafe { (self.functions.ncclGetLastError)(comm) };
        // SAFETY: as above.
        let last = if last.is_null() { "".into() } else { unsafe { CStr::from_ptr(last) }.to_string_lossy() };
        let answer =
            if last.is_empty() { format!("NCCL: {text}") } else { format!("NCCL: {text}: {}", last.trim_end()) };
        Err(Error::Device { doing: doing(), answer })
    }
}

/// What the members of a communicator tell each other before they make it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId([u8; 128]);

impl UniqueId {
    /// A new one. NCCL starts a thread that serves it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without NCCL, [`Error::Device`].
    pub fn new() -> Result<Self> {
        let nccl = nccl()?;
        let _guard = ending::enter_driver()?;
        let mut id = sys::ncclUniqueId { internal: [0; 128] };
        // SAFETY: `id` is valid for the write.
        let answer = unsafe { (nccl.functions.ncclGetUniqueId)(&mut id) };
        nccl.check(answer, std::ptr::null_mut(), || "making a unique id for a group".into())?;
        Ok(Self(id.internal.map(|byte| byte as u8)))
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The id with these bytes, which come from another member.
    ///
    /// # Errors
    /// [`Error::Internal`] if their number is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bytes = bytes.try_into().map_err(|_| Error::Internal(format!("a unique id of {} bytes", bytes.len())))?;
        Ok(Self(bytes))
    }
}

/// A communicator's handle; null once it has been freed or is being freed.
#[derive(Debug)]
struct Handle(Cell<ncclComm_t>);

// SAFETY: NCCL accepts calls for a communicator from any thread, one at a time, which the mutex around it sees to.
unsafe impl Send for Handle {}

/// Runs `call` with a communicator's handle, under its lock.
fn call(
    handle: &Handle,
    context: &Context,
    name: &str,
    call: impl FnOnce(&Functions, ncclComm_t) -> c_int,
) -> Result<()> {
    let nccl = nccl()?;
    let raw = handle.0.get();
    if raw.is_null() {
        return Err(Error::Closed { reason: "the communicator was ended".into() });
    }
    // The text of an error is read under the lock, too.
    nccl.check(call(&nccl.functions, raw), raw, || format!("{name} on `cuda:{}`", context.device()))
}

/// Asks for what NCCL's threads have found, and whether they are at work still.
fn state(handle: &Handle, context: &Context, during: &str) -> Result<bool> {
    let mut state = SUCCESS;
    // SAFETY: the communicator exists, and `state` is valid for the write.
    call(handle, context, during, |nccl, comm| match unsafe { (nccl.ncclCommGetAsyncError)(comm, &mut state) } {
        SUCCESS => state,
        error => error,
    })?;
    Ok(state == IN_PROGRESS)
}

/// Frees a communicator with `how`, which `handle` has no more.
fn free(
    handle: &Handle,
    context: &'static Context,
    how: impl FnOnce(&Functions) -> unsafe extern "C" fn(ncclComm_t) -> c_int,
) {
    let raw = handle.0.replace(std::ptr::null_mut());
    let (Ok(nccl), false) = (nccl(), raw.is_null()) else { return };
    let Ok(_entered) = context.enter() else { return };
    // SAFETY: the handle was taken out under the lock, so no other thread uses or frees the communicator.
    let answer = relaxed(|| unsafe { how(&nccl.functions)(raw) });
    // Nobody can be told of an error.
    if answer != SUCCESS && answer != IN_PROGRESS {
        tracing::debug!("a communicator of `cuda:{}` ended with NCCL's answer {answer}", context.device());
    }
}

/// A non-blocking communicator that runs no operations: groups are made out of it, and a [`Comm`]. Dropped without an abort it
/// stays until the process ends: an abort may wait, which a drop must not.
#[derive(Debug)]
pub struct Parent {
    handle: Mutex<Handle>,
    context: &'static Context,
}

impl Parent {
    /// Begins to join a group as member `rank` of `size`, on the device of `context`. Returns at once; nothing but
    /// [`Parent::settle`] and [`Parent::abort`] may be called before the first has succeeded.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without NCCL, [`Error::Device`].
    pub fn init(context: &'static Context, id: UniqueId, rank: usize, size: usize) -> Result<Self> {
        let nccl = nccl()?;
        let too_many = |_| Error::InvalidArgument(format!("a group of {size} is more than NCCL counts"));
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

    fn new(raw: ncclComm_t, context: &'static Context) -> Self {
        Self { handle: Mutex::new(Handle(Cell::new(raw))), context }
    }

    /// The device's context.
    pub fn context(&self) -> &'static Context {
        self.context
    }

    /// Divides the members: those that give the same color become one of a communicator of their own, in the order of their
    /// keys; who gives none gets none. All members call it at the same place of their programs. Waits for all of them until
    /// `check` fails; this communicator is of no use then and must be aborted.
    ///
    /// # Errors
    /// [`Error::Device`]; [`Error::Closed`] after the communicator's end; those of `check`.
    pub fn split(
        &self,
        color_and_key: Option<(usize, usize)>,
        mut check: impl FnMut() -> Result<()>,
    ) -> Result<Option<Self>> {
        let Some(raw) = self.divide(color_and_key, Config::PARENT, &mut check)? else { return Ok(None) };
        let new = Self::new(raw, self.context);
        new.settle("joining a group made out of another one", check).inspect_err(|_| new.abort())?;
        Ok(Some(new))
    }

    /// The handle of a new communicator, which has not settled if it is non-blocking.
    fn divide(
        &self,
        color_and_key: Option<(usize, usize)>,
        config: Config,
        check: impl FnMut() -> Result<()>,
    ) -> Result<Option<ncclComm_t>> {
        let count = |number| c_int::try_from(number).map_err(|_| Error::Internal(format!("{number} ranks of NCCL's")));
        let (color, key) = match color_and_key {
            Some((color, key)) => (count(color)?, count(key)?),
            None => (NO_COLOR, 0),
        };
        let _entered = self.context.enter()?;
        // NCCL writes the new handle from a thread of its own, until this communicator has settled.
        let place = Box::into_raw(Box::new((std::ptr::null_mut(), config)));
        self.call("making a group out of another one", |nccl, comm| {
            // SAFETY: `place` is valid for the writes, the communicator exists and its device is current.
            relaxed(|| unsafe { (nccl.ncclCommSplit)(comm, color, key, &raw mut (*place).0, &raw mut (*place).1) })
        })?;
        // On failure the box is leaked: a thread of NCCL may write to it until the abort.
        self.settle("making a group out of another one", check)?;
        // SAFETY: the pointer came from a box, and NCCL does not write to it any more.
        let raw: ncclComm_t = unsafe { Box::from_raw(place) }.0;
        Ok((!raw.is_null()).then_some(raw))
    }

    /// Waits until NCCL's threads have done what the last call asked for. Looks at `check` meanwhile, and ends with its error.
    ///
    /// # Errors
    /// [`Error::Device`]; [`Error::Closed`] once another thread has ended the communicator; those of `check`.
    pub fn settle(&self, during: &str, mut check: impl FnMut() -> Result<()>) -> Result<()> {
        while state(&self.handle.lock(), self.context, during)? {
            check()?;
            std::thread::sleep(POLL_NAP);
        }
        Ok(())
    }

    /// Ends what NCCL's threads do for the communicator, and frees it. Does nothing the second time.
    pub fn abort(&self) {
        free(&self.handle.lock(), self.context, |functions| functions.ncclCommAbort);
    }

    fn call(&self, name: &str, function: impl FnOnce(&Functions, ncclComm_t) -> c_int) -> Result<()> {
        call(&self.handle.lock(), self.context, name, function)
    }
}

/// This process's member of a group, which runs operations. Dropped without [`Comm::close`] or [`Comm::abort`] it stays until
/// the process ends: both may wait, which a drop must not.
#[derive(Debug)]
pub struct Comm {
    /// Reentrant, since [`Comm::group`] holds it while its body calls operations.
    operations: ReentrantMutex<Handle>,
    /// Shares its abort flag with `operations` (NCL-4).
    stop: Parent,
    /// What other groups are made out of.
    parent: Parent,
    context: &'static Context,
}

impl Comm {
    /// The communicator for the operations of the group that `parent` has joined as its member `rank`. All members call it. Waits
    /// for them until `check` fails.
    ///
    /// # Errors
    /// [`Error::Device`], or that of `check`, with what is left to abort.
    pub fn open(
        parent: Parent,
        rank: usize,
        mut check: impl FnMut() -> Result<()>,
    ) -> std::result::Result<Self, (Vec<Parent>, Error)> {
        let context = parent.context;
        let lost = || Error::Internal("NCCL made no communicator for the operations of a group".into());
        let place = Some((0, rank));
        let shared = parent.divide(place, Config::SHARED, &mut check).and_then(|raw| raw.ok_or_else(lost));
        let stop = match shared {
            Ok(raw) => Parent::new(raw, context),
            Err(error) => return Err((vec![parent], error)),
        };
        let joined = stop.settle("joining a group", &mut check);
        let made = joined.and_then(|()| stop.divide(place, Config::BLOCKING, &mut check));
        match made.and_then(|raw| raw.ok_or_else(lost)) {
            Ok(raw) => Ok(Self { operations: ReentrantMutex::new(Handle(Cell::new(raw))), stop, parent, context }),
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
    /// As there.
    pub fn split(
        &self,
        color_and_key: Option<(usize, usize)>,
        check: impl FnMut() -> Result<()>,
    ) -> Result<Option<Parent>> {
        self.parent.split(color_and_key, check)
    }

    /// What has gone wrong behind the back of the calls, if something has. Nothing is known while a call is under way.
    pub fn async_error(&self) -> Option<Error> {
        let handle = self.operations.try_lock()?;
        // A communicator that another thread ends has no error of its own.
        state(&handle, self.context, "communicating").err().filter(|error| !matches!(error, Error::Closed { .. }))
    }

    /// Runs `body`, whose calls may stay inside of NCCL for as long as a member does not come, on a thread of its own. When `check`
    /// fails, the communicator is aborted, which brings `body` back.
    ///
    /// # Errors
    /// Those of `check` and `body`.
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
                std::thread::sleep(POLL_NAP);
            }
            thread.join().unwrap_or_else(|_| Err(Error::Internal("a thread that calls NCCL panicked".into())))
        })
    }

    /// Ends every operation, here and on the device, and frees the communicator, whatever another thread does with it (NCL-4).
    /// Waits for the device to stop. Does nothing the second time.
    pub fn abort(&self) {
        self.stop.abort();
        free(&self.operations.lock(), self.context, |functions| functions.ncclCommAbort);
        self.parent.abort();
    }

    /// Frees the communicator when its operations are done and NCCL has sent all of their data. The other members do the
    /// same at about the same time. Where `check` ends that wait, the communicator is aborted. Does nothing the second time,
    /// or after [`Comm::abort`].
    ///
    /// # Errors
    /// What ended the wait.
    pub fn close(&self, check: impl FnMut() -> Result<()>) -> Result<()> {
        // SAFETY: the communicator exists.
        let finalize = |nccl: &Functions, comm| relaxed(|| unsafe { (nccl.ncclCommFinalize)(comm) });
        match self.interruptible(check, || self.call("closing a group", finalize)) {
            Ok(()) => {
                free(&self.operations.lock(), self.context, |functions| functions.ncclCommDestroy);
                // These have run nothing that others wait for.
                self.stop.abort();
                self.parent.abort();
            }
            Err(Error::Closed { .. }) => {}
            Err(error) => {
                self.abort();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Runs `body`, whose operations become one: they start together and may depend on each other.
    ///
    /// # Errors
    /// Those of `body`, [`Error::Device`].
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

    fn call(&self, name: &str, function: impl FnOnce(&Functions, ncclComm_t) -> c_int) -> Result<()> {
        call(&self.operations.lock(), self.context, name, function)
    }

    /// Queues `output = op over members (input)`. Waits for the members where NCCL is not connected with them yet.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for what NCCL does not reduce, [`Error::Device`].
    ///
    /// # Safety
    /// Here and below: views are memory of the communicator's device, of equal length where they correspond, until what
    /// was queued is done; the stream is of that device.
    pub unsafe fn all_reduce(
        &self,
        input: &TensorView,
        output: &TensorView,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let (elems, dtype, op) = reduction(input, op)?;
        // SAFETY: the caller's promise.
        self.call("all_reduce", |nccl, comm| unsafe {
            (nccl.ncclAllReduce)(input.ptr().cast(), output.ptr().cast(), elems, dtype, op, comm, queue(stream))
        })
    }

    /// Queues the same for `root` alone.
    ///
    /// # Errors
    /// As [`Comm::all_reduce`].
    ///
    /// # Safety
    /// As [`Comm::all_reduce`].
    pub unsafe fn reduce(
        &self,
        input: &TensorView,
        output: &TensorView,
        op: ReduceOp,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        let (elems, dtype, op) = reduction(input, op)?;
        // SAFETY: the caller's promise.
        self.call("reduce", |nccl, comm| unsafe {
            let (from, to) = (input.ptr().cast(), output.ptr().cast());
            (nccl.ncclReduce)(from, to, elems, dtype, op, root as c_int, comm, queue(stream))
        })
    }

    /// Queues `output = input of root`.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// As [`Comm::all_reduce`].
    pub unsafe fn broadcast(
        &self,
        input: &TensorView,
        output: &TensorView,
        root: usize,
        stream: &Stream,
    ) -> Result<()> {
        let (elems, dtype) = moved(output);
        // SAFETY: the caller's promise.
        self.call("broadcast", |nccl, comm| unsafe {
            let (from, to) = (input.ptr().cast(), output.ptr().cast());
            (nccl.ncclBroadcast)(from, to, elems, dtype, root as c_int, comm, queue(stream))
        })
    }

    /// Queues the collection of every member's input, as long on all, into `output`.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// As [`Comm::all_reduce`]; at `output` is room for the inputs of all members.
    pub unsafe fn all_gather(&self, input: &TensorView, output: *mut u8, stream: &Stream) -> Result<()> {
        let (elems, dtype) = moved(input);
        // SAFETY: the caller's promise.
        self.call("all_gather", |nccl, comm| unsafe {
            (nccl.ncclAllGather)(input.ptr().cast(), output.cast(), elems, dtype, comm, queue(stream))
        })
    }

    /// Queues `output = op over members (block of this member in input)`; blocks are as long on all members.
    ///
    /// # Errors
    /// As [`Comm::all_reduce`].
    ///
    /// # Safety
    /// As [`Comm::all_reduce`]; at `input` is a block for every member.
    pub unsafe fn reduce_scatter(
        &self,
        input: *const u8,
        output: &TensorView,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let (elems, dtype, op) = reduction(output, op)?;
        // SAFETY: the caller's promise.
        self.call("reduce_scatter", |nccl, comm| unsafe {
            (nccl.ncclReduceScatter)(input.cast(), output.ptr().cast(), elems, dtype, op, comm, queue(stream))
        })
    }

    /// Queues a message to member `to`. Several belong into one [`Comm::group`].
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// As [`Comm::all_reduce`].
    pub unsafe fn send(&self, data: &TensorView, to: usize, stream: &Stream) -> Result<()> {
        let (elems, dtype) = moved(data);
        // SAFETY: the caller's promise.
        self.call("send", |nccl, comm| unsafe {
            (nccl.ncclSend)(data.ptr().cast(), elems, dtype, to as c_int, comm, queue(stream))
        })
    }

    /// Queues the receipt of a message from member `from`.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// As [`Comm::all_reduce`].
    pub unsafe fn recv(&self, data: &TensorView, from: usize, stream: &Stream) -> Result<()> {
        let (elems, dtype) = moved(data);
        // SAFETY: the caller's promise.
        self.call("recv", |nccl, comm| unsafe {
            (nccl.ncclRecv)(data.ptr().cast(), elems, dtype, from as c_int, comm, queue(stream))
        })
    }
}

fn queue(stream: &Stream) -> sys::cudaStream_t {
    stream.raw() as sys::cudaStream_t
}

/// A view as what is only moved.
fn moved(view: &TensorView) -> (usize, ncclDataType_t) {
    (view.bytes(), ncclDataType_t::ncclUint8)
}

/// Length, type and operation of a reduction, in NCCL's terms.
///
/// # Errors
/// [`Error::Unsupported`].
pub fn reduction(view: &TensorView, op: ReduceOp) -> Result<(usize, ncclDataType_t, ncclRedOp_t)> {
    use ncclDataType_t as Type;
    use ncclRedOp_t as Op;
    let dtype = view.dtype();
    let refuse = || {
        let op = format!("{op:?}").to_lowercase();
        Err(Error::Unsupported(format!("NCCL has no reduction `{op}` of {dtype}: move the tensor to the CPU for it")))
    };
    if dtype == DType::Bool {
        // Values are 0 and 1.
        return match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => Ok((view.elems(), Type::ncclUint8, Op::ncclMax)),
            ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => Ok((view.elems(), Type::ncclUint8, Op::ncclMin)),
            ReduceOp::Average | ReduceOp::BitXor => refuse(),
        };
    }
    let (parts, ty) = match dtype {
        DType::UInt8 => (1, Type::ncclUint8),
        DType::Int8 => (1, Type::ncclInt8),
        DType::Int32 => (1, Type::ncclInt32),
        DType::Int64 => (1, Type::ncclInt64),
        DType::Float16 => (1, Type::ncclFloat16),
        DType::BFloat16 => (1, Type::ncclBfloat16),
        DType::Float32 => (1, Type::ncclFloat32),
        DType::Float64 => (1, Type::ncclFloat64),
        DType::Complex64 => (2, Type::ncclFloat32),
        DType::Complex128 => (2, Type::ncclFloat64),
        DType::Int16 | DType::Bool => return refuse(),
    };
    let op = match op {
        ReduceOp::Sum => Op::ncclSum,
        ReduceOp::Average => Op::ncclAvg,
        // Not the products of the parts, and there is no order.
        ReduceOp::Product | ReduceOp::Min | ReduceOp::Max if parts == 2 => return refuse(),
        ReduceOp::Product => Op::ncclProd,
        ReduceOp::Min => Op::ncclMin,
        ReduceOp::Max => Op::ncclMax,
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => return refuse(),
    };
    Ok((view.elems() * parts, ty, op))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nccl_lacks_is_refused_by_name() {
        let text = |dtype, op| reduction(&TensorView::empty(dtype), op).unwrap_err().to_string();
        assert_eq!(
            text(DType::Int32, ReduceOp::BitXor),
            "NCCL has no reduction `bitxor` of int32: move the tensor to the CPU for it"
        );
        assert!(text(DType::Complex64, ReduceOp::Product).contains("`product` of complex64"));
        assert!(reduction(&TensorView::empty(DType::Bool), ReduceOp::Sum).is_ok());
        for dtype in [DType::Float16, DType::BFloat16, DType::Float32, DType::Float64, DType::Int64, DType::UInt8] {
            assert!(reduction(&TensorView::empty(dtype), ReduceOp::Sum).is_ok(), "{dtype}");
        }
    }

    /// Where there is an NCCL at all, it is found and has what is needed; no device is needed for that.
    #[test]
    fn the_library_is_new_enough_or_named_as_missing() {
        match describe() {
            Ok(text) => assert!(text.starts_with("2."), "{text}"),
            Err(error) => assert!(error.to_string().contains("NCCL"), "{error}"),
        }
    }
}
