//! Rounds that begin with a vote: nothing is reduced before its result (RED-8).

use std::sync::Arc;

use super::Reducer;
use crate::error::{Error, Result};
use crate::reducer::ballot::Vote;
use crate::reducer::state::ReducerAction;

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

    /// Closes the vote: all members take part, and full buckets are reduced. On a device, this passes the reductions
    /// that waited to the queue's thread.
    pub(in crate::reducer) fn release(self: &Arc<Self>, round: u64) {
        self.close_vote(round, false);
    }

    /// Closes the vote: not all members take part, and the round's gradients keep their values. [`Reducer::abandon`]
    /// must follow; it tells the others nothing, because they may be in the middle of a backward.
    pub(in crate::reducer) fn cancel(self: &Arc<Self>, round: u64) {
        self.close_vote(round, true);
    }

    fn close_vote(self: &Arc<Self>, round: u64, cancel: bool) {
        let (action, dropped, on_device) = {
            let state = &mut *self.state.lock();
            let Some((action, jobs)) = state.close_vote(round, cancel) else { return };
            self.changed.notify_all();
            let on_device = state.options.reduces_on_device();
            match self.device_queue.get() {
                // Under the lock, so that later buckets follow these.
                Some(device_queue) if !cancel => {
                    let queued = jobs.into_iter().try_for_each(|job| device_queue.queue(job));
                    if let (Err(error), Some(active)) = (queued, &mut state.active) {
                        active.error = Some(error);
                    }
                    (action, Vec::new(), on_device)
                }
                _ => (action, jobs, on_device),
            }
        };
        if let Some(device_queue) = self.device_queue.get() {
            dropped.into_iter().for_each(|job| device_queue.drop_job(job));
        }
        if let (ReducerAction::GiveUp(_, message), true) = (&action, on_device) {
            // This member has abandoned the round while the vote was open, and the others carry it out.
            self.end_devices(message, true);
        }
        self.perform(action);
        if !cancel && self.state.lock().active.as_ref().is_some_and(|active| active.id == round && active.abandoned) {
            self.request_end();
        }
    }

    /// Ends the wait for a round's end, because its request by name has failed. Its caller abandons the round.
    fn end_wait(&self, round: u64, error: Error) {
        if let Some(active) = self.state.lock().active.as_mut().filter(|active| active.id == round) {
            active.called_off = Some(error);
            self.changed.notify_all();
        }
    }

    /// Requests the round's end by name, if the round began with a vote and takes place.
    pub(super) fn request_end(self: &Arc<Self>) {
        let (vote, round) = match &mut self.state.lock().active {
            Some(active) if active.gate.is_open() => (active.vote.take(), active.id),
            _ => return,
        };
        let Some(vote) = vote else { return };
        let reducer = Arc::clone(self);
        if let Err(error) = vote.request_end(move |error| reducer.end_wait(round, error)) {
            self.end_wait(round, error);
        }
    }
}
