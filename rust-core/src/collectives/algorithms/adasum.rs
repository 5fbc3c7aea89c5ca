//! Adasum by recursive doubling: in step k, members whose numbers differ in bit k exchange their vectors, and both
//! combine them. Both get the same bits, because the formula is symmetric in the two vectors.

use half::{bf16, f16};

use super::{Algorithm, copy};
use crate::buffer::{DType, TensorView};
use crate::collectives::agreement;
use crate::collectives::call::{Call, Kind};
use crate::collectives::{Group, Request};
use crate::error::Result;

/// Adasum over messages or shared memory; the number of members is a power of 2.
pub(super) struct Adasum;

/// Vectors whose squared norm is below this, the root of the smallest normal double, count as zero.
const LEAST_NORM: f64 = 1.5e-154;

impl Algorithm for Adasum {
    fn name(&self) -> &'static str {
        "adasum"
    }

    fn accepts(&self, call: &Call, _group: &Group<'_>) -> bool {
        call.kind == Kind::Adasum
    }

    fn run(&self, request: &Request, call: &Call, group: &Group<'_>) -> Result<()> {
        let Request::Adasum { input, output } = request else { unreachable!("`accepts` looked at the kind") };
        match group.memory {
            Some(memory) => {
                agreement::publish(memory, call, 0);
                agreement::agree(memory, call, group)?;
            }
            None => agreement::agree_without_memory(call, group)?,
        }
        // SAFETY: validation ensured equal lengths; they are the same memory or do not overlap.
        unsafe { copy(input.ptr(), output.ptr(), input.bytes()) };
        let (me, size) = (group.members.me, group.members.size());
        // A vector of words, so that every element type is aligned.
        let mut theirs = vec![0u64; output.bytes().div_ceil(8)];
        let mut distance = 1;
        while distance < size {
            let peer = me ^ distance;
            let (to, from) = (output.ptr().cast_const(), theirs.as_mut_ptr().cast::<u8>());
            super::messages::exchange(group, &[(peer, to, output.bytes())], &[(peer, from, output.bytes())])?;
            combine(output, theirs.as_ptr().cast());
            distance *= 2;
        }
        Ok(())
    }
}

/// Replaces `output` by its combination with as many elements at `theirs`.
fn combine(output: &TensorView, theirs: *const u8) {
    macro_rules! each {
        ($type:ty, $widen:expr, $narrow:expr) => {{
            // SAFETY: the view's promise; `theirs` has as many elements, and is aligned to words.
            let (ours, theirs) = unsafe {
                (
                    std::slice::from_raw_parts_mut(output.ptr().cast::<$type>(), output.elems()),
                    std::slice::from_raw_parts(theirs.cast::<$type>(), output.elems()),
                )
            };
            combine_values(ours, theirs, $widen, $narrow)
        }};
    }
    if output.elems() == 0 {
        return;
    }
    match output.dtype() {
        DType::Float16 => each!(u16, |bits| f16::from_bits(bits).to_f64(), |value| f16::from_f64(value).to_bits()),
        DType::BFloat16 => each!(u16, |bits| bf16::from_bits(bits).to_f64(), |value| bf16::from_f64(value).to_bits()),
        DType::Float32 => each!(f32, f64::from, |value: f64| value as f32),
        DType::Float64 => each!(f64, |value| value, |value| value),
        other => unreachable!("a call of {other} is refused"),
    }
}

fn combine_values<T: Copy>(ours: &mut [T], theirs: &[T], widen: fn(T) -> f64, narrow: fn(f64) -> T) {
    let (mut dot, mut our_norm, mut their_norm) = (0.0, 0.0, 0.0);
    for (one, other) in ours.iter().zip(theirs) {
        let (one, other) = (widen(*one), widen(*other));
        dot += one * other;
        our_norm += one * one;
        their_norm += other * other;
    }
    let share = |norm: f64| if norm < LEAST_NORM { 1.0 } else { 1.0 - dot / (2.0 * norm) };
    let (ours_by, theirs_by) = (share(our_norm), share(their_norm));
    for (one, other) in ours.iter_mut().zip(theirs) {
        *one = narrow(widen(*one) * ours_by + widen(*other) * theirs_by);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parallel_vectors_are_averaged_and_orthogonal_ones_added() {
        let mixed = |ours: &[f32], theirs: &[f32]| {
            let mut ours = ours.to_vec();
            combine_values(&mut ours, theirs, f64::from, |value| value as f32);
            ours
        };
        assert_eq!(mixed(&[2.0, 0.0], &[4.0, 0.0]), [3.0, 0.0]);
        assert_eq!(mixed(&[2.0, 0.0], &[0.0, 5.0]), [2.0, 5.0]);
        assert_eq!(mixed(&[0.0, 0.0], &[1.0, 5.0]), [1.0, 5.0]);
        assert_eq!(mixed(&[1.0, 2.0], &[3.0, 1.0]), mixed(&[3.0, 1.0], &[1.0, 2.0]));
    }
}
