"""Optimizers of ``tf.compat.v1.train`` that reduce gradients over the ranks.

Those of Keras are in ``horovod._keras``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from horovod.common.basics import warn_once
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.collectives import allreduce
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper, _operations
from horovod.tensorflow.mpi_ops import Adasum, Average
from horovod.tensorflow.reduction import Reduction, check_predivide, resolve_groups
from horovod.tensorflow.util import is_active


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):
    """Reduces the gradients that the given optimizer computes."""

    def __init__(
        self,
        optimizer: tf.compat.v1.train.Optimizer,
        name: str,
        use_locking: bool,
        reduction: Reduction,
        backward_passes_per_step: int,
        average_aggregated_gradients: bool,
    ) -> None:
        super().__init__(use_locking, name)
        self._optimizer = optimizer
        self._reduction = reduction
        self._agg_helper: LocalGradientAggregationHelper | None = None
        if backward_passes_per_step > 1:
            if tf.executing_eagerly():
                raise ValueError(
                    "backward_passes_per_step > 1 is not yet supported for _LegacyOptimizer with eager execution."
                )
            self._agg_helper = LocalGradientAggregationHelper(
                backward_passes_per_step,
                reduction,
                sparse_as_dense=reduction.sparse_as_dense,
                average_aggregated_gradients=average_aggregated_gradients,
            )

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable unreduced."""
        self._reduction.add_local(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute gradients as the given optimizer, and reduce them over the ranks."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        reduce = self._reduction if self._agg_helper is None else self._agg_helper.compute_gradients
        return list(zip(reduce(gradients, variables), variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: str | None = None
    ) -> Any:
        """Apply gradients as the given optimizer. While they are aggregated, only count the step."""
        pairs = list(grads_and_vars)
        if self._agg_helper is None or self._agg_helper.counter is None:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        _make_slots(self._optimizer, [variable for gradient, variable in pairs if gradient is not None])

        def apply() -> Any:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)

        def count() -> Any:
            return tf.no_op() if global_step is None else tf.compat.v1.assign_add(global_step, 1)

        # The sums are final once the gradients are computed.
        with tf.control_dependencies(_operations([gradient for gradient, _ in pairs])):
            return tf.group(self._agg_helper.apply_gradients(apply, count))

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Return a slot of the given optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Return the slot names of the given optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Return the variables of the given optimizer."""
        return self._optimizer.variables(*args, **kwargs)


def _make_slots(optimizer: tf.compat.v1.train.Optimizer, variables: list[Any]) -> None:
    """Create the optimizer's variables outside of branches, in which they must not be created."""
    with tf.init_scope():
        optimizer._create_slots(variables)
    optimizer._prepare()


class _DistributedAdasumOptimizer(tf.compat.v1.train.Optimizer):
    """Combines by Adasum the changes that each rank's optimizer would make in a step."""

    def __init__(
        self,
        optimizer: tf.compat.v1.train.Optimizer,
        name: str,
        use_locking: bool,
        compression: Any,
        devices: dict[str, str],
        backward_passes_per_step: int,
    ) -> None:
        super().__init__(use_locking, name)
        self._optimizer = optimizer
        self._compression = compression
        self._devices: dict[str, Any] = devices
        self._passes = backward_passes_per_step
        self._steps: Any = None

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return the given optimizer's gradients, which are not reduced."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: str | None = None
    ) -> Any:
        """Apply gradients as the given optimizer. Every n-th call combines the changes of all ranks with Adasum."""
        pairs = list(grads_and_vars)
        variables = [variable for gradient, variable in pairs if gradient is not None]
        if not is_active(global_process_set):
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        with tf.init_scope():
            starts = [self._zeros_slot(variable, "delta_start", self._name) for variable in variables]
            if self._steps is None:
                self._steps = tf.compat.v1.Variable(0, trainable=False, name="adasum_steps", use_resource=True)
        is_first = tf.equal(self._steps % self._passes, 0)
        gradients = [gradient for gradient, _ in pairs if gradient is not None]
        with tf.control_dependencies(_operations(gradients)):
            kept = [
                start.assign(tf.where(is_first, variable, start))
                for start, variable in zip(starts, variables, strict=True)
            ]
        with tf.control_dependencies(_operations(kept)):
            applied = self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        with tf.control_dependencies(_operations([applied])):
            count = self._steps.assign_add(1)

        def combine() -> tf.Tensor:
            deltas = [variable - start for start, variable in zip(starts, variables, strict=True)]
            combined = [allreduce(delta, op=Adasum, compression=self._compression, **self._devices) for delta in deltas]
            assigned = [
                variable.assign(start + delta)
                for variable, start, delta in zip(variables, starts, combined, strict=True)
            ]
            with tf.control_dependencies(_operations(assigned)):
                return tf.constant(True)

        with tf.control_dependencies(_operations([count])):
            done = tf.cond(tf.equal(count % self._passes, 0), combine, lambda: tf.constant(True))
        return None if tf.executing_eagerly() else tf.group(done)

    def get_slot(self, var: Any, name: str) -> Any:
        """Return a slot of the given optimizer, or this optimizer's slot ``delta_start``."""
        own = super().get_slot(var, name)
        return self._optimizer.get_slot(var, name) if own is None else own

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Return the slot names of the given optimizer and ``delta_start``."""
        return self._optimizer.get_slot_names(*args, **kwargs) + super().get_slot_names()

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Return the variables of the given optimizer."""
        return self._optimizer.variables(*args, **kwargs)


