//! A reducer that is made by a thread of the core while the script goes on: ranks that make one together come to it at
//! different times, and meanwhile may wait for each other elsewhere.

use std::sync::Arc;

use parking_lot::Mutex;

use super::Session;
use crate::error::{Error, Result};
use crate::reducer::{Options, ParamSpec, Reducer};

/// A reducer that is being made. One that nobody takes goes with this.
pub struct Making {
    session: Arc<Session>,
    state: Arc<Mutex<State>>,
}

enum State {
    UnderWay,
    Made(Result<Arc<Reducer>>),
    /// Taken, or not wanted any more.
    Gone,
}

impl Session {
    /// Starts to make a reducer of `ranks` for `params`, whose gradients came in this `order` here. All of the ranks call it with
    /// the same `token`, which no other call has ([`crate::reducer::ballot::Ballot::token`]), and none waits for another.
    ///
    /// # Errors
    /// [`Error::Io`] if there can be no thread.
    pub fn start_reducer(
        self: &Arc<Self>,
        token: u64,
        ranks: Vec<usize>,
        params: Vec<ParamSpec>,
        options: Options,
        order: Vec<usize>,
    ) -> Result<Making> {
        let state = Arc::new(Mutex::new(State::UnderWay));
        let making = Making { session: Arc::clone(self), state: Arc::clone(&state) };
        let session = Arc::clone(self);
        let make = move || {
            let made = session.make_in_order(token, &ranks, params, options, order);
            let mut state = state.lock();
            match (&*state, made) {
                (State::UnderWay, made) => *state = State::Made(made),
                (_, Ok(reducer)) => session.drop_reducer(&reducer),
                (_, Err(_)) => {}
            }
        };
        let thread = std::thread::Builder::new().name("smd-making".to_owned()).spawn(make);
        thread.map_err(|source| Error::io("starting a thread", source))?;
        Ok(making)
    }

    fn make_in_order(
        &self,
        token: u64,
        ranks: &[usize],
        params: Vec<ParamSpec>,
        options: Options,
        order: Vec<usize>,
    ) -> Result<Arc<Reducer>> {
        let own = self.make_round_group(token, ranks)?;
        let made = Reducer::new(Arc::clone(&own), params, options).and_then(|reducer| {
            reducer.follow_order(order)?;
            Ok(reducer)
        });
        made.inspect_err(|_| {
            // The reason counts; that the group cannot be removed either adds nothing.
            let _ = self.remove_group(own.id());
        })
    }

    fn drop_reducer(&self, reducer: &Reducer) {
        // The group is gone already after `shutdown()`.
        let _ = self.remove_group(reducer.communicator().id());
    }
}

impl Making {
    /// Whether [`Making::take`] has something.
    pub fn is_done(&self) -> bool {
        matches!(*self.state.lock(), State::Made(_))
    }

    /// The reducer, once it is made; who takes it removes its group in the end.
    ///
    /// # Errors
    /// Why it could not be made; [`Error::Internal`] if it is not done.
    pub fn take(&self) -> Result<Arc<Reducer>> {
        let mut state = self.state.lock();
        match std::mem::replace(&mut *state, State::Gone) {
            State::Made(made) => made,
            other => {
                *state = other;
                Err(Error::Internal("a reducer was taken that is not made yet".to_owned()))
            }
        }
    }

    /// Where it is made.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        if let State::Made(Ok(reducer)) = std::mem::replace(&mut *self.state.lock(), State::Gone) {
            self.session.drop_reducer(&reducer);
        }
    }
}
