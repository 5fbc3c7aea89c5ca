"""Horovod's operations of TensorFlow.

Ranks submit them in any order, and the core matches them by name: that of the graph node, or, in eager mode, the
caller's name or the name of the operation. The latter suffices there, because eager calls block.

- HTF-1: operations are stateful, so that TensorFlow does not drop, merge or constant-fold them. In a ``tf.function``,
  it would also run stateful operations one after the other, and gradients could not be reduced together. :func:`_run`
  exempts them from this order.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from smdistributed import _core
from smdistributed._common import replicas, shims

# Before `import tensorflow`: if TensorFlow is not installed, this raises an ImportError that says how to install it.
MPI_LIB = shims.load_tensorflow()

import tensorflow as tf  # noqa: E402

from horovod.common import basics  # noqa: E402
from horovod.common.process_sets import ProcessSet, global_process_set  # noqa: E402
from horovod.common.session import (  # noqa: E402, F401
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    _basics,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    handle_average_backwards_compatibility,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from horovod.common.util import (  # noqa: E402, F401
    check_installed_version,
    gpu_available,
    num_rank_is_power_2,
)

_REDUCTIONS = {Average: "Average", Sum: "Sum", Adasum: "Adasum", Min: "Min", Max: "Max", Product: "Product"}


def _load_library(name: str) -> Any:
    """Load the operations from the library of any name."""
    return MPI_LIB


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two, as ``num_rank_is_power_2``.

    Args:
        num_rank: The number.

    Returns:
        ``True`` if a number of ranks is a power of two.
    """
    return num_rank_is_power_2(num_rank)


def _normalize_name(name: str) -> str:
    """Return a name that is allowed for a node."""
    return re.sub("[^a-zA-Z0-9_]", "_", name)


def _check_has_gpu() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))


def _name_of(tensor: Any) -> str:
    # Tensors in eager mode have no names.
    return _normalize_name(tensor.name) if not tf.executing_eagerly() else ""


def _number(process_set: ProcessSet) -> int:
    number = process_set.process_set_id
    is_known = number == 0 or not is_initialized() or number in _basics._get_process_set_ids_and_ranks()
    if number is None or not is_known:
        raise ValueError(f"{process_set} does not exist, or has not been registered: call `add_process_set` first")
    return number


def _run(kind: str, call: Callable[..., Any], tensors: Sequence[Any], name: str | None, /, **arguments: Any) -> Any:
    """Call an operation of the library under its name (HTF-1)."""
    if tf.executing_eagerly():
        return call(name=name, tensor_name=name or kind, **arguments)
    if name is None:
        names = dict.fromkeys([_name_of(tensors[0]), _name_of(tensors[-1])]) if tensors else {}
        name = "_".join([kind, *names])
    graph = tf.compat.v1.get_default_graph()
    order = getattr(graph, "experimental_acd_manager", None)
    result = call(name=name, **arguments)
    if order is not None:
        first = result[0] if isinstance(result, (list, tuple)) else result
        order.run_independently(first if isinstance(first, tf.Operation) else first.op)
    return result


def _check_types(tensors: Sequence[Any], op: int) -> None:
    if op not in _REDUCTIONS:
        raise ValueError(f"{op!r} is not a reduction: expected Average, Sum, Adasum, Min, Max or Product")
    for tensor in tensors:
        if tensor.dtype.base_dtype == tf.bool:
            raise ValueError(f"tensor type {tensor.dtype.name} is not supported in reductions")


def _check_reduction(tensors: Sequence[Any], op: int, process_set: ProcessSet) -> None:
    _check_types(tensors, op)
    if op == Adasum:
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        if is_initialized() and not num_rank_is_power_2(size()):
            raise NotImplementedError(
                f"Running Adasum with non-power of 2 ranks is not supported yet: there are {size()}"
            )


