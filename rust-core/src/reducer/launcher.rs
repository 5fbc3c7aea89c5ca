//! Buckets on a CUDA device: packed where their gradients are made, reduced by a thread of their own.
//!
//! ```text
//! autograd's thread:   gradients ..  pack(0) .. gradients .. pack(1) .. gradients .. pack(2)
//!                                         \ event                 \ event                \ event
//! this thread, communication stream:        all-reduce(0)            all-reduce(1)          all-reduce(2) \ event
//! finish:                                                                              the caller's stream waits
//! ```
//!
//! Launching a reduction takes the host some 40 us, which a backward that is bound by its launches has not got; so its
//! thread only launches one kernel a bucket and records an event.
//!
//! - LCH-1: the host never waits for the device.
//! - LCH-2: what is under capture in a CUDA graph is launched by the caller's thread, so that the graph has it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex};

use crate::buffer::{DType, Device, TensorView};
use crate::collectives::{Communicator, ReduceOp, Request};
use crate::device::pack::{Packer, Piece};
use crate::device::{Context, Event, Stream};
use crate::error::{Error, Result};

/// A full bucket on a device.
#[derive(Debug)]
pub struct DeviceBucket<'a> {
    /// The gradients that do not lie in their slots yet, or all of them if there is a `wire`.
    pub pieces: &'a [Piece],
    /// The slots, if any take room.
    pub flat: Option<TensorView>,
    /// As many elements of a narrower type, in which the slots travel.
    pub wire: Option<TensorView>,
    /// Gradients that are reduced where they lie (PLAN-6), in plan order.
    pub apart: &'a [TensorView],
    /// The stream in which the gradients were made.
    pub stream: usize,
}

/// Called once, when a bucket is launched or could not be.
pub(super) type Launched = Box<dyn FnOnce(Result<()>) + Send>;

/// See the module's text.
pub(super) struct Launcher {
    shared: Arc<Shared>,
}

struct Shared {
    communicator: Arc<Communicator>,
    /// Where reductions run.
    stream: Stream,
    /// Recorded after the last reduction so far.
    done: Event,
    /// Whether `done` was recorded since the last step ended.
    dirty: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
    /// Not in use.
    events: Mutex<Vec<Event>>,
    /// To look one up in the process takes longer.
    packers: Mutex<Vec<(Way, DType, DType, Packer)>>,
}

/// From gradients to a bucket, or back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Pack,
    Unpack,
}

#[derive(Default)]
struct State {
    queue: VecDeque<(Job, Launched)>,
    busy: bool,
    has_thread: bool,
    closed: bool,
}

/// A packed bucket.
struct Job {
    packed: Event,
    /// What is reduced.
    targets: Vec<TensorView>,
    /// The slots, and the memory in which they travel, if that is another one.
    unpack: Option<(TensorView, TensorView)>,
}

