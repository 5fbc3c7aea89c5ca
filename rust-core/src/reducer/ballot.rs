//! Votes on how a round of gradients is reduced. The ranks vote when a round begins, because some may have joined, may
//! have other parameters than before, or may be late.
//!
//! ```text
//! first gradient of a round --vote, by name--> all ranks have the same plan: its buckets are reduced as they fill
//!                                              else: its gradients are reduced by their names, on every rank
//! ```
//!
//! - VOTE-1: a vote is an all-reduce by name. Each rank contributes a number at its own index; a rank that has joined
//!   contributes nothing. So all voters see the same numbers and derive the same [`VoteResult`].
//! - VOTE-2: a wait for a member that has voted but does not end its round, or has not created its reducer yet, is
//!   always visible to the negotiation, which reports stalls. For this, a thread of the core creates reducers
//!   ([`crate::session::pending_reducer`]) while rounds are reduced by name, and each member requests the end of its
//!   round by name.
//! - VOTE-3: a member that has a reducer holds its gradients until the result is known. If they go by name, it must
//!   submit them even if its caller does something else: other members may wait for them before they call that. So
//!   the process counts each such result ([`wait_for_declined`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sha2::{Digest, Sha256};

use super::Reducer;
use crate::buffer::ReduceOp;
use crate::collectives::Communicator;
use crate::error::{Error, Result};
use crate::negotiation::{Name, Negotiator, Numbers, VOTE, VOTE_END, timeline};

/// How far a rank is prepared for a planned round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// The rank requires a round by name.
    ByName,
    /// The rank has no reducer for its parameters and would create one.
    NoReducer,
    /// The rank's reducer is being created.
    Creating,
    /// The rank has a reducer.
    Ready,
}

/// How the round is reduced; the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VoteResult {
    /// The round is reduced by the reducers' plan.
    Planned,
    /// The round is reduced by name.
    ByName,
    /// The round is reduced by name, and all ranks create reducers ([`Ballot::token`]).
    CreateReducers,
    /// The round is reduced by name, and ranks that have a reducer drop it, because others have none.
    DropReducers,
}

/// This rank's vote, and the result once it is known.
pub struct Ballot(Numbers);

/// The number of this process's rounds whose gradients were held and go by name (VOTE-3).
struct DeclinedRounds {
    count: Mutex<u64>,
    changed: Condvar,
}

static DECLINED: DeclinedRounds = DeclinedRounds { count: Mutex::new(0), changed: Condvar::new() };

/// Waits until the number of this process's rounds whose gradients were held and go by name is not `seen`, at most for
/// `timeout`; returns the number. When a round is counted, [`Ballot::is_decided`] is true for it.
pub fn wait_for_declined(seen: u64, timeout: Duration) -> u64 {
    let deadline = Instant::now() + timeout;
    let mut count = DECLINED.count.lock();
    while *count == seen && !DECLINED.changed.wait_until(&mut count, deadline).timed_out() {}
    *count
}

/// The name and negotiator of a round that began with a vote; used to request its end.
pub(super) struct Vote {
    negotiator: Arc<Negotiator>,
    name: String,
}

