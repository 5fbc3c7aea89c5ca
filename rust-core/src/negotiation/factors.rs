//! Prescale and postscale factors of reductions.
//!
//! - FAC-1: floats are scaled in their own type (float16 and bfloat16 in float32, then rounded), integers in float64
//!   and truncated toward zero. So the result does not depend on the place where values are scaled.

use std::fmt;

use half::{bf16, f16};

use crate::buffer::{DType, ReduceOp, TensorView};
use crate::collectives::Request;
use crate::error::{Error, Result};

/// Factors of a reduction.
#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize)]
pub struct Factors {
    /// Prescale factor: each rank's values are multiplied by it before the reduction.
    pub before: f64,
    /// Postscale factor: the result is multiplied by it.
    pub after: f64,
    /// The caller multiplies (as for tensors on devices), and ranks only compare the factors.
    pub by_caller: bool,
}

impl Default for Factors {
    fn default() -> Self {
        Self { before: 1.0, after: 1.0, by_caller: false }
    }
}

// Compared by their bits, so that a NaN equals itself.
impl PartialEq for Factors {
    fn eq(&self, other: &Self) -> bool {
        self.bits() == other.bits()
    }
}

impl Eq for Factors {}

impl std::hash::Hash for Factors {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.bits().hash(state);
    }
}

impl fmt::Display for Factors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "prescale factor {}, postscale factor {}", self.before, self.after)
    }
}

/// A reduction with its factors, as the communicator runs it.
pub(super) struct Scaled {
    pub(super) request: Request,
    /// The output to scale after the reduction, and its factor.
    pub(super) after: Option<(TensorView, f64)>,
    /// Scaled copies that `request` reads instead of the caller's tensors.
    pub(super) memory: Vec<u64>,
}

impl Factors {
    fn bits(&self) -> (u64, u64, bool) {
        (self.before.to_bits(), self.after.to_bits(), self.by_caller)
    }

    /// Whether both factors are 1.
    pub fn are_one(&self) -> bool {
        self.before == 1.0 && self.after == 1.0
    }

    /// # Errors
    /// [`Error::InvalidArgument`] or [`Error::Unsupported`] if factors do not apply to the operation.
    pub(super) fn check(&self, dtype: DType, on_device: bool) -> Result<()> {
        if self.are_one() {
            return Ok(());
        }
        if dtype == DType::Bool {
            return Err(Error::InvalidArgument(format!("{self}: bool values cannot be scaled")));
        }
        if on_device && !self.by_caller {
            return Err(Error::Unsupported(format!("{self}: tensors on devices are scaled by the caller")));
        }
        Ok(())
    }

    /// Applies the prescale factor for a group of `size`, and returns the work that follows the reduction.
    ///
    /// # Errors
    /// [`Error::Internal`] if a view of the scaled copy is invalid.
    pub(super) fn apply(&self, request: Request, size: usize) -> Result<Scaled> {
        let mut scaled = Scaled { request, after: None, memory: Vec::new() };
        if self.are_one() || self.by_caller {
            return Ok(scaled);
        }
        let (op, output) = match &mut scaled.request {
            Request::AllReduce { input, output, op } => {
                self.scale_input(input, output);
                (Some(op), *output)
            }
            Request::Adasum { input, output } => {
                self.scale_input(input, output);
                (None, *output)
            }
            Request::ReduceScatter { inputs, output, op } => {
                if self.before != 1.0 {
                    // The caller's input must not change, and the output is too short for a copy.
                    let bytes = inputs.iter().map(|input| input.bytes().next_multiple_of(16)).sum::<usize>();
                    scaled.memory = vec![0; bytes.div_ceil(8)];
                    let mut next = scaled.memory.as_mut_ptr().cast::<u8>();
                    for input in inputs {
                        // SAFETY: the memory has room for all inputs, each at a multiple of 16 bytes, and lives as long
                        // as the request.
                        let copy = unsafe {
                            TensorView::new(next, input.elems(), input.dtype(), input.device(), input.stream())?
                        };
                        // SAFETY: the views' promise; no other code uses the copy.
                        unsafe { copy.as_bytes_mut().copy_from_slice(input.as_bytes()) };
                        scale(&copy, self.before);
                        // SAFETY: as above.
                        next = unsafe { next.add(input.bytes().next_multiple_of(16)) };
                        *input = copy;
                    }
                }
                (Some(op), *output)
            }
            _ => return Ok(scaled),
        };
        if self.after != 1.0 {
            let mut factor = self.after;
            if let Some(op) = op.filter(|op| **op == ReduceOp::Average) {
                // One multiplication by both factors, so that integers are truncated once.
                *op = ReduceOp::Sum;
                factor /= size as f64;
            }
            scaled.after = Some((output, factor));
        }
        Ok(scaled)
    }

    fn scale_input(&self, input: &mut TensorView, output: &TensorView) {
        if self.before == 1.0 {
            return;
        }
        if input.ptr() != output.ptr() {
            // SAFETY: the views' promise; they are equally long, and the same memory or apart.
            unsafe { output.as_bytes_mut().copy_from_slice(input.as_bytes()) };
            *input = *output;
        }
        scale(output, self.before);
    }
}

