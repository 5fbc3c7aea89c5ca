//! The reducers that gradients of graphs go to: made when the first gradient comes, gone with the session.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use super::Session;
use crate::error::{Error, Result};
use crate::reducer::arrival::{Arrival, Arrivals};
use crate::reducer::makers::{Gradient, Makers};
use crate::reducer::{ParamSpec, Reducer, SlotLease, blueprint};

/// By number of the blueprint.
#[derive(Default)]
pub struct Plans {
    open: Mutex<HashMap<usize, Arc<Arrivals>>>,
    workshop: Mutex<Workshop>,
    makers: Mutex<Makers>,
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

    /// Memory for a tensor of `bytes` bytes that operation `maker` of a graph is about to make, if that is likely to be a
    /// gradient ([`crate::reducer::makers`]). A caller that gets none says where it made the tensor
    /// ([`Session::lent_elsewhere`]).
    pub fn lend(&self, bytes: usize, maker: usize) -> Option<SlotLease> {
        let Gradient { plan, param } = self.plans.makers.lock().request(bytes, maker)?;
        self.find_arrivals(plan)?.take_slot(param)
    }

    /// See [`Session::lend`].
    pub fn lent_elsewhere(&self, bytes: usize, maker: usize, ptr: *const u8) {
        self.plans.makers.lock().made_elsewhere(bytes, maker, ptr as usize);
    }

    /// A slot for a gradient that was made at `ptr`, if it does not lie in one already and one is free. `learn` says
    /// that whoever made it may be lent the slot the next time.
    pub fn take_slot(&self, gradient: Gradient, bytes: usize, ptr: *const u8, learn: bool) -> Option<SlotLease> {
        let arrivals = self.find_arrivals(gradient.plan)?;
        if arrivals.is_slot(gradient.param, ptr) {
            return None;
        }
        if learn {
            self.plans.makers.lock().observe(gradient, bytes, ptr as usize);
        }
        arrivals.take_slot(gradient.param)
    }

    /// A gradient was made in its slot but must not be changed there: others see it.
    pub fn lent_in_vain(&self, gradient: Gradient, bytes: usize) {
        self.plans.makers.lock().is_wrong(gradient, bytes);
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
            match &made {
                // On devices, no memory of the core's is lent.
                Ok(reducer) if reducer.arena().is_none() => {}
                Ok(reducer) => self.plans.makers.lock().expect(reducer.params().iter().map(ParamSpec::bytes)),
                // The next gradient tries again.
                Err(_) => drop(self.plans.open.lock().remove(&number)),
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
