//! Collectives by name: threads submit them in any order, and all ranks run them in one common order.
//!
//! ```text
//! submit("b"), submit("a")        ready: a, b              both ready on all: run [a, b]
//!   any thread  --queue-->  smd-names-<id>   --up the tree-->  root
//!                                  ^------------- answers -------'-> the communicator's worker runs them
//! ```
//!
//! - `machine` makes the decisions, as a state machine without threads. `work` feeds it with calls and messages and
//!   performs its actions, on the thread of the [`Negotiator`] or on a thread that waits for a call
//!   ([`NamedHandle`]).
//! - A member announces to its parent the names for which all ranks of its subtree are ready: one bit for each name
//!   that was agreed on before (`cache`), a description for others. The root answers the names that are ready on all
//!   ranks. So a member sends and receives only a few messages for all names that are ready together, for any number
//!   of ranks and tensors.
//!
//! - NEG-1: answers are numbered and reach every member in the same order, and a member's actions depend on them
//!   alone. So all members run the same operations in the same order (COL-3), and have the same cache (NCH-1).
//! - NEG-2: a name is answered when every rank waits for it or has joined. The ranks' descriptions are compared; if
//!   they differ, that name fails on every rank with the same text, and other names continue.
//! - NEG-3: a member negotiates one call of a name at a time; later calls wait for it. So a member announces a name
//!   once between two answers, and needs no number to identify the call.
//! - NEG-4: a member that announces a name by cache position may not have received the answer that gave the position
//!   to another name. Its message says which answers it has received, and the receiver remembers earlier uses of the
//!   position.
//! - NEG-5: a failure ends all waiting calls. Announcements that were sent before the sender learned of the failure
//!   are ignored; a member that keeps a call announces it again.
//! - NEG-6: a rank that has joined has no waiting call, and sends no announcement until all have joined. So a name
//!   can be answered without it.
//! - NEG-7: several collectives may be submitted under one name. They are one entry everywhere here, so they run
//!   together or not at all.
//! - NEG-8: [`Negotiator::request`] returns errors of its own call at once. The other ranks do not learn of them,
//!   because the call has no name yet. Generated names are counted by kind, on success only, and restart after a
//!   `join`, so that they stay equal on all ranks.

pub mod affinity;
mod bits;
mod cache;
mod description;
mod factors;
mod machine;
mod message;
mod negotiator;
mod neutral;
mod numbers;
mod post;
mod presence;
mod search;
mod stall;
mod supply;
pub mod timeline;
mod tree;
mod tune;
mod work;

pub use factors::Factors;
pub use negotiator::{Connect, Name, NamedHandle, NamedRequest, Negotiator, NegotiatorOptions};
pub use numbers::Numbers;
pub use presence::Gradients;
pub use tune::FusionTuning;
pub(crate) use tune::{VOTE, VOTE_END};

/// Waits of this process that are not for a name. If every rank waits and can do nothing else, and they do not all
/// wait for the same, these waits end with an error.
pub trait OtherWaits: Send + Sync {
    /// Descriptions of waits that have lasted for some time; ranks that wait for the same return the same text.
    fn waits(&self) -> Vec<String>;
    /// Whether such a wait is for an idle device. Then this process can do nothing else, even if it uses the
    /// processor, because device libraries poll.
    fn is_at_rest(&self) -> bool;
    /// Ends all these waits. Called on the negotiator's thread, which must not block.
    fn end(&self, end: WaitEnd);
}

/// The error of a wait that is ended; equal on all ranks.
#[derive(Clone, Debug)]
pub struct WaitEnd {
    /// A number that is new for each error.
    pub number: u64,
    /// Global ranks that wait, one for each wait.
    pub ranks: Vec<usize>,
    /// Which rank waits for what.
    pub detail: String,
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
