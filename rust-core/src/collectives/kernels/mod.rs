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

use super::ReduceOp;
use crate::buffer::DType;

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
    /// Where the result goes.
    pub(crate) outputs: &'a [*mut u8],
    /// Elements of each.
    pub(crate) elems: usize,
}

/// Whether values of `dtype` can be combined by `op`.
///
/// # Errors
/// Why not.
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
/// Every source is valid for reads and every output for writes of `elems` elements, aligned to the element's parts. An
/// output is the same memory as a source or does not overlap it. [`check`] accepts the pair of dtype and op.
pub(crate) unsafe fn fold(fold: &Fold<'_>) {
    // SAFETY: the caller's promise is the callee's.
    unsafe { isa::fold(fold) }
}
