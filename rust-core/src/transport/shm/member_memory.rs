//! Reads the memory of other processes of a group, without a copy in shared memory (cross memory attach,
//! `process_vm_readv(2)`).
//!
//! The system permits this to processes of one user, unless a security module or a filter of system calls forbids it, and
//! processes find each other by their ids in one PID namespace only. So each member tries it when the group is made.
//!
//! - READ-1: if one member cannot read the memory of another one, none reads any: all members take the same paths.
//! - READ-2: what a member reads is not trusted (TRA-2), nor are addresses that peers publish: the system checks them.

use std::io;
use std::sync::Once;
use std::time::{Duration, Instant};

use super::SharedMemory;
use crate::error::{Error, Result};
use crate::metrics::{self, Fallback};
use crate::transport::Wait;

/// How long a member that cannot be read any more may take to be reported as dead.
const DEATH_REPORT_TIMEOUT: Duration = Duration::from_secs(2);
const DEATH_REPORT_INTERVAL: Duration = Duration::from_millis(5);

/// Access to the memory of all members.
#[derive(Debug)]
pub(crate) struct MemberMemory {
    /// The process of each member.
    pids: Vec<libc::pid_t>,
    me: usize,
}

impl MemberMemory {
    /// Tries to read a word of every member; all members call it together, before their first operation. `None` if any
    /// member fails (READ-1).
    ///
    /// # Errors
    /// As [`SharedMemory::sync`].
    pub(super) fn connect(memory: &SharedMemory, wait: &Wait<'_>) -> Result<Option<Self>> {
        if memory.size() == 1 || cfg!(miri) {
            return Ok(None);
        }
        let why = match Self::probe(memory, wait)? {
            Ok(peers) => return Ok(Some(peers)),
            Err(_) if are_limited_to_ancestors() => {
                allow_siblings();
                match Self::probe(memory, wait)? {
                    Ok(peers) => return Ok(Some(peers)),
                    Err(why) => {
                        set_ptracer(0);
                        why
                    }
                }
            }
            Err(why) => why,
        };
        metrics::note_fallback(Fallback::NoDirectReads);
        static WARNED: Once = Once::new();
        let text = format!(
            "ranks of this host cannot read each other's memory (process_vm_readv: {why}): large collectives copy through \
             shared memory, which can take longer; to permit it, see `kernel.yama.ptrace_scope` and the seccomp profile of \
             the container"
        );
        WARNED.call_once(|| if memory.me() == 0 { tracing::warn!("{text}") } else { tracing::info!("{text}") });
        Ok(None)
    }

    /// One attempt to read all members; the inner result is an error on all members if one of them fails.
    fn probe(memory: &SharedMemory, wait: &Wait<'_>) -> Result<Result<Self, String>> {
        let (me, size) = (memory.me(), memory.size());
        let word = getrandom::u64().map_err(|error| Error::Internal(format!("no random number: {error}")))?;
        let own = MemoryProbe { pid: u64::from(std::process::id()), address: (&raw const word) as u64, word };
        let probes = memory.reserve(size_of::<MemoryProbe>());
        // SAFETY: the region is as long and aligned, and this member's to write until the arrival (SHM-2).
        unsafe { memory.arena(me, probes).cast::<MemoryProbe>().write(own) };
        memory.sync(wait)?;
        // SAFETY: as above, and after the arrival each member's region holds its probe (SHM-1).
        let probe = |rank| unsafe { memory.arena(rank, probes).cast::<MemoryProbe>().read_volatile() };
        let all: Vec<_> = (0..size).map(probe).collect();
        let peers = Self { pids: all.iter().map(|each| each.pid as libc::pid_t).collect(), me };
        let mut failure = None;
        for (rank, announced) in all.iter().enumerate().filter(|(rank, _)| *rank != me) {
            let mut found = 0u64;
            // SAFETY: the word is this function's, and has 8 bytes.
            let read = unsafe { peers.read(rank, announced.address, (&raw mut found).cast(), 8) };
            let read = read.map_err(|error| error.to_string()).and_then(|()| match found == announced.word {
                true => Ok(()),
                false => Err("process ids are those of another namespace".to_owned()),
            });
            if let Err(why) = read {
                failure.get_or_insert(why);
            }
        }
        // Another region, because another member may still read the probes.
        let verdicts = memory.reserve(size_of::<u64>());
        let verdict = |rank| memory.arena(rank, verdicts).cast::<u64>();
        // SAFETY: as for the probes.
        unsafe { verdict(me).write(u64::from(failure.is_none())) };
        memory.sync(wait)?;
        // SAFETY: as for the probes.
        let refused = (0..size).find(|rank| unsafe { verdict(*rank).read_volatile() } != 1);
        Ok(match refused {
            None => Ok(peers),
            Some(rank) => Err(failure.unwrap_or_else(|| format!("rank {} cannot", memory.members.ranks[rank]))),
        })
    }

