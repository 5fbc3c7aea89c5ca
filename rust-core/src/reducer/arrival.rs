//! Drives a reducer by the arrival of gradients, for frameworks without a call that begins or ends a backward and
//! without a thread that could wait.
//!
//! ```text
//! operation of a graph --arrive--> slot --> bucket full --> all-reduce in place --> GradientOwner::reduced --> the operation ends
//! ```
//!
//! - ARR-1: a step begins with its first gradient and ends with its last bucket. A gradient of a later step waits, and
//!   so does one that arrives before the reducer has been made.
//! - ARR-2: every gradient is answered exactly once, reduced or with an error.
//! - ARR-3: events go into one queue. Whichever thread adds an event handles the queue in order, unless another thread
//!   is doing so. No thread waits for the lock, so an event may be added from within a handler.
//! - ARR-4: a step that cannot continue is abandoned (RED-4). Its slots stay in use until no operation needs them any
//!   more, and its later gradients get the error that ended it.
//! - ARR-5: gradients on a CUDA device are reduced in place, small ones through memory that their owner allocates. They
//!   are answered when the device has finished their bucket, also in an abandoned step.
//! - ARR-6: after a while, an incomplete step is reported ([`ArrivalDriver::waits`]), since ranks whose steps differ
//!   would wait forever. On a device, reductions run in a stream of their own, and the stream that computes gradients
//!   never waits for them. No further gradient is coming when that stream is idle and so is the process.
//!   After a longer time the stream alone counts, because device libraries keep a process busy by polling.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::device_queue::{HeldBucket, PackedGradients};
use super::fingerprint::{self, ReducerDescription};
use super::{BucketPlan, Listener, Reducer, ReducerEvent, SlotLease};
use crate::buffer::{Device, TensorView};
use crate::device::driver::relaxed;
use crate::device::pack::PackedPiece;
use crate::device::{Context, Stream};
use crate::error::{Error, Result};

/// Identifies one execution of a graph. All gradients of a step have the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Execution {
    /// The framework's number of the step.
    pub step: i64,
    /// The frame of a loop within it.
    pub frame: u64,
    /// The iteration of that loop.
    pub iteration: i64,
}

/// A framework's operation that submitted one or more gradients and gets them back.
pub trait GradientOwner: Send + Sync {
    /// Receives the reduced gradient that it submitted as `position`: in the slot that `lease` holds, or in place.
    fn reduced(&self, position: usize, result: Result<Option<SlotLease>>);
    /// Allocates `bytes` bytes on the device of the gradient `position`, to be kept until that gradient is answered.
    /// Earlier uses of the memory must have been queued into the gradient's stream.
    ///
    /// # Errors
    /// The allocation fails.
    fn allocate(&self, position: usize, bytes: usize) -> Result<*mut u8>;
    /// Called when the step of its gradients is about to end without error: the execution need not report its end.
    fn release(&self);
}

/// A gradient that has been computed.
pub struct ReadyGradient {
    /// Index of the parameter.
    pub param: usize,
    /// Memory, and the stream that computed it.
    pub data: TensorView,
    /// The slot that it lies in, if any.
    pub lease: Option<SlotLease>,
    /// The execution that computed it.
    pub execution: Execution,
    /// The operation that submitted it.
    pub owner: Arc<dyn GradientOwner>,
    /// Position among the owner's gradients.
    pub position: usize,
}

/// Drives the steps of one reducer by the arrival of gradients.
pub struct ArrivalDriver {
    /// The owner of the gradients, for messages; the same text on all ranks.
    what: String,
    reducer: OnceLock<Arc<Reducer>>,
    /// Time of the last event.
    last: Mutex<Instant>,
    events: Mutex<VecDeque<ArrivalEvent>>,
    state: Mutex<ArrivalState>,
}

enum ArrivalEvent {
    Made(Result<Arc<Reducer>>),
    Arrived(ReadyGradient),
    /// An execution ends before its step has ended.
    Ended(Execution),
    /// The ranks disagree on the execution that a step belongs to.
    Diverged(Error),
    Reducer(ReducerEvent),
    /// The device has finished the bucket with this index, or could not start it.
    Completed(usize, Result<()>),
    /// The result of [`Reducer::finish`].
    Finished(Result<()>),
}

