//! Anonymous shared memory: a memfd without a name, so that nothing remains when processes die. Its size is sealed:
//! no process that maps it, not even its creator, can shorten it, which would turn the others' accesses into SIGBUS.
//! A peer opens it through `/proc/<pid>/fd/<n>` while its creator keeps the descriptor open; afterwards only the
//! mappings keep it.

use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::error::{Error, Result};
use crate::metrics;

/// The address of a segment for peers: `[pid, descriptor, bytes]`.
pub(crate) type SegmentAddress = [u64; 3];

/// The seals of every segment: neither its size nor the seals can change.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// A mapping of shared memory, zeroed when created.
#[derive(Debug)]
pub(crate) struct SharedSegment {
    start: NonNull<u8>,
    bytes: usize,
    /// Held by the creator until its peers have mapped the segment.
    fd: Option<OwnedFd>,
    /// Whether this process created it, and counts its bytes.
    is_own: bool,
}

// SAFETY: the mapping lives as long as the value and may be used from any thread; users of the pointers must
// synchronise accesses to its contents.
unsafe impl Send for SharedSegment {}
// SAFETY: as above.
unsafe impl Sync for SharedSegment {}

impl SharedSegment {
    /// Creates a segment. Pages are allocated when they are first touched, so a large size costs nothing.
    pub(crate) fn create(label: &str, bytes: usize) -> Result<Self> {
        let context = || format!("making {bytes} bytes of shared memory for `{label}`");
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(label, flags).map_err(|error| Error::io(context(), error))?;
        rustix::fs::ftruncate(&fd, bytes as u64).map_err(|error| Error::io(context(), error))?;
        rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(|error| Error::io(context(), error))?;
        let start = map(&fd, bytes).map_err(|error| Error::io(context(), error))?;
        metrics::note_segment(bytes, true);
        Ok(Self { start, bytes, fd: Some(fd), is_own: true })
    }

    /// Maps the segment at `address`, which must have `bytes` bytes.
    pub(crate) fn attach(address: SegmentAddress, bytes: usize) -> Result<Self> {
        let [pid, fd, announced] = address;
        let path = format!("/proc/{pid}/fd/{fd}");
        let context = || format!("opening the shared memory of process {pid} at `{path}`");
        let file = rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|error| Error::io(context(), error))?;
        // Only a memfd can have seals, so other kinds of files are rejected as well.
        let seals = rustix::fs::fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
        if !seals.contains(SEALS) {
            return Err(Error::Rendezvous(format!(
                "the shared memory of process {pid} at `{path}` has no seals, so that it could be shortened under its readers: \
                 do all ranks run the same version of OpenSMD, and are all in one PID namespace?"
            )));
        }
        let found = rustix::fs::fstat(&file).map_err(|error| Error::io(context(), error))?.st_size;
        // In a shorter file, an access would cause SIGBUS; another size means another build of the library.
        if announced != bytes as u64 || found != bytes as i64 {
            return Err(Error::Rendezvous(format!(
                "the shared memory of process {pid} has {found} bytes (announced: {announced}), expected {bytes}: do all ranks run \
                 the same version of OpenSMD?"
            )));
        }
        let start = map(&file, bytes).map_err(|error| Error::io(context(), error))?;
        Ok(Self { start, bytes, fd: None, is_own: false })
    }

    /// The address for peers.
    pub(crate) fn address(&self) -> SegmentAddress {
        let fd = self.fd.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        [u64::from(std::process::id()), fd as u64, self.bytes as u64]
    }

    /// Closes the descriptor: from now on no process can map the segment.
    pub(crate) fn close_descriptor(&mut self) {
        self.fd = None;
    }

    /// First byte.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for SharedSegment {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own mapping, and no pointer into it outlives the value. The call can only
        // fail for an invalid range.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        if self.is_own {
            metrics::note_segment(self.bytes, false);
        }
    }
}

fn map(fd: &OwnedFd, bytes: usize) -> rustix::io::Result<NonNull<u8>> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses the address of the new mapping, so it overlaps nothing.
    let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, fd, 0) }?;
    // Large pages help where the administrator allows them for shared memory; elsewhere this does nothing.
    // SAFETY: advice on the range just mapped changes no contents.
    let _ = unsafe { rustix::mm::madvise(start, bytes, Advice::LinuxHugepage) };
    Ok(NonNull::new(start.cast()).expect("mmap never returns null without MAP_FIXED"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_size_cannot_be_changed() {
        let segment = SharedSegment::create("sealed", 8192).unwrap();
        let fd = segment.fd.as_ref().unwrap();
        for bytes in [0, 4096, 1 << 20] {
            assert_eq!(rustix::fs::ftruncate(fd, bytes), Err(rustix::io::Errno::PERM));
        }
        assert_eq!(rustix::fs::fcntl_add_seals(fd, SealFlags::WRITE), Err(rustix::io::Errno::PERM));
        SharedSegment::attach(segment.address(), 8192).unwrap();
    }

    #[test]
    fn a_segment_without_seals_is_rejected() {
        let fd = rustix::fs::memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 8192).unwrap();
        let address = [u64::from(std::process::id()), fd.as_raw_fd() as u64, 8192];
        let refused = |why: &str| {
            let error = SharedSegment::attach(address, 8192).unwrap_err();
            assert!(error.to_string().contains("has no seals"), "{why}: {error}");
        };
        refused("no seals");
        rustix::fs::fcntl_add_seals(&fd, SealFlags::GROW).unwrap();
        refused("some seals");
    }
}
