"""What Keras 3 runs on."""

from __future__ import annotations

import keras

#: ``tensorflow`` or ``torch``.
BACKEND: str = keras.backend.backend()

if BACKEND not in ("tensorflow", "torch"):
    raise ImportError(f"Keras runs on {BACKEND}: `horovod.keras` needs KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch")
