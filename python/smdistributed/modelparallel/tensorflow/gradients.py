"""Gradients in a step: Keras' optimizers get the calls that the original's scripts use, and a step finds the gradients among
what its body returns."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops
from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.modelparallel.exceptions import SMPUnsupportedError, SMPUsageError
from smdistributed.modelparallel.tensorflow import slots
from smdistributed.modelparallel.tensorflow.state import state


def get_gradients(loss: tf.Tensor, params: Any) -> list[Any]:
    """The gradients of ``loss`` with respect to ``params``; ``None`` for those that it does not depend on."""
    return tf.gradients(loss, [underlying(variable) for variable in tf.nest.flatten(params)])


def compute_gradients(loss: Any, var_list: Any = None, grad_loss: Any = None) -> list[tuple[Any, Any]]:
    """Pairs of gradients and variables."""
    if var_list is None:
        if state.model is None:
            raise SMPUsageError("`compute_gradients` needs `var_list`: there is no `smp.DistributedModel`")
        var_list = state.model.trainable_variables
    variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)
    loss = loss() if callable(loss) else loss
    found = tf.gradients(loss, [underlying(variable) for variable in variables], grad_ys=grad_loss)
    return list(zip(found, variables, strict=True))


def install() -> None:
    """Puts the calls into the Keras packages that this process has imported; does nothing the second time."""
    for package in ("keras", "tf_keras"):
        if hasattr(sys.modules.get(package), "optimizers"):
            _adapt(package)


@functools.cache
def _adapt(package: str) -> None:
    base = sys.modules[package].optimizers.Optimizer
    for name, ours in (("get_gradients", get_gradients), ("compute_gradients", compute_gradients)):
        setattr(base, name, _in_steps(getattr(base, name, None), ours))
    # Wrappers of optimizers have a call of their own.
    wrappers = [kind for kind in base.__subclasses__() if "apply_gradients" in vars(kind)]
    for kind in (*wrappers, base):
        kind.apply_gradients = _over_partitions(kind.apply_gradients)


def _over_partitions(apply_gradients: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's call, also for the variables of one partition."""

    @functools.wraps(apply_gradients)
    def whole(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        grads_and_vars = list(grads_and_vars)
        if not _are_of_the_model([variable for _, variable in grads_and_vars]):
            return apply_gradients(self, grads_and_vars, *args, **kwargs)
        divided = len(state.groups.members["pp"]) > 1
        if hasattr(self, "inner_optimizer"):
            if divided:
                raise SMPUnsupportedError(
                    f"`{type(self).__name__}` would skip an update on the partition alone whose gradients are not finite: scale the "
                    "loss by a constant, or take bfloat16"
                )
            return apply_gradients(self, grads_and_vars, *args, **kwargs)
        slots.build(self)
        if divided and getattr(self, "global_clipnorm", None) is not None:
            # Keras then finds the norm of this partition's gradients small enough.
            clipped, _ = clip_by_global_norm([gradient for gradient, _ in grads_and_vars], self.global_clipnorm)
            grads_and_vars = [(ours, variable) for ours, (_, variable) in zip(clipped, grads_and_vars, strict=True)]
        if not grads_and_vars:
            # Optimizers refuse an empty list, or do not count it.
            self.iterations.assign_add(1)
            return self.iterations
        return apply_gradients(self, grads_and_vars, *args, **kwargs)

    return whole


def _are_of_the_model(variables: Sequence[Any]) -> bool:
    """Whether variables that are to be updated are those of the divided model, none on a partition that trains none."""
    model = state.model
    if model is None or not model.is_partitioned:
        return False
    ours = {id(underlying(variable).handle) for variable in model.trainable_variables}
    return any(id(underlying(variable).handle) in ours for variable in variables) if variables else not ours


def _in_steps(plain: Any, ours: Any) -> Any:
    """Ours in the body of a step, which nothing else has recorded; elsewhere what was there."""

    @functools.wraps(plain or ours)
    def either(self: Any, *args: Any, **kwargs: Any) -> Any:
        if plain is None or (state.trace is not None and state.trace.is_current() and kwargs.get("tape") is None):
            kwargs.pop("tape", None)
            return ours(*args, **kwargs)
        return plain(self, *args, **kwargs)

    return either


def are_gradients(values: Any, variables: Sequence[Any]) -> bool:
    """Whether a part of what a body returns is the gradients of the model: a list or tuple with one for each of its
    trainable variables, of its shape and type, or ``None``."""
    if type(values) not in (list, tuple) or len(values) != len(variables):
        return False
    if all(value is None for value in values):
        return False
    for value, variable in zip(values, variables, strict=True):
        if value is None:
            continue
        if not isinstance(value, tf.Tensor | tf.IndexedSlices) or value.dtype != underlying(variable).dtype:
            return False
        if isinstance(value, tf.Tensor) and not value.shape.is_compatible_with(underlying(variable).shape):
            return False
    return True


def mean_over_replicas(value: Any) -> Any:
    """The mean of a gradient over the replicas of the model."""
    if isinstance(value, tf.IndexedSlices):
        value = tf.convert_to_tensor(value)
    return core_ops.smd_all_reduce(tensor=value, op="average", group=state.groups.data)


def clip_by_global_norm(gradients: Sequence[Any], clip_norm: Any) -> tuple[list[Any], tf.Tensor]:
    """As ``tf.clip_by_global_norm``, by the norm of the gradients of all partitions. All ranks call it, outside of steps.

    Args:
        gradients: This rank's, ``None`` among them or not.
        clip_norm: The largest norm that is left as it is.

    Returns:
        The clipped gradients, and the norm over all partitions.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in present]
    squares = [tf.reduce_sum(tf.square(tf.cast(value, tf.float64))) for value in values]
    total = tf.add_n(squares) if squares else tf.zeros([], tf.float64)
    if state.groups.pipe is not None:
        total = core_ops.smd_all_reduce(tensor=total, op="sum", group=state.groups.pipe)
    norm = tf.sqrt(total)
    scale = tf.cast(clip_norm, tf.float64) / tf.maximum(norm, tf.cast(clip_norm, tf.float64))

    def clipped(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(clipped(value.values), value.indices, value.dense_shape)
        return value * tf.cast(scale, value.dtype)

    return [clipped(gradient) for gradient in gradients], tf.cast(norm, present[0].dtype if present else tf.float32)
