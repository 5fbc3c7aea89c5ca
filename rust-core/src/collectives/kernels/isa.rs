//! The instruction sets that the loop is compiled for, and the choice between them.

use std::sync::OnceLock;

use half::f16;

use super::Fold;
use super::number::HalfConversion;

type FoldFunction = unsafe fn(&Fold<'_>);

/// Runs `fold` with the best instruction set of this processor.
///
/// # Safety
/// As [`super::fold`].
pub(super) unsafe fn fold(fold: &Fold<'_>) {
    static BEST: OnceLock<FoldFunction> = OnceLock::new();
    let best = BEST.get_or_init(|| candidates().next().expect("the baseline always runs").1);
    // SAFETY: the candidate was offered because the processor has its instructions; the rest is the caller's promise.
    unsafe { best(fold) }
}

/// The variants of the loop that this processor can run, best first.
pub(super) fn candidates() -> impl Iterator<Item = (&'static str, FoldFunction)> {
    let mut found: Vec<(&'static str, FoldFunction)> = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
        {
            found.push(("avx512", x86::avx512));
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            found.push(("avx2", x86::avx2));
        }
    }
    #[cfg(target_arch = "aarch64")]
    found.push(("neon", neon::neon));
    found.push(("baseline", baseline));
    found.into_iter()
}

struct Baseline;

impl HalfConversion for Baseline {
    #[inline(always)]
    fn widen(stored: [u16; 16]) -> [f32; 16] {
        stored.map(|bits| f16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    fn narrow(numbers: [f32; 16]) -> [u16; 16] {
        numbers.map(|number| f16::from_f32(number).to_bits())
    }
}

unsafe fn baseline(fold: &Fold<'_>) {
    // SAFETY: the caller's promise is the callee's.
    unsafe { super::fold::fold::<Baseline>(fold) }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Fold, HalfConversion};

    /// Only named inside [`avx2`], whose callers checked the processor.
    struct Avx2;

    impl HalfConversion for Avx2 {
        #[inline(always)]
        fn widen(stored: [u16; 16]) -> [f32; 16] {
            let mut numbers = [0.0; 16];
            // SAFETY: F16C is there, see the type; the arrays have the sizes that are read and written.
            unsafe {
                let source = stored.as_ptr().cast::<__m128i>();
                let target: *mut f32 = numbers.as_mut_ptr();
                _mm256_storeu_ps(target, _mm256_cvtph_ps(_mm_loadu_si128(source)));
                _mm256_storeu_ps(target.add(8), _mm256_cvtph_ps(_mm_loadu_si128(source.add(1))));
            }
            numbers
        }

        #[inline(always)]
        fn narrow(numbers: [f32; 16]) -> [u16; 16] {
            let mut stored = [0; 16];
            // SAFETY: as in `widen`.
            unsafe {
                let source = numbers.as_ptr();
                let target: *mut __m128i = stored.as_mut_ptr().cast();
                let half = |at| _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(source.add(at)));
                _mm_storeu_si128(target, half(0));
                _mm_storeu_si128(target.add(1), half(8));
            }
            stored
        }
    }

    /// Only named inside [`avx512`], whose callers checked the processor.
    struct Avx512;

    impl HalfConversion for Avx512 {
        #[inline(always)]
        fn widen(stored: [u16; 16]) -> [f32; 16] {
            let mut numbers = [0.0; 16];
            // SAFETY: AVX-512 is there, see the type; the arrays have the sizes that are read and written.
            unsafe {
                let half = _mm256_loadu_si256(stored.as_ptr().cast());
                _mm512_storeu_ps(numbers.as_mut_ptr(), _mm512_cvtph_ps(half));
            }
            numbers
        }

        #[inline(always)]
        fn narrow(numbers: [f32; 16]) -> [u16; 16] {
            let mut stored = [0; 16];
            // SAFETY: as in `widen`.
            unsafe {
                let half = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_loadu_ps(numbers.as_ptr()));
                _mm256_storeu_si256(stored.as_mut_ptr().cast(), half);
            }
            stored
        }
    }

    #[target_feature(enable = "avx2,f16c")]
    pub(super) unsafe fn avx2(fold: &Fold<'_>) {
        // SAFETY: the caller's promise is the callee's.
        unsafe { super::super::fold::fold::<Avx2>(fold) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) unsafe fn avx512(fold: &Fold<'_>) {
        // SAFETY: the caller's promise is the callee's.
        unsafe { super::super::fold::fold::<Avx512>(fold) }
    }
}

/// The compiler makes vectors of everything but the conversions of 16-bit floats: Rust 1.89 has no stable
/// intrinsics for them, and one at a time they cost a call each.
#[cfg(target_arch = "aarch64")]
mod neon {
    use std::arch::aarch64::{float32x4_t, uint16x8_t, vld1q_f32, vld1q_u16, vst1q_f32, vst1q_u16};
    use std::arch::asm;

    use super::{Fold, HalfConversion};

    /// Conversions with the instructions that every processor of this architecture has.
    struct Neon;

    impl HalfConversion for Neon {
        #[inline(always)]
        fn widen(stored: [u16; 16]) -> [f32; 16] {
            let mut numbers = [0.0; 16];
            for at in [0, 8] {
                // SAFETY: the arrays have the sizes that are read and written; the instructions touch registers only.
                unsafe {
                    let source = vld1q_u16(stored.as_ptr().add(at));
                    let (low, high): (float32x4_t, float32x4_t);
                    asm!(
                        "fcvtl {low:v}.4s, {source:v}.4h",
                        "fcvtl2 {high:v}.4s, {source:v}.8h",
                        source = in(vreg) source,
                        low = out(vreg) low,
                        high = out(vreg) high,
                        options(pure, nomem, nostack),
                    );
                    vst1q_f32(numbers.as_mut_ptr().add(at), low);
                    vst1q_f32(numbers.as_mut_ptr().add(at + 4), high);
                }
            }
            numbers
        }

        #[inline(always)]
        fn narrow(numbers: [f32; 16]) -> [u16; 16] {
            let mut stored = [0; 16];
            for at in [0, 8] {
                // SAFETY: as in `widen`.
                unsafe {
                    let low = vld1q_f32(numbers.as_ptr().add(at));
                    let high = vld1q_f32(numbers.as_ptr().add(at + 4));
                    let target: uint16x8_t;
                    asm!(
                        "fcvtn {target:v}.4h, {low:v}.4s",
                        "fcvtn2 {target:v}.8h, {high:v}.4s",
                        low = in(vreg) low,
                        high = in(vreg) high,
                        target = out(vreg) target,
                        options(pure, nomem, nostack),
                    );
                    vst1q_u16(stored.as_mut_ptr().add(at), target);
                }
            }
            stored
        }
    }

    pub(super) unsafe fn neon(fold: &Fold<'_>) {
        // SAFETY: the caller's promise is the callee's.
        unsafe { super::super::fold::fold::<Neon>(fold) }
    }
}
