//! Memory for values that are on their way between hosts. A group keeps it between operations, because the system has to
//! clear new pages, and a large reduction would need many for each call.

use parking_lot::Mutex;

use super::depth::MAX_DEPTH;

/// Buffers of a group that no operation uses.
#[derive(Debug, Default)]
pub(crate) struct ScratchMemory {
    free: Mutex<Vec<Vec<u128>>>,
}

impl ScratchMemory {
    /// Returns a buffer of at least `bytes` bytes, with any contents.
    pub(crate) fn take(&self, bytes: usize) -> Vec<u128> {
        let words = bytes.div_ceil(16);
        let free = self.free.lock().pop();
        free.filter(|buffer| buffer.len() >= words).unwrap_or_else(|| vec![0; words])
    }

    /// Keeps a buffer for the next operation, unless there are enough.
    pub(crate) fn put(&self, buffer: Vec<u128>) {
        let mut free = self.free.lock();
        if free.len() < MAX_DEPTH && !buffer.is_empty() {
            free.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_if_it_is_long_enough() {
        let scratch = ScratchMemory::default();
        let buffer = scratch.take(100);
        assert_eq!(buffer.len(), 7);
        let address = buffer.as_ptr();
        scratch.put(buffer);
        let same = scratch.take(80);
        assert_eq!(same.as_ptr(), address);
        scratch.put(same);
        assert!(scratch.take(1000).len() * 16 >= 1000);
        (0..2 * MAX_DEPTH).for_each(|_| scratch.put(vec![0; 1]));
        assert_eq!(scratch.free.lock().len(), MAX_DEPTH);
    }
}