struct ArrivalState {
    reducer: Option<Arc<Reducer>>,
    phase: StepPhase,
    /// Gradients that cannot be reduced yet, in order of arrival.
    waiting: VecDeque<ReadyGradient>,
    /// The last step that ended with an error.
    failed: Option<FailedStep>,
}

enum StepPhase {
    /// The reducer is being made.
    Making,
    /// The reducer could not be made.
    Broken(Error),
    Idle,
    Open(OpenStep),
    /// All buckets are reduced, and the ranks compute a new plan (RED-5).
    Finishing {
        owners: Vec<Arc<dyn GradientOwner>>,
        answers: Vec<OwnerReply>,
    },
    /// The communicator may still use these slots (ARR-4).
    Abandoned {
        _leases: Vec<SlotLease>,
        /// Buckets that the device may still work on, with their gradients (ARR-5).
        in_flight: Vec<(usize, Vec<ReadyGradient>)>,
        settled: bool,
    },
}

struct OpenStep {
    execution: Execution,
    plan: Arc<BucketPlan>,
    /// By parameter: whether its gradient has arrived.
    arrived: Vec<bool>,
    /// By parameter: the gradient that has not been answered yet.
    pending: Vec<Option<ReadyGradient>>,
    reduced: usize,
    /// Indices of the buckets that the device works on.
    in_flight: Vec<usize>,
    owners: Vec<Arc<dyn GradientOwner>>,
}

struct FailedStep {
    execution: Execution,
    /// By parameter: whether its gradient has arrived.
    arrived: Vec<bool>,
    error: Error,
}

/// An answer to an owner, which is given without holding the lock.
struct OwnerReply {
    owner: Arc<dyn GradientOwner>,
    position: usize,
    result: Result<Option<SlotLease>>,
}

impl ReadyGradient {
    fn answer(self, result: Result<()>) -> OwnerReply {
        OwnerReply { owner: self.owner, position: self.position, result: result.map(|()| self.lease) }
    }
}

impl ArrivalDriver {
    /// Makes a driver for a reducer that is still being made; [`ArrivalDriver::made`] delivers the reducer.
    pub fn new(description: &ReducerDescription) -> Arc<Self> {
        let state = ArrivalState { reducer: None, phase: StepPhase::Making, waiting: VecDeque::new(), failed: None };
        Arc::new(Self {
            what: fingerprint::summary(description),
            reducer: OnceLock::new(),
            last: Mutex::new(Instant::now()),
            events: Mutex::default(),
            state: Mutex::new(state),
        })
    }

    /// Returns the reducer, once it has been made.
    pub fn reducer(&self) -> Option<&Arc<Reducer>> {
        self.reducer.get()
    }

    /// Describes the gradients that are missing if a step has waited for `time` without an event. Returns `None` while
    /// the device computes, because its results may be needed for the missing ones (ARR-6).
    pub fn waits(self: &Arc<Self>, time: Duration) -> Option<String> {
        if self.last.lock().elapsed() < time {
            return None;
        }
        let waits = {
            let state = self.state.try_lock()?;
            let mut arrivals: Box<dyn Iterator<Item = &ReadyGradient>> = match &state.phase {
                StepPhase::Making => Box::new(state.waiting.iter()),
                StepPhase::Open(open) => Box::new(open.pending.iter().flatten()),
                _ => Box::new(std::iter::empty()),
            };
            let place = arrivals.next().map(|arrival| (arrival.data.device(), arrival.data.stream()));
            place.or_else(|| matches!(state.phase, StepPhase::Open(_)).then_some((Device::Cpu, 0)))
        };
        // Another thread may have added an event meanwhile (ARR-3).
        self.handle();
        let waits = match waits? {
            (Device::Cpu, _) => self.reducer().is_none_or(|reducer| !reducer.is_on_device()),
            (Device::Cuda(device), stream) => is_at_rest(device, stream),
        };
        waits.then(|| self.what.clone())
    }

