// One rank of the comparison: the same measurements as rust-core/examples/collectives.rs, with MPI.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Changes private memory for 2 ms.
static void work(volatile float *memory, int elems) {
    double end = MPI_Wtime() + 2e-3;
    for (int k = 0; MPI_Wtime() < end; k = (k + 4096) % elems)
        for (int i = k; i < k + 4096; i++) memory[i] += 1.0f;
}

int main(int argc, char **argv) {
    int rank, size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (int i = 1; i < argc; i++) {
        char name[32];
        size_t bytes;
        int repeats, calls;
        if (sscanf(argv[i], "%31[^:]:%zu:%d:%d", name, &bytes, &repeats, &calls) != 4) MPI_Abort(MPI_COMM_WORLD, 2);
        int elems = (int)(bytes / 4), is_gather = strcmp(name, "all_gather") == 0;
        int after_work = strcmp(name, "all_reduce_after_work") == 0, private_elems = 1 << 20;
        float *data = malloc(bytes + 1), *others = malloc(is_gather ? bytes * (size_t)size + 1 : 1);
        float *private_memory = calloc((size_t)private_elems, sizeof(float));
        double *times = malloc(sizeof(double) * (size_t)repeats);
        for (int k = 0; k < elems; k++) data[k] = 1.0f;
        if (is_gather) for (size_t k = 0; k < (size_t)elems * (size_t)size; k++) others[k] = 1.0f;
        for (int repeat = 0; repeat <= repeats; repeat++) {
            MPI_Barrier(MPI_COMM_WORLD);
            double start = MPI_Wtime(), time = 0;
            for (int call = 0; call < calls; call++) {
                if (after_work) {
                    MPI_Barrier(MPI_COMM_WORLD);
                    work(private_memory, private_elems);
                    double called = MPI_Wtime();
                    MPI_Allreduce(MPI_IN_PLACE, data, elems, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
                    time += MPI_Wtime() - called;
                } else if (strcmp(name, "all_reduce") == 0)
                    MPI_Allreduce(MPI_IN_PLACE, data, elems, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
                else if (strcmp(name, "broadcast") == 0)
                    MPI_Bcast(data, elems, MPI_FLOAT, 0, MPI_COMM_WORLD);
                else if (is_gather)
                    MPI_Allgather(data, elems, MPI_FLOAT, others, elems, MPI_FLOAT, MPI_COMM_WORLD);
                else if (strcmp(name, "barrier") == 0)
                    MPI_Barrier(MPI_COMM_WORLD);
                else
                    MPI_Abort(MPI_COMM_WORLD, 2);
            }
            if (!after_work) time = MPI_Wtime() - start;
            if (repeat > 0) times[repeat - 1] = time / calls;
        }
        MPI_Allreduce(MPI_IN_PLACE, times, repeats, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        if (rank == 0) {
            printf("%s %zu", name, bytes);
            for (int repeat = 0; repeat < repeats; repeat++) printf(" %.9f", times[repeat]);
            printf("\n");
            fflush(stdout);
        }
        free(data);
        free(others);
        free(private_memory);
        free(times);
    }
    MPI_Finalize();
    return 0;
}
