//! Memory for values that are on their way between hosts. A group keeps some of it between operations
//! ([`MAX_KEPT_BYTES`]), because the system has to clear new pages, and a large reduction would need many for each call.

use parking_lot::Mutex;

/// Enough for the pieces that are in flight between a few hosts.
pub(crate) const MAX_KEPT_BYTES: usize = 4 << 20;

/// Buffers of a group that no operation uses, those used last behind.
#[derive(Debug, Default)]
pub(crate) struct ScratchMemory {
    free: Mutex<Vec<Vec<u128>>>,
}

impl ScratchMemory {
    /// Returns a buffer of at least `bytes` bytes, with any contents.
    pub(crate) fn take(&self, bytes: usize) -> Vec<u128> {
        let words = bytes.div_ceil(16);
        let mut free = self.free.lock();
        let found = free.iter().rposition(|buffer| buffer.len() >= words);
        found.map_or_else(|| vec![0; words], |at| free.remove(at))
    }

    /// Keeps a buffer for the next operations, instead of the least recently used ones if there are too many.
    pub(crate) fn put(&self, buffer: Vec<u128>) {
        if buffer.is_empty() || size_of_val(&buffer[..]) > MAX_KEPT_BYTES {
            return;
        }
        let mut free = self.free.lock();
        free.push(buffer);
        let mut kept: usize = free.iter().map(|buffer| size_of_val(&buffer[..])).sum();
        while kept > MAX_KEPT_BYTES {
            kept -= size_of_val(&free.remove(0)[..]);
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
        let words = MAX_KEPT_BYTES / 16 / 4;
        (0..10).for_each(|_| scratch.put(vec![0; words]));
        assert!((3..=4).contains(&scratch.free.lock().len()));
    }
}
