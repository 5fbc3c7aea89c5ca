//! Copies a gradient into its slot.

/// Below this many bytes the copy stays in the cache, where the reduction finds it.
const STREAM_BYTES: usize = 1 << 20;

/// Copies `bytes` bytes from `from` to `to`.
///
/// A large gradient is written around the cache: the plain way reads every line of the slot before it is overwritten,
/// a third of the traffic for nothing.
///
/// # Safety
/// `from` is readable and `to` is writable for `bytes` bytes, and they do not overlap.
pub unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) {
    if bytes == 0 {
        // An empty tensor has no address.
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if bytes >= STREAM_BYTES && (to as usize).is_multiple_of(64) && std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the caller's promise; the processor has AVX, and `to` is aligned.
        return unsafe { stream(to, from, bytes) };
    }
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) }
}

/// # Safety
/// As [`copy`]; `to` is a multiple of 64.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn stream(to: *mut u8, from: *const u8, bytes: usize) {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};

    let whole = bytes / 64 * 64;
    let mut at = 0;
    while at < whole {
        // SAFETY: `at + 64 <= bytes`, so both lines lie inside; `to + at` is a multiple of 32.
        unsafe {
            let (source, target) = (from.add(at).cast::<__m256i>(), to.add(at).cast::<__m256i>());
            let (low, high) = (_mm256_loadu_si256(source), _mm256_loadu_si256(source.add(1)));
            _mm256_stream_si256(target, low);
            _mm256_stream_si256(target.add(1), high);
        }
        at += 64;
    }
    // Streaming stores are not ordered with the stores that announce them.
    _mm_sfence();
    // SAFETY: the rest lies inside.
    unsafe { std::ptr::copy_nonoverlapping(from.add(whole), to.add(whole), bytes - whole) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_every_byte_at_every_size_and_alignment() {
        #[repr(align(64))]
        struct Aligned([u8; STREAM_BYTES + 256]);
        let source: Vec<u8> = (0..STREAM_BYTES + 256).map(|i| (i * 31 % 251) as u8).collect();
        let mut target = Box::new(Aligned([0; STREAM_BYTES + 256]));
        for (to, from, bytes) in
            [(0, 0, 0), (0, 1, 100), (0, 3, STREAM_BYTES), (64, 5, STREAM_BYTES + 63), (1, 0, STREAM_BYTES + 1)]
        {
            target.0.fill(0);
            // SAFETY: offsets and lengths lie inside the two arrays.
            unsafe { copy(target.0.as_mut_ptr().add(to), source.as_ptr().add(from), bytes) };
            assert_eq!(target.0[to..to + bytes], source[from..from + bytes]);
            assert!(target.0[to + bytes..].iter().all(|&byte| byte == 0));
        }
    }
}
