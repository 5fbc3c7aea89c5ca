//! Buckets on a CUDA device: packed in the stream that computes the gradients, reduced by a separate thread.
//!
//! ```text
//! autograd's thread:   gradients ..  pack(0) .. gradients .. pack(1) .. gradients .. pack(2)
//!                                         \ event                 \ event                \ event
//! this thread, communication stream:        all-reduce(0)            all-reduce(1)          all-reduce(2) \ event
//! finish:                                                                              the caller's stream waits
//! ```
//!
//! Queueing a reduction takes the host some 40 us. A backward that is limited by kernel launches cannot afford that,
//! so its thread only launches one packing kernel for each bucket and records an event.
//!
//! In a round whose vote is open, the packing is queued and the reduction waits at the step's gate
//! ([`super::vote_gate`]): it is passed to this thread, or dropped, when the result is known.
//!
//! Gradients of graphs stay in place: they are packed and unpacked in the communication stream, and their owner is
//! notified when the device is done.
//!
//! - QUEUE-1: the host never waits for the device.
//! - QUEUE-2: work that is being captured in a CUDA graph is queued by the caller's thread, because a capture includes
//!   only that thread's work.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::buffer::{DType, Device, ReduceOp, TensorView};
use crate::collectives::{Communicator, Overlap, Request};
use crate::device::pack::{PackedPiece, Packer};
use crate::device::{Context, Event, Priority, Stream};
use crate::error::{Error, Result};

/// A full bucket on a device.
#[derive(Debug)]
pub struct DeviceBucket<'a> {
    /// The gradients to pack: those that are not in their slots, or all if there is a `wire`.
    pub pieces: &'a [PackedPiece],
    /// Memory of the slots, if the bucket has any.
    pub flat: Option<TensorView>,
    /// Memory of a narrower type with as many elements, in which the slots are reduced.
    pub wire: Option<TensorView>,
    /// Gradients that are reduced in place (PLAN-6), in plan order.
    pub in_place: &'a [TensorView],
    /// The stream that computed the gradients.
    pub stream: usize,
}

/// A full bucket on a device whose gradients stay in place.
#[derive(Debug)]
pub(super) struct HeldBucket {
    /// Gradients that are packed for the reduction.
    pub(super) packed: Option<PackedGradients>,
    /// Gradients that are reduced in place.
    pub(super) in_place: Vec<TensorView>,
    /// The stream that computed all of them.
    pub(super) stream: usize,
}

/// Gradients and the memory in which they are packed.
#[derive(Clone, Debug)]
pub(super) struct PackedGradients {
    pub(super) pieces: Vec<PackedPiece>,
    /// Their element type.
    pub(super) dtype: DType,
    /// Memory of their type, or of a narrower one.
    pub(super) flat: TensorView,
}

/// Called once, when a bucket is queued or could not be; for gradients that stay in place, when the device is done.
pub(super) type Launched = Box<dyn FnOnce(Result<()>) + Send>;

/// Packs buckets on one CUDA device and queues their reductions from a thread of its own.
pub(super) struct DeviceQueue {
    shared: Arc<DeviceQueueState>,
}

struct DeviceQueueState {
    communicator: Arc<Communicator>,
    op: ReduceOp,
    /// The stream in which reductions run.
    stream: Stream,
    /// Recorded after the last reduction so far.
    done: Event,
    /// Whether `done` was recorded in this step.
    dirty: AtomicBool,
    state: Mutex<QueueState>,
    changed: Condvar,
    /// Unused events.
    events: Mutex<Vec<Event>>,
    /// Packing kernels that were used before; looking them up in the process takes longer.
    packers: Mutex<Vec<(PackDirection, DType, DType, Packer)>>,
}

/// From gradients to a bucket, or back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PackDirection {
    Pack,
    Unpack,
}

/// A bucket's reduction, and the callback for when it is queued. The bucket is packed already.
pub(super) struct DeviceJob {
    bucket: QueuedBucket,
    launched: Launched,
    /// Whether it is the last one of a step.
    is_last: bool,
    /// Whether it belongs to a CUDA graph that is being captured.
    capturing: bool,
}

