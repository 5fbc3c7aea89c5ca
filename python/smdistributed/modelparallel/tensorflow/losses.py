"""Losses of microbatches, weighted so that their sum is Keras' loss of the whole batch.

- LOSS-1: a Keras loss is a mean over rows, so a microbatch's loss is weighted by its share of the batch's rows. The
  same holds for losses of unknown reduction: those of layers (``add_loss``, regularizers), and functions that return
  one number.
- LOSS-2: a loss with ``reduction="sum"`` has weight one. So has an activity regularizer, a sum over rows, in those
  versions of Keras that do not divide it by the rows.
- LOSS-3: a mean over unmasked elements or by weights (``"mean_with_sample_weight"``) is weighted by the share of rows
  and the unmasked part of the microbatch's elements. The unmasked part of the batch is known only after all
  microbatches, so everything is divided by it then. This is exact if all other losses are equal for all rows, such as
  regularizers of weights. No factor is a number of elements, because gradients of narrow types would overflow. Before
  3.13, Keras adds ``epsilon()`` to the number of unmasked elements; each microbatch does so too, which makes a
  difference of 1e-7 elements.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.tensorflow.state import state

#: The names of mean reductions in the two packages.
_MEANS = ("mean", "sum_over_batch_size", "auto")
_current: LossTerms | None = None


class LossTerms:
    """The losses of a microbatch.

    Args:
        share: The microbatch's share of the batch's rows.
    """

    def __init__(self, share: tf.Tensor) -> None:
        self._share = share
        self._left: list[tf.Tensor | None] = []

    def add(self, value: tf.Tensor, reduction: str | None, left: tf.Tensor | None) -> tf.Tensor:
        """Prepare a loss to be added to others.

        ``left`` is the fraction of its elements over which it is a mean; ``None`` for all.
        """
        if value.shape.rank != 0:
            return value
        if reduction == "sum":
            self._left.append(None)
            return self.of_sum(value)
        self._left.append(left)
        return value

    def of_sum(self, value: tf.Tensor) -> tf.Tensor:
        """Prepare a sum over rows, so that :meth:`weight` gives it the weight one (LOSS-2)."""
        return value / tf.cast(self._share, value.dtype)

    def weight(self, loss: tf.Tensor, model: Any) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Return the factor of the microbatch's losses, and its part of the divisor of the batch's sum, if any.

        Args:
            loss: The sum of all losses.
            model: The model, whose layers may have losses of their own.

        Raises:
            SMPUnsupportedError: The loss is not a scalar, or a case that LOSS-3 excludes.
        """
        if loss.shape.rank != 0:
            raise SMPUnsupportedError(
                f"the loss has the shape {loss.shape}: microbatches need one number, so take a `reduction` other than "
                "None, or compute the mean in the function"
            )
        parts = [left for left in self._left if left is not None]
        if not parts:
            return self._share, None
        if len(self._left) > 1 or any(map(_is_of_rows, model.losses)):
            raise SMPUnsupportedError(
                "a loss is a masked or weighted mean over a batch, and the model has other losses beside "
                "it. The weights of the other microbatches are not known yet: use `reduction='sum'`, or a "
                "`tf.reduce_sum` of the masked losses divided by a constant"
            )
        weight = self._share * parts[0]
        return weight, weight


def _is_of_rows(loss: Any) -> bool:
    """Return whether a loss depends on the microbatch; a regularizer of weights does not."""
    assert state.trace is not None, "losses are weighted inside of a body"
    inputs = {each.op.name for each in state.trace.inputs}
    pending, seen = [loss.op], set()
    while pending:
        op = pending.pop()
        if op.name in inputs:
            return True
        if op.name not in seen:
            seen.add(op.name)
            pending += [tensor.op for tensor in op.inputs]
    return False


