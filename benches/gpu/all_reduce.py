"""All-reduce on GPUs, compared with NCCL through torch.distributed in one run.

    smdrun -n 4 benches/gpu/all_reduce.py
    smdrun -n 4 benches/gpu/all_reduce.py --sizes 4KiB 1MiB 25MiB --rounds 11

The libraries take turns, in a different order each round. A call averages in place. The values are equal on all ranks,
so they do not change. The eager time is that of many consecutive calls on the current stream, between two
synchronizations; the host time ends when the last of them was queued. Captured calls run from a CUDA graph, without the
host. Figures are medians over rounds of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
import torch.distributed as c10d

import smdistributed.dataparallel.torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 - registers the backend

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
SIZES = ["4KiB", "16KiB", "64KiB", "256KiB", "1MiB", "2MiB", "4MiB", "8MiB", "16MiB", "25MiB", "64MiB", "100MiB"]
#: Bytes of all calls in a round, which limits the number of large calls.
ROUND_BYTES = 1 << 30
GRAPH_CALLS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--narrow", action="store_true", help="values that fit bfloat16, such as gradients under autocast"
    )
    arguments = parser.parse_args()
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    c10d.init_process_group("nccl", rank=rank, world_size=size, device_id=device)
    smddp = c10d.new_group(backend="smddp")
    libraries = {
        "ours": lambda x: dist.all_reduce(x, dist.ReduceOp.AVERAGE),
        "smddp": lambda x: c10d.all_reduce(x, c10d.ReduceOp.AVG, smddp),
        "nccl": lambda x: c10d.all_reduce(x, c10d.ReduceOp.AVG),
    }
    if rank == 0:
        print(
            f"{size} ranks, {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL", torch.cuda.nccl.version()
        )
        print(f"{'':8}{'eager us':>33}{'of NCCL':>16}{'host us':>33}{'captured us':>33}{'of NCCL':>16}")
        names = "".join(f"{name:>11}" for name in libraries)
        print(f"{'size':8}{names}{'ours':>8}{'smddp':>8}{names}{names}{'ours':>8}{'smddp':>8}", flush=True)
    rows = [measure(text, libraries, arguments, rank) for text in arguments.sizes]
    if rank == 0:
        print("JSON " + json.dumps(rows))
    c10d.destroy_process_group()


def measure(text: str, libraries: dict, arguments: argparse.Namespace, rank: int) -> dict:
    """Times one size with all libraries and prints a line."""
    digits = text.rstrip("KMiB")
    nbytes = int(digits) * UNITS[text[len(digits) :]]
    dtype = getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    x = torch.randn(nbytes // dtype.itemsize, device="cuda").to(torch.bfloat16 if arguments.narrow else dtype).to(dtype)
    calls = max(10, min(300, ROUND_BYTES // nbytes))
    graphs = {}
    for name, run in libraries.items():
        for _ in range(5):
            run(x)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], capture_error_mode="thread_local"):
            for _ in range(GRAPH_CALLS):
                run(x)
    names = list(libraries)
    found = []
    for turn in range(arguments.rounds):
        row = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            row[name] = [
                *timed(lambda run=libraries[name]: run(x), calls),
                timed(graphs[name].replay, max(2, calls // 20))[0] / GRAPH_CALLS,
            ]
        found.append([row[name] for name in names])
    slowest = torch.tensor(found, dtype=torch.float64, device="cuda")
    c10d.all_reduce(slowest, c10d.ReduceOp.MAX)
    middle = slowest.cpu().median(0).values
    eager, host, captured = (dict(zip(names, middle[:, at].tolist(), strict=True)) for at in range(3))
    if rank == 0:
        show = lambda times: "".join(f"{times[name]:11.1f}" for name in names)  # noqa: E731
        ratios = lambda times: "".join(f"{times[name] / times['nccl']:8.2f}" for name in names[:2])  # noqa: E731
        print(f"{text:8}{show(eager)}{ratios(eager)}{show(host)}{show(captured)}{ratios(captured)}", flush=True)
    return {"size": nbytes, "eager": eager, "host": host, "captured": captured}


def timed(run, calls: int) -> tuple[float, float]:
    """Returns the microseconds of a call, and those of its host part."""
    run()
    torch.cuda.synchronize()
    c10d.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    queued = time.perf_counter()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e6, (queued - start) / calls * 1e6


if __name__ == "__main__":
    main()
