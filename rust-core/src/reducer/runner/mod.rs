//! A plan, a window and a communicator at work: who drives the steps of a [`StepState`].
//!
//! Threads: autograd threads call [`Reducer::mark_ready`], which takes one short lock and may queue an operation; the
//! communicator's worker thread runs it and queues the next; the thread that called backward waits in
//! [`Reducer::finish`]. No lock is held while an operation is queued or runs.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::device_queue::DeviceQueue;
use super::fingerprint::{self, ReducerDescription};
use super::history::GradientPart;
use super::state::{PlannedBuckets, Record, ReducerAction, StepState};
use super::{Arena, BucketPlan, BucketReduction, ParamSpec, ReducerOptions, SlotLease};
use crate::buffer::DType;
use crate::collectives::{Communicator, Request};
use crate::error::{Error, Result};
use crate::trace;

mod device;
mod end;
mod rounds;

/// Reduces the gradients of one model, step after step, over a communicator of its own. All functions may be called from any thread.
pub struct Reducer {
    communicator: Arc<Communicator>,
    params: Arc<[ParamSpec]>,
    state: Mutex<StepState>,
    changed: Condvar,
    /// Made with the first bucket on a device.
    device_queue: OnceLock<DeviceQueue>,
    listener: OnceLock<Box<dyn Listener>>,
}

/// Hears of a step while it is under way, for whoever cannot wait in [`Reducer::finish`].
pub trait Listener: Send + Sync {
    /// Takes a note, in the order in which things happened. Called with no lock held, but inside calls of the
    /// reducer, so that it must not call the reducer.
    fn note(&self, event: ReducerEvent);
    /// Follows one or more notes; may call the reducer.
    fn wake(&self);
}

/// What a [`Listener`] hears.
#[derive(Debug)]
pub enum ReducerEvent {
    /// The bucket with this index.
    Reduced(usize),
    /// The step failed; [`Reducer::abandon`] ends it.
    Failed(Error),
    /// A step that was abandoned is over: the next one may begin.
    Settled,
}

impl Reducer {
    /// A reducer for `params` over `communicator`, which nothing else may use while a backward runs. Collective:
    /// compares the parameters with the other members' and makes the window.
    ///
    /// # Errors
    /// [`Error::Mismatch`] naming the parameter and the ranks; [`Error::InvalidArgument`] for bad options.
    pub fn new(communicator: Arc<Communicator>, params: Vec<ParamSpec>, options: ReducerOptions) -> Result<Arc<Self>> {
        options.check()?;
        let description = ReducerDescription { params, options };
        fingerprint::agree(&communicator, &description)?;
        let ReducerDescription { params, options } = description;
        let layout = PlannedBuckets::new(&communicator, BucketPlan::initial(&params, &options), options.on_device)?;
        tracing::debug!("gradient plan:\n{}", super::plan::describe(&layout.plan, &params));
        Ok(Arc::new(Self {
            state: Mutex::new(StepState::new(&params, options, layout, communicator.members().size() > 1)),
            communicator,
            params: params.into(),
            changed: Condvar::new(),
            device_queue: OnceLock::new(),
            listener: OnceLock::new(),
        }))
    }

    /// From now on `listener` hears of buckets that the core reduces. One reducer has one listener.
    pub fn set_listener(&self, listener: Box<dyn Listener>) {
        assert!(self.listener.set(listener).is_ok(), "a reducer has one listener");
    }

    /// Whether [`Reducer::finish`] has nothing to do with other members any more, once all buckets are reduced.
    pub fn finishes_alone(&self) -> bool {
        let state = self.state.lock();
        state.rebuilt && (!state.options.may_leave_unused() || state.used_always.is_some())
    }

    /// The parameters, in the order of registration.
    pub fn params(&self) -> &[ParamSpec] {
        &self.params
    }

    /// What was chosen.
    pub fn options(&self) -> ReducerOptions {
        self.state.lock().options.clone()
    }

    /// Chooses anew, between backwards; what earlier backwards taught is forgotten. Collective.
    ///
    /// # Errors
    /// As [`Reducer::new`]; [`Error::InvalidArgument`] during a backward. After an error everything is as it was.
    pub fn configure(&self, options: ReducerOptions) -> Result<()> {
        options.check()?;
        drop(self.settle()?);
        let description = ReducerDescription { params: self.params.to_vec(), options };
        fingerprint::agree(&self.communicator, &description)?;
        let ReducerDescription { params, options } = description;
        let layout =
            PlannedBuckets::new(&self.communicator, BucketPlan::initial(&params, &options), options.on_device)?;
        self.state.lock().configure(options, layout);
        Ok(())
    }

    /// Whether gradients are on a CUDA device.
    pub fn is_on_device(&self) -> bool {
        self.state.lock().options.on_device
    }

