// Moves blocks of equal length between peers that write to each other's staging memory: all-gather and broadcast.
// TYPE is any type of the elements' size, RANKS the number of members.
#include "arena.cuh"
#include "positions.cuh"

// Mirrored by collectives/cuda/p2p/exchange.rs.
struct Exchange {
  Peers peers;
  const TYPE *inputs[MAX_RANKS]; // The block for each member, or null.
  TYPE *outputs[MAX_RANKS];      // The place for each member's block, or null.
  u64 elems;                     // Of each block.
};

// Each member writes its blocks to the others. One synchronisation.
extern "C" __global__ void __launch_bounds__(512) exchange(const __grid_constant__ Exchange all) {
  Call call(all.peers);
  const u64 part = (all.elems + LANES - 1) / LANES;
  const u32 me = all.peers.me;
  move_all(
      me, part, [&](int rank, u64) { return all.inputs[rank] != nullptr; },
      [&](int rank, u64 at) { return load(all.inputs[rank], at, all.elems, aligned(all.inputs[rank])); },
      [&](int rank, u64 at, const Vector &vector) { call.staging(rank)[me * part + at] = vector; });
  const TYPE *own = all.inputs[me];
  TYPE *place = all.outputs[me];
  if (own && place && own != place)
    for (u64 at = first_position(); at < part; at += stride())
      store(place, at, all.elems, aligned(place), load(own, at, all.elems, aligned(own)));
  if (!call.barrier(0)) return;
  const Vector *received = call.staging(me);
  move_all(
      me, part, [&](int rank, u64) { return all.outputs[rank] != nullptr; },
      [&](int rank, u64 at) { return received[rank * part + at]; },
      [&](int rank, u64 at, const Vector &vector) {
        store(all.outputs[rank], at, all.elems, aligned(all.outputs[rank]), vector);
      });
}
