"""Keras' optimizers with a partitioned model.

They get the methods that scripts of Amazon's library call, are built for the whole model, and update the variables of
one partition. Optimizers that scale the loss skip an update on all partitions or on none.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops
from smdistributed.modelparallel.exceptions import SMPUnsupportedError, SMPUsageError
from smdistributed.modelparallel.tensorflow import ema
from smdistributed.modelparallel.tensorflow.gradients import clip, compute_gradients, get_gradients, is_counted
from smdistributed.modelparallel.tensorflow.output import StepOutput, origins_of
from smdistributed.modelparallel.tensorflow.partitioning import optimizer_variables
from smdistributed.modelparallel.tensorflow.partitioning.delayed_initialization import handle_of
from smdistributed.modelparallel.tensorflow.state import state

#: Classes whose methods are wrapped; methods of subclasses call these. In steps, Horovod's optimizers do not
#: reduce gradients, because they do so when the gradients are applied.
_KERAS = ("keras.", "tf_keras.")
_WHOSE: dict[str, tuple[str, ...]] = {
    "get_gradients": (*_KERAS, "horovod.", "smdistributed."),
    "compute_gradients": (*_KERAS, "horovod.", "smdistributed."),
    "apply_gradients": _KERAS,
    "apply": _KERAS,
}
#: Ids of optimizers whose update is running, because some of Keras' methods call others.
_updating: set[int] = set()


def install() -> None:
    """Wrap the update methods of all imported Keras optimizers and of their subclasses.

    A method that is wrapped already stays as it is.
    """
    ema.install()
    for package in ("keras", "tf_keras"):
        module = getattr(sys.modules.get(package), "optimizers", None)
        older = getattr(getattr(module, "legacy", None), "Optimizer", None)
        for base in (getattr(module, "Optimizer", None), older):
            if base is not None and hasattr(base, "apply_gradients"):
                _adapt(base)
    scaling: Any = sys.modules.get("tf_keras.src.mixed_precision.loss_scale_optimizer")
    if scaling is not None and not hasattr(scaling._is_all_finite, "_smp_original"):
        scaling._is_all_finite = _finite_on_all_partitions(scaling._is_all_finite)


def _adapt(base: type) -> None:
    around: dict[str, Callable[[Any], Any]] = {
        "get_gradients": functools.partial(_in_steps, get_gradients),
        "compute_gradients": functools.partial(_in_steps, compute_gradients),
        "apply_gradients": _of_pairs,
        "apply": _of_gradients,
        "build": _for_the_whole,
        # The name of `build` in the older optimizers of Keras 2.
        "_create_all_weights": _for_the_whole,
        # Methods of Keras 3 that check whether gradients are finite, and that scale a loss.
        "check_finite": _finite_on_all_partitions,
        "scale_loss": _built_before,
        "finalize_variable_values": ema.limited_to_partition,
    }
    for kind in (base, *_derived(base)):
        for name, adapted in around.items():
            plain = getattr(kind, name, None)
            is_ours = kind is base or kind.__module__.startswith(_WHOSE.get(name, ""))
            if is_ours and not hasattr(plain, "_smp_original") and (plain is not None or name.endswith("_gradients")):
                ours = adapted(plain)
                ours._smp_original = plain
                setattr(kind, name, ours)


def _derived(kind: type) -> Iterator[type]:
    subclasses: list[type] = kind.__subclasses__()
    for each in subclasses:
        yield each
        yield from _derived(each)


def _in_steps(ours: Any, plain: Any) -> Any:
    """Return a function that calls ``ours`` in the body of a step and ``plain`` elsewhere."""

    @functools.wraps(plain or ours)
    def either(self: Any, *args: Any, **kwargs: Any) -> Any:
        if plain is None or (state.trace is not None and state.trace.is_current() and kwargs.get("tape") is None):
            kwargs.pop("tape", None)
            return _of_scaled_loss(self, ours, *args, **kwargs)
        return plain(self, *args, **kwargs)

    return either


def _of_scaled_loss(optimizer: Any, ours: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
    """Return gradients in the scale that the optimizer's update expects.

    Keras 3 divides by the loss scale in the update, tf_keras before it.
    """
    if callable(loss):
        loss = loss()
    if hasattr(optimizer, "scale_loss"):
        return ours(optimizer.scale_loss(loss), *args, **kwargs)
    if not hasattr(optimizer, "inner_optimizer"):
        return ours(loss, *args, **kwargs)
    found = ours(optimizer.get_scaled_loss(loss), *args, **kwargs)
    if ours is get_gradients:
        return optimizer.get_unscaled_gradients(found)
    gradients, variables = zip(*found, strict=True)
    return list(zip(optimizer.get_unscaled_gradients(gradients), variables, strict=True))


def _built_before(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Build a loss-scaling optimizer before the trace, which would otherwise contain its scale as a constant."""

    @functools.wraps(plain)
    def scale_loss(self: Any, loss: Any) -> Any:
        traces = state.trace is not None and state.trace.is_current() and state.model is not None
        if traces and hasattr(self, "inner_optimizer") and not self.built:
            variables = state.require_model().trainable_variables
            with tf.init_scope():
                self.build(variables)
        return plain(self, loss)

    return scale_loss


