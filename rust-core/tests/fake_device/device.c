// A CUDA driver and an NCCL without a device, for tests of what the core does with both. A stream is a row of pieces of
// work; a collective is done when all members have called it, or when its communicator is aborted.
//
// NCCL's rules for callers are checked: a communicator is used by one thread at a time, never after it was freed, and
// not before the last call has settled. Whoever breaks one ends the process with a text. The first operation of a
// blocking communicator connects with the other members: it stays inside until they come, or until an abort.

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CUDA_SUCCESS = 0, CUDA_NOT_READY = 600 };
enum { NCCL_SUCCESS = 0, NCCL_INTERNAL = 3, NCCL_INVALID_USAGE = 5, NCCL_IN_PROGRESS = 7 };
enum { MAX_CALLS = 1 << 16, MAX_MEMBERS = 8, ALIVE = 0x636f6d6d, DEAD = 0x64656164 };
// Looks at a communicator until what it was asked for is under way: a caller that does not wait for that records an
// event too early.
enum { POLLS = 3 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void broken(const char* rule) {
  fprintf(stderr, "fake NCCL: %s\n", rule);
  abort();
}

// Communicators and their groups.

typedef struct {
  char id[128];
  int size, joined, connected, finalized, splits;
  int arrived[MAX_CALLS];
} Job;

typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
  const char* net_name;
  int split_share;
} Config;

typedef struct Comm {
  unsigned magic;
  int in_use;
  Job* job;
  int rank, polls, calls, finalizing, aborted, blocking, shares;
  // Of this communicator, or of the one that it was split off and shares with.
  int* abort_flag;
  // A split that is under way.
  struct Comm** child;
  Config config;
  int color, key;
  struct Stream* stream;
} Comm;

// The driver.

typedef struct {
  Comm* comm;
  int call;
} Work;

typedef struct Stream {
  Work last;
} Stream;

typedef struct {
  Work work;
} Event;

static Stream default_stream;
static __thread void* current;
static int live;

static Stream* of(void* stream) { return (uintptr_t)stream <= 2 ? &default_stream : stream; }

// With the lock held.
static int is_done(Work work) {
  return work.comm == NULL || work.comm->aborted || work.comm->job->arrived[work.call] == work.comm->job->size;
}

static int look(Work work) {
  pthread_mutex_lock(&lock);
  int done = is_done(work);
  pthread_mutex_unlock(&lock);
  return done ? CUDA_SUCCESS : CUDA_NOT_READY;
}

int cuInit(unsigned flags) { return (void)flags, CUDA_SUCCESS; }
int cuDeviceGetCount(int* count) { return *count = 2, CUDA_SUCCESS; }
int cuDeviceGet(int* device, int index) { return *device = index, CUDA_SUCCESS; }
int cuDevicePrimaryCtxRetain(void** context, int device) {
  return *context = (void*)(uintptr_t)(device + 1), CUDA_SUCCESS;
}
int cuDeviceGetAttribute(int* value, int which, int device) {
  return (void)which, (void)device, *value = 9, CUDA_SUCCESS;
}
int cuDeviceGetName(char* name, int length, int device) {
  return (void)device, snprintf(name, length, "none"), CUDA_SUCCESS;
}
int cuDeviceGetPCIBusId(char* name, int length, int device) {
  return snprintf(name, length, "0000:0%d:00.0", device), CUDA_SUCCESS;
}
int cuDeviceGetUuid_v2(char* uuid, int device) { return memset(uuid, device + 1, 16), CUDA_SUCCESS; }
int cuCtxGetCurrent(void** context) { return *context = current, CUDA_SUCCESS; }
int cuCtxPushCurrent_v2(void* context) { return current = context, CUDA_SUCCESS; }
int cuCtxPopCurrent_v2(void** context) { return *context = current, current = NULL, CUDA_SUCCESS; }
int cuThreadExchangeStreamCaptureMode(int* mode) { return *mode = 0, CUDA_SUCCESS; }
int cuGetErrorName(int error, const char** name) { return (void)error, *name = "CUDA_ERROR", CUDA_SUCCESS; }
int cuGetErrorString(int error, const char** text) { return (void)error, *text = "an error", CUDA_SUCCESS; }
int cuStreamIsCapturing(void* stream, int* status) { return (void)stream, *status = 0, CUDA_SUCCESS; }

int cuEventCreate(void** event, unsigned flags) {
  (void)flags;
  *event = calloc(1, sizeof(Event));
  return CUDA_SUCCESS;
}
int cuEventRecord(void* event, void* stream) {
  pthread_mutex_lock(&lock);
  ((Event*)event)->work = of(stream)->last;
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}
int cuEventQuery(void* event) { return look(((Event*)event)->work); }
// A stream has one piece of work: what it waits for, if that is not done.
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  (void)flags;
  pthread_mutex_lock(&lock);
  if (!is_done(((Event*)event)->work)) of(stream)->last = ((Event*)event)->work;
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}
int cuEventDestroy_v2(void* event) { return free(event), CUDA_SUCCESS; }
int cuStreamQuery(void* stream) { return look(of(stream)->last); }
int cuStreamSynchronize(void* stream) {
  while (look(of(stream)->last) != CUDA_SUCCESS) usleep(1000);
  return CUDA_SUCCESS;
}

