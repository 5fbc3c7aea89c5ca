"""Optimizers that reduce gradients over the ranks before they apply them.

A distributed optimizer is a *view* of the given one: an object of a subclass with the same name that shares the given
one's ``__dict__``. Variables, hyperparameters, slots and what checkpoints track are therefore one and the same,
whatever of both is used, and a saved model carries the given optimizer's class and no trace of this library.

Each family has one method that every way of training calls, and reduces there (OPT-1): ``apply`` in Keras 3 (its
update, if gradients accumulate), the aggregation in ``apply_gradients`` in tf_keras, ``compute_gradients`` in TF1. So
a gradient is reduced once, however it was computed, and clipping, weight decay and moving averages see reduced
gradients.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from smdistributed._common import keras3
from smdistributed._common.errors import UnsupportedError
from smdistributed._common.views import original_optimizer as original_optimizer
from smdistributed._common.views import view as view
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.tensorflow.collectives import oob_allreduce
from smdistributed.dataparallel.tensorflow.compression import Compression
from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.dataparallel.tensorflow.reduction import check_options, reduce_gradients
from smdistributed.dataparallel.tensorflow.replicas import compare
from smdistributed.dataparallel.tensorflow.variables import BROADCAST

GradientsAndVariables = Iterable[tuple[Any, Any]]


def DistributedOptimizer(  # noqa: N802 - the documented name, of what scripts take for a class
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = True,
    op: ReduceOp | None = ReduceOp.AVERAGE,
    bucket_cap_mb: float | None = 25,
) -> Any:
    """Make an optimizer reduce gradients over the ranks before it applies them.

    Args:
        optimizer: An optimizer of Keras 3 or tf_keras (also a legacy one), or a ``tf.compat.v1.train.Optimizer``.
        name: Prefix of the operations in a graph; by default ``smdistributed.dataparallel`` and the class's name.
        use_locking: Whether a TF1 optimizer locks variables while it updates them.
        device_dense: Not supported.
        device_sparse: Not supported.
        compression: A member of ``Compression``.
        sparse_as_dense: Whether ``tf.IndexedSlices`` become dense first; otherwise the ranks' slices are gathered.
        op: ``AVERAGE``, which ``None`` means too, or ``SUM``.
        bucket_cap_mb: Most MiB of gradients that are reduced together.

    Returns:
        An optimizer of a subclass of the given one's class, which shares all state with it.

    Raises:
        NotImplementedError: A device is given.
        TypeError: ``optimizer`` is not an optimizer of these families.
        ValueError: ``op`` or ``bucket_cap_mb`` is none of those, or the optimizer reduces already.

    Examples:
        >>> optimizer = sdp.DistributedOptimizer(tf.keras.optimizers.SGD(0.01 * sdp.size()))
    """
    if device_dense or device_sparse:
        raise NotImplementedError("`device_dense` and `device_sparse` are not supported: leave them empty")
    check_options(op, bucket_cap_mb)
    if is_distributed(optimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already: its gradients would be reduced twice")
    methods = family(optimizer)
    if use_locking:
        if methods is TF1:
            optimizer._use_locking = True
        else:
            warnings.warn("`use_locking` is for tf.compat.v1.train optimizers and has no effect here", stacklevel=2)
    options = {
        "compression": compression,
        "op": op,
        "sparse_as_dense": sparse_as_dense,
        "bucket_cap_mb": bucket_cap_mb,
        "name": name or f"smdistributed.dataparallel{type(optimizer).__name__}",
    }
    return view(optimizer, methods, options)


def is_distributed(optimizer: Any) -> bool:
    """Return whether an optimizer, or the one inside it, reduces gradients over the ranks.

    Args:
        optimizer: Any optimizer.

    Returns:
        ``True`` for what :func:`DistributedOptimizer` returned, also inside a LossScaleOptimizer.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    return isinstance(optimizer, Methods) or (inner is not None and is_distributed(inner))


def _distributed(optimizer: Any, options: dict[str, Any]) -> Any:
    return DistributedOptimizer(optimizer, **options)