/// Multiplies every element (FAC-1).
pub(super) fn scale(view: &TensorView, factor: f64) {
    macro_rules! each {
        ($type:ty, $scaled:expr) => {{
            let scaled = $scaled;
            if view.elems() > 0 {
                // SAFETY: the view's promise: as many elements of this type, aligned, that no other code touches.
                let values = unsafe { std::slice::from_raw_parts_mut(view.ptr().cast::<$type>(), view.elems()) };
                values.iter_mut().for_each(|value| *value = scaled(*value));
            }
        }};
    }
    let narrow = factor as f32;
    match view.dtype() {
        DType::UInt8 => each!(u8, |value| (f64::from(value) * factor) as u8),
        DType::Int8 => each!(i8, |value| (f64::from(value) * factor) as i8),
        DType::Int16 => each!(i16, |value| (f64::from(value) * factor) as i16),
        DType::Int32 => each!(i32, |value| (f64::from(value) * factor) as i32),
        DType::Int64 => each!(i64, |value: i64| (value as f64 * factor) as i64),
        DType::Float16 => each!(u16, |bits| f16::from_f32(f16::from_bits(bits).to_f32() * narrow).to_bits()),
        DType::BFloat16 => each!(u16, |bits| bf16::from_f32(bf16::from_bits(bits).to_f32() * narrow).to_bits()),
        DType::Float32 => each!(f32, |value: f32| value * narrow),
        DType::Float64 => each!(f64, |value: f64| value * factor),
        DType::Complex64 => each!([f32; 2], |value: [f32; 2]| value.map(|part| part * narrow)),
        DType::Complex128 => each!([f64; 2], |value: [f64; 2]| value.map(|part| part * factor)),
        // Rejected by `check`.
        DType::Bool => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Device;

    fn view<T>(values: &mut [T], dtype: DType) -> TensorView {
        // SAFETY: the values live as long as the test that uses the view.
        unsafe { TensorView::new(values.as_mut_ptr().cast(), values.len(), dtype, Device::Cpu, 0) }.expect("aligned")
    }

    #[test]
    fn integers_are_scaled_as_float64_and_truncated_toward_zero() {
        let mut values = [7i32, -7, 3, 0];
        scale(&view(&mut values, DType::Int32), 0.5);
        assert_eq!(values, [3, -3, 1, 0]);
        let mut narrow = [100u8, 3];
        scale(&view(&mut narrow, DType::UInt8), 1.5);
        assert_eq!(narrow, [150, 4]);
    }

    #[test]
    fn the_average_of_integers_is_truncated_once() {
        let mut values = [5i32];
        let data = view(&mut values, DType::Int32);
        let factors = Factors { after: 3.0, ..Factors::default() };
        let request = Request::AllReduce { input: data, output: data, op: ReduceOp::Average };
        let scaled = factors.apply(request, 2).expect("it is a reduction");
        assert!(matches!(scaled.request, Request::AllReduce { op: ReduceOp::Sum, .. }));
        let (output, factor) = scaled.after.expect("there is a factor");
        scale(&output, factor);
        assert_eq!(values, [7]);
    }

    #[test]
    fn factors_that_the_caller_applies_are_only_compared() {
        let factors = Factors { before: 2.0, after: 3.0, by_caller: true };
        assert!(factors.check(DType::Float32, true).is_ok());
        assert!(Factors { by_caller: false, ..factors }.check(DType::Float32, true).is_err());
        assert_ne!(factors, Factors { before: 4.0, ..factors });
        let mut values = [5.0f32];
        let data = view(&mut values, DType::Float32);
        let request = Request::AllReduce { input: data, output: data, op: ReduceOp::Average };
        let scaled = factors.apply(request, 2).expect("it is a reduction");
        assert!(scaled.after.is_none());
        assert!(matches!(scaled.request, Request::AllReduce { op: ReduceOp::Average, .. }));
        assert_eq!(values, [5.0]);
    }

    #[test]
    fn the_input_of_a_reduce_scatter_stays_as_it_is() {
        let (mut first, mut second, mut out) = ([1.0f32, 2.0, 3.0], [4.0f32], [0.0f32; 3]);
        let inputs = vec![view(&mut first, DType::Float32), view(&mut second, DType::Float32)];
        let request = Request::ReduceScatter { inputs, output: view(&mut out, DType::Float32), op: ReduceOp::Sum };
        let scaled = Factors { before: 2.0, ..Factors::default() }.apply(request, 2).expect("it is a reduction");
        let Request::ReduceScatter { inputs, .. } = &scaled.request else { unreachable!() };
        let read = |view: &TensorView| {
            // SAFETY: `scaled` holds the memory.
            unsafe { std::slice::from_raw_parts(view.ptr().cast::<f32>(), view.elems()) }.to_vec()
        };
        assert_eq!((read(&inputs[0]), read(&inputs[1])), (vec![2.0, 4.0, 6.0], vec![8.0]));
        assert_eq!((first, second), ([1.0, 2.0, 3.0], [4.0]));
    }
}