def _reduce(
    kind: str,
    call: Callable[..., Any],
    tensors: Sequence[tf.Tensor],
    name: str | None,
    op: int,
    factors: tuple[float, float],
    /,
    **arguments: Any,
) -> list[tf.Tensor]:
    """Call a reduction.

    Floating-point tensors are scaled in their own type, wherever they are, and the core only compares the factors:
    those of a node are float32. Scaled integers and Adasum run on the host, and TensorFlow copies their tensors.
    """
    is_plain = factors == (1.0, 1.0)
    is_scaled = not is_plain and all(tensor.dtype.base_dtype.is_floating for tensor in tensors)
    sent = [_times(tensor, factors[0]) for tensor in tensors] if is_scaled else list(tensors)
    arguments |= {"tensors": sent} if "num_tensors" in arguments else {"tensor": sent[0]}
    arguments |= {
        "reduce_op": op,
        "prescale_factor": factors[0],
        "postscale_factor": factors[1],
        "is_scaled": is_scaled,
    }
    on_host = op == Adasum or not (is_scaled or is_plain)
    if on_host:
        _note_host_memory("Adasum" if op == Adasum else "a scaled reduction of integers", tensors)
    with tf.device("/CPU:0") if on_host else contextlib.nullcontext():
        result = _run(kind, call, tensors, name, **arguments)
    outputs = list(result) if "num_tensors" in arguments else [result]
    return [_times(output, factors[1]) for output in outputs] if is_scaled else outputs


def _note_host_memory(what: str, tensors: Sequence[tf.Tensor]) -> None:
    """Count and report an operation that copies tensors from a GPU to host memory and back.

    A function is counted when it is traced. The devices of its tensors are then open, unless the script named them.
    TensorFlow keeps tensors of type int32 in host memory.
    """
    devices = [tensor.device or "" for tensor in tensors if tensor.dtype.base_dtype != tf.int32]
    if tf.executing_eagerly():
        is_on_gpu = any("GPU" in device for device in devices)
    else:
        is_on_gpu = any("CPU" not in device for device in devices) and bool(tf.config.get_visible_devices("GPU"))
    if is_on_gpu:
        _core.note_fallback("through_host_memory")
        basics.warn_once(
            f"{what} of tensors on a GPU runs on copies in host memory, because the core runs it only there"
        )


