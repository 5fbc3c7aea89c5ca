"""The backend of Keras 3."""

from __future__ import annotations

try:
    import keras as keras
except ModuleNotFoundError as error:
    if error.name not in ("keras", "tensorflow", "torch"):
        raise
    if error.name == "keras":
        missing = "Keras, which is not installed: `pip install keras`"
    else:
        missing = f"the backend of Keras: `pip install {error.name}`, or set KERAS_BACKEND to an installed one"
    raise ImportError(f"`horovod.keras` needs {missing}", name=error.name) from error

#: ``tensorflow`` or ``torch``.
BACKEND: str = keras.backend.backend()

if BACKEND not in ("tensorflow", "torch"):
    raise ImportError(f"Keras runs on {BACKEND}: `horovod.keras` needs KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch")
