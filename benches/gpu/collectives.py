"""Collectives on GPUs, compared with NCCL through torch.distributed in one run.

    smdrun -n 4 benches/gpu/collectives.py
    smdrun -n 4 benches/gpu/collectives.py --collectives reduce_scatter all_gather
    smdrun -n 4 benches/gpu/collectives.py --sizes 4KiB 1MiB 25MiB --rounds 11

*ours* is `smdistributed.dataparallel.torch.distributed`, which has no call for reduce-scatter and for all-gather into
one tensor; *smddp* is this library's backend for torch.distributed. A size is that of the whole tensor, of which
reduce-scatter leaves, and all-gather takes, one part for each rank.

The libraries take turns, in a different order each round. Reductions average. The values are equal on all ranks,
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
SIZES = [
    "4KiB",
    "16KiB",
    "64KiB",
    "256KiB",
    "1MiB",
    "2MiB",
    "4MiB",
    "8MiB",
    "16MiB",
    "25MiB",
    "64MiB",
    "100MiB",
    "400MiB",
]
#: Bytes of all calls in a round, which limits the number of large calls.
ROUND_BYTES = 1 << 30
GRAPH_CALLS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collectives", nargs="+", default=["all_reduce"], choices=list(COLLECTIVES))
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
    if rank == 0:
        print(
            f"{size} ranks, {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL", torch.cuda.nccl.version()
        )
    for collective in arguments.collectives:
        rows = [measure(text, collective, smddp, arguments, rank) for text in arguments.sizes]
        if rank == 0:
            print(f"JSON {collective} " + json.dumps(rows))
    c10d.destroy_process_group()


def all_reduces(smddp, x: torch.Tensor) -> dict:
    """By library, an all-reduce in place."""
    return {
        "ours": lambda: dist.all_reduce(x, dist.ReduceOp.AVERAGE),
        "smddp": lambda: c10d.all_reduce(x, c10d.ReduceOp.AVG, smddp),
        "nccl": lambda: c10d.all_reduce(x, c10d.ReduceOp.AVG),
    }


def reduce_scatters(smddp, x: torch.Tensor) -> dict:
    """By library, a reduce-scatter into a tensor of one part."""
    part = torch.empty_like(x[: x.numel() // c10d.get_world_size()])
    return {
        "smddp": lambda: c10d.reduce_scatter_tensor(part, x, c10d.ReduceOp.AVG, smddp),
        "nccl": lambda: c10d.reduce_scatter_tensor(part, x, c10d.ReduceOp.AVG),
    }


def all_gathers(smddp, x: torch.Tensor) -> dict:
    """By library, an all-gather of parts."""
    part = torch.ones_like(x[: x.numel() // c10d.get_world_size()])
    return {
        "smddp": lambda: c10d.all_gather_into_tensor(x, part, smddp),
        "nccl": lambda: c10d.all_gather_into_tensor(x, part),
    }


#: By collective, the function that returns the calls of the libraries.
COLLECTIVES = {"all_reduce": all_reduces, "reduce_scatter": reduce_scatters, "all_gather": all_gathers}


def measure(text: str, collective: str, smddp, arguments: argparse.Namespace, rank: int) -> dict:
    """Times one size with all libraries and prints a line of the table, for the first size with its head."""
    digits = text.rstrip("KMiB")
    nbytes = int(digits) * UNITS[text[len(digits) :]]
    dtype = getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    x = torch.randn(nbytes // dtype.itemsize, device="cuda").to(torch.bfloat16 if arguments.narrow else dtype).to(dtype)
    calls = max(10, min(300, ROUND_BYTES // nbytes))
    libraries = COLLECTIVES[collective](smddp, x)
    graphs = {}
    for name, run in libraries.items():
        for _ in range(5):
            run()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], capture_error_mode="thread_local"):
            for _ in range(GRAPH_CALLS):
                run()
    names = list(libraries)
    found = []
    for turn in range(arguments.rounds):
        row = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            row[name] = [
                *timed(libraries[name], calls),
                timed(graphs[name].replay, max(2, calls // 20))[0] / GRAPH_CALLS,
            ]
        found.append([row[name] for name in names])
    slowest = torch.tensor(found, dtype=torch.float64, device="cuda")
    c10d.all_reduce(slowest, c10d.ReduceOp.MAX)
    middle = slowest.cpu().median(0).values
    eager, host, captured = (dict(zip(names, middle[:, at].tolist(), strict=True)) for at in range(3))
    if rank == 0:
        others = [name for name in names if name != "nccl"]
        if text == arguments.sizes[0]:
            wide, narrow = 11 * len(names), 8 * len(others)
            print(f"\n{collective}\n{'':8}{'eager us':>{wide}}{'of NCCL':>{narrow}}{'host us':>{wide}}", end="")
            print(f"{'captured us':>{wide}}{'of NCCL':>{narrow}}")
            absolute, relative = "".join(f"{name:>11}" for name in names), "".join(f"{name:>8}" for name in others)
            print(f"{'size':8}{absolute}{relative}{absolute}{absolute}{relative}", flush=True)
        show = lambda times: "".join(f"{times[name]:11.1f}" for name in names)  # noqa: E731
        ratios = lambda times: "".join(f"{times[name] / times['nccl']:8.2f}" for name in others)  # noqa: E731
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