// For tests: a stream, and how many communicators have not been freed.
void* fake_stream(void) { return calloc(1, sizeof(Stream)); }
int fake_live_communicators(void) {
  pthread_mutex_lock(&lock);
  int count = live;
  pthread_mutex_unlock(&lock);
  return count;
}

// NCCL.

typedef struct {
  char internal[128];
} Id;

static __thread int depth;

// Enters a call for a communicator; the lock is not held, so that calls of two threads would meet.
static Comm* enter(Comm* comm) {
  if (__atomic_load_n(&comm->magic, __ATOMIC_SEQ_CST) != ALIVE) broken("a communicator is used after it was freed");
  if (__atomic_exchange_n(&comm->in_use, 1, __ATOMIC_SEQ_CST)) broken("two threads use a communicator at once");
  usleep(20);
  return comm;
}

static int leave(Comm* comm, int answer) {
  if (__atomic_load_n(&comm->magic, __ATOMIC_SEQ_CST) != ALIVE) broken("a communicator is freed while it is used");
  __atomic_store_n(&comm->in_use, 0, __ATOMIC_SEQ_CST);
  return answer;
}

static Job* find(const char* id, int size) {
  static Job* jobs[4096];
  for (int at = 0; at < 4096; ++at) {
    if (jobs[at] == NULL) {
      jobs[at] = calloc(1, sizeof(Job));
      memcpy(jobs[at]->id, id, 128);
      jobs[at]->size = size;
    }
    if (memcmp(jobs[at]->id, id, 128) == 0) return jobs[at];
  }
  broken("too many groups");
  return NULL;
}

static Comm* make(const char* id, int size, int rank, const Config* config, int* abort_flag) {
  Comm* comm = calloc(1, sizeof(Comm));
  comm->blocking = config->blocking;
  comm->shares = config->split_share == 1;
  comm->abort_flag = abort_flag != NULL ? abort_flag : calloc(1, sizeof(int));
  comm->magic = ALIVE;
  comm->job = find(id, size);
  comm->rank = rank;
  comm->job->joined += 1;
  live += 1;
  return comm;
}

int ncclGetVersion(int* version) { return *version = 22700, NCCL_SUCCESS; }
const char* ncclGetErrorString(int answer) { return answer == NCCL_INVALID_USAGE ? "invalid usage" : "an error"; }
const char* ncclGetLastError(Comm* comm) { return (void)comm, ""; }

int ncclGetUniqueId(Id* id) {
  static int made;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "%d", __atomic_add_fetch(&made, 1, __ATOMIC_SEQ_CST));
  return NCCL_SUCCESS;
}

int ncclCommInitRankConfig(Comm** comm, int size, Id id, int rank, Config* config) {
  pthread_mutex_lock(&lock);
  *comm = make(id.internal, size, rank, config, NULL);
  (*comm)->polls = POLLS;
  Job* job = (*comm)->job;
  while (config->blocking && job->joined < size) {
    pthread_mutex_unlock(&lock);
    usleep(1000);
    pthread_mutex_lock(&lock);
  }
  if (config->blocking) (*comm)->polls = 0;
  pthread_mutex_unlock(&lock);
  return config->blocking ? NCCL_SUCCESS : NCCL_IN_PROGRESS;
}

// Whether nothing is in progress any more. With the lock held.
static int advance(Comm* comm) {
  if (comm->job->joined < comm->job->size) return 0;
  if (comm->finalizing && comm->job->finalized < comm->job->size) return 0;
  if (comm->child != NULL) {
    if (comm->job->splits % comm->job->size != 0) return 0;
    char id[128] = {0};
    snprintf(id, sizeof id, "%.90s/%d/%d", comm->job->id, comm->job->splits, comm->color);
    // All members get the color in the tests.
    *comm->child = comm->color < 0
                       ? NULL
                       : make(id, comm->job->size, comm->key, &comm->config, comm->shares ? comm->abort_flag : NULL);
    comm->child = NULL;
  }
  if (comm->polls > 0 && --comm->polls == 0 && comm->stream != NULL) {
    comm->stream->last = (Work){comm, comm->calls - 1};
    comm->job->arrived[comm->calls - 1] += 1;
    comm->stream = NULL;
  }
  return comm->polls == 0;
}

int ncclCommGetAsyncError(Comm* comm, int* state) {
  enter(comm);
  pthread_mutex_lock(&lock);
  *state = advance(comm) ? NCCL_SUCCESS : NCCL_IN_PROGRESS;
  pthread_mutex_unlock(&lock);
  return leave(comm, NCCL_SUCCESS);
}

