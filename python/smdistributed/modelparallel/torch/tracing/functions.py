"""PyTorch's functions that a recording handles specially, grouped by their effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch.tracing.remote_tensor import METADATA, RemoteTensor

#: Functions whose results are not tensors: all ranks get their operands and call them.
READS = frozenset(
    {
        getattr(torch.Tensor, name)
        for name in (
            "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__",
            "is_nonzero", "__contains__", "equal", "allclose", "__format__", "is_same_size", "__reduce_ex__",
            "__deepcopy__",
        )
    }
    | {torch.equal, torch.allclose, torch.is_nonzero}
)  # fmt: skip
#: PyTorch's stubs declare the types of a tensor's attributes; on the class, these are descriptors.
_TENSOR: Any = torch.Tensor
#: Functions that freeze or unfreeze a tensor.
REQUIRES_GRAD = frozenset({torch.Tensor.requires_grad_, _TENSOR.requires_grad.__set__})
GRADIENT = _TENSOR.grad.__get__
GRADIENT_FUNCTION = _TENSOR.grad_fn.__get__
IS_LEAF = _TENSOR.is_leaf.__get__
VERSION = torch.Tensor._version.__get__  # type: ignore[attr-defined]
DATA = _TENSOR.data.__get__
#: Functions that query autograd's graph, with the names of the queried attributes.
GRAPH_READS = {
    GRADIENT: "grad", GRADIENT_FUNCTION: "grad_fn", IS_LEAF: "is_leaf", torch.Tensor.retain_grad: "retain_grad",
}  # fmt: skip
#: Queries that a tensor answers without its values and without autograd's graph.
PLAIN_METADATA = METADATA - GRAPH_READS.keys() - {VERSION}
WANTS_GRADIENT = _TENSOR.requires_grad.__get__
#: Queries that a replicated tensor does not always answer itself.
CHANGED_METADATA = frozenset({torch.Tensor.storage_offset, WANTS_GRADIENT})
#: Functions that return the tensor without its graph.
DETACHES = frozenset({torch.Tensor.detach, torch.detach, DATA})
#: Functions that replace the storage of a tensor.
STORAGE_WRITES = frozenset(
    {
        torch.Tensor.set_,
        torch.Tensor.resize_,
        torch.Tensor.resize_as_,
        _TENSOR.data.__set__,
        _TENSOR.grad.__set__,
    }
)
#: Functions that return the same values in another type, or on another device.
CASTS = frozenset(
    getattr(torch.Tensor, name) for name in ("to", "type", "float", "double", "half", "bfloat16", "contiguous")
)
#: Functions that run a backward.
BACKWARDS = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})


def recorded_as(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the function that the partition calls for a method of a located tensor.

    Raises:
        SMPUsageError: Only autograd's graph, which the partition makes, tells whether the call is allowed.
    """
    if func is torch.Tensor.register_hook:
        return register_hook
    if func is torch.Tensor.requires_grad_ and type(args[0]) is RemoteTensor:
        wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        if args[0].value.meta.requires_grad and not wanted:
            raise SMPUsageError(
                f"`requires_grad_(False)` of a tensor on partition {args[0].value.rank}: use `tensor.detach()`"
            )
    return func


def register_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
    """Register a hook; for a tensor that no backward reaches, the hook is never called."""
    return tensor.register_hook(hook) if tensor.requires_grad else None


def is_integer(leaf: Any) -> bool:
    """Return whether it is a replicated tensor that Python code may use as an integer, such as a size."""
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.dim() == 0
        and leaf.dtype is not torch.bool
        and not (leaf.is_floating_point() or leaf.is_complex())
    )
