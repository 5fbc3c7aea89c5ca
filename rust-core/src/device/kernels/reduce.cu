// All-reduce and reduce-scatter between peers that write to each other's staging memory. TYPE is an element type and
// OP an operation of number.cuh, RANKS the number of members. A reduction to one member is an all-reduce for which
// the other members have no output.
//
// Every element is reduced in rank order in its accumulation type and rounded once (COL-1), by one member (two-shot)
// or by each of them (one-shot). So all members get the same bits, equal to the CPU's.
#include "arena.cuh"
#include "positions.cuh"

typedef Element<TYPE>::Number Number;

// Mirrored by collectives/cuda/p2p/mod.rs.
struct AllReduce {
  Peers peers;
  const TYPE *input;
  TYPE *output;
  u64 elems;
};

struct ReduceScatter {
  Peers peers;
  const TYPE *inputs[MAX_RANKS]; // The block for each member.
  TYPE *output;
  u64 elems; // Of each block.
};

static __device__ __forceinline__ Vector fold(const Vector (&vectors)[RANKS]) {
  Number numbers[LANES];
#pragma unroll
  for (int rank = 0; rank < RANKS; ++rank) {
    Lanes lanes;
    lanes.vector = vectors[rank];
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) {
      const Number number = Element<TYPE>::widen(lanes.values[lane]);
      numbers[lane] = rank == 0 ? number : OP::of(numbers[lane], number);
    }
  }
  Lanes lanes;
#pragma unroll
  for (int lane = 0; lane < LANES; ++lane)
    lanes.values[lane] = Element<TYPE>::narrow(OP::finish(numbers[lane], RANKS));
  return lanes.vector;
}

// Reduces `count` vectors: this member's own are at `own`, the others' in the staging memory, `distance` vectors
// apart. Calls `take` with each result and its position.
template <typename Own, typename Take>
static __device__ __forceinline__ void fold_all(const Call &call, u64 distance, u64 count, Own own, Take take) {
  const Vector *received = call.staging(call.peers.me);
  for (u64 at = first_position(); at < count; at += UNROLL * stride()) {
    Vector vectors[UNROLL][RANKS];
#pragma unroll
    for (int step = 0; step < UNROLL; ++step) {
      const u64 position = at + step * stride();
      if (position < count)
#pragma unroll
        for (int rank = 0; rank < RANKS; ++rank)
          vectors[step][rank] = rank == call.peers.me ? own(position) : received[rank * distance + position];
    }
#pragma unroll
    for (int step = 0; step < UNROLL; ++step) {
      const u64 position = at + step * stride();
      if (position < count) take(position, fold(vectors[step]));
    }
  }
}

// One-shot: each member writes all of its data to each other one. One synchronisation, (n - 1) times the bytes.
extern "C" __global__ void __launch_bounds__(512) one_shot(const __grid_constant__ AllReduce all) {
  Call call(all.peers);
  const u64 vectors = (all.elems + LANES - 1) / LANES;
  const bool whole_input = aligned(all.input), whole_output = aligned(all.output);
  const u32 me = all.peers.me;
  for (u64 at = first_position(); at < vectors; at += 4 * stride()) {
    Vector values[4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const u64 position = at + step * stride();
      if (position < vectors) values[step] = load(all.input, position, all.elems, whole_input);
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const u64 position = at + step * stride();
      if (position < vectors)
#pragma unroll
        for (int rank = 0; rank < RANKS; ++rank)
          if (rank != me) call.staging(rank)[me * vectors + position] = values[step];
    }
  }
  if (!call.barrier(0)) return;
  fold_all(
      call, vectors, vectors, [&](u64 at) { return load(all.input, at, all.elems, whole_input); },
      [&](u64 at, const Vector &vector) { store(all.output, at, all.elems, whole_output, vector); });
}

// Two-shot: each member reduces a part of the data, and writes the result to the others. Two synchronisations, 2 (n -
// 1) / n times the bytes.
extern "C" __global__ void __launch_bounds__(512) two_shot(const __grid_constant__ AllReduce all) {
  Call call(all.peers);
  const u64 vectors = (all.elems + LANES - 1) / LANES;
  const u64 part = (vectors + RANKS - 1) / RANKS;
  const bool whole_input = aligned(all.input), whole_output = aligned(all.output);
  const u32 me = all.peers.me;
  const auto has = [&](int rank, u64 at) { return rank * part + at < vectors; };
  move_all(
      me, part, has, [&](int rank, u64 at) { return load(all.input, rank * part + at, all.elems, whole_input); },
      [&](int rank, u64 at, const Vector &vector) { call.staging(rank)[me * part + at] = vector; });
  if (!call.barrier(0)) return;
  // Results are stored behind the data to reduce.
  const u64 results = RANKS * part, first = me * part;
  const u64 count = first >= vectors ? 0 : vectors - first < part ? vectors - first : part;
  fold_all(
      call, part, count, [&](u64 at) { return load(all.input, first + at, all.elems, whole_input); },
      [&](u64 at, const Vector &vector) {
#pragma unroll
        for (int rank = 0; rank < RANKS; ++rank)
          if (rank != me) call.staging(rank)[results + first + at] = vector;
        store(all.output, first + at, all.elems, whole_output, vector);
      });
  if (!call.barrier(1)) return;
  const Vector *received = call.staging(me) + results;
  move_all(
      me, part, has, [&](int rank, u64 at) { return received[rank * part + at]; },
      [&](int rank, u64 at, const Vector &vector) {
        store(all.output, rank * part + at, all.elems, whole_output, vector);
      });
}

// Each member writes the others' blocks to them.
extern "C" __global__ void __launch_bounds__(512) reduce_scatter(const __grid_constant__ ReduceScatter all) {
  Call call(all.peers);
  const u64 part = (all.elems + LANES - 1) / LANES;
  const bool whole_output = aligned(all.output);
  const u32 me = all.peers.me;
  move_all(
      me, part, [](int, u64) { return true; },
      [&](int rank, u64 at) { return load(all.inputs[rank], at, all.elems, aligned(all.inputs[rank])); },
      [&](int rank, u64 at, const Vector &vector) { call.staging(rank)[me * part + at] = vector; });
  if (!call.barrier(0)) return;
  const TYPE *own = all.inputs[me];
  const bool whole_own = aligned(own);
  fold_all(
      call, part, part, [&](u64 at) { return load(own, at, all.elems, whole_own); },
      [&](u64 at, const Vector &vector) { store(all.output, at, all.elems, whole_output, vector); });
}
