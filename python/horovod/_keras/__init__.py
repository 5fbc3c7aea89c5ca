"""Code that the Keras modules on TensorFlow share.

``horovod.keras`` serves the ``keras`` package, ``horovod.tensorflow.keras`` the package that ``tf.keras`` is. A
distributed optimizer is a view of the given one (``smdistributed/dataparallel/tensorflow/optimizer.py``). Gradients are
reduced once a step: a method does not reduce gradients that another method has reduced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from horovod.common.keras_loading import objects_by_name
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow import collectives, functions, mpi_ops
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.mpi_ops import Average, Sum
from horovod.tensorflow.reduction import Reduction, are_reduced, layers_of, mark_reduced, resolve_groups
from horovod.tensorflow.util import is_active
from smdistributed.dataparallel.tensorflow import compat
from smdistributed.dataparallel.tensorflow import optimizer as views
from smdistributed.dataparallel.tensorflow.keras_variable import underlying

CallableList = compat.CallableList

GradientsAndVariables = Iterable[tuple[Any, Any]]

# The helpers of distributed optimizers; not stored in an attribute, which Keras would track and save.
_helpers: weakref.WeakKeyDictionary[Any, LocalGradientAggregationHelper] = weakref.WeakKeyDictionary()


class _Options:
    """The options of a distributed optimizer."""

    def __init__(
        self, reduction: Reduction, passes: int, average_aggregated_gradients: bool, name: str | None = None
    ) -> None:
        self.reduction = reduction
        self.passes = passes
        self.average_aggregated_gradients = average_aggregated_gradients
        self.name = name

    def __deepcopy__(self, memo: dict[int, Any]) -> _Options:
        # Copies of an optimizer share variables and process sets.
        return self


class _Methods(views.Methods):
    """Reduction by name, local gradients and aggregation, for every class of optimizers."""

    _smd_options: _Options

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _distributed, (views.original_optimizer(self), self._smd_options)

    def _smd_all(self, condition: tf.Tensor) -> tf.Tensor:
        """Return whether the condition holds on all ranks that reduce gradients with this one."""
        process_set = self._smd_options.reduction.process_set
        if not is_active(process_set):
            return condition
        return collectives.allreduce(tf.cast(condition, tf.int32), op=mpi_ops.Min, process_set=process_set) > 0

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable unreduced."""
        self._smd_options.reduction.add_local(var)

    @property
    def _agg_helper(self) -> LocalGradientAggregationHelper | None:
        options = self._smd_options
        if options.passes == 1:
            return None
        if self not in _helpers:
            _helpers[self] = LocalGradientAggregationHelper(
                options.passes,
                options.reduction,
                sparse_as_dense=options.reduction.sparse_as_dense,
                average_aggregated_gradients=options.average_aggregated_gradients,
            )
        return _helpers[self]

    def _smd_reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return self._allreduce(gradients, variables)

    def _allreduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients, unless they are reduced already."""
        variables = [underlying(variable) for variable in variables]
        gradients = [
            gradient
            if gradient is None or isinstance(gradient, (tf.Tensor, tf.IndexedSlices))
            else tf.convert_to_tensor(gradient, variable.dtype)
            for gradient, variable in zip(grads, variables, strict=True)
        ]
        if are_reduced(gradients):
            return gradients
        helper = self._agg_helper
        if helper is None:
            return self._smd_options.reduction(gradients, variables)
        reduced = helper.compute_gradients(gradients, variables)
        mark_reduced(reduced)
        return reduced

    def _mark_pairs_reduced(self, grads_and_vars: GradientsAndVariables) -> list[tuple[Any, Any]]:
        """Return gradients that the caller has reduced itself."""
        pairs = list(grads_and_vars)
        tensors = [
            gradient if gradient is None or isinstance(gradient, tf.IndexedSlices) else tf.identity(gradient)
            for gradient, _ in pairs
        ]
        mark_reduced(tensors)
        return [(gradient, variable) for gradient, (_, variable) in zip(tensors, pairs, strict=True)]

    def _step(self, apply: Callable[[], Any], variables: Sequence[Any]) -> Any:
        """Apply the gradients, or count the step while gradients are aggregated."""
        helper = self._agg_helper
        if helper is None or helper.counter is None:
            return apply()
        with tf.init_scope():
            # Variables must not be created in a branch.
            self._prepare(variables)
        iterations = underlying(self.iterations)
        helper.apply_gradients(apply, lambda: iterations.assign_add(1, read_value=False))
        return self.iterations

    def _prepare(self, variables: Sequence[Any]) -> None:
        raise NotImplementedError

    def _aggregate_gradients(self, grads_and_vars: GradientsAndVariables) -> list[tuple[Any, Any]]:
        """Return the reduced gradients with their variables."""
        return self._smd_reduced(grads_and_vars)

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """The gradients of all ranks, in a graph."""
        return self._allreduce(super().get_gradients(loss, params), tf.nest.flatten(params))


class _Keras3(_Methods, views.Keras3):
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if self._agg_helper is None:
            return super().apply(grads, trainable_variables)
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if len(grads) == len(variables):
            grads = self._allreduce(grads, variables)
        # The gradients are marked as reduced until they are applied.
        return self._step(lambda: super(_Keras3, self).apply(grads, trainable_variables), variables)

    def apply_gradients(
        self,
        grads_and_vars: GradientsAndVariables,
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
        skip_gradients_aggregation: bool = False,
    ) -> Any:
        if skip_gradients_aggregation or not experimental_aggregate_gradients:
            grads_and_vars = self._mark_pairs_reduced(grads_and_vars)
        return super().apply_gradients(grads_and_vars)

    def _prepare(self, variables: Sequence[Any]) -> None:
        if not self.built:
            self.build(variables)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: tf.GradientTape | None = None
    ) -> list[tuple[Any, Any]]:
        """Return the reduced gradients with their variables."""
        if callable(loss):
            tape = tape or tf.GradientTape()
            with tape:
                if not callable(var_list):
                    tape.watch([underlying(variable) for variable in tf.nest.flatten(var_list)])
                loss = loss()
        variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)
        if tape is None:
            raise ValueError("`loss` is a tensor, but `tape` is None: pass the tf.GradientTape that recorded it")
        gradients = tape.gradient(loss, [underlying(variable) for variable in variables], grad_loss)
        return list(zip(self._allreduce(gradients, variables), variables, strict=True))

    def compute_gradients(self, loss: Any, var_list: Any, tape: tf.GradientTape | None = None) -> list[tuple[Any, Any]]:
        """As :meth:`_compute_gradients`."""
        return self._compute_gradients(loss, var_list, tape=tape)


class _Skipping(_Methods):
    """Methods for tf_keras, where an argument says whether the caller has reduced the gradients."""

    def _applied(self, grads_and_vars: GradientsAndVariables, is_reduced: bool, **arguments: Any) -> Any:
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        if not is_reduced:
            gradients = self._allreduce([gradient for gradient, _ in pairs], variables)
            pairs = list(zip(gradients, variables, strict=True))
        return self._step(lambda: super(_Methods, self).apply_gradients(pairs, **arguments), variables)


class _TfKeras(_Skipping, views.TfKeras):
    def compute_gradients(self, loss: Any, var_list: Any, tape: tf.GradientTape | None = None) -> list[tuple[Any, Any]]:
        return self._smd_reduced(super().compute_gradients(loss, var_list, tape))

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: tf.GradientTape | None = None
    ) -> list[tuple[Any, Any]]:
        if grad_loss is not None:
            raise ValueError("`grad_loss` is not supported: optimizers of tf_keras have no such argument")
        return self.compute_gradients(loss, var_list, tape)

    def apply_gradients(
        self,
        grads_and_vars: GradientsAndVariables,
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        is_reduced = skip_gradients_aggregation or not experimental_aggregate_gradients
        return self._applied(grads_and_vars, is_reduced, name=name, skip_gradients_aggregation=True, **kwargs)

    def _prepare(self, variables: Sequence[Any]) -> None:
        self.build(variables)


class _TfKerasLossScale(_TfKeras):
    def _prepare(self, variables: Sequence[Any]) -> None:
        self.inner_optimizer.build(variables)


class _Legacy(_Skipping, views.Legacy):
    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: tf.GradientTape | None = None
    ) -> list[tuple[Any, Any]]:
        return self._smd_reduced(super()._compute_gradients(loss, var_list, grad_loss=grad_loss, tape=tape))

    def apply_gradients(
        self,
        grads_and_vars: GradientsAndVariables,
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        is_reduced = not experimental_aggregate_gradients
        return self._applied(grads_and_vars, is_reduced, name=name, experimental_aggregate_gradients=False)

    def _prepare(self, variables: Sequence[Any]) -> None:
        inner: Any = getattr(self, "inner_optimizer", self)
        inner._create_all_weights(variables)


_FAMILIES: dict[type, type] = {
    views.Keras3: _Keras3,
    views.TfKeras: _TfKeras,
    views.TfKerasLossScale: _TfKerasLossScale,
    views.Legacy: _Legacy,
    views.LegacyLossScale: _Legacy,
}


def _distributed(optimizer: Any, options: _Options) -> Any:
    family = _FAMILIES[views.family(optimizer)]
    return views.view(optimizer, family, options, module=__name__)


def create_distributed_optimizer(
    keras: Any,
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer reduce gradients over the ranks before it applies them.

    Args:
        keras: Ignored.
        optimizer: An optimizer of Keras 3 or tf_keras.
        name: Name of the optimizer; by default ``Distributed`` and the class's name.
        device_dense: Device on which dense gradients are reduced; by default TensorFlow chooses.
        device_sparse: Device on which ``tf.IndexedSlices`` are gathered; by default TensorFlow chooses.
        compression: Type in which gradients travel, a member of ``Compression``.
        sparse_as_dense: Whether ``tf.IndexedSlices`` become dense before they are reduced.
        gradient_predivide_factor: With ``Average``: gradients are divided by it before the sum, and by the rest after
            it.
        op: The reduction, ``Average`` by default.
        backward_passes_per_step: Number of gradients that each rank sums before they are reduced and applied.
        average_aggregated_gradients: Whether these sums are divided by their number of gradients.
        num_groups: Deprecated: use ``groups``.
        groups: Number of groups of gradients that are reduced together, or lists of variables that are.
        process_set: The ranks that take part.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.

    Returns:
        The distributed optimizer.
    """
    if op not in (Average, Sum):
        raise ValueError("op currently only supports Average and Sum")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if views.is_distributed(optimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already: its gradients would be reduced twice")
    name = name or f"Distributed{type(optimizer).__name__}"
    reduction = Reduction(
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=resolve_groups(num_groups, groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        scope=name,
    )
    result = _distributed(optimizer, _Options(reduction, backward_passes_per_step, average_aggregated_gradients))
    # Keras 3 stores it in the first attribute, tf_keras in the second.
    result.__dict__["_name" if "_name" in result.__dict__ else "name"] = name
    return result


def create_partial_distributed_optimizer(keras: Any, optimizer: Any, local_layers: Any = None, **options: Any) -> Any:
    """Make an optimizer reduce gradients, except those of some layers.

    Args:
        keras: Ignored.
        optimizer: The optimizer.
        local_layers: A Keras layer or a list of layers whose gradients are not reduced.
        **options: Arguments of :func:`create_distributed_optimizer`.

    Returns:
        The distributed optimizer.
    """
    layers = layers_of(local_layers)
    result = create_distributed_optimizer(keras, optimizer, **options)
    result._smd_options.reduction.add_layers(layers)
    return result


def _value(result: Any) -> Any:
    # In a graph of TensorFlow 1, the values of variables are returned.
    if tf.executing_eagerly() or tf.inside_function():
        return result
    session = tf.compat.v1.get_default_session() or tf.compat.v1.keras.backend.get_session()
    return session.run(result)


def allreduce(
    backend: Any,
    value: Any,
    name: str | None,
    average: bool | None,
    prescale_factor: float,
    postscale_factor: float,
    op: int | None,
    compression: Any,
) -> Any:
    """Reduce a value over the ranks.

    Args:
        backend: Ignored.
        value: A number, an array or a tensor; same shape and type on all ranks.
        name: Matches the ranks' calls: the same on all ranks.
        average: Deprecated: ``True`` means ``op=Average``, ``False`` ``op=Sum``.
        prescale_factor: Multiplied with each rank's values before the reduction.
        postscale_factor: Multiplied with the result.
        op: The reduction, ``Average`` by default.
        compression: Type in which the value travels, a member of ``Compression``.

    Returns:
        A tensor; in a graph of TensorFlow 1, an array.
    """
    return _value(
        collectives.allreduce(
            tf.convert_to_tensor(value),
            average=average,
            compression=compression,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            name=name,
        )
    )


def allgather(backend: Any, value: Any, name: str | None) -> Any:
    """Concatenate the rows of all ranks.

    Args:
        backend: Ignored.
        value: An array or a tensor.
        name: Matches the ranks' calls: the same on all ranks.

    Returns:
        A tensor; in a graph of TensorFlow 1, an array.
    """
    return _value(mpi_ops.allgather(tf.convert_to_tensor(value), name))


def broadcast(backend: Any, value: Any, root_rank: int, name: str | None) -> Any:
    """Return the root's value on every rank.

    Args:
        backend: Ignored.
        value: A number, an array or a tensor; same shape and type on all ranks.
        root_rank: Rank in the world whose values are sent.
        name: Matches the ranks' calls: the same on all ranks.

    Returns:
        A tensor; in a graph of TensorFlow 1, an array.
    """
    return _value(mpi_ops.broadcast(tf.convert_to_tensor(value), root_rank, name))


def reducescatter(backend: Any, value: Any, name: str | None, op: int) -> Any:
    """Reduce a value over the ranks, and give each rank a part of the rows.

    Args:
        backend: Ignored.
        value: A number, an array or a tensor; same shape and type on all ranks.
        name: Matches the ranks' calls: the same on all ranks.
        op: ``Average`` or ``Sum``.

    Returns:
        A tensor; in a graph of TensorFlow 1, an array.
    """
    return _value(collectives.reducescatter(tf.convert_to_tensor(value), op=op, name=name))


def broadcast_global_variables(backend: Any, root_rank: int) -> Any:
    """Broadcast the root's values to all global variables of a graph of TensorFlow 1.

    Args:
        backend: Ignored.
        root_rank: Rank in the world whose values are sent.

    Returns:
        The result of the session's run.

    Raises:
        RuntimeError: In eager mode.
    """
    operation = functions.broadcast_global_variables(root_rank)
    session = tf.compat.v1.get_default_session() or tf.compat.v1.keras.backend.get_session()
    return session.run(operation)


def load_model(
    keras: Any,
    wrap_optimizer: Callable[[Any], Any],
    optimizer_modules: Iterable[Any],
    filepath: Any,
    custom_optimizers: Sequence[type] | None,
    custom_objects: dict[str, Any] | None,
) -> Any:
    """Load a model, and make its optimizer distributed.

    Args:
        keras: The package that loads it.
        wrap_optimizer: Makes an optimizer distributed.
        optimizer_modules: Where optimizers are looked for by name.
        filepath: Path of the saved model.
        custom_optimizers: The script's own.
        custom_objects: Custom classes and functions by name; they take precedence.

    Returns:
        The model.
    """
    objects = objects_by_name(optimizer_modules, custom_optimizers, custom_objects)
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None and not views.is_distributed(model.optimizer):
        model.optimizer = wrap_optimizer(model.optimizer)
    return model
