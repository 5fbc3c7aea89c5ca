//! Device memory for the neutral elements that a joined rank contributes: its script passes no tensors for the
//! others' operations on devices.
//!
//! - SUP-1: each tensor of an operation gets separate memory, because the other members may send their values through
//!   it.
//! - SUP-2: memory is reused when the operation that had it is complete, and freed when the join completes.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::description::Description;
use super::neutral::Neutral;
use crate::buffer::{Device, TensorView};
use crate::device::driver::{available, device_count};
use crate::device::memory::{self, DeviceBuffer};
use crate::device::{Context, Priority, Stream};
use crate::error::{Error, Result};

/// Alignment of tensors.
const ALIGNMENT: usize = 256;
/// Sizes are rounded up to a multiple of this, so that memory fits later operations as well.
const GRAIN: usize = 1 << 20;

/// The candidates for the device on which a joined rank takes part, in order of preference.
#[derive(Clone, Copy, Default)]
pub(super) struct DeviceHints {
    /// The device of its earlier collectives. The other ranks' operations wait for this rank there; with another
    /// device, the group would have to create another communicator, which they do not.
    pub(super) used: Option<u16>,
    /// The device that the script named.
    pub(super) named: Option<u16>,
    /// The framework's current device, which the script may not have chosen.
    pub(super) current: Option<u16>,
    /// The device with the local rank's number.
    pub(super) local_rank: usize,
}

impl DeviceHints {
    /// Returns the device, if there is one. Logs a warning if it is not the one that the script named.
    pub(super) fn device(&self) -> Option<u16> {
        let device = self.choose(available().and_then(|()| device_count()).unwrap_or(0));
        if let Some(text) = self.warning(device) {
            tracing::warn!("{text}");
        }
        device
    }

    fn choose(&self, count: u16) -> Option<u16> {
        let next = u16::try_from(self.local_rank % usize::from(count.max(1))).ok();
        [self.used, self.named, self.current, next].into_iter().flatten().find(|device| *device < count)
    }

    fn warning(&self, device: Option<u16>) -> Option<String> {
        let (named, device) = (self.named?, device?);
        let why = match self.used {
            Some(used) if used == device => "on which it has called collectives",
            _ => "since there is no such device",
        };
        (named != device)
            .then(|| format!("`join()` was called with device {named}: this rank takes part on `cuda:{device}`, {why}"))
    }
}

/// Device memory for the neutral elements that this rank contributes.
pub(super) struct NeutralMemory {
    stream: Arc<Stream>,
    spare: Arc<Mutex<Vec<DeviceBuffer>>>,
}

/// Memory of one operation.
pub(super) struct NeutralBuffers {
    stream: Arc<Stream>,
    buffer: Option<DeviceBuffer>,
    used: usize,
    home: Weak<Mutex<Vec<DeviceBuffer>>>,
}

impl NeutralMemory {
    /// # Errors
    /// [`Error::Device`], [`Error::Unsupported`].
    pub(super) fn of(device: u16) -> Result<Self> {
        let stream = Arc::new(Stream::new(Context::primary(device)?, Priority::Normal)?);
        Ok(Self { stream, spare: Arc::default() })
    }

    /// Allocates memory for tensors of these descriptions.
    ///
    /// # Errors
    /// [`Error::Device`], for example if the memory is exhausted.
    pub(super) fn allocate<'a>(&self, tensors: impl Iterator<Item = &'a Description>) -> Result<NeutralBuffers> {
        let bytes = tensors.map(|one| (one.bytes as usize).next_multiple_of(ALIGNMENT)).sum::<usize>().max(1);
        let mut spare = self.spare.lock();
        let fitting = spare.iter().position(|buffer| buffer.bytes() >= bytes);
        let buffer = match fitting {
            Some(at) => spare.swap_remove(at),
            None => DeviceBuffer::zeroed(self.stream.context(), bytes.next_multiple_of(GRAIN))?,
        };
        drop(spare);
        // SAFETY: the memory belongs to this value, and no operation in flight uses it.
        unsafe { memory::fill(buffer.ptr(), 0, bytes, &self.stream)? };
        Ok(NeutralBuffers {
            stream: self.stream.clone(),
            buffer: Some(buffer),
            used: 0,
            home: Arc::downgrade(&self.spare),
        })
    }
}