static int queue_blocking(Comm* comm, void* stream) {
  int answer = NCCL_SUCCESS;
  enter(comm);
  pthread_mutex_lock(&lock);
  if (comm->calls == 0) {
    comm->job->connected += 1;
    while (comm->job->connected < comm->job->size && !*comm->abort_flag) {
      pthread_mutex_unlock(&lock);
      usleep(200);
      pthread_mutex_lock(&lock);
    }
  }
  if (*comm->abort_flag) {
    answer = NCCL_INTERNAL;
  } else if (comm->calls < MAX_CALLS) {
    of(stream)->last = (Work){comm, comm->calls};
    comm->job->arrived[comm->calls++] += 1;
  }
  pthread_mutex_unlock(&lock);
  return leave(comm, answer);
}

static int queue(Comm* comm, void* stream) {
  if (comm->blocking) return queue_blocking(comm, stream);
  enter(comm);
  pthread_mutex_lock(&lock);
  int is_settled = comm->polls == 0 && comm->job->joined == comm->job->size;
  if (is_settled && comm->calls < MAX_CALLS) {
    comm->calls += 1;
    comm->polls = POLLS;
    comm->stream = of(stream);
  }
  pthread_mutex_unlock(&lock);
  return leave(comm, is_settled ? NCCL_IN_PROGRESS : NCCL_INVALID_USAGE);
}

// For tests: the lengths of the all-reduces that the first member has called.
static size_t lengths[MAX_CALLS];
static int num_lengths;
int fake_lengths(size_t* copy) {
  pthread_mutex_lock(&lock);
  int count = num_lengths;
  memcpy(copy, lengths, count * sizeof(size_t));
  pthread_mutex_unlock(&lock);
  return count;
}

int ncclAllReduce(const void* in, void* out, size_t count, int type, int op, Comm* comm, void* stream) {
  pthread_mutex_lock(&lock);
  if (comm->rank == 0 && num_lengths < MAX_CALLS) lengths[num_lengths++] = count;
  pthread_mutex_unlock(&lock);
  return (void)in, (void)out, (void)type, (void)op, queue(comm, stream);
}
int ncclReduce(const void* in, void* out, size_t count, int type, int op, int root, Comm* comm, void* stream) {
  return (void)in, (void)out, (void)count, (void)type, (void)op, (void)root, queue(comm, stream);
}
int ncclBroadcast(const void* in, void* out, size_t count, int type, int root, Comm* comm, void* stream) {
  return (void)in, (void)out, (void)count, (void)type, (void)root, queue(comm, stream);
}
int ncclAllGather(const void* in, void* out, size_t count, int type, Comm* comm, void* stream) {
  return (void)in, (void)out, (void)count, (void)type, queue(comm, stream);
}
int ncclReduceScatter(const void* in, void* out, size_t count, int type, int op, Comm* comm, void* stream) {
  return (void)in, (void)out, (void)count, (void)type, (void)op, queue(comm, stream);
}
int ncclSend(const void* in, size_t count, int type, int peer, Comm* comm, void* stream) {
  return (void)in, (void)count, (void)type, (void)peer, queue(comm, stream);
}
int ncclRecv(void* out, size_t count, int type, int peer, Comm* comm, void* stream) {
  return (void)out, (void)count, (void)type, (void)peer, queue(comm, stream);
}
int ncclGroupStart(void) { return ++depth, NCCL_SUCCESS; }
int ncclGroupEnd(void) { return --depth, NCCL_SUCCESS; }

int ncclCommSplit(Comm* comm, int color, int key, Comm** child, Config* config) {
  enter(comm);
  pthread_mutex_lock(&lock);
  comm->child = child;
  comm->config = *config;
  comm->color = color;
  comm->key = key;
  comm->polls = POLLS;
  comm->job->splits += 1;
  pthread_mutex_unlock(&lock);
  return leave(comm, NCCL_IN_PROGRESS);
}

int ncclCommFinalize(Comm* comm) {
  enter(comm);
  pthread_mutex_lock(&lock);
  comm->finalizing = 1;
  comm->job->finalized += 1;
  while (comm->blocking && comm->job->finalized < comm->job->size && !*comm->abort_flag) {
    pthread_mutex_unlock(&lock);
    usleep(200);
    pthread_mutex_lock(&lock);
  }
  pthread_mutex_unlock(&lock);
  return leave(comm, comm->blocking ? NCCL_SUCCESS : NCCL_IN_PROGRESS);
}

// Its memory stays, so that a later use is noticed; the kernels of an aborted one end.
static int release(Comm* comm, int aborted) {
  // Before anything else, so that a thread that is inside of a communicator which shares the flag comes back.
  if (aborted) __atomic_store_n(comm->abort_flag, 1, __ATOMIC_SEQ_CST);
  enter(comm);
  pthread_mutex_lock(&lock);
  __atomic_store_n(&comm->magic, DEAD, __ATOMIC_SEQ_CST);
  comm->aborted = aborted;
  live -= 1;
  pthread_mutex_unlock(&lock);
  return NCCL_SUCCESS;
}

int ncclCommDestroy(Comm* comm) { return release(comm, 0); }
int ncclCommAbort(Comm* comm) { return release(comm, 1); }