impl Ballot {
    /// Casts a vote in the group of `negotiator`, whose operations `group` runs. `name` is the round's name; no other
    /// vote may have it at the same time. `what` describes the plan: ranks reduce by plan only if it is equal on all.
    /// `decided` and `known` are called with the result, on any thread, and with [`VoteResult::ByName`] after an error:
    /// `decided` before [`Ballot::is_decided`] is true, and `known` after that. Neither is called if this returns an
    /// error.
    ///
    /// # Errors
    /// Any error of [`Negotiator::request`].
    pub fn cast(
        negotiator: &Negotiator,
        group: &Communicator,
        name: &str,
        what: &str,
        readiness: Readiness,
        decided: impl FnOnce(VoteResult) + Send + 'static,
        known: impl FnOnce(VoteResult) + Send + 'static,
    ) -> Result<Self> {
        let members = group.members();
        // Timelines and autotuning work with gradients by name.
        let by_name = timeline::enabled() || negotiator.is_tuning();
        let readiness = if by_name { Readiness::ByName } else { readiness };
        // The last element is a random number of the first member: the token.
        let mut votes = vec![0_u64; members.size() + 1];
        votes[members.me] = number(what, readiness);
        if members.me == 0 {
            votes[members.size()] =
                getrandom::u64().map_err(|error| Error::Internal(format!("no random numbers: {error}")))?;
        }
        let result = |votes: &Result<Vec<u64>>| votes.as_ref().map_or(VoteResult::ByName, |votes| result_of(votes));
        let name = Name::Given(format!("{name}{VOTE}"));
        let (before_known, after_known) =
            (move |votes: &_| decided(result(votes)), move |votes: &_| known(result(votes)));
        Numbers::submit(negotiator, name, votes, ReduceOp::Sum, before_known, after_known).map(Self)
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// [`Error::Interrupted`]; the error that ended the vote, such as a stall because a member did not vote.
    pub fn result(&self) -> Result<VoteResult> {
        self.0.wait("the vote on a round of gradients").map(|votes| result_of(&votes))
    }

    /// Whether [`Ballot::result`] returns without waiting.
    pub fn is_decided(&self) -> bool {
        self.0.known().is_some()
    }

    /// A random number that all voters share and no other vote has; 0 before the result is known.
    pub fn token(&self) -> u64 {
        self.0.known().and_then(Result::ok).and_then(|votes| votes.last().copied()).unwrap_or(0)
    }
}

impl Vote {
    /// Reports that this member has ended its round. `failed` is called if the others do not end theirs in time. It is
    /// not called for a member that has left the job in good order: its gradients are there, or the operation that
    /// waits for them fails by itself.
    ///
    /// # Errors
    /// Any error of [`Negotiator::request`].
    pub(super) fn request_end(&self, failed: impl FnOnce(Error) + Send + 'static) -> Result<()> {
        let check = |result: &Result<Vec<u64>>| {
            if let Err(error) = result
                && !error.is_orderly_departure()
            {
                failed(error.clone());
            }
        };
        // The request of the previous round may still be in flight.
        let name = Name::Shared(format!("{}{}", self.name, VOTE_END));
        match Numbers::submit(&self.negotiator, name, vec![0], ReduceOp::Sum, check, |_| ()) {
            // The departure has already ended the negotiation.
            Err(error) if error.is_orderly_departure() => Ok(()),
            submitted => submitted.map(drop),
        }
    }
}

impl Reducer {
    /// Begins a round by a vote. Gradients may be marked ready at once; they are reduced as soon as the result is
    /// [`VoteResult::Planned`]. With any other result they keep their values, and [`Reducer::abandon`] ends the round.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a round is under way; those of [`Negotiator::request`].
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
        let known = |result| {
            if result != VoteResult::Planned {
                *DECLINED.count.lock() += 1;
                DECLINED.changed.notify_all();
            }
        };
        Ballot::cast(negotiator, group, name, what, Readiness::Ready, decided, known).inspect_err(|_| {
            self.cancel(round);
            self.abandon("not reported: there is no vote", false);
        })
    }
}

/// Encodes a vote as a number that is never 0: 60 bits of a digest of `what`, and the readiness.
fn number(what: &str, readiness: Readiness) -> u64 {
    let digest = Sha256::digest(what);
    let digest = u64::from_le_bytes(*digest.first_chunk().expect("a digest has 32 bytes"));
    digest >> 4 << 3 | (readiness as u64 + 1)
}