    /// What a bucket of `dtype` values travels as.
    pub(in crate::reducer) fn wire_dtype(&self, dtype: DType) -> DType {
        self.state.lock().options.wire_dtype(dtype)
    }

    /// The communicator; see [`Reducer::run`].
    pub fn communicator(&self) -> &Arc<Communicator> {
        &self.communicator
    }

    /// The plan in force, for messages and tests.
    pub fn plan(&self) -> Arc<BucketPlan> {
        Arc::clone(&self.state.lock().layout.plan)
    }

    /// Tells the plan in force from every other one of this process.
    pub fn plan_number(&self) -> u64 {
        self.state.lock().layout.number
    }

    /// Returns when the communicator may run another operation, between steps and in order with them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] during a backward.
    pub fn await_step(&self) -> Result<()> {
        self.settle().map(drop)
    }

    /// Begins a backward that is to be reduced, or, without `sync`, one whose gradients accumulate locally. Returns
    /// whether it is reduced, which is not so in the first of several accumulation steps either; if not,
    /// [`Reducer::note_local`] is all that the caller says about its gradients.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if another backward is under way.
    pub fn begin(&self, sync: bool) -> Result<bool> {
        if !sync {
            return Ok(false);
        }
        let mut state = self.settle()?;
        state.accumulated += 1;
        if state.accumulated < state.options.accumulation_steps {
            return Ok(false);
        }
        state.accumulated = 0;
        state.open(false, None);
        Ok(true)
    }

