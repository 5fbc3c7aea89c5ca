"""A backward in two parts: the gradients of inputs, for which other ranks wait, and those of parameters.

The first part runs the graph for the inputs only, so that operations leave out what belongs to parameters, and notes the
gradients that arrive at each *border*: a node that has an input before it and a parameter beside it. The second part runs
every border again, for its parameters only. No product is computed twice.

- SPL-1: a parameter that several borders lead to would be counted several times; such a graph is not split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from smdistributed.modelparallel.torch.offloading import Entrance


class WeightPart:
    """What is left of a backward: the gradients of parameters."""

    def __init__(self, borders: Sequence[_Border]) -> None:
        self._borders = list(borders)

    def run(self) -> None:
        """Adds them up."""
        for border in self._borders:
            arrived = [(place, gradient) for place, gradient in enumerate(border.gradients) if gradient is not None]
            if arrived:
                edges = [GradientEdge(border.node, place) for place, _ in arrived]
                gradients = [gradient for _, gradient in arrived]
                # The graph goes with the stage; borders may share what computes their parameters.
                torch.autograd.backward(edges, gradients, retain_graph=True, inputs=border.parameters)
        self._borders = []


class _Border:
    __slots__ = ("gradients", "node", "parameters")

    def __init__(self, node: Node, parameters: list[torch.Tensor]) -> None:
        self.node, self.parameters = node, parameters
        self.gradients: tuple[torch.Tensor | None, ...] = ()

    def note(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        self.gradients = gradients


def run_input_part(
    roots: Sequence[torch.Tensor | GradientEdge],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor | Entrance],
) -> WeightPart | None:
    """Runs the first part: afterwards the ``inputs`` have their gradients. Returns the second one, or ``None`` if the whole
    backward has run because it cannot be split."""
    leaves = [each.leaf if isinstance(each, Entrance) else each for each in inputs]
    borders = _borders(roots, leaves) if leaves else None
    if not borders:
        torch.autograd.backward(roots, gradients)
        return None
    hooks = [border.node.register_prehook(border.note) for border in borders]
    try:
        found = torch.autograd.grad(roots, leaves, gradients, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    for each, gradient in zip(inputs, found, strict=True):
        # An entrance has its own by now.
        if not isinstance(each, Entrance):
            each.grad = gradient
    return WeightPart(borders)


def _borders(roots: Sequence[torch.Tensor | GradientEdge], leaves: Sequence[torch.Tensor]) -> list[_Border] | None:
    """The borders of a graph, or ``None`` if it has none, or cannot be split (SPL-1)."""
    inputs = {id(leaf) for leaf in leaves}
    starts = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    # A root may be a leaf itself.
    if any(start is None or getattr(start, "variable", None) is not None for start in starts):
        return None
    # Of each node: whether an input lies before it, and the parameters before it.
    reaches: dict[Node, bool] = {}
    parameters: dict[Node, dict[int, torch.Tensor]] = {}
    order = _ordered(starts)
    for node in order:
        variable = getattr(node, "variable", None)
        if variable is not None and not node.next_functions:
            reaches[node] = id(variable) in inputs
            parameters[node] = {} if reaches[node] else {id(variable): variable}
            continue
        before = [child for child, _ in node.next_functions if child is not None]
        reaches[node] = any(reaches[child] for child in before)
        parameters[node] = {}
        if not reaches[node]:
            for child in before:
                parameters[node].update(parameters[child])
    if not all(reaches[start] for start in starts):
        return None
    found: list[_Border] = []
    seen: set[int] = set()
    for node in order:
        if not reaches[node]:
            continue
        beside: dict[int, torch.Tensor] = {}
        for child, _ in node.next_functions:
            if child is not None and not reaches[child]:
                beside.update(parameters[child])
        if beside:
            if seen & beside.keys():
                return None
            seen.update(beside)
            found.append(_Border(node, list(beside.values())))
    return found


def _ordered(starts: Sequence[Any]) -> list[Node]:
    """All nodes, each after those before it."""
    order: list[Node] = []
    known: set[Node] = set()
    stack = [(start, False) for start in starts]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
            continue
        if node in known:
            continue
        known.add(node)
        stack.append((node, True))
        stack.extend((child, False) for child, _ in node.next_functions if child is not None and child not in known)
    return order