    /// Closes the driver: all waiting gradients get the error, and no further step begins.
    pub fn end(self: &Arc<Self>, error: &Error) {
        self.put(ArrivalEvent::Diverged(error.clone()));
        self.handle();
    }

    /// Delivers the reducer, or the reason why it could not be made. Every gradient is then answered with that error.
    pub fn made(self: &Arc<Self>, result: Result<Arc<Reducer>>) {
        if let Ok(reducer) = &result {
            let _ = self.reducer.set(Arc::clone(reducer));
            reducer.set_listener(Box::new(ArrivalListener(Arc::downgrade(self))));
        }
        self.put(ArrivalEvent::Made(result));
        self.handle();
    }

    /// Takes a slot of `param`, if one is free.
    pub fn take_slot(&self, param: usize) -> Option<SlotLease> {
        self.reducer.get()?.take_slot(param)
    }

    /// Whether a slot of `param` starts at `ptr`.
    pub fn is_slot(&self, param: usize, ptr: *const u8) -> bool {
        self.reducer.get().is_some_and(|reducer| reducer.is_slot(param, ptr))
    }

    /// Adds a gradient that has been computed.
    ///
    /// # Safety
    /// Until the owner has been answered, the bytes of `arrival.data`, as many as the parameter has, are valid and
    /// nothing else accesses them. On a device this holds in stream order, after the work that its stream holds now;
    /// the stream lives as long as the process.
    pub unsafe fn arrive(self: &Arc<Self>, arrival: ReadyGradient) {
        self.put(ArrivalEvent::Arrived(arrival));
        self.handle();
    }

    /// Ends an execution. If its step has not ended, the step ends with an error on all ranks.
    pub fn ended(self: &Arc<Self>, execution: Execution) {
        self.put(ArrivalEvent::Ended(execution));
        self.handle();
    }

    fn put(&self, event: ArrivalEvent) {
        *self.last.lock() = Instant::now();
        self.events.lock().push_back(event);
    }

    /// Handles the queued events. If another thread is handling them, it also sees this thread's event: it looks again
    /// after it has released the lock.
    fn handle(self: &Arc<Self>) {
        let mut answers = Vec::new();
        while !self.events.lock().is_empty() {
            let Some(mut state) = self.state.try_lock() else { break };
            while let Some(event) = self.next() {
                state.handle(event, self, &mut answers);
            }
        }
        // Last, without the lock: an answer may run much of a framework.
        for OwnerReply { owner, position, result } in answers {
            owner.reduced(position, result);
        }
    }

    fn next(&self) -> Option<ArrivalEvent> {
        self.events.lock().pop_front()
    }
}

impl ArrivalState {
    fn handle(&mut self, event: ArrivalEvent, arrivals: &Arc<ArrivalDriver>, answers: &mut Vec<OwnerReply>) {
        match event {
            ArrivalEvent::Made(Ok(reducer)) => {
                self.reducer = Some(reducer);
                self.rest(arrivals, answers);
            }
            ArrivalEvent::Made(Err(error)) => {
                answers.extend(self.waiting.drain(..).map(|arrival| arrival.answer(Err(error.clone()))));
                self.phase = StepPhase::Broken(error);
            }
            ArrivalEvent::Arrived(arrival) => self.arrived(arrival, arrivals, answers),
            ArrivalEvent::Ended(execution) => self.ended(execution, answers),
            ArrivalEvent::Diverged(error) => {
                answers.extend(self.waiting.drain(..).map(|arrival| arrival.answer(Err(error.clone()))));
                if matches!(self.phase, StepPhase::Making) {
                    self.phase = StepPhase::Broken(error);
                } else {
                    self.abandon(&error, answers);
                }
            }
            ArrivalEvent::Reducer(ReducerEvent::Reduced(bucket)) => self.reduced(bucket, arrivals, answers),
            ArrivalEvent::Reducer(ReducerEvent::Failed(error)) => self.abandon(&error, answers),
            ArrivalEvent::Reducer(ReducerEvent::Settled) => {
                if let StepPhase::Abandoned { settled, .. } = &mut self.phase {
                    *settled = true;
                    self.leave_abandoned(arrivals, answers);
                }
            }
            ArrivalEvent::Completed(bucket, result) => self.completed(bucket, result, arrivals, answers),
            ArrivalEvent::Finished(result) => {
                let StepPhase::Finishing { owners, answers: held } = &mut self.phase else { return };
                if result.is_ok() {
                    owners.iter().for_each(|owner| owner.release());
                }
                answers.extend(
                    held.drain(..).map(|answer| OwnerReply { result: result.clone().and(answer.result), ..answer }),
                );
                self.rest(arrivals, answers);
            }
        }
    }

