/* The interface between the core and its MPI plug-in. The plug-in is the only code that sees mpi.h: an MPI library's types and
 * constants differ from those of another one, so it is compiled against the MPI that the job uses. It contains no policy.
 *
 * The core makes one call at a time. Functions return 0, an MPI error code (positive) or one of the codes below. */
#ifndef SMD_MPI_PLUGIN_H
#define SMD_MPI_PLUGIN_H

#include <stdint.h>

/* Incremented when anything below changes; mirrored in rust-core/src/transport/mpi/plugin.rs. */
#define SMD_MPI_ABI 4

/* MPI tried to end the process. MPI is not called again. */
#define SMD_MPI_GAVE_UP (-1)
/* The process uses MPI with a thread level below MPI_THREAD_MULTIPLE. */
#define SMD_MPI_THREADS (-2)
/* The process has finalized MPI. */
#define SMD_MPI_FINALIZED (-3)
/* Out of memory. */
#define SMD_MPI_MEMORY (-4)

struct smd_mpi_world {
  int32_t rank;
  int32_t size;
  /* Whether any thread may call MPI: MPI_THREAD_MULTIPLE. */
  int32_t any_thread;
  char library[120];
};

struct smd_mpi_done {
  int32_t slot;
  /* For a receive: the sender and the length. */
  int32_t source;
  int32_t bytes;
};

struct smd_mpi_plugin {
  uint32_t abi;
  uint32_t struct_bytes;
  /* Initialises MPI by MPI_Init_thread unless that has been done; it waits for all processes. */
  int32_t (*init)(int32_t *any_thread);
  /* Joins the job: `init`, and a communicator of our own. Waits for all processes. */
  int32_t (*start)(int32_t num_slots, struct smd_mpi_world *world);
  /* Start a message in a free slot. MPI uses the memory until `poll` returns the slot. */
  int32_t (*send)(int32_t slot, const void *data, int32_t bytes, int32_t to, int32_t tag);
  /* From process `from`, or from any one if it is negative. */
  int32_t (*recv)(int32_t slot, void *data, int32_t bytes, int32_t from, int32_t tag);
  /* Returns the completed slots, at most as many as fit into `done`; does not wait. */
  int32_t (*poll)(struct smd_mpi_done *done, int32_t *num_done);
  /* Withdraws open receives, and calls MPI_Finalize if `start` initialised MPI. Waits for all processes. */
  int32_t (*finish)(void);
  /* Describes a code. */
  void (*describe)(int32_t code, char *text, int32_t room);
};

/* The one symbol of the library. */
const struct smd_mpi_plugin *smd_mpi_plugin(void);

#endif
