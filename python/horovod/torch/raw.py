"""Collectives with an output that the caller gives. The original's own modules use them, and few scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod.torch.handles import _kept, _Pending

# isort: split
import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.session import Average
from horovod.torch.exchanges import _broadcast, _exchange, _gather
from horovod.torch.reductions import _grouped, _reduce
from horovod.torch.scatters import _scatter


def _into(pending: _Pending, outputs: Sequence[torch.Tensor]) -> int:
    """A handle whose result is written to these tensors, which are resized to it."""
    finish = pending.finish

    @torch.no_grad()
    def write(results: list[torch.Tensor]) -> Any:
        results = finish(results)
        for output, result in zip(outputs, results, strict=True):
            output.resize_(result.shape).copy_(result)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    pending.finish = write
    return _kept(pending)


def _allreduce_async(
    tensor: torch.Tensor,
    output: torch.Tensor,
    name: str | None,
    op: int,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    factors = prescale_factor, postscale_factor
    return _into(_reduce("allreduce", [tensor], False, name, op, *factors, process_set, False, list), [output])


def _grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    factors = prescale_factor, postscale_factor
    return _into(_grouped(list(tensors), False, name, op, *factors, process_set, False, list), outputs)


def _allgather_async(
    tensor: torch.Tensor, output: torch.Tensor, name: str | None, process_set: ProcessSet = global_process_set
) -> int:
    return _into(_gather("allgather", [tensor], name, process_set, False, list), [output])


def _grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet = global_process_set,
) -> int:
    return _into(_gather("grouped_allgather", list(tensors), name, process_set, False, list), outputs)


def _broadcast_async(
    tensor: torch.Tensor,
    output: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet = global_process_set,
) -> int:
    pending = _broadcast(tensor, False, root_rank, name, process_set, False)
    pending.finish = list
    return _into(pending, [output])


def _alltoall_async(
    tensor: torch.Tensor,
    splits: Any,
    output: torch.Tensor,
    output_received_splits: torch.Tensor,
    name: str | None,
    process_set: ProcessSet = global_process_set,
) -> int:
    return _into(_exchange(tensor, splits, name, process_set, False), [output, output_received_splits])


def _reducescatter_async(
    tensor: torch.Tensor,
    output: torch.Tensor,
    name: str | None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    factors = prescale_factor, postscale_factor
    return _into(_scatter("reducescatter", [tensor], name, op, process_set, factors, False, list), [output])


def _grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    name: str | None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    factors = prescale_factor, postscale_factor
    return _into(_scatter("grouped_reducescatter", list(tensors), name, op, process_set, factors, False, list), outputs)
