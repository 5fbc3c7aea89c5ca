//! The reducers of gradients that graphs compute. They are created when the first gradient arrives, and end with the
//! session.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::Session;
use super::groups::WORLD;
use crate::error::{Error, Result};
use crate::negotiation::{OtherWaits, WaitEnd};
use crate::reducer::arrival::{ArrivalDriver, ReadyGradient};
use crate::reducer::fingerprint::{self, ReducerDescription};
use crate::reducer::op_placement::{Gradient, OpPlacement};
use crate::reducer::{ParamSpec, Reducer, SlotLease, spec};

/// A step counts as waiting after this time without an event.
const WAITS_AFTER: Duration = Duration::from_millis(500);
/// A step on an idle device that has waited this long waits for other ranks, even if the processor is busy.
const IDLE_DEVICE_WAITS_AFTER: Duration = Duration::from_secs(8);
/// The time for a rank to tell which gradients it waits for, once ranks are known to wait for different ones.
const REPORT_TIME: Duration = Duration::from_secs(2);

/// The reducers of a session, by the number of their spec.
#[derive(Default)]
pub struct GraphReducers {
    open: Mutex<HashMap<usize, Arc<ArrivalDriver>>>,
    creation_queue: Mutex<CreationQueue>,
    op_placement: Mutex<OpPlacement>,
}

/// Reducers to be created, one after the other.
#[derive(Default)]
struct CreationQueue {
    waiting: VecDeque<(usize, Arc<ArrivalDriver>)>,
    /// Whether a thread works on the queue.
    is_open: bool,
    /// How often all reducers were ended. A thread stops when this has changed.
    ended: u64,
}

/// Reports waiting steps to the negotiation, for its stall detection.
pub struct PendingSteps(Weak<Session>);

impl PendingSteps {
    pub fn of(session: &Arc<Session>) -> Self {
        Self(Arc::downgrade(session))
    }

    /// The steps of reducers of all ranks. Steps of some ranks may wait while others wait for something else, without a
    /// deadlock.
    fn of_all_ranks(&self) -> Vec<Arc<ArrivalDriver>> {
        let Some(session) = self.0.upgrade() else { return Vec::new() };
        let is_for_all = |number: usize| spec::get(number).is_ok_and(|spec| spec.ranks.is_none());
        let open: Vec<_> =
            session.graph_reducers.open.lock().iter().map(|(number, own)| (*number, Arc::clone(own))).collect();
        open.into_iter().filter(|(number, _)| is_for_all(*number)).map(|(_, arrivals)| arrivals).collect()
    }
}

impl OtherWaits for PendingSteps {
    fn waits(&self) -> Vec<String> {
        let mut waits: Vec<_> = self.of_all_ranks().iter().filter_map(|arrivals| arrivals.waits(WAITS_AFTER)).collect();
        waits.sort();
        waits
    }

    fn is_at_rest(&self) -> bool {
        let on_device = |arrivals: &ArrivalDriver| arrivals.reducer().is_some_and(|reducer| reducer.is_on_device());
        self.of_all_ranks()
            .iter()
            .any(|arrivals| on_device(arrivals) && arrivals.waits(IDLE_DEVICE_WAITS_AFTER).is_some())
    }

    fn end(&self, end: WaitEnd) {
        if let Some(session) = self.0.upgrade() {
            session.end_reducers(end);
        }
    }
}

impl GraphReducers {
    pub fn close(&self) {
        let open = std::mem::take(&mut *self.open.lock());
        // Dropped without the lock, because this completes waiting gradients.
        drop(open);
    }
}

impl Session {
    /// The driver of a spec's gradients, if gradients have arrived already.
    pub fn find_arrivals(&self, number: usize) -> Option<Arc<ArrivalDriver>> {
        self.graph_reducers.open.lock().get(&number).cloned()
    }

