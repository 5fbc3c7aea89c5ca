// Exchange of many or large tensors of TYPE between two members, in chunks: all-reduce, reduce-scatter and all-gather.
// OP is an operation of number.cuh, or Receive for an all-gather. The warps of a block have different roles and work on
// different chunks at the same time:
//
// - SENDERS warps write a chunk of what this member sends into a slot at the peer. For them, one warp waits until the
//   peer has released the slot, and another one signals to the peer that all of them have written.
// - FOLDERS warps reduce this member's own chunk with the one that the peer sent. For them, one warp waits until the
//   peer has signalled the chunk, and another one releases the slot when all of them have reduced.
//
// In round r of a launch, block b has chunk r * blocks + b of all tensors.
//
// - CHK-1: each round counts as a call (PEER-4), although one launch makes many rounds. Every block makes all rounds
//   of the launch, some of them without a chunk.
// - CHK-2: a block has four slots in the peer's staging memory, separate from the halves of other calls. It writes
//   into one only after the peer has released the chunk that was there, which may be one of an earlier launch.
// - CHK-3: a member signals its second round only after the fingerprints of the first one agreed. All rounds have the
//   launch's fingerprint; a flag that has advanced to a later round is not compared (PEER-2).
// - CHK-4: the output may be the memory of what the member sends or of its input. Folders write the results of a chunk
//   only after the senders have read it, and each thread loads its own vectors before it stores the results there.
// - CHK-5: a block that gives up (PEER-5) goes on through the rounds, because its warps wait for each other, but it
//   sends, reduces, signals and releases nothing more. Its warps no longer wait for the peer, so one can be many rounds
//   ahead, and counts of Progress too high. Whoever passes a wait because of that also sees that the block has given
//   up. The abort word is set whenever a block gives up, so all polls end.
#include "chunk.cuh"

// Mirrored by collectives/cuda/p2p/chunks.rs.
#define UNITS 128 // Of a chunk.
#define SENDERS 8
#define FOLDERS 16

constexpr u64 CHUNK_ELEMS = (u64)UNITS * UNIT_VECTORS * LANES;
// Numbers of units that a sender and a folder load before they process them.
constexpr int SEND_UNROLL = 4, FOLD_UNROLL = 2;
static_assert(UNITS / SENDERS % SEND_UNROLL == 0 && UNITS / FOLDERS % FOLD_UNROLL == 0, "warps have whole steps");
static_assert(UNITS / SENDERS == 16, "the marks of a sender's units are 16 bits");
static_assert(32 % (UNITS / FOLDERS) == 0, "the marks of a folder's units are in one word");

// The first warps of the roles.
enum Warp { FIRST_FOLDER = SENDERS, WAITS_FOR_SLOTS = SENDERS + FOLDERS, SIGNALS, WAITS_FOR_CHUNKS, RELEASES, END };
constexpr int BLOCK_THREADS = END * WARP;

// A bit for each unit of a chunk: its low halves are in the slot.
union Marks {
  Vector vector;
  u32 words[UNITS / 32];
  unsigned short senders[SENDERS];
};

// Numbers of 16 bits are not divided into halves: `highs` has the first vector of each thread, `lows` the second.
struct Slot {
  // Written by the peer.
  Vector highs[UNITS][WARP];
  Vector lows[UNITS][WARP];
  Marks marks;
  // The number of the last chunk that the owner of this memory has sent to the peer's slot with the same index, and of
  // the last one that the peer has reduced there.
  u64 sent, released;
  u64 unused[28];
};
static_assert(sizeof(Slot) == UNITS * UNIT_VECTORS * sizeof(Vector) + 256, "the host reserves as much");

static __device__ __forceinline__ Slot *slot(const Chunks &all, u32 owner, u64 number) {
  Slot *slots = (Slot *)((char *)all.peers.arenas[owner] + all.slots);
  return slots + blockIdx.x * SLOTS + number % SLOTS;
}

// Counts the warps of one role that have passed a point of each round; other warps wait for all of them. Rounds that
// use the same slot share a count. No warp is SLOTS rounds ahead of another one of its role: senders wait for the slot,
// folders for a chunk that the peer sends only when the slot is released.
struct Progress {
  u32 counts[SLOTS];

  // Called by all threads of a warp.
  __device__ void pass(u32 round) {
    __syncwarp();
    if (threadIdx.x % WARP) return;
    __threadfence_block();
    atomicAdd(&counts[round % SLOTS], 1);
  }

  // Waits until `warps` warps have passed the point in a round. Called by all threads of a warp.
  __device__ void wait(u32 round, u32 warps) const {
    if (threadIdx.x % WARP == 0) {
      while (*(volatile const u32 *)&counts[round % SLOTS] < (round / SLOTS + 1) * warps) __nanosleep(32);
      __threadfence_block();
    }
    __syncwarp();
  }
};

