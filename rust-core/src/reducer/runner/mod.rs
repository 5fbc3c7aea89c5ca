//! A bucket plan, a window and a communicator at work: runs the steps of a [`StepState`].
//!
//! Threads: autograd's threads call [`Reducer::mark_ready`], which takes one short lock and may queue an operation. The
//! communicator's worker thread runs it and queues the next. The thread that called backward waits in
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

/// Reduces the gradients of one model, step after step, over a communicator of its own. All functions may be called
/// from any thread.
pub struct Reducer {
    communicator: Arc<Communicator>,
    params: Arc<[ParamSpec]>,
    state: Mutex<StepState>,
    changed: Condvar,
    /// Created with the first bucket on a device.
    device_queue: OnceLock<DeviceQueue>,
    listener: OnceLock<Box<dyn Listener>>,
}

/// Receives the events of a step, for callers that cannot wait in [`Reducer::finish`].
pub trait Listener: Send + Sync {
    /// Takes an event; events come in order. Called without a lock, but inside of calls of the reducer, so it must not
    /// call the reducer.
    fn note(&self, event: ReducerEvent);
    /// Called after one or more events; may call the reducer.
    fn wake(&self);
}

/// An event of a step.
#[derive(Debug)]
pub enum ReducerEvent {
    /// The bucket with this index is reduced.
    Reduced(usize),
    /// The step has failed; [`Reducer::abandon`] must end it.
    Failed(Error),
    /// An abandoned step is over: the next one may begin.
    Settled,
}

impl Reducer {
    /// Creates a reducer for `params` over `communicator`, which must have no other user while a backward runs.
    /// Compares the parameters with the other members' and allocates the window. Collective.
    ///
    /// # Errors
    /// [`Error::Mismatch`] naming the parameter and the ranks; [`Error::InvalidArgument`] for invalid options.
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

    /// Sets the listener to the buckets that the core reduces. It can be set once.
    pub fn set_listener(&self, listener: Box<dyn Listener>) {
        assert!(self.listener.set(listener).is_ok(), "a reducer has one listener");
    }

    /// Whether [`Reducer::finish`] needs no exchange with other members after all buckets are reduced.
    pub fn finishes_alone(&self) -> bool {
        let state = self.state.lock();
        state.rebuilt && (!state.options.may_leave_unused() || state.used_always.is_some())
    }

    /// The parameters, in the order of registration.
    pub fn params(&self) -> &[ParamSpec] {
        &self.params
    }

    /// The options in force.
    pub fn options(&self) -> ReducerOptions {
        self.state.lock().options.clone()
    }

    /// Changes the options between backwards, and discards what earlier backwards have taught. Collective.
    ///
    /// # Errors
    /// As [`Reducer::new`]; [`Error::InvalidArgument`] during a backward. After an error nothing has changed.
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

    /// The element type in which a bucket of `dtype` elements is reduced.
    pub(in crate::reducer) fn wire_dtype(&self, dtype: DType) -> DType {
        self.state.lock().options.wire_dtype(dtype)
    }

    /// The communicator of the reducer; see [`Reducer::await_step`].
    pub fn communicator(&self) -> &Arc<Communicator> {
        &self.communicator
    }

    /// The plan in force.
    pub fn plan(&self) -> Arc<BucketPlan> {
        Arc::clone(&self.state.lock().layout.plan)
    }

    /// The number of the plan in force, unique in this process.
    pub fn plan_number(&self) -> u64 {
        self.state.lock().layout.number
    }

    /// Waits until the communicator may run another operation. Call it between steps, in the same place on all members.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] during a backward.
    pub fn await_step(&self) -> Result<()> {
        self.settle().map(drop)
    }

    /// Begins a backward. Without `sync`, gradients accumulate locally. Returns whether the backward is reduced; it is
    /// not in the first of several accumulation steps, either. If not, the caller reports gradients with
    /// [`Reducer::note_local`] only.
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

