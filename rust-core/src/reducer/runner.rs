//! A plan, a window and a communicator at work: who drives the steps of a [`State`].
//!
//! Threads: autograd threads call [`Reducer::mark_ready`], which takes one short lock and may queue an operation; the
//! communicator's worker thread runs it and queues the next; the thread that called backward waits in
//! [`Reducer::finish`]. No lock is held while an operation is queued or runs.

use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::ballot::Vote;
use super::device_queue::{DeviceBucket, DeviceQueue, HeldBucket, Launched};
use super::fingerprint::{self, Description, view};
use super::history::GradientPart;
use super::state::{Action, PlannedBuckets, Record, State};
use super::{Arena, BucketPlan, Options, ParamSpec, Reduction, SlotLease};
use crate::buffer::{DType, Device, TensorView};
use crate::collectives::{Communicator, ReduceOp, Request};
use crate::device::Context;
use crate::error::{Error, Result};
use crate::trace;
use crate::world::monitor::interrupt_pending;

/// Ctrl-C ends the wait for the end of a step.
const LOOK_FOR_SIGNALS: Duration = Duration::from_millis(50);

/// Reduces the gradients of one model, step after step. See the folder's text.
pub struct Reducer {
    communicator: Arc<Communicator>,
    params: Arc<[ParamSpec]>,
    state: Mutex<State>,
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
    pub fn new(communicator: Arc<Communicator>, params: Vec<ParamSpec>, options: Options) -> Result<Arc<Self>> {
        options.check()?;
        let description = Description { params, options };
        fingerprint::agree(&communicator, &description)?;
        let Description { params, options } = description;
        let layout = PlannedBuckets::new(&communicator, BucketPlan::initial(&params, &options), options.on_device)?;
        tracing::debug!("gradient plan:\n{}", super::plan::describe(&layout.plan, &params));
        Ok(Arc::new(Self {
            state: Mutex::new(State::new(&params, options, layout, communicator.members().size() > 1)),
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
    pub fn options(&self) -> Options {
        self.state.lock().options.clone()
    }

    /// Chooses anew, between backwards; what earlier backwards taught is forgotten. Collective.
    ///
    /// # Errors
    /// As [`Reducer::new`]; [`Error::InvalidArgument`] during a backward. After an error everything is as it was.
    pub fn configure(&self, options: Options) -> Result<()> {
        options.check()?;
        drop(self.settle()?);
        let description = Description { params: self.params.to_vec(), options };
        fingerprint::agree(&self.communicator, &description)?;
        let Description { params, options } = description;
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
    pub(super) fn wire_dtype(&self, dtype: DType) -> DType {
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

    /// Begins a round, of which it is not yet known whether all members take part: gradients may be marked ready, and
    /// nothing is reduced before [`Reducer::release`]. Returns the round's number.
    ///
    /// # Errors
    /// As [`Reducer::begin`].
    pub(super) fn begin_held(&self, vote: Option<Vote>) -> Result<u64> {
        let mut state = self.settle()?;
        state.open(true, vote);
        Ok(state.steps)
    }

    /// All members take part in the round that was held.
    pub(super) fn release(self: &Arc<Self>, round: u64) {
        self.unhold(round, false);
    }

    /// A round that was held does not take place, on all members alike: its gradients stay as they are. It is over for this
    /// member with [`Reducer::abandon`], which tells nobody, since a backward may be in the middle of it.
    pub(super) fn cancel(self: &Arc<Self>, round: u64) {
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
            self.ask_for_end();
        }
    }

    /// The end of a round that began with a vote has failed by name: its caller waits no longer, and gives it up.
    fn call_off(&self, round: u64, error: Error) {
        if let Some(active) = self.state.lock().active.as_mut().filter(|active| active.id == round) {
            active.called_off = Some(error);
            self.changed.notify_all();
        }
    }

    /// Tells the others by name that this member has come to the end of its round, if that began with a vote and takes place.
    fn ask_for_end(self: &Arc<Self>) {
        let (vote, round) = match &mut self.state.lock().active {
            Some(active) if !active.held && !active.refused => (active.vote.take(), active.id),
            _ => return,
        };
        let Some(vote) = vote else { return };
        let reducer = Arc::clone(self);
        if let Err(error) = vote.ask_for_end(move |error| reducer.call_off(round, error)) {
            self.call_off(round, error);
        }
    }

    /// Waits until no abandoned step is left.
    fn settle(&self) -> Result<MutexGuard<'_, State>> {
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
        let State { active, placement, layout, options, .. } = &mut *self.state.lock();
        // What an abandoned step has under way is still written to its slots.
        if active.as_ref().is_some_and(|active| active.abandoned) {
            return None;
        }
        // Slots that lie side by side are not aligned as memory for tensors is.
        if options.reduction == Reduction::ByCaller {
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
    /// ([`Reduction::ByCaller`], [`Options::on_device`]). `used` is false for a stand-in of a gradient that this backward did not make.
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

    /// Packs and reduces a bucket that [`Reducer::mark_ready`] gave, on the device where it is. In plan order. Reductions
    /// run in the stream `communication`, the same in every call; the host does not wait for them.
    ///
    /// # Errors
    /// [`Error::Device`]; what the communicator reports is told by [`Reducer::finish`].
    ///
    /// # Safety
    /// Views and pieces are memory of the device as their types say, from what the bucket's stream has been given so far
    /// until a stream that follows ([`Reducer::follow`]) gets there. `communication` is a stream of that device that
    /// lives as long as the process.
    pub unsafe fn launch(
        self: &Arc<Self>,
        index: usize,
        bucket: &DeviceBucket<'_>,
        communication: usize,
    ) -> Result<()> {
        let device_queue = match self.device_queue.get() {
            Some(device_queue) => device_queue,
            None => {
                let device = bucket.flat.iter().chain(bucket.apart).find_map(|view| match view.device() {
                    Device::Cuda(device) => Some(device),
                    Device::Cpu => None,
                });
                let Some(device) = device else {
                    return Err(Error::Internal("a bucket in CPU memory was to be reduced on a device".to_owned()));
                };
                // SAFETY: the caller's promise.
                let made =
                    unsafe { DeviceQueue::new(self.communicator.clone(), Context::primary(device)?, communication) }?;
                self.device_queue.get_or_init(|| made)
            }
        };
        let (id, is_last) = {
            let state = self.state.lock();
            let Some(active) = &state.active else {
                return Err(Error::Internal("a bucket was launched outside backward".to_owned()));
            };
            (active.id, index + 1 == state.layout.plan.buckets().len())
        };
        let reducer = Arc::clone(self);
        let launched = move |outcome: Result<()>| reducer.launched(id, outcome);
        // SAFETY: the caller's promise.
        unsafe { device_queue.launch(bucket, is_last, Box::new(launched)) }
    }

    /// As [`Reducer::launch`], for gradients that stay where they lie, on `device`: in a stream of the reducer's own.
    /// `landed` is called when the device is done, from a thread of the core, unless this is an error.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// Until `landed` is called, the memory is valid and nobody else touches it. What was done to it before, also by who
    /// had it before, was queued into the bucket's stream, one of the device's.
    pub(super) unsafe fn launch_held(
        self: &Arc<Self>,
        bucket: HeldBucket,
        device: u16,
        landed: Launched,
    ) -> Result<()> {
        let device_queue = match self.device_queue.get() {
            Some(device_queue) => device_queue,
            None => {
                let op = self.options().op();
                let made = DeviceQueue::with_stream(self.communicator.clone(), Context::primary(device)?, op)?;
                self.device_queue.get_or_init(|| made)
            }
        };
        if device_queue.context().device() != device {
            return Err(Error::InvalidArgument(format!(
                "gradients on `cuda:{}` and `cuda:{device}` were to be reduced together",
                device_queue.context().device()
            )));
        }
        let Some(id) = self.state.lock().active.as_ref().map(|active| active.id) else {
            return Err(Error::Internal("a bucket was launched outside backward".to_owned()));
        };
        let reducer = Arc::clone(self);
        let launched = move |outcome: Result<()>| {
            reducer.launched(id, outcome.clone());
            landed(outcome);
        };
        // SAFETY: the caller's promise.
        unsafe { device_queue.launch_held(bucket, Box::new(launched)) }
    }

    fn launched(&self, id: u64, outcome: Result<()>) {
        let state = &mut *self.state.lock();
        let Some(active) = state.active.as_mut().filter(|active| active.id == id) else { return };
        match outcome {
            // When it was queued: the device is not asked.
            Ok(()) => active.note_reduced(),
            Err(error) => active.error = Some(error),
        }
        self.changed.notify_all();
    }

    /// Makes the stream with this handle wait for every reduction that was launched on its device, if there was one.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// It is a stream of the device that buckets are on.
    pub unsafe fn follow(&self, stream: usize) -> Result<()> {
        match self.device_queue.get() {
            // SAFETY: the caller's promise.
            Some(device_queue) => unsafe { device_queue.follow(stream) },
            None => Ok(()),
        }
    }

    fn perform(self: &Arc<Self>, action: Action) {
        match action {
            Action::Nothing => {}
            Action::GiveUp(id, message) => {
                let reducer = Arc::clone(self);
                let told = Error::InvalidArgument(message.clone());
                // Whatever the answer is, the others know or are gone; this rank reports its own reason.
                self.communicator.fail_next(message, Box::new(move |_| reducer.answered(id, None, Err(told))));
            }
            Action::Reduce(id, bucket, layout, offset_bytes, (dtype, op)) => {
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

    /// At the end of a backward: the parameters of [`Reducer::missing`] in the order in which the caller marks them
    /// ready, with the gradient that they have or with a stand-in. `frozen` are those of them that require none by now.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the parameters that should have got a gradient, on every member.
    pub fn unused_parameters(self: &Arc<Self>, frozen: &[usize]) -> Result<Vec<usize>> {
        let (without, order) = {
            let state = self.state.lock();
            let Some(active) = &state.active else { return Ok(Vec::new()) };
            let missing = active.step.missing();
            match &state.history {
                Some(history) if !history.is_learned() => (Vec::new(), history.order()),
                Some(history) => (history.incomplete(&missing), missing),
                None if state.options.find_unused_parameters => (Vec::new(), missing),
                None => {
                    let without = missing.iter().copied().filter(|&param| !self.params[param].delayed).collect();
                    (without, missing)
                }
            }
        };
        if without.is_empty() { Ok(order) } else { Err(self.give_up(self.unused_message(&without, frozen))) }
    }

    /// Ends a backward: waits until every bucket is reduced. Returns which parameters got a gradient on any rank if
    /// they need not get one, and nothing otherwise.
    ///
    /// # Errors
    /// What the communicator reports; of a round that began with a vote, also that others do not come to its end.
    /// [`Reducer::abandon`] follows.
    pub fn finish(self: &Arc<Self>) -> Result<Option<Vec<bool>>> {
        let missing = self.missing();
        if !missing.is_empty() {
            // The caller has not asked for `unused_parameters`: the wait would not end.
            return Err(self.give_up(self.unused_message(&missing, &[])));
        }
        self.ask_for_end();
        let state = &mut self.state.lock();
        let mut interrupted = false;
        let (result, layout, order) = loop {
            let Some(active) = state.active.as_ref().filter(|active| !active.abandoned) else {
                return Err(Error::Internal("a backward ended that had not begun".to_owned()));
            };
            let ended = active.error.clone().map_or_else(
                || (active.reduced == state.layout.plan.buckets().len()).then_some(Ok(())),
                |error| Some(Err(error)),
            );
            if let Some(result) = ended {
                break (result, state.layout.clone(), active.step.observed_order());
            }
            if let Some(error) = &active.called_off {
                // What is under way is settled by `abandon`.
                return Err(error.clone());
            }
            // To look for signals may take the lock of an interpreter: not while others may need this one.
            if self.changed.wait_for(state, LOOK_FOR_SIGNALS).timed_out()
                && MutexGuard::unlocked(state, interrupt_pending)
            {
                interrupted = true;
                break (Ok(()), state.layout.clone(), Vec::new());
            }
        };
        if interrupted {
            MutexGuard::unlocked(state, || self.abandon("it was interrupted", false));
            return Err(Error::Interrupted { during: "the reduction of gradients".to_owned() });
        }
        let communication = state.active.take().map_or(0..0, |active| active.communication);
        result?;
        state.record.order.clone_from(&order);
        state.record.communication_start = communication.start;
        state.record.communication_end = communication.end;
        if let Some(history) = &mut state.history
            && !history.is_learned()
            && history.is_begun()
        {
            history.learn();
        }
        let used_always = state.used_always.clone();
        let ask = state.options.may_leave_unused() && used_always.is_none();
        let mine = ask.then(|| {
            let unknown = vec![0; self.params.len()];
            std::mem::replace(&mut state.used, unknown)
        });
        let (rebuild, is_static) = (!state.rebuilt, state.options.static_graph);
        let used = MutexGuard::unlocked(state, || {
            let used = mine.map(|mine| self.used_anywhere(mine)).transpose()?;
            if rebuild {
                self.rebuild(&layout, order)?;
            }
            Ok::<_, Error>(used.or(used_always))
        })?;
        if is_static {
            state.used_always.clone_from(&used);
        }
        state.record.rebuilt = state.rebuilt;
        state.record.unused_bytes = used
            .iter()
            .flatten()
            .zip(&self.params[..])
            .filter(|(used, _)| !**used)
            .map(|(_, param)| param.bytes())
            .sum();
        Ok(used)
    }

    /// Makes the plan anew for gradients that come in the order of the first member, instead of after the first step. Those that
    /// `order` does not have come last. Between steps; collective.
    ///
    /// # Errors
    /// What the communicator reports.
    pub fn follow_order(&self, mut order: Vec<usize>) -> Result<()> {
        let layout = self.settle()?.layout.clone();
        let mut rest: Vec<bool> = vec![true; self.params.len()];
        order.retain(|&param| rest.get_mut(param).is_some_and(std::mem::take));
        order.extend((0..rest.len()).filter(|&param| rest[param]));
        self.rebuild(&layout, order)
    }

    fn used_anywhere(&self, mut used: Vec<u8>) -> Result<Vec<bool>> {
        let data = view(&mut used)?;
        self.communicator.run(&Request::AllReduce { input: data, output: data, op: ReduceOp::BitOr })?;
        Ok(used.into_iter().map(|used| used != 0).collect())
    }

    /// Makes the plan anew in the order that rank 0 observed (RED-5). Gradients in slots of the old window stay
    /// valid, since their leases keep it; they move when they next become ready.
    fn rebuild(&self, layout: &PlannedBuckets, order: Vec<usize>) -> Result<()> {
        let mut order: Vec<u64> = order.into_iter().map(|param| param as u64).collect();
        // SAFETY: `order` lives, untouched, until `run`, which blocks, has returned.
        let data = unsafe { TensorView::new(order.as_mut_ptr().cast(), order.len(), DType::Int64, Device::Cpu, 0) }?;
        self.communicator.run(&Request::Broadcast { data, root: 0 })?;
        let order: Vec<usize> = order.into_iter().map(|param| param as usize).collect();
        let plan = BucketPlan::new(&self.params, &order, &self.options());
        let layout = if plan == *layout.plan {
            layout.clone()
        } else {
            tracing::debug!("gradient plan in observed order:\n{}", super::plan::describe(&plan, &self.params));
            PlannedBuckets::new(&self.communicator, plan, self.options().on_device)?
        };
        let state = &mut *self.state.lock();
        state.layout = layout;
        state.rebuilt = true;
        Ok(())
    }

    fn unused_message(&self, missing: &[usize], frozen: &[usize]) -> String {
        const NAMED: usize = 20;
        let mut names: Vec<String> =
            missing.iter().take(NAMED).map(|&param| format!("`{}`", self.params[param].name)).collect();
        if missing.len() > NAMED {
            names.push(format!("{} more", missing.len() - NAMED));
        }
        let cause = if missing.iter().all(|param| frozen.contains(param)) {
            "they were frozen (`requires_grad_(False)`) after DistributedDataParallel wrapped them: freeze before \
             wrapping, wrap again, or pass `find_unused_parameters=True`"
        } else if self.options().static_graph {
            "the first backward gave them one, so the graph is not static: pass `static_graph=False` and, if the loss \
             does not always depend on them, `find_unused_parameters=True` to DistributedDataParallel"
        } else {
            "if the loss does not depend on them, pass `find_unused_parameters=True` to DistributedDataParallel or \
             freeze them with `requires_grad_(False)` before wrapping"
        };
        format!(
            "{} of {} parameters got no gradient in this backward on rank {}: {}; {cause}",
            missing.len(),
            self.params.len(),
            self.my_rank(),
            names.join(", ")
        )
    }

    fn my_rank(&self) -> usize {
        let members = self.communicator.members();
        members.ranks[members.me]
    }

    /// Ends the step with an error that the other members get too, and waits until they have it. Returns the error.
    fn give_up(self: &Arc<Self>, message: String) -> Error {
        let error = Error::InvalidArgument(message.clone());
        self.abandon(&message, false);
        let mut state = self.state.lock();
        while state.active.as_ref().is_some_and(|active| active.abandoned) {
            self.changed.wait(&mut state);
        }
        error
    }

    /// Ends a backward that cannot go on, without waiting; the other members' step ends with an error that carries
    /// `message`. `more_follows` says whether the caller would have run more on the communicator after
    /// [`Reducer::finish`], as the others will: it counts also after a `finish` that has abandoned the backward by
    /// itself. Otherwise this does nothing if no backward is under way.
    pub fn abandon(self: &Arc<Self>, message: &str, more_follows: bool) {
        // The others do.
        self.ask_for_end();
        if let Some(device_queue) = self.device_queue.get() {
            // Buckets may be gone as soon as this function returns.
            device_queue.settle();
        }
        let mut settled = false;
        let action = 'decided: {
            let state = &mut *self.state.lock();
            let Some(active) = state.active.as_mut() else {
                let untold = state.untold.take().filter(|_| more_follows);
                break 'decided untold.map_or(Action::Nothing, |(id, message)| Action::GiveUp(id, message));
            };
            if active.abandoned {
                active.more_follows |= more_follows;
                return;
            }
            if active.refused {
                state.active = None;
                self.changed.notify_all();
                settled = true;
                break 'decided Action::Nothing;
            }
            active.abandoned = true;
            // Their gradients may be gone as soon as this function returns.
            active.queue.clear();
            active.more_follows |= more_follows;
            let own = state.options.on_device && state.options.reduction != Reduction::ByCaller;
            if own && active.reduced < state.layout.plan.buckets().len() && self.communicator.members().size() > 1 {
                // RED-7.
                self.communicator.end_devices(Error::InvalidArgument(format!(
                    "an earlier backward of rank {} ended before its gradients were reduced ({message}), so the ranks' \
                     reductions no longer fit together: wrap the model in a new DistributedDataParallel on all of them, or, with TensorFlow, start the job \
                     again",
                    self.my_rank()
                )));
            }
            // After an error the others' steps have ended already: `next` tells them nothing.
            if self.communicator.members().size() > 1 {
                active.giving_up = Some(message.to_owned());
            }
            let action = state.next();
            settled = state.end_if_over(&action);
            self.changed.notify_all();
            action
        };
        if let (true, Some(listener)) = (settled, self.listener.get()) {
            listener.note(ReducerEvent::Settled);
        }
        self.perform(action);
    }
}
