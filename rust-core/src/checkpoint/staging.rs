//! Memory that a copy of the state waits in until it is written. It is kept from one save to the next: fresh memory would
//! cost a page fault for every 4 KiB, which is more than the copy.

use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::{MmapMut, MmapOptions};

use super::write::SourceSlice;
use crate::error::{Error, Result};
use crate::streaming_copy::stream;

/// What one thread copies at a time.
const PART_BYTES: usize = 8 << 20;
/// Where a tensor begins.
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

// SAFETY: parts are of memory that the caller holds, and no two of them are written alike.
unsafe impl Send for CopyRange {}
// SAFETY: as above; a part itself is only read.
unsafe impl Sync for CopyRange {}

impl Staging {
    /// Makes room for so much.
    pub(super) fn reserve(&mut self, bytes: usize) -> Result<()> {
        if self.memory.as_ref().is_none_or(|memory| memory.len() < bytes) {
            // The old one first: both at once might not fit.
            self.memory = None;
            let memory = MmapOptions::new().len(bytes.max(1)).populate().map_anon().map_err(|error| {
                Error::io(format!("getting {bytes} bytes of memory for a copy of the state"), error)
            })?;
            self.memory = Some(memory);
        }
        Ok(())
    }

    /// Copies all sources that nobody holds, by `threads` threads, and points them at the copies. Returns how many bytes that were.
    ///
    /// # Safety
    /// The sources' memory is readable, and written by nobody meanwhile. The copies are valid until the next call.
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
                // SAFETY: the caller's promise for what is read; what is written is ours, and apart from every other part.
                unsafe { stream(part.from, part.to, part.bytes) };
            }
        };
        std::thread::scope(|scope| {
            (1..threads.min(parts.len())).for_each(|_| drop(scope.spawn(work)));
            work();
        });
        Ok(end)
    }
}
