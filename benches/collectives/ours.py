"""One rank of the comparison between hosts: the same measurements as gloo.py, with this library's PyTorch operators."""

import sys
import time

import torch

import smdistributed.dataparallel.torch.distributed as dist


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group()
    for argument in sys.argv[1:]:
        name, bytes_, repeats, calls = argument.split(":")
        data = torch.ones(int(bytes_) // 4)
        run = {"all_reduce": lambda data=data: dist.all_reduce(data), "barrier": dist.barrier}[name]
        times = []
        for repeat in range(int(repeats) + 1):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(int(calls)):
                run()
            if repeat > 0:
                times.append((time.perf_counter() - start) / int(calls))
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(name, bytes_, *(f"{value:.9f}" for value in slowest.tolist()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
