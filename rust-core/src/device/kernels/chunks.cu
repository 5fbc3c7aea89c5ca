// All-reduce of many or large tensors of TYPE, which has 16 or 32 bits, between two members, in chunks: while a block
// waits for the peer's part of a chunk, it writes its own part of the next one. OP is an operation of number.cuh.
//
// - CHK-1: each round counts as a call (PEER-4), although one launch makes many rounds. Every block makes all rounds
//   of the launch, some of them without a chunk.
// - CHK-2: a block has four slots in the peer's staging memory, separate from the halves of other calls. Before it
//   writes chunk c + 1, the peer has signalled c - 1, so the peer has reduced c - 3, which used the same slot.
// - CHK-3: a member signals its second round only after the fingerprints of the first one agreed. All rounds have the
//   launch's fingerprint; a flag that has advanced to a later round is not compared (PEER-2).
#include "chunk.cuh"

// Mirrored by collectives/cuda/p2p/chunks.rs.
#define UNITS 128 // Of a chunk.

constexpr u64 CHUNK_ELEMS = (u64)UNITS * UNIT_VECTORS * LANES;
constexpr int WARP_UNITS = UNITS / WARPS;
// Number of units that a warp loads before it processes them.
constexpr int UNROLL = 4;
static_assert(WARP_UNITS == 8, "the marks of a warp's units are a byte");

// With 16 bits, the first and the second vectors of the units' threads are in the place of high and low halves.
struct Slot {
  Vector highs[UNITS][WARP];
  Vector lows[UNITS][WARP];
  u8 marks[WARPS]; // A bit for each unit of a warp: its low halves are there.
  u8 unused[256 - WARPS];
};

static __device__ __forceinline__ Slot *slot(const Chunks &all, u32 owner, u64 number) {
  Slot *slots = (Slot *)((char *)all.peers.arenas[owner] + all.slots);
  return slots + blockIdx.x * SLOTS + number % SLOTS;
}

// Whether two numbers of 16 bits are reduced at once. Their results have the bits of Element and OP, also where these
// round twice, to float32 and to TYPE: float32 has more than twice TYPE's bits of precision (Figueroa, "When is double
// rounding innocuous?", 1995). Instructions that compute a NaN all return the same one. Min and Max return one of their
// numbers instead, so a NaN keeps its bits there.
constexpr bool IS_PACKED = Packed<TYPE>::EXISTS && (IS_SAME<OP, Sum> || IS_SAME<OP, Average>);

// COL-1: member 0's number comes first.
static __device__ __forceinline__ Vector fold(const Vector &own, const Vector &theirs, bool mine_first) {
  Lanes first, second, result;
  first.vector = mine_first ? own : theirs;
  second.vector = mine_first ? theirs : own;
  const auto reduced = [&](int lane) {
    const auto number = OP::of(Element<TYPE>::widen(first.values[lane]), Element<TYPE>::widen(second.values[lane]));
    return OP::finish(number, RANKS);
  };
  if constexpr (IS_PACKED) {
#pragma unroll
    for (int word = 0; word < WORDS; ++word)
      result.words[word] = IS_SAME<OP, Sum> ? Packed<TYPE>::sum(first.words[word], second.words[word])
                                            : Packed<TYPE>::narrow(reduced(2 * word), reduced(2 * word + 1));
  } else {
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) result.values[lane] = Element<TYPE>::narrow(reduced(lane));
  }
  return result.vector;
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
      if constexpr (!HAS_HALVES) {
        to->highs[unit][lane] = vectors[step][0];
        to->lows[unit][lane] = vectors[step][1];
      } else {
        to->highs[unit][lane] = halves(vectors[step][0], vectors[step][1], HIGH);
        const Vector low = halves(vectors[step][0], vectors[step][1], LOW);
        if (__any_sync(~0u, low.x | low.y | low.z | low.w)) {
          to->lows[unit][lane] = low;
          marks |= 1 << (first + step);
        }
      }
    }
  }
  return marks;
}

// Reduces a chunk with the values that the peer wrote.
static __device__ __forceinline__ void fold(const Tensor &tensor, u64 start, const Slot *received, bool mine_first) {
  const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const bool whole_input = aligned(tensor.input), whole_output = aligned(tensor.output);
  const u32 marks = HAS_HALVES ? received->marks[warp] : ~0u;
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
      const Vector first = HAS_HALVES ? whole(high.x, high.y, low.x, low.y) : high;
      const Vector second = HAS_HALVES ? whole(high.z, high.w, low.z, low.w) : low;
      store(tensor.output, at, tensor.elems, whole_output, fold(own[step][0], first, mine_first));
      store(tensor.output, at + WARP, tensor.elems, whole_output, fold(own[step][1], second, mine_first));
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_chunks(const __grid_constant__ Chunks all) {
  // Two buffers, by parity of the round: warps of the next round write before the last thread of this round has read.
  __shared__ union {
    Vector vector;
    u8 bytes[WARPS];
  } marks[2];
  Call call(all.peers);
  // A member that has given up writes nothing more: others may still be reducing what it sent before (PEER-5).
  if (__syncthreads_or(call.stopped)) return;
  const u32 me = all.peers.me, other = 1 - me;
  Chunk<CHUNK_ELEMS> next = {}, last = {};
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
      call.signal(2 * (call.number + round));
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
