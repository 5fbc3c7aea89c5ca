//! Element types, their accumulation types, and what the operations mean for them.

use num_complex::Complex;

/// A type in which values are accumulated. Any bits are a valid value of it.
pub(super) trait Number: Copy {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn divide(self, by: usize) -> Self;
}

/// A [`Number`] with an order.
pub(super) trait Ordered: Number {
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
}

/// A [`Number`] made of bits.
pub(super) trait Bits: Number {
    fn and(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn xor(self, other: Self) -> Self;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn sum(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn product(self, other: Self) -> Self { self.wrapping_mul(other) }
            #[inline(always)]
            fn divide(self, by: usize) -> Self {
                // The widest type, so that the number of ranks fits; the quotient fits the narrow one again.
                (self as i64 / by as i64) as $type
            }
        }
        impl Ordered for $type {
            #[inline(always)]
            fn min(self, other: Self) -> Self { Ord::min(self, other) }
            #[inline(always)]
            fn max(self, other: Self) -> Self { Ord::max(self, other) }
        }
        impl Bits for $type {
            #[inline(always)]
            fn and(self, other: Self) -> Self { self & other }
            #[inline(always)]
            fn or(self, other: Self) -> Self { self | other }
            #[inline(always)]
            fn xor(self, other: Self) -> Self { self ^ other }
        }
    )*};
}
integers!(u8, i8, i16, i32, i64);

macro_rules! floats {
    ($($type:ty),*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn sum(self, other: Self) -> Self { self + other }
            #[inline(always)]
            fn product(self, other: Self) -> Self { self * other }
            #[inline(always)]
            fn divide(self, by: usize) -> Self { self / by as $type }
        }
        impl Ordered for $type {
            #[inline(always)]
            // A value that differs from itself is NaN; this form becomes one vector comparison.
            fn min(self, other: Self) -> Self { if self < other || self != self { self } else { other } }
            #[inline(always)]
            fn max(self, other: Self) -> Self { if self > other || self != self { self } else { other } }
        }
    )*};
}
floats!(f32, f64);

macro_rules! complexes {
    ($($type:ty),*) => {$(
        impl Number for Complex<$type> {
            #[inline(always)]
            fn sum(self, other: Self) -> Self { self + other }
            #[inline(always)]
            fn product(self, other: Self) -> Self { self * other }
            #[inline(always)]
            fn divide(self, by: usize) -> Self { Self::new(self.re / by as $type, self.im / by as $type) }
        }
    )*};
}
complexes!(f32, f64);

/// A bool as torch stores it: one byte, 0 or 1 when written, anything but 0 is true when read. Not a Rust `bool`: a
/// carry that a peer sent may hold any bits.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct BoolByte(u8);

impl Number for BoolByte {
    #[inline(always)]
    fn sum(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
    #[inline(always)]
    fn product(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
    #[inline(always)]
    fn divide(self, _by: usize) -> Self {
        self
    }
}

impl Ordered for BoolByte {
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.product(other)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.sum(other)
    }
}

impl Bits for BoolByte {
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        self.product(other)
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        self.sum(other)
    }
    #[inline(always)]
    fn xor(self, other: Self) -> Self {
        Self(self.0 ^ other.0)
    }
}

/// How elements are stored and converted to numbers, `W` at a time. `I` is the instruction set.
pub(super) trait ElementFormat<I, const W: usize> {
    /// The accumulation type.
    type Number: Number;
    /// The stored type.
    type Stored: Copy;
    fn widen(stored: [Self::Stored; W]) -> [Self::Number; W];
    fn narrow(numbers: [Self::Number; W]) -> [Self::Stored; W];
}

/// Elements that are accumulated in their own type.
pub(super) struct Plain<T>(T);

impl<I, T: Number, const W: usize> ElementFormat<I, W> for Plain<T> {
    type Number = T;
    type Stored = T;
    #[inline(always)]
    fn widen(stored: [T; W]) -> [T; W] {
        stored
    }
    #[inline(always)]
    fn narrow(numbers: [T; W]) -> [T; W] {
        numbers
    }
}

/// Bools.
pub(super) struct Bool;

impl<I, const W: usize> ElementFormat<I, W> for Bool {
    type Number = BoolByte;
    type Stored = u8;
    #[inline(always)]
    fn widen(stored: [u8; W]) -> [BoolByte; W] {
        stored.map(|byte| BoolByte(u8::from(byte != 0)))
    }
    #[inline(always)]
    fn narrow(numbers: [BoolByte; W]) -> [u8; W] {
        numbers.map(|truth| truth.0)
    }
}

/// bfloat16: the upper half of a float32.
pub(super) struct Bf16;

impl<I, const W: usize> ElementFormat<I, W> for Bf16 {
    type Number = f32;
    type Stored = u16;
    #[inline(always)]
    fn widen(stored: [u16; W]) -> [f32; W] {
        stored.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }
    #[inline(always)]
    fn narrow(numbers: [f32; W]) -> [u16; W] {
        numbers.map(|number| {
            let bits = number.to_bits();
            // Round to nearest, ties to even; a NaN keeps its sign and stays one, whatever its low bits.
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
            let nan = (bits >> 16) | 0x40;
            (if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded >> 16 }) as u16
        })
    }
}

/// float16, converted as the instruction set can.
pub(super) struct Half;

/// Conversion between float16 and float32, 16 at a time: the only code here that differs between instruction sets.
pub(super) trait HalfConversion {
    fn widen(stored: [u16; 16]) -> [f32; 16];
    fn narrow(numbers: [f32; 16]) -> [u16; 16];
}

impl<I: HalfConversion> ElementFormat<I, 16> for Half {
    type Number = f32;
    type Stored = u16;
    #[inline(always)]
    fn widen(stored: [u16; 16]) -> [f32; 16] {
        I::widen(stored)
    }
    #[inline(always)]
    fn narrow(numbers: [f32; 16]) -> [u16; 16] {
        I::narrow(numbers)
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn brain_floats_round_as_the_half_crate_does() {
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let number = f32::from_bits(u32::from(high) << 16 | low);
                let [narrow] = <Bf16 as ElementFormat<(), 1>>::narrow([number]);
                assert_eq!(narrow, bf16::from_f32(number).to_bits(), "{number:?} = {:08x}", number.to_bits());
            }
        }
    }
}
