// All-reduce of many or large tensors of float32 between two members, in chunks: while a block waits for the peer's part of
// a chunk, it writes its own part of the next one. OP is an operation of number.cuh.
//
// What a member has is written to the other one as two halves of its bits. The low halves are left out where all of them
// are zero in a unit, which they are in numbers that were bfloat16 before: gradients of what autocast casts. So half of the
// bytes cross the link, and no bit is lost; a unit has a mark that says which it is.
//
// - CHK-1: a round is a call of its own in the count of calls (PEER-4), though one launch makes many. Every block makes all
//   rounds of the launch, some of them without a chunk.
// - CHK-2: a block has four slots in the peer's staging memory, apart from the halves of other calls. When it writes chunk
//   c + 1 the peer has told of c - 1, so it has folded c - 3, whose slot that was.
// - CHK-3: a member tells of a second round once the first one's fingerprints agree. All rounds have the launch's
//   fingerprint, and a flag that has gone on to a later round is not compared (PEER-2).
#define RANKS 2
#define TYPE f32
#include "arena.cuh"
#include "vectors.cuh"

// Mirrored by collectives/cuda/p2p/chunks.rs, as are the structures.
#define MAX_TENSORS 128
#define THREADS 512
#define SLOTS 4
#define UNITS 128 // Of a chunk.

constexpr int WARP = 32, WARPS = THREADS / WARP;
constexpr int UNIT_VECTORS = 2 * WARP; // Each thread of a warp has two of a unit.
constexpr u64 CHUNK_ELEMS = (u64)UNITS * UNIT_VECTORS * LANES;
constexpr int WARP_UNITS = UNITS / WARPS;
// Units that a warp loads before it goes on.
constexpr int UNROLL = 4;
static_assert(WARP_UNITS == 8, "the marks of a warp's units are a byte");

struct Slot {
  Vector highs[UNITS][WARP];
  Vector lows[UNITS][WARP];
  u8 marks[WARPS]; // A bit for each unit of a warp: its low halves are there.
  u8 unused[256 - WARPS];
};

struct Tensor {
  const f32 *input;
  f32 *output;
  u64 elems;
};

struct Chunks {
  Peers peers;
  u64 slots; // Where they begin in an arena.
  u32 rounds;
  u32 count;
  Tensor tensors[MAX_TENSORS];
};

// The chunk of a round: a part of one tensor, or nothing.
struct Chunk {
  u32 tensor;
  u64 before; // Chunks of the tensors before this one.
  u64 start;  // First vector.

  // Goes on to chunk `number` of all.
  __device__ void seek(const Chunks &all, u64 number) {
    for (; tensor < all.count; ++tensor) {
      const u64 chunks = (all.tensors[tensor].elems + CHUNK_ELEMS - 1) / CHUNK_ELEMS;
      if (number < before + chunks) break;
      before += chunks;
    }
    start = (number - before) * (CHUNK_ELEMS / LANES);
  }
};

static __device__ __forceinline__ Slot *slot(const Chunks &all, u32 owner, u64 number) {
  Slot *slots = (Slot *)((char *)all.peers.arenas[owner] + all.slots);
  return slots + blockIdx.x * SLOTS + number % SLOTS;
}

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

static __device__ __forceinline__ f32 fold(u32 first, u32 second) {
  return OP::finish(OP::of(__uint_as_float(first), __uint_as_float(second)), RANKS);
}

// COL-1: member 0's number comes first.
static __device__ __forceinline__ Vector fold(const Vector &own, const Vector &theirs, bool mine_first) {
  const Vector first = mine_first ? own : theirs, second = mine_first ? theirs : own;
  return make_uint4(__float_as_uint(fold(first.x, second.x)), __float_as_uint(fold(first.y, second.y)),
                    __float_as_uint(fold(first.z, second.z)), __float_as_uint(fold(first.w, second.w)));
}

