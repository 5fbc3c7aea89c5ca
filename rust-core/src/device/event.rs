//! Events: markers in a stream that other streams wait for and the host polls.

use cudarc::driver::sys::{self, CUresult};

use super::driver::{Context, check};
use super::ending;
use super::stream::Stream;
use crate::error::Result;

/// An event without timing, which is cheaper.
#[derive(Debug)]
pub struct Event {
    raw: sys::CUevent,
    context: &'static Context,
}

// SAFETY: CUDA's events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; the value is never changed once made.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event; it counts as done until it is first recorded.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    pub fn new(context: &'static Context) -> Result<Self> {
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: `raw` is valid for the write and the context is current.
        check(unsafe { sys::cuEventCreate(&mut raw, flags) }, || {
            format!("creating an event on `cuda:{}`", context.device())
        })?;
        Ok(Self { raw, context })
    }

    pub(crate) fn handle(&self) -> sys::CUevent {
        self.raw
    }

    /// Records the event behind the work in `stream` so far; replaces an earlier record.
    ///
    /// # Errors
    /// [`crate::Error::Device`]; the stream must be of the event's device.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        let _entered = stream.context().enter()?;
        // SAFETY: both handles live; the context is current, which the default stream needs.
        check(unsafe { sys::cuEventRecord(self.raw, stream.handle()) }, || {
            format!("recording an event on `cuda:{}`", self.context.device())
        })
    }

    /// Whether the recorded work is done.
    ///
    /// # Errors
    /// [`crate::Error::Device`], also if that work failed.
    pub fn is_done(&self) -> Result<bool> {
        let _guard = ending::enter_driver()?;
        // SAFETY: the event lives; the query needs no current context.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => check(answer, || format!("querying an event of `cuda:{}`", self.context.device())).map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: no other code uses the event; the driver keeps it while streams wait for it. An error means
            // that the driver is shutting down.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
