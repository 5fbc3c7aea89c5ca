//! The reducers that gradients of graphs go to: made when the first gradient comes, gone with the session.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use super::Session;
use crate::error::{Error, Result};
use crate::reducer::arrival::{Arrival, Arrivals};
use crate::reducer::{Reducer, blueprint};

/// By number of the blueprint.
#[derive(Default)]
pub struct Plans {
    open: Mutex<HashMap<usize, Arc<Arrivals>>>,
    workshop: Mutex<Workshop>,
}

/// Reducers to be made, one after the other.
#[derive(Default)]
struct Workshop {
    orders: VecDeque<(usize, Arc<Arrivals>)>,
    /// Whether a thread works on them.
    is_open: bool,
}

impl Plans {
    pub fn close(&self) {
        let open = std::mem::take(&mut *self.open.lock());
        // Not under the lock: gradients that wait are answered.
        drop(open);
    }
}

impl Session {
    /// What takes the gradients of a blueprint, if some have come already.
    pub fn find_arrivals(&self, number: usize) -> Option<Arc<Arrivals>> {
        self.plans.open.lock().get(&number).cloned()
    }

    /// A gradient for the reducer of a blueprint has come. The first one has the reducers of its graph made, by a thread of
    /// the core: collective, without a wait for this thread.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown blueprint. The giver is not answered then.
    ///
    /// # Safety
    /// See [`Arrivals::arrive`].
    pub unsafe fn arrive(self: &Arc<Self>, number: usize, arrival: Arrival) -> Result<()> {
        let arrivals = match self.find_arrivals(number) {
            Some(arrivals) => arrivals,
            None => self.make_plans(number)?,
        };
        // SAFETY: the caller's promise.
        unsafe { arrivals.arrive(arrival) };
        Ok(())
    }

    fn make_plans(self: &Arc<Self>, number: usize) -> Result<Arc<Arrivals>> {
        blueprint::get(number)?;
        let mut open = self.plans.open.lock();
        if let Some(arrivals) = open.get(&number) {
            return Ok(Arc::clone(arrivals));
        }
        let Workshop { orders, is_open } = &mut *self.plans.workshop.lock();
        for number in blueprint::made_with(number) {
            open.entry(number).or_insert_with(|| {
                let arrivals = Arrivals::new();
                orders.push_back((number, Arc::clone(&arrivals)));
                arrivals
            });
        }
        if !std::mem::replace(is_open, true) {
            let session = Arc::clone(self);
            let spawned = std::thread::Builder::new().name("smd-plans".to_owned()).spawn(move || session.make_all());
            if let Err(source) = spawned {
                *is_open = false;
                for (number, _) in orders.drain(..) {
                    open.remove(&number);
                }
                return Err(Error::io("starting a thread", source));
            }
        }
        Ok(Arc::clone(&open[&number]))
    }

    fn make_all(&self) {
        loop {
            let (number, arrivals) = {
                let Workshop { orders, is_open } = &mut *self.plans.workshop.lock();
                match orders.pop_front() {
                    Some(next) => next,
                    None => return *is_open = false,
                }
            };
            let made = self.make_plan(number);
            if made.is_err() {
                // The next gradient tries again.
                self.plans.open.lock().remove(&number);
            }
            arrivals.made(made);
        }
    }

    fn make_plan(&self, number: usize) -> Result<Arc<Reducer>> {
        let description = blueprint::get(number)?;
        let all: Vec<usize> = (0..self.size()).collect();
        let own = self.new_plan_group(&all)?;
        Reducer::new(Arc::clone(&own), description.params.clone(), description.options.clone()).inspect_err(|_| {
            // The reason counts; that the group cannot be removed either adds nothing.
            let _ = self.remove_group(own.id());
        })
    }
}
