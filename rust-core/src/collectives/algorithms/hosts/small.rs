//! All-reduces of a few kilobytes between hosts: the values are sent inline with the calls that hosts compare, and one
//! member of each host adds those of all members in rank order. So they wait for one transfer between hosts, instead of
//! one for the agreement and two for each further host of a chain.
//!
//! Each host computes the result for itself: bits are equal, except for the payload of NaNs on different processors.

use crate::buffer::{ReduceOp, TensorView};
use crate::collectives::Group;
use crate::collectives::agreement::{InlineValues, agree_and_combine};
use crate::collectives::call::Call;
use crate::collectives::kernels::{self, Fold, FoldStage};
use crate::error::{Error, Result};

/// The all-reduce of tensors that are small enough ([`crate::collectives::agreement::fits_inline`]).
pub(super) fn all_reduce(
    input: &TensorView,
    output: &TensorView,
    op: ReduceOp,
    call: &Call,
    group: &Group<'_>,
) -> Result<()> {
    let (bytes, dtype) = (input.bytes(), input.dtype());
    let own = match bytes {
        // Its address may be null.
        0 => &[],
        // SAFETY: the tensor is valid for the call, and no other code changes it meanwhile.
        _ => unsafe { std::slice::from_raw_parts(input.ptr().cast_const(), bytes) },
    };
    let combine = |values: &[Vec<u8>]| {
        let words = bytes.div_ceil(16);
        let mut memory = vec![0u128; words * (values.len() + 1)];
        let start: *mut u8 = memory.as_mut_ptr().cast();
        let (result, sources) = (start, (1..=values.len()).map(|place| start.wrapping_add(place * words * 16)));
        let sources: Vec<*const u8> = (sources.zip(values))
            .map(|(place, values)| {
                // SAFETY: each place has as many bytes, and calls that agree have as many values. A rank that sends fewer
                // leaves zeros.
                unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), place, values.len().min(bytes)) };
                place.cast_const()
            })
            .collect();
        let elems = bytes / dtype.size();
        let fold = Fold {
            dtype,
            op,
            sources: &sources,
            stage: FoldStage::Whole,
            outputs: &[result],
            elems,
            prefetch: std::ptr::null(),
        };
        // SAFETY: sources and result are apart, aligned, and have that many elements. Validation checked the op.
        unsafe {
            kernels::fold(&fold);
            std::slice::from_raw_parts(result.cast_const(), bytes).to_vec()
        }
    };
    let combined = agree_and_combine(call, &InlineValues { own, combine: &combine }, group)?;
    if combined.len() != bytes {
        return Err(Error::Internal(format!("a result of {} bytes instead of {bytes}", combined.len())));
    }
    // SAFETY: the output has that many bytes.
    unsafe { super::copy(combined.as_ptr(), output.ptr(), bytes) };
    Ok(())
}
