"""Averages and accumulated gradients of Keras 3 optimizers (``use_ema``, ``gradient_accumulation_steps``).

An optimizer is built for the whole model (``partitioning/optimizer_variables.py``), so its lists have an entry for each
of the model's variables. While it updates averages or resets accumulated gradients, the lists are narrowed to this
rank's variables.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.partitioning import optimizer_variables
from smdistributed.modelparallel.tensorflow.partitioning.delayed_initialization import handle_of

#: Names in Keras of the lists of variables and averages. Accumulated gradients are found by a variable's index.
_VARIABLES, _AVERAGES, _SUMS = "_trainable_variables", "_model_variables_moving_average", "_accumulated_gradients"


@contextlib.contextmanager
def of_partition(optimizer: Any) -> Iterator[None]:
    """Narrow an optimizer's lists to this rank's variables inside the context."""
    lists = vars(optimizer)
    here = optimizer_variables.local_variables(optimizer)
    if here is None or _VARIABLES not in lists:
        yield
        return
    handles = {id(handle_of(each)) for each in here}
    are_here = [id(handle_of(each)) in handles for each in lists[_VARIABLES]]
    narrow = {name: _only(lists[name], are_here) for name in (_VARIABLES, _AVERAGES) if name in lists}
    if _SUMS in lists:
        narrow[_SUMS] = [each if is_here else None for each, is_here in zip(lists[_SUMS], are_here, strict=True)]
    whole = {name: lists[name] for name in narrow}
    # Bypasses the optimizer's attribute tracking: these variables are known to it.
    lists.update(narrow)
    try:
        yield
    finally:
        lists.update(whole)


def without_update(optimizer: Any) -> None:
    """Update averages as Keras 3 does in an update without gradients; do nothing for other optimizers."""
    if not hasattr(optimizer, "apply"):
        return
    number = optimizer.iterations.value + 1

    def each(period: int | None, do: Callable[[], Any]) -> None:
        if period:
            tf.cond(number % period == 0, lambda: (do(), tf.no_op())[1], tf.no_op)

    with of_partition(optimizer):
        here = vars(optimizer)[_VARIABLES]
        each(optimizer.gradient_accumulation_steps, optimizer._backend_reset_gradient_accumulators)
        if optimizer.use_ema:
            optimizer._update_model_variables_moving_average(here)
            each(
                optimizer.ema_overwrite_frequency, lambda: optimizer._overwrite_model_variables_with_average_value(here)
            )


def _only(values: Any, wanted: list[bool]) -> list[Any]:
    return [value for value, is_wanted in zip(values, wanted, strict=True) if is_wanted]


def limited_to_partition(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of an optimizer that iterates over all variables."""

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with of_partition(self):
            return plain(self, *args, **kwargs)

    return call


def install() -> None:
    """Make Keras' callback that swaps variables and averages swap those of this rank only."""
    callbacks = getattr(sys.modules.get("keras"), "callbacks", None)
    kind = getattr(callbacks, "SwapEMAWeights", None)
    for name in ("_tf_swap_variables", "_tf_finalize_ema_values"):
        plain = getattr(kind, name, None)
        if plain is not None and not hasattr(plain, "_smp_original"):
            setattr(kind, name, _of_optimizer(plain))


def _of_optimizer(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap a method of the callback that iterates over an optimizer's variables, or the model's up to Keras 3.14."""

    @functools.wraps(plain)
    def method(self: Any, optimizer: Any) -> Any:
        with of_partition(optimizer):
            return plain(self, optimizer)

    method._smp_original = plain  # type: ignore[attr-defined]
    return method
