"""Contexts that observe the creation of modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_init = nn.Module.__init__
_open: list[Callable[[nn.Module], None]] = []


@functools.wraps(_init)
def _observed_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    for observe in _open:
        observe(self)


@contextmanager
def created_modules(observe: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call a function with every module that is created in the context, at the beginning of its constructor.

    Args:
        observe: The function; those of outer contexts run before it.

    Yields:
        Nothing.
    """
    _open.append(observe)
    nn.Module.__init__ = _observed_init  # type: ignore[method-assign]
    try:
        yield
    finally:
        _open.remove(observe)
        if not _open:
            nn.Module.__init__ = _init  # type: ignore[method-assign]
