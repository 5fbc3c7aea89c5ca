"""Objects as text."""

from __future__ import annotations

import base64
from typing import Any

try:
    import cloudpickle as pickle
except ImportError:
    import pickle


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:
    """An object, pickled, as text or as bytes of it."""
    encoded = base64.b64encode(pickle.dumps(obj))
    return encoded.decode("ascii") if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    """The inverse of :func:`dumps_base64`. Only for what comes from whom one trusts."""
    return pickle.loads(base64.b64decode(encoded))
