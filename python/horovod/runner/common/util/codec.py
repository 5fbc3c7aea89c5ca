"""Objects as text."""

from __future__ import annotations

import base64
from typing import Any

try:
    import cloudpickle as pickle
except ImportError:
    import pickle


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:
    """Pickle an object, and encode it as base64.

    Args:
        obj: The object.
        to_ascii: Whether to return text instead of bytes.

    Returns:
        The encoded object.
    """
    encoded = base64.b64encode(pickle.dumps(obj))
    return encoded.decode("ascii") if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    """Decode what :func:`dumps_base64` returned. Use it only for data from a trusted sender.

    Args:
        encoded: The encoded object.

    Returns:
        The object.
    """
    return pickle.loads(base64.b64decode(encoded))
