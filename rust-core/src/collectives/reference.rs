//! The results of operations, computed in the simplest way: one value at a time, without vectors, threads or
//! transports. Tests compare every algorithm with it, bit by bit. It shares no code with the kernels.

use half::{bf16, f16};

use crate::buffer::DType;
use crate::buffer::ReduceOp;

/// The fold of `inputs` (one per rank, in rank order, raw bytes of the same length) as COL-1 and COL-2 define it, and
/// for the corner cases as the kernels' KER-2 does.
///
/// # Panics
/// If the operation is not defined for the element type, or lengths differ.
pub fn fold(dtype: DType, op: ReduceOp, inputs: &[&[u8]]) -> Vec<u8> {
    macro_rules! values {
        ($type:ty, $one:expr) => {{
            let one = $one;
            each(inputs, |values: Vec<[u8; size_of::<$type>()]>| {
                let values: Vec<$type> = values.into_iter().map(<$type>::from_ne_bytes).collect();
                one(values).to_ne_bytes()
            })
        }};
    }
    macro_rules! integers {
        ($type:ty) => {
            values!($type, |values: Vec<$type>| {
                let first = values[0];
                let rest = values[1..].iter().copied();
                match op {
                    ReduceOp::Sum => rest.fold(first, <$type>::wrapping_add),
                    ReduceOp::Average => {
                        let sum = rest.fold(first, <$type>::wrapping_add);
                        (i128::from(sum) / values.len() as i128) as $type
                    }
                    ReduceOp::Min => rest.fold(first, <$type>::min),
                    ReduceOp::Max => rest.fold(first, <$type>::max),
                    ReduceOp::Product => rest.fold(first, <$type>::wrapping_mul),
                    ReduceOp::BitAnd => rest.fold(first, |a, b| a & b),
                    ReduceOp::BitOr => rest.fold(first, |a, b| a | b),
                    ReduceOp::BitXor => rest.fold(first, |a, b| a ^ b),
                }
            })
        };
    }
    macro_rules! floats {
        ($type:ty, $stored:ty, $from:expr, $to:expr) => {
            values!($stored, |values: Vec<$stored>| {
                let values: Vec<$type> = values.into_iter().map($from).collect();
                let first = values[0];
                let rest = values[1..].iter().copied();
                let folded: $type = match op {
                    ReduceOp::Sum => rest.fold(first, |a, b| a + b),
                    ReduceOp::Average => rest.fold(first, |a, b| a + b) / values.len() as $type,
                    ReduceOp::Min => rest.fold(first, |a, b| if a < b || a.is_nan() { a } else { b }),
                    ReduceOp::Max => rest.fold(first, |a, b| if a > b || a.is_nan() { a } else { b }),
                    ReduceOp::Product => rest.fold(first, |a, b| a * b),
                    other => panic!("{other:?} of {dtype}"),
                };
                $to(folded)
            })
        };
    }
    match dtype {
        DType::UInt8 => integers!(u8),
        DType::Int8 => integers!(i8),
        DType::Int16 => integers!(i16),
        DType::Int32 => integers!(i32),
        DType::Int64 => integers!(i64),
        DType::Float16 => {
            floats!(f32, u16, |bits| f16::from_bits(bits).to_f32(), |value| f16::from_f32(value).to_bits())
        }
        DType::BFloat16 => {
            floats!(f32, u16, |bits| bf16::from_bits(bits).to_f32(), |value| bf16::from_f32(value).to_bits())
        }
        DType::Float32 => floats!(f32, f32, |value| value, |value: f32| value),
        DType::Float64 => floats!(f64, f64, |value| value, |value: f64| value),
        DType::Bool => each(inputs, |values: Vec<[u8; 1]>| {
            let mut truths = values.into_iter().map(|[byte]| byte != 0);
            let truth = match op {
                ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => truths.any(|truth| truth),
                ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => truths.all(|truth| truth),
                ReduceOp::BitXor => truths.filter(|truth| *truth).count() % 2 == 1,
                ReduceOp::Average => panic!("{op:?} of {dtype}"),
            };
            [u8::from(truth)]
        }),
        DType::Complex64 => complex::<4, 8, f32>(op, inputs, f32::from_ne_bytes, f32::to_ne_bytes, |n| n as f32),
        DType::Complex128 => complex::<8, 16, f64>(op, inputs, f64::from_ne_bytes, f64::to_ne_bytes, |n| n as f64),
    }
}

/// Applies `one` to the values of all ranks, element by element.
fn each<const N: usize>(inputs: &[&[u8]], one: impl Fn(Vec<[u8; N]>) -> [u8; N]) -> Vec<u8> {
    let elems = inputs[0].len() / N;
    assert!(inputs.iter().all(|input| input.len() == elems * N), "inputs have one length");
    let at = |input: &[u8], at: usize| input[at * N..][..N].try_into().expect("the slice has N bytes");
    (0..elems).flat_map(|index| one(inputs.iter().map(|input| at(input, index)).collect())).collect()
}

fn complex<const H: usize, const N: usize, T>(
    op: ReduceOp,
    inputs: &[&[u8]],
    from: fn([u8; H]) -> T,
    to: fn(T) -> [u8; H],
    count: fn(usize) -> T,
) -> Vec<u8>
where
    T: Copy + std::ops::Add<Output = T> + std::ops::Sub<Output = T> + std::ops::Mul<Output = T>,
    T: std::ops::Div<Output = T>,
{
    each(inputs, |values: Vec<[u8; N]>| {
        let half = |value: &[u8]| from(value.try_into().expect("half of N bytes"));
        let pairs: Vec<(T, T)> = values.iter().map(|value| (half(&value[..H]), half(&value[H..]))).collect();
        let mut folded = pairs[0];
        for (re, im) in &pairs[1..] {
            folded = match op {
                ReduceOp::Sum | ReduceOp::Average => (folded.0 + *re, folded.1 + *im),
                ReduceOp::Product => (folded.0 * *re - folded.1 * *im, folded.0 * *im + folded.1 * *re),
                other => panic!("{other:?} of complex values"),
            };
        }
        if op == ReduceOp::Average {
            folded = (folded.0 / count(pairs.len()), folded.1 / count(pairs.len()));
        }
        let mut bytes = [0; N];
        bytes[..H].copy_from_slice(&to(folded.0));
        bytes[H..].copy_from_slice(&to(folded.1));
        bytes
    })
}
