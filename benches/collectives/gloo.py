"""One rank of the comparison: the same measurements as rust-core/examples/collectives.rs, with PyTorch's gloo
backend.
"""

import itertools
import sys
import time

import torch
import torch.distributed as dist


def work(memory: torch.Tensor) -> None:
    """Changes private memory for 2 ms."""
    end = time.perf_counter() + 2e-3
    for part in itertools.cycle(memory.split(16384)):
        part += 1
        if time.perf_counter() >= end:
            return


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for argument in sys.argv[1:]:
        name, bytes_, repeats, calls = argument.split(":")
        data = torch.ones(int(bytes_) // 4)
        others = [torch.ones_like(data) for _ in range(dist.get_world_size() if name == "all_gather" else 0)]
        run = {
            "all_reduce": lambda data=data: dist.all_reduce(data),
            "all_reduce_after_work": lambda data=data: dist.all_reduce(data),
            "broadcast": lambda data=data: dist.broadcast(data, 0),
            "all_gather": lambda data=data, others=others: dist.all_gather(others, data),
            "barrier": dist.barrier,
        }[name]
        private = torch.ones(1 << 20)
        times = []
        for repeat in range(int(repeats) + 1):
            dist.barrier()
            start = time.perf_counter()
            apart = 0.0
            for _ in range(int(calls)):
                if name == "all_reduce_after_work":
                    before = time.perf_counter()
                    dist.barrier()
                    work(private)
                    apart += time.perf_counter() - before
                run()
            if repeat > 0:
                times.append((time.perf_counter() - start - apart) / int(calls))
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(name, bytes_, *(f"{value:.9f}" for value in slowest.tolist()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