#[derive(Default)]
struct QueueState {
    queue: VecDeque<(QueuedBucket, Launched)>,
    busy: bool,
    has_thread: bool,
    closed: bool,
}

/// A bucket.
struct QueuedBucket {
    /// Recorded after its gradients were computed, or packed.
    ready: Event,
    pack: Option<PackedGradients>,
    /// The reductions.
    targets: Vec<TensorView>,
    unpack: Option<PackedGradients>,
    /// Whether other work runs on the device at the same time.
    overlap: Overlap,
    /// Called when the device is done, if the caller waits for that.
    held: bool,
}

impl DeviceQueue {
    /// Creates a queue whose reductions run in `stream`, a stream of `context`.
    ///
    /// # Safety
    /// The stream lives as long as the process.
    pub(super) unsafe fn new(
        communicator: Arc<Communicator>,
        context: &'static Context,
        stream: usize,
        op: ReduceOp,
    ) -> Result<Self> {
        // SAFETY: the caller's promise.
        Self::over(communicator, op, unsafe { Stream::borrowed(context, stream) })
    }

    /// Creates a queue with a new stream.
    pub(super) fn with_stream(
        communicator: Arc<Communicator>,
        context: &'static Context,
        op: ReduceOp,
    ) -> Result<Self> {
        Self::over(communicator, op, Stream::new(context, Priority::High)?)
    }

    fn over(communicator: Arc<Communicator>, op: ReduceOp, stream: Stream) -> Result<Self> {
        let done = Event::new(stream.context())?;
        let (dirty, state, changed, events, packers) = Default::default();
        Ok(Self {
            shared: Arc::new(DeviceQueueState {
                communicator,
                op,
                stream,
                done,
                dirty,
                state,
                changed,
                events,
                packers,
            }),
        })
    }

