"""Calls of modules on their way to the recording.

``nn.Module.__call__``, and that of every class in the model that has one of its own, is replaced while a step is recorded,
and only then. ``super().forward()`` and everything else that Python does inside of a forward stays as it is. So are
``nn.Module.__setattr__`` and ``__delattr__``, since tasks run with the attributes that their modules had at the call, and
``torch.autograd.Function.apply``, which PyTorch does not offer to function modes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch.pipeline import Pipeline
from smdistributed.modelparallel.torch.recording import active


def _recorded(original: Callable[..., Any], pipeline: Pipeline) -> Callable[..., Any]:
    whole, paths = pipeline.placement.whole, pipeline.paths

    @functools.wraps(original)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recording = active.recording
        rank = whole.get(id(self)) if recording is not None else None
        if rank is None:
            if recording is not None and (self._backward_hooks or self._backward_pre_hooks) and id(self) in paths:
                raise SMPUsageError(
                    f"`{paths[id(self)]}` has backward hooks and is spread over partitions, so no partition has its inputs and "
                    "outputs: register the hooks on modules that are on one partition"
                )
            return original(self, *args, **kwargs)
        assert recording is not None
        return recording.call_module(self, paths[id(self)], rank, args, kwargs)

    return call


def _noted(original: Callable[..., Any], pipeline: Pipeline) -> Callable[..., Any]:
    state = pipeline.module_state

    @functools.wraps(original)
    def change(self: nn.Module, name: str, *value: Any) -> None:
        if active.recording is None or not state.follows(self):
            original(self, name, *value)
            return
        before = self.__dict__.get(name)
        if value and before is value[0] and name in self.__dict__:
            return
        tables = (self._parameters, self._buffers, self._modules)
        if any(name in table for table in tables) or (value and isinstance(value[0], nn.Module | nn.Parameter)):
            raise SMPUsageError(
                f"`{pipeline.paths.get(id(self), type(self).__name__)}.{name}` is a parameter, a buffer or a module: set it before "
                "the `smp.step` function is called"
            )
        with state.changing(self, name):
            original(self, name, *value)

    return change


class _Apply:
    """``torch.autograd.Function.apply`` of one class, as one operation of the recording."""

    def __init__(self, function: type[torch.autograd.Function], original: Callable[..., Any]) -> None:
        self._function, self._original = function, original
        self.__name__ = f"{function.__qualname__}.apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._original(self._function, *args, **kwargs)


def _applied(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        recording = active.recording
        if recording is None or not recording.has_located((args, kwargs)):
            return original(cls, *args, **kwargs)
        call = vars(cls).get("_smp_apply")
        if call is None:
            call = _Apply(cls, original)
            cls._smp_apply = call
        return recording.operation(call, args, kwargs)

    return apply


@contextmanager
def intercepted(pipeline: Pipeline) -> Iterator[None]:
    """Modules that are wholly on one partition are recorded inside."""
    replaced: list[tuple[Any, str, Any, Any]] = []
    for owner in pipeline.callers:
        original = vars(owner)["__call__"]
        replaced.append((owner, "__call__", original, _recorded(original, pipeline)))
    for name in ("__setattr__", "__delattr__"):
        original = vars(nn.Module)[name]
        replaced.append((nn.Module, name, original, _noted(original, pipeline)))
    function = torch.autograd.Function
    original = vars(function)["apply"]
    replaced.append((function, "apply", original, classmethod(_applied(original.__func__))))
    try:
        for owner, name, _, replacement in replaced:
            setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, original, _ in replaced:
            setattr(owner, name, original)
