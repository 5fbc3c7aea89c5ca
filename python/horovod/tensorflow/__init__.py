"""Horovod's API for TensorFlow: ``import horovod.tensorflow as hvd``."""

from __future__ import annotations

from typing import Any

from horovod.common.exceptions import HorovodInternalError as HorovodInternalError
from horovod.common.process_sets import ProcessSet as ProcessSet
from horovod.common.process_sets import add_process_set as add_process_set
from horovod.common.process_sets import global_process_set as global_process_set
from horovod.common.process_sets import remove_process_set as remove_process_set
from horovod.common.util import check_extension as check_extension
from horovod.common.util import gpu_available as gpu_available
from horovod.common.util import split_list as split_list
from horovod.tensorflow import mpi_ops as mpi_ops

# isort: split
from horovod.tensorflow import elastic as elastic
from horovod.tensorflow import operation_gradients as operation_gradients
from horovod.tensorflow import util as util
from horovod.tensorflow.collectives import allreduce as allreduce
from horovod.tensorflow.collectives import grouped_allreduce as grouped_allreduce
from horovod.tensorflow.collectives import grouped_reducescatter as grouped_reducescatter
from horovod.tensorflow.collectives import reducescatter as reducescatter
from horovod.tensorflow.compression import Compression as Compression
from horovod.tensorflow.functions import BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook
from horovod.tensorflow.functions import allgather_object as allgather_object
from horovod.tensorflow.functions import broadcast_global_variables as broadcast_global_variables
from horovod.tensorflow.functions import broadcast_object as broadcast_object
from horovod.tensorflow.functions import broadcast_object_fn as broadcast_object_fn
from horovod.tensorflow.functions import broadcast_variables as broadcast_variables
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper as LocalGradientAggregationHelper
from horovod.tensorflow.mpi_ops import Adasum as Adasum
from horovod.tensorflow.mpi_ops import Average as Average
from horovod.tensorflow.mpi_ops import Max as Max
from horovod.tensorflow.mpi_ops import Min as Min
from horovod.tensorflow.mpi_ops import Product as Product
from horovod.tensorflow.mpi_ops import Sum as Sum
from horovod.tensorflow.mpi_ops import _allreduce as _allreduce
from horovod.tensorflow.mpi_ops import _grouped_allreduce as _grouped_allreduce
from horovod.tensorflow.mpi_ops import allgather as allgather
from horovod.tensorflow.mpi_ops import alltoall as alltoall
from horovod.tensorflow.mpi_ops import barrier as barrier
from horovod.tensorflow.mpi_ops import broadcast as broadcast
from horovod.tensorflow.mpi_ops import broadcast_ as broadcast_
from horovod.tensorflow.mpi_ops import ccl_built as ccl_built
from horovod.tensorflow.mpi_ops import check_num_rank_power_of_2 as check_num_rank_power_of_2
from horovod.tensorflow.mpi_ops import cross_rank as cross_rank
from horovod.tensorflow.mpi_ops import cross_size as cross_size
from horovod.tensorflow.mpi_ops import cuda_built as cuda_built
from horovod.tensorflow.mpi_ops import ddl_built as ddl_built
from horovod.tensorflow.mpi_ops import gloo_built as gloo_built
from horovod.tensorflow.mpi_ops import gloo_enabled as gloo_enabled
from horovod.tensorflow.mpi_ops import grouped_allgather as grouped_allgather
from horovod.tensorflow.mpi_ops import (
    handle_average_backwards_compatibility as handle_average_backwards_compatibility,
)
from horovod.tensorflow.mpi_ops import init as init
from horovod.tensorflow.mpi_ops import is_homogeneous as is_homogeneous
from horovod.tensorflow.mpi_ops import is_initialized as is_initialized
from horovod.tensorflow.mpi_ops import join as join
from horovod.tensorflow.mpi_ops import local_rank as local_rank
from horovod.tensorflow.mpi_ops import local_rank_op as local_rank_op
from horovod.tensorflow.mpi_ops import local_size as local_size
from horovod.tensorflow.mpi_ops import local_size_op as local_size_op
from horovod.tensorflow.mpi_ops import mpi_built as mpi_built
from horovod.tensorflow.mpi_ops import mpi_enabled as mpi_enabled
from horovod.tensorflow.mpi_ops import mpi_threads_supported as mpi_threads_supported
from horovod.tensorflow.mpi_ops import nccl_built as nccl_built
from horovod.tensorflow.mpi_ops import process_set_included_op as process_set_included_op
from horovod.tensorflow.mpi_ops import rank as rank
from horovod.tensorflow.mpi_ops import rank_op as rank_op
from horovod.tensorflow.mpi_ops import rocm_built as rocm_built
from horovod.tensorflow.mpi_ops import shutdown as shutdown
from horovod.tensorflow.mpi_ops import size as size
from horovod.tensorflow.mpi_ops import size_op as size_op
from horovod.tensorflow.mpi_ops import start_timeline as start_timeline
from horovod.tensorflow.mpi_ops import stop_timeline as stop_timeline
from horovod.tensorflow.optimizer import DistributedOptimizer as DistributedOptimizer
from horovod.tensorflow.tape import DistributedGradientTape as DistributedGradientTape
from horovod.tensorflow.tape import PartialDistributedGradientTape as PartialDistributedGradientTape
from horovod.tensorflow.util import _cache as _cache
from horovod.tensorflow.util import _executing_eagerly as _executing_eagerly
from horovod.tensorflow.util import _make_subgraph as _make_subgraph
from horovod.tensorflow.util import refs_to_vars as refs_to_vars
from horovod.tensorflow.util import vars_to_refs as vars_to_refs
from smdistributed._common.unpickling import add_safe_globals as add_safe_globals


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNormalization":
        from horovod.tensorflow import sync_batch_norm

        return sync_batch_norm.SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
