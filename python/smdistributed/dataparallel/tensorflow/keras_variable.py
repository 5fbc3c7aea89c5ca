"""Variables of Keras 3, which are not TensorFlow's."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def underlying(variable: Any) -> Any:
    """The ``tf.Variable`` that a Keras 3 variable stands for; anything else as it is."""
    if isinstance(variable, tf.Variable):
        return variable
    inner = getattr(variable, "value", None)
    return inner if isinstance(inner, tf.Variable) else variable
