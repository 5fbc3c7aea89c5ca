//! Streams: queues of device work.

use cudarc::driver::sys::{self, CUresult, CUstreamCaptureStatus};

use super::driver::{Context, check};
use super::event::Event;
use crate::error::Result;

/// Priority of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// The default priority.
    Normal,
    /// High priority, for communication kernels, which are small and which peers wait for.
    High,
}

/// The handle of the legacy default stream is 0 or 1.
const LEGACY: usize = 1;

/// A capture of streams into a CUDA graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capture {
    number: Option<u64>,
}

impl Capture {
    /// Whether both are surely one capture.
    pub fn is(&self, other: &Capture) -> bool {
        self.number.is_some() && self.number == other.number
    }
}

/// A stream, which is destroyed with the value if the core created it.
#[derive(Debug)]
pub struct Stream {
    raw: sys::CUstream,
    context: &'static Context,
    owned: bool,
}

// SAFETY: CUDA's streams may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the value is never changed once made.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a stream that does not synchronise with the legacy default stream.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    pub fn new(context: &'static Context, priority: Priority) -> Result<Self> {
        let (least, greatest) = context.priorities()?;
        let priority = if priority == Priority::High { greatest } else { least };
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `raw` is valid for the write and the context is current.
        check(unsafe { sys::cuStreamCreateWithPriority(&mut raw, flags, priority) }, || {
            format!("creating a stream on `cuda:{}`", context.device())
        })?;
        Ok(Self { raw, context, owned: true })
    }

    /// Wraps a stream of the framework. 0 is the legacy default stream.
    ///
    /// # Safety
    /// `raw` is a stream of `context`, and stays one while the value lives.
    pub unsafe fn borrowed(context: &'static Context, raw: usize) -> Self {
        Self { raw: raw as sys::CUstream, context, owned: false }
    }

    /// CUDA's handle.
    pub fn raw(&self) -> usize {
        self.raw as usize
    }

    /// The context that the stream belongs to.
    pub fn context(&self) -> &'static Context {
        self.context
    }

    pub(crate) fn handle(&self) -> sys::CUstream {
        self.raw
    }

    /// Makes later work in the stream wait for `event`, which may belong to another device. The host does not wait.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    pub fn wait(&self, event: &Event) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: both handles live; the context is current, which the default stream needs.
        check(unsafe { sys::cuStreamWaitEvent(self.raw, event.handle(), 0) }, || {
            format!("making a stream of `cuda:{}` wait for an event", self.context.device())
        })
    }

    /// Whether the stream is being captured into a CUDA graph.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    pub fn is_capturing(&self) -> Result<bool> {
        // The legacy default stream cannot be captured, and the query would invalidate a capture on another thread.
        if self.raw as usize <= LEGACY {
            return Ok(false);
        }
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let _entered = self.context.enter()?;
        // SAFETY: `status` is valid for the write and the stream lives.
        check(unsafe { sys::cuStreamIsCapturing(self.raw, &mut status) }, || self.capture_query())?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// The capture in which the stream takes part: streams with the same number become parts of one graph. There is
    /// no number if the driver is too old to report it.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    pub fn capture(&self) -> Result<Option<Capture>> {
        if !self.is_capturing()? {
            return Ok(None);
        }
        // SAFETY: the driver is loaded, since there is a stream; the symbol is only looked for.
        let known = unsafe { sys::culib().get::<*const ()>(b"cuStreamGetCaptureInfo_v3\0") }.is_ok();
        if !known {
            return Ok(Some(Capture { number: None }));
        }
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let mut number = 0;
        let _entered = self.context.enter()?;
        // SAFETY: status and number are valid for the writes; the other answers are not asked for; the driver has the
        // function.
        let answer = unsafe {
            use std::ptr::null_mut as none;
            sys::cuStreamGetCaptureInfo_v3(self.raw, &mut status, &mut number, none(), none(), none(), none())
        };
        check(answer, || self.capture_query())?;
        Ok(Some(Capture { number: Some(number) }))
    }

    fn capture_query(&self) -> String {
        format!("querying whether a stream of `cuda:{}` is captured", self.context.device())
    }

    /// Whether all queued work is done.
    ///
    /// # Errors
    /// [`crate::Error::Device`], also if earlier work failed.
    pub fn is_idle(&self) -> Result<bool> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream lives.
        match unsafe { sys::cuStreamQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => check(answer, || format!("querying a stream of `cuda:{}`", self.context.device())).map(|()| true),
        }
    }

    /// Waits until all queued work is done, without a time limit: only for work that does not wait for other members.
    ///
    /// # Errors
    /// [`crate::Error::Device`], also if earlier work failed.
    pub fn synchronize(&self) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream lives.
        check(unsafe { sys::cuStreamSynchronize(self.raw) }, || {
            format!("waiting for a stream of `cuda:{}`", self.context.device())
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned
            && let Ok(_entered) = self.context.enter()
        {
            // SAFETY: the stream is ours and no code uses it any more; queued work is completed by the driver. An error
            // means that the driver is shutting down.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}
