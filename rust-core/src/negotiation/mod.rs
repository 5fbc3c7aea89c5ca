//! Collectives by name: any thread submits them in any order, and every rank runs them in one.
//!
//! ```text
//! submit("b"), submit("a")        ready: a, b              both ready on all: run [a, b]
//!   any thread  --queue-->  smd-negotiation  --up the tree-->  root
//!                                  ^------------- answers -------'-> the communicator's worker runs them
//! ```
//!
//! - `machine` decides, as a value without threads; `work` takes calls and messages and does what it says, on the thread of
//!   the [`Negotiator`] or on one that waits for a call ([`NamedHandle`]).
//! - A member tells its parent what all ranks behind it are ready for: a bit for each name that was agreed on before
//!   (`cache`), a description for others. The root answers what all ranks are ready for. So nobody sends or receives
//!   more than a few messages for whatever is ready together, whatever the numbers of ranks and tensors.
//!
//! - NEG-1: answers are numbered and reach every member in one order, and what a member does follows from them alone. So
//!   all members run the same operations in the same order (COL-3), and keep the same cache (NCH-1).
//! - NEG-2: a name is answered when every rank waits for it or has joined. What they ask for is compared; if it differs,
//!   that name fails on every rank with the same text, and others go on.
//! - NEG-3: of one name, a member has one call in negotiation; later ones come after it. So a member says "ready" once
//!   between two answers, and needs no number to say which call it means.
//! - NEG-4: a member that says "ready" by position may not have heard of an answer that gave the position away; its
//!   message says what it has heard, and the receiver remembers what the position was.
//! - NEG-5: a failure ends all that waits, and what was sent by who had not heard of it counts for nothing; a member that
//!   keeps a call nevertheless says so again.
//! - NEG-6: a rank that has joined has nothing waiting, and says nothing until all have joined. So a name can be answered
//!   without it.
//! - NEG-7: several collectives may be asked for under one name: they are one entry everywhere here, and so run together
//!   or not at all.
//! - NEG-8: who asks by [`Negotiator::request`] hears at once what is wrong with its own call, and nobody else hears of it: it
//!   has no name yet. Names that the negotiation gives are counted by kind, on success only, and anew after a `join`, so
//!   that they stay in step.

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

/// What a process waits for besides names. If every rank waits and can do nothing else, and not all for the same, each
/// is told.
pub trait OtherWaits: Send + Sync {
    /// What has been waited for for a while; the same text on all ranks that wait for the same.
    fn waits(&self) -> Vec<String>;
    /// Whether some of it has waited for long on a device that has nothing to do. Then this process can do nothing else, whatever its
    /// processor does: libraries of devices poll.
    fn is_at_rest(&self) -> bool;
    /// Ends all of it. Called on the negotiator's thread, which must not wait.
    fn end(&self, end: WaitEnd);
}

/// Why what is waited for besides names ends; the same on all ranks.
#[derive(Clone, Debug)]
pub struct WaitEnd {
    /// New for each end.
    pub number: u64,
    /// Global ranks that wait for it, one for each thing that is waited for.
    pub ranks: Vec<usize>,
    /// Who waits for what.
    pub detail: String,
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
