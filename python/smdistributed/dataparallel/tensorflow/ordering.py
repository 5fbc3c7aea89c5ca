"""Keeps the order of collectives inside a ``tf.function``: that of its body, on every rank.

TensorFlow orders stateful operations without resources, such as collectives, as a chain in the order of the body. A
call of another function, a branch or a loop is ordered after other users of its resources, such as variables, and
joins the chain only if it has none. So a collective inside a branch that also assigns a variable could overtake a
collective before the branch, on some ranks only. Here, calls, branches and loops that contain operations of this
library join the chain as well.

TensorFlow lets extensions say which resources an operation uses; to it, the chain is a resource whose identity is
``None``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tensorflow.python.framework import auto_control_deps

# Attributes with the functions that an operation runs.
_FUNCTIONS = {
    "StatefulPartitionedCall": ("f",),
    "PartitionedCall": ("f",),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
    "While": ("cond", "body"),
    "StatelessWhile": ("cond", "body"),
}

# The properties of a resource for TensorFlow: the identity, and its creator.
_CHAIN = SimpleNamespace(_id=None, op=SimpleNamespace(type="SmdChain"))


@auto_control_deps.register_acd_resource_resolver
def join_the_chain(op: Any, _: Any, writes: Any) -> bool:
    """Add the chain to the resources that an operation uses, if the operation runs collectives.

    Args:
        op: An operation of a graph that is being traced.
        _: Ignored.
        writes: The resources that it writes to.

    Returns:
        Whether the chain was added.
    """
    if op.type not in _FUNCTIONS or _CHAIN in writes or not _runs_ours(op):
        return False
    writes.add(_CHAIN)
    return True


def _runs_ours(op: Any) -> bool:
    if op.type.startswith("Smd"):
        return True
    for attribute in _FUNCTIONS.get(op.type, ()):
        named = op.get_attr(attribute)
        if any(_function_runs_ours(op.graph, each.name) for each in (named if isinstance(named, list) else [named])):
            return True
    return False


def _function_runs_ours(graph: Any, name: str) -> bool:
    """Return whether a function that ``graph`` knows runs operations of this library."""
    function = graph._get_function(name)
    if function is None:
        return False
    cached = getattr(function, "_cached_graph", None)
    return _graph_runs_ours(cached) if cached is not None else _definition_runs_ours(graph, function)


def _definition_runs_ours(graph: Any, function: Any) -> bool:
    """Do the same for a function without a Python graph, such as a loaded one, because creating one is slow."""
    for node in function.cached_definition.node_def:
        attributes = [node.attr[each] for each in _FUNCTIONS.get(node.op, ())]
        named = [each.name for value in attributes for each in (value.list.func or [value.func])]
        if node.op.startswith("Smd") or any(_function_runs_ours(graph, each) for each in named):
            return True
    return False


def _graph_runs_ours(graph: Any) -> bool:
    # Graphs of functions are immutable, so the result is cached.
    known = getattr(graph, "_smd_runs_ours", None)
    if known is None:
        known = any(_runs_ours(op) for op in graph.get_operations())
        graph._smd_runs_ours = known
    return known
