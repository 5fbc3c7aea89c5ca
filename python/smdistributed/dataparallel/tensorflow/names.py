"""Names by which ranks match their collectives, in whatever order they call them."""

from __future__ import annotations

import threading

import tensorflow as tf

from smdistributed import _core

# Graphs of branches and loops, whose names depend on the graphs that were built before them.
_BRANCHES = frozenset({"CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph"})

_lock = threading.Lock()
_session = 0
# Number of calls of each function.
_calls: dict[str, int] = {}


def of(function: str, name: str | None) -> str:
    """Return the name of a call, which is the same on all ranks.

    In a graph it follows from the names of the function that is traced and of the node, so ranks agree if they trace
    the same function. Otherwise it is the caller's, or else the number of the call since ``init()``.

    Args:
        function: Name of the called function, such as ``oob_allreduce``.
        name: The caller's name for it.

    Returns:
        The name.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    if graph is not None:
        node = graph.unique_name(name or function, mark_as_used=False)
        while type(graph).__name__ in _BRANCHES:
            graph = graph.outer_graph
        # Graphs of TF1 have no name.
        traced = getattr(graph, "name", None)
        return f"{traced}/{node}" if traced else node
    return name or _numbered(function)


def take_back(function: str, name: str) -> None:
    """Take back the count of a call that this rank could not make: the others do not count it either.

    Args:
        function: As for :func:`of`.
        name: The name that :func:`of` returned.
    """
    with _lock:
        count = _calls.get(function, 0)
        if name == f"{function}.{count - 1}":
            _calls[function] = count - 1


def _numbered(function: str) -> str:
    global _session
    with _lock:
        session = _core.session_id()
        if session != _session:
            # Ranks that joined a new job start counting from 0.
            _calls.clear()
            _session = session
        count = _calls.get(function, 0)
        _calls[function] = count + 1
        return f"{function}.{count}"
