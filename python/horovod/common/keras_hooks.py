"""Methods that only tf_keras expects of a callback, so that callbacks work with models of both Keras packages.

The callbacks of ``horovod.keras`` have the base class of the package ``keras``. Under ``TF_USE_LEGACY_KERAS=1``, a
script uses them with models of tf_keras.
"""

from __future__ import annotations

from typing import Any


def _implements(callback: Any, *events: str) -> bool:
    # Both packages mark the methods of their base class with this attribute.
    return any(not getattr(getattr(callback, event), "_is_default", False) for event in events)


class BatchHooks:
    """The methods by which tf_keras asks whether a callback has hooks of a kind. If not, it skips all of this kind."""

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
