"""Keeps the order of collectives inside a ``tf.function``: that of its body, on every rank.

TensorFlow chains stateful operations that take no resource in the order of the body, each waiting for the one before
it; collectives are such. A call of another function, a branch or a loop is ordered after the users of the resources
that it takes, such as variables, and joins the chain only if it takes none. So a collective inside a branch that also
assigns a variable could overtake one in front of the branch, on one rank and not on the other. Here, calls, branches
and loops that contain operations of ours join the chain as well.

TensorFlow lets extensions say which resources an operation uses; to it, the chain is a resource whose identity is
``None``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tensorflow.python.framework import auto_control_deps

# Where the operations that run functions name them.
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

# What TensorFlow asks of a resource: the identity, and who made it.
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
    """Whether a function that ``graph`` knows does."""
    function = graph._get_function(name)
    if function is None:
        return False
    cached = getattr(function, "_cached_graph", None)
    return _graph_runs_ours(cached) if cached is not None else _definition_runs_ours(graph, function)


def _definition_runs_ours(graph: Any, function: Any) -> bool:
    """Of one without a graph in Python, such as a loaded one's: to make that takes its time."""
    for node in function.cached_definition.node_def:
        attributes = [node.attr[each] for each in _FUNCTIONS.get(node.op, ())]
        named = [each.name for value in attributes for each in (value.list.func or [value.func])]
        if node.op.startswith("Smd") or any(_function_runs_ours(graph, each) for each in named):
            return True
    return False


def _graph_runs_ours(graph: Any) -> bool:
    # Graphs of functions do not change any more.
    known = getattr(graph, "_smd_runs_ours", None)
    if known is None:
        known = any(_runs_ours(op) for op in graph.get_operations())
        graph._smd_runs_ours = known
    return known
