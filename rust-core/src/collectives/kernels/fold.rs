//! The one loop behind every reduction.

use num_complex::Complex;

use super::number::{Bf16, Bits, Bool, ElementFormat, Half, HalfConversion, Number, Ordered, Plain};
use super::{Fold, FoldStage};
use crate::buffer::{DType, ReduceOp};

/// Elements of a block: four vectors of 64 bytes for float32, enough to hide the latency of the operations.
const W: usize = 64;

/// [`super::fold`], compiled into whatever instruction set the caller is compiled for.
///
/// # Safety
/// As [`super::fold`].
#[inline(always)]
pub(super) unsafe fn fold<I: HalfConversion>(fold: &Fold<'_>) {
    // SAFETY: the caller's promise; the arms pick the element type that `dtype` names, whose alignment the caller
    // promises.
    unsafe {
        match fold.dtype {
            DType::UInt8 => integer::<I, u8>(fold),
            DType::Int8 => integer::<I, i8>(fold),
            DType::Int16 => integer::<I, i16>(fold),
            DType::Int32 => integer::<I, i32>(fold),
            DType::Int64 => integer::<I, i64>(fold),
            DType::Float16 => ordered::<I, Half, 16>(fold),
            DType::BFloat16 => ordered::<I, Bf16, W>(fold),
            DType::Float32 => ordered::<I, Plain<f32>, W>(fold),
            DType::Float64 => ordered::<I, Plain<f64>, 32>(fold),
            DType::Bool => bits::<I, Bool, W>(fold),
            DType::Complex64 => complex::<I, f32>(fold),
            DType::Complex128 => complex::<I, f64>(fold),
        }
    }
}

#[inline(always)]
unsafe fn integer<I: HalfConversion, T: Ordered + Bits>(fold: &Fold<'_>) {
    // SAFETY: the caller's promise.
    unsafe { bits::<I, Plain<T>, W>(fold) }
}

#[inline(always)]
unsafe fn bits<I, E: ElementFormat<I, N, Number: Ordered + Bits>, const N: usize>(fold: &Fold<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        match fold.op {
            ReduceOp::BitAnd => run::<I, E, N>(fold, Bits::and, None),
            ReduceOp::BitOr => run::<I, E, N>(fold, Bits::or, None),
            ReduceOp::BitXor => run::<I, E, N>(fold, Bits::xor, None),
            ReduceOp::Sum | ReduceOp::Average | ReduceOp::Min | ReduceOp::Max | ReduceOp::Product => {
                ordered::<I, E, N>(fold)
            }
        }
    }
}

#[inline(always)]
unsafe fn ordered<I, E: ElementFormat<I, N, Number: Ordered>, const N: usize>(fold: &Fold<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        match fold.op {
            ReduceOp::Min => run::<I, E, N>(fold, Ordered::min, None),
            ReduceOp::Max => run::<I, E, N>(fold, Ordered::max, None),
            _ => arithmetic::<I, E, N>(fold),
        }
    }
}