    /// Takes a gradient for the reducer of a spec. The first gradient starts the creation of all reducers of its graph
    /// in a thread of the core, which is collective; this thread does not wait.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown spec. The gradient's owner is not called then.
    ///
    /// # Safety
    /// See [`ArrivalDriver::arrive`].
    pub unsafe fn arrive(self: &Arc<Self>, number: usize, arrival: ReadyGradient) -> Result<()> {
        let arrivals = match self.find_arrivals(number) {
            Some(arrivals) => arrivals,
            None => self.create_reducers(number)?,
        };
        self.replicas().begin_step_of_plan(number, arrival.execution);
        // SAFETY: the caller's promise.
        unsafe { arrivals.arrive(arrival) };
        Ok(())
    }

    /// Returns the slot for an allocation of `bytes` bytes by operation `op` of a graph, if it is predicted to become a
    /// gradient ([`crate::reducer::op_placement`]). A caller that gets none reports where the tensor lies
    /// ([`Session::placed_elsewhere`]).
    pub fn place(&self, bytes: usize, op: usize) -> Option<SlotLease> {
        let Gradient { plan, param } = self.graph_reducers.op_placement.lock().request(bytes, op)?;
        self.find_arrivals(plan)?.take_slot(param)
    }

    /// Reports where an allocation lies for which [`Session::place`] returned no slot.
    pub fn placed_elsewhere(&self, bytes: usize, op: usize, ptr: *const u8) {
        self.graph_reducers.op_placement.lock().placed_elsewhere(bytes, op, ptr as usize);
    }

    /// Returns a free slot for a gradient that was computed at `ptr`, unless it lies in a slot already. `learn` says
    /// that the operation which allocated it may get the slot the next time.
    pub fn take_slot(&self, gradient: Gradient, bytes: usize, ptr: *const u8, learn: bool) -> Option<SlotLease> {
        let arrivals = self.find_arrivals(gradient.plan)?;
        if arrivals.is_slot(gradient.param, ptr) {
            return None;
        }
        if learn {
            self.graph_reducers.op_placement.lock().observe(gradient, bytes, ptr as usize);
        }
        arrivals.take_slot(gradient.param)
    }

    /// Reports that a gradient was allocated in its slot but must not be changed there, because others hold it.
    pub fn placement_was_unused(&self, gradient: Gradient, bytes: usize) {
        self.graph_reducers.op_placement.lock().reject(gradient, bytes);
    }

    fn create_reducers(self: &Arc<Self>, number: usize) -> Result<Arc<ArrivalDriver>> {
        spec::get(number)?;
        let mut open = self.graph_reducers.open.lock();
        if let Some(arrivals) = open.get(&number) {
            return Ok(Arc::clone(arrivals));
        }
        let CreationQueue { waiting, is_open, ended } = &mut *self.graph_reducers.creation_queue.lock();
        for number in spec::created_with(number) {
            let spec = spec::get(number)?;
            open.entry(number).or_insert_with(|| {
                let arrivals = ArrivalDriver::new(&spec.description);
                waiting.push_back((number, Arc::clone(&arrivals)));
                arrivals
            });
        }
        if !std::mem::replace(is_open, true) {
            let (session, ended) = (Arc::clone(self), *ended);
            let make = move || session.run_queue(ended);
            let spawned = std::thread::Builder::new().name("smd-reducers".to_owned()).spawn(make);
            if let Err(source) = spawned {
                *is_open = false;
                for (number, _) in waiting.drain(..) {
                    open.remove(&number);
                }
                return Err(Error::io("starting a thread", source));
            }
        }
        Ok(Arc::clone(&open[&number]))
    }

