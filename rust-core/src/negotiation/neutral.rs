//! Neutral elements, which a rank that has joined contributes to reductions.

use crate::buffer::{DType, Device, ReduceOp, TensorView};
use crate::error::Result;

/// Memory filled with neutral elements, for a reduction whose result this rank ignores.
pub(super) struct Neutral {
    /// Words, so that every element type is aligned.
    words: Vec<u64>,
    elems: usize,
    dtype: DType,
}

impl Neutral {
    pub(super) fn new(dtype: DType, op: ReduceOp, elems: usize) -> Self {
        let element = element(dtype, op);
        // A word contains whole elements, or an element consists of two equal words.
        let word: [u8; 8] = std::array::from_fn(|at| element[at % element.len().min(8)]);
        let mut words = vec![u64::from_ne_bytes(word); (elems * dtype.size()).div_ceil(8)];
        if element.len() == 16 {
            let second = u64::from_ne_bytes(element[8..].try_into().expect("half of 16 bytes"));
            words.iter_mut().skip(1).step_by(2).for_each(|word| *word = second);
        }
        Self { words, elems, dtype }
    }

    /// The elements.
    pub(super) fn as_bytes(&self) -> &[u8] {
        // SAFETY: the words are initialised, and hold that many elements.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.elems * self.dtype.size()) }
    }

    /// The memory, which must live until the operation is over.
    pub(super) fn view(&mut self) -> Result<TensorView> {
        // SAFETY: the words hold that many elements; the caller keeps them.
        unsafe { TensorView::new(self.words.as_mut_ptr().cast(), self.elems, self.dtype, Device::Cpu, 0) }
    }
}

fn element(dtype: DType, op: ReduceOp) -> Vec<u8> {
    use ReduceOp::*;
    match op {
        Sum | Average | BitOr | BitXor => vec![0; dtype.size()],
        BitAnd if dtype == DType::Bool => vec![1],
        BitAnd => vec![0xff; dtype.size()],
        Product => number(dtype, 1.0, 1),
        Min => number(dtype, f64::INFINITY, i64::MAX),
        Max => number(dtype, f64::NEG_INFINITY, i64::MIN),
    }
}

/// The float, or the nearest value of the integer type.
fn number(dtype: DType, float: f64, integer: i64) -> Vec<u8> {
    match dtype {
        DType::UInt8 => (integer.clamp(0, 255) as u8).to_ne_bytes().to_vec(),
        DType::Int8 => (integer.clamp(i8::MIN.into(), i8::MAX.into()) as i8).to_ne_bytes().to_vec(),
        DType::Int16 => (integer.clamp(i16::MIN.into(), i16::MAX.into()) as i16).to_ne_bytes().to_vec(),
        DType::Int32 => (integer.clamp(i32::MIN.into(), i32::MAX.into()) as i32).to_ne_bytes().to_vec(),
        DType::Int64 => integer.to_ne_bytes().to_vec(),
        DType::Float16 => half::f16::from_f64(float).to_ne_bytes().to_vec(),
        DType::BFloat16 => half::bf16::from_f64(float).to_ne_bytes().to_vec(),
        DType::Float32 => (float as f32).to_ne_bytes().to_vec(),
        DType::Float64 => float.to_ne_bytes().to_vec(),
        DType::Bool => vec![u8::from(integer > 0)],
        DType::Complex64 => [float as f32, 0.0].map(f32::to_ne_bytes).concat(),
        DType::Complex128 => [float, 0.0].map(f64::to_ne_bytes).concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collectives::{kernels, reference};

    #[test]
    fn neutral_elements_change_nothing() {
        for dtype in DType::ALL {
            for op in ReduceOp::ALL.into_iter().filter(|op| kernels::check(dtype, *op).is_ok()) {
                let values = number(dtype, 3.0, 3).repeat(5);
                let neutral = Neutral::new(dtype, op, 5);
                let bytes = neutral.as_bytes();
                let folded = reference::fold(dtype, op, &[bytes, &values]);
                let expected = match op {
                    ReduceOp::Average => reference::fold(dtype, op, &[&vec![0; values.len()], &values]),
                    _ => reference::fold(dtype, op, &[&values]),
                };
                assert_eq!(folded, expected, "{dtype} {op:?}");
            }
        }
    }
}
