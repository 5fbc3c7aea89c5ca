//! Whether all ranks reduce a round of gradients by plan: asked when a round begins, since ranks may have joined, may
//! have other parameters than before, or may have come later than others.
//!
//! ```text
//! first gradient of a round --vote, by name--> all ranks have the same plan: its buckets are reduced as they fill
//!                                              else: its gradients are reduced by their names, on every rank
//! ```
//!
//! - VOTE-1: a vote is an all-reduce by name to which each rank adds a number in a place of its own, and a rank that has
//!   joined adds nothing. So all that vote see the same numbers, and come to the same [`Verdict`].
//! - VOTE-2: a vote that fails is one for names: what failed it is told by whatever fails next.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use sha2::{Digest, Sha256};

use super::Reducer;
use crate::buffer::{DType, Device, TensorView};
use crate::collectives::{Communicator, ReduceOp, Request};
use crate::error::{Error, Result};
use crate::negotiation::{Ask, Asked, Factors, Name, Negotiator, timeline};
use crate::world::monitor::interrupt_pending;

/// A wait without anything to do looks for signals so often.
const LOOK_FOR_SIGNALS: Duration = Duration::from_millis(50);

/// What a rank brings to a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It wants names.
    ByName,
    /// It has no reducer for its parameters, and would make one.
    Without,
    /// It has one.
    Ready,
}

/// What all ranks do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The round is reduced by plan.
    Planned,
    /// It is reduced by name.
    ByName,
    /// The same, and then all make reducers.
    Make,
    /// The same, and who has a reducer gives it up, since others have none.
    Forget,
}

/// A vote that was cast.
pub struct Ballot {
    outcome: Arc<Outcome>,
    asked: Asked,
}

#[derive(Default)]
struct Outcome {
    verdict: Mutex<Option<Verdict>>,
    decided: Condvar,
}

impl Ballot {
    /// Votes in the group of `negotiator`, whose operations `group` runs, under `name`, which no other vote has at the
    /// same time. `what` tells what would be planned: ranks reduce by plan only if it is the same for all. `decided` is
    /// called with the verdict, by whatever thread learns of it; not after an error.
    ///
    /// # Errors
    /// What this rank cannot ask for ([`Negotiator::ask`]).
    pub fn cast(
        negotiator: &Negotiator,
        group: &Communicator,
        name: &str,
        what: &str,
        standing: Standing,
        decided: impl FnOnce(Verdict) + Send + 'static,
    ) -> Result<Self> {
        let members = group.members();
        // A timeline shows gradients by their names.
        let standing = if timeline::enabled() { Standing::ByName } else { standing };
        let mut votes = vec![0_u64; members.size()];
        votes[members.me] = number(what, standing);
        // SAFETY: the completion owns the numbers, which lie on the heap, and nobody else touches them before it is called.
        let view = unsafe { TensorView::new(votes.as_mut_ptr().cast(), votes.len(), DType::Int64, Device::Cpu, 0) }?;
        let shape = Some(vec![votes.len() as u64]);
        let outcome = Arc::new(Outcome::default());
        let told = Arc::clone(&outcome);
        let done = move |result: Result<Option<usize>>| {
            let verdict = result.map_or(Verdict::ByName, |_| verdict(&votes));
            decided(verdict);
            *told.verdict.lock() = Some(verdict);
            told.decided.notify_all();
        };
        let asked = negotiator.ask(
            Ask {
                name: Name::Given(name.to_owned()),
                tensors: vec![(Request::AllReduce { input: view, output: view, op: ReduceOp::Sum }, shape)],
                factors: Factors::default(),
                blocking: false,
            },
            || Box::new(done),
        )?;
        Ok(Self { outcome, asked })
    }

    /// Waits for it.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub fn verdict(&self) -> Result<Verdict> {
        loop {
            if let Some(verdict) = *self.outcome.verdict.lock() {
                return Ok(verdict);
            }
            if !self.asked.drive() {
                let mut verdict = self.outcome.verdict.lock();
                if verdict.is_none() {
                    self.outcome.decided.wait_for(&mut verdict, LOOK_FOR_SIGNALS);
                }
            }
            if self.outcome.verdict.lock().is_none() && interrupt_pending() {
                return Err(Error::Interrupted { during: "the vote on a round of gradients".to_owned() });
            }
        }
    }
}

impl Reducer {
    /// Begins a round in which gradients may be marked ready at once, and are reduced as soon as all ranks turn out to be
    /// ready for it ([`Verdict::Planned`]). With any other verdict its gradients stay as they were, and [`Reducer::abandon`] ends it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a round is under way; what this rank cannot ask for.
    pub fn begin_by_vote(
        self: &Arc<Self>,
        negotiator: &Negotiator,
        group: &Communicator,
        name: &str,
        what: &str,
    ) -> Result<Ballot> {
        let round = self.begin_held()?;
        let reducer = Arc::clone(self);
        let decided = move |verdict| match verdict {
            Verdict::Planned => reducer.release(round),
            _ => reducer.cancel(round),
        };
        Ballot::cast(negotiator, group, name, what, Standing::Ready, decided).inspect_err(|_| {
            self.cancel(round);
            self.abandon("never told: there is no vote", false);
        })
    }
}

/// A vote as a number, never 0: 61 bits of a digest, and the standing.
fn number(what: &str, standing: Standing) -> u64 {
    let digest = Sha256::digest(what);
    let digest = u64::from_le_bytes(*digest.first_chunk().expect("a digest has 32 bytes"));
    digest >> 3 << 2 | (standing as u64 + 1)
}

fn verdict(votes: &[u64]) -> Verdict {
    let is = |standing: Standing| votes.iter().all(|vote| vote & 3 == standing as u64 + 1);
    let by_name = |vote: &u64| *vote == 0 || vote & 3 == Standing::ByName as u64 + 1;
    let same = votes.iter().all(|vote| vote >> 2 == votes[0] >> 2);
    match () {
        () if !same || votes.iter().any(by_name) => Verdict::ByName,
        () if is(Standing::Ready) => Verdict::Planned,
        () if is(Standing::Without) => Verdict::Make,
        () => Verdict::Forget,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_reduce_by_plan_only_if_all_have_the_same() {
        use Standing::{ByName, Ready, Without};
        let of = |votes: &[(&str, Standing)]| {
            verdict(&votes.iter().map(|(what, standing)| number(what, *standing)).collect::<Vec<_>>())
        };
        assert_eq!(of(&[("a", Ready), ("a", Ready)]), Verdict::Planned);
        assert_eq!(of(&[("a", Without), ("a", Without)]), Verdict::Make);
        assert_eq!(of(&[("a", Ready), ("a", Without), ("a", Ready)]), Verdict::Forget);
        assert_eq!(of(&[("a", Ready), ("a", ByName)]), Verdict::ByName);
        assert_eq!(of(&[("a", Ready), ("b", Ready)]), Verdict::ByName);
        assert_eq!(of(&[("a", Without), ("b", Ready)]), Verdict::ByName);
        // One has joined.
        assert_eq!(verdict(&[number("a", Ready), 0]), Verdict::ByName);
    }
}