    /// Reads `bytes` bytes at `from` of member `rank`.
    ///
    /// # Errors
    /// The system's error; then a part of the bytes may have been read.
    ///
    /// # Safety
    /// `to` is valid for writes of `bytes` bytes, and no other code accesses them.
    pub(crate) unsafe fn read(&self, rank: usize, from: u64, to: *mut u8, bytes: usize) -> io::Result<()> {
        let mut done = 0;
        while done < bytes {
            let local = libc::iovec { iov_base: to.wrapping_add(done).cast(), iov_len: bytes - done };
            let address = from.wrapping_add(done as u64) as usize as *mut libc::c_void;
            let remote = libc::iovec { iov_base: address, iov_len: bytes - done };
            // SAFETY: the local range is the rest of the caller's; the system checks the remote one.
            let read = unsafe { libc::process_vm_readv(self.pids[rank], &raw const local, 1, &raw const remote, 1, 0) };
            match read {
                ..0 => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                _ => done += read as usize,
            }
        }
        Ok(())
    }

    /// Whether peers can read these bytes of this process. The kernel refuses `process_vm_readv` on some memory, such as
    /// that of `memfd_secret(2)`, also to the process itself, so this process tries to read the first and the last byte.
    pub(crate) fn is_readable(&self, from: *const u8, bytes: usize) -> bool {
        let mut byte = 0;
        [0, bytes.saturating_sub(1)].into_iter().all(|at| {
            // SAFETY: the byte is this function's.
            unsafe { self.read(self.me, from.wrapping_add(at) as u64, &raw mut byte, 1) }.is_ok()
        })
    }
}

/// The error of a read of the memory of `rank`, a global rank: usually the member has died, which is reported soon.
pub(crate) fn unreadable(rank: usize, me: usize, error: &io::Error, wait: &Wait<'_>) -> Error {
    let start = Instant::now();
    while start.elapsed() < DEATH_REPORT_TIMEOUT {
        if let Err(departed) = wait.check(|| vec![rank]) {
            return departed;
        }
        std::thread::sleep(DEATH_REPORT_INTERVAL);
    }
    let (how, during) = (format!("has a tensor that cannot be read ({error})"), (wait.during)());
    Error::PeerFailed { rank, how, me, during }
}

/// What a member tells the others when the group is made: a word of its memory.
#[repr(C)]
#[derive(Clone, Copy)]
struct MemoryProbe {
    pid: u64,
    address: u64,
    word: u64,
}

/// Whether the security module Yama lets only its ancestors access a process; equal for all processes of a host.
fn are_limited_to_ancestors() -> bool {
    std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").is_ok_and(|scope| scope.trim() == "1")
}

/// Lets the other descendants of this process's parent access it, too: usually the launcher has started all ranks of this
/// host.
fn allow_siblings() {
    // SAFETY: the call takes nothing.
    let parent = unsafe { libc::getppid() };
    if parent > 1 {
        set_ptracer(parent as libc::c_ulong);
    }
}

/// Where there is no such module, this does nothing.
fn set_ptracer(process: libc::c_ulong) {
    // SAFETY: the call takes numbers only. If it fails, reads fail, which the caller notices.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, process, 0, 0, 0) };
}
