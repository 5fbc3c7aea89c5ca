"""Data-parallel training of TensorFlow models: life cycle, ranks, and the collectives on tensors.

Eager calls raise the classes of ``smdistributed.dataparallel.exceptions``; inside a ``tf.function`` TensorFlow raises
its own, with the same text.
"""

from __future__ import annotations

from typing import NoReturn

from smdistributed._common.errors import UnsupportedError
from smdistributed.dataparallel.reduce_op import ReduceOp

# First: its loader says what is missing.
from smdistributed.dataparallel.tensorflow.collectives import allreduce, broadcast, oob_allreduce
from smdistributed.dataparallel.tensorflow.compression import (
    Compression,
    FP16Compression,
    NoneCompression,
)
from smdistributed.dataparallel.tensorflow.job import init, local_rank, local_size, rank, shutdown, size
from smdistributed.dataparallel.tensorflow.tape import DistributedGradientTape
from smdistributed.dataparallel.tensorflow.variables import broadcast_variables

__all__ = [
    "Compression",
    "DistributedGradientTape",
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