impl Launcher {
    /// A launcher whose reductions run in `stream`, a stream of `context`.
    ///
    /// # Safety
    /// The stream lives as long as the process.
    pub(super) unsafe fn new(
        communicator: Arc<Communicator>,
        context: &'static Context,
        stream: usize,
    ) -> Result<Self> {
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::borrowed(context, stream) };
        let done = Event::new(context)?;
        let (dirty, state, changed, events, packers) = Default::default();
        Ok(Self { shared: Arc::new(Shared { communicator, stream, done, dirty, state, changed, events, packers }) })
    }

    /// Packs a bucket in its stream and has it reduced: by the launcher's thread, or at once if that thread has nothing
    /// to do and `at_once` says that neither has this one.
    ///
    /// # Safety
    /// The memory is valid, and nobody else writes it, until a stream that followed ([`Launcher::follow`]) gets there.
    pub(super) unsafe fn launch(&self, bucket: &DeviceBucket<'_>, at_once: bool, launched: Launched) -> Result<()> {
        let shared = &self.shared;
        let context = shared.stream.context();
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::borrowed(context, bucket.stream) };
        let packed = bucket.wire.or(bucket.flat);
        if let (Some(flat), Some(packed), false) = (bucket.flat, packed, bucket.pieces.is_empty()) {
            let packer = shared.packer(Way::Pack, flat.dtype(), packed.dtype())?;
            // SAFETY: the caller's promise; pieces lie inside the bucket.
            unsafe { packer.run(bucket.pieces, packed.ptr() as u64, &stream) }?;
        }
        let targets: Vec<TensorView> = packed.into_iter().chain(bucket.apart.iter().copied()).collect();
        if targets.iter().any(|target| target.device() != Device::Cuda(context.device())) {
            return Err(Error::Internal("gradients of several devices were to be reduced together".into()));
        }
        let packed = match shared.events.lock().pop() {
            Some(event) => event,
            None => Event::new(context)?,
        };
        packed.record(&stream)?;
        let job = Job { packed, targets, unpack: bucket.flat.zip(bucket.wire) };
        let capturing = stream.is_capturing()?;
        let mut state = shared.state.lock();
        if capturing || (at_once && state.queue.is_empty() && !state.busy) {
            state.busy = true;
            drop(state);
            shared.carry_out(job, launched);
            return Ok(());
        }
        if !state.has_thread {
            let own = shared.clone();
            std::thread::Builder::new()
                .name(format!("smd-launch-{}", shared.communicator.id()))
                .spawn(move || own.work())
                .map_err(|error| Error::io("starting the thread that launches reductions", error))?;
            state.has_thread = true;
        }
        state.queue.push_back((job, launched));
        shared.changed.notify_all();
        Ok(())
    }

    /// Waits until everything is launched; launching does not wait for the device.
    pub(super) fn settle(&self) {
        let mut state = self.shared.state.lock();
        while state.busy || !state.queue.is_empty() {
            self.shared.changed.wait(&mut state);
        }
    }

    /// Makes the stream with this handle wait for what was launched so far, if something was.
    ///
    /// # Safety
    /// It is a stream of the launcher's device.
    pub(super) unsafe fn follow(&self, stream: usize) -> Result<()> {
        let shared = &self.shared;
        if !shared.dirty.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { Stream::borrowed(shared.stream.context(), stream) }.wait(&shared.done)
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    /// The thread.
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            while state.busy || (state.queue.is_empty() && !state.closed) {
                self.changed.wait(&mut state);
            }
            let Some((job, launched)) = state.queue.pop_front() else { return };
            state.busy = true;
            drop(state);
            self.carry_out(job, launched);
            state = self.state.lock();
        }
    }

    /// Launches a reduction for a caller that has made this launcher busy, which it then no longer is: also after a
    /// panic, since whoever settles would wait for ever.
    fn carry_out(&self, job: Job, launched: Launched) {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.reduce(job)));
        launched(outcome.unwrap_or_else(|panic| Err(Error::from_panic(&*panic))));
        self.state.lock().busy = false;
        self.changed.notify_all();
    }

    fn packer(&self, way: Way, from: DType, to: DType) -> Result<Packer> {
        let mut packers = self.packers.lock();
        let known = packers.iter().find(|(other, a, b, _)| (*other, *a, *b) == (way, from, to));
        if let Some((.., packer)) = known {
            return Ok(*packer);
        }
        let context = self.stream.context();
        let packer = match way {
            Way::Pack => Packer::pack(context, from, to),
            Way::Unpack => Packer::unpack(context, from, to),
        }?;
        packers.push((way, from, to, packer));
        Ok(packer)
    }

    fn reduce(&self, Job { packed, targets, unpack }: Job) -> Result<()> {
        self.stream.wait(&packed)?;
        // A later record does not change what the stream waits for.
        self.events.lock().push(packed);
        if self.communicator.members().size() > 1 {
            let average = |target: TensorView| {
                let target = target.on_stream(self.stream.raw());
                Request::AllReduce { input: target, output: target, op: ReduceOp::Average }
            };
            let requests: Vec<Request> = targets.into_iter().map(average).collect();
            self.communicator.run_on_device(&requests, None)?;
        }
        if let Some((flat, wire)) = unpack {
            let whole = Piece { tensor: flat.ptr() as u64, offset: 0, elems: flat.elems() };
            let packer = self.packer(Way::Unpack, wire.dtype(), flat.dtype())?;
            // SAFETY: `launch`'s promise: both are as long as the bucket.
            unsafe { packer.run(&[whole], wire.ptr() as u64, &self.stream) }?;
        }
        self.done.record(&self.stream)?;
        self.dirty.store(true, Ordering::Release);
        Ok(())
    }
}