// Writes a chunk to the peer's slot. Returns the marks of this warp's units.
static __device__ __forceinline__ u32 write(const Tensor &tensor, u64 start, Slot *to) {
  const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const bool vectors_are_whole = aligned(tensor.input);
  u32 marks = 0;
#pragma unroll
  for (int first = 0; first < WARP_UNITS; first += UNROLL) {
    Vector vectors[UNROLL][2];
#pragma unroll
    for (int step = 0; step < UNROLL; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u64 at = start + (warp * WARP_UNITS + first + step) * UNIT_VECTORS + half * WARP + lane;
        vectors[step][half] = load(tensor.input, at, tensor.elems, vectors_are_whole);
      }
#pragma unroll
    for (int step = 0; step < UNROLL; ++step) {
      const u32 unit = warp * WARP_UNITS + first + step;
      to->highs[unit][lane] = halves(vectors[step][0], vectors[step][1], HIGH);
      const Vector low = halves(vectors[step][0], vectors[step][1], LOW);
      if (__any_sync(~0u, low.x | low.y | low.z | low.w)) {
        to->lows[unit][lane] = low;
        marks |= 1 << (first + step);
      }
    }
  }
  return marks;
}

// Folds a chunk with what the peer wrote.
static __device__ __forceinline__ void fold(const Tensor &tensor, u64 start, const Slot *received, bool mine_first) {
  const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const bool whole_input = aligned(tensor.input), whole_output = aligned(tensor.output);
  const u32 marks = received->marks[warp];
#pragma unroll
  for (int first = 0; first < WARP_UNITS; first += UNROLL) {
    Vector own[UNROLL][2], highs[UNROLL], lows[UNROLL];
#pragma unroll
    for (int step = 0; step < UNROLL; ++step) {
      const u32 unit = warp * WARP_UNITS + first + step;
      highs[step] = received->highs[unit][lane];
      lows[step] = make_uint4(0, 0, 0, 0);
      if (marks >> (first + step) & 1) lows[step] = received->lows[unit][lane];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        own[step][half] =
            load(tensor.input, start + unit * UNIT_VECTORS + half * WARP + lane, tensor.elems, whole_input);
    }
#pragma unroll
    for (int step = 0; step < UNROLL; ++step) {
      const u64 at = start + (warp * WARP_UNITS + first + step) * UNIT_VECTORS + lane;
      const Vector &high = highs[step], &low = lows[step];
      store(tensor.output, at, tensor.elems, whole_output,
            fold(own[step][0], whole(high.x, high.y, low.x, low.y), mine_first));
      store(tensor.output, at + WARP, tensor.elems, whole_output,
            fold(own[step][1], whole(high.z, high.w, low.z, low.w), mine_first));
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_chunks(const __grid_constant__ Chunks all) {
  // By parity of the round: warps of the next one write before the last thread of this one has read.
  __shared__ union {
    Vector vector;
    u8 bytes[WARPS];
  } marks[2];
  Call call(all.peers);
  const u32 me = all.peers.me, other = 1 - me;
  Chunk next = {}, last = {};
  for (u32 round = 0; round <= all.rounds; ++round) {
    if (round < all.rounds) {
      next.seek(all, (u64)round * gridDim.x + blockIdx.x);
      Slot *to = slot(all, other, call.number + round);
      if (next.tensor < all.count) {
        const u32 own = write(all.tensors[next.tensor], next.start, to);
        if (threadIdx.x % WARP == 0) marks[round % 2].bytes[threadIdx.x / WARP] = own;
      }
      __syncthreads();
      if (threadIdx.x == other && next.tensor < all.count) *(Vector *)to->marks = marks[round % 2].vector;
      if (round == 1 && !call.wait(2 * call.number)) return;
      call.tell(2 * (call.number + round));
    }
    if (round > 0) {
      const u64 number = call.number + round - 1;
      if (!call.wait(2 * number)) return;
      if (last.tensor < all.count)
        fold(all.tensors[last.tensor], last.start, slot(all, me, number), me == 0);
    }
    last = next;
  }
  call.count(all.rounds);
}