    /// The CUDA device.
    pub(super) fn context(&self) -> &'static Context {
        self.shared.stream.context()
    }

    /// Packs a bucket in its stream. The job is its reduction. With `keeps_values`, the slots have the gradients'
    /// values also if the job is dropped: gradients that travel in a narrower type are not only packed in that type.
    ///
    /// # Errors
    /// [`Error::Device`]; [`Error::Unsupported`] if this is captured in a CUDA graph while a vote is open.
    ///
    /// # Safety
    /// The memory is valid and not written by other code, until a stream that followed ([`DeviceQueue::follow`])
    /// reaches that point, or the job is dropped.
    pub(super) unsafe fn prepare(
        &self,
        bucket: &DeviceBucket<'_>,
        is_last: bool,
        keeps_values: bool,
        launched: Launched,
    ) -> Result<DeviceJob> {
        let shared = &self.shared;
        let context = shared.stream.context();
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::borrowed(context, bucket.stream) };
        let capturing = stream.is_capturing()?;
        if capturing && keeps_values {
            return Err(Error::Unsupported(
                "a round of gradients cannot be captured in a CUDA graph while its vote is open".to_owned(),
            ));
        }
        let packed = bucket.wire.or(bucket.flat);
        if let (Some(flat), Some(packed), false) = (bucket.flat, packed, bucket.pieces.is_empty()) {
            let pack = |pieces: &[PackedPiece], into: TensorView| {
                let packer = shared.packer(PackDirection::Pack, flat.dtype(), into.dtype())?;
                // SAFETY: the caller's promise; pieces lie inside the bucket.
                unsafe { packer.run(pieces, into.ptr() as u64, &stream) }
            };
            if keeps_values && bucket.wire.is_some() {
                let elsewhere = outside_of_slots(bucket.pieces, &flat);
                if !elsewhere.is_empty() {
                    pack(&elsewhere, flat)?;
                }
                pack(&[whole(&flat)], packed)?;
            } else {
                pack(bucket.pieces, packed)?;
            }
        }
        let targets: Vec<TensorView> = packed.into_iter().chain(bucket.in_place.iter().copied()).collect();
        if targets.iter().any(|target| target.device() != Device::Cuda(context.device())) {
            return Err(Error::Internal("gradients on several devices cannot be reduced together".into()));
        }
        let unpack = bucket.flat.zip(bucket.wire).map(|(flat, wire)| PackedGradients {
            pieces: vec![whole(&flat)],
            dtype: flat.dtype(),
            flat: wire,
        });
        let overlap = if is_last { Overlap::Nothing } else { Overlap::Computation };
        let bucket = QueuedBucket { ready: shared.mark(&stream)?, pack: None, targets, unpack, overlap, held: false };
        Ok(DeviceJob { bucket, launched, is_last, capturing })
    }

    /// Passes a job to the queue's thread.
    pub(super) fn queue(&self, job: DeviceJob) -> Result<()> {
        self.shared.queue(self.shared.state.lock(), job.bucket, job.launched)
    }

    /// Passes a job to the queue's thread, or returns it for [`DeviceQueue::run_job`] on this thread. The last job of
    /// a step is returned if the queue's thread is idle: the caller has nothing else to do then, and the device nothing
    /// to compute.
    pub(super) fn queue_or_return(&self, job: DeviceJob) -> Result<Option<DeviceJob>> {
        let mut state = self.shared.state.lock();
        if job.capturing || (job.is_last && state.queue.is_empty() && !state.busy) {
            state.busy = true;
            return Ok(Some(job));
        }
        self.shared.queue(state, job.bucket, job.launched).map(|()| None)
    }

    /// Queues the reduction of a job that [`DeviceQueue::queue_or_return`] has returned.
    pub(super) fn run_job(&self, job: DeviceJob) {
        self.shared.run_job(job.bucket, job.launched);
    }

    /// Drops a job without running it or its callback.
    pub(super) fn drop_job(&self, job: DeviceJob) {
        self.shared.events.lock().push(job.bucket.ready);
    }

    /// Queues the reduction of a bucket whose gradients stay in place.
    ///
    /// # Safety
    /// The memory is valid and not accessed by other code until `completed` is called. Earlier work on it, also by
    /// earlier owners of the memory, was queued into the bucket's stream.
    pub(super) unsafe fn launch_held(&self, bucket: HeldBucket, completed: Launched) -> Result<()> {
        let shared = &self.shared;
        let HeldBucket { packed, in_place, stream } = bucket;
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::borrowed(self.context(), stream) };
        let targets = packed.iter().map(|packed| packed.flat).chain(in_place).collect();
        let (ready, overlap) = (shared.mark(&stream)?, Overlap::Computation);
        let job = QueuedBucket { ready, pack: packed.clone(), targets, unpack: packed, overlap, held: true };
        shared.queue(shared.state.lock(), job, completed)
    }

    /// Waits until everything is queued; this does not wait for the device.
    pub(super) fn settle(&self) {
        let mut state = self.shared.state.lock();
        while state.busy || !state.queue.is_empty() {
            self.shared.changed.wait(&mut state);
        }
    }

    /// Whether the device has completed the reductions that are queued so far.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub(super) fn is_done(&self) -> Result<bool> {
        self.shared.done.is_done()
    }

    /// Makes the stream with this handle wait for the reductions that are queued so far, if there are any.
    ///
    /// # Safety
    /// The stream belongs to the queue's device.
    pub(super) unsafe fn follow(&self, stream: usize) -> Result<()> {
        let shared = &self.shared;
        if !shared.dirty.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { Stream::borrowed(shared.stream.context(), stream) }.wait(&shared.done)
    }
}

/// All elements of a bucket as one piece.
fn whole(flat: &TensorView) -> PackedPiece {
    PackedPiece { tensor: flat.ptr() as u64, offset: 0, elems: flat.elems() }
}

/// The pieces that do not lie in their slots already.
fn outside_of_slots(pieces: &[PackedPiece], flat: &TensorView) -> Vec<PackedPiece> {
    let slot = |piece: &PackedPiece| flat.ptr() as u64 + (piece.offset * flat.dtype().size()) as u64;
    pieces.iter().filter(|piece| piece.tensor != slot(piece)).copied().collect()
}

impl Drop for DeviceQueue {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.changed.notify_all();
    }
}

impl DeviceQueueState {
    /// Records an event in `stream`.
    fn mark(&self, stream: &Stream) -> Result<Event> {
        let event = match self.events.lock().pop() {
            Some(event) => event,
            None => Event::new(self.stream.context())?,
        };
        event.record(stream)?;
        Ok(event)
    }

