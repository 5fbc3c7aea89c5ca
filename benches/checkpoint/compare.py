"""Checkpoints of CPU tensors, compared with torch.distributed.checkpoint: saving, blocking time of asynchronous saves,
loading.

    smdrun -n 4 benches/checkpoint/compare.py [--mib 256] [--rounds 5] [--fsync] [--folder DIR]

Each rank has `--mib` MiB of its own. Rounds alternate between the two libraries, and files are removed after each.
Times are those of the slowest rank, as medians over rounds. The first round is not counted, because it allocates
memory. `plain writes` is the time in the same rounds of writing the same memory to one file for each rank, without
checksums and names. It is a lower bound for writes through the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from smdistributed import _core

warnings.filterwarnings("ignore")


class Ours:
    """Saves and loads with the core's saver and reader."""

    def __init__(self, state, fsync, folder):
        self.state, self.folder, self.number = state, folder, 0
        self.threads = max(1, len(os.sched_getaffinity(0)) // dist.get_world_size())
        self.saver = _core.CheckpointSaver(
            folder, dist.get_rank(), dist.get_world_size(), self.threads, fsync, None, 100.0
        )

    def save(self, asynchronous):
        self.number += 1
        tensors = [
            (n, "F32", list(t.shape), [0] * t.dim(), list(t.shape), t.data_ptr(), False) for n, t in self.state.items()
        ]
        self.saver.save("bench", self.number, self.number, "{}", "null", tensors, asynchronous)

    def finish(self):
        self.saver.wait()

    def load(self, state):
        reader = _core.CheckpointReader(self.folder)
        sizes = [(n, [0] * t.dim(), list(t.shape), t.data_ptr(), t.numel() * 4) for n, t in state.items()]
        reader.read(sizes, self.threads)


class Theirs:
    """Saves and loads with torch.distributed.checkpoint, with synchronized files if `fsync` is set."""

    def __init__(self, state, fsync, folder):
        self.state, self.folder, self.fsync, self.pending = state, folder, fsync, None
        # A separate group, because its background thread communicates at the same time as this script.
        self.group = dist.new_group()

    def _writer(self):
        return dcp.FileSystemWriter(self.folder, sync_files=self.fsync)

    def save(self, asynchronous):
        if asynchronous:
            self.pending = dcp.async_save(self.state, storage_writer=self._writer(), process_group=self.group)
        else:
            dcp.save(self.state, storage_writer=self._writer(), process_group=self.group)

    def finish(self):
        self.pending.result()

    def load(self, state):
        dcp.load(state, storage_reader=dcp.FileSystemReader(self.folder), process_group=self.group)


class Plain:
    """Writes the memory without any format."""

    def __init__(self, state, fsync, folder):
        self.state, self.folder, self.fsync = state, folder, fsync

    def save(self):
        os.makedirs(self.folder, exist_ok=True)
        with open(os.path.join(self.folder, str(dist.get_rank())), "wb", buffering=0) as file:
            for tensor in self.state.values():
                file.write(tensor.numpy())
            if self.fsync:
                os.fsync(file.fileno())


def _slowest(seconds):
    worst = torch.tensor([seconds])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def _timed(action):
    dist.barrier()
    start = time.perf_counter()
    action()
    return _slowest(time.perf_counter() - start)


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fsync", action="store_true")
    parser.add_argument("--folder", default=None)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    names = [f"rank{rank}.{index}" for index in range(arguments.mib // 4)]
    state = {name: torch.randn(1024, 1024) for name in names}
    target = {name: torch.zeros(1024, 1024) for name in names}
    root = [tempfile.mkdtemp(dir=arguments.folder) if rank == 0 else None]
    dist.broadcast_object_list(root)
    times = {}
    plain = Plain(state, arguments.fsync, os.path.join(root[0], "Plain"))
    sides = [side(state, arguments.fsync, os.path.join(root[0], side.__name__)) for side in (Ours, Theirs)]
    for number in range(arguments.rounds + 1):
        plain_seconds = _timed(plain.save)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(plain.folder)
        dist.barrier()
        if number:
            times.setdefault("Plain", []).append(plain_seconds)
        for side in sides:
            row = {"save": _timed(lambda side=side: side.save(False))}
            row["load"] = _timed(lambda side=side: side.load(target))
            assert all(torch.equal(state[name], target[name]) for name in names)
            for tensor in target.values():
                tensor.zero_()
            row["async blocks"] = _timed(lambda side=side: side.save(True))
            row["then"] = _timed(side.finish)
            if rank == 0:
                shutil.rmtree(side.folder)
            dist.barrier()
            if number:
                times.setdefault(type(side).__name__, []).append(row)
    if rank == 0:
        shutil.rmtree(root[0])
        print(
            f"{dist.get_world_size()} ranks, {arguments.mib} MiB each, {'with' if arguments.fsync else 'without'} fsync"
        )
        print(f"{'':14}{'ours':>10}{'torch':>10}{'torch/ours':>12}")
        for what in ("save", "load", "async blocks", "then"):
            ours, theirs = (statistics.median(row[what] for row in times[side]) for side in ("Ours", "Theirs"))
            print(f"{what:14}{ours:9.3f}s{theirs:9.3f}s{theirs / ours:11.2f}x")
        bound = statistics.median(times["Plain"])
        print(f"{'plain writes':14}{bound:9.3f}s")
        blocks = statistics.median(row["async blocks"] for row in times["Ours"])
        print(
            f"ours blocks for {blocks / statistics.median(row['save'] for row in times['Theirs']):.3f} of torch's synchronous save"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
