//! Memory of this rank's device for what it contributes after it has joined: its script gives it no tensors to others'
//! operations on devices.
//!
//! - SUP-1: each tensor of an operation gets memory of its own, as the others may send their values through it.
//! - SUP-2: memory is used again once an operation that had it is over, and freed when the join is.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::description::Description;
use super::neutral::Neutral;
use crate::buffer::{Device, TensorView};
use crate::device::driver::{available, device_count};
use crate::device::memory::{self, DeviceBuffer};
use crate::device::{Context, Priority, Stream};
use crate::error::{Error, Result};

/// Where tensors begin.
const ALIGNMENT: usize = 256;
/// Memory comes in multiples of this, so that it fits the next operation as well.
const GRAIN: usize = 1 << 20;

/// The device that a rank takes part on which has joined, if there is one: the one that the script has named, which it has
/// used, or the one with its number on the host.
pub(super) fn device(named: Option<u16>, used: Option<u16>, local_rank: usize) -> Option<u16> {
    let count = available().and_then(|()| device_count()).unwrap_or(0);
    choose(named, used, local_rank, count)
}

fn choose(named: Option<u16>, used: Option<u16>, local_rank: usize, count: u16) -> Option<u16> {
    let next = u16::try_from(local_rank % usize::from(count.max(1))).ok();
    named.or(used).or(next).filter(|device| *device < count)
}

/// See the module's text.
pub(super) struct Supply {
    stream: Arc<Stream>,
    spare: Arc<Mutex<Vec<DeviceBuffer>>>,
}

/// Memory of one operation.
pub(super) struct Loan {
    stream: Arc<Stream>,
    buffer: Option<DeviceBuffer>,
    used: usize,
    home: Weak<Mutex<Vec<DeviceBuffer>>>,
}

impl Supply {
    /// # Errors
    /// [`Error::Device`], [`Error::Unsupported`].
    pub(super) fn of(device: u16) -> Result<Self> {
        let stream = Arc::new(Stream::new(Context::primary(device)?, Priority::Normal)?);
        Ok(Self { stream, spare: Arc::default() })
    }

    /// Memory for tensors of these descriptions.
    ///
    /// # Errors
    /// [`Error::Device`], when the memory is exhausted for example.
    pub(super) fn lend<'a>(&self, tensors: impl Iterator<Item = &'a Description>) -> Result<Loan> {
        let bytes = tensors.map(|one| (one.bytes as usize).next_multiple_of(ALIGNMENT)).sum::<usize>().max(1);
        let mut spare = self.spare.lock();
        let fitting = spare.iter().position(|buffer| buffer.bytes() >= bytes);
        let buffer = match fitting {
            Some(at) => spare.swap_remove(at),
            None => DeviceBuffer::zeroed(self.stream.context(), bytes.next_multiple_of(GRAIN))?,
        };
        drop(spare);
        // SAFETY: the memory is ours, and nothing that is under way uses it.
        unsafe { memory::fill(buffer.ptr(), 0, bytes, &self.stream)? };
        Ok(Loan { stream: self.stream.clone(), buffer: Some(buffer), used: 0, home: Arc::downgrade(&self.spare) })
    }
}

impl Loan {
    /// The next tensor's memory, full of what changes nothing; it is there when its stream gets so far.
    ///
    /// # Errors
    /// [`Error::Device`]; [`Error::Internal`] if there is less memory than was asked for.
    pub(super) fn next(&mut self, description: &Description) -> Result<TensorView> {
        let elems = description.shape.iter().product::<u64>() as usize;
        let bytes = elems * description.dtype.size();
        let buffer = self.buffer.as_ref().filter(|buffer| self.used + bytes <= buffer.bytes());
        let buffer = buffer.ok_or_else(|| Error::Internal("a tensor has no memory on a device".into()))?;
        let neutral = Neutral::new(description.dtype, description.op, elems.min(1));
        if neutral.as_bytes().iter().any(|byte| *byte != 0) {
            // Seldom: a minimum, a maximum or a product.
            let neutral = Neutral::new(description.dtype, description.op, elems);
            buffer.write(self.used, neutral.as_bytes(), &self.stream)?;
        }
        let ptr = (buffer.ptr() + self.used as u64) as *mut u8;
        self.used += bytes.next_multiple_of(ALIGNMENT);
        let device = Device::Cuda(self.stream.context().device());
        // SAFETY: the range lies in the buffer, apart from other tensors', and the operation keeps the loan until it is over.
        unsafe { TensorView::new(ptr, elems, description.dtype, device, self.stream.raw()) }
    }
}

impl Drop for Loan {
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
    fn a_device_that_was_named_comes_before_one_that_was_used() {
        assert_eq!(choose(Some(1), Some(0), 0, 2), Some(1));
        assert_eq!(choose(None, Some(0), 1, 2), Some(0));
        assert_eq!(choose(None, None, 1, 2), Some(1));
        // Each process sees its own device only.
        assert_eq!(choose(None, None, 3, 1), Some(0));
        assert_eq!(choose(None, None, 0, 0), None);
        assert_eq!(choose(Some(4), None, 0, 2), None);
    }
}
