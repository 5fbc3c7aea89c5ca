"""Collectives on tensors.

Every rank calls the same collectives in the same order; inside a ``tf.function`` TensorFlow keeps the order in which
the function's body names them. Tensors of other ranks have the same shape and type; where ranks disagree, each of them
gets an error that names the ranks and the difference. Eager calls raise the classes of
``smdistributed.dataparallel.exceptions``; inside a ``tf.function`` TensorFlow raises its own, with the same text.
"""

from __future__ import annotations

from typing import Any

from smdistributed._common import errors, shims
from smdistributed.dataparallel.exceptions import CLASSES
from smdistributed.dataparallel.reduce_op import ReduceOp, core_name

# TensorFlow first, through the loader: it says what is missing.
ops = shims.load_tensorflow()

import tensorflow as tf  # noqa: E402

from smdistributed.dataparallel.tensorflow.compression import Compression  # noqa: E402


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
    return compression.decompress(call(ops.smd_all_reduce, tensor=sent, op=name), ctx)


def broadcast(tensor: tf.Tensor, root_rank: int) -> tf.Tensor:
    """Gives every rank the values of rank ``root_rank``.

    Args:
        tensor: Same shape and type on all ranks.
        root_rank: Whose values.

    Returns:
        A tensor of the same shape and type.
    """
    return call(ops.smd_broadcast, tensor=tf.convert_to_tensor(tensor), root=root_rank)


def call(op: Any, /, **arguments: Any) -> Any:
    """Calls an operation of the core; what it raises in eager mode is the class of its code.

    Args:
        op: A function of the operations' library.
        arguments: Its own.
    """
    try:
        return op(**arguments)
    except tf.errors.OpError as error:
        translation = errors.from_report(error.message, CLASSES)
        if translation is None:
            raise
        raise translation from None
