"""Gradients that are summed on each rank over several backward passes before they are reduced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.keras_variable import underlying

_helpers: weakref.WeakSet[LocalGradientAggregationHelper] = weakref.WeakSet()


def forget_sums(session: Any = None) -> None:
    """Drop the sums of all helpers: a rank that joins has none, and all ranks must begin the next step together.

    Args:
        session: Session of a graph of TensorFlow 1, for the helpers in that graph.
    """
    for helper in list(_helpers):
        helper.forget(session)


class LocalGradientAggregationHelper:
    """Sums gradients in variables of this rank, and reduces every n-th sum.

    Args:
        backward_passes_per_step: Number of gradients that are summed.
        allreduce_func: Reduces gradients; called with them and their variables.
        sparse_as_dense: Whether ``tf.IndexedSlices`` may become dense.
        average_aggregated_gradients: Whether sums are divided by their number of gradients.
        **_: Ignored.

    Attributes:
        counter: Variable with the number of gradients in the sum; 0 after a reduction. ``None`` before the first
            gradient.
    """

    _OPTIMIZER_TYPE_KERAS = "optimizer_type_keras"
    _OPTIMIZER_TYPE_LEGACY = "optimizer_type_legacy"

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[..., Sequence[Any]],
        sparse_as_dense: bool = False,
        average_aggregated_gradients: bool = False,
        **_: Any,
    ) -> None:
        if backward_passes_per_step <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self.backward_passes_per_step = backward_passes_per_step
        self.counter: Any = None
        self._reduce = allreduce_func
        self._sparse_as_dense = sparse_as_dense
        self._average = average_aggregated_gradients
        self._sums: list[Any] = []
        # Only in a graph of TensorFlow 1.
        self._forgetting: tf.Operation | None = None
        _helpers.add(self)

    def _dense(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self._sparse_as_dense:
            raise ValueError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False."
            )
        return tf.convert_to_tensor(gradient)

    def _make(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Create sums for all variables that have had a gradient, which some may get later than others."""

        def local(value: Any, name: str) -> tf.Variable:
            collections = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
            if tf.executing_eagerly():
                return tf.Variable(value, trainable=False, name=name)
            return tf.compat.v1.Variable(value, trainable=False, name=name, collections=collections, use_resource=True)

        if self.counter is None:
            self._sums = [None] * len(gradients)
        if len(gradients) != len(self._sums):
            raise ValueError(
                f"got {len(gradients)} gradients: expected {len(self._sums)}, as in the first backward pass of the step"
            )
        late = [place for place, total in enumerate(self._sums) if total is None and gradients[place] is not None]
        if late and self.counter is not None and tf.inside_function():
            # Functions that were traced before would ignore the new variable, and TensorFlow creates variables only
            # in a function's first trace.
            name = getattr(variables[late[0]], "name", late[0])
            raise ValueError(
                f"variable `{name}` has a gradient now, and had none when the first of "
                f"{self.backward_passes_per_step} passes was traced: all passes of a tf.function need gradients of the "
                "same variables"
            )
        # Created outside of a function that is being traced.
        with tf.init_scope():
            if self.counter is None:
                self.counter = local(tf.zeros([], tf.int32), "aggregation_counter")
            for place in late:
                zeros = tf.zeros(underlying(variables[place]).shape, gradients[place].dtype)
                self._sums[place] = local(zeros, f"aggregated_gradient_{place}")
            if late and not tf.executing_eagerly():
                # Created now, because a session may finalize the graph.
                self._forgetting = tf.group(*_operations(self._forget()))

    def _forget(self) -> list[Any]:
        sums = [total for total in self._sums if total is not None]
        # Not multiplied by zero, which would keep NaN and infinity.
        return [each.assign(tf.zeros_like(each), read_value=False) for each in (self.counter, *sums)]

    def forget(self, session: Any = None) -> None:
        """Drop the sums.

        Args:
            session: Session of a graph of TensorFlow 1.
        """
        if self._forgetting is not None:
            if session is not None and session.graph is self._forgetting.graph:
                session.run(self._forgetting)
        elif self.counter is not None and tf.executing_eagerly():
            self._forget()

    def compute_gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Add gradients to the sums.

        Args:
            gradients: One gradient for each variable, or ``None``.
            variables: The variables.

        Returns:
            The reduced sums in every n-th call. In other calls the sums so far, which are not to be applied.

        Raises:
            ValueError: The number of gradients changed, or slices cannot become dense.
        """
        gradients = [self._dense(gradient) for gradient in gradients]
        variables = list(variables)
        self._make(gradients, variables)
        places = [place for place, total in enumerate(self._sums) if total is not None]
        sums = [self._sums[place] for place in places]

        def drop() -> tf.Tensor:
            reset = self._forget()
            with tf.control_dependencies(_operations(reset)):
                return tf.constant(True)

        # If a reduction has failed and the script goes on, the sums have been used, and the next ones begin.
        is_used = tf.greater_equal(self.counter, self.backward_passes_per_step)
        dropped = tf.cond(is_used, drop, lambda: tf.constant(False))
        with tf.control_dependencies(_operations([dropped])):
            added = [
                total.assign_add(
                    tf.zeros_like(total) if gradients[place] is None else gradients[place], read_value=False
                )
                for place, total in zip(places, sums, strict=True)
            ]
        with tf.control_dependencies(_operations(added)):
            count = self.counter.assign_add(1)

        def reduce() -> list[tf.Tensor]:
            totals = [total.read_value() for total in sums]
            if self._average:
                totals = [total / tf.cast(self.backward_passes_per_step, total.dtype) for total in totals]
            reduced = self._reduce(totals, [variables[place] for place in places])
            with tf.control_dependencies(_operations(reduced)):
                reset = self._forget()
            with tf.control_dependencies(_operations(reset)):
                return [tf.identity(gradient) for gradient in reduced]

        def wait() -> list[tf.Tensor]:
            return [total.read_value() for total in sums]

        with tf.control_dependencies(_operations([count])):
            results = tf.cond(tf.equal(count, self.backward_passes_per_step), reduce, wait) if places else []
        by_place = dict(zip(places, results, strict=True))
        return [by_place.get(place) for place in range(len(gradients))]

    def apply_gradients(self, apply_grads_closure: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Run the step if the sums were just reduced; otherwise run the alternative.

        Args:
            apply_grads_closure: Takes the step.
            otherwise: Runs between steps.

        Returns:
            A scalar boolean that is ready when the function has run; the functions' results are dropped.
        """

        def done(call: Callable[[], Any]) -> Callable[[], tf.Tensor]:
            def run() -> tf.Tensor:
                result = call()
                with tf.control_dependencies(_operations([result])):
                    return tf.constant(True)

            return run

        return tf.cond(tf.equal(self.counter, 0), done(apply_grads_closure), done(otherwise))


def _operations(values: Sequence[Any]) -> list[Any]:
    """Return operations that a graph can wait for."""
    if tf.executing_eagerly():
        return []
    # Assignments are neither operations nor tensors, but have an operation as attribute.
    return [value if isinstance(value, tf.Operation) else value.op for value in values if value is not None]