// The operation of an all-gather, whose results are the peer's numbers. Its functions are declared like those of a
// reduction, but no kernel calls them.
struct Receive {
  template <typename T> static __device__ T of(T, T theirs) { return theirs; }
  template <typename T> static __device__ T finish(T value, int) { return value; }
};
constexpr bool REDUCES = !IS_SAME<OP, Receive>;

// Whether two numbers of 16 bits are reduced at once. Their results have the bits of Element and OP, also where these
// round twice, to float32 and to TYPE: float32 has more than twice TYPE's bits of precision (Figueroa, "When is double
// rounding innocuous?", 1995). Instructions that compute a NaN all return the same one. Min and Max return one of their
// numbers instead, so a NaN keeps its bits there.
constexpr bool IS_PACKED = Packed<TYPE>::EXISTS && (IS_SAME<OP, Sum> || IS_SAME<OP, Average>);

// COL-1: member 0's number comes first. A template, because the body of an `if constexpr` that does not hold is
// compiled elsewhere, and Packed takes float32 only.
template <typename T> static __device__ __forceinline__ Vector fold(const Vector &own, const Vector &theirs, bool mine_first) {
  Lanes first, second, result;
  first.vector = mine_first ? own : theirs;
  second.vector = mine_first ? theirs : own;
  const auto reduced = [&](int lane) {
    const auto number = OP::of(Element<T>::widen(first.values[lane]), Element<T>::widen(second.values[lane]));
    return OP::finish(number, RANKS);
  };
  if constexpr (IS_PACKED) {
#pragma unroll
    for (int word = 0; word < WORDS; ++word)
      result.words[word] = IS_SAME<OP, Sum> ? Packed<T>::sum(first.words[word], second.words[word])
                                            : Packed<T>::narrow(reduced(2 * word), reduced(2 * word + 1));
  } else {
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) result.values[lane] = Element<T>::narrow(reduced(lane));
  }
  return result.vector;
}

