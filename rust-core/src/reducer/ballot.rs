//! Whether all ranks reduce a round of gradients by plan: asked when a round begins, since ranks may have joined, may
//! have other parameters than before, or may have come later than others.
//!
//! ```text
//! first gradient of a round --vote, by name--> all ranks have the same plan: its buckets are reduced as they fill
//!                                              else: its gradients are reduced by their names, on every rank
//! ```
//!
//! - VOTE-1: a vote is an all-reduce by name to which each rank adds a number in a place of its own, and a rank that has
//!   joined adds nothing. So all that vote see the same numbers, and come to the same [`VoteResult`].
//! - VOTE-2: nothing waits for a member that has voted but does not come to the end of its round, or that has not made
//!   its reducer yet, except in sight of the negotiation: reducers are made by a thread of the core
//!   ([`crate::session::pending_reducer`]) while rounds go by name, and each member asks by name for the end of its round, so
//!   that stalls are told.

use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::Reducer;
use crate::buffer::ReduceOp;
use crate::collectives::Communicator;
use crate::error::{Error, Result};
use crate::negotiation::{Name, Negotiator, Numbers, VOTE, VOTE_END, timeline};

/// What a rank brings to a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// It wants names.
    ByName,
    /// It has no reducer for its parameters, and would make one.
    NoReducer,
    /// One is being made.
    Creating,
    /// It has one.
    Ready,
}

/// What all ranks do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VoteResult {
    /// The round is reduced by plan.
    Planned,
    /// It is reduced by name.
    ByName,
    /// The same, and all have reducers made ([`Ballot::token`]).
    Make,
    /// The same, and who has a reducer gives it up, since others have none.
    Forget,
}

/// A vote that was cast.
pub struct Ballot(Numbers);

/// How a round began, and how its end is asked for.
pub(super) struct Vote {
    negotiator: Arc<Negotiator>,
    name: String,
}

impl Ballot {
    /// Votes in the group of `negotiator`, whose operations `group` runs, for the round `name`, which no other vote has at the
    /// same time. `what` tells what would be planned: ranks reduce by plan only if it is the same for all. `decided` is
    /// called with the result, by whatever thread learns of it, which is for names after an error; not if this returns one.
    ///
    /// # Errors
    /// What this rank cannot ask for ([`Negotiator::request`]).
    pub fn cast(
        negotiator: &Negotiator,
        group: &Communicator,
        name: &str,
        what: &str,
        readiness: Readiness,
        decided: impl FnOnce(VoteResult) + Send + 'static,
    ) -> Result<Self> {
        let members = group.members();
        // A timeline shows gradients by their names, and sizes are tried with them.
        let by_name = timeline::enabled() || negotiator.is_tuning();
        let readiness = if by_name { Readiness::ByName } else { readiness };
        // Of the first member, the last place is a number that nobody else has.
        let mut votes = vec![0_u64; members.size() + 1];
        votes[members.me] = number(what, readiness);
        if members.me == 0 {
            votes[members.size()] =
                getrandom::u64().map_err(|error| Error::Internal(format!("no random numbers: {error}")))?;
        }
        let told = move |votes: &Result<Vec<u64>>| {
            decided(votes.as_ref().map_or(VoteResult::ByName, |votes| result_of(votes)))
        };
        Numbers::submit(negotiator, Name::Given(format!("{name}{VOTE}")), votes, ReduceOp::Sum, told).map(Self)
    }

    /// Waits for it.
    ///
    /// # Errors
    /// [`Error::Interrupted`]; what ended the negotiation, such as a member that has not voted for too long.
    pub fn result(&self) -> Result<VoteResult> {
        self.0.wait("the vote on a round of gradients").map(|votes| result_of(&votes))
    }

    /// Whether [`Ballot::result`] waits no longer.
    pub fn is_decided(&self) -> bool {
        self.0.known().is_some()
    }

    /// After the result: a number that all who voted have, and no other vote; 0 before.
    pub fn token(&self) -> u64 {
        self.0.known().and_then(Result::ok).and_then(|votes| votes.last().copied()).unwrap_or(0)
    }
}