/// Derives the result from the numbers of all ranks; the last element is the token.
fn result_of(votes: &[u64]) -> VoteResult {
    let votes = &votes[..votes.len() - 1];
    let has = |vote: u64, readiness: Readiness| vote & 7 == readiness as u64 + 1;
    let all = |readiness| votes.iter().all(|&vote| has(vote, readiness));
    let any = |readiness| votes.iter().any(|&vote| has(vote, readiness));
    let same = votes.iter().all(|vote| *vote != 0 && vote >> 3 == votes[0] >> 3);
    match () {
        () if !same || any(Readiness::ByName) || any(Readiness::Creating) => VoteResult::ByName,
        () if all(Readiness::Ready) => VoteResult::Planned,
        () if all(Readiness::NoReducer) => VoteResult::CreateReducers,
        () => VoteResult::DropReducers,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::time::Duration;

    use super::super::{ParamSpec, ReducerOptions};
    use super::*;
    use crate::buffer::DType;
    use crate::negotiation::NegotiatorOptions;
    use crate::transport::mock::{MockOptions, MockTransport};
    use crate::world::{Departure, Monitor};

    const LIMIT: Duration = Duration::from_secs(20);

    fn negotiator_options() -> NegotiatorOptions {
        NegotiatorOptions {
            cache_capacity: 100,
            fusion_bytes: 1 << 20,
            stall_warning: LIMIT,
            stall_limit: LIMIT,
            tuning: None,
            core: None,
            local_rank: 0,
        }
    }

    /// When another member departs.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Departs {
        /// After this member has requested the end of its round.
        After,
        Before,
        /// Before that, and this member has failed with another error of an operation by name.
        Known,
    }

    /// Which error ends a round whose end this member has requested, when another member departs.
    fn failure_of_the_round(how: Departure, when: Departs) -> Option<Error> {
        let net = MockTransport::net(2, MockOptions { seed: 1, max_delay: Duration::ZERO });
        let monitor = Arc::new(Monitor::new(0));
        let communicator = |id| Communicator::new(id, net[0].clone(), monitor.clone(), LIMIT);
        let (first, second) = (communicator(3), communicator(4));
        let connect = Box::new(move || Ok(first));
        let negotiator = Negotiator::start(3, second, monitor.clone(), negotiator_options(), connect, None).unwrap();
        if when != Departs::After {
            monitor.report(1, how.clone());
        }
        if when == Departs::Known {
            let other = Name::Given("other".to_owned());
            let submitted = Numbers::submit(&negotiator, other, vec![0], ReduceOp::Sum, |_| (), |_| ());
            submitted.and_then(|handle| handle.wait("the test")).expect_err("no member answers");
        }
        let vote = Vote { negotiator, name: "round".to_owned() };
        let (sender, receiver) = channel();
        if let Err(error) = vote.request_end(move |error| drop(sender.send(error))) {
            return Some(error);
        }
        monitor.report(1, how);
        // The callback of a member that is not called is dropped when the end is known.
        match receiver.recv_timeout(LIMIT) {
            Ok(error) => Some(error),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("the end is not reported"),
        }
    }

    #[test]
    fn a_departure_in_good_order_does_not_fail_the_round() {
        for when in [Departs::After, Departs::Before, Departs::Known] {
            let failure = failure_of_the_round(Departure::Left, when).map(|error| error.report());
            assert_eq!(failure, None, "{when:?}");
            let died = Departure::Died { detail: "killed by signal 9".to_owned() };
            let error = failure_of_the_round(died, when).expect("a death fails it");
            assert!(error.to_string().contains("rank 1 died (killed by signal 9)"), "{when:?}: {error}");
        }
    }

    #[test]
    fn declined_rounds_with_held_gradients_are_counted() {
        // Each group has its own transport, as in a job, because messages have no tags and are matched by their order.
        let nets = [3, 4, 5].map(|seed| MockTransport::net(2, MockOptions { seed, max_delay: Duration::ZERO }));
        let start = |me: usize| {
            let monitor = Arc::new(Monitor::new(me));
            let communicator =
                |id: u64| Communicator::new(id, nets[id as usize - 3][me].clone(), monitor.clone(), LIMIT);
            let (first, group) = (communicator(3), communicator(4));
            let connect = Box::new(move || Ok(first));
            let negotiator =
                Negotiator::start(3, group.clone(), monitor.clone(), negotiator_options(), connect, None).unwrap();
            let params = vec![ParamSpec::dense("p".to_owned(), [8], DType::Float32)];
            (Reducer::new(communicator(5), params, ReducerOptions::default()).unwrap(), negotiator, group)
        };
        let (vote, may_vote) = channel();
        let start = &start;
        std::thread::scope(|scope| {
            // Rank 1 votes for the plan once, and against it afterwards.
            scope.spawn(move || {
                let (reducer, negotiator, group) = start(1);
                let planned = reducer.begin_by_vote(&negotiator, &group, "round", "p").unwrap();
                assert_eq!(planned.result().unwrap(), VoteResult::Planned);
                reducer.abandon("not reported: the other member abandons it, too", false);
                may_vote.recv().unwrap();
                let none = |_| ();
                let by_name = Ballot::cast(&negotiator, &group, "round", "p", Readiness::ByName, none, none).unwrap();
                assert_eq!(by_name.result().unwrap(), VoteResult::ByName);
            });
            let (reducer, negotiator, group) = start(0);
            let seen = wait_for_declined(u64::MAX, LIMIT);
            let planned = reducer.begin_by_vote(&negotiator, &group, "round", "p").unwrap();
            assert_eq!(planned.result().unwrap(), VoteResult::Planned);
            reducer.abandon("not reported: the other member abandons it, too", false);
            let ballot = reducer.begin_by_vote(&negotiator, &group, "round", "p").unwrap();
            assert_eq!(wait_for_declined(seen, Duration::from_millis(50)), seen, "one is planned, one is open");
            vote.send(()).unwrap();
            // No rank calls `result`.
            assert_eq!(wait_for_declined(seen, LIMIT), seen + 1);
            assert!(ballot.is_decided(), "VOTE-3");
            reducer.abandon("not reported: there is no round", false);
        });
    }

    #[test]
    fn ranks_reduce_by_plan_only_if_all_have_the_same() {
        use Readiness::{ByName, Creating, NoReducer, Ready};
        let of = |votes: &[(&str, Readiness)]| {
            result_of(&votes.iter().map(|(what, readiness)| number(what, *readiness)).chain([7]).collect::<Vec<_>>())
        };
        assert_eq!(of(&[("a", Ready), ("a", Ready)]), VoteResult::Planned);
        assert_eq!(of(&[("a", NoReducer), ("a", NoReducer)]), VoteResult::CreateReducers);
        assert_eq!(of(&[("a", Ready), ("a", NoReducer), ("a", Ready)]), VoteResult::DropReducers);
        assert_eq!(of(&[("a", Ready), ("a", ByName)]), VoteResult::ByName);
        assert_eq!(of(&[("a", Ready), ("b", Ready)]), VoteResult::ByName);
        assert_eq!(of(&[("a", Ready), ("a", Creating)]), VoteResult::ByName);
        assert_eq!(of(&[("a", NoReducer), ("a", Creating)]), VoteResult::ByName);
        assert_eq!(of(&[("a", NoReducer), ("b", Ready)]), VoteResult::ByName);
        // One rank has joined.
        assert_eq!(result_of(&[number("a", Ready), 0, 7]), VoteResult::ByName);
    }
}
