// Shared by the chunked kernels: tensors of TYPE are divided into chunks of CHUNK_ELEMS.
// Numbers of 32 bits are divided into a high and a low half. The low halves of a unit are not sent if all of them are
// zero, as in numbers that were converted from bfloat16: gradients of parameters that autocast casts. This halves the
// bytes on the link without losing a bit. A mark for each unit says whether its low halves were sent.
#pragma once

#include "arena.cuh"
#include "vectors.cuh"

// Mirrored by collectives/cuda/p2p/chunks.rs, as are the structures.
#define MAX_TENSORS 120
#define SLOTS 4

// A warp moves *units* of a chunk, of which each of its threads has two vectors.
constexpr int WARP = 32, UNIT_VECTORS = 2 * WARP;
constexpr bool HAS_HALVES = sizeof(TYPE) == 4;

struct Tensor {
  const TYPE *sent;  // What the other member gets; equal to `input` in an all-reduce. Not used by parts.cu.
  const TYPE *input; // Reduced with what they send; unused in an all-gather.
  TYPE *output;
  u64 elems; // Of each of these.
};

struct Chunks {
  Peers peers;
  u64 slots; // Where they begin in an arena.
  u32 rounds;
  u32 count;
  Tensor tensors[MAX_TENSORS];
};

// The chunk of a round: a part of one tensor, or empty.
template <u64 CHUNK_ELEMS> struct Chunk {
  u32 tensor;
  u64 before; // Chunks of the tensors before this one.
  u64 start;  // First vector.

  // Advances to chunk `number` of all.
  __device__ void seek(const Chunks &all, u64 number) {
    for (; tensor < all.count; ++tensor) {
      const u64 chunks = (all.tensors[tensor].elems + CHUNK_ELEMS - 1) / CHUNK_ELEMS;
      if (number < before + chunks) break;
      before += chunks;
    }
    start = (number - before) * (CHUNK_ELEMS / LANES);
  }
};

// The high and the low halves of two vectors.
static __device__ __forceinline__ Vector halves(const Vector &a, const Vector &b, u32 which) {
  return make_uint4(__byte_perm(a.x, a.y, which), __byte_perm(a.z, a.w, which), __byte_perm(b.x, b.y, which),
                    __byte_perm(b.z, b.w, which));
}
constexpr u32 HIGH = 0x7632, LOW = 0x5410;

// A vector of two words of high halves and two of low ones.
static __device__ __forceinline__ Vector whole(u32 high_0, u32 high_1, u32 low_0, u32 low_1) {
  return make_uint4(__byte_perm(low_0, high_0, 0x5410), __byte_perm(low_0, high_0, 0x7632),
                    __byte_perm(low_1, high_1, 0x5410), __byte_perm(low_1, high_1, 0x7632));
}