// Writes a sender's units of a chunk into the peer's slot. Returns their marks.
static __device__ __forceinline__ u32 write(const Tensor &tensor, u64 start, Slot *to, u32 sender) {
  constexpr int COUNT = UNITS / SENDERS;
  const u32 lane = threadIdx.x % WARP;
  const bool vectors_are_whole = aligned(tensor.sent);
  u32 marks = 0;
#pragma unroll 1
  for (int first = 0; first < COUNT; first += SEND_UNROLL) {
    Vector vectors[SEND_UNROLL][2];
#pragma unroll
    for (int step = 0; step < SEND_UNROLL; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u64 at = start + (sender * COUNT + first + step) * UNIT_VECTORS + half * WARP + lane;
        vectors[step][half] = load(tensor.sent, at, tensor.elems, vectors_are_whole);
      }
#pragma unroll
    for (int step = 0; step < SEND_UNROLL; ++step) {
      const u32 unit = sender * COUNT + first + step;
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

// Reduces a folder's units of a chunk with those that the peer wrote.
static __device__ __forceinline__ void fold(const Tensor &tensor, u64 start, const Slot *received, u32 folder,
                                            bool mine_first) {
  constexpr int COUNT = UNITS / FOLDERS;
  const u32 lane = threadIdx.x % WARP, begin = folder * COUNT;
  const bool whole_input = aligned(tensor.input), whole_output = aligned(tensor.output);
  const u32 marks = HAS_HALVES ? received->marks.words[begin / 32] >> begin % 32 : ~0u;
#pragma unroll 1
  for (int first = 0; first < COUNT; first += FOLD_UNROLL) {
    Vector own[FOLD_UNROLL][2], highs[FOLD_UNROLL], lows[FOLD_UNROLL];
#pragma unroll
    for (int step = 0; step < FOLD_UNROLL; ++step) {
      const u32 unit = begin + first + step;
      highs[step] = received->highs[unit][lane];
      lows[step] = make_uint4(0, 0, 0, 0);
      if (marks >> (first + step) & 1) lows[step] = received->lows[unit][lane];
#pragma unroll
      for (int half = 0; half < 2 && REDUCES; ++half)
        own[step][half] =
            load(tensor.input, start + unit * UNIT_VECTORS + half * WARP + lane, tensor.elems, whole_input);
    }
#pragma unroll
    for (int step = 0; step < FOLD_UNROLL; ++step) {
      const u64 at = start + (begin + first + step) * UNIT_VECTORS + lane;
      const Vector &high = highs[step], &low = lows[step];
      const Vector theirs_0 = HAS_HALVES ? whole(high.x, high.y, low.x, low.y) : high;
      const Vector theirs_1 = HAS_HALVES ? whole(high.z, high.w, low.z, low.w) : low;
      const Vector result_0 = REDUCES ? fold<TYPE>(own[step][0], theirs_0, mine_first) : theirs_0;
      const Vector result_1 = REDUCES ? fold<TYPE>(own[step][1], theirs_1, mine_first) : theirs_1;
      store(tensor.output, at, tensor.elems, whole_output, result_0);
      store(tensor.output, at + WARP, tensor.elems, whole_output, result_1);
    }
  }
}

// What the warps of a block share.
struct Block {
  Marks marks[SLOTS];
  Progress free;     // A warp has seen that the slot is released; senders wait.
  Progress written;  // Senders have written the chunk; the warp that signals and the one that waits for chunks wait.
  Progress received; // A warp has seen the peer's signal; folders wait.
  Progress reduced;  // Folders have reduced the chunk; the warp that releases waits.
  volatile u32 gave_up;
};

// A warp of any role.
struct Worker {
  const Chunks &all;
  const Call &call;
  Block &block;
  u32 me, other, lane;
  Chunk<CHUNK_ELEMS> chunk = {};

  __device__ Worker(const Chunks &all, const Call &call, Block &block)
      : all(all), call(call), block(block), me(all.peers.me), other(1 - me), lane(threadIdx.x % WARP) {}

  // Advances to the chunk of a round. Returns its tensor to all threads of a warp; null if there is no chunk, or if the
  // block has given up.
  __device__ const Tensor *advance(u32 round) {
    chunk.seek(all, (u64)round * gridDim.x + blockIdx.x);
    const bool goes_on = __shfl_sync(~0u, !block.gave_up, 0);
    return chunk.tensor < all.count && goes_on ? &all.tensors[chunk.tensor] : nullptr;
  }

  __device__ void wait_for_slot(u32 round, u64 number) {
    const Slot *mine = slot(all, me, number);
    // The last chunk that was sent there.
    const u64 before = round < SLOTS ? load_relaxed(&mine->sent) : number - SLOTS;
    u64 seen;
    if (lane == 0 && !block.gave_up && !call.poll<false>(&mine->released, before, seen)) block.gave_up = 1;
    block.free.pass(round);
  }

  __device__ void send(u32 round, u64 number, u32 sender) {
    block.free.wait(round, 1);
    if (const Tensor *tensor = advance(round)) {
      const u32 marks = write(*tensor, chunk.start, slot(all, other, number), sender);
      if (lane == 0) block.marks[number % SLOTS].senders[sender] = marks;
    }
    block.written.pass(round);
  }

  __device__ void signal(u32 round, u64 number) {
    block.written.wait(round, SENDERS);
    if (lane || block.gave_up) return;
    // CHK-3.
    if (round == 1 && !call.wait_for<false>(other, 2 * call.number)) {
      block.gave_up = 1;
      return;
    }
    slot(all, other, number)->marks.vector = block.marks[number % SLOTS].vector;
    slot(all, me, number)->sent = number;
    call.signal_to(other, 2 * number);
  }

  __device__ void wait_for_chunk(u32 round, u64 number) {
    if (lane == 0 && !block.gave_up && !call.wait_for<false>(other, 2 * number)) block.gave_up = 1;
    block.written.wait(round, SENDERS); // CHK-4.
    block.received.pass(round);
  }

  __device__ void reduce(u32 round, u64 number, u32 folder) {
    block.received.wait(round, 1);
    if (const Tensor *tensor = advance(round))
      fold(*tensor, chunk.start, slot(all, me, number), folder, me == 0);
    block.reduced.pass(round);
  }

  __device__ void release(u32 round, u64 number) {
    block.reduced.wait(round, FOLDERS);
    if (lane == 0 && !block.gave_up) store_release(&slot(all, other, number)->released, number);
  }
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) exchange_chunks(const __grid_constant__ Chunks all) {
  __shared__ Block block;
  for (u32 word = threadIdx.x; word < sizeof(block) / 4; word += BLOCK_THREADS) ((volatile u32 *)&block)[word] = 0;
  const Call call(all.peers);
  // A member that has given up writes nothing more: others may still be reducing what it sent before (PEER-5).
  if (__syncthreads_or(call.stopped)) return;
  Worker worker(all, call, block);
  const u32 warp = threadIdx.x / WARP;
  for (u32 round = 0; round < all.rounds; ++round) {
    const u64 number = call.number + round;
    if (warp < FIRST_FOLDER)
      worker.send(round, number, warp);
    else if (warp < WAITS_FOR_SLOTS)
      worker.reduce(round, number, warp - FIRST_FOLDER);
    else if (warp == WAITS_FOR_SLOTS)
      worker.wait_for_slot(round, number);
    else if (warp == SIGNALS)
      worker.signal(round, number);
    else if (warp == WAITS_FOR_CHUNKS)
      worker.wait_for_chunk(round, number);
    else
      worker.release(round, number);
  }
  __syncthreads();
  if (!block.gave_up)
    call.count(all.rounds);
  else if (threadIdx.x == 0)
    call.give_up();
}
