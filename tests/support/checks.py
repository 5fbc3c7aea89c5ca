"""Many checks in one job, for jobs that take long to start."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from support import devices


class Checks:
    """Runs checks and keeps one line for each that failed.

    If a check fails on some of the ranks only, the ranks are no longer in step: all remaining checks are skipped.
    """

    def __init__(self) -> None:
        self.failed: list[str] = []
        self._out_of_step = False

    def __call__(self, name: str, check: Callable[[], Any]) -> None:
        if self._out_of_step:
            return
        before = len(self.failed)
        self._run(name, check)
        self._agree(name, len(self.failed) > before)

    def _agree(self, name: str, failed: bool) -> None:
        import torch

        import smdistributed.dataparallel.torch.distributed as dist

        count = torch.tensor([int(failed)])
        dist.all_reduce(count)
        self._out_of_step = 0 < count.item() < dist.get_world_size()
        if self._out_of_step:
            self.failed.append(f"{name}: failed on some ranks only; the remaining checks were skipped")

    def _run(self, name: str, check: Callable[[], Any]) -> None:
        try:
            check()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            self.failed.append(f"{name}: {type(error).__name__}: {str(error)[:600]} ({last.name}:{last.lineno})")


def start_on_device() -> tuple[Any, Any, Any, int, int]:
    """Joins the job with the library, makes PyTorch's NCCL process group of the same ranks, and selects this rank's
    device.

    Returns:
        ``torch``, ``torch.distributed``, the library's ``distributed`` module, the rank and the world size.
    """
    import torch

    import smdistributed.dataparallel.torch.distributed as dist

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(devices.own())
    torch.distributed.init_process_group("nccl", rank=rank, world_size=size)
    return torch, torch.distributed, dist, rank, size