def _times(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """Multiply a tensor; half types are scaled in float32, as in the core."""
    if factor == 1.0:
        return tensor
    dtype = tensor.dtype.base_dtype
    if dtype.size < 4:
        return tf.cast(tf.cast(tensor, tf.float32) * factor, dtype)
    return tensor * tf.constant(factor, dtype)


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Reduce a dense tensor as :func:`horovod.tensorflow.allreduce` does, with another default of `op`."""
    tensor = tf.convert_to_tensor(tensor)
    _check_reduction([tensor], op, process_set)
    options = {"ignore_name_scope": ignore_name_scope, "process_set_id": _number(process_set)}
    factors = prescale_factor, postscale_factor
    return _reduce("HorovodAllreduce", MPI_LIB.horovod_allreduce, [tensor], name, op, factors, **options)[0]


def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Reduce several dense tensors in one collective."""
    if not tensors:
        return []
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    _check_reduction(tensors, op, process_set)
    options = {
        "ignore_name_scope": ignore_name_scope,
        "process_set_id": _number(process_set),
        "num_tensors": len(tensors),
    }
    factors = prescale_factor, postscale_factor
    kind = "HorovodGroupedAllreduce"
    return _reduce(kind, MPI_LIB.horovod_grouped_allreduce, tensors, name, op, factors, **options)


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate the rows of all ranks; differentiable.

    Args:
        tensor: Input of shape ``[rows, ...]``. Ranks may have different numbers of rows.
        name: Matches the ranks' calls: the same on all ranks. In a graph it follows from the tensor's name by default.
        ignore_name_scope: Whether only what follows the last slash of the node's name counts.
        process_set: The ranks that take part.

    Returns:
        The rows of rank 0, then those of rank 1, and so on.

    Raises:
        ValueError: An argument is not acceptable.
        tf.errors.InvalidArgumentError: The name is in use, or this rank is not in the process set.
        tf.errors.FailedPreconditionError: Ranks disagree.
        tf.errors.UnknownError: A rank has ended.
    """
    tensor = tf.convert_to_tensor(tensor)
    options = {"ignore_name_scope": ignore_name_scope, "process_set_id": _number(process_set)}
    return _run("HorovodAllgather", MPI_LIB.horovod_allgather, [tensor], name, tensor=tensor, **options)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Concatenate the rows of several tensors as :func:`allgather`: all run together or none does.

    Args:
        tensors: Inputs.
        name: Matches the ranks' calls: the same on all ranks. In a graph it follows from the tensor's name by default.
        ignore_name_scope: Whether only what follows the last slash of the node's name counts.
        process_set: The ranks that take part.

    Returns:
        One output for each tensor.

    Raises:
        ValueError: An argument is not acceptable.
        tf.errors.InvalidArgumentError: The name is in use, or this rank is not in the process set.
        tf.errors.FailedPreconditionError: Ranks disagree.
        tf.errors.UnknownError: A rank has ended.
    """
    if not tensors:
        return list(tensors)
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    options = {
        "ignore_name_scope": ignore_name_scope,
        "process_set_id": _number(process_set),
        "num_tensors": len(tensors),
    }
    kind = "HorovodGroupedAllgather"
    return list(_run(kind, MPI_LIB.horovod_grouped_allgather, tensors, name, tensors=tensors, **options))


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return the root's tensor on every rank; differentiable.

    Args:
        tensor: Input; same shape and type on all ranks.
        root_rank: Rank in the world whose values are sent.
        name: Matches the ranks' calls: the same on all ranks. In a graph it follows from the tensor's name by default.
        ignore_name_scope: Whether only what follows the last slash of the node's name counts.
        process_set: The ranks that take part.

    Returns:
        A tensor with the root's values.

    Raises:
        ValueError: An argument is not acceptable.
        tf.errors.InvalidArgumentError: The name is in use, or this rank is not in the process set.
        tf.errors.FailedPreconditionError: Ranks disagree.
        tf.errors.UnknownError: A rank has ended.
    """
    tensor = tf.convert_to_tensor(tensor)
    options = {
        "root_rank": int(root_rank),
        "ignore_name_scope": ignore_name_scope,
        "process_set_id": _number(process_set),
    }
    return _run("HorovodBroadcast", MPI_LIB.horovod_broadcast, [tensor], name, tensor=tensor, **options)


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Broadcast the root's values to variables, in place.

    Args:
        variables: Resource variables, or reference variables of TensorFlow 1; not both.
        root_rank: Rank in the world whose values are sent.
        name: Matches the ranks' calls: the same on all ranks. In a graph it follows from the tensor's name by default.
        process_set: The ranks that take part.

    Returns:
        The new values of the variables.

    Raises:
        ValueError: There are variables of both kinds.
    """
    replicas.note_broadcast()
    variables = list(variables)
    if not variables:
        return []
    kinds = {hasattr(variable, "handle") for variable in variables}
    if len(kinds) > 1:
        raise ValueError("all variables passed to broadcast_() should be of the same kind, resource or reference")
    options = {
        "root_rank": int(root_rank),
        "process_set_id": _number(process_set),
    }
    if kinds == {True}:
        handles = [variable.handle for variable in variables]
        kind = "HorovodBroadcastInplaceResource"
        call = MPI_LIB.horovod_broadcast_inplace_resource
        done = _in_place(kind, call, variables, name, resources=handles, **options)
        with tf.control_dependencies([] if done is None else [done]):
            return [variable.read_value() for variable in variables]
    references = [variable._ref() for variable in variables]
    kind = "HorovodBroadcastInplace"
    by_type: dict[tf.DType, list[int]] = {}
    for index, reference in enumerate(references):
        by_type.setdefault(reference.dtype.base_dtype, []).append(index)
    values: list[Any] = [None] * len(variables)
    for dtype, places in by_type.items():
        together = [references[index] for index in places]
        full = f"{name}_{dtype.name}" if name and len(by_type) > 1 else name
        call, named = MPI_LIB.horovod_broadcast_inplace, [variables[index] for index in places]
        outputs = _in_place(kind, call, named, full, tensors=together, **options)
        for index, output in zip(places, outputs, strict=True):
            values[index] = tf.identity(output)
    return values


def _in_place(kind: str, call: Callable[..., Any], variables: list[Any], name: str | None, /, **arguments: Any) -> Any:
    if tf.executing_eagerly():
        return call(name=name, tensor_name=name or kind, **arguments)
    # Uses the variables' names, because in a function their handles may be eager tensors, which have no names.
    names = dict.fromkeys([_normalize_name(variables[0].name), _normalize_name(variables[-1].name)])
    # TensorFlow orders the operation relative to other uses of the variables.
    return call(name=name or "_".join([kind, *names]), **arguments)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each rank, and receive rows from each; differentiable.

    Args:
        tensor: Rows, in the order of the ranks that they are for.
        splits: Rows for each rank; ``None`` means equal parts.
        name: Matches the ranks' calls: the same on all ranks. In a graph it follows from the tensor's name by default.
        ignore_name_scope: Whether only what follows the last slash of the node's name counts.
        process_set: The ranks that take part.

    Returns:
        The received rows in the order of ranks. With ``splits``, also how many rows came from each rank.

    Raises:
        ValueError: An argument is not acceptable.
        tf.errors.InvalidArgumentError: The name is in use, or this rank is not in the process set.
        tf.errors.FailedPreconditionError: Ranks disagree.
        tf.errors.UnknownError: A rank has ended.
    """
    tensor = tf.convert_to_tensor(tensor)
    if isinstance(splits, (tf.Tensor, tf.Variable)) and splits.dtype.base_dtype != tf.int32:
        text = f"alltoall expects splits to be a 32-bit integer tensor, not one of {splits.dtype.name}"
        raise tf.errors.InvalidArgumentError(None, None, text)
    given = tf.constant([], tf.int32) if splits is None else tf.convert_to_tensor(splits, tf.int32)
    options = {"ignore_name_scope": ignore_name_scope, "process_set_id": _number(process_set)}
    call = MPI_LIB.horovod_alltoall
    output, received = _run("HorovodAlltoall", call, [tensor], name, tensor=tensor, splits=given, **options)
    return output if splits is None else (output, received)


def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce and scatter as :func:`horovod.tensorflow.reducescatter` does, with another default of `op`."""
    tensor = tf.convert_to_tensor(tensor)
    # The core rejects reductions that reduce-scatters do not support.
    _check_types([tensor], op)
    options = {"ignore_name_scope": ignore_name_scope, "process_set_id": _number(process_set)}
    factors = prescale_factor, postscale_factor
    return _reduce("HorovodReducescatter", MPI_LIB.horovod_reducescatter, [tensor], name, op, factors, **options)[0]


def _grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """Reduce and scatter several tensors in one collective."""
    if not tensors:
        return []
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    _check_types(tensors, op)
    options = {
        "ignore_name_scope": ignore_name_scope,
        "process_set_id": _number(process_set),
        "num_tensors": len(tensors),
    }
    factors = prescale_factor, postscale_factor
    kind = "HorovodGroupedReducescatter"
    return _reduce(kind, MPI_LIB.horovod_grouped_reducescatter, tensors, name, op, factors, **options)


def _compare_step(
    numbers: Sequence[int], names: Sequence[str], ignore_name_scope: bool, process_set: ProcessSet
) -> tf.Operation | None:
    """Fail on all ranks unless they are about to reduce gradients with the same numbers.

    Returns:
        In a graph, the operation that compares; else ``None``.
    """
    return _run(
        "HorovodStep",
        MPI_LIB.horovod_step,
        [],
        None,
        numbers=list(numbers),
        names="\n".join(names),
        ignore_name_scope=ignore_name_scope,
        process_set_id=_number(process_set),
    )


def join() -> tf.Tensor:
    """Declare that this rank has no more data, and wait until all ranks have declared it.

    Meanwhile the rank contributes neutral elements to the others' all-reduces. Their other collectives fail.

    Returns:
        The rank that joined last.
    """
    return MPI_LIB.horovod_join(name="join.noname")


def barrier(process_set: ProcessSet = global_process_set) -> tf.Operation | None:
    """Wait until every member of a process set has called it.

    Args:
        process_set: The ranks that take part.

    Returns:
        In a graph, the operation that waits; else ``None``.
    """
    return MPI_LIB.horovod_barrier(process_set_id=_number(process_set))


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return an operation that reads :func:`rank` when it runs.

    Args:
        name: Name of the node.

    Returns:
        A scalar of int32.
    """
    return MPI_LIB.horovod_rank(name=name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return an operation that reads :func:`local_rank` when it runs.

    Args:
        name: Name of the node.

    Returns:
        A scalar of int32.
    """
    return MPI_LIB.horovod_local_rank(name=name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return an operation that reads the size of a process set when it runs.

    Args:
        process_set_id: Number of the process set; 0 is the world.
        name: Name of the node.

    Returns:
        A scalar of int32.
    """
    return MPI_LIB.horovod_size(process_set_id=process_set_id, name=name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return an operation that reads :func:`local_size` when it runs.

    Args:
        name: Name of the node.

    Returns:
        A scalar of int32.
    """
    return MPI_LIB.horovod_local_size(name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return an operation that checks whether this rank is in a process set when it runs.

    Args:
        process_set_id: Number of the process set.
        name: Name of the node.

    Returns:
        A scalar of int32: 1 if it is, else 0.
    """
    return MPI_LIB.horovod_process_set_included(process_set_id=process_set_id, name=name)
