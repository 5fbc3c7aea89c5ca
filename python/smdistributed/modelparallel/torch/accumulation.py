"""Gradients of parameters that autocast has cast, added up in one pass.

The gradient of a cast parameter comes in the narrow type, once for each microbatch. PyTorch widens it in memory of its own
and adds that to ``.grad``; here it is added as it is. Widening is exact, so the sum has the same bits, for about half of the
memory traffic, and on devices by a kernel of ours that takes whole vectors of both types.

- ACC-1: casts are found in the first microbatch's graph of a stage. The other microbatches have the same ones (EXE-4);
  what is cast anew for each of them, outside of autocast or in a recomputed forward, is added up as PyTorch does.
- ACC-2: a parameter with hooks on its gradient keeps PyTorch's way, since a hook is to see each gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

#: Elements from which on it pays: a hook costs the host about as much as the kernels that it saves.
LEAST_ELEMS = 1 << 16


def add_up_at_once(roots: Sequence[torch.Tensor | GradientEdge]) -> None:
    """From the second backward through a cast of a parameter before ``roots`` on, its gradients are added up in one pass."""
    nodes = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    stack = [node for node in nodes if node is not None]
    known: set[Node] = set(stack)
    while stack:
        node = stack.pop()
        before = [child for child, _ in node.next_functions if child is not None]
        if len(before) == 1 and node.name() == "ToCopyBackward0":
            parameter = getattr(before[0], "variable", None)
            if parameter is not None and _pays(parameter):
                node.register_prehook(_Sum(parameter))
                continue
        for child in before:
            if child not in known:
                known.add(child)
                stack.append(child)


def _pays(parameter: torch.Tensor) -> bool:
    hooks: Any = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    return parameter.numel() >= LEAST_ELEMS and not hooks


class _Sum:
    """Called with the gradient of a cast; what it returns goes on to the cast's backward."""

    __slots__ = ("_parameter",)

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter

    def __call__(self, gradients: tuple[torch.Tensor | None, ...]) -> tuple[None] | None:
        (gradient,), total = gradients, self._parameter.grad
        # The first one becomes `.grad`. Graphs of gradients are PyTorch's to make.
        if total is None or gradient is None or torch.is_grad_enabled():
            return None
        if total.layout is not torch.strided or gradient.layout is not torch.strided:
            return None
        if torch.promote_types(total.dtype, gradient.dtype) is not total.dtype:
            return None
        torch.ops.smd.add_up_(total, gradient)
        return (None,)
