"""Variables of Keras 3, which are not TensorFlow's."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def underlying(variable: Any) -> Any:
    """Return the ``tf.Variable`` that a variable of Keras 3 stands for.

    Args:
        variable: Any object.

    Returns:
        The ``tf.Variable``, or the object itself if it is not a variable of Keras 3.
    """
    if isinstance(variable, tf.Variable):
        return variable
    inner = getattr(variable, "value", None)
    return inner if isinstance(inner, tf.Variable) else variable
