"""Uneven inputs: ranks without further inputs take part in the other ranks' steps until all have finished.

The protocol is that of ``torch.distributed.algorithms.join``, so a DistributedDataParallel can be combined with
torch's other joinable classes. In a script without ``torch.distributed``, it runs over this library's groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.dataparallel.torch.parallel import groups


class OwnJoin(Join):
    """torch's context manager, over a group of this library."""

    def _extract_dist_info(self) -> None:
        first = self._joinables[0]
        if any(joinable.join_process_group is not first.join_process_group for joinable in self._joinables):
            raise ValueError("all joinables must have the same process group")
        self._process_group = first.join_process_group
        self._device = first.join_device
        self._rank = dist.get_rank()

    def _get_num_nonjoined_procs(self) -> int:
        return int(_sum(self._process_group, 0))

    def _notify_procs_to_terminate(self) -> None:
        _sum(self._process_group, 1)
        raise RuntimeError(f"rank {self._rank} has no more inputs")


class DDPJoinHook(JoinHook):
    """The part of a rank without inputs, for one model.

    Args:
        model: The ``DistributedDataParallel``.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def main_hook(self) -> None:
        """Take part in one step of the others."""
        self._model._shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Receive the model of a rank that had inputs to the end.

        Args:
            is_last_joiner: Whether this rank had.
        """
        self._model._take_final_model(is_last_joiner)


def join(joinable: Joinable, enable: bool, throw_on_early_termination: bool, **options: Any) -> Join:
    """Return the context manager for one joinable.

    Args:
        joinable: The model.
        enable: As in :meth:`DistributedDataParallel.join`.
        throw_on_early_termination: As in :meth:`DistributedDataParallel.join`.
        **options: Passed to the hook.

    Returns:
        The context manager.
    """
    kind = Join if groups.is_torch_group(joinable.join_process_group) else OwnJoin
    return kind([joinable], enable, throw_on_early_termination, **options)


def notify(joinable: Joinable) -> None:
    """Notify ranks without inputs that this one has some.

    Args:
        joinable: The model.

    Raises:
        RuntimeError: A rank has no more inputs, and ``throw_on_early_termination`` is on.
    """
    if groups.is_torch_group(joinable.join_process_group):
        work = Join.notify_join_context(joinable)
        if work is not None:
            work.wait()
        return
    config = joinable._join_config
    if not (config.enable and config.is_first_joinable):
        return
    _sum(joinable.join_process_group, 1)
    if config.throw_on_early_termination and _sum(joinable.join_process_group, 0):
        raise RuntimeError(
            "a rank has no more inputs, and `throw_on_early_termination` is set: every rank raises this error"
        )


def _sum(group: Any, value: int) -> float:
    total = torch.tensor([float(value)], device="cpu")
    dist.all_reduce(total, op=ReduceOp.SUM, group=group)
    return total.item()
