"""Tracks which tensors of a body are gradients of variables.

These are results of TensorFlow's gradient functions and values derived from them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gradients_util

from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.dataparallel.tensorflow.reduction import name_of
from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.tensorflow.partitioning.delayed_initialization import handle_of

#: Operations that rearrange or cast elements.
_MOVES = {
    *(
        "Cast",
        "ConcatV2",
        "ExpandDims",
        "GatherNd",
        "GatherV2",
        "Identity",
        "IdentityN",
        "Pack",
        "PadV2",
        "Pad",
        "Reshape",
        "ResourceGather",
    ),
    *("ReverseV2", "Roll", "Slice", "Split", "SplitV", "Squeeze", "StridedSlice", "Tile", "Transpose", "Unpack"),
}
#: Operations that compare or sum up elements; their results are not gradients.
_SUMS = {
    *("BatchMatMulV2", "Conv2D", "Einsum", "MatMul"),
    *("All", "Any", "ArgMax", "ArgMin", "EuclideanNorm", "Max", "Mean", "Min", "Prod", "Sum"),
}


def _inputs(tensor: tf.Tensor) -> Sequence[tf.Tensor]:
    """Return the inputs of ``tensor`` from which it may be derived; an operation may pass several values through."""
    op = tensor.op
    return [op.inputs[tensor.value_index]] if op.type == "IdentityN" else op.inputs


class GradientTracker:
    """The tensors of a trace that are gradients."""

    def __init__(self) -> None:
        # For each tensor name: the ids of the handles of the variables whose gradient it is.
        self._variables_by_tensor: dict[str, set[int]] = {}

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Return a context that records the gradients that ``tf.gradients`` and tapes return."""
        plain_helper, plain_tape = gradients_util._GradientsHelper, tf.GradientTape.gradient

        @functools.wraps(plain_helper)
        def helper(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
            return self._record(xs, plain_helper(ys, xs, *args, **kwargs))

        @functools.wraps(plain_tape)
        def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            return self._record(sources, plain_tape(tape, target, sources, *args, **kwargs))

        _put(helper, gradient)
        try:
            yield
        finally:
            _put(plain_helper, plain_tape)

    def _record(self, sources: Any, found: Any) -> Any:
        for source, value in zip(tf.nest.flatten(sources), tf.nest.flatten(found), strict=True):
            handle = handle_of(source)
            if handle is not None and isinstance(value, tf.Tensor | tf.IndexedSlices):
                self._variables_by_tensor.setdefault(_tensor(value).name, set()).add(id(handle))
        return found

    @property
    def has_found_any(self) -> bool:
        """Return whether gradients of variables have been computed."""
        return bool(self._variables_by_tensor)

    def variables_of(self, value: Any, inputs: Callable[[tf.Tensor], Iterable[tf.Tensor]] = _inputs) -> set[int]:
        """Return the ids of the handles of variables from whose gradients ``value`` is derived.

        Args:
            value: A tensor or slices.
            inputs: Returns the inputs of a tensor from which it may be derived.
        """
        found: set[int] = set()
        pending, seen = [_tensor(value)], set()
        while pending:
            tensor = pending.pop()
            if tensor.name in seen:
                continue
            seen.add(tensor.name)
            if tensor.name in self._variables_by_tensor:
                found |= self._variables_by_tensor[tensor.name]
            else:
                pending += inputs(tensor)
        return found

    def variable_of(self, value: Any, variables: Sequence[Any], of_replicas: bool) -> Any:
        """Return the variable whose gradient ``value`` is, or ``None`` if it is not a gradient.

        The gradient has the variable's shape and type. If several variables match, such as variables that are added
        up, the first one is returned.

        Args:
            value: A result of the body.
            variables: The variables of the model.
            of_replicas: Whether replicas reduce gradients, so that every gradient must be recognized.

        Raises:
            SMPUsageError: Replicas must know whether it is a gradient, and that is ambiguous.
        """
        if not isinstance(value, tf.Tensor | tf.IndexedSlices):
            return None
        of = self.variables_of(value)
        fitting = [each for each in variables if id(handle_of(each)) in of and can_be_gradient(value, each)]
        if not fitting:
            if of_replicas:
                self._refuse_other_forms(value, variables)
            return None
        known = of if len(of) == 1 else self.variables_of(value, of_same_shape)
        found = [each for each in fitting if id(handle_of(each)) in known]
        if len(found) == 1 or (found and _has_shape(value)):
            return found[0]
        if of_replicas and value.shape.rank != 0:
            names = " or ".join(f"`{underlying(each).name}`" for each in fitting)
            raise SMPUsageError(
                f"a `smp.step` function returns `{_tensor(value).name}` of shape {value.shape}, which is computed from "
                f"gradients of several variables. Replicas cannot determine whether it is the gradient of {names}, "
                "which they would have to average: return gradients as a list with one for each of "
                "`model.trainable_variables`, and other values in another shape"
            )
        return None

    def _refuse_other_forms(self, value: Any, variables: Sequence[Any]) -> None:
        """Raise if ``value`` has the elements of gradients in another shape, which replicas would not average.

        Values that sum or compare gradients, such as norms, may differ between replicas.
        """
        found = self.variables_of(value, _of_same_numbers) if _has_numbers(_tensor(value)) else set()
        names = [f"`{name_of(each)}`" for each in variables if id(handle_of(each)) in found]
        if names:
            raise SMPUsageError(
                f"a `smp.step` function returns `{_tensor(value).name}`, {value.dtype.name}{value.shape}, which is "
                f"made of the gradient of {' and '.join(names[:3])} in another form: replicas would not average it; "
                "return gradients in the shapes of their variables, and change them outside of the step"
            )


def of_same_shape(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Return the inputs from which ``tensor`` may be computed elementwise.

    An example is a gradient that is scaled by a global norm; the inputs of the norm have another shape.
    """
    rank, shape = tensor.shape.rank, tensor.shape
    return [each for each in _inputs(tensor) if each.shape.rank == rank and each.shape.is_compatible_with(shape)]


def _of_same_numbers(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Return the inputs whose elements ``tensor`` contains, in any shape."""
    inputs = [each for each in _inputs(tensor) if _has_numbers(each)]
    if tensor.op.type in _MOVES:
        return inputs
    if tensor.op.type in _SUMS:
        return []
    sizes = tensor.shape.num_elements(), None
    return [each for each in inputs if each.shape.num_elements() in sizes]


def _has_numbers(tensor: tf.Tensor) -> bool:
    """Return whether a tensor may contain elements of a gradient: it has several, and is not a comparison's result."""
    return tensor.shape.rank != 0 and tensor.dtype != tf.bool


def _has_shape(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.shape.is_fully_defined()


def can_be_gradient(value: Any, variable: Any) -> bool:
    """Return whether a tensor or slices can be a variable's gradient, which may have been cast."""
    inner = underlying(variable)
    if not isinstance(value, tf.Tensor | tf.IndexedSlices):
        return False
    if value.dtype != inner.dtype and not (value.dtype.is_floating and inner.dtype.is_floating):
        return False
    return isinstance(value, tf.IndexedSlices) or value.shape.is_compatible_with(inner.shape)


def _tensor(value: Any) -> tf.Tensor:
    return value.values if isinstance(value, tf.IndexedSlices) else value


def _put(helper: Callable[..., Any], gradient: Callable[..., Any]) -> None:
    gradients_util._GradientsHelper, tf.GradientTape.gradient = helper, gradient
