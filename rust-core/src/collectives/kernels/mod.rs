//! Arithmetic on memory: the fold of several sources in order, into one or several outputs.
//!
//! One generic loop ([`fold`]) is compiled for each instruction set ([`isa`]) and chosen once at run time. Blocks of
//! elements are loaded, folded and stored whole, so that the compiler keeps them in vector registers, and so that an
//! output may be the same memory as a source.
//!
//! - KER-1: the result does not depend on the instruction set, the block size or the alignment: each element is
//!   folded on its own, in the order of the sources (COL-1).
//! - KER-2: integers wrap. The average of integers is their (wrapped) sum divided by the number of ranks, truncated
//!   towards zero. Minimum and maximum of floats are NaN if any value is. Bools are false or true: any value but zero
//!   counts as true, sum, maximum and `BitOr` are "or", product, minimum and `BitAnd` are "and".

use crate::buffer::DType;
use crate::buffer::ReduceOp;

mod fold;
mod isa;
mod number;

/// Sources, outputs and operation of one fold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fold<'a> {
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    /// One pointer a rank, in rank order.
    pub(crate) sources: &'a [*const u8],
    /// Whether this is the whole fold, or a part of one.
    pub(crate) stage: FoldStage,
    /// Where the result goes.
    pub(crate) outputs: &'a [*mut u8],
    /// Elements of each.
    pub(crate) elems: usize,
    /// As many bytes as a source has, which will be read next: fetched into the cache meanwhile. Null for none; only
    /// a hint, so it need not be valid.
    pub(crate) prefetch: *const u8,
}

/// A reduction over many ranks may be divided among several places, one after the other. Each continues with the
/// result of the one before it, in the accumulation type ([`carry_bytes`]), and the last one rounds. So the result is
/// that of one fold (COL-1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FoldStage {
    /// All ranks are sources.
    Whole,
    /// The sources follow the ranks whose result is `carry`; null if there are none. The outputs are a carry again.
    Middle { carry: *const u8 },
    /// The sources are the last ones of `ranks`, after those of a carry.
    Last { carry: *const u8, ranks: usize },
}

/// Bytes of one element of a carry.
pub(crate) fn carry_bytes(dtype: DType) -> usize {
    match dtype {
        DType::Float16 | DType::BFloat16 => 4,
        other => other.size(),
    }
}

/// Whether an element and its carry are the same bytes.
pub(crate) fn is_own_carry(dtype: DType) -> bool {
    // Any byte but zero is true, and its carry is one.
    carry_bytes(dtype) == dtype.size() && dtype != DType::Bool
}

/// Whether values of `dtype` can be combined by `op`.
///
/// # Errors
/// If they cannot be combined, with the reason.
pub(crate) fn check(dtype: DType, op: ReduceOp) -> Result<(), String> {
    use DType::*;
    use ReduceOp::*;
    let floating = matches!(dtype, Float16 | BFloat16 | Float32 | Float64);
    let complex = matches!(dtype, Complex64 | Complex128);
    match op {
        Min | Max if complex => Err(format!("{dtype} values have no order, so they have no {op:?}")),
        BitAnd | BitOr | BitXor if floating || complex => {
            Err(format!("{op:?} needs integers or bools, the tensor is {dtype}"))
        }
        Average if dtype == Bool => Err(format!("the average of {dtype} values is not a {dtype}")),
        Sum | Average | Min | Max | Product | BitAnd | BitOr | BitXor => Ok(()),
    }
}