def DistributedOptimizer(  # noqa: N802 - the documented name, of what scripts take for a class
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer reduce gradients over the ranks before it applies them.

    Args:
        optimizer: A ``tf.compat.v1.train.Optimizer``, or an optimizer of Keras 3 or tf_keras.
        name: Name of the optimizer; by default ``Distributed`` and the class's name.
        use_locking: Whether an optimizer of TensorFlow 1 locks variables.
        device_dense: Device on which dense tensors are reduced; by default TensorFlow chooses.
        device_sparse: Device on which ``tf.IndexedSlices`` are gathered; by default TensorFlow chooses.
        compression: Type in which gradients travel, a member of ``Compression``.
        sparse_as_dense: Whether ``tf.IndexedSlices`` become dense before they are reduced.
        backward_passes_per_step: Number of gradients that each rank sums before they are reduced and applied.
        op: ``Average`` or ``Sum``. For an optimizer of TensorFlow 1 also ``Adasum``, of the differences that its steps
            make.
        gradient_predivide_factor: With ``Average``: gradients are divided by it before the sum, and by the rest after
            it.
        average_aggregated_gradients: Whether these sums are divided by their number of gradients.
        num_groups: Deprecated: use ``groups``.
        groups: Number of groups of gradients that are reduced together, or lists of variables that are.
        process_set: The ranks that take part.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.

    Returns:
        The distributed optimizer.

    Raises:
        ValueError: An argument is not acceptable.
        NotImplementedError: ``op`` is ``Adasum`` and the process set is not that of all ranks.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01 * hvd.size()))
    """
    groups = resolve_groups(num_groups, groups)
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if op == Adasum:
            raise ValueError("op == Adasum is not supported yet with Keras")
        from horovod._keras import create_distributed_optimizer

        return create_distributed_optimizer(
            None,
            optimizer,
            name=name,
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            op=op,
            groups=groups,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
    name = name or f"Distributed{type(optimizer).__name__}"
    if op == Adasum:
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        if average_aggregated_gradients:
            raise ValueError("Adasum does not support average_aggregated_gradients == True")
        check_predivide(gradient_predivide_factor, op)
        for argument, is_given in (
            ("groups", groups is not None),
            ("sparse_as_dense", sparse_as_dense),
            ("scale_local_gradients", not scale_local_gradients),
        ):
            if is_given:
                warn_once(f"`{argument}` has no effect with op=Adasum, which combines the updates of whole variables")
        devices = {"device_dense": device_dense, "device_sparse": device_sparse}
        return _DistributedAdasumOptimizer(optimizer, name, use_locking, compression, devices, backward_passes_per_step)
    reduction = Reduction(
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        scope=name,
    )
    return _DistributedOptimizer(
        optimizer, name, use_locking, reduction, backward_passes_per_step, average_aggregated_gradients
    )
