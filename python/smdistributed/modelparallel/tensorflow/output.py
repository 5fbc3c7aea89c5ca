"""The output of a step: the tensors of all microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from smdistributed.modelparallel.exceptions import SMPValidationError
from smdistributed.modelparallel.step_output import MicrobatchOutputs
from smdistributed.modelparallel.tensorflow.tracing.gradient_tracking import of_same_shape

Value = Any  # tf.Tensor or tf.IndexedSlices


class Origin(NamedTuple):
    """The variable and the partition to which a tensor of a step belongs.

    Attributes:
        variable: The id of the handle of the model's variable whose gradient it is; ``None`` if it is not a gradient.
        partition: The only partition that has the tensor; ``None`` if all have it.
    """

    variable: int | None = None
    partition: int | None = None


def origins_of(value: Value) -> set[Origin]:
    """Return the origins of ``value``.

    These are known for a step's output and, in a graph, for tensors that are computed from it elementwise.
    """
    found: set[Origin] = set()
    pending, seen = [value, value.values] if isinstance(value, tf.IndexedSlices) else [value], set()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if hasattr(each, "_smp_origin"):
            found.add(each._smp_origin)
        elif isinstance(each, tf.Tensor) and not hasattr(each, "numpy"):
            pending += of_same_shape(each)
    return found


class StepOutput(MicrobatchOutputs[Value]):
    """One tensor that the body of the step returns, for each microbatch.

    Attributes:
        outputs: The tensors, in the order of the microbatches. Indexing, ``len`` and iteration go to them.
    """

    def __init__(
        self,
        outputs: Sequence[Value],
        total: tf.Tensor | None = None,
        of_replicas: bool = False,
        origin: Origin | None = None,
    ) -> None:
        self._origin = origin or Origin()
        super().__init__([self._known(output) for output in outputs])
        # The sum over the microbatches, which the step accumulates while it runs.
        self._total = total
        # Whether the sum is also averaged over the replicas of the model.
        self._of_replicas = of_replicas

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a `StepOutput` has no `{name}`: it holds the tensors of all microbatches in `outputs`; "
            "combine them with `merge()`, `reduce_mean()` or `accumulate()`"
        )

    # Methods that TensorFlow requires of a class whose objects are arguments and results of functions.

    def __tf_flatten__(self) -> tuple[Any, tuple[Any, ...]]:
        return (self._of_replicas, self._origin), (tuple(self.outputs), self._total)

    @classmethod
    def __tf_unflatten__(cls, metadata: Any, components: Any) -> StepOutput:
        outputs, total = components
        return cls(outputs, total, *metadata)

    def reduce_mean(self) -> Value:
        """Return the mean over the microbatches."""
        return self._known(_scaled(self._sum(), len(self.outputs)))

    def reduce_sum(self) -> Value:
        """Return the sum over the microbatches."""
        return self._known(self._sum())

    def concat(self) -> tf.Tensor:
        """Return the rows of all microbatches, one microbatch after the other along axis 0; scalars are stacked."""
        return self.stack() if self.outputs[0].shape.rank == 0 else tf.concat(self.outputs, 0)

    def stack(self) -> tf.Tensor:
        """Stack the tensors of the microbatches along a new axis 0."""
        return tf.stack(self.outputs)

    def accumulate(self, method: str = "variable", var: tf.Variable | None = None) -> Value:
        """Return the mean over microbatches, as :meth:`reduce_mean`.

        In a ``tf.function``, the memory of a microbatch's gradient is free as soon as the gradient has been added to
        the earlier ones. The method ``"add_n"`` waits for all of them instead.

        Args:
            method: ``"variable"``, ``"accumulate_n"`` or ``"add_n"``.
            var: The variable that ``"variable"`` sets to the sum in each step; none by default.

        Raises:
            SMPValidationError: The method does not exist, or ``var`` is given with another method.
        """
        if method not in ("variable", "accumulate_n", "add_n"):
            raise SMPValidationError(f"`method` is {method!r}: expected 'variable', 'accumulate_n' or 'add_n'")
        if var is not None and method != "variable":
            raise SMPValidationError(f"`var` is only for the method 'variable', not for {method!r}")
        few_rows = any(isinstance(output, tf.IndexedSlices) for output in self.outputs)
        if var is None and self._total is None and few_rows:
            return self.reduce_mean()
        total = tf.add_n(self.outputs) if method == "add_n" and not self._of_replicas else self._sum()
        if var is not None:
            # The gradient may have few rows (``tf.IndexedSlices``).
            var.assign(tf.convert_to_tensor(total))
            total = var.read_value()
        return self._known(_scaled(total, len(self.outputs)))

    def _known(self, value: Value) -> Value:
        if isinstance(value, tf.Tensor | tf.IndexedSlices):
            value._smp_origin = self._origin
        return value

    def _sum(self) -> Value:
        return sum_of(self.outputs) if self._total is None else self._total


def sum_of(outputs: Sequence[Value]) -> Value:
    """Add up in the order of the microbatches, one at a time."""
    if all(isinstance(output, tf.IndexedSlices) for output in outputs):
        indices = tf.concat([output.indices for output in outputs], 0)
        values = tf.concat([output.values for output in outputs], 0)
        return tf.IndexedSlices(values, indices, outputs[0].dense_shape)
    total = tf.convert_to_tensor(outputs[0])
    for output in outputs[1:]:
        total = total + tf.convert_to_tensor(output)
    return total


def _scaled(value: Value, count: int) -> Value:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(value.values, count), value.indices, value.dense_shape)
    # As in `tf.reduce_mean`, the mean of integers is an integer.
    return tf.truncatediv(value, count) if value.dtype.is_integer else value / tf.cast(count, value.dtype)