/// Runs a fold.
///
/// # Safety
/// Every source is valid for reads and every output for writes of `elems` elements, aligned to the element's parts; a
/// carry, in or out, for as many elements of [`carry_bytes`]. An output is the same memory as a source or does not
/// overlap it. [`check`] accepts the pair of dtype and op.
pub(crate) unsafe fn fold(fold: &Fold<'_>) {
    // SAFETY: the caller's promise is the callee's.
    unsafe { isa::fold(fold) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collectives::reference;

    /// Aligned for every element.
    fn words(bytes: &[u8]) -> Vec<u128> {
        let mut words = vec![0u128; bytes.len().div_ceil(16)];
        for (at, byte) in bytes.iter().enumerate() {
            words[at / 16] |= u128::from(*byte) << (at % 16 * 8);
        }
        words
    }

    /// Any bits at all for integers; for floats one rank has any bits, among them NaN and infinities, and the others
    /// numbers: which of two NaN survives an addition is the processor's choice.
    fn values(dtype: DType, elems: usize, rank: usize, seed: &mut u64) -> Vec<u8> {
        let wild =
            matches!(dtype, DType::UInt8 | DType::Int8 | DType::Int16 | DType::Int32 | DType::Int64 | DType::Bool);
        let mut bytes = Vec::new();
        while bytes.len() < elems * dtype.size() {
            *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let random = *seed >> 24;
            let number = (random % 4001) as f64 / 1000.0 - 2.0;
            let any = wild || (rank == 1 && random.is_multiple_of(5));
            match dtype {
                _ if any => bytes.extend(random.to_ne_bytes()[..dtype.size().min(5)].iter().rev()),
                DType::Float16 => bytes.extend(half::f16::from_f64(number).to_bits().to_ne_bytes()),
                DType::BFloat16 => bytes.extend(half::bf16::from_f64(number).to_bits().to_ne_bytes()),
                DType::Float32 | DType::Complex64 => bytes.extend((number as f32).to_ne_bytes()),
                _ => bytes.extend(number.to_ne_bytes()),
            }
            let part = if dtype.size() == 16 { 8 } else { dtype.size().min(4) };
            let whole = bytes.len().next_multiple_of(part);
            bytes.resize(whole, 0x7f);
        }
        bytes.truncate(elems * dtype.size());
        bytes
    }

    #[test]
    fn every_instruction_set_agrees_with_the_reference() {
        let mut seed = 1;
        for (name, run) in isa::candidates() {
            for dtype in DType::ALL {
                for op in ReduceOp::ALL.into_iter().filter(|op| check(dtype, *op).is_ok()) {
                    for (size, elems) in [(1, 5), (2, 0), (2, 129), (3, 64), (3, 200), (5, 17)] {
                        let inputs: Vec<_> = (0..size).map(|rank| values(dtype, elems, rank, &mut seed)).collect();
                        let expected =
                            reference::fold(dtype, op, &inputs.iter().map(Vec::as_slice).collect::<Vec<_>>());
                        let mut sources: Vec<_> = inputs.iter().map(|input| words(input)).collect();
                        let mut other = vec![0u128; (elems * dtype.size()).div_ceil(16)];
                        // In place of one source, and somewhere else too.
                        let place: *mut u8 = sources[size / 2].as_mut_ptr().cast();
                        let outputs = [place, other.as_mut_ptr().cast()];
                        let pointers: Vec<*const u8> = sources.iter().map(|source| source.as_ptr().cast()).collect();
                        let prefetch = std::ptr::null();
                        // SAFETY: all have `elems` elements, aligned; the one overlap is a whole source.
                        unsafe {
                            run(&Fold {
                                dtype,
                                op,
                                sources: &pointers,
                                stage: FoldStage::Whole,
                                outputs: &outputs,
                                elems,
                                prefetch,
                            })
                        };
                        for output in outputs {
                            // SAFETY: as above.
                            let found = unsafe { std::slice::from_raw_parts(output, expected.len()) };
                            if let Some(at) = (0..found.len()).find(|at| found[*at] != expected[*at]) {
                                let at = at / dtype.size();
                                panic!("{name} {dtype} {op:?} of {size}: element {at} of {elems} differs");
                            }
                        }
                    }
                }
            }
        }
    }
    #[test]
    fn a_fold_in_parts_is_the_whole_fold() {
        let mut seed = 7;
        for (name, run) in isa::candidates() {
            for dtype in DType::ALL {
                for op in ReduceOp::ALL.into_iter().filter(|op| check(dtype, *op).is_ok()) {
                    for (cuts, elems) in [(&[0, 1, 2][..], 5), (&[0, 2, 5], 200), (&[0, 1, 4, 6], 129)] {
                        let size = cuts[cuts.len() - 1];
                        let inputs: Vec<_> = (0..size).map(|rank| values(dtype, elems, rank, &mut seed)).collect();
                        let expected =
                            reference::fold(dtype, op, &inputs.iter().map(Vec::as_slice).collect::<Vec<_>>());
                        let sources: Vec<_> = inputs.iter().map(|input| words(input)).collect();
                        let pointers: Vec<*const u8> = sources.iter().map(|source| source.as_ptr().cast()).collect();
                        let mut carry: Vec<u128> = Vec::new();
                        for cut in cuts.windows(2) {
                            let mut output = vec![0u128; (elems * carry_bytes(dtype)).div_ceil(16)];
                            let from = if cut[0] == 0 { std::ptr::null() } else { carry.as_ptr().cast() };
                            let last = cut[1] == size;
                            let part = match last {
                                true => FoldStage::Last { carry: from, ranks: size },
                                false => FoldStage::Middle { carry: from },
                            };
                            let outputs = [output.as_mut_ptr().cast()];
                            let sources = &pointers[cut[0]..cut[1]];
                            let prefetch = std::ptr::null();
                            // SAFETY: all have `elems` elements, aligned; nothing overlaps.
                            unsafe {
                                run(&Fold { dtype, op, sources, stage: part, outputs: &outputs, elems, prefetch })
                            };
                            carry = output;
                        }
                        // SAFETY: the last output holds `elems` elements.
                        let found = unsafe { std::slice::from_raw_parts(carry.as_ptr().cast::<u8>(), expected.len()) };
                        assert!(found == expected.as_slice(), "{name} {dtype} {op:?} of {size}: {elems}");
                    }
                }
            }
        }
    }
}
