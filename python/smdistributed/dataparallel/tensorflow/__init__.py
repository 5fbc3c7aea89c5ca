"""Data-parallel training of TensorFlow models: life cycle, ranks, and the collectives on tensors.

Every rank calls the same collectives in the same order; inside a ``tf.function`` TensorFlow keeps the order in which
the function's body names them. Tensors of other ranks have the same shape and type; where ranks disagree, each of them
gets an error that names the ranks and the difference. Eager calls raise the classes of
``smdistributed.dataparallel.exceptions``; inside a ``tf.function`` TensorFlow raises its own, with the same text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from smdistributed import _core
from smdistributed._common import errors, lifecycle, shims
from smdistributed._common.errors import UnsupportedError
from smdistributed.dataparallel.exceptions import CLASSES
from smdistributed.dataparallel.reduce_op import ReduceOp, core_name

# TensorFlow first, through the loader: it says what is missing.
_ops = shims.load_tensorflow()

import tensorflow as tf  # noqa: E402

from smdistributed.dataparallel.tensorflow.compression import (  # noqa: E402
    Compression,
    FP16Compression,
    NoneCompression,
)

__all__ = [
    "Compression",
    "FP16Compression",
    "NoneCompression",
    "ReduceOp",
    "allreduce",
    "broadcast",
    "broadcast_variables",
    "init",
    "local_rank",
    "local_size",
    "oob_allreduce",
    "rank",
    "shutdown",
    "size",
]

# Documented, and to come.
_LATER = frozenset(
    {
        "BroadcastGlobalVariablesHook",
        "DistributedGradientTape",
        "DistributedOptimizer",
        "broadcast_global_variables",
        "keras",
        "overlap",
    }
)


def __getattr__(name: str) -> NoReturn:
    if name in _LATER:
        raise UnsupportedError(f"`smdistributed.dataparallel.tensorflow.{name}` is not part of this release yet")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def init() -> None:
    """Joins the job that the launcher's environment describes; returns when all ranks have joined.

    Raises:
        SMDDPAlreadyInitializedError: It was called before.
    """
    with errors.translated(CLASSES):
        lifecycle.init()


def shutdown() -> None:
    """Leaves the job; does nothing if this process is in none. Happens by itself when the process ends."""
    with errors.translated(CLASSES):
        lifecycle.shutdown()


def rank() -> int:
    """Global rank, 0 to size - 1."""
    with errors.translated(CLASSES):
        return _core.rank()


def size() -> int:
    """Processes of the job."""
    with errors.translated(CLASSES):
        return _core.size()


def local_rank() -> int:
    """Rank on this host."""
    with errors.translated(CLASSES):
        return _core.local_rank()


def local_size() -> int:
    """Processes on this host."""
    with errors.translated(CLASSES):
        return _core.local_size()


def allreduce(
    tensor: tf.Tensor,
    param_index: int,
    num_params: int,
    compression: type = Compression.none,
    op: ReduceOp | None = ReduceOp.AVERAGE,
) -> tf.Tensor:
    """Reduces a tensor over the ranks.

    Args:
        tensor: Same shape and type on all ranks.
        param_index: Index of the tensor in the list of gradients; 0 for a single tensor.
        num_params: Length of that list.
        compression: A member of ``Compression``.
        op: The reduction; ``None`` means ``AVERAGE``.

    Returns:
        The reduced tensor, of the same shape and type; bitwise the same on every rank.

    Raises:
        ValueError: ``param_index`` is not in ``0 .. num_params - 1``, or ``op`` is no reduction.
    """
    if not (isinstance(param_index, int) and isinstance(num_params, int) and 0 <= param_index < num_params):
        raise ValueError(
            f"`param_index` is {param_index!r} of `num_params` {num_params!r}: expected integers with "
            "0 <= param_index < num_params"
        )
    return oob_allreduce(tensor, compression, op)


def oob_allreduce(
    tensor: tf.Tensor, compression: type = Compression.none, op: ReduceOp | None = ReduceOp.AVERAGE
) -> tf.Tensor:
    """Reduces a tensor that is no gradient, such as a loss, over the ranks.

    Args:
        tensor: Same shape and type on all ranks.
        compression: A member of ``Compression``.
        op: The reduction; ``None`` means ``AVERAGE``.

    Returns:
        The reduced tensor, of the same shape and type; bitwise the same on every rank.
    """
    sent, ctx = compression.compress(tf.convert_to_tensor(tensor))
    name = core_name(op, ReduceOp.AVERAGE)
    return compression.decompress(_call(_ops.smd_all_reduce, tensor=sent, op=name), ctx)


def broadcast(tensor: tf.Tensor, root_rank: int) -> tf.Tensor:
    """Gives every rank the values of rank ``root_rank``.

    Args:
        tensor: Same shape and type on all ranks.
        root_rank: Whose values.

    Returns:
        A tensor of the same shape and type.
    """
    return _call(_ops.smd_broadcast, tensor=tf.convert_to_tensor(tensor), root=root_rank)


def broadcast_variables(variables: Iterable[tf.Variable], root_rank: int) -> None:
    """Assigns the values of rank ``root_rank`` to variables on all ranks.

    Args:
        variables: The same on all ranks, in the same order.
        root_rank: Whose values.
    """
    for variable in variables:
        variable.assign(broadcast(variable, root_rank))


def _call(op: Any, /, **arguments: Any) -> tf.Tensor:
    try:
        return op(**arguments)
    except tf.errors.OpError as error:
        translation = errors.from_report(error.message, CLASSES)
        if translation is None:
            raise
        raise translation from None
