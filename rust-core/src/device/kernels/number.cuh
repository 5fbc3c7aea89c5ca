// Element types in memory, their accumulation types, and the operations: the same as the CPU's kernels (COL-1, COL-2,
// KER-2). NVRTC includes no headers, so the 16-bit floats are defined here.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef short i16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;
typedef float f32;
typedef double f64;

struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct truth { u8 byte; };
struct c64 { f32 re, im; };
struct c128 { f64 re, im; };

// A type of 16 bytes that is aligned to 8 only.
struct Pair { u64 words[2]; };

// 16 bytes that one instruction loads or stores.
typedef uint4 Vector;

// From memory to the accumulation type and back, rounding to nearest, ties to even.
template <typename T> struct Element {
  typedef T Number;
  static __device__ T widen(T stored) { return stored; }
  static __device__ T narrow(T number) { return number; }
};

template <> struct Element<f16> {
  typedef f32 Number;
  static __device__ f32 widen(f16 stored) {
    f32 number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(stored.bits));
    return number;
  }
  static __device__ f16 narrow(f32 number) {
    f16 stored;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(stored.bits) : "f"(number));
    return stored;
  }
};

template <> struct Element<bf16> {
  typedef f32 Number;
  static __device__ f32 widen(bf16 stored) { return __uint_as_float((u32)stored.bits << 16); }
  static __device__ bf16 narrow(f32 number) {
    const u32 bits = __float_as_uint(number);
    // A NaN stays a NaN with its sign, whatever its low bits.
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    const u32 rounded = nan ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1);
    return {(u16)(rounded >> 16)};
  }
};

// A bool as torch stores it: any byte but 0 is true when read, 0 or 1 are written.
template <> struct Element<truth> {
  typedef bool Number;
  static __device__ bool widen(truth stored) { return stored.byte != 0; }
  static __device__ truth narrow(bool number) { return {(u8)number}; }
};

// Integers wrap; what is narrower than an int is widened by the language and wraps when it is assigned.
struct Sum {
  template <typename T> static __device__ T of(T a, T b) { return a + b; }
  static __device__ i32 of(i32 a, i32 b) { return (i32)((u32)a + (u32)b); }
  static __device__ i64 of(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
  static __device__ bool of(bool a, bool b) { return a || b; }
  static __device__ c64 of(c64 a, c64 b) { return {a.re + b.re, a.im + b.im}; }
  static __device__ c128 of(c128 a, c128 b) { return {a.re + b.re, a.im + b.im}; }
  template <typename T> static __device__ T finish(T sum, int) { return sum; }
};

struct Average : Sum {
  template <typename T> static __device__ T finish(T sum, int ranks) { return (T)((i64)sum / ranks); }
  static __device__ f32 finish(f32 sum, int ranks) { return sum / (f32)ranks; }
  static __device__ f64 finish(f64 sum, int ranks) { return sum / (f64)ranks; }
  static __device__ c64 finish(c64 sum, int ranks) { return {sum.re / (f32)ranks, sum.im / (f32)ranks}; }
  static __device__ c128 finish(c128 sum, int ranks) { return {sum.re / (f64)ranks, sum.im / (f64)ranks}; }
};

// A value that differs from itself is NaN, which wins.
struct Min {
  template <typename T> static __device__ T of(T a, T b) { return a < b || a != a ? a : b; }
  template <typename T> static __device__ T finish(T value, int) { return value; }
};

struct Max {
  template <typename T> static __device__ T of(T a, T b) { return a > b || a != a ? a : b; }
  template <typename T> static __device__ T finish(T value, int) { return value; }
};

struct Product {
  template <typename T> static __device__ T of(T a, T b) { return a * b; }
  static __device__ i16 of(i16 a, i16 b) { return (i16)((u32)a * (u32)b); }
  static __device__ i32 of(i32 a, i32 b) { return (i32)((u32)a * (u32)b); }
  static __device__ i64 of(i64 a, i64 b) { return (i64)((u64)a * (u64)b); }
  static __device__ bool of(bool a, bool b) { return a && b; }
  static __device__ c64 of(c64 a, c64 b) { return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; }
  static __device__ c128 of(c128 a, c128 b) { return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; }
  template <typename T> static __device__ T finish(T value, int) { return value; }
};

struct BitAnd {
  template <typename T> static __device__ T of(T a, T b) { return a & b; }
  template <typename T> static __device__ T finish(T value, int) { return value; }
};

struct BitOr {
  template <typename T> static __device__ T of(T a, T b) { return a | b; }
  template <typename T> static __device__ T finish(T value, int) { return value; }
};

struct BitXor {
  template <typename T> static __device__ T of(T a, T b) { return a ^ b; }
  template <typename T> static __device__ T finish(T value, int) { return value; }
};

// Two numbers of 16 bits in a word. EXISTS is false where the device or T has no instructions for them.
template <typename T> struct Packed {
  static constexpr bool EXISTS = false;
  static __device__ u32 sum(u32 a, u32 b);
  static __device__ u32 narrow(f32 low, f32 high);
};

#if __CUDA_ARCH__ >= 800
template <> struct Packed<f16> {
  static constexpr bool EXISTS = true;
  static __device__ u32 sum(u32 a, u32 b) {
    u32 sums;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sums) : "r"(a), "r"(b));
    return sums;
  }
  static __device__ u32 narrow(f32 low, f32 high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
  }
};

template <> struct Packed<bf16> {
  static constexpr bool EXISTS = true;
  static __device__ u32 sum(u32 a, u32 b) {
    const u32 ones = 0x3f803f80;
    u32 sums;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sums) : "r"(a), "r"(ones), "r"(b));
    return sums;
  }
  static __device__ u32 narrow(f32 low, f32 high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
  }
};
#endif

template <typename A, typename B> constexpr bool IS_SAME = false;
template <typename A> constexpr bool IS_SAME<A, A> = true;
