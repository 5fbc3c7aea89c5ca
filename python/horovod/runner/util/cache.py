"""Results of checks, kept in a file for some time."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any


class Cache:
    """Values by key, in a file of a folder.

    If the file cannot be written, nothing is kept. If it cannot be read, it counts as empty.

    Args:
        cache_folder: The folder, which is created.
        cache_staleness_threshold_in_minutes: Age at which values expire.
        parameters_hash: Hash of the parameters; values that were stored with another hash are ignored.
    """

    def __init__(self, cache_folder: str, cache_staleness_threshold_in_minutes: float, parameters_hash: str) -> None:
        self._file = os.path.join(cache_folder, "cache.json")
        self._seconds = cache_staleness_threshold_in_minutes * 60
        self._parameters = parameters_hash
        self._lock = threading.Lock()
        with contextlib.suppress(OSError):
            os.makedirs(cache_folder, mode=0o700, exist_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            with open(self._file) as file:
                kept = json.load(file)
        except (OSError, ValueError):
            return {}
        if not isinstance(kept, dict) or kept.get("parameters") != self._parameters:
            return {}
        values = kept.get("values")
        return values if isinstance(values, dict) else {}

    def get(self, key: Any) -> Any:
        """Return a value.

        Args:
            key: The key.

        Returns:
            The value; ``None`` if there is none or it has expired.
        """
        with self._lock:
            match self._read().get(repr(key)):
                case [float() | int() as at, value] if time.time() - at < self._seconds:
                    return value
        return None

    def put(self, key: Any, val: Any) -> None:
        """Store a value.

        Args:
            key: The key.
            val: A value that JSON can hold.
        """
        with self._lock:
            values = self._read() | {repr(key): (time.time(), val)}
            # Jobs may run at the same time, so the file is replaced as a whole.
            text = json.dumps({"parameters": self._parameters, "values": values})
            with contextlib.suppress(OSError):
                with tempfile.NamedTemporaryFile("w", dir=os.path.dirname(self._file), delete=False) as file:
                    file.write(text)
                os.replace(file.name, self._file)

    def parameters_hash(self) -> str:
        """Return what values depend on.

        Returns:
            The hash.
        """
        return self._parameters


def use_cache() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function take the argument ``fn_cache``.

    ``fn_cache`` is a :class:`Cache` that keeps the function's results other than ``None``, or ``None``.

    Returns:
        The decorator.
    """

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, fn_cache: Cache | None = None, **kwargs: Any) -> Any:
            if fn_cache is None:
                return function(*args, **kwargs)
            key = (function.__name__, args, sorted(kwargs.items()))
            value = fn_cache.get(key)
            if value is None:
                value = function(*args, **kwargs)
                if value:
                    # A failed check is not cached.
                    fn_cache.put(key, value)
            return value

        return wrapper

    return decorated
