/* See plugin.h. Compiled with `mpicc -shared -fPIC`, against MPI 3.0 or newer. */
#define _GNU_SOURCE
#include "plugin.h"

#include <dlfcn.h>
#include <mpi.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static MPI_Comm job = MPI_COMM_NULL;
static int owns_mpi;
static int num_slots;
/* All requests from this slot on are MPI_REQUEST_NULL, so that MPI need not look at them. */
static int end;
static MPI_Request *requests;
static char *is_recv;
/* Output of MPI_Testsome. */
static int *indices;
static MPI_Status *statuses;

/* Note "Open MPI 4 and broken connections". Error handlers of the standard do not reach everything: when a connection
 * breaks under a message, the point-to-point layer of Open MPI 4 ends the process (ompi_rte_abort, then _exit), and
 * with it every other thread, although one of them is about to raise an error that names the peer. ompi_rte_abort calls
 * through a table of function pointers, in which this code replaces the abort function by `leave`. The entry is found by
 * its value, so another layout or another version of Open MPI is not changed. `leave` jumps back into the call of this
 * plug-in that led there. MPI is not called again, so the state that the jump leaves behind does not matter. */
static jmp_buf way_out;
static volatile int inside;
static pthread_t caller;
static int (*original)(int, char *, ...);

static int leave(int code, char *text, ...) {
  if (inside && pthread_equal(pthread_self(), caller)) {
    inside = 0;
    longjmp(way_out, 1);
  }
  return original(code, "%s", text ? text : "");
}

static void guard_abort(void) {
  /* Also finds libraries that only this plug-in has loaded. */
  void **table = dlsym(RTLD_DEFAULT, "orte_errmgr");
  void *aborts = dlsym(RTLD_DEFAULT, "orte_errmgr_base_abort");
  if (!table || !aborts) return;
  enum { NUM_FUNCTIONS = 5 };
  for (int i = 0; i < NUM_FUNCTIONS; i++) {
    if (table[i] != aborts) continue;
    memcpy(&original, &aborts, sizeof original);
    int (*ours)(int, char *, ...) = leave;
    memcpy(&table[i], &ours, sizeof ours);
  }
}

/* Wraps every call of MPI that may find a broken connection. */
#define ENTER                            \
  do {                                   \
    caller = pthread_self();             \
    if (setjmp(way_out)) {               \
      return SMD_MPI_GAVE_UP;            \
    }                                    \
    inside = 1;                          \
  } while (0)
#define LEAVE (inside = 0)

static int32_t init(int32_t *any_thread) {
  int initialised = 0, finalised = 0, level = 0;
  MPI_Finalized(&finalised);
  if (finalised) return SMD_MPI_FINALIZED;
  MPI_Initialized(&initialised);
  if (initialised) {
    MPI_Query_thread(&level);
  } else {
    /* The highest level allows the script to use MPI too, from its own threads. */
    int code = MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    if (code) return code;
    owns_mpi = 1;
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  }
  *any_thread = level >= MPI_THREAD_MULTIPLE;
  return 0;
}

static int32_t start(int32_t slots, struct smd_mpi_world *world) {
  int length = 0;
  char library[MPI_MAX_LIBRARY_VERSION_STRING];
  int code = init(&world->any_thread);
  if (code) return code;
  if (!world->any_thread && !owns_mpi) return SMD_MPI_THREADS;
  guard_abort();
  ENTER;
  /* A communicator of its own, so that the core's messages cannot match receives of the script. */
  code = MPI_Comm_dup(MPI_COMM_WORLD, &job);
  if (!code) code = MPI_Comm_set_errhandler(job, MPI_ERRORS_RETURN);
  if (!code) code = MPI_Comm_rank(job, &world->rank);
  if (!code) code = MPI_Comm_size(job, &world->size);
  if (!code) code = MPI_Get_library_version(library, &length);
  LEAVE;
  if (code) return code;
  snprintf(world->library, sizeof world->library, "%.*s", (int)strcspn(library, ",\n"), library);
  num_slots = slots;
  requests = malloc(sizeof *requests * slots);
  is_recv = calloc(slots, 1);
  indices = malloc(sizeof *indices * slots);
  statuses = malloc(sizeof *statuses * slots);
  if (!requests || !is_recv || !indices || !statuses) return SMD_MPI_MEMORY;
  for (int i = 0; i < slots; i++) requests[i] = MPI_REQUEST_NULL;
  return 0;
}

static int32_t send(int32_t slot, const void *data, int32_t bytes, int32_t to, int32_t tag) {
  ENTER;
  if (slot >= end) end = slot + 1;
  is_recv[slot] = 0;
  int code = MPI_Isend(data, bytes, MPI_BYTE, to, tag, job, &requests[slot]);
  LEAVE;
  return code;
}

static int32_t recv(int32_t slot, void *data, int32_t bytes, int32_t from, int32_t tag) {
  ENTER;
  if (slot >= end) end = slot + 1;
  is_recv[slot] = 1;
  int code =
      MPI_Irecv(data, bytes, MPI_BYTE, from < 0 ? MPI_ANY_SOURCE : from, tag, job, &requests[slot]);
  LEAVE;
  return code;
}

static int32_t poll(struct smd_mpi_done *done, int32_t *num_done) {
  int count = 0;
  *num_done = 0;
  ENTER;
  int code = MPI_Testsome(end, requests, &count, indices, statuses);
  LEAVE;
  if (count == MPI_UNDEFINED) count = 0;
  for (int i = 0; i < count; i++) {
    int slot = indices[i];
    if (code == MPI_ERR_IN_STATUS && statuses[i].MPI_ERROR != MPI_SUCCESS) return statuses[i].MPI_ERROR;
    done[i].slot = slot;
    done[i].source = -1;
    done[i].bytes = 0;
    if (is_recv[slot]) {
      done[i].source = statuses[i].MPI_SOURCE;
      MPI_Get_count(&statuses[i], MPI_BYTE, &done[i].bytes);
    }
  }
  while (end > 0 && requests[end - 1] == MPI_REQUEST_NULL) end--;
  if (code == MPI_SUCCESS || code == MPI_ERR_IN_STATUS) {
    *num_done = count;
    return 0;
  }
  return code;
}

static int32_t finish(void) {
  ENTER;
  int code = 0;
  for (int i = 0; i < num_slots; i++) {
    if (requests[i] == MPI_REQUEST_NULL || !is_recv[i]) continue;
    MPI_Cancel(&requests[i]);
    MPI_Wait(&requests[i], MPI_STATUS_IGNORE);
  }
  if (owns_mpi) code = MPI_Finalize();
  LEAVE;
  return code;
}

static void describe(int32_t code, char *text, int32_t room) {
  char message[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  if (code > 0) MPI_Error_string(code, message, &length);
  snprintf(text, room, "%s", message);
}

__attribute__((visibility("default"))) const struct smd_mpi_plugin *smd_mpi_plugin(void) {
  static const struct smd_mpi_plugin plugin = {SMD_MPI_ABI, sizeof plugin, init,   start,
                                               send,        recv,          poll,   finish, describe};
  return &plugin;
}
