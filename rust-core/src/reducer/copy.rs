//! Copies gradients on the CPU to the spare range from which their bucket is reduced, and back, and converts their types.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::buffer::DType;
use crate::bulk_copy;

/// A copy of a gradient, which may convert its element type.
#[derive(Clone, Copy, Debug)]
pub struct Move {
    /// Source address.
    pub from: *const u8,
    /// Element type of the source.
    pub from_dtype: DType,
    /// Destination address.
    pub to: *mut u8,
    /// Element type of the destination.
    pub to_dtype: DType,
    /// Number of elements.
    pub elems: usize,
}

impl Move {
    /// The copy in the opposite direction.
    pub fn reversed(self) -> Self {
        Self {
            from: self.to,
            from_dtype: self.to_dtype,
            to: self.from.cast_mut(),
            to_dtype: self.from_dtype,
            elems: self.elems,
        }
    }
}

/// The type in which `dtype` values are sent if compression to `wire` is requested: `wire` for wider floats,
/// otherwise `dtype`.
pub fn wire_dtype(dtype: DType, wire: DType) -> DType {
    let float = matches!(dtype, DType::Float32 | DType::Float64);
    if float && matches!(wire, DType::Float16 | DType::BFloat16) { wire } else { dtype }
}

/// Performs all copies of a bucket. Types differ only as [`wire_dtype`] says.
///
/// # Safety
/// Every source is readable and every destination writable for its elements, aligned to them; no destination overlaps
/// a source.
pub unsafe fn copy_all(moves: impl Iterator<Item = Move>) {
    for Move { from, from_dtype, to, to_dtype, elems } in moves {
        if from_dtype == to_dtype {
            // SAFETY: the caller's promise.
            unsafe { bulk_copy::ordinary(from, to, elems * from_dtype.size()) };
            continue;
        }
        macro_rules! cast {
            ($source:ty, $target:ty, $run:expr) => {{
                // SAFETY: the caller's promise.
                let (source, target) = unsafe {
                    (
                        std::slice::from_raw_parts(from.cast::<$source>(), elems),
                        std::slice::from_raw_parts_mut(to.cast::<$target>(), elems),
                    )
                };
                let run: fn(&[$source], &mut [$target]) = $run;
                run(source, target)
            }};
        }
        match (from_dtype, to_dtype) {
            (DType::Float32, DType::Float16) => cast!(f32, f16, |from, to| to.convert_from_f32_slice(from)),
            (DType::Float16, DType::Float32) => cast!(f16, f32, |from, to| from.convert_to_f32_slice(to)),
            (DType::Float32, DType::BFloat16) => cast!(f32, bf16, |from, to| each(from, to, narrow)),
            (DType::BFloat16, DType::Float32) => cast!(bf16, f32, |from, to| each(from, to, bf16::to_f32)),
            (DType::Float64, DType::Float16) => cast!(f64, f16, |from, to| each(from, to, f16::from_f64)),
            (DType::Float16, DType::Float64) => cast!(f16, f64, |from, to| each(from, to, f16::to_f64)),
            (DType::Float64, DType::BFloat16) => cast!(f64, bf16, |from, to| each(from, to, bf16::from_f64)),
            (DType::BFloat16, DType::Float64) => cast!(bf16, f64, |from, to| each(from, to, bf16::to_f64)),
            _ => unreachable!("`wire_dtype` makes no other pair"),
        }
    }
}

fn each<S: Copy, T>(from: &[S], to: &mut [T], convert: impl Fn(S) -> T) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to = convert(from);
    }
}

/// `bf16::from_f32` without a branch, so that the compiler can vectorize it.
fn narrow(number: f32) -> bf16 {
    let bits = number.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let nan = (bits >> 16) | 0x40;
    bf16::from_bits((if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded }) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_travel_as_narrower_ones_and_come_back() {
        let values = [0.1, -1.0, 65504.0, 3.0e38, f32::NAN, 1.0 + f32::EPSILON, 0.0, -0.0, 1.5e-8];
        for wire in [DType::Float16, DType::BFloat16] {
            let mut narrow = [0u16; 9];
            let mut back = [0f32; 9];
            let there = Move {
                from: values.as_ptr().cast(),
                from_dtype: DType::Float32,
                to: narrow.as_mut_ptr().cast(),
                to_dtype: wire,
                elems: 9,
            };
            // SAFETY: arrays of nine elements.
            unsafe { copy_all([there].into_iter()) };
            let and_back = Move {
                from: narrow.as_ptr().cast(),
                from_dtype: wire,
                to: back.as_mut_ptr().cast(),
                to_dtype: DType::Float32,
                elems: 9,
            };
            // SAFETY: as above.
            unsafe { copy_all([and_back].into_iter()) };
            for (value, back) in values.into_iter().zip(back) {
                let expected = match wire {
                    DType::Float16 => f16::from_f32(value).to_f32(),
                    _ => bf16::from_f32(value).to_f32(),
                };
                assert!(expected.to_bits() == back.to_bits() || (value.is_nan() && back.is_nan()), "{value} {back}");
            }
        }
        assert_eq!(wire_dtype(DType::Float64, DType::Float16), DType::Float16);
        assert_eq!(wire_dtype(DType::BFloat16, DType::Float16), DType::BFloat16);
        assert_eq!(wire_dtype(DType::Complex64, DType::Float16), DType::Complex64);
    }
}
