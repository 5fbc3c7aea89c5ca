"""For jobs that make many checks, because they take long to start."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from support import devices


class Checks:
    """Runs checks and keeps what failed, a line each.

    A check that failed on some ranks only leaves them at different places: the rest is passed over then.
    """

    def __init__(self) -> None:
        self.failed: list[str] = []
        self._apart = False

    def __call__(self, name: str, check: Callable[[], Any]) -> None:
        if self._apart:
            return
        before = len(self.failed)
        self._run(name, check)
        self._agree(name, len(self.failed) > before)

    def _agree(self, name: str, failed: bool) -> None:
        import torch

        import smdistributed.dataparallel.torch.distributed as dist

        count = torch.tensor([int(failed)])
        dist.all_reduce(count)
        self._apart = 0 < count.item() < dist.get_world_size()
        if self._apart:
            self.failed.append(f"{name}: the ranks are at different places; the rest was not tried")

    def _run(self, name: str, check: Callable[[], Any]) -> None:
        try:
            check()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            self.failed.append(f"{name}: {type(error).__name__}: {str(error)[:600]} ({last.name}:{last.lineno})")


def start_on_device() -> tuple[Any, Any, Any, int, int]:
    """Joins our job, makes torch's NCCL group of the same ranks, and takes this rank's device.

    Returns:
        ``torch``, ``torch.distributed``, our face, the rank and the number of ranks.
    """
    import torch

    import smdistributed.dataparallel.torch.distributed as dist

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(devices.own())
    torch.distributed.init_process_group("nccl", rank=rank, world_size=size)
    return torch, torch.distributed, dist, rank, size
