"""Distributed optimizers of Keras 3, on any of its backends.

`install` also wraps two methods of Keras that need another result for distributed optimizers and offer no hook. Both
wrappers call Keras first and change the result for distributed optimizers only.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from smdistributed import _core


@functools.cache
def install(is_distributed: Callable[[Any], bool]) -> None:
    """Wrap both methods of Keras, once.

    Args:
        is_distributed: Returns whether an optimizer reduces gradients.
    """
    keras = sys.modules["keras"]
    scaler = keras.optimizers.LossScaleOptimizer
    trainer = next(cls for cls in keras.Model.__mro__ if "_resolve_auto_jit_compile" in vars(cls))
    is_finite = scaler.check_finite
    resolve = trainer._resolve_auto_jit_compile
    noted: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(is_finite)
    def check_finite(self: Any, grads: Any) -> Any:
        """Check on all ranks whether gradients are finite.

        A LossScaleOptimizer around a distributed optimizer sees gradients that are not reduced yet. All ranks skip the
        step or none does; otherwise some ranks would wait for others that never arrive.
        """
        finite = is_finite(self, grads)
        if is_distributed(self.inner_optimizer):
            finite = self.inner_optimizer._smd_all(finite)
        return finite

    @functools.wraps(resolve)
    def resolve_auto_jit_compile(self: Any) -> bool:
        """Return ``False`` for distributed optimizers: ``"auto"`` selects XLA on GPUs, which lacks our operations."""
        compiles = resolve(self)
        if compiles and is_distributed(self.optimizer):
            # Keras resolves it twice in a `compile`.
            if self.optimizer not in noted:
                noted.add(self.optimizer)
                note_without_xla("XLA cannot compile the operations that reduce gradients")
            return False
        return compiles

    scaler.check_finite = check_finite
    trainer._resolve_auto_jit_compile = resolve_auto_jit_compile


def note_without_xla(reason: str) -> None:
    """Count a model that Keras would compile with XLA; the first time, warn.

    Args:
        reason: Why it is compiled without XLA.
    """
    _core.note_fallback("without_xla")
    if reason in _reasons:
        return
    _reasons.add(reason)
    warnings.warn(
        f"Keras would compile the step with XLA (`jit_compile='auto'`), but does not, because {reason}. Parts of the "
        "model can be compiled by `tf.function(.., jit_compile=True)` in a layer; pass `jit_compile=False` to "
        "`compile` to silence this warning",
        stacklevel=3,
    )


_reasons: set[str] = set()


# The accumulated gradients of the variables that the optimizer is about to update.
_accumulating: contextvars.ContextVar[Sequence[Any] | None] = contextvars.ContextVar("_accumulating", default=None)


# Whether the caller has reduced the gradients that are being applied.
_is_reduced: contextvars.ContextVar[bool] = contextvars.ContextVar("_is_reduced", default=False)


@contextlib.contextmanager
def reduced_by_caller() -> Iterator[None]:
    """Return a context in which distributed optimizers apply gradients as they are."""
    token = _is_reduced.set(True)
    try:
        yield
    finally:
        _is_reduced.reset(token)


# The other base class provides the attributes; `Any` tells the type checker so.
_Base: Any = object


class Reducing(_Base):
    """Reduces gradients before an optimizer applies them.

    A mixin that precedes an optimizer's class. Keras calls ``apply`` in every kind of training, and ``apply`` calls the
    subclass's ``_smd_reduce(gradients, variables)``.
    """

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce gradients and apply them.

        Args:
            grads: One gradient for each variable.
            trainable_variables: The variables; by default all that the optimizer knows.
        """
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        # If the lengths differ, Keras raises the error.
        if len(grads) == len(variables) and not self.gradient_accumulation_steps and not _is_reduced.get():
            grads = self._smd_reduce(grads, variables)
        super().apply(grads, trainable_variables)

    # With gradient accumulation, the accumulated gradients are reduced once per update, before they are clipped.

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        token = _accumulating.set(trainable_variables if self.gradient_accumulation_steps else None)
        try:
            super()._backend_apply_gradients(grads, trainable_variables)
        finally:
            _accumulating.reset(token)

    def _clip_gradients(self, grads: Sequence[Any]) -> Sequence[Any]:
        variables = _accumulating.get()
        if variables is not None and not _is_reduced.get():
            grads = self._smd_reduce(grads, variables)
        return super()._clip_gradients(grads)
