"""Placeholders for tensors that a task does not need: they have a shape, but no values."""

from __future__ import annotations

from typing import Any

import torch

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch.tracing.remote_tensor import METADATA, TensorMeta


class UnreadTensor(torch.Tensor):
    """A tensor in a container that a module did not read when its output spec was found (OBJ-3)."""

    _smp_leaf = True
    task: str

    @staticmethod
    def __new__(cls, meta: TensorMeta, task: str) -> UnreadTensor:
        """Create a tensor without memory."""
        self = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride, dtype=meta.dtype, device=meta.device, requires_grad=False
        )
        self.task = task
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"UnreadTensor({TensorMeta.of(self)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        task = next((arg.task for arg in args if isinstance(arg, UnreadTensor)), "a module")
        raise SMPUsageError(
            f"`{task}` reads a tensor in a list or an object that an earlier call with equal arguments did not read: "
            "the tensors that a module reads may depend only on the shapes and the types of its arguments"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise SMPUsageError(
            f"`{func}` reads a tensor that no earlier call with equal arguments has read, so this rank does not have it"
        )