def _finite_on_all_partitions(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a check so that it returns whether gradients are finite on all partitions."""

    @functools.wraps(plain)
    def are_finite(*args: Any) -> Any:
        *_, gradients = args
        # Neither Keras package handles an empty list of gradients.
        finite = plain(*args) if any(each is not None for each in gradients) else tf.constant(True)
        if not _updating or state.groups.pp_group is None:
            return finite
        least = core_ops.smd_all_reduce(tensor=tf.cast(finite, tf.int32), op="min", group=state.groups.pp_group)
        return least > 0

    are_finite._smp_original = plain  # type: ignore[attr-defined]
    return are_finite


def _for_the_whole(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an optimizer's creation of its variables."""

    @functools.wraps(plain)
    def build(self: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
        # tf_keras' loss-scaling optimizer delegates the build to its inner optimizer.
        only_asks = hasattr(self, "inner_optimizer") and not hasattr(self, "scale_loss")
        if only_asks or getattr(self, "built", getattr(self, "_built", False)):
            return plain(self, variables, *args, **kwargs)
        with optimizer_variables.being_built(self, list(variables)) as whole:
            return plain(self, whole, *args, **kwargs)

    return build


def _of_pairs(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``apply_gradients``, which may get the variables of one partition only."""

    @functools.wraps(plain)
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        if not pairs and hasattr(self, "scale_loss"):
            self.apply([], [])
            return self.iterations
        with _update(self, [gradient for gradient, _ in pairs], variables) as ready:
            if ready is None:
                return self.iterations
            if not ready[0] and hasattr(self, "scale_loss"):
                self.apply([], [])
                return self.iterations
            return plain(self, list(zip(*ready, strict=True)), *args, **kwargs)

    return apply_gradients


def _of_gradients(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``apply`` of Keras 3, which may get the variables of one partition only."""

    @functools.wraps(plain)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = trainable_variables
        if variables is None:
            variables = optimizer_variables.local_variables(self)
        if variables is None:
            return plain(self, grads)
        with _update(self, list(grads), list(variables)) as ready:
            return None if ready is None else plain(self, *ready)

    return apply


@contextlib.contextmanager
def _update(optimizer: Any, gradients: list[Any], variables: list[Any]) -> Iterator[tuple[list[Any], list[Any]] | None]:
    """Return a context for an optimizer's update of ``variables``, some of which may be on other partitions.

    Yields:
        The gradients of variables on this rank, and these variables; ``None`` if there is nothing to update here.

    Raises:
        SMPUnsupportedError: The optimizer would compute other values than in one process.
        SMPUsageError: It is called in a step, or a gradient of a step belongs to another variable or is not
        accumulated.
        ValueError: There are no gradients on any partition; raised on all ranks.
    """
    if any(isinstance(gradient, StepOutput) for gradient in gradients):
        raise SMPUsageError("a `StepOutput` has a gradient for each microbatch: apply the result of its `accumulate()`")
    if state.trace is not None and state.trace.is_current() and len(state.groups.members["pp"]) > 1:
        raise SMPUsageError(
            "an optimizer updates variables in the body of a `smp.step` function: return the gradients, and apply "
            "the result of their `accumulate()` outside"
        )
    if id(optimizer) in _updating or not _are_of_the_model(variables):
        yield gradients, variables
        return
    _updating.add(id(optimizer))
    try:
        ready = _ready(optimizer, gradients, variables)
        with ema.of_partition(optimizer):
            yield ready
    finally:
        _updating.discard(id(optimizer))


def _ready(optimizer: Any, gradients: list[Any], variables: list[Any]) -> tuple[list[Any], list[Any]] | None:
    is_partitioned = len(state.groups.members["pp"]) > 1
    if is_partitioned:
        _check(optimizer)
        _check_pairs(gradients, variables)
    is_scaled = hasattr(optimizer, "inner_optimizer")
    if is_partitioned and not is_scaled and not state.has_gradients and all(gradient is None for gradient in gradients):
        # As in Keras. Every rank traces the whole step, so all ranks know it.
        raise ValueError("No gradients provided for any variable: no step has computed a gradient on any partition.")
    # Of the loss-scaling optimizers, only that of Keras 3 has variables itself.
    has_variables = not is_scaled or hasattr(optimizer, "scale_loss")
    optimizer_variables.build(
        optimizer if has_variables else optimizer.inner_optimizer, variables, any(map(_is_on_all, gradients))
    )
    ours = {id(handle_of(each)) for each in state.require_model()._smp_local(variables)}
    pairs = [pair for pair in zip(gradients, variables, strict=True) if id(handle_of(pair[1])) in ours]
    gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
    if is_scaled:
        # If gradients are finite, its update calls the inner optimizer's, which comes here again.
        if has_variables or any(gradient is not None for gradient in gradients):
            return gradients, variables
        if optimizer.dynamic:
            optimizer._loss_scale.update(gradients)
        optimizer.iterations.assign_add(1)
        return None
    clipnorm = getattr(optimizer, "global_clipnorm", None)
    if is_partitioned and clipnorm is not None:
        # Gradients are clipped before, so Keras finds the norm of this partition's gradients small enough.
        gradients, _ = clip(gradients, [is_counted(variable) for variable in variables], clipnorm)
    if is_partitioned and all(gradient is None for gradient in gradients):
        # Optimizers reject an empty update, or do not count it as a step.
        ema.without_update(optimizer)
        counter = optimizer.iterations
        (counter if hasattr(counter, "assign_add") else optimizer._iterations).assign_add(1)
        return None
    return gradients, variables


def _check(optimizer: Any) -> None:
    name = type(optimizer).__name__
    if getattr(optimizer, "gradient_accumulation_steps", None) and optimizer.global_clipnorm is not None:
        raise SMPUnsupportedError(
            f"`gradient_accumulation_steps` of `{name}` clips the accumulated gradients by their norm, which is "
            "not known over all partitions: leave `global_clipnorm` out, or use more microbatches"
        )


def _is_on_all(gradient: Any) -> bool:
    """Return whether a step has returned a gradient to all partitions.

    A step returns gradients to all partitions for some variables only.
    """
    partitions = state.require_model()._smp_assignment.variables
    origins = set() if gradient is None else origins_of(gradient)
    return any(origin.partition is None and origin.variable in partitions for origin in origins)


def _check_pairs(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Reject a gradient that belongs to another variable.

    A script may pair the gradients of all partitions with the variables of this one.
    """
    for gradient, variable in zip(gradients, variables, strict=True):
        of = set() if gradient is None else {origin.variable for origin in origins_of(gradient)}
        if len(of) == 1 and None not in of and id(handle_of(variable)) not in of:
            model = state.require_model()
            with model._smp_all_variables():
                names = [_path(each) for each in model.variables if id(handle_of(each)) in of]
            raise SMPUsageError(
                f"the gradient of `{'`, `'.join(names)}` would be applied to `{_path(variable)}`. Once the model is "
                "partitioned, `model.trainable_variables` contains the variables of this partition only, and gradients "
                "of all of them are on this partition only. Gradients of some variables, and `trainable_variables` of "
                "a layer, are on all partitions"
            )


def _path(variable: Any) -> str:
    return getattr(variable, "path", variable.name)


def _are_of_the_model(variables: Sequence[Any]) -> bool:
    """Return whether the variables to update belong to the partitioned model, on any partition."""
    model = state.model
    if model is None or not model.is_partitioned:
        return False
    if not variables:
        return not model.trainable_variables
    with model._smp_all_variables():
        whole = {id(handle_of(variable)) for variable in model.trainable_variables}
    return any(id(handle_of(variable)) in whole for variable in variables)
