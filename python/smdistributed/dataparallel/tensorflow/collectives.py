"""Collectives on tensors.

Every rank calls the same collectives in the same order; inside a ``tf.function`` TensorFlow keeps the order in which
the function's body names them. :func:`oob_allreduce` and :func:`broadcast` may be called in any order. Tensors of other
ranks have the same shape and type. Where ranks disagree, each of them gets an error that names the ranks and the
difference. Eager calls raise the classes of ``smdistributed.dataparallel.exceptions``; inside a ``tf.function``
TensorFlow raises its own, with the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from smdistributed._common import errors, interrupts, shims
from smdistributed.dataparallel.exceptions import CLASSES
from smdistributed.dataparallel.reduce_op import ReduceOp, core_name

# TensorFlow is imported through the loader, which reports missing packages.
ops = shims.load_tensorflow()

import tensorflow as tf  # noqa: E402

from smdistributed.dataparallel.tensorflow import (  # noqa: E402, F401
    gradients,
    names,
    ordering,
)
from smdistributed.dataparallel.tensorflow.compression import Compression  # noqa: E402


def allreduce(
    tensor: tf.Tensor,
    param_index: int,
    num_params: int,
    compression: Any = Compression.none,
    op: ReduceOp | None = ReduceOp.AVERAGE,
) -> tf.Tensor:
    """Reduce a tensor over the ranks.

    Same as :func:`oob_allreduce`: ranks may call it in any order, and tensors that are ready together are reduced
    together. The index and the number of tensors are checked and have no other effect.

    Args:
        tensor: Same shape and type on all ranks.
        param_index: Index of the tensor in the list of gradients; 0 for a single tensor.
        num_params: Length of that list.
        compression: A member of ``Compression``.
        op: The reduction; ``None`` means ``AVERAGE``.

    Returns:
        The reduced tensor, of the same shape and type; bitwise the same on every rank.

    Raises:
        ValueError: ``param_index`` is not in ``0 .. num_params - 1``, or ``op`` is not a reduction.
    """
    if not (isinstance(param_index, Integral) and isinstance(num_params, Integral) and 0 <= param_index < num_params):
        raise ValueError(
            f"`param_index` is {param_index!r} of `num_params` {num_params!r}: expected integers with "
            "0 <= param_index < num_params"
        )
    return oob_allreduce(tensor, compression, op)


def oob_allreduce(
    tensor: tf.Tensor,
    compression: Any = Compression.none,
    op: ReduceOp | None = ReduceOp.AVERAGE,
    name: str | None = None,
) -> tf.Tensor:
    """Reduce a tensor that is not a gradient, such as a loss, over the ranks.

    Ranks may call it in any order and on any thread: it runs once all of them have called it under the same name.

    Args:
        tensor: Same shape and type on all ranks.
        compression: A member of ``Compression``.
        op: The reduction; ``None`` means ``AVERAGE``.
        name: Same on all ranks; ``None``: in a ``tf.function`` what the function and the node are called, otherwise the
            number of the call.

    Returns:
        The reduced tensor, of the same shape and type; bitwise the same on every rank.

    Examples:
        >>> loss = sdp.oob_allreduce(loss)  # the average over the ranks
    """
    sent, ctx = compression.compress(tf.convert_to_tensor(tensor))
    reduction = core_name(op, ReduceOp.AVERAGE)
    reduced = _named(ops.smd_named_all_reduce, "oob_allreduce", name, tensor=sent, op=reduction)
    return compression.decompress(reduced, ctx)


def broadcast(tensor: tf.Tensor, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Broadcast the values of rank ``root_rank`` to all ranks.

    Ranks may call it in any order, as :func:`oob_allreduce`.

    Args:
        tensor: Same shape and type on all ranks.
        root_rank: Global rank whose values are sent.
        name: As :func:`oob_allreduce` takes it.

    Returns:
        A tensor of the same shape and type.
    """
    return _named(ops.smd_named_broadcast, "broadcast", name, tensor=tf.convert_to_tensor(tensor), root=int(root_rank))