    /// Waits until no abandoned step is left.
    fn settle(&self) -> Result<MutexGuard<'_, StepState>> {
        let mut state = self.state.lock();
        loop {
            match &state.active {
                None => return Ok(state),
                // The communicator's answer comes: its waits have deadlines.
                Some(active) if active.abandoned => self.changed.wait(&mut state),
                Some(_) => {
                    return Err(Error::InvalidArgument(
                        "a backward of this model is already under way in this process".to_owned(),
                    ));
                }
            }
        }
    }

    /// Takes note of a gradient that stays local in this backward.
    pub fn note_local(&self, param: usize) {
        let state = &mut *self.state.lock();
        if state.options.may_leave_unused() {
            state.used[param] = 1;
        }
    }

    /// In a static graph: takes note that autograd has accumulated into the gradient of `param`. Returns whether the
    /// gradient is complete; if not, [`Reducer::unused_parameters`] may ask for it at the end of backward.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if this backward does more than the first one did.
    pub fn accumulated(&self, param: usize) -> Result<bool> {
        let state = &mut *self.state.lock();
        match state.history.as_mut().map_or(GradientPart::Last, |history| history.accumulated(param)) {
            GradientPart::Last => Ok(true),
            GradientPart::NotLast => Ok(false),
            GradientPart::TooMany(parts) => Err(Error::InvalidArgument(format!(
                "parameter `{}` got gradient number {} in a backward whose first run gave it {parts}: the graph is not \
                 static; pass `static_graph=False` to DistributedDataParallel",
                self.params[param].name,
                parts + 1
            ))),
        }
    }

    /// Whether a slot of `param` starts at `ptr`.
    pub fn is_slot(&self, param: usize, ptr: *const u8) -> bool {
        self.state.lock().layout.arena.as_ref().is_some_and(|arena| arena.copy_at(param, ptr).is_some())
    }

    /// Takes a slot of `param`, unless tensors still refer to all of them.
    pub fn take_slot(&self, param: usize) -> Option<SlotLease> {
        let state = self.state.lock();
        // What an abandoned step has under way is still written to its slots.
        if state.active.as_ref().is_some_and(|active| active.abandoned) {
            return None;
        }
        state.layout.arena.as_ref()?.lease(param)
    }

    /// A backward begins on a thread whose allocator calls [`Reducer::place`].
    pub fn start_placement(&self) {
        self.state.lock().placement.start();
    }

    /// Returns the slot for an allocation of `bytes` bytes in a backward, if it is predicted to become the gradient of a
    /// parameter ([`super::gradient_placement`]). A caller that gets none reports where the tensor lies
    /// ([`Reducer::placed_elsewhere`]).
    pub fn place(&self, bytes: usize) -> Option<SlotLease> {
        let StepState { active, placement, layout, options, .. } = &mut *self.state.lock();
        // What an abandoned step has under way is still written to its slots.
        if active.as_ref().is_some_and(|active| active.abandoned) {
            return None;
        }
        // Slots that lie side by side are not aligned as memory for tensors is.
        if options.reduction == BucketReduction::ByCaller {
            return None;
        }
        let arena = layout.arena.as_ref()?;
        placement.request(bytes, |param| arena.lease(param).map(|lease| (lease.ptr() as usize, lease)))
    }

    /// See [`Reducer::place`].
    pub fn placed_elsewhere(&self, bytes: usize, ptr: *const u8) {
        self.state.lock().placement.placed_elsewhere(bytes, ptr as usize);
    }

    /// Takes note that the gradient of `param` was made at `ptr`, which is not its slot.
    pub fn observe(&self, param: usize, ptr: *const u8) {
        self.state.lock().placement.observe(param, self.params[param].bytes(), ptr as usize);
    }

    /// Takes note that the gradient of `param` is complete at `ptr`: in its slot, or elsewhere, contiguous in the
    /// parameter's layout. Starts the reduction of buckets that it completes, or returns them if the caller does
    /// ([`BucketReduction::ByCaller`], [`ReducerOptions::on_device`]). `used` is false for a stand-in of a gradient that this backward did not make.
    ///
    /// # Errors
    /// What ended the step already; [`Error::InvalidArgument`] for a second gradient of one parameter.
    ///
    /// # Safety
    /// From this call until [`Reducer::finish`] or [`Reducer::abandon`] has returned, the bytes at `ptr` are valid, and
    /// nobody else touches them.
    pub unsafe fn mark_ready(self: &Arc<Self>, param: usize, ptr: *mut u8, used: bool) -> Result<Range<usize>> {
        let action = {
            let state = &mut *self.state.lock();
            let launch = state.mark_ready(&self.params[param], param, ptr, used)?;
            if state.options.gives_buckets() {
                return Ok(launch);
            }
            state.queue(launch);
            state.next()
        };
        self.perform(action);
        Ok(0..0)
    }

    /// The caller has reduced a bucket that [`Reducer::mark_ready`] gave it. In plan order.
    pub fn reduced_by_caller(&self) {
        if let Some(active) = &mut self.state.lock().active {
            active.note_reduced();
        }
    }

    /// The memory that slots lie in now, if it is the core's; stays valid while the handle is held.
    pub fn arena(&self) -> Option<Arc<Arena>> {
        self.state.lock().layout.arena.clone()
    }

    fn perform(self: &Arc<Self>, action: ReducerAction) {
        match action {
            ReducerAction::Nothing => {}
            ReducerAction::GiveUp(id, message) => {
                let reducer = Arc::clone(self);
                let told = Error::InvalidArgument(message.clone());
                // Whatever the answer is, the others know or are gone; this rank reports its own reason.
                self.communicator.fail_next(message, Box::new(move |_| reducer.answered(id, None, Err(told))));
            }
            ReducerAction::Reduce(id, bucket, layout, offset_bytes, (dtype, op)) => {
                let planned = &layout.plan.buckets()[bucket];
                if planned.elems() == 0 || self.communicator.members().size() == 1 {
                    return self.answered(id, Some(bucket), Ok(()));
                }
                let request = Request::AllReduceWindow {
                    window: Arc::clone(layout.arena().window()),
                    offset_bytes,
                    elems: planned.elems(),
                    dtype,
                    op,
                };
                let reducer = Arc::clone(self);
                let done = move |result: Result<_>| reducer.answered(id, Some(bucket), result.map(drop));
                self.communicator.submit(request, Box::new(done));
            }
        }
    }

    /// The communicator has done its part for `bucket`, or for giving up.
    fn answered(self: &Arc<Self>, id: u64, bucket: Option<usize>, result: Result<()>) {
        let event = match (&result, bucket) {
            (Ok(()), Some(bucket)) => Some(ReducerEvent::Reduced(bucket)),
            (Ok(()), None) => None,
            (Err(error), _) => Some(ReducerEvent::Failed(error.clone())),
        };
        let (action, settled) = {
            let state = &mut *self.state.lock();
            if !state.take_answer(id, bucket, result) {
                return;
            }
            if let (Some(bucket), true) = (bucket, trace::enabled()) {
                state.trace(bucket, self.communicator.id());
            }
            let action = state.next();
            let settled = state.end_if_over(&action);
            self.changed.notify_all();
            (action, settled)
        };
        let listener = self.listener.get();
        if let Some(listener) = listener {
            event.into_iter().for_each(|event| listener.note(event));
            if settled {
                listener.note(ReducerEvent::Settled);
            }
        }
        self.perform(action);
        if let Some(listener) = listener {
            listener.wake();
        }
    }

    /// What the last step that was reduced did.
    pub fn record(&self) -> Record {
        self.state.lock().record.clone()
    }

    /// Parameters that have no gradient in this backward so far.
    pub fn missing(&self) -> Vec<usize> {
        self.state.lock().active.as_ref().map_or_else(Vec::new, |active| active.step.missing())
    }
    fn my_rank(&self) -> usize {
        let members = self.communicator.members();
        members.ranks[members.me]
    }
}
