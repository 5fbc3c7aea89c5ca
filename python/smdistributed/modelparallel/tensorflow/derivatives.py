"""Which tensors of a body are gradients of variables: those that TensorFlow's calls have returned, and what follows from them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gradients_util

from smdistributed.dataparallel.tensorflow.keras_variable import underlying


class Derivatives:
    """Of a trace."""

    def __init__(self) -> None:
        # By the name of a tensor, handles of the variables whose gradient it is, by identity.
        self._known: dict[str, set[int]] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, gradients are known that ``tf.gradients``, whatever calls it, and tapes return."""
        plain_helper, plain_tape = gradients_util._GradientsHelper, tf.GradientTape.gradient

        @functools.wraps(plain_helper)
        def helper(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
            return self._note(xs, plain_helper(ys, xs, *args, **kwargs))

        @functools.wraps(plain_tape)
        def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            return self._note(sources, plain_tape(tape, target, sources, *args, **kwargs))

        _put(helper, gradient)
        try:
            yield
        finally:
            _put(plain_helper, plain_tape)

    def _note(self, sources: Any, found: Any) -> Any:
        for source, value in zip(tf.nest.flatten(sources), tf.nest.flatten(found), strict=True):
            handle = getattr(underlying(source), "handle", None)
            if handle is not None and isinstance(value, tf.Tensor | tf.IndexedSlices):
                self._known.setdefault(_tensor(value).name, set()).add(id(handle))
        return found

    def variables_of(self, value: Any) -> set[int]:
        """Handles, by identity, of the variables whose gradients ``value`` comes from."""
        found: set[int] = set()
        pending, seen = [_tensor(value)], set()
        while pending:
            tensor = pending.pop()
            if tensor.name in self._known:
                found |= self._known[tensor.name]
            elif tensor.op.name not in seen:
                seen.add(tensor.op.name)
                pending += tensor.op.inputs
        return found

    def variable_of(self, value: Any, variables: Sequence[Any]) -> Any:
        """The one of ``variables`` whose gradient ``value`` is, in its shape and type; ``None`` if it is no gradient."""
        if not isinstance(value, tf.Tensor | tf.IndexedSlices):
            return None
        fitting = [each for each in variables if fits(value, each)]
        of = self.variables_of(value) if fitting else set()
        return next((each for each in fitting if of == {id(underlying(each).handle)}), None)


def fits(value: Any, variable: Any) -> bool:
    """Whether a tensor or slices could be a variable's gradient."""
    inner = underlying(variable)
    if not isinstance(value, tf.Tensor | tf.IndexedSlices) or value.dtype != inner.dtype:
        return False
    return isinstance(value, tf.IndexedSlices) or value.shape.is_compatible_with(inner.shape)


def _tensor(value: Any) -> tf.Tensor:
    return value.values if isinstance(value, tf.IndexedSlices) else value


def _put(helper: Callable[..., Any], gradient: Callable[..., Any]) -> None:
    gradients_util._GradientsHelper, tf.GradientTape.gradient = helper, gradient
