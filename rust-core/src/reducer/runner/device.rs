//! The reduction of buckets on a CUDA device (RED-7).

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Reducer;
use super::end::SIGNAL_CHECK_INTERVAL;
use crate::buffer::Device;
use crate::device::Context;
use crate::error::{Error, Result};
use crate::reducer::device_queue::{DeviceBucket, DeviceQueue, HeldBucket, Launched};
use crate::reducer::vote_gate::Admission;
use crate::world::monitor::interrupt_pending;

/// Polling interval of [`Reducer::await_device`].
const DEVICE_POLL_INTERVAL: Duration = Duration::from_micros(200);

impl Reducer {
    /// Packs a full bucket from [`Reducer::mark_ready`] on its device and queues its reduction. Called in plan order.
    /// Reductions run in the stream `communication`, which must be the same in every call. The host does not wait for
    /// them.
    ///
    /// In a round whose vote is open, the reduction waits for its result (RED-8). Until then, and if the result is not
    /// the plan, all slots of the bucket have the gradients' values.
    ///
    /// # Errors
    /// [`Error::Device`]. [`Reducer::finish`] returns the errors of the communicator.
    ///
    /// # Safety
    /// Views and pieces are valid memory of the device, with the given types, from the work queued so far in the
    /// bucket's stream until a stream that follows ([`Reducer::follow`]) gets there. `communication` is a stream of
    /// that device that lives as long as the process.
    pub unsafe fn launch(
        self: &Arc<Self>,
        index: usize,
        bucket: &DeviceBucket<'_>,
        communication: usize,
    ) -> Result<()> {
        let device_queue = match self.device_queue.get() {
            Some(device_queue) => device_queue,
            None => {
                let device = bucket.flat.iter().chain(bucket.in_place).find_map(|view| match view.device() {
                    Device::Cuda(device) => Some(device),
                    Device::Cpu => None,
                });
                let Some(device) = device else {
                    return Err(Error::Internal(
                        "a bucket in CPU memory was passed to a reduction on a device".to_owned(),
                    ));
                };
                let (context, op) = (Context::primary(device)?, self.options().op());
                // SAFETY: the caller's promise.
                let made = unsafe { DeviceQueue::new(self.communicator.clone(), context, communication, op) }?;
                self.device_queue.get_or_init(|| made)
            }
        };
        let outside = || Error::Internal("a bucket was launched outside backward".to_owned());
        let (id, is_last, keeps_values) = {
            let state = self.state.lock();
            let active = state.active.as_ref().ok_or_else(outside)?;
            (active.id, index + 1 == state.layout.plan.buckets().len(), !active.gate.is_open())
        };
        let reducer = Arc::clone(self);
        let launched = move |outcome: Result<()>| reducer.launched(id, outcome);
        // SAFETY: the caller's promise.
        let job = unsafe { device_queue.prepare(bucket, is_last, keeps_values, Box::new(launched)) }?;
        let (own, dropped) = {
            let mut state = self.state.lock();
            let active = state.active.as_mut().filter(|active| active.id == id && !active.abandoned);
            match active.ok_or_else(outside)?.gate.admit(job) {
                // Under the lock, so that this bucket follows those that `release` passes on.
                Admission::Granted(job) => (device_queue.queue_or_return(job)?, None),
                Admission::Held => (None, None),
                Admission::Refused(job) => (None, Some(job)),
            }
        };
        own.into_iter().for_each(|job| device_queue.run_job(job));
        dropped.into_iter().for_each(|job| device_queue.drop_job(job));
        Ok(())
    }

    /// As [`Reducer::launch`], for gradients that are reduced in place on `device`, in a stream of the reducer's own.
    /// `completed` is called on a thread of the core when the device has completed the reduction, unless this returns
    /// an error.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// Until `completed` is called, the memory is valid and has no other user. Earlier uses of it, also by its earlier
    /// owners, were queued into the bucket's stream, which belongs to the device.
    pub(in crate::reducer) unsafe fn launch_held(
        self: &Arc<Self>,
        bucket: HeldBucket,
        device: u16,
        completed: Launched,
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
                "gradients on `cuda:{}` and `cuda:{device}` cannot be reduced together",
                device_queue.context().device()
            )));
        }
        let Some(id) = self.state.lock().active.as_ref().map(|active| active.id) else {
            return Err(Error::Internal("a bucket was launched outside backward".to_owned()));
        };
        let reducer = Arc::clone(self);
        let launched = move |outcome: Result<()>| {
            reducer.launched(id, outcome.clone());
            completed(outcome);
        };
        // SAFETY: the caller's promise.
        unsafe { device_queue.launch_held(bucket, Box::new(launched)) }
    }

    fn launched(&self, id: u64, outcome: Result<()>) {
        let state = &mut *self.state.lock();
        let Some(active) = state.active.as_mut().filter(|active| active.id == id) else { return };
        match outcome {
            // A bucket counts as reduced when its reduction is queued (RED-7).
            Ok(()) => active.note_reduced(),
            Err(error) => active.error = Some(error),
        }
        self.changed.notify_all();
    }

    /// Waits until the device has completed the reductions that are queued so far. [`Reducer::finish`] cannot report
    /// what fails after it; this does.
    ///
    /// # Errors
    /// The error that ended the group's operations on devices; [`Error::Device`]; [`Error::Interrupted`].
    pub fn await_device(&self) -> Result<()> {
        const DURING: &str = "the reduction of gradients";
        let Some(device_queue) = self.device_queue.get() else { return Ok(()) };
        device_queue.settle();
        let mut looked = Instant::now();
        loop {
            let done = device_queue.is_done();
            // After that, because an abort completes the reductions and has an error that says more.
            self.communicator.check_device(DURING)?;
            if done? {
                return Ok(());
            }
            if looked.elapsed() >= SIGNAL_CHECK_INTERVAL {
                looked = Instant::now();
                if interrupt_pending() {
                    return Err(Error::Interrupted { during: DURING.to_owned() });
                }
            }
            std::thread::sleep(DEVICE_POLL_INTERVAL);
        }
    }

    /// Makes the stream with this handle wait for every reduction launched so far.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// The stream belongs to the device of the buckets.
    pub unsafe fn follow(&self, stream: usize) -> Result<()> {
        match self.device_queue.get() {
            // SAFETY: the caller's promise.
            Some(device_queue) => unsafe { device_queue.follow(stream) },
            None => Ok(()),
        }
    }
}