    /// Waits for the next step, and begins it if its gradients have arrived.
    fn rest(&mut self, arrivals: &Arc<ArrivalDriver>, answers: &mut Vec<OwnerReply>) {
        self.phase = StepPhase::Idle;
        for arrival in std::mem::take(&mut self.waiting) {
            self.arrived(arrival, arrivals, answers);
        }
    }

    /// Like [`ArrivalState::rest`], once no operation of the abandoned step is in flight.
    fn leave_abandoned(&mut self, arrivals: &Arc<ArrivalDriver>, answers: &mut Vec<OwnerReply>) {
        if matches!(&self.phase, StepPhase::Abandoned { in_flight, settled: true, .. } if in_flight.is_empty()) {
            self.rest(arrivals, answers);
        }
    }

    fn arrived(&mut self, arrival: ReadyGradient, arrivals: &Arc<ArrivalDriver>, answers: &mut Vec<OwnerReply>) {
        if let StepPhase::Broken(error) = &self.phase {
            let error = error.clone();
            return answers.push(arrival.answer(Err(error)));
        }
        if let Some(failed) = &mut self.failed
            && failed.execution == arrival.execution
            && !std::mem::replace(&mut failed.arrived[arrival.param], true)
        {
            return answers.push(arrival.answer(Err(failed.error.clone())));
        }
        let Some(reducer) = &self.reducer else { return self.waiting.push_back(arrival) };
        let on_device = reducer.is_on_device();
        if on_device != (arrival.data.device() != Device::Cpu) {
            let place = |on_device| if on_device { "a CUDA device" } else { "the CPU" };
            let name = &reducer.params()[arrival.param].name;
            let error = Error::InvalidArgument(format!(
                "the gradient of `{name}` is on {}: it was planned for {}",
                place(!on_device),
                place(on_device)
            ));
            return answers.push(arrival.answer(Err(error)));
        }
        if matches!(self.phase, StepPhase::Idle) {
            // No operation is in flight, so this neither waits nor fails.
            if let Err(error) = reducer.begin(true) {
                return answers.push(arrival.answer(Err(error)));
            }
            let num_params = reducer.params().len();
            self.phase = StepPhase::Open(OpenStep {
                execution: arrival.execution,
                plan: reducer.plan(),
                arrived: vec![false; num_params],
                pending: std::iter::repeat_with(|| None).take(num_params).collect(),
                reduced: 0,
                in_flight: Vec::new(),
                owners: Vec::new(),
            });
        }
        let StepPhase::Open(open) = &mut self.phase else { return self.waiting.push_back(arrival) };
        let param = arrival.param;
        if open.execution != arrival.execution || std::mem::replace(&mut open.arrived[param], true) {
            return self.waiting.push_back(arrival);
        }
        if open.owners.last().is_none_or(|last| !Arc::ptr_eq(last, &arrival.owner)) {
            open.owners.push(Arc::clone(&arrival.owner));
        }
        let ptr = arrival.data.ptr();
        open.pending[param] = Some(arrival);
        // SAFETY: the gradient is valid until it is answered (contract of `arrive`). It is answered once its bucket has
        // been reduced, after which the reducer does not touch it any more, or after the step was abandoned.
        let marked = unsafe { reducer.mark_ready(param, ptr, true) };
        // The caller launches the buckets of gradients on a device only.
        let launched = marked.and_then(|mut full| full.try_for_each(|bucket| open.launch(bucket, reducer, arrivals)));
        if let Err(error) = launched {
            self.abandon(&error, answers);
        }
    }

