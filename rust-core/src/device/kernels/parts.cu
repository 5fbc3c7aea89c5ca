// All-reduce of many or large tensors of TYPE, which is f32, between RANKS members, three or more, in chunks of which
// each member reduces a part. OP is an operation of number.cuh.
//
// In round r, a block sends the other members' parts of chunk r, reduces its own part of chunk r - 1 and sends the
// result, and copies the results of chunk r - 2. So all data has a whole round to cross the link.
//
// - FOLD-1: each round counts as a call (CHK-1), and so does one more round, in which the last parts are reduced and
//   signalled.
// - FOLD-2: a block has four slots at every member. A member that signals round r has reduced the chunks up to r - 1
//   and copied the results up to r - 3. Before a member sends chunk r, it has waited for the others' r - 2, or has
//   begun a launch and waited for all rounds of the previous one; so chunk r - 4, which used the same slot, is
//   reduced. Before it sends results of chunk r - 1, it has waited for r - 1; so the results of r - 5 are copied.
// - FOLD-3: a member signals its second round only after the fingerprints of the first one agreed (CHK-3).
#include "chunk.cuh"

// Mirrored by collectives/cuda/p2p/chunks.rs.
#define THREADS 512
#define PART_UNITS (RANKS <= 4 ? 32 : 16)

constexpr int WARPS = THREADS / WARP, OTHERS = RANKS - 1, WARP_UNITS = PART_UNITS / WARPS;
constexpr u64 PART_VECTORS = (u64)PART_UNITS * UNIT_VECTORS, CHUNK_ELEMS = RANKS * PART_VECTORS * LANES;
static_assert(RANKS > 2 && WARP_UNITS >= 1, "every warp has units");

// The part of a chunk that one member sends to another.
struct Sent {
  Vector highs[PART_UNITS][WARP];
  Vector lows[PART_UNITS][WARP];
  u8 marks[WARPS]; // A bit for each unit of a warp: its low halves are there.
  u8 unused[256 - WARPS];
};

struct Slot {
  Sent sent[OTHERS];
  Vector results[OTHERS][PART_UNITS][2][WARP];
};

static __device__ __forceinline__ Slot *slot(const Chunks &all, u32 owner, u64 number) {
  Slot *slots = (Slot *)((char *)all.peers.arenas[owner] + all.slots);
  return slots + blockIdx.x * SLOTS + number % SLOTS;
}

// The position of `from` among the members other than `owner`.
static __device__ __forceinline__ u32 place(u32 from, u32 owner) { return from - (from > owner); }

// The part of a chunk on which this thread's warp works.
struct Work {
  const Tensor &tensor;
  u64 start; // First vector of the chunk.
  u64 end;   // Vectors of the tensor.
  u32 warp, lane;

  __device__ Work(const Tensor &tensor, u64 start)
      : tensor(tensor), start(start), end((tensor.elems + LANES - 1) / LANES), warp(threadIdx.x / WARP),
        lane(threadIdx.x % WARP) {}

  __device__ u32 unit(int step) const { return warp * WARP_UNITS + step; }
  // First vector of a unit of a member's part.
  __device__ u64 at(u32 member, int step) const {
    return start + member * PART_VECTORS + (u64)unit(step) * UNIT_VECTORS;
  }
};

