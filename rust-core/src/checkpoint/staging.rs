//! Memory for the copy of the state that a background save writes. It is reused by the next save, because page faults
//! of fresh memory would cost more than the copy.

use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::{MmapMut, MmapOptions};

use super::write::SourceSlice;
use crate::bulk_copy;
use crate::error::{Error, Result};

/// Bytes that one thread copies at a time.
const PART_BYTES: usize = 8 << 20;
/// Alignment of tensors in the buffer, in bytes.
const ALIGN: usize = 64;

/// A host buffer that holds the copy of one save's tensors.
#[derive(Debug, Default)]
pub(super) struct Staging {
    memory: Option<MmapMut>,
}

#[derive(Clone, Copy)]
struct CopyRange {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
}

// SAFETY: sources are memory that the caller holds, and no two destinations overlap.
unsafe impl Send for CopyRange {}
// SAFETY: as above; a source is only read.
unsafe impl Sync for CopyRange {}

impl Staging {
    /// Grows the buffer to `bytes` bytes.
    pub(super) fn reserve(&mut self, bytes: usize) -> Result<()> {
        if self.memory.as_ref().is_none_or(|memory| memory.len() < bytes) {
            // Frees the old buffer first, because both at once might not fit.
            self.memory = None;
            let memory = MmapOptions::new().len(bytes.max(1)).populate().map_anon().map_err(|error| {
                Error::io(format!("getting {bytes} bytes of memory for a copy of the state"), error)
            })?;
            self.memory = Some(memory);
        }
        Ok(())
    }

    /// Copies all sources that the job's owner does not hold, with `threads` threads, and points them at the copies.
    /// Returns the number of copied bytes.
    ///
    /// # Safety
    /// The sources' memory is readable and not written meanwhile. The copies are valid until the next call.
    pub(super) unsafe fn take(&mut self, sources: &mut [SourceSlice], threads: usize) -> Result<usize> {
        let mut sources: Vec<&mut SourceSlice> = sources.iter_mut().filter(|source| !source.held).collect();
        let mut end = 0;
        let places: Vec<usize> = sources
            .iter()
            .map(|source| {
                let at = end;
                end = (at + source.bytes() as usize).next_multiple_of(ALIGN);
                at
            })
            .collect();
        self.reserve(end)?;
        let base = self.memory.as_mut().expect("it was reserved").as_mut_ptr();
        let mut parts = Vec::new();
        for (source, place) in sources.iter_mut().zip(places) {
            // SAFETY: the place lies inside the memory, with all of the source's bytes.
            let to = unsafe { base.add(place) };
            let bytes = source.bytes() as usize;
            for at in (0..bytes).step_by(PART_BYTES) {
                // SAFETY: both ranges have `bytes` bytes.
                let (from, to) = unsafe { (source.address.add(at), to.add(at)) };
                parts.push(CopyRange { from, to, bytes: PART_BYTES.min(bytes - at) });
            }
            source.address = to;
        }
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                // SAFETY: the caller's promise for the source; the destination is in this buffer and does not overlap
                // any other.
                unsafe { bulk_copy::streaming(part.from, part.to, part.bytes) };
            }
        };
        std::thread::scope(|scope| {
            (1..threads.min(parts.len())).for_each(|_| drop(scope.spawn(work)));
            work();
        });
        Ok(end)
    }
}
