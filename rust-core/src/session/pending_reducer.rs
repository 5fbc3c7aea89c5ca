//! Creates a reducer in a thread of the core while the script continues. The ranks that create it together reach this
//! point at different times and may wait for each other elsewhere meanwhile.

use std::sync::Arc;

use parking_lot::Mutex;

use super::Session;
use crate::error::{Error, Result};
use crate::reducer::{ParamSpec, Reducer, ReducerOptions};

/// A reducer that is being created. If it is not taken, dropping this drops it.
pub struct PendingReducer {
    session: Arc<Session>,
    state: Arc<Mutex<CreationState>>,
}

enum CreationState {
    InProgress,
    Finished(Result<Arc<Reducer>>),
    /// Taken, or dropped.
    Taken,
}

impl Session {
    /// Starts to create a reducer of `ranks` for `params`, whose gradients arrived in `order` here. All of the ranks
    /// call it with the same `token`, which no other call has ([`crate::reducer::ballot::Ballot::token`]). Does not
    /// wait.
    ///
    /// # Errors
    /// [`Error::Io`] if no thread can be started.
    pub fn create_reducer_async(
        self: &Arc<Self>,
        token: u64,
        ranks: Vec<usize>,
        params: Vec<ParamSpec>,
        options: ReducerOptions,
        order: Vec<usize>,
    ) -> Result<PendingReducer> {
        let state = Arc::new(Mutex::new(CreationState::InProgress));
        let pending = PendingReducer { session: Arc::clone(self), state: Arc::clone(&state) };
        let session = Arc::clone(self);
        let create = move || {
            let created = session.create_in_order(token, &ranks, params, options, order);
            let mut state = state.lock();
            match (&*state, created) {
                (CreationState::InProgress, created) => *state = CreationState::Finished(created),
                (_, Ok(reducer)) => session.drop_group_of(&reducer),
                (_, Err(_)) => {}
            }
        };
        let thread = std::thread::Builder::new().name("smd-reducer".to_owned()).spawn(create);
        thread.map_err(|source| Error::io("starting a thread", source))?;
        Ok(pending)
    }

    fn create_in_order(
        &self,
        token: u64,
        ranks: &[usize],
        params: Vec<ParamSpec>,
        options: ReducerOptions,
        order: Vec<usize>,
    ) -> Result<Arc<Reducer>> {
        let own = self.make_round_group(token, ranks)?;
        let created = Reducer::new(Arc::clone(&own), params, options).and_then(|reducer| {
            reducer.follow_order(order)?;
            Ok(reducer)
        });
        created.inspect_err(|_| {
            // The first error is reported; an error of the clean-up is ignored.
            let _ = self.remove_group(own.id());
        })
    }

    fn drop_group_of(&self, reducer: &Reducer) {
        // After `shutdown()` the group is gone already.
        let _ = self.remove_group(reducer.communicator().id());
    }
}

impl PendingReducer {
    /// Whether the creation has ended, so that [`PendingReducer::take`] returns its result.
    pub fn is_done(&self) -> bool {
        matches!(*self.state.lock(), CreationState::Finished(_))
    }

    /// Returns the reducer after [`PendingReducer::is_done`]. The caller removes its group in the end.
    ///
    /// # Errors
    /// The error of the creation; [`Error::Internal`] if it has not ended.
    pub fn take(&self) -> Result<Arc<Reducer>> {
        let mut state = self.state.lock();
        match std::mem::replace(&mut *state, CreationState::Taken) {
            CreationState::Finished(created) => created,
            other => {
                *state = other;
                Err(Error::Internal("a reducer was taken before it was created".to_owned()))
            }
        }
    }

    /// The session of the reducer.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }
}

impl Drop for PendingReducer {
    fn drop(&mut self) {
        if let CreationState::Finished(Ok(reducer)) = std::mem::replace(&mut *self.state.lock(), CreationState::Taken) {
            self.session.drop_group_of(&reducer);
        }
    }
}
