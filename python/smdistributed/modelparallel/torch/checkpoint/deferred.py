"""Tensors that are computed from a checkpoint only when a rank needs their elements.

A translation of names also transposes, splits and joins tensors. On deferred tensors these operations are recorded
instead of executed. So a rank computes only the tensors that it holds, one at a time, and only the elements of its
slices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from smdistributed.modelparallel.exceptions import SMPUnsupportedError

#: Functions whose result has the elements of the argument; a copy would hold all of them instead of a slice.
_COPIES = (torch.Tensor.contiguous,)


class DeferredTensor(torch.Tensor):
    """A tensor without elements that records how they are computed. Create it by :func:`defer`."""

    _compute: Callable[[], torch.Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation on shapes, and record it for :func:`resolve`."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            raise SMPUnsupportedError(
                f"`{name}` changes a tensor of a checkpoint in place: apply it to a copy, as `clone()` returns one"
            )
        try:
            result = super().__torch_function__(func, types, args, kwargs)
        except (NotImplementedError, RuntimeError):
            # The function needs elements, such as `item`, or it fails for real tensors as well.
            return func(*_resolved(args), **_resolved(kwargs))
        inputs = {id(each) for each in tree_flatten((args, kwargs))[0]}
        for index, leaf in enumerate(tree_flatten(result)[0]):
            # Some functions return their argument, such as `contiguous`.
            if isinstance(leaf, DeferredTensor) and id(leaf) not in inputs:
                leaf._compute = _recorded(func, args, kwargs, index)
        return result


def _recorded(func: Any, args: Any, kwargs: Any, index: int) -> Callable[[], torch.Tensor]:
    if func in _COPIES:
        return lambda: resolve(args[0])
    return lambda: tree_flatten(func(*_resolved(args), **_resolved(kwargs)))[0][index]


def _resolved(arguments: Any) -> Any:
    return tree_map_only(DeferredTensor, resolve, arguments)


def defer(like: torch.Tensor, read: Callable[[], torch.Tensor]) -> DeferredTensor:
    """Return a deferred tensor.

    Args:
        like: A tensor of the same shape and type.
        read: Returns the tensor with its elements; called each time that they are needed.

    Returns:
        The tensor.
    """
    found = torch.empty_like(like, device="meta").as_subclass(DeferredTensor)
    found._compute = read
    return found


def defer_all(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict whose tensors are deferred; other values stay as they are."""
    return {
        name: defer(value, functools.partial(resolve, value))
        if type(value) in (torch.Tensor, torch.nn.Parameter)
        else value
        for name, value in values.items()
    }


def resolve(value: Any) -> Any:
    """Return a deferred tensor with its elements, which may be a view of others; any other value unchanged."""
    return value._compute() if isinstance(value, DeferredTensor) else value
