"""One rank of the comparison: the same measurements as rust-core/examples/collectives.rs, with PyTorch's gloo
backend.
"""

import sys
import time

import torch
import torch.distributed as dist


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for argument in sys.argv[1:]:
        name, bytes_, repeats, calls = argument.split(":")
        data = torch.ones(int(bytes_) // 4)
        others = [torch.ones_like(data) for _ in range(dist.get_world_size() if name == "all_gather" else 0)]
        run = {
            "all_reduce": lambda data=data: dist.all_reduce(data),
            "broadcast": lambda data=data: dist.broadcast(data, 0),
            "all_gather": lambda data=data, others=others: dist.all_gather(others, data),
            "barrier": dist.barrier,
        }[name]
        times = []
        for repeat in range(int(repeats) + 1):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(int(calls)):
                run()
            if repeat > 0:
                times.append((time.perf_counter() - start) / int(calls))
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(name, bytes_, *(f"{value:.9f}" for value in slowest.tolist()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
