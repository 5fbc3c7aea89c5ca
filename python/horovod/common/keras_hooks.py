"""Methods that one Keras package expects of a callback and the other does not: callbacks serve models of both.

``horovod.keras`` has the callbacks of the package ``keras``. A script under ``TF_USE_LEGACY_KERAS=1`` gives them to a
model of tf_keras.
"""

from __future__ import annotations

from typing import Any


def _implements(callback: Any, *events: str) -> bool:
    # Both packages mark the methods of their base class.
    return any(not getattr(getattr(callback, event), "_is_default", False) for event in events)


class BatchHooks:
    """tf_keras asks a callback for whole kinds of batch events, and calls it for none of a kind that it lacks."""

    def _implements_train_batch_hooks(self) -> bool:
        return _implements(self, "on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")

    def _implements_test_batch_hooks(self) -> bool:
        return _implements(self, "on_test_batch_begin", "on_test_batch_end")

    def _implements_predict_batch_hooks(self) -> bool:
        return _implements(self, "on_predict_batch_begin", "on_predict_batch_end")


def complete(callback: type) -> None:
    """Add to a class of callbacks the methods that its base class lacks.

    Args:
        callback: A subclass of one Keras package's base class.
    """
    for name, method in vars(BatchHooks).items():
        if name.startswith("_implements_") and not hasattr(callback, name):
            setattr(callback, name, method)
