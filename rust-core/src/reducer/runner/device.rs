//! Buckets on a CUDA device (RED-7).

use std::sync::Arc;

use super::Reducer;
use crate::buffer::Device;
use crate::device::Context;
use crate::error::{Error, Result};
use crate::reducer::device_queue::{DeviceBucket, DeviceQueue, HeldBucket, Launched};

impl Reducer {
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
    /// `completed` is called when the device is done, from a thread of the core, unless this is an error.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// Until `completed` is called, the memory is valid and nobody else touches it. What was done to it before, also by who
    /// had it before, was queued into the bucket's stream, one of the device's.
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
            completed(outcome);
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
}
