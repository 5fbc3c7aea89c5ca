// What members of a group share for operations between peers: flags by which their blocks meet, and staging memory
// that peers write to. Nobody reads a peer's memory: a write does not wait for the link, a read does.
//
// - PEER-1: block b of a member meets block b of every other one; what a block reads in its staging was written by the
//   peers' blocks with the same number.
// - PEER-2: words of the flags only grow. They carry the number of the call and its fingerprint, so that members that
//   call different operations find out instead of mixing their data. Nobody goes on to a later call before the others'
//   words of this one agree with its own, so whoever finds a later word in a flag knows that they did.
// - PEER-3: staging has two halves, used in turn. A member that meets the others in call k + 1 has finished call k, so
//   that they may write to its half of call k again in call k + 2.
// - PEER-4: the number of the call is kept on the device, so a launch that is replayed by a CUDA graph is one more call.
//   Each block has a copy of its own, and block 0 writes those of the blocks that a launch does not have, so that no block
//   waits for another of its launch.
// - PEER-5: whoever waits looks at the abort word of its own host, and gives up when it is set. A member that gave up
//   once never meets the others again, so that none takes a later call of it for the one that was given up.
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

  // A member's half for this call.
  __device__ Vector *staging(int rank) const {
    return (Vector *)((char *)(peers.arenas[rank] + 1) + (number & 1) * peers.half_bytes);
  }

  // Counts the call, or as many as its rounds. After a meeting, when every thread of the block has read the number.
  __device__ void count(u64 rounds = 1) const {
    const u64 last = number + rounds - 1;
    if (threadIdx.x == 0) mine->calls[blockIdx.x] = last;
    if (blockIdx.x == 0)
      for (u32 block = gridDim.x + threadIdx.x; block < MAX_BLOCKS; block += blockDim.x) mine->calls[block] = last;
  }

  // Waits until this block of every member has come to `phase` (0 or 1) of the call; what they wrote before is seen
  // afterwards. False for the whole block if it must give up.
  __device__ bool meet(int phase) {
    __syncthreads();
    const u64 epoch = 2 * number + phase;
    tell(epoch);
    const bool met = wait(epoch);
    if (phase == 0) count();
    return met;
  }

  // Tells this block of every other member that it has come to `epoch`, and what the block wrote to them. Behind a barrier.
  __device__ void tell(u64 epoch) const {
    if (stopped || threadIdx.x >= RANKS || threadIdx.x == peers.me) return;
    store_release(&peers.arenas[threadIdx.x]->flags[blockIdx.x][peers.me], word(epoch));
  }

  // Waits until this block of every member has told of `epoch` or a later one. False for the whole block if it must give
  // up, now and in later calls.
  __device__ bool wait(u64 epoch) {
    bool stop = stopped;
    if (!stop && threadIdx.x < RANKS && threadIdx.x != peers.me) {
      const u64 *flag = &mine->flags[blockIdx.x][threadIdx.x];
      u64 seen = load_acquire(flag);
      for (u32 spins = 1; seen >> FINGERPRINT_BITS < epoch; ++spins) {
        if (spins % 256 == 0 && load_host(&peers.control->abort)) {
          stop = true;
          break;
        }
        seen = load_acquire(flag);
      }
      if (!stop && seen >> FINGERPRINT_BITS == epoch && seen != word(epoch)) {
        store_host(&peers.control->call, (u32)number);
        store_host(&peers.control->mismatch, 1 + threadIdx.x);
        store_host(&peers.control->abort, 1);
        stop = true;
      }
    }
    stopped = __syncthreads_or(stop);
    if (stopped && threadIdx.x == 0) *(volatile u64 *)&mine->stopped = 1;
    return !stopped;
  }

private:
  __device__ u64 word(u64 epoch) const { return epoch << FINGERPRINT_BITS | peers.fingerprint; }
};
