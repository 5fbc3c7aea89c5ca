// Many tensors into one flat buffer, or back, in one launch, with a cast on the way.
//
// FROM and TO are element types of number.cuh; PACK is 1 for tensors -> flat and 0 for flat -> tensors.
#include "number.cuh"

// Mirrored by device/pack.rs.
struct Piece {
  u64 tensor;      // Address of the tensor.
  u64 offset;      // Its place in the flat buffer, in elements.
  u64 elems;
  u64 first_block; // Blocks of the pieces before.
};

#define PIECES 120

struct Pieces {
  u64 flat;
  u32 count;
  u32 block_elems;
  Piece pieces[PIECES];
};

template <typename From, typename To> struct Cast {
  static __device__ To of(From value) {
    return Element<To>::narrow((typename Element<To>::Number)Element<From>::widen(value));
  }
};
// Without a cast, bits are copied unchanged.
template <typename T> struct Cast<T, T> {
  static __device__ T of(T value) { return value; }
};

// The number of elements that one thread moves: as many as fill 16 bytes of the narrower type, so that they are one
// access.
constexpr int NARROWER = sizeof(FROM) < sizeof(TO) ? sizeof(FROM) : sizeof(TO);
constexpr int GROUP = 16 / NARROWER;

template <typename T> union Group {
  T values[GROUP];
  Vector vectors[GROUP * sizeof(T) / 16];
};

extern "C" __global__ void __launch_bounds__(256) pack(const __grid_constant__ Pieces pieces) {
  u32 low = 0, high = pieces.count;
  while (high - low > 1) {
    const u32 middle = (low + high) / 2;
    if (pieces.pieces[middle].first_block <= blockIdx.x) low = middle;
    else high = middle;
  }
  const Piece &piece = pieces.pieces[low];
  const u64 start = (blockIdx.x - piece.first_block) * pieces.block_elems;
  const u64 left = piece.elems - start;
  const u32 elems = left < pieces.block_elems ? (u32)left : pieces.block_elems;
#if PACK
  const FROM *from = (const FROM *)piece.tensor + start;
  TO *to = (TO *)pieces.flat + piece.offset + start;
#else
  const FROM *from = (const FROM *)pieces.flat + piece.offset + start;
  TO *to = (TO *)piece.tensor + start;
#endif
  u32 done = 0;
  if (((u64)from | (u64)to) % 16 == 0) {
    const u32 groups = elems / GROUP;
    done = groups * GROUP;
#pragma unroll 4
    for (u32 group = threadIdx.x; group < groups; group += blockDim.x) {
      Group<FROM> in;
      Group<TO> out;
#pragma unroll
      for (int at = 0; at < (int)(GROUP * sizeof(FROM) / 16); ++at)
        in.vectors[at] = ((const Vector *)from)[group * (GROUP * sizeof(FROM) / 16) + at];
#pragma unroll
      for (int at = 0; at < GROUP; ++at) out.values[at] = Cast<FROM, TO>::of(in.values[at]);
#pragma unroll
      for (int at = 0; at < (int)(GROUP * sizeof(TO) / 16); ++at)
        ((Vector *)to)[group * (GROUP * sizeof(TO) / 16) + at] = out.vectors[at];
    }
  }
  for (u32 at = done + threadIdx.x; at < elems; at += blockDim.x) to[at] = Cast<FROM, TO>::of(from[at]);
}
