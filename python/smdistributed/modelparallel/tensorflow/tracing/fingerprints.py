"""Fingerprints of operations: their attributes as a text that is equal on all ranks that trace the same step.

Ignored are names, which scripts do not choose, seeds, which may differ between ranks, and attributes of one process or
device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

_IGNORED_ATTRIBUTES = {"config_proto", "container", "executor_type", "seed", "seed2", "shared_name", "token"}
#: Constants with more elements are hashed instead of written out.
_MAX_INLINE_ELEMENTS = 4


class OpFingerprints:
    """The fingerprints of the operations of a graph."""

    def __init__(self, graph: tf.Graph) -> None:
        self._graph = graph
        self._functions: dict[str, str] = {}

    def of(self, op: tf.Operation) -> str:
        """Return the text: values of a small constant, or a digest; empty if all attributes are types."""
        node = op.node_def
        if op.type == "Const" and op.outputs[0].shape.num_elements() <= _MAX_INLINE_ELEMENTS:
            return f"[{' '.join(map(str, tf.make_ndarray(node.attr['value'].tensor).ravel()))}]"
        digest = self._attributes(node.attr)
        return f"#{digest}" if digest else ""

    def _attributes(self, attributes: Mapping[str, Any]) -> str:
        digest = hashlib.blake2b(digest_size=4)
        found = False
        for name in sorted(attributes):
            value = attributes[name]
            kind = value.WhichOneof("value")
            if name.startswith("_") or name in _IGNORED_ATTRIBUTES or kind == "type":
                continue
            found = True
            functions = [value.func] if kind == "func" else value.list.func if kind == "list" else ()
            content = b"".join(self._function(each.name).encode() for each in functions)
            digest.update(
                name.encode() + b"=" + (content if functions else value.SerializeToString(deterministic=True)) + b";"
            )
        return digest.hexdigest() if found else ""

    def _function(self, name: str) -> str:
        """Return the fingerprint of a branch, a loop or another function.

        It covers the operations in an order that does not depend on names.
        """
        if name not in self._functions:
            # Functions do not call themselves, but the gradient of a call refers to the call, which would recurse.
            self._functions[name] = ""
            function = self._graph._get_function(name)
            nodes = [] if function is None else function.cached_definition.node_def
            lines = sorted(f"{node.op}{self._attributes(node.attr)}" for node in nodes)
            self._functions[name] = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
        return self._functions[name]
