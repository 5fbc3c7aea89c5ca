//! All-reduces of a few kilobytes between hosts: the values are sent inline with the calls that hosts compare, and one
//! member of each host adds those of all members in rank order. So they wait for one transfer between hosts, instead of
//! one for the agreement and two for each further host of a chain.
//!
//! Each host computes the result for itself: bits are equal, except for the payload of NaNs on different processors.

use crate::buffer::{ReduceOp, TensorView};
use crate::collectives::Group;
use crate::collectives::agreement::{InlineValues, agree_and_combine};
use crate::collectives::call::Call;
use crate::collectives::call_exchange::ValueSpan;
use crate::collectives::kernels::{self, Fold, FoldStage};
use crate::error::Result;

/// The all-reduce of tensors that are small enough ([`crate::collectives::agreement::fits_inline`]).
pub(super) fn all_reduce(
    input: &TensorView,
    output: &TensorView,
    op: ReduceOp,
    call: &Call,
    group: &Group<'_>,
) -> Result<()> {
    let (bytes, dtype) = (input.bytes(), input.dtype());
    let combine = |values: &[ValueSpan], result: *mut u8| {
        let sources: Vec<*const u8> = values.iter().map(|values| values.start).collect();
        let fold = Fold {
            dtype,
            op,
            sources: &sources,
            stage: FoldStage::Whole,
            outputs: &[result],
            elems: bytes / dtype.size(),
            prefetch: std::ptr::null(),
        };
        // SAFETY: sources and result are aligned and have that many elements; the result is this member's input, which
        // may be a source, or apart from all of them. Validation checked the op.
        unsafe { kernels::fold(&fold) };
    };
    let own = ValueSpan { start: input.ptr().cast_const(), bytes };
    // SAFETY: the tensors are the call's, and have equal lengths.
    unsafe { agree_and_combine(call, &InlineValues { own, output: output.ptr(), combine: &combine }, group) }
}