    /// Handles a bucket that the device has finished (ARR-5).
    fn completed(
        &mut self,
        bucket: usize,
        result: Result<()>,
        arrivals: &Arc<ArrivalDriver>,
        answers: &mut Vec<OwnerReply>,
    ) {
        match &mut self.phase {
            StepPhase::Open(open) => {
                open.in_flight.retain(|in_flight| *in_flight != bucket);
                match result {
                    Ok(()) => self.reduced(bucket, arrivals, answers),
                    Err(error) => self.abandon(&error, answers),
                }
            }
            StepPhase::Abandoned { in_flight, .. } => {
                let error = self.failed.as_ref().map(|failed| failed.error.clone());
                let error =
                    error.unwrap_or_else(|| Error::Internal("a step was abandoned without a reason".to_owned()));
                for (_, mut held) in in_flight.extract_if(.., |(of, _)| *of == bucket) {
                    answers.extend(held.drain(..).map(|arrival| arrival.answer(Err(error.clone()))));
                }
                self.leave_abandoned(arrivals, answers);
            }
            _ => {}
        }
    }

    fn reduced(&mut self, bucket: usize, arrivals: &Arc<ArrivalDriver>, answers: &mut Vec<OwnerReply>) {
        let (StepPhase::Open(open), Some(reducer)) = (&mut self.phase, &self.reducer) else { return };
        let mut of_bucket: Vec<OwnerReply> = open.plan.buckets()[bucket]
            .slots
            .iter()
            .filter_map(|slot| open.pending[slot.param].take())
            .map(|arrival| arrival.answer(Ok(())))
            .collect();
        open.reduced += 1;
        if open.reduced < open.plan.buckets().len() {
            return answers.append(&mut of_bucket);
        }
        let owners = std::mem::take(&mut open.owners);
        if reducer.finishes_alone() {
            let result = reducer.finish().map(drop);
            if result.is_ok() {
                owners.iter().for_each(|owner| owner.release());
            }
            let completed =
                of_bucket.into_iter().map(|answer| OwnerReply { result: result.clone().and(answer.result), ..answer });
            answers.extend(completed);
            return self.rest(arrivals, answers);
        }
        self.phase = StepPhase::Finishing { owners, answers: of_bucket };
        // This may be the communicator's thread, which the end of the step needs.
        let (reducer, arrivals) = (Arc::clone(reducer), Arc::clone(arrivals));
        let finish = {
            let arrivals = Arc::clone(&arrivals);
            move || {
                arrivals.put(ArrivalEvent::Finished(reducer.finish().map(drop)));
                arrivals.handle();
            }
        };
        if let Err(source) = std::thread::Builder::new().name("smd-rebuild".to_owned()).spawn(finish) {
            arrivals.put(ArrivalEvent::Finished(Err(Error::io("starting a thread", source))));
        }
    }

    fn ended(&mut self, execution: Execution, answers: &mut Vec<OwnerReply>) {
        let error = Error::Closed { reason: "the execution that the gradient belongs to was ended".to_owned() };
        for arrival in std::mem::take(&mut self.waiting) {
            match arrival.execution == execution {
                true => answers.push(arrival.answer(Err(error.clone()))),
                false => self.waiting.push_back(arrival),
            }
        }
        if matches!(&self.phase, StepPhase::Open(open) if open.execution == execution) {
            self.abandon(&error, answers);
        }
    }

