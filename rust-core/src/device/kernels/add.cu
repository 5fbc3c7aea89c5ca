// A tensor is added to another one of a wider type: TOTAL += ADDEND, element types of number.cuh. The sum is rounded once.
#include "number.cuh"

// Mirrored by device/add.rs.
struct Addition {
  u64 total;  // Address.
  u64 addend; // Address.
  u64 elems;
};

#define THREADS 256

// The number of elements that one thread adds: as many as fill 16 bytes of the narrower type.
constexpr int GROUP = 16 / sizeof(ADDEND);

template <typename T> union Group {
  T values[GROUP];
  Vector vectors[GROUP * sizeof(T) / 16];
  __device__ Group() {}

  __device__ __forceinline__ void load(const T *from) {
#pragma unroll
    for (int at = 0; at < (int)(GROUP * sizeof(T) / 16); ++at) vectors[at] = ((const Vector *)from)[at];
  }
  __device__ __forceinline__ void store(T *to) const {
#pragma unroll
    for (int at = 0; at < (int)(GROUP * sizeof(T) / 16); ++at) ((Vector *)to)[at] = vectors[at];
  }
};

static __device__ __forceinline__ TOTAL add(TOTAL total, ADDEND addend) {
  return Element<TOTAL>::narrow(Element<TOTAL>::widen(total) +
                                (Element<TOTAL>::Number)Element<ADDEND>::widen(addend));
}

extern "C" __global__ void __launch_bounds__(THREADS) accumulate(const __grid_constant__ Addition sum) {
  TOTAL *total = (TOTAL *)sum.total;
  const ADDEND *addend = (const ADDEND *)sum.addend;
  const u64 groups = ((u64)total | (u64)addend) % 16 == 0 ? sum.elems / GROUP : 0;
  const u64 group = (u64)blockIdx.x * THREADS + threadIdx.x;
  if (group < groups) {
    Group<TOTAL> totals;
    Group<ADDEND> addends;
    totals.load(total + group * GROUP);
    addends.load(addend + group * GROUP);
#pragma unroll
    for (int lane = 0; lane < GROUP; ++lane) totals.values[lane] = add(totals.values[lane], addends.values[lane]);
    totals.store(total + group * GROUP);
  }
  // The elements after the last whole group, or all elements if the addresses are not aligned for vectors.
  const u64 stride = (u64)gridDim.x * THREADS;
  for (u64 at = groups * GROUP + group; at < sum.elems; at += stride) total[at] = add(total[at], addend[at]);
}
