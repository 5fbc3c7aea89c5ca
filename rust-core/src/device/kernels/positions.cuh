// The positions of vectors that a thread of a kernel between RANKS members processes.
#pragma once

#include "vectors.cuh"

// Number of vectors of each member that a thread loads before it stores or reduces them: about eight loads hide the
// memory's latency.
constexpr int UNROLL = RANKS >= 8 ? 1 : 8 / RANKS;

// The positions of a message, or of a part of it, that this thread processes; equal on all members (PEER-1).
static __device__ __forceinline__ u64 first_position() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
static __device__ __forceinline__ u64 stride() { return (u64)gridDim.x * blockDim.x; }

// Copies the vectors at `count` positions for every other member: `from` returns the vector for a member and a
// position, `to` its destination, and `has` says whether there is one.
template <typename Has, typename From, typename To>
static __device__ __forceinline__ void move_all(u32 me, u64 count, Has has, From from, To to) {
  for (u64 at = first_position(); at < count; at += UNROLL * stride()) {
    Vector vectors[UNROLL][RANKS];
#pragma unroll
    for (int step = 0; step < UNROLL; ++step)
#pragma unroll
      for (int rank = 0; rank < RANKS; ++rank) {
        const u64 position = at + step * stride();
        if (rank != me && position < count && has(rank, position)) vectors[step][rank] = from(rank, position);
      }
#pragma unroll
    for (int step = 0; step < UNROLL; ++step)
#pragma unroll
      for (int rank = 0; rank < RANKS; ++rank) {
        const u64 position = at + step * stride();
        if (rank != me && position < count && has(rank, position)) to(rank, position, vectors[step][rank]);
      }
  }
}
