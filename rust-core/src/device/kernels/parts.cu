// All-reduce of many or large tensors of float32 between RANKS members, three or more, in chunks of which each member
// folds a part. OP is an operation of number.cuh.
//
// In round r a block sends the other members' parts of chunk r, folds its own part of chunk r - 1 with what they sent
// and sends them the result, and takes the results of chunk r - 2. So what crosses the link has a round's time for it.
//
// - FOLD-1: a round is a call of its own in the count of calls (CHK-1), and so is one more, in which the last parts are
//   folded and told of.
// - FOLD-2: a block has four slots at every member. Whoever tells of round r has folded the chunks up to r - 1, and taken
//   those up to r - 3. A member that sends chunk r has heard of r - 2, or begins a launch and has heard of all rounds of
//   the ones before: chunk r - 4 is folded. One that sends results of chunk r - 1 has heard of r - 1: those of r - 5 are
//   taken.
// - FOLD-3: a member tells of a second round once the first one's fingerprints agree (CHK-3).
#define TYPE f32
#include "chunk.cuh"

// Mirrored by collectives/cuda/p2p/chunks.rs.
#define PART_UNITS (RANKS <= 4 ? 32 : 16)

constexpr int OTHERS = RANKS - 1, WARP_UNITS = PART_UNITS / WARPS;
constexpr u64 PART_VECTORS = (u64)PART_UNITS * UNIT_VECTORS, CHUNK_ELEMS = RANKS * PART_VECTORS * LANES;
static_assert(RANKS > 2 && WARP_UNITS >= 1, "every warp has units");

// What a member sends of another one's part.
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

// Of `from` among the others of `owner`.
static __device__ __forceinline__ u32 place(u32 from, u32 owner) { return from - (from > owner); }

// Where this thread's warp works in a chunk.
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

// Sends what this member has of the others' parts. `marks` are of each of them.
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
    // Everybody begins with another one.
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

// Folds this member's part in the order of the members (COL-1), and sends the result to all.
static __device__ __forceinline__ void fold(const Chunks &all, const Work &work, u64 number) {
  const u32 me = all.peers.me;
  const bool whole_input = aligned(work.tensor.input), whole_output = aligned(work.tensor.output);
  const Slot *mine = slot(all, me, number);
  // Halves of what was sent; of its own part a member has the two vectors.
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

// Takes the others' results.
static __device__ __forceinline__ void take(const Chunks &all, const Work &work, u64 number) {
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
  // By parity of the round: warps of the next one write before the last thread of this one has read.
  __shared__ union {
    Vector vectors[RANKS];
    u8 bytes[RANKS][WARPS];
  } marks[2];
  Call call(all.peers);
  // A member that gave up writes nothing more: others may still fold what it sent before (PEER-5).
  if (__syncthreads_or(call.stopped)) return;
  const u32 me = all.peers.me;
  // Those of this round, the one before and the one before that.
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
      call.tell(2 * number);
    }
    if (round > 1 && first.tensor < all.count) take(all, Work(all.tensors[first.tensor], first.start), number - 2);
  }
  call.count(all.rounds + 1);
}
