// One rank of the comparison: the same measurements as rust-core/examples/collectives.rs, with MPI.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
        float *data = malloc(bytes + 1), *others = malloc(is_gather ? bytes * (size_t)size + 1 : 1);
        double *times = malloc(sizeof(double) * (size_t)repeats);
        for (int k = 0; k < elems; k++) data[k] = 1.0f;
        if (is_gather) for (size_t k = 0; k < (size_t)elems * (size_t)size; k++) others[k] = 1.0f;
        for (int repeat = 0; repeat <= repeats; repeat++) {
            MPI_Barrier(MPI_COMM_WORLD);
            double start = MPI_Wtime();
            for (int call = 0; call < calls; call++) {
                if (strcmp(name, "all_reduce") == 0)
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
            if (repeat > 0) times[repeat - 1] = (MPI_Wtime() - start) / calls;
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
        free(times);
    }
    MPI_Finalize();
    return 0;
}