#[inline(always)]
unsafe fn complex<I, T>(fold: &Fold<'_>)
where
    Complex<T>: Number,
{
    // SAFETY: the caller's promise.
    unsafe { arithmetic::<I, Plain<Complex<T>>, 16>(fold) }
}

#[inline(always)]
unsafe fn arithmetic<I, E: ElementFormat<I, N>, const N: usize>(fold: &Fold<'_>) {
    let ranks = match fold.stage {
        FoldStage::Last { ranks, .. } => ranks,
        FoldStage::Whole | FoldStage::Middle { .. } => fold.sources.len(),
    };
    // SAFETY: the caller's promise.
    unsafe {
        match fold.op {
            ReduceOp::Sum => run::<I, E, N>(fold, Number::sum, None),
            ReduceOp::Average => run::<I, E, N>(fold, Number::sum, Some(ranks)),
            ReduceOp::Product => run::<I, E, N>(fold, Number::product, None),
            other => unreachable!("`check` refuses {other:?} of {}", fold.dtype),
        }
    }
}

#[inline(always)]
unsafe fn run<I, E: ElementFormat<I, N>, const N: usize>(
    fold: &Fold<'_>,
    combine: impl Fn(E::Number, E::Number) -> E::Number + Copy,
    divide: Option<usize>,
) {
    let [first, rest @ ..] = fold.sources else { return };
    let stored = size_of::<E::Stored>();
    let number = size_of::<E::Number>();
    let (carry, carries_on) = match fold.stage {
        FoldStage::Whole => (std::ptr::null(), false),
        FoldStage::Middle { carry } => (carry, true),
        FoldStage::Last { carry, .. } => (carry, false),
    };
    let load = |source: &*const u8, at: usize| -> [E::Number; N] {
        // SAFETY: the caller promises `elems` elements, and the block ends before that.
        E::widen(unsafe { source.add(at * stored).cast::<[E::Stored; N]>().read_unaligned() })
    };
    let finish = |mut block: [E::Number; N]| -> [E::Stored; N] {
        if let Some(by) = divide {
            block = block.map(|number| number.divide(by));
        }
        E::narrow(block)
    };
    let mut at = 0;
    while at + N <= fold.elems {
        if !fold.prefetch.is_null() {
            fetch(fold.prefetch.wrapping_add(at * stored), N * stored);
        }
        let mut block = load(first, at);
        if !carry.is_null() {
            // SAFETY: as in `load`; any bits are a value of every number type.
            let before = unsafe { carry.add(at * number).cast::<[E::Number; N]>().read_unaligned() };
            for lane in 0..N {
                block[lane] = combine(before[lane], block[lane]);
            }
        }
        for source in rest {
            let other = load(source, at);
            for lane in 0..N {
                block[lane] = combine(block[lane], other[lane]);
            }
        }
        if carries_on {
            for output in fold.outputs {
                // SAFETY: as in `load`.
                unsafe { output.add(at * number).cast::<[E::Number; N]>().write_unaligned(block) };
            }
        } else {
            let block = finish(block);
            for output in fold.outputs {
                // SAFETY: as in `load`; the whole block was read before.
                unsafe { output.add(at * stored).cast::<[E::Stored; N]>().write_unaligned(block) };
            }
        }
        at += N;
    }
    let left = fold.elems - at;
    if left == 0 {
        return;
    }
    // The rest goes through a block of its own, so that it is the same arithmetic.
    let load_rest = |source: &*const u8| -> [E::Number; N] {
        // SAFETY: zero bytes are a value of every stored type, which are all integers and floats; `left` elements
        // from `at` on are inside what the caller promises.
        unsafe {
            let mut block: [E::Stored; N] = std::mem::zeroed();
            std::ptr::copy_nonoverlapping(source.add(at * stored), block.as_mut_ptr().cast(), left * stored);
            E::widen(block)
        }
    };
    let mut block = load_rest(first);
    if !carry.is_null() {
        // SAFETY: as in `load_rest`.
        let before = unsafe {
            let mut before: [E::Number; N] = std::mem::zeroed();
            std::ptr::copy_nonoverlapping(
                carry.add(at * number),
                std::ptr::from_mut(&mut before).cast(),
                left * number,
            );
            before
        };
        for lane in 0..N {
            block[lane] = combine(before[lane], block[lane]);
        }
    }
    for source in rest {
        let other = load_rest(source);
        for lane in 0..N {
            block[lane] = combine(block[lane], other[lane]);
        }
    }
    if carries_on {
        for output in fold.outputs {
            // SAFETY: as in `load_rest`.
            unsafe { std::ptr::copy_nonoverlapping(block.as_ptr().cast(), output.add(at * number), left * number) };
        }
        return;
    }
    let block = finish(block);
    for output in fold.outputs {
        // SAFETY: as in `load_rest`.
        unsafe { std::ptr::copy_nonoverlapping(block.as_ptr().cast(), output.add(at * stored), left * stored) };
    }
}

/// Prefetches these bytes into the core's cache.
#[inline(always)]
fn fetch(from: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..bytes).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch reads nothing that the program sees and cannot fault.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(at).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, bytes);
}