    /// Waits until an abandoned step has ended.
    fn settle(&self) -> Result<MutexGuard<'_, StepState>> {
        let mut state = self.state.lock();
        loop {
            match &state.active {
                None => return Ok(state),
                // The operation in flight completes, because its waits have deadlines.
                Some(active) if active.abandoned => self.changed.wait(&mut state),
                Some(_) => {
                    return Err(Error::InvalidArgument(
                        "a backward of this model is already under way in this process".to_owned(),
                    ));
                }
            }
        }
    }

    /// Notes a gradient that stays local in this backward.
    pub fn note_local(&self, param: usize) {
        let state = &mut *self.state.lock();
        if state.options.may_leave_unused() {
            state.used[param] = 1;
        }
    }

    /// In a static graph: notes that autograd has accumulated into the gradient of `param`. Returns whether the
    /// gradient is complete. If not, [`Reducer::unused_parameters`] may return it at the end of backward.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if this backward has more parts than the first one.
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

    /// Returns a free slot of `param`; none if tensors still refer to all of them.
    pub fn take_slot(&self, param: usize) -> Option<SlotLease> {
        let state = self.state.lock();
        // An abandoned step may still write to its slots.
        if state.active.as_ref().is_some_and(|active| active.abandoned) {
            return None;
        }
        state.layout.arena.as_ref()?.lease(param)
    }

    /// Starts the predictions for a backward on a thread whose allocator calls [`Reducer::place`].
    pub fn start_placement(&self) {
        self.state.lock().placement.start();
    }

    /// Returns the slot for an allocation of `bytes` bytes in a backward, if it is predicted to become the gradient of
    /// a parameter ([`super::gradient_placement`]). A caller that gets none reports where the tensor lies
    /// ([`Reducer::placed_elsewhere`]).
    pub fn place(&self, bytes: usize) -> Option<SlotLease> {
        let StepState { active, placement, layout, options, .. } = &mut *self.state.lock();
        // An abandoned step may still write to its slots.
        if active.as_ref().is_some_and(|active| active.abandoned) {
            return None;
        }
        // Adjacent slots are not aligned as memory for tensors must be.
        if options.reduction == BucketReduction::ByCaller {
            return None;
        }
        let arena = layout.arena.as_ref()?;
        placement.request(bytes, |param| arena.lease(param).map(|lease| (lease.ptr() as usize, lease)))
    }

    /// Reports where an allocation lies for which [`Reducer::place`] returned no slot.
    pub fn placed_elsewhere(&self, bytes: usize, ptr: *const u8) {
        self.state.lock().placement.placed_elsewhere(bytes, ptr as usize);
    }

    /// Notes that the gradient of `param` was computed at `ptr`, which is not its slot.
    pub fn observe(&self, param: usize, ptr: *const u8) {
        self.state.lock().placement.observe(param, self.params[param].bytes(), ptr as usize);
    }

    /// Marks the gradient of `param` complete at `ptr`: in its slot, or elsewhere, contiguous in the parameter's
    /// layout. Starts the reduction of the buckets that it completes. If the caller reduces buckets
    /// ([`BucketReduction::ByCaller`], [`ReducerOptions::on_device`]), returns them instead. `used` is false if this
    /// backward did not compute the gradient.
    ///
    /// # Errors
    /// The error that ended the step; [`Error::InvalidArgument`] for a second gradient of one parameter.
    ///
    /// # Safety
    /// Until [`Reducer::finish`] or [`Reducer::abandon`] has returned, the bytes at `ptr` are valid and have no other
    /// user.
    pub unsafe fn mark_ready(self: &Arc<Self>, param: usize, ptr: *mut u8, used: bool) -> Result<Range<usize>> {
        let action = {
            let state = &mut *self.state.lock();
            let launch = state.mark_ready(&self.params[param], param, ptr, used)?;
            if state.options.gives_buckets() {
                let refused = state.active.as_ref().is_some_and(|active| active.gate.is_refused());
                return Ok(if refused { 0..0 } else { launch });
            }
            state.queue(launch);
            state.next()
        };
        self.perform(action);
        Ok(0..0)
    }

    /// Notes that the caller has reduced a bucket from [`Reducer::mark_ready`]. Called in plan order.
    pub fn reduced_by_caller(&self) {
        if let Some(active) = &mut self.state.lock().active {
            active.note_reduced();
        }
    }

    /// The memory of the slots; none if it is the caller's. It stays valid while the handle is held.
    pub fn arena(&self) -> Option<Arc<Arena>> {
        self.state.lock().layout.arena.clone()
    }

    fn perform(self: &Arc<Self>, action: ReducerAction) {
        match action {
            ReducerAction::Nothing => {}
            ReducerAction::GiveUp(id, message) => {
                let reducer = Arc::clone(self);
                let own_error = Error::InvalidArgument(message.clone());
                // Whatever the result, the others have received the error or have died; this rank reports its own
                // error.
                self.communicator.fail_next(&message, Box::new(move |_| reducer.answered(id, None, Err(own_error))));
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

    /// The completion of `bucket`, or of giving up.
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

    /// Statistics of the last reduced step.
    pub fn record(&self) -> Record {
        self.state.lock().record.clone()
    }

    /// Parameters without a gradient in this backward so far.
    pub fn missing(&self) -> Vec<usize> {
        self.state.lock().active.as_ref().map_or_else(Vec::new, |active| active.step.missing())
    }
    fn my_rank(&self) -> usize {
        let members = self.communicator.members();
        members.ranks[members.me]
    }
}