impl NeutralBuffers {
    /// Returns the next tensor, filled with neutral elements; the values are there when the stream reaches this
    /// point.
    ///
    /// # Errors
    /// [`Error::Device`]; [`Error::Internal`] if more memory is used than was allocated.
    pub(super) fn next(&mut self, description: &Description) -> Result<TensorView> {
        let elems = description.shape.iter().product::<u64>() as usize;
        let bytes = elems * description.dtype.size();
        let buffer = self.buffer.as_ref().filter(|buffer| self.used + bytes <= buffer.bytes());
        let buffer = buffer.ok_or_else(|| Error::Internal("a tensor has no memory on a device".into()))?;
        let neutral = Neutral::new(description.dtype, description.op, elems.min(1));
        if neutral.as_bytes().iter().any(|byte| *byte != 0) {
            // Rare: minimum, maximum or product.
            let neutral = Neutral::new(description.dtype, description.op, elems);
            buffer.write(self.used, neutral.as_bytes(), &self.stream)?;
        }
        let ptr = (buffer.ptr() + self.used as u64) as *mut u8;
        self.used += bytes.next_multiple_of(ALIGNMENT);
        let device = Device::Cuda(self.stream.context().device());
        // SAFETY: the range lies in the buffer and overlaps no other tensor; the operation keeps the buffers until it
        // is complete.
        unsafe { TensorView::new(ptr, elems, description.dtype, device, self.stream.raw()) }
    }
}

impl Drop for NeutralBuffers {
    fn drop(&mut self) {
        if let (Some(home), Some(buffer)) = (self.home.upgrade(), self.buffer.take()) {
            home.lock().push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_was_used_comes_before_any_other() {
        let hints = DeviceHints { used: Some(1), named: Some(2), current: Some(0), local_rank: 3 };
        assert_eq!(hints.choose(4), Some(1));
        assert_eq!(DeviceHints { used: None, ..hints }.choose(4), Some(2));
        assert_eq!(DeviceHints { used: None, named: None, ..hints }.choose(4), Some(0));
        assert_eq!(DeviceHints { local_rank: 3, ..DeviceHints::default() }.choose(4), Some(3));
        // Each process sees only its own device.
        assert_eq!(DeviceHints { local_rank: 3, ..DeviceHints::default() }.choose(1), Some(0));
        assert_eq!(hints.choose(0), None);
        assert_eq!(DeviceHints { named: Some(4), local_rank: 1, ..DeviceHints::default() }.choose(2), Some(1));
    }

    #[test]
    fn an_unused_device_argument_is_reported() {
        let hints = DeviceHints { used: Some(1), named: Some(0), ..DeviceHints::default() };
        let expected =
            "`join()` was called with device 0: this rank takes part on `cuda:1`, on which it has called collectives";
        assert_eq!(hints.warning(hints.choose(2)).as_deref(), Some(expected));
        let hints = DeviceHints { named: Some(4), ..DeviceHints::default() };
        let expected =
            "`join()` was called with device 4: this rank takes part on `cuda:0`, since there is no such device";
        assert_eq!(hints.warning(hints.choose(2)).as_deref(), Some(expected));
        for hints in [
            DeviceHints { named: Some(1), used: Some(1), ..hints },
            DeviceHints { named: None, used: Some(1), ..hints },
        ] {
            assert_eq!(hints.warning(hints.choose(2)), None);
        }
        // On CPUs, the setting has no effect.
        assert_eq!(hints.warning(hints.choose(0)), None);
    }
}
