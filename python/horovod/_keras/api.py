"""The functions of both Keras modules."""

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
        optimizer: Of Keras 3 or tf_keras, also a legacy one.
        name: Of the optimizer; by default ``Distributed`` and the class's name.
        device_dense: Where gradients are reduced; by default TensorFlow chooses.
        device_sparse: Where ``tf.IndexedSlices`` are gathered.
        compression: How gradients travel.
        sparse_as_dense: Whether ``tf.IndexedSlices`` become dense first.
        gradient_predivide_factor: Of an average: divide by it before, and by the rest after the sum.
        op: ``Average`` or ``Sum``.
        backward_passes_per_step: How many gradients each rank sums before they are reduced and applied.
        average_aggregated_gradients: Whether these sums are divided by their number.
        num_groups: Deprecated: `groups`.
        groups: How many groups of gradients are reduced together each; or lists of variables that are.
        process_set: Whose ranks.
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
    """As :func:`DistributedOptimizer`; gradients of some layers stay each rank's own.

    Args:
        local_layers: A Keras layer or a list of them.
        optimizer: The optimizer; for it and the others see :func:`DistributedOptimizer`.

    Raises:
        ValueError: The arguments are not acceptable.
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
    """Gives all global variables of a graph of TensorFlow 1 the values of `root_rank`.

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
    """Reduces a value over the ranks.

    Args:
        value: A number, an array or a tensor; same shape and type on all ranks.
        name: Matches ranks' calls.
        average: Deprecated: ``True`` means ``op=Average``, ``False`` ``op=Sum``.
        prescale_factor: Multiplied with each rank's values first.
        postscale_factor: Multiplied with the result.
        op: The reduction, ``Average`` by default.
        compression: How it travels.

    Returns:
        A tensor; in a graph of TensorFlow 1, an array.
    """
    return _impl.allreduce(None, value, name, average, prescale_factor, postscale_factor, op, compression)


def allgather(value: Any, name: str | None = None) -> Any:
    """The rows of all ranks, one rank's after the other's.

    Args:
        value: An array or a tensor.
        name: Matches ranks' calls.
    """
    return _impl.allgather(None, value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The value of `root_rank`.

    Args:
        value: A number, an array or a tensor; same shape and type on all ranks.
        root_rank: Whose.
        name: Matches ranks' calls.
    """
    return _impl.broadcast(None, value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Reduces over the ranks, and leaves each with its share of the rows.

    Args:
        value: An array or a tensor; same shape and type on all ranks.
        name: Matches ranks' calls.
        op: ``Average`` or ``Sum``.
    """
    return _impl.reducescatter(None, value, name, op)


def loader(keras: Any) -> Callable[..., Any]:
    """``load_model`` for a Keras package."""

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
    """Loads a model that was saved with its optimizer, distributed or not, and makes the optimizer distributed.

    Args:
        filepath: What was saved; readable on every rank.
        custom_optimizers: Classes of the script's own optimizers.
        custom_objects: Classes and functions of the script, by name; a function of options stands for the class of what it makes.
        compression: How gradients travel.
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
