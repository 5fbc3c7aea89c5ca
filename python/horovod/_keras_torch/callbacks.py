"""The engine of the callbacks for Keras on PyTorch: functions for variables, and collectives."""

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
    HAS_DEVICES = False
    rank, size = staticmethod(mpi_ops.rank), staticmethod(mpi_ops.size)

    @staticmethod
    def variables_of(owner: Any) -> list[keras.Variable]:
        """Return the variables of a model or an optimizer that exist.

        Args:
            owner: The model, the optimizer or ``None``.

        Returns:
            The variables.
        """
        return list(getattr(owner, "variables", []))

    @staticmethod
    def is_variable(one: Any) -> bool:
        """Return whether an object is a variable.

        Args:
            one: The object.

        Returns:
            ``True`` if an object is a variable.
        """
        return isinstance(one, keras.Variable)

    @staticmethod
    def key(variable: keras.Variable) -> int:
        """Return a key of a variable, for sets.

        Args:
            variable: The variable.

        Returns:
            The key.
        """
        return id(variable)

    @staticmethod
    def describe(variable: keras.Variable) -> Any:
        """Return the description of a variable that ranks compare.

        Args:
            variable: The variable.

        Returns:
            Shape and type.
        """
        return tuple(variable.shape), str(variable.dtype)

    @staticmethod
    def number(value: Any) -> float:
        """Return the value of a variable or a number.

        Args:
            value: A variable or a number.

        Returns:
            The value.
        """
        return float(value)

    @staticmethod
    def gather(one: Any, name: str) -> list[Any]:
        """Return the objects of all ranks.

        Args:
            one: This rank's object.
            name: Matches the ranks' calls: the same on all ranks.

        Returns:
            The objects in the order of ranks.
        """
        return allgather_object(one, name=name)

    @staticmethod
    @torch.no_grad()
    def broadcast(variables: Sequence[keras.Variable], root_rank: int, device: str = "") -> None:
        """Broadcast the root's values to all ranks, in place.

        Args:
            variables: The variables.
            root_rank: Rank in the world whose values are sent.
            device: Ignored; the callback has warned.
        """
        replicas.note_broadcast()
        sent = [variable.value.data for variable in variables]
        # Tensors that are not dense in memory are sent as copies.
        dense = [tensor.contiguous() for tensor in sent]
        handles = [mpi_ops.broadcast_async_(tensor, root_rank, f"variable.{at}") for at, tensor in enumerate(dense)]
        for handle in handles:
            mpi_ops.synchronize(handle)
        for tensor, copy in zip(sent, dense, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)

    @staticmethod
    def average(values: Sequence[float], name: str, device: str = "") -> list[float]:
        """Return averages over the ranks.

        Args:
            values: This rank's numbers.
            name: Matches the ranks' calls: the same on all ranks.
            device: Ignored; the callback has warned.

        Returns:
            The averages.
        """
        return mpi_ops.allreduce(torch.tensor(values, dtype=torch.float64, device="cpu"), name=name).tolist()

    @staticmethod
    def scale_velocities(optimizer: Any, ratio: float) -> None:
        """Multiply the sums of an optimizer's momentum.

        Args:
            optimizer: The optimizer.
            ratio: The factor.
        """
        if not getattr(optimizer, "momentum", None):
            return
        for velocity in getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or []:
            velocity.assign(velocity * ratio)
