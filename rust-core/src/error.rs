//! Every error of the core, its stable code, and whether a job can continue after it.
//!
//! Texts are lowercase, name values with their units and put names in backticks.
//! A code never changes once released: it crosses the FFI (see `smd-bridge`'s guard) and picks the Python class.

use std::sync::Arc;
use std::time::Duration;

use crate::world::Departure;

/// The result of every fallible function of the core.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A stable name for a kind of error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// A call needs `init()` first.
    NotInitialized,
    /// `init()` was called a second time.
    AlreadyInitialized,
    /// The session was shut down, by this process or after a failure.
    Closed,
    /// An argument of the caller is invalid.
    InvalidArgument,
    /// A configuration key or environment variable has a bad value, or two contradict each other.
    Config,
    /// Ranks called different operations, or the same one with different arguments.
    Mismatch,
    /// A peer died, left, or reported a failure.
    PeerFailed,
    /// A wait ended at its deadline.
    Timeout,
    /// The requested feature is not available on this machine or in this build.
    Unsupported,
    /// Joining the job failed.
    Rendezvous,
    /// The operating system reported an error.
    Io,
    /// CUDA or NCCL reported an error.
    Device,
    /// A signal arrived during a wait.
    Interrupted,
    /// The launcher removed this process from an elastic job.
    Removed,
    /// An invariant of the core is broken: a bug in OpenSMD.
    Internal,
}

impl Code {
    /// Every code, in declaration order.
    pub const ALL: [Code; 15] = [
        Code::NotInitialized,
        Code::AlreadyInitialized,
        Code::Closed,
        Code::InvalidArgument,
        Code::Config,
        Code::Mismatch,
        Code::PeerFailed,
        Code::Timeout,
        Code::Unsupported,
        Code::Rendezvous,
        Code::Io,
        Code::Device,
        Code::Interrupted,
        Code::Removed,
        Code::Internal,
    ];

    /// The spelling that users see in brackets and that Python maps to a class.
    pub fn name(self) -> &'static str {
        match self {
            Code::NotInitialized => "not_initialized",
            Code::AlreadyInitialized => "already_initialized",
            Code::Closed => "closed",
            Code::InvalidArgument => "invalid_argument",
            Code::Config => "config",
            Code::Mismatch => "mismatch",
            Code::PeerFailed => "peer_failed",
            Code::Timeout => "timeout",
            Code::Unsupported => "unsupported",
            Code::Rendezvous => "rendezvous",
            Code::Io => "io",
            Code::Device => "device",
            Code::Interrupted => "interrupted",
            Code::Removed => "removed",
            Code::Internal => "internal",
        }
    }
}

/// The setting that determines a deadline; the error's text says how to change it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Limit {
    /// `SMD_TIMEOUT_SECONDS`, or the timeout of a framework's process group.
    #[default]
    Collective,
    /// `SMD_INIT_TIMEOUT_SECONDS`.
    Init,
    /// The timeout that the caller of `torch.distributed.init_process_group` gave.
    Rendezvous,
    /// `SMD_STALL_SHUTDOWN_SECONDS`, or `SMD_TIMEOUT_SECONDS` without it.
    Stall,
    /// The `timeout_seconds` of a checkpoint manager.
    Checkpoint,
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        use crate::config::{INIT_TIMEOUT_SECONDS, STALL_SHUTDOWN_SECONDS, TIMEOUT_SECONDS};
        match self {
            Self::Collective => write!(
                f,
                "to wait longer, set `{}`, or the process group's `timeout` where it has one",
                TIMEOUT_SECONDS.name
            ),
            Self::Init => write!(f, "to wait longer, set `{}`", INIT_TIMEOUT_SECONDS.name),
            Self::Rendezvous => f.write_str("to wait longer, give `init_process_group` a longer `timeout`"),
            Self::Stall => {
                write!(f, "to wait longer, set `{}` and `{}`", TIMEOUT_SECONDS.name, STALL_SHUTDOWN_SECONDS.name)
            }
            Self::Checkpoint => f.write_str("to wait longer, give the manager a longer `timeout_seconds`"),
        }
    }
}