    /// Ends the open step with an error.
    fn abandon(&mut self, error: &Error, answers: &mut Vec<OwnerReply>) {
        let StepPhase::Open(open) = &mut self.phase else { return };
        let mut leases = Vec::new();
        let mut held = |bucket: usize| -> Vec<ReadyGradient> {
            open.plan.buckets()[bucket].slots.iter().filter_map(|slot| open.pending[slot.param].take()).collect()
        };
        let in_flight = open.in_flight.iter().map(|&bucket| (bucket, held(bucket))).collect();
        for mut arrival in open.pending.iter_mut().filter_map(Option::take) {
            leases.extend(arrival.lease.take());
            answers.push(arrival.answer(Err(error.clone())));
        }
        self.failed = Some(FailedStep {
            execution: open.execution,
            arrived: std::mem::take(&mut open.arrived),
            error: error.clone(),
        });
        self.phase = StepPhase::Abandoned { _leases: leases, in_flight, settled: false };
        if let Some(reducer) = &self.reducer {
            reducer.abandon("its step ended before all gradients had arrived", false);
        }
    }
}

/// Returns whether all work is done in the stream with this handle. A stream that is being captured or cannot be
/// queried counts as busy.
fn is_at_rest(device: u16, stream: usize) -> bool {
    let Ok(context) = Context::primary(device) else { return false };
    // SAFETY: the stream lives as long as the process (contract of `arrive`).
    let stream = unsafe { Stream::borrowed(context, stream) };
    relaxed(|| matches!(stream.is_capturing(), Ok(false)) && matches!(stream.is_idle(), Ok(true)))
}

impl OpenStep {
    /// Starts the reduction of a full bucket on a device.
    fn launch(&mut self, bucket: usize, reducer: &Arc<Reducer>, arrivals: &Arc<ArrivalDriver>) -> Result<()> {
        let planned = &self.plan.buckets()[bucket];
        let wire = reducer.wire_dtype(planned.dtype);
        let mut pieces = Vec::new();
        let mut in_place = Vec::new();
        let mut last = None;
        for slot in &planned.slots {
            let Some(arrival) = &self.pending[slot.param] else { continue };
            if arrival.data.elems() == 0 {
                continue;
            }
            if slot.in_place {
                in_place.push(arrival.data);
            } else {
                let offset = (slot.offset_bytes - planned.offset_bytes) / planned.dtype.size();
                pieces.push(PackedPiece { tensor: arrival.data.ptr() as u64, offset, elems: arrival.data.elems() });
            }
            last = Some(arrival);
        }
        let Some(last) = last.filter(|_| reducer.communicator().members().size() > 1) else {
            // The bucket is empty.
            reducer.reduced_by_caller();
            arrivals.put(ArrivalEvent::Completed(bucket, Ok(())));
            return Ok(());
        };
        let Device::Cuda(device) = last.data.device() else {
            return Err(Error::Internal("a bucket in CPU memory was passed to a reduction on a device".to_owned()));
        };
        let stream = last.data.stream();
        let packed = match &pieces[..] {
            [] => None,
            _ => {
                let elems = planned.elems();
                let memory = last.owner.allocate(last.position, elems * wire.size())?;
                // SAFETY: the owner allocates as many bytes, until the gradient is answered: when the bucket has
                // completed.
                let flat = unsafe { TensorView::new(memory, elems, wire, Device::Cuda(device), stream) }?;
                Some(PackedGradients { pieces, dtype: planned.dtype, flat })
            }
        };
        let own = Arc::clone(arrivals);
        let completed = move |outcome| {
            own.put(ArrivalEvent::Completed(bucket, outcome));
            own.handle();
        };
        // SAFETY: gradients stay until they are answered (contract of `arrive`), which is after this (ARR-5), and so
        // does that memory.
        unsafe { reducer.launch_held(HeldBucket { packed, in_place, stream }, device, Box::new(completed)) }?;
        self.in_flight.push(bucket);
        Ok(())
    }
}

/// Forwards the events of a reducer to its driver, without keeping the driver alive.
struct ArrivalListener(Weak<ArrivalDriver>);

impl Listener for ArrivalListener {
    fn note(&self, event: ReducerEvent) {
        if let Some(arrivals) = self.0.upgrade() {
            arrivals.put(ArrivalEvent::Reducer(event));
        }
    }

    fn wake(&self) {
        if let Some(arrivals) = self.0.upgrade() {
            arrivals.handle();
        }
    }
}
