"""Training with ``model.fit``: the names of ``horovod.keras`` for Keras 3 and tf_keras.

Both may be used in one process; the class of a model, an optimizer or a callback determines to which it belongs.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.tensorflow import collectives
from smdistributed.dataparallel.tensorflow.compression import Compression
from smdistributed.dataparallel.tensorflow.job import init, local_rank, local_size, rank, shutdown, size
from smdistributed.dataparallel.tensorflow.keras import callbacks
from smdistributed.dataparallel.tensorflow.optimizer import DistributedOptimizer
from smdistributed.dataparallel.tensorflow.variables import broadcast_global_variables

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "ReduceOp",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "init",
    "load_model",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]


def allreduce(
    value: Any,
    name: str | None = None,
    op: ReduceOp | None = ReduceOp.AVERAGE,
    compression: Any = Compression.none,
) -> tf.Tensor:
    """Reduce a value over the ranks.

    Args:
        value: A number, an array or a tensor; same shape and type on all ranks.
        name: Prefix of the operations in a graph.
        op: The reduction; ``None`` means ``AVERAGE``.
        compression: A member of ``Compression``.

    Returns:
        The reduced tensor.
    """
    with tf.name_scope(name or "allreduce"):
        return collectives.oob_allreduce(tf.convert_to_tensor(value), compression, op)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Broadcast the value of rank ``root_rank`` to all ranks.

    Args:
        value: A number, an array or a tensor; same shape and type on all ranks.
        root_rank: Global rank whose value is sent.
        name: Prefix of the operations in a graph.

    Returns:
        A tensor of the same shape and type.
    """
    with tf.name_scope(name or "broadcast"):
        return collectives.broadcast(tf.convert_to_tensor(value), root_rank)


def load_model(
    filepath: Any, custom_objects: dict[str, Any] | None = None, *, keras: Any = None, **options: Any
) -> Any:
    """Load a model that was saved with its optimizer, distributed or not, and make the optimizer distributed.

    Args:
        filepath: Path that ``model.save`` has written; readable on every rank.
        custom_objects: Classes and functions of the script, by name.
        keras: The package that loads it, ``keras`` or ``tf_keras``; by default what ``tf.keras`` is.
        **options: Arguments of ``DistributedOptimizer``.

    Returns:
        The model; its optimizer has the saved state.

    Raises:
        ValueError: The model was saved without an optimizer.
    """
    keras = keras or tf.keras
    model = keras.models.load_model(filepath, custom_objects=custom_objects)
    if getattr(model, "optimizer", None) is None:
        raise ValueError(
            f"the model in `{filepath}` was saved without an optimizer: compile it with a DistributedOptimizer"
        )
    model.optimizer = DistributedOptimizer(model.optimizer, **options)
    return model
