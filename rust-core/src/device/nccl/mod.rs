//! NCCL: the library, communicators and their operations.
//!
//! - NCL-1: the library is the copy that a framework has loaded, if there is one. Two copies in a process would each
//!   take memory, and settings of one would not apply to the other.
//! - NCL-2: every use of a communicator holds its lock. A function that frees one takes the handle out under the lock
//!   first, so that no thread passes a freed handle to NCCL.
//! - NCL-3: members join through non-blocking communicators ([`Parent`], `ncclConfig_t::blocking` is 0): NCCL waits
//!   for the other members on its own threads, the caller polls, and an abort ends the wait.
//! - NCL-4: operations run on a blocking communicator, because a non-blocking one starts a thread for each operation,
//!   which costs the caller several times as much. A blocking call may wait inside of NCCL while it connects to other
//!   members. So the communicator is split from a non-blocking one with `splitShare`, and both share one abort flag:
//!   [`Comm::abort`] aborts the non-blocking one, which no other thread uses; the blocked call then returns with an
//!   error and releases the lock.
//!
//! | file | what it owns |
//! | --- | --- |
//! | [`library`] | the library's functions and version |
//! | [`parent`] | handles, [`UniqueId`], and communicators from which others are split |
//! | [`comm`] | communicators that run operations: opening, aborting, closing |
//! | [`operations`] | the operations, and NCCL's names of types and reductions |

mod comm;
mod library;
mod operations;
mod parent;

pub use comm::Comm;
pub use library::describe;
pub use operations::reduction;
pub use parent::{Parent, UniqueId};

/// The host id in NCCL's variable `NCCL_HOSTID`, if it is set. NCCL refuses two ranks of one host on one device.
/// Ranks that share a device set different host ids, so that NCCL connects them over the network.
pub fn host_id() -> Option<String> {
    std::env::var("NCCL_HOSTID").ok().filter(|id| !id.is_empty())
}
