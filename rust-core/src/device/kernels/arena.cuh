// The memory of a member that its peers map: flags by which the blocks of different members synchronise, and staging
// memory that peers write to. Members only write to a peer's memory and never read from it, because a read waits for
// the link.
//
// - PEER-1: block b of a member synchronises with block b of every other member. The data that a block reads in its
//   staging memory was written by the peers' blocks with the same number.
// - PEER-2: flags only grow. A flag carries the number of the call and its fingerprint (a hash of its arguments), so
//   that members that call different operations detect it instead of mixing their data. A member starts a later call
//   only after all fingerprints of this one agreed. So a member that reads a later number in a flag knows that they
//   did.
// - PEER-3: the staging memory has two halves, used in alternation. When all members have synchronised in call k + 1,
//   they have finished call k, so its half may be overwritten in call k + 2.
// - PEER-4: the number of the call is stored on the device, so a launch that a CUDA graph replays counts as a new
//   call. Each block has its own copy. Block 0 also updates the copies of blocks that a launch does not have, so that
//   no block waits for another block of its launch.
// - PEER-5: while a block waits, it polls the abort word in its host's memory, and gives up when it is set. A member
//   that has given up never synchronises with the others again, so that its later calls are not taken for the aborted
//   one.
#pragma once

#include "number.cuh"

// Mirrored by collectives/cuda/p2p/mod.rs, as is Peers.
#define MAX_RANKS 16
#define MAX_BLOCKS 128
#define FINGERPRINT_BITS 24

struct Arena {
  u64 flags[MAX_BLOCKS][MAX_RANKS];
  u64 calls[MAX_BLOCKS];
  u64 stopped; // PEER-5.
  u64 unused[31];
}; // Staging starts behind, at a multiple of 256 bytes.

// In host memory.
struct Control {
  u32 abort;
  u32 mismatch; // 1 + the member whose call differs,
  u32 call;     // and the number of the call.
};

struct Peers {
  Arena *arenas[MAX_RANKS]; // Every member's, as this device sees it.
  Control *control;
  u64 half_bytes;
  u32 me;
  u32 fingerprint;
};

static __device__ __forceinline__ void store_release(u64 *to, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

static __device__ __forceinline__ u64 load_acquire(const u64 *from) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

static __device__ __forceinline__ u64 load_relaxed(const u64 *from) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

static __device__ __forceinline__ u32 load_host(const u32 *from) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

static __device__ __forceinline__ void store_host(u32 *to, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// One call of this member: its number, and what it may still do.
struct Call {
  const Peers &peers;
  Arena *mine;
  u64 number;
  bool stopped;

  __device__ Call(const Peers &peers) : peers(peers), mine(peers.arenas[peers.me]) {
    number = *(volatile u64 *)&mine->calls[blockIdx.x] + 1;
    stopped = *(volatile u64 *)&mine->stopped != 0;
  }

  // This member's staging half for this call.
  __device__ Vector *staging(int rank) const {
    return (Vector *)((char *)(peers.arenas[rank] + 1) + (number & 1) * peers.half_bytes);
  }

  // Counts the call, or as many calls as it has rounds. Called after a synchronisation, when every thread of the
  // block has read the number.
  __device__ void count(u64 rounds = 1) const {
    const u64 last = number + rounds - 1;
    if (threadIdx.x == 0) mine->calls[blockIdx.x] = last;
    if (blockIdx.x == 0)
      for (u32 block = gridDim.x + threadIdx.x; block < MAX_BLOCKS; block += blockDim.x) mine->calls[block] = last;
  }

  // Waits until this block of every member has reached `phase` (0 or 1) of the call; their earlier writes are visible
  // afterwards. Returns false to the whole block if it must give up.
  __device__ bool barrier(int phase) {
    __syncthreads();
    const u64 epoch = 2 * number + phase;
    signal(epoch);
    const bool reached = wait(epoch);
    if (phase == 0) count();
    return reached;
  }

  // Signals to this block of every other member that it has reached `epoch`, which makes its earlier writes visible.
  // Called behind a barrier of the block.
  __device__ void signal(u64 epoch) const {
    if (stopped || threadIdx.x >= RANKS || threadIdx.x == peers.me) return;
    signal_to(threadIdx.x, epoch);
  }

  // Waits until this block of every member has signalled `epoch` or a later one. Returns false to the whole block if
  // it must give up, in this and all later calls.
  __device__ bool wait(u64 epoch) {
    bool stop = stopped;
    if (!stop && threadIdx.x < RANKS && threadIdx.x != peers.me) stop = !wait_for<true>(threadIdx.x, epoch);
    stopped = __syncthreads_or(stop);
    if (stopped && threadIdx.x == 0) give_up();
    return !stopped;
  }

  // Waits until this block of a member has signalled `epoch` or a later one. Returns false to this thread if it must
  // give up. IDLE: the other warps of the block wait, too.
  template <bool IDLE> __device__ bool wait_for(u32 member, u64 epoch) const {
    u64 seen;
    if (!poll<IDLE>(&mine->flags[blockIdx.x][member], epoch << FINGERPRINT_BITS, seen)) return false;
    if (seen >> FINGERPRINT_BITS != epoch || seen == word(epoch)) return true;
    // The peer detects the mismatch, too, also where other warps of this block would signal later. It is not taken for
    // data, since the fingerprints differ.
    signal_to(member, epoch);
    store_host(&peers.control->call, (u32)number);
    store_host(&peers.control->mismatch, 1 + member);
    store_host(&peers.control->abort, 1);
    return false;
  }

  // Waits until a word of this member's memory is `least` or more. Returns false if it must give up. An acquiring load
  // empties the multiprocessor's cache, which slows warps that are not idle; for these, only the last load acquires.
  template <bool IDLE> __device__ bool poll(const u64 *word, u64 least, u64 &seen) const {
    seen = load_acquire(word);
    for (u32 spins = 1; seen < least; ++spins) {
      if (spins % 256 == 0 && load_host(&peers.control->abort)) return false;
      if (IDLE || load_relaxed(word) >= least) seen = load_acquire(word);
    }
    return true;
  }

  // Later calls of this member, and blocks of this call that have not begun, return at once.
  __device__ void give_up() const { *(volatile u64 *)&mine->stopped = 1; }

  // Signals to this block of one other member that it has reached `epoch`, which makes writes visible that happened
  // before.
  __device__ void signal_to(u32 member, u64 epoch) const {
    store_release(&peers.arenas[member]->flags[blockIdx.x][peers.me], word(epoch));
  }

private:
  __device__ u64 word(u64 epoch) const { return epoch << FINGERPRINT_BITS | peers.fingerprint; }
};
