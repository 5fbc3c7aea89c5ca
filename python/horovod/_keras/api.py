"""The functions of both Keras modules on TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from horovod import _keras as _impl
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.mpi_ops import Average


def DistributedOptimizer(  # noqa: N802 - the documented name, of what scripts take for a class
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer that reduces gradients over the ranks before it applies them.

    Args:
        optimizer: An optimizer of Keras 3 or tf_keras, also a legacy one.
        name: Name of the optimizer; by default ``Distributed`` and the class's name.
        device_dense: Where gradients are reduced; by default TensorFlow chooses.
        device_sparse: Where ``tf.IndexedSlices`` are gathered.
        compression: How gradients travel.
        sparse_as_dense: Whether ``tf.IndexedSlices`` become dense first.
        gradient_predivide_factor: For averages: gradients are divided by it before the sum, and by the rest after it.
        op: ``Average`` or ``Sum``.
        backward_passes_per_step: How many gradients each rank sums before they are reduced and applied.
        average_aggregated_gradients: Whether these sums are divided by their number.
        num_groups: Deprecated: `groups`.
        groups: How many groups of gradients are reduced together each; or lists of variables that are.
        process_set: The ranks that take part.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.

    Returns:
        An optimizer of a subclass with the same name, which shares all state with the given one.

    Raises:
        ValueError: The arguments are not acceptable.
    """
    return _impl.create_distributed_optimizer(
        None,
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        num_groups=num_groups,
        groups=groups,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def PartialDistributedOptimizer(  # noqa: N802 - the documented name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer reduce gradients as :func:`DistributedOptimizer`, except those of some layers.

    Args:
        optimizer: The optimizer.
        name: Name of the optimizer; by default ``Distributed`` and the class's name.
        device_dense: Device on which dense gradients are reduced; by default TensorFlow chooses.
        device_sparse: Device on which ``tf.IndexedSlices`` are gathered; by default TensorFlow chooses.
        compression: Type in which gradients travel, a member of ``Compression``.
        sparse_as_dense: Whether ``tf.IndexedSlices`` become dense before they are reduced.
        gradient_predivide_factor: With ``Average``: gradients are divided by it before the sum, and by the rest after
            it.
        op: ``Average`` or ``Sum``.
        backward_passes_per_step: Number of gradients that each rank sums before they are reduced and applied.
        average_aggregated_gradients: Whether these sums are divided by their number of gradients.
        groups: Number of groups of gradients that are reduced together, or lists of variables that are.
        process_set: The ranks that take part.
        local_layers: A Keras layer or a list of layers whose gradients are not reduced.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.

    Returns:
        The distributed optimizer.

    Raises:
        ValueError: An argument is not acceptable.
    """
    return _impl.create_partial_distributed_optimizer(
        None,
        optimizer,
        local_layers,
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


def broadcast_global_variables(root_rank: int) -> Any:
    """Broadcast the root's values to all global variables of a graph of TensorFlow 1.

    Args:
        root_rank: Rank in the world whose values are sent.

    Returns:
        The result of the session's run.

    Raises:
        RuntimeError: In eager mode.
    """
    return _impl.broadcast_global_variables(None, root_rank)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduce a value over the ranks.

    Args:
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
    return _impl.allreduce(None, value, name, average, prescale_factor, postscale_factor, op, compression)


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate the rows of all ranks.

    Args:
        value: An array or a tensor.
        name: Matches the ranks' calls: the same on all ranks.

    Returns:
        A tensor; in a graph of TensorFlow 1, an array.
    """
    return _impl.allgather(None, value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the root's value on every rank.

    Args:
        value: A number, an array or a tensor; same shape and type on all ranks.
        root_rank: Rank in the world whose values are sent.
        name: Matches the ranks' calls: the same on all ranks.

    Returns:
        A tensor; in a graph of TensorFlow 1, an array.
    """
    return _impl.broadcast(None, value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Reduce a value over the ranks, and give each rank a part of the rows.

    Args:
        value: A number, an array or a tensor; same shape and type on all ranks.
        name: Matches the ranks' calls: the same on all ranks.
        op: ``Average`` or ``Sum``.

    Returns:
        A tensor; in a graph of TensorFlow 1, an array.
    """
    return _impl.reducescatter(None, value, name, op)


def loader(keras: Any) -> Callable[..., Any]:
    """Return ``load_model`` for a Keras package.

    Args:
        keras: The package.

    Returns:
        The function.
    """

    @functools.wraps(_load_model)
    def load_model(
        filepath: Any,
        custom_optimizers: list[type] | None = None,
        custom_objects: dict[str, Any] | None = None,
        compression: Any = Compression.none,
        legacy_opts: bool = False,
    ) -> Any:
        return _load_model(keras, filepath, custom_optimizers, custom_objects, compression, legacy_opts)

    load_model.__name__ = load_model.__qualname__ = "load_model"
    del load_model.__wrapped__
    return load_model


def _load_model(
    keras: Any,
    filepath: Any,
    custom_optimizers: list[type] | None,
    custom_objects: dict[str, Any] | None,
    compression: Any,
    legacy_opts: bool,
) -> Any:
    """Load a model that was saved with its optimizer, distributed or not, and make the optimizer distributed.

    Args:
        keras: The package that loads it.
        filepath: The saved model; readable on every rank.
        custom_optimizers: Classes of the script's own optimizers.
        custom_objects: Classes and functions of the script, by name; a function of options stands for the class of what
            it makes.
        compression: Type in which gradients travel, a member of ``Compression``.
        legacy_opts: Whether names of optimizers mean tf_keras's legacy ones.

    Returns:
        The model; its optimizer has the saved state.
    """
    module = keras.optimizers
    if legacy_opts:
        module = getattr(module, "legacy", module)

    def wrap(optimizer: Any) -> Any:
        return DistributedOptimizer(optimizer, compression=compression)

    return _impl.load_model(keras, wrap, [module], filepath, custom_optimizers, custom_objects)