/// An error of the core. Cheap to clone, because one failure is reported to every waiter.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// See [`Code::NotInitialized`].
    #[error("`{call}` needs an initialised session: call `init()` first")]
    NotInitialized {
        /// The public name of the call.
        call: &'static str,
    },
    /// See [`Code::AlreadyInitialized`]; the text is the documented one.
    #[error("init() called more than once. smdistributed.dataparallel is already initialized.")]
    AlreadyInitialized,
    /// See [`Code::Closed`].
    #[error("no further operation runs: {reason}")]
    Closed {
        /// Why the session, the group or the step has ended.
        reason: String,
    },
    /// See [`Code::InvalidArgument`].
    #[error("{0}")]
    InvalidArgument(String),
    /// See [`Code::Config`].
    #[error("{0}")]
    Config(String),
    /// Ranks disagree. Every rank of the group gets the same text.
    #[error("{during}: ranks disagree: {detail}")]
    Mismatch {
        /// The operation, as this rank called it.
        during: String,
        /// The calls of the ranks.
        detail: String,
    },
    /// A peer is gone or failed.
    #[error("rank {rank} {how} while rank {me} was in {during}")]
    PeerFailed {
        /// Global rank of the peer.
        rank: usize,
        /// The event: `died`, `left the job`, `failed: ...`.
        how: String,
        /// Global rank of the process that reports the error.
        me: usize,
        /// The operation of this rank.
        during: String,
    },
    /// A wait ended at its deadline.
    #[error("{during} timed out after {waited:.1?}: no sign of rank(s) {missing:?} before the timeout passed; {limit}")]
    Timeout {
        /// The operation.
        during: String,
        /// How long this rank waited.
        waited: Duration,
        /// Global ranks that did not arrive.
        missing: Vec<usize>,
        /// Where the deadline comes from.
        limit: Limit,
    },
    /// See [`Code::Unsupported`].
    #[error("{0}")]
    Unsupported(String),
    /// See [`Code::Rendezvous`].
    #[error("{0}")]
    Rendezvous(String),
    /// A system call failed.
    #[error("{context}")]
    Io {
        /// The failed action, with the names of its objects.
        context: String,
        /// The error of the operating system.
        #[source]
        source: Arc<std::io::Error>,
    },
    /// An error of CUDA, NVRTC or NCCL.
    #[error("{doing}: {answer}")]
    Device {
        /// The failed action, with the names of its objects.
        doing: String,
        /// The library's name and text for the error.
        answer: String,
    },
    /// A signal arrived during a wait.
    #[error("interrupted by a signal during {during}")]
    Interrupted {
        /// The operation.
        during: String,
    },
    /// See [`Code::Removed`].
    #[error("this process has been removed from the elastic job: {0}")]
    Removed(String),
    /// A bug in OpenSMD.
    #[error("internal error: {0} (this is a bug in OpenSMD: please report it)")]
    Internal(String),
}

impl Error {
    /// An [`Error::Io`] with its context.
    pub fn io(context: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        Error::Io { context: context.into(), source: Arc::new(source.into()) }
    }

    /// If this is a timeout, returns it with `limit` as the origin of its deadline.
    #[must_use]
    pub fn limited_by(self, limit: Limit) -> Self {
        match self {
            Error::Timeout { during, waited, missing, .. } => Error::Timeout { during, waited, missing, limit },
            other => other,
        }
    }

    /// An [`Error::Internal`] with the message of a panic that was caught at the boundary of the core.
    pub fn from_panic(panic: &(dyn std::any::Any + Send)) -> Self {
        let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Error::Internal(text.unwrap_or("a panic without a message").to_owned())
    }

    /// Runs `work`, the body of a thread, and returns the message of a panic, which is also logged.
    pub(crate) fn of_thread(name: &str, work: impl FnOnce()) -> Option<Self> {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).err()?;
        let error = match Self::from_panic(&*panic) {
            Error::Internal(text) => Error::Internal(format!("the thread {name} panicked: {text}")),
            other => other,
        };
        tracing::error!("{error}");
        Some(error)
    }

    /// Whether the error is that a member left the job in good order; it may have done its part before.
    pub fn is_orderly_departure(&self) -> bool {
        matches!(self, Error::PeerFailed { how, .. } if how.starts_with(&Departure::Left.to_string()))
    }

    /// The stable code.
    pub fn code(&self) -> Code {
        match self {
            Error::NotInitialized { .. } => Code::NotInitialized,
            Error::AlreadyInitialized => Code::AlreadyInitialized,
            Error::Closed { .. } => Code::Closed,
            Error::InvalidArgument(_) => Code::InvalidArgument,
            Error::Config(_) => Code::Config,
            Error::Mismatch { .. } => Code::Mismatch,
            Error::PeerFailed { .. } => Code::PeerFailed,
            Error::Timeout { .. } => Code::Timeout,
            Error::Unsupported(_) => Code::Unsupported,
            Error::Rendezvous(_) => Code::Rendezvous,
            Error::Io { .. } => Code::Io,
            Error::Device { .. } => Code::Device,
            Error::Interrupted { .. } => Code::Interrupted,
            Error::Removed(_) => Code::Removed,
            Error::Internal(_) => Code::Internal,
        }
    }

    /// The text with its causes.
    pub fn text(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(source) = cause {
            text.push_str(": ");
            text.push_str(&source.to_string());
            cause = source.source();
        }
        text
    }

    /// The text with its causes and its code: what crosses the FFI and what users search for.
    pub fn report(&self) -> String {
        format!("{} [smd:{}]", self.text(), self.code().name())
    }
}
