//! The NCCL library: how it is found, its functions, and its result codes as errors.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

use cudarc::nccl::sys::{self, ncclComm_t, ncclDataType_t, ncclRedOp_t};
use libloading::os::unix::Library;

use super::parent::Config;
use crate::error::{Error, Result};

pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;

macro_rules! functions {
    ($($name:ident($($argument:ty),*) -> $answer:ty;)*) => {
        /// NCCL's functions, as its header declares them. Result codes are integers here, because a newer NCCL may
        /// have codes that an enum lacks.
        #[expect(non_snake_case, reason = "NCCL's names")]
        pub(super) struct Functions { $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $answer,)* }

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

/// The loaded library.
pub(super) struct Nccl {
    pub(super) functions: Functions,
    version: (u32, u32, u32),
    path: String,
}

/// Loads NCCL; the first result is cached.
pub(super) fn nccl() -> Result<&'static Nccl> {
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
        Error::Unsupported(format!(
            "NCCL was not found: operations on CUDA tensors need it, so install the CUDA build of the framework ({error})"
        ))
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
    pub(super) fn check(&self, answer: c_int, comm: ncclComm_t, doing: impl FnOnce() -> String) -> Result<()> {
        // `ncclInProgress` is waited for by `Parent::settle`.
        if answer == SUCCESS || answer == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: NCCL's strings are static or live until the next error of the thread, and end with a zero.
        let text =
            unsafe { CStr::from_ptr((self.functions.ncclGetErrorString)(answer)) }.to_string_lossy().into_owned();
        // SAFETY: NCCL accepts null here, and requires of a communicator only that it exists.
        let last = unsafe { (self.functions.ncclGetLastError)(comm) };
        // SAFETY: as above.
        let last = if last.is_null() { "".into() } else { unsafe { CStr::from_ptr(last) }.to_string_lossy() };
        let answer =
            if last.is_empty() { format!("NCCL: {text}") } else { format!("NCCL: {text}: {}", last.trim_end()) };
        Err(Error::Device { doing: doing(), answer })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where NCCL is installed, it is found and has all functions; this needs no device.
    #[test]
    fn the_library_is_new_enough_or_named_as_missing() {
        match describe() {
            Ok(text) => assert!(text.starts_with("2."), "{text}"),
            Err(error) => assert!(error.to_string().contains("NCCL"), "{error}"),
        }
    }
}
