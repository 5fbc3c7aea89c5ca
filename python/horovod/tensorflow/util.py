"""Helpers that scripts for the original import."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from horovod.common.process_sets import ProcessSet
from horovod.common.util import _cache as _cache


def _executing_eagerly() -> bool:
    """Return whether operations run immediately."""
    return tf.executing_eagerly()


def _make_subgraph(f: Callable[..., Any]) -> Any:
    """Return the function as a graph."""
    return tf.function(f)


def vars_to_refs(vars: Any) -> Any:
    """Return references to variables, for sets and keys of dictionaries.

    Args:
        vars: A variable, or a list or tuple of variables.

    Returns:
        A reference, or a tuple of references.
    """
    if isinstance(vars, (list, tuple)):
        return tuple(vars_to_refs(variable) for variable in vars)
    return vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """Return the variables of references.

    Args:
        refs: The result of :func:`vars_to_refs`.

    Returns:
        A variable, or a list of variables.
    """
    if isinstance(refs, (list, tuple)):
        return [refs_to_vars(ref) for ref in refs]
    return refs.deref()


def is_active(process_set: ProcessSet) -> bool:
    """Return whether gradients are reduced.

    Args:
        process_set: The process set.

    Returns:
        ``True`` if this rank is in the process set, and the set has other ranks or may get some.
    """
    if process_set.included() is False:
        return False
    size = process_set.size()
    return (size is not None and size > 1) or os.environ.get("HOROVOD_ELASTIC") == "1"