@contextlib.contextmanager
def of_microbatch(share: tf.Tensor) -> Iterator[LossTerms]:
    """Return a context for Keras' computation of a microbatch's loss."""
    global _current
    _install()
    # Computed here, outside of any layer's call.
    _sums_activities()
    before, _current = _current, LossTerms(share)
    try:
        yield _current
    finally:
        _current = before


@contextlib.contextmanager
def of_activities(layer: Any) -> Iterator[None]:
    """Return a context for the call of a layer during a microbatch's loss, for its activity regularizer."""
    regularizer = vars(layer).get("activity_regularizer")
    terms = _current
    if terms is None or regularizer is None or not _sums_activities():
        yield
        return

    @functools.wraps(regularizer)
    def of_microbatch(output: Any) -> Any:
        return terms.of_sum(tf.convert_to_tensor(regularizer(output)))

    # Bypasses the layer's attribute tracking.
    vars(layer)["activity_regularizer"] = of_microbatch
    try:
        yield
    finally:
        vars(layer)["activity_regularizer"] = regularizer


@functools.cache
def _sums_activities() -> bool:
    """Return whether ``tf.keras`` adds an activity regularizer's result without dividing it by the rows."""
    with tf.init_scope():
        # Named explicitly; otherwise later layers of the script would get other numbers than in one process.
        layer = tf.keras.layers.Activation("linear", activity_regularizer=_sum, name="ones")
        layer(tf.ones([2, 1]))
        return float(layer.losses[0]) == 2.0


def _sum(output: tf.Tensor) -> tf.Tensor:
    # Keras reads a regularizer's signature, which TensorFlow's functions do not have.
    return tf.reduce_sum(output)


def _install() -> None:
    """Wrap the loss reductions of the Keras packages that this process has imported.

    A second call does nothing.
    """
    if "keras" in sys.modules:
        _adapt_keras()
    if "tf_keras" in sys.modules:
        _adapt_older()


@functools.cache
def _adapt_keras() -> None:
    from keras.src.losses import loss as module

    plain = module.reduce_weighted_values

    @functools.wraps(plain)
    def reduce_weighted_values(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        result = plain(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
        if _current is None or len(values.shape) == 0:
            return result
        left = None
        if reduction == "mean_with_sample_weight" and not (sample_weight is None and mask is None):
            left = _mean(module.apply_mask(sample_weight, mask, dtype=result.dtype, reduction=reduction))
        elif reduction in _MEANS and mask is not None:
            left = _mean(mask)
        return _current.add(result, reduction, left)

    module.reduce_weighted_values = reduce_weighted_values


@functools.cache
def _adapt_older() -> None:
    from tf_keras.src.utils import losses_utils as module

    parts: list[tf.Tensor] = []

    def recording_valid_part(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def apply_valid_mask(losses: Any, sw: Any, mask: Any, reduction: Any) -> Any:
            if _current is None or mask is None or reduction not in _MEANS:
                return plain(losses, sw, mask, reduction)
            parts[:] = [_mean(mask)]
            # Keras' function divides by the unmasked part, even if that is empty, as it may be in a microbatch.
            mask = tf.cast(mask, losses.dtype)
            return module.apply_mask(losses, sw, tf.math.divide_no_nan(mask, tf.reduce_mean(mask)))

        return apply_valid_mask

    def adding(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def compute_weighted_loss(
            losses: Any, sample_weight: Any = None, reduction: Any = "auto", name: Any = None
        ) -> Any:
            left = parts.pop() if parts else None
            result = plain(losses, sample_weight, reduction, name)
            if _current is None or losses.shape.rank == 0:
                return result
            return _current.add(result, reduction, left)

        return compute_weighted_loss

    module.apply_valid_mask = recording_valid_part(module.apply_valid_mask)
    module.compute_weighted_loss = adding(module.compute_weighted_loss)


def _mean(values: Any) -> tf.Tensor:
    """Return the mean in a type that is precise enough to weight many rows."""
    return tf.reduce_mean(tf.cast(tf.convert_to_tensor(values), tf.float64))
