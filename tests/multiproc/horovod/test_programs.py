"""Random programs of `horovod.torch` collectives: a seed determines the calls; each rank makes them in another order.

``python tests/multiproc/horovod/test_programs.py 10000`` runs 10000 programs, on 2 to 4 ranks.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import time
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from support import Forked, run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")

ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
KINDS = ("allreduce", "allreduce_", "grouped", "allgather", "broadcast", "alltoall", "reducescatter")


class Program:
    """The calls of one program: the same on all ranks, each of which shuffles them."""

    def __init__(self, number, torch, hvd, sets):
        self.torch, self.hvd, self.sets = torch, hvd, sets
        self.random = random.Random(number)
        self.slow = self.random.randrange(hvd.size()) if self.random.random() < 0.2 else None
        self.calls = [self.call(f"p{number}.{at}") for at in range(self.random.randint(1, 8))]
        # These ranks join first; the others make three more calls before they join.
        early = [rank for rank in range(hvd.size()) if self.random.random() < 0.4]
        self.joined = early if self.random.random() < 0.3 and len(early) < hvd.size() else None

    def call(self, name):
        """Draws one call: collective, set, dtype, shape, splits, rows, root, and the rank that sends another shape."""
        draw = self.random
        kind = draw.choice(KINDS)
        process_set = draw.choice(self.sets)
        ranks = process_set.ranks
        dtype = draw.choice([self.torch.float32, self.torch.float64, self.torch.int32, self.torch.int64])
        shape = [draw.randint(0, 6), draw.randint(1, 300)]
        splits = {rank: [draw.randint(0, 3) for _ in ranks] for rank in ranks}
        rows = {rank: draw.randint(0, 4) for rank in ranks}
        odd = draw.choice(ranks) if draw.random() < 0.1 and len(ranks) > 1 else None
        return name, kind, process_set, dtype, shape, splits, rows, draw.choice(ranks), odd

    def value(self, rank, height, width, dtype):
        return (self.torch.arange(height * width).reshape(height, width) % 97 + rank).to(dtype)

    def start(self, call):
        """Submits this rank's part of a call; returns the handle and the expected result."""
        name, kind, process_set, dtype, (height, width), splits, rows, root, odd = call
        torch, hvd, rank, ranks = self.torch, self.hvd, self.hvd.rank(), process_set.ranks
        wide = width + (rank == odd)
        common = {"name": name, "process_set": process_set}
        inputs = [self.value(other, height, width, dtype) for other in ranks]
        mine = self.value(rank, height, wide, dtype)
        if kind == "allreduce":
            return hvd.allreduce_async(mine, op=hvd.Sum, **common), sum(inputs)
        if kind == "allreduce_":
            return hvd.allreduce_async_(mine, op=hvd.Max, **common), inputs[-1]
        if kind == "grouped":
            group = [mine, torch.full((3,), float(rank))]
            return hvd.grouped_allreduce_async(group, op=hvd.Sum, **common), sum(inputs)
        if kind == "allgather":
            gathered = torch.cat([self.value(other, rows[other], width, dtype) for other in ranks])
            return hvd.allgather_async(self.value(rank, rows[rank], wide, dtype), **common), gathered
        if kind == "broadcast":
            return hvd.broadcast_async(mine, root, **common), self.value(root, height, width, dtype)
        if kind == "alltoall":
            place = ranks.index(rank)
            parts = []
            for other in ranks:
                sent = self.value(other, sum(splits[other]), width, dtype)
                before = sum(splits[other][:place])
                parts.append(sent[before : before + splits[other][place]])
            mine = self.value(rank, sum(splits[rank]), wide, dtype)
            return hvd.alltoall_async(mine, splits=splits[rank], **common), torch.cat(parts)
        heights = [height // len(ranks) + (at < height % len(ranks)) for at in range(len(ranks))]
        before = sum(heights[: ranks.index(rank)])
        own_calls = sum(inputs)[before : before + heights[ranks.index(rank)]]
        return hvd.reducescatter_async(mine, op=hvd.Sum, **common), own_calls

    def run(self):
        torch, hvd, rank = self.torch, self.hvd, self.hvd.rank()
        own_calls = [call for call in self.calls if rank in call[2].ranks]
        random.Random(hash((rank, len(own_calls)))).shuffle(own_calls)
        if rank == self.slow:
            time.sleep(0.02)
        for (handle, expected), call in [(self.start(call), call) for call in own_calls]:
            odd = call[-1]
            if odd is None:
                got = hvd.synchronize(handle)
                got = got[0] if isinstance(got, tuple) else got
                assert torch.equal(got, expected), (call, got, expected)
                continue
            with pytest.raises(hvd.HorovodInternalError, match=f"{call[0]}`.*rank {odd} ask"):
                hvd.synchronize(handle)
        if self.joined is not None:
            if rank not in self.joined:
                for _ in range(3):
                    value = hvd.allreduce(torch.ones(2), op=hvd.Sum)
                    assert value.tolist() == [float(hvd.size() - len(self.joined))] * 2
            hvd.join()


def programs(first, count):
    import torch

    import horovod.torch as hvd

    hvd.init()
    size = hvd.size()
    sets = [hvd.global_process_set, hvd.add_process_set([0])]
    if size > 2:
        sets += [hvd.add_process_set([0, size - 1]), hvd.add_process_set(range(1, size))]
    for number in range(first, first + count):
        Program(number, torch, hvd, sets).run()
    hvd.barrier()
    return count


@pytest.mark.timeout(200)
@pytest.mark.parametrize("size", [2, 3])
def test_random_programs(size):
    assert run_ranks(programs, size, 1000 * size, 60, launcher=Forked("torch"), env=ENV, timeout=180) == [60] * size


def main():
    total, done, size = int(sys.argv[1]), 0, 2
    while done < total:
        done += run_ranks(programs, size, done, min(500, total - done), env=ENV, timeout=600)[0]
        print(f"{done} programs, the last ones on {size} ranks: no hang, no wrong result", flush=True)
        size = size % 4 + 1 if size < 4 else 2


if __name__ == "__main__":
    main()