    /// Passes a job to the thread.
    fn queue(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, QueueState>,
        job: QueuedBucket,
        launched: Launched,
    ) -> Result<()> {
        if !state.has_thread {
            let own = self.clone();
            std::thread::Builder::new()
                .name(format!("smd-launch-{}", self.communicator.id()))
                .spawn(move || own.work())
                .map_err(|error| Error::io("starting the thread that launches reductions", error))?;
            state.has_thread = true;
        }
        state.queue.push_back((job, launched));
        self.changed.notify_all();
        Ok(())
    }

    /// The body of the thread.
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            while state.busy || (state.queue.is_empty() && !state.closed) {
                self.changed.wait(&mut state);
            }
            let Some((job, launched)) = state.queue.pop_front() else { return };
            state.busy = true;
            drop(state);
            self.run_job(job, launched);
            state = self.state.lock();
        }
    }

    /// Queues a reduction for a caller that has marked this queue busy, and clears the mark, also after a panic:
    /// otherwise `settle` would wait forever.
    fn run_job(&self, job: QueuedBucket, launched: Launched) {
        let held = job.held;
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.reduce(job)));
        let outcome = outcome.unwrap_or_else(|panic| Err(Error::from_panic(&*panic)));
        if held {
            // Before the callback, which may call `settle` on this thread after an error.
            self.free();
            // Also after an error, because some of the work may be queued.
            match self.communicator.in_flight("the reduction of gradients", &self.stream) {
                Ok(in_flight) => in_flight.then(Box::new(move |completed| launched(outcome.and(completed.map(drop))))),
                Err(error) => launched(outcome.and(Err(error))),
            }
        } else {
            // After the callback, so that `settle` returns only when errors have been reported.
            launched(outcome);
            self.free();
        }
    }

    fn free(&self) {
        self.state.lock().busy = false;
        self.changed.notify_all();
    }

    fn packer(&self, direction: PackDirection, from: DType, to: DType) -> Result<Packer> {
        let mut packers = self.packers.lock();
        let known = packers.iter().find(|(other, a, b, _)| (*other, *a, *b) == (direction, from, to));
        if let Some((.., packer)) = known {
            return Ok(*packer);
        }
        let context = self.stream.context();
        let packer = match direction {
            PackDirection::Pack => Packer::pack(context, from, to),
            PackDirection::Unpack => Packer::unpack(context, from, to),
        }?;
        packers.push((direction, from, to, packer));
        Ok(packer)
    }

    fn reduce(&self, QueuedBucket { ready, pack, targets, unpack, overlap, .. }: QueuedBucket) -> Result<()> {
        self.stream.wait(&ready)?;
        // The stream waits for the record up to now; later records of the event do not affect it.
        self.events.lock().push(ready);
        if let Some(packed) = pack {
            self.copy_packed(PackDirection::Pack, &packed)?;
        }
        if self.communicator.members().size() > 1 {
            let reduce = |target: TensorView| {
                let target = target.on_stream(self.stream.raw());
                Request::AllReduce { input: target, output: target, op: self.op }
            };
            let requests: Vec<Request> = targets.into_iter().map(reduce).collect();
            self.communicator.run_on_device(&requests, None, overlap)?;
        }
        if let Some(packed) = unpack {
            self.copy_packed(PackDirection::Unpack, &packed)?;
        }
        self.done.record(&self.stream)?;
        self.dirty.store(true, Ordering::Release);
        Ok(())
    }

    fn copy_packed(
        &self,
        direction: PackDirection,
        PackedGradients { pieces, dtype, flat }: &PackedGradients,
    ) -> Result<()> {
        let (from, to) = if direction == PackDirection::Pack { (*dtype, flat.dtype()) } else { (flat.dtype(), *dtype) };
        let packer = self.packer(direction, from, to)?;
        // SAFETY: the promise of `launch` and `launch_held`; pieces lie inside the flat memory.
        unsafe { packer.run(pieces, flat.ptr() as u64, &self.stream) }
    }
}
