//! Rounds: steps that begin with a vote, before whose end nothing is reduced (RED-8).

use std::sync::Arc;

use super::Reducer;
use crate::error::{Error, Result};
use crate::reducer::ballot::Vote;

impl Reducer {
    /// Begins a round whose vote is open. Gradients may be marked ready; nothing is reduced before
    /// [`Reducer::release`]. Returns the round's number.
    ///
    /// # Errors
    /// As [`Reducer::begin`].
    pub(in crate::reducer) fn begin_held(&self, vote: Option<Vote>) -> Result<u64> {
        let mut state = self.settle()?;
        state.open(true, vote);
        Ok(state.steps)
    }

    /// Closes the vote: all members take part, and full buckets are reduced.
    pub(in crate::reducer) fn release(self: &Arc<Self>, round: u64) {
        self.unhold(round, false);
    }

    /// Closes the vote: not all members take part, and the round's gradients keep their values. [`Reducer::abandon`]
    /// must follow; it tells the others nothing, because they may be in the middle of a backward.
    pub(in crate::reducer) fn cancel(self: &Arc<Self>, round: u64) {
        self.unhold(round, true);
    }

    fn unhold(self: &Arc<Self>, round: u64, cancel: bool) {
        let action = {
            let Some(action) = self.state.lock().unhold(round, cancel) else { return };
            self.changed.notify_all();
            action
        };
        self.perform(action);
        if !cancel && self.state.lock().active.as_ref().is_some_and(|active| active.id == round && active.abandoned) {
            self.request_end();
        }
    }

    /// Ends the wait for a round's end, because its request by name has failed. Its caller abandons the round.
    fn call_off(&self, round: u64, error: Error) {
        if let Some(active) = self.state.lock().active.as_mut().filter(|active| active.id == round) {
            active.called_off = Some(error);
            self.changed.notify_all();
        }
    }

    /// Requests the round's end by name, if the round began with a vote and takes place.
    pub(super) fn request_end(self: &Arc<Self>) {
        let (vote, round) = match &mut self.state.lock().active {
            Some(active) if !active.held && !active.refused => (active.vote.take(), active.id),
            _ => return,
        };
        let Some(vote) = vote else { return };
        let reducer = Arc::clone(self);
        if let Err(error) = vote.request_end(move |error| reducer.call_off(round, error)) {
            self.call_off(round, error);
        }
    }
}
