"""Wraps calls of Keras layers, so that a trace knows to which layer an operation belongs."""

from __future__ import annotations

import functools
import sys
from typing import Any

from smdistributed.modelparallel.tensorflow import losses
from smdistributed.modelparallel.tensorflow.state import state


def install() -> None:
    """Wrap the layers of the Keras packages that this process has imported; do nothing on a second call."""
    for package in ("keras", "tf_keras"):
        module = sys.modules.get(package)
        if module is not None and hasattr(module, "layers"):
            _adapt(package)


@functools.cache
def _adapt(package: str) -> None:
    module = sys.modules[package]
    base, model = module.layers.Layer, module.Model
    plain = base.__call__

    @functools.wraps(plain)
    def noticed(self: Any, *args: Any, **kwargs: Any) -> Any:
        trace = state.trace
        if trace is None or not trace.is_current():
            return plain(self, *args, **kwargs)
        with trace.in_layer(self, isinstance(self, model)), losses.of_activities(self):
            return plain(self, *args, **kwargs)

    base.__call__ = noticed