def family(optimizer: Any) -> type[Methods]:
    """Return the methods of a distributed optimizer of this family.

    The function imports no Keras: a family whose module is not imported has no optimizers.

    Args:
        optimizer: The optimizer.

    Returns:
        A subclass of :class:`Methods`.

    Raises:
        TypeError: ``optimizer`` is not an optimizer of these families.
        UnsupportedError: Keras runs on another backend than TensorFlow.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return TF1
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(optimizer, keras.optimizers.Optimizer):
        if keras.backend.backend() != "tensorflow":
            raise UnsupportedError(f"Keras runs on {keras.backend.backend()}: optimizers here need TensorFlow")
        keras3.install(is_distributed)
        return Keras3
    tf_keras = sys.modules.get("tf_keras")
    if tf_keras is not None:
        scales = isinstance(optimizer, tf_keras.mixed_precision.LossScaleOptimizer)
        if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
            return LegacyLossScale if scales else Legacy
        if isinstance(optimizer, tf_keras.optimizers.Optimizer):
            return TfKerasLossScale if scales else TfKeras
    raise TypeError(f"{optimizer!r} is not an optimizer: expected one of Keras, of tf_keras or of tf.compat.v1.train")


# The other base class provides the attributes; `Any` tells the type checker so.
_Base: Any = object


class Methods(_Base):
    """The methods of a distributed optimizer; they precede those of the given optimizer's class."""

    _smd_class: type
    _smd_options: Any

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy or pickle as the given optimizer, which is distributed again afterwards."""
        return _distributed, (original_optimizer(self), self._smd_options)

    def _smd_all(self, condition: tf.Tensor) -> tf.Tensor:
        """Return whether the condition holds on all ranks that reduce gradients."""
        return oob_allreduce(tf.cast(condition, tf.int32), op=ReduceOp.MIN) > 0

    def _smd_reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        variables = [underlying(variable) for variable in variables]
        compare(variables, None, BROADCAST)
        # Keras accepts arrays and lists too.
        tensors = [
            gradient
            if gradient is None or isinstance(gradient, (tf.Tensor, tf.IndexedSlices))
            else tf.convert_to_tensor(gradient, variable.dtype)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        return reduce_gradients(tensors, variables, **self._smd_options)

    def _smd_reduced(self, grads_and_vars: GradientsAndVariables) -> list[tuple[Any, Any]]:
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        reduced = self._smd_reduce([gradient for gradient, _ in pairs], variables)
        return list(zip(reduced, variables, strict=True))


class Keras3(keras3.Reducing, Methods):
    """Methods for optimizers of Keras 3."""


class TfKeras(Methods):
    """Methods for optimizers of tf_keras."""

    def aggregate_gradients(self, grads_and_vars: GradientsAndVariables) -> list[tuple[Any, Any]]:
        """Reduce gradients. A LossScaleOptimizer around this optimizer calls this method too.

        Args:
            grads_and_vars: Gradients and variables.

        Returns:
            The reduced gradients and the variables.
        """
        # If this optimizer is inside a LossScaleOptimizer, that one calls this method.
        return self._smd_reduced(super().aggregate_gradients(grads_and_vars))


class TfKerasLossScale(Methods):
    """Methods for a LossScaleOptimizer around an optimizer of tf_keras."""

    def apply_gradients(
        self,
        grads_and_vars: GradientsAndVariables,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Reduce gradients and apply them.

        Args:
            grads_and_vars: Gradients and variables.
            skip_gradients_aggregation: Whether the caller has reduced the gradients.
            experimental_aggregate_gradients: The opposite, under its old name.
            **kwargs: Passed on.

        Returns:
            The result of the optimizer.
        """
        # Scaled gradients are reduced: values that are not finite on one rank are then not finite on all, and all
        # skip.
        if experimental_aggregate_gradients and not skip_gradients_aggregation:
            grads_and_vars = self._smd_reduced(grads_and_vars)
        return super().apply_gradients(grads_and_vars, skip_gradients_aggregation=True, **kwargs)


class Legacy(Methods):
    """Methods for legacy optimizers of tf_keras."""

    def _aggregate_gradients(self, grads_and_vars: GradientsAndVariables) -> list[tuple[Any, Any]]:
        return self._smd_reduced(super()._aggregate_gradients(grads_and_vars))


class LegacyLossScale(Methods):
    """Methods for a LossScaleOptimizer around a legacy optimizer of tf_keras."""

    def apply_gradients(
        self,
        grads_and_vars: GradientsAndVariables,
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Reduce gradients and apply them.

        Args:
            grads_and_vars: Gradients and variables.
            name: Passed on.
            experimental_aggregate_gradients: Whether gradients are to be reduced.

        Returns:
            The result of the optimizer.
        """
        if experimental_aggregate_gradients:
            grads_and_vars = self._smd_reduced(grads_and_vars)
        return super().apply_gradients(grads_and_vars, name, experimental_aggregate_gradients=False)


class TF1(Methods):
    """Methods for optimizers of ``tf.compat.v1.train``."""

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute gradients and reduce them.

        Args:
            *args: Arguments of the optimizer's method.
            **kwargs: Keyword arguments of the optimizer's method.

        Returns:
            The reduced gradients and the variables.
        """
        return self._smd_reduced(super().compute_gradients(*args, **kwargs))