def _named(op: Any, function: str, name: str | None, /, **arguments: Any) -> tf.Tensor:
    with errors.translated(CLASSES):
        tensor_name = names.of(function, name)
    if tf.executing_eagerly():
        # An eager call blocks this thread, and usually the whole script, until it returns.
        try:
            return call(op, tensor_name=tensor_name, blocking=True, anchors=[], **arguments)
        except (TypeError, tf.errors.OpError):
            # TensorFlow rejected the arguments, so the call was not submitted.
            names.take_back(function, tensor_name)
            raise
    anchors = [ops.smd_session_id()]
    result = call(op, tensor_name=tensor_name, blocking=False, anchors=anchors, name=name or function, **arguments)
    graph = tf.compat.v1.get_default_graph()
    if hasattr(graph, "control_outputs"):
        # Not pruned from a graph, because other ranks may use their results and wait for this one.
        graph.control_outputs.append(result.op)
    return result


def grouped_all_reduce(
    tensors: Sequence[tf.Tensor], compression: Any = Compression.none, op: ReduceOp | None = ReduceOp.AVERAGE
) -> list[tf.Tensor]:
    """Reduce several tensors over the ranks as one operation, in which small ones travel together. An extension.

    Args:
        tensors: Same number, shapes and types on all ranks; they may differ from each other.
        compression: A member of ``Compression``.
        op: The reduction; ``None`` means ``AVERAGE``.

    Returns:
        The reduced tensors, each as :func:`oob_allreduce` would return it.
    """
    if not tensors:
        return []
    sent = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    name = core_name(op, ReduceOp.AVERAGE)
    reduced = call(ops.smd_grouped_all_reduce, tensors=[tensor for tensor, _ in sent], op=name)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, sent, strict=True)]


def all_gather(tensor: tf.Tensor) -> tf.Tensor:
    """Gather the rows of all ranks on every rank. An extension.

    Args:
        tensor: ``[rows, ...]``, of the same type on all ranks and, but for the number of rows, of the same shape.

    Returns:
        ``[all rows, ...]``: those of rank 0, then those of rank 1, and so on.

    Raises:
        ValueError: In a ``tf.function``, ``tensor`` is known to have no dimension.
        SmdistributedError: It has none, or the rows of other ranks have another size.
    """
    return call(ops.smd_all_gather, tensor=tf.convert_to_tensor(tensor)).output


def reduce_scatter(
    tensor: tf.Tensor, op: ReduceOp | None = ReduceOp.AVERAGE, rows: Sequence[int] | tf.Tensor | None = None
) -> tf.Tensor:
    """Reduce a tensor over the ranks and give each of them a block of the result's rows. An extension.

    Args:
        tensor: ``[rows, ...]``, same shape and type on all ranks.
        op: The reduction; ``None`` means ``AVERAGE``.
        rows: How many rows each rank gets, the same on all ranks; ``None`` for equal blocks.

    Returns:
        ``[rows of this rank, ...]``.

    Raises:
        SmdistributedError: The rows cannot be shared out like that.
    """
    return call(
        ops.smd_reduce_scatter,
        tensor=tf.convert_to_tensor(tensor),
        rows=_numbers_of_rows(rows),
        op=core_name(op, ReduceOp.AVERAGE),
    )


def all_to_all(tensor: tf.Tensor, splits: Sequence[int] | tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Send a block of rows to every rank. An extension.

    Args:
        tensor: ``[rows, ...]``; rows have the same type and shape on all ranks.
        splits: How many rows each rank gets, one after the other; ``None`` for equal blocks, which are then the same on
            all ranks.

    Returns:
        ``[received rows, ...]``, those from rank 0 first, and how many came from each rank.

    Raises:
        SmdistributedError: ``splits`` do not add up to the rows, or the rows cannot be shared out equally.
    """
    received = call(ops.smd_all_to_all, tensor=tf.convert_to_tensor(tensor), splits=_numbers_of_rows(splits))
    return received.output, received.received


def barrier() -> tf.Operation | None:
    """Wait for all ranks. An extension.

    Returns:
        In a graph, the operation that waits; else ``None``.
    """
    return call(ops.smd_barrier)


def _numbers_of_rows(rows: Sequence[int] | tf.Tensor | None) -> tf.Tensor:
    if rows is None:
        return tf.constant([], tf.int64)
    return tf.cast(rows, tf.int64)


def call(op: Any, /, **arguments: Any) -> Any:
    """Call an operation of the core, and raise its error as the class of the error's code.

    Args:
        op: A function of the operations' library.
        **arguments: Arguments of the operation.

    Returns:
        The result of the operation.

    Raises:
        SmdistributedError: The operation failed in eager mode.
    """
    try:
        return op(**arguments)
    except tf.errors.OpError as error:
        translation = errors.from_report(error.message, CLASSES)
        if translation is None:
            raise
        raise translation from None
    except RuntimeError as error:
        interrupts.raise_what_replaced(error)
        raise
