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
//!
//! | file | what it owns |
//! | --- | --- |
//! | [`library`] | the library's functions and version |
//! | [`parent`] | handles, [`UniqueId`], and communicators that only make others |
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

/// The host that NCCL takes this process to be on, if its variable `NCCL_HOSTID` says so. NCCL refuses two ranks of one host on one device;
/// ranks that share a device say by it that they are on different hosts, and NCCL connects them by the network.
pub fn host_id() -> Option<String> {
    std::env::var("NCCL_HOSTID").ok().filter(|id| !id.is_empty())
}
