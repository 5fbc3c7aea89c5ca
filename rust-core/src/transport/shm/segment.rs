//! Anonymous shared memory: a memfd that has no name anywhere, so that nothing can be left behind, whoever dies.
//! A peer reaches it through `/proc/<pid>/fd/<n>` while its maker keeps the descriptor open; afterwards only the
//! mappings hold it.

use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, Mode, OFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::error::{Error, Result};

/// How a peer finds a segment: `[pid, descriptor, bytes]`.
pub(crate) type Address = [u64; 3];

/// A mapping of shared memory, zeroed when made.
#[derive(Debug)]
pub(crate) struct Segment {
    start: NonNull<u8>,
    bytes: usize,
    /// Held by the maker until its peers have attached.
    fd: Option<OwnedFd>,
}

// SAFETY: the mapping lives as long as the value and may be used from any thread; what is in it is governed by
// whoever hands out pointers to it.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// Makes a segment. Memory is taken page by page as it is touched, so a generous size costs nothing.
    pub(crate) fn create(label: &str, bytes: usize) -> Result<Self> {
        let context = || format!("making {bytes} bytes of shared memory for `{label}`");
        let fd = rustix::fs::memfd_create(label, MemfdFlags::CLOEXEC).map_err(|error| Error::io(context(), error))?;
        rustix::fs::ftruncate(&fd, bytes as u64).map_err(|error| Error::io(context(), error))?;
        let start = map(&fd, bytes).map_err(|error| Error::io(context(), error))?;
        Ok(Self { start, bytes, fd: Some(fd) })
    }

    /// Maps the segment at `address`, which must have `bytes` bytes.
    pub(crate) fn attach(address: Address, bytes: usize) -> Result<Self> {
        let [pid, fd, announced] = address;
        let path = format!("/proc/{pid}/fd/{fd}");
        let context = || format!("opening the shared memory of process {pid} at `{path}`");
        let file = rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|error| Error::io(context(), error))?;
        let found = rustix::fs::fstat(&file).map_err(|error| Error::io(context(), error))?.st_size;
        // A shorter file would turn an access into SIGBUS; another size means another build of the library.
        if announced != bytes as u64 || found != bytes as i64 {
            return Err(Error::Rendezvous(format!(
                "the shared memory of process {pid} has {found} bytes (announced: {announced}), expected {bytes}: do all ranks run \
                 the same version of OpenSMD?"
            )));
        }
        let start = map(&file, bytes).map_err(|error| Error::io(context(), error))?;
        Ok(Self { start, bytes, fd: None })
    }

    /// Where peers find it.
    pub(crate) fn address(&self) -> Address {
        let fd = self.fd.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        [u64::from(std::process::id()), fd as u64, self.bytes as u64]
    }

    /// Closes the descriptor: from now on nobody can attach.
    pub(crate) fn seal(&mut self) {
        self.fd = None;
    }

    /// First byte.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own mapping, and nobody can hold a pointer into it that outlives the
        // value. Failure would mean a bad range, which cannot be.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

fn map(fd: &OwnedFd, bytes: usize) -> rustix::io::Result<NonNull<u8>> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
    let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, fd, 0) }?;
    // Large pages help where the administrator allows them for shared memory; elsewhere this does nothing.
    // SAFETY: advice on the range just mapped changes no contents.
    let _ = unsafe { rustix::mm::madvise(start, bytes, Advice::LinuxHugepage) };
    Ok(NonNull::new(start.cast()).expect("mmap never returns null without MAP_FIXED"))
}