    /// Ends all steps, because the ranks wait for different ones. The next gradients create new reducers on every rank,
    /// since no rank knows which of the old ones the others still have.
    fn end_reducers(self: Arc<Self>, end: WaitEnd) {
        let open: Vec<(usize, Arc<ArrivalDriver>)> = {
            let mut open = self.graph_reducers.open.lock();
            let creation_queue = &mut *self.graph_reducers.creation_queue.lock();
            *creation_queue = CreationQueue { ended: creation_queue.ended + 1, ..CreationQueue::default() };
            self.groups.restart_graph_groups(end.number);
            open.drain().collect()
        };
        let mismatch = |detail| Error::Mismatch { during: "the reduction of gradients".to_owned(), detail };
        let all: Vec<Arc<ArrivalDriver>> = open.iter().map(|(_, arrivals)| Arc::clone(arrivals)).collect();
        let close = move |session: &Self, error: &Error| {
            for arrivals in all {
                arrivals.end(error);
                if let Some(reducer) = arrivals.reducer() {
                    // Ends the group's operations. The group may be gone already.
                    let _ = session.remove_group(reducer.communicator().id());
                }
            }
        };
        let waits = open.iter().filter(|(_, arrivals)| arrivals.waits(WAITS_AFTER).is_some());
        let own = waits.map(|(number, _)| *number).min();
        let session = Arc::clone(&self);
        let detail = end.detail.clone();
        let explain = {
            let close = close.clone();
            move || {
                let detail = match session.describe_difference(&end, own) {
                    Some(difference) => format!("{difference}; {}", end.detail),
                    None => end.detail,
                };
                close(&session, &mismatch(detail));
            }
        };
        if std::thread::Builder::new().name("smd-reducers".to_owned()).spawn(explain).is_err() {
            close(&self, &mismatch(detail));
        }
    }

    /// Describes the difference between the gradients that two of the ranks wait for. `own` is this rank's spec.
    fn describe_difference(&self, end: &WaitEnd, own: Option<usize>) -> Option<String> {
        let &first = end.ranks.first()?;
        let &second = end.ranks.iter().find(|&&rank| rank != first)?;
        let store = self.store();
        let key = |rank: usize| format!("steps/{}/{rank}", end.number);
        if let Some(own) = own
            && (first == self.rank() || second == self.rank())
        {
            store.set(&key(self.rank()), &postcard::to_stdvec(&spec::get(own).ok()?.description).ok()?).ok()?;
        }
        let of = |rank: usize| -> Option<ReducerDescription> {
            postcard::from_bytes(&store.get(&key(rank), &[rank], REPORT_TIME).ok()?).ok()
        };
        fingerprint::difference(&of(first)?, first, &of(second)?, second)
    }

    fn run_queue(self: &Arc<Self>, ended: u64) {
        loop {
            let (number, arrivals, ranks, group) = {
                let creation_queue = &mut *self.graph_reducers.creation_queue.lock();
                if creation_queue.ended != ended {
                    return;
                }
                let Some((number, arrivals)) = creation_queue.waiting.pop_front() else {
                    return creation_queue.is_open = false;
                };
                let named = spec::get(number).ok().and_then(|spec| spec.ranks.clone());
                let ranks = named.unwrap_or_else(|| (0..self.size()).collect());
                // Under the lock, because `end_reducers` restarts the count of groups.
                let group = self.next_graph_group(&ranks);
                (number, arrivals, ranks, group)
            };
            let made = self.create_reducer(number, group, &ranks);
            if self.graph_reducers.creation_queue.lock().ended != ended {
                // Its gradients were completed with an error by `end_reducers`.
                if let Ok(reducer) = made {
                    let _ = self.remove_group(reducer.communicator().id());
                }
                return;
            }
            if made.is_ok() && self.size() > 1 && ranks.len() == self.size() {
                // The negotiator detects ranks that wait for different steps. Its creation does not wait for other
                // ranks. Without one, gradients are reduced all the same.
                let _ = self.negotiator(WORLD);
            }
            match &made {
                // On devices, gradients are not placed in memory of the core.
                Ok(reducer) if reducer.arena().is_none() => {}
                Ok(reducer) => {
                    self.graph_reducers.op_placement.lock().expect(reducer.params().iter().map(ParamSpec::bytes))
                }
                // The next gradient tries again.
                Err(_) => drop(self.graph_reducers.open.lock().remove(&number)),
            }
            arrivals.made(made);
        }
    }

    fn create_reducer(&self, number: usize, group: u64, ranks: &[usize]) -> Result<Arc<Reducer>> {
        let description = &spec::get(number)?.description;
        let own = self.make_graph_group(group, ranks)?;
        Reducer::new(Arc::clone(&own), description.params.clone(), description.options.clone()).inspect_err(|_| {
            // The first error is reported; an error of the clean-up is ignored.
            let _ = self.remove_group(own.id());
        })
    }
}
