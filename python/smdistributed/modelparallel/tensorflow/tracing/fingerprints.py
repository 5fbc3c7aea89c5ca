"""What an operation computes besides what it takes: its attributes, as a text that is the same wherever the same is traced.

Names are left out, which scripts do not choose, as are seeds, which ranks may choose differently, and what is of one process or device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

_LEFT_OUT = {"config_proto", "container", "executor_type", "seed", "seed2", "shared_name", "token"}
#: Of a constant, more numbers than these are not told one by one.
_TOLD = 4


class Contents:
    """Of the operations of a graph."""

    def __init__(self, graph: tf.Graph) -> None:
        self._graph = graph
        self._functions: dict[str, str] = {}

    def of(self, op: tf.Operation) -> str:
        """The text: the values of a small constant, else a digest, or nothing if there are no attributes but types."""
        node = op.node_def
        if op.type == "Const" and op.outputs[0].shape.num_elements() <= _TOLD:
            return f"[{' '.join(map(str, tf.make_ndarray(node.attr['value'].tensor).ravel()))}]"
        digest = self._attributes(node.attr)
        return f"#{digest}" if digest else ""

    def _attributes(self, attributes: Mapping[str, Any]) -> str:
        told = hashlib.blake2b(digest_size=4)
        found = False
        for name in sorted(attributes):
            value = attributes[name]
            kind = value.WhichOneof("value")
            if name.startswith("_") or name in _LEFT_OUT or kind == "type":
                continue
            found = True
            functions = [value.func] if kind == "func" else value.list.func if kind == "list" else ()
            content = b"".join(self._function(each.name).encode() for each in functions)
            told.update(
                name.encode() + b"=" + (content if functions else value.SerializeToString(deterministic=True)) + b";"
            )
        return told.hexdigest() if found else ""

    def _function(self, name: str) -> str:
        """Of a branch, a loop or another function: its operations, in an order that no names decide."""
        if name not in self._functions:
            # Functions do not call themselves, but gradients of calls name what they come from.
            self._functions[name] = ""
            function = self._graph._get_function(name)
            nodes = [] if function is None else function.cached_definition.node_def
            lines = sorted(f"{node.op}{self._attributes(node.attr)}" for node in nodes)
            self._functions[name] = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
        return self._functions[name]