// Sends this member's values of the others' parts. `marks` has the marks for each of them.
static __device__ __forceinline__ void send(const Chunks &all, const Work &work, u64 number, u8 (*marks)[WARPS]) {
  const u32 me = all.peers.me;
  const bool vectors_are_whole = aligned(work.tensor.input);
  Vector vectors[OTHERS][WARP_UNITS][2];
#pragma unroll
  for (int other = 0; other < OTHERS; ++other)
#pragma unroll
    for (int step = 0; step < WARP_UNITS; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        vectors[other][step][half] =
            load(work.tensor.input, work.at((me + 1 + other) % RANKS, step) + half * WARP + work.lane,
                 work.tensor.elems, vectors_are_whole);
#pragma unroll
  for (int other = 0; other < OTHERS; ++other) {
    // Each member begins with a different receiver.
    const u32 member = (me + 1 + other) % RANKS;
    Sent &to = slot(all, member, number)->sent[place(me, member)];
    u32 present = 0;
#pragma unroll
    for (int step = 0; step < WARP_UNITS; ++step) {
      if (work.at(member, step) >= work.end) break;
      to.highs[work.unit(step)][work.lane] = halves(vectors[other][step][0], vectors[other][step][1], HIGH);
      const Vector low = halves(vectors[other][step][0], vectors[other][step][1], LOW);
      if (__any_sync(~0u, low.x | low.y | low.z | low.w)) {
        to.lows[work.unit(step)][work.lane] = low;
        present |= 1 << step;
      }
    }
    if (work.lane == 0) marks[member][work.warp] = present;
  }
}

static __device__ __forceinline__ u32 next(u32 sum, u32 bits) {
  return __float_as_uint(OP::of(__uint_as_float(sum), __uint_as_float(bits)));
}

static __device__ __forceinline__ u32 finish(u32 sum) {
  return __float_as_uint(OP::finish(__uint_as_float(sum), RANKS));
}

// Reduces this member's part in the order of the members (COL-1), and sends the result to all.
static __device__ __forceinline__ void fold(const Chunks &all, const Work &work, u64 number) {
  const u32 me = all.peers.me;
  const bool whole_input = aligned(work.tensor.input), whole_output = aligned(work.tensor.output);
  const Slot *mine = slot(all, me, number);
  // The values of other members arrive as halves; this member's own are whole vectors.
  Vector highs[WARP_UNITS][RANKS], lows[WARP_UNITS][RANKS];
#pragma unroll
  for (int step = 0; step < WARP_UNITS; ++step) {
    if (work.at(me, step) >= work.end) break;
#pragma unroll
    for (int member = 0; member < RANKS; ++member) {
      if (member == me) {
        highs[step][member] = load(work.tensor.input, work.at(me, step) + work.lane, work.tensor.elems, whole_input);
        lows[step][member] =
            load(work.tensor.input, work.at(me, step) + WARP + work.lane, work.tensor.elems, whole_input);
      } else {
        const Sent &sent = mine->sent[place(member, me)];
        highs[step][member] = sent.highs[work.unit(step)][work.lane];
        lows[step][member] = make_uint4(0, 0, 0, 0);
        if (sent.marks[work.warp] >> step & 1) lows[step][member] = sent.lows[work.unit(step)][work.lane];
      }
    }
  }
#pragma unroll
  for (int step = 0; step < WARP_UNITS; ++step) {
    if (work.at(me, step) >= work.end) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Vector sum;
#pragma unroll
      for (int member = 0; member < RANKS; ++member) {
        const Vector &high = highs[step][member], &low = lows[step][member];
        const Vector own = half ? low : high;
        const Vector theirs = half ? whole(high.z, high.w, low.z, low.w) : whole(high.x, high.y, low.x, low.y);
        const Vector vector = member == me ? own : theirs;
        sum = member == 0 ? vector
                          : make_uint4(next(sum.x, vector.x), next(sum.y, vector.y), next(sum.z, vector.z),
                                       next(sum.w, vector.w));
      }
      const Vector result = make_uint4(finish(sum.x), finish(sum.y), finish(sum.z), finish(sum.w));
      store(work.tensor.output, work.at(me, step) + half * WARP + work.lane, work.tensor.elems, whole_output, result);
#pragma unroll
      for (int other = 0; other < OTHERS; ++other) {
        const u32 member = (me + 1 + other) % RANKS;
        slot(all, member, number)->results[place(me, member)][work.unit(step)][half][work.lane] = result;
      }
    }
  }
}

// Copies the others' results.
static __device__ __forceinline__ void copy_results(const Chunks &all, const Work &work, u64 number) {
  const u32 me = all.peers.me;
  const bool vectors_are_whole = aligned(work.tensor.output);
  const Slot *mine = slot(all, me, number);
  Vector results[OTHERS][WARP_UNITS][2];
#pragma unroll
  for (int other = 0; other < OTHERS; ++other)
#pragma unroll
    for (int step = 0; step < WARP_UNITS; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        results[other][step][half] = mine->results[other][work.unit(step)][half][work.lane];
#pragma unroll
  for (int other = 0; other < OTHERS; ++other)
#pragma unroll
    for (int step = 0; step < WARP_UNITS; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store(work.tensor.output, work.at(other + (other >= me), step) + half * WARP + work.lane, work.tensor.elems,
              vectors_are_whole, results[other][step][half]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_parts(const __grid_constant__ Chunks all) {
  // Two buffers, by parity of the round: warps of the next round write before the last thread of this round has read.
  __shared__ union {
    Vector vectors[RANKS];
    u8 bytes[RANKS][WARPS];
  } marks[2];
  Call call(all.peers);
  // A member that has given up writes nothing more: others may still be reducing what it sent before (PEER-5).
  if (__syncthreads_or(call.stopped)) return;
  const u32 me = all.peers.me;
  // The chunks of this round, the previous one and the one before.
  Chunk<CHUNK_ELEMS> now = {}, before = {}, first = {};
  for (u32 round = 0; round <= all.rounds + 1; ++round) {
    const u64 number = call.number + round;
    first = before;
    before = now;
    const bool sends = round < all.rounds;
    if (sends) {
      now.seek(all, (u64)round * gridDim.x + blockIdx.x);
      if (now.tensor < all.count) send(all, Work(all.tensors[now.tensor], now.start), number, marks[round % 2].bytes);
    }
    if (round > 0 && !call.wait(2 * (number - 1))) return;
    if (round > 0 && round <= all.rounds && before.tensor < all.count)
      fold(all, Work(all.tensors[before.tensor], before.start), number - 1);
    if (round <= all.rounds) {
      __syncthreads();
      if (threadIdx.x < RANKS && threadIdx.x != me && sends && now.tensor < all.count)
        *(Vector *)slot(all, threadIdx.x, number)->sent[place(me, threadIdx.x)].marks =
            marks[round % 2].vectors[threadIdx.x];
      call.signal(2 * number);
    }
    if (round > 1 && first.tensor < all.count) copy_results(all, Work(all.tensors[first.tensor], first.start), number - 2);
  }
  call.count(all.rounds + 1);
}
