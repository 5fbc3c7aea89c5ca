"""What callbacks do with Keras' variables on PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import torch

from horovod.torch import mpi_ops
from horovod.torch.functions import allgather_object
from smdistributed._common import replicas


class Engine:
    """Variables of Keras on PyTorch."""

    VARIABLE = "keras.Variable"
    rank, size = staticmethod(mpi_ops.rank), staticmethod(mpi_ops.size)

    @staticmethod
    def variables_of(owner: Any) -> list[keras.Variable]:
        """Of a model or an optimizer, those that exist."""
        return list(getattr(owner, "variables", []))

    @staticmethod
    def is_variable(one: Any) -> bool:
        """Whether it is one."""
        return isinstance(one, keras.Variable)

    @staticmethod
    def key(variable: keras.Variable) -> int:
        """What stands for it in sets."""
        return id(variable)

    @staticmethod
    def describe(variable: keras.Variable) -> Any:
        """What ranks compare."""
        return tuple(variable.shape), str(variable.dtype)

    @staticmethod
    def number(value: Any) -> float:
        """Of a variable, or a number."""
        return float(value)

    @staticmethod
    def gather(one: Any, name: str) -> list[Any]:
        """The objects of all ranks."""
        return allgather_object(one, name=name)

    @staticmethod
    @torch.no_grad()
    def broadcast(variables: Sequence[keras.Variable], root_rank: int, device: str = "") -> None:
        """Gives all ranks the root's values, in place."""
        replicas.note_broadcast()
        sent = [variable.value.data for variable in variables]
        # What is not dense in memory is sent as a copy.
        dense = [tensor.contiguous() for tensor in sent]
        handles = [mpi_ops.broadcast_async_(tensor, root_rank, f"variable.{at}") for at, tensor in enumerate(dense)]
        for handle in handles:
            mpi_ops.synchronize(handle)
        for tensor, copy in zip(sent, dense, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)

    @staticmethod
    def average(values: Sequence[float], name: str, device: str = "") -> list[float]:
        """Over the ranks."""
        return mpi_ops.allreduce(torch.tensor(values, dtype=torch.float64), name=name).tolist()

    @staticmethod
    def scale_velocities(optimizer: Any, ratio: float) -> None:
        """Multiplies what momentum has summed."""
        if not getattr(optimizer, "momentum", None):
            return
        for velocity in getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or []:
            velocity.assign(velocity * ratio)
