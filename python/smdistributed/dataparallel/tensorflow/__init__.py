"""Data-parallel training of TensorFlow models: life cycle, ranks, and the collectives on tensors.

Eager calls raise the classes of ``smdistributed.dataparallel.exceptions``; inside a ``tf.function`` TensorFlow raises
its own, with the same text.
"""

from __future__ import annotations

import sys

from smdistributed.dataparallel.reduce_op import ReduceOp

# Imported first, because its loader reports missing packages.
from smdistributed.dataparallel.tensorflow.collectives import allreduce, broadcast, oob_allreduce

# isort: split
from smdistributed.dataparallel.tensorflow import compat, keras
from smdistributed.dataparallel.tensorflow.compression import (
    BF16Compression,
    Compression,
    FP16Compression,
    NoneCompression,
)
from smdistributed.dataparallel.tensorflow.hook import BroadcastGlobalVariablesHook
from smdistributed.dataparallel.tensorflow.job import init, local_rank, local_size, rank, shutdown, size
from smdistributed.dataparallel.tensorflow.optimizer import DistributedOptimizer
from smdistributed.dataparallel.tensorflow.overlap import overlap
from smdistributed.dataparallel.tensorflow.tape import DistributedGradientTape
from smdistributed.dataparallel.tensorflow.variables import broadcast_global_variables, broadcast_variables

__all__ = [
    "BF16Compression",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "FP16Compression",
    "NoneCompression",
    "ReduceOp",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "init",
    "keras",
    "local_rank",
    "local_size",
    "oob_allreduce",
    "overlap",
    "rank",
    "shutdown",
    "size",
]

# The original's documentation writes `sdp.tensorflow.rank()` where `sdp` is this module.
tensorflow = sys.modules[__name__]

compat.install()
