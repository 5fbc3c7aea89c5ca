// Access to tensors of TYPE in vectors.
#pragma once

#include "number.cuh"

constexpr int LANES = 16 / sizeof(TYPE), WORDS = 4;

union Lanes {
  Vector vector;
  TYPE values[LANES];
  u32 words[WORDS];
  __device__ Lanes() {}
};

static __device__ __forceinline__ bool aligned(const void *address) { return (u64)address % 16 == 0; }

// Loads vector `at` of a tensor, which may start at any element and end inside a vector.
static __device__ __forceinline__ Vector load(const TYPE *from, u64 at, u64 elems, bool whole) {
  if (whole && (at + 1) * LANES <= elems) return ((const Vector *)from)[at];
  Lanes lanes;
  lanes.vector = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int lane = 0; lane < LANES; ++lane)
    if (at * LANES + lane < elems) lanes.values[lane] = from[at * LANES + lane];
  return lanes.vector;
}

// Does nothing without a tensor.
static __device__ __forceinline__ void store(TYPE *to, u64 at, u64 elems, bool whole, const Vector &vector) {
  if (!to) return;
  if (whole && (at + 1) * LANES <= elems) {
    ((Vector *)to)[at] = vector;
    return;
  }
  Lanes lanes;
  lanes.vector = vector;
#pragma unroll
  for (int lane = 0; lane < LANES; ++lane)
    if (at * LANES + lane < elems) to[at * LANES + lane] = lanes.values[lane];
}