impl Vote {
    /// Says that this member has come to the end of its round. `failed` is called if the others do not come to theirs in time. A member
    /// that left the job in good order may have come to it before: then its gradients are there, and otherwise the operation
    /// that waits for them fails by itself.
    ///
    /// # Errors
    /// As [`Negotiator::request`].
    pub(super) fn request_end(&self, failed: impl FnOnce(Error) + Send + 'static) -> Result<()> {
        let told = |result: &Result<Vec<u64>>| {
            if let Err(error) = result
                && !error.is_orderly_departure()
            {
                failed(error.clone());
            }
        };
        // The last round's may not be answered yet.
        let name = Name::Shared(format!("{}{}", self.name, VOTE_END));
        Numbers::submit(&self.negotiator, name, vec![0], ReduceOp::Sum, told).map(drop)
    }
}

impl Reducer {
    /// Begins a round in which gradients may be marked ready at once, and are reduced as soon as all ranks turn out to be
    /// ready for it ([`VoteResult::Planned`]). With any other result its gradients stay as they were, and [`Reducer::abandon`] ends it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a round is under way; what this rank cannot ask for.
    pub fn begin_by_vote(
        self: &Arc<Self>,
        negotiator: &Arc<Negotiator>,
        group: &Communicator,
        name: &str,
        what: &str,
    ) -> Result<Ballot> {
        let round = self.begin_held(Some(Vote { negotiator: Arc::clone(negotiator), name: name.to_owned() }))?;
        let reducer = Arc::clone(self);
        let decided = move |result| match result {
            VoteResult::Planned => reducer.release(round),
            _ => reducer.cancel(round),
        };
        Ballot::cast(negotiator, group, name, what, Readiness::Ready, decided).inspect_err(|_| {
            self.cancel(round);
            self.abandon("never told: there is no vote", false);
        })
    }
}

/// A vote as a number, never 0: 60 bits of a digest, and the readiness.
fn number(what: &str, readiness: Readiness) -> u64 {
    let digest = Sha256::digest(what);
    let digest = u64::from_le_bytes(*digest.first_chunk().expect("a digest has 32 bytes"));
    digest >> 4 << 3 | (readiness as u64 + 1)
}

/// Of the numbers that all voted, with the one that nobody else has behind them.
fn result_of(votes: &[u64]) -> VoteResult {
    let votes = &votes[..votes.len() - 1];
    let has = |vote: u64, readiness: Readiness| vote & 7 == readiness as u64 + 1;
    let all = |readiness| votes.iter().all(|&vote| has(vote, readiness));
    let any = |readiness| votes.iter().any(|&vote| has(vote, readiness));
    let same = votes.iter().all(|vote| *vote != 0 && vote >> 3 == votes[0] >> 3);
    match () {
        () if !same || any(Readiness::ByName) || any(Readiness::Creating) => VoteResult::ByName,
        () if all(Readiness::Ready) => VoteResult::Planned,
        () if all(Readiness::NoReducer) => VoteResult::Make,
        () => VoteResult::Forget,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_reduce_by_plan_only_if_all_have_the_same() {
        use Readiness::{ByName, Creating, NoReducer, Ready};
        let of = |votes: &[(&str, Readiness)]| {
            result_of(&votes.iter().map(|(what, readiness)| number(what, *readiness)).chain([7]).collect::<Vec<_>>())
        };
        assert_eq!(of(&[("a", Ready), ("a", Ready)]), VoteResult::Planned);
        assert_eq!(of(&[("a", NoReducer), ("a", NoReducer)]), VoteResult::Make);
        assert_eq!(of(&[("a", Ready), ("a", NoReducer), ("a", Ready)]), VoteResult::Forget);
        assert_eq!(of(&[("a", Ready), ("a", ByName)]), VoteResult::ByName);
        assert_eq!(of(&[("a", Ready), ("b", Ready)]), VoteResult::ByName);
        assert_eq!(of(&[("a", Ready), ("a", Creating)]), VoteResult::ByName);
        assert_eq!(of(&[("a", NoReducer), ("a", Creating)]), VoteResult::ByName);
        assert_eq!(of(&[("a", NoReducer), ("b", Ready)]), VoteResult::ByName);
        // One has joined.
        assert_eq!(result_of(&[number("a", Ready), 0, 7]), VoteResult::ByName);
    }
}
