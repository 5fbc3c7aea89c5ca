"""Horovod's API for the ``keras`` package: ``import horovod.keras as hvd``.

Keras runs on TensorFlow or PyTorch (``KERAS_BACKEND``).
"""

from __future__ import annotations

from horovod.common.exceptions import HorovodInternalError as HorovodInternalError
from horovod.common.keras_backend import BACKEND as _BACKEND
from horovod.common.keras_backend import keras as _keras
from horovod.common.process_sets import ProcessSet as ProcessSet
from horovod.common.process_sets import add_process_set as add_process_set
from horovod.common.process_sets import global_process_set as global_process_set
from horovod.common.process_sets import remove_process_set as remove_process_set
from horovod.keras import callbacks as callbacks
from horovod.keras import elastic as elastic

if _BACKEND == "torch":
    from horovod._keras_torch import DistributedOptimizer as DistributedOptimizer
    from horovod._keras_torch import PartialDistributedOptimizer as PartialDistributedOptimizer
    from horovod._keras_torch import allgather as allgather
    from horovod._keras_torch import allreduce as allreduce
    from horovod._keras_torch import broadcast as broadcast
    from horovod._keras_torch import broadcast_global_variables as broadcast_global_variables
    from horovod._keras_torch import load_model as load_model
    from horovod._keras_torch import reducescatter as reducescatter
    from horovod.torch.compression import Compression as Compression
    from horovod.torch.mpi_ops import Adasum as Adasum
    from horovod.torch.mpi_ops import Average as Average
    from horovod.torch.mpi_ops import Max as Max
    from horovod.torch.mpi_ops import Min as Min
    from horovod.torch.mpi_ops import Product as Product
    from horovod.torch.mpi_ops import Sum as Sum
    from horovod.torch.mpi_ops import ccl_built as ccl_built
    from horovod.torch.mpi_ops import cross_rank as cross_rank
    from horovod.torch.mpi_ops import cross_size as cross_size
    from horovod.torch.mpi_ops import cuda_built as cuda_built
    from horovod.torch.mpi_ops import ddl_built as ddl_built
    from horovod.torch.mpi_ops import gloo_built as gloo_built
    from horovod.torch.mpi_ops import gloo_enabled as gloo_enabled
    from horovod.torch.mpi_ops import init as init
    from horovod.torch.mpi_ops import is_homogeneous as is_homogeneous
    from horovod.torch.mpi_ops import is_initialized as is_initialized
    from horovod.torch.mpi_ops import local_rank as local_rank
    from horovod.torch.mpi_ops import local_size as local_size
    from horovod.torch.mpi_ops import mpi_built as mpi_built
    from horovod.torch.mpi_ops import mpi_enabled as mpi_enabled
    from horovod.torch.mpi_ops import mpi_threads_supported as mpi_threads_supported
    from horovod.torch.mpi_ops import nccl_built as nccl_built
    from horovod.torch.mpi_ops import rank as rank
    from horovod.torch.mpi_ops import rocm_built as rocm_built
    from horovod.torch.mpi_ops import shutdown as shutdown
    from horovod.torch.mpi_ops import size as size
    from horovod.torch.mpi_ops import start_timeline as start_timeline
    from horovod.torch.mpi_ops import stop_timeline as stop_timeline
else:
    from horovod._keras import api as _api
    from horovod._keras.api import DistributedOptimizer as DistributedOptimizer
    from horovod._keras.api import PartialDistributedOptimizer as PartialDistributedOptimizer
    from horovod._keras.api import allgather as allgather
    from horovod._keras.api import allreduce as allreduce
    from horovod._keras.api import broadcast as broadcast
    from horovod._keras.api import broadcast_global_variables as broadcast_global_variables
    from horovod._keras.api import reducescatter as reducescatter
    from horovod.tensorflow.compression import Compression as Compression  # type: ignore[assignment]  # the other backend's
    from horovod.tensorflow.mpi_ops import Adasum as Adasum
    from horovod.tensorflow.mpi_ops import Average as Average
    from horovod.tensorflow.mpi_ops import Max as Max
    from horovod.tensorflow.mpi_ops import Min as Min
    from horovod.tensorflow.mpi_ops import Product as Product
    from horovod.tensorflow.mpi_ops import Sum as Sum
    from horovod.tensorflow.mpi_ops import ccl_built as ccl_built
    from horovod.tensorflow.mpi_ops import cross_rank as cross_rank
    from horovod.tensorflow.mpi_ops import cross_size as cross_size
    from horovod.tensorflow.mpi_ops import cuda_built as cuda_built
    from horovod.tensorflow.mpi_ops import ddl_built as ddl_built
    from horovod.tensorflow.mpi_ops import gloo_built as gloo_built
    from horovod.tensorflow.mpi_ops import gloo_enabled as gloo_enabled
    from horovod.tensorflow.mpi_ops import init as init
    from horovod.tensorflow.mpi_ops import is_homogeneous as is_homogeneous
    from horovod.tensorflow.mpi_ops import is_initialized as is_initialized
    from horovod.tensorflow.mpi_ops import local_rank as local_rank
    from horovod.tensorflow.mpi_ops import local_size as local_size
    from horovod.tensorflow.mpi_ops import mpi_built as mpi_built
    from horovod.tensorflow.mpi_ops import mpi_enabled as mpi_enabled
    from horovod.tensorflow.mpi_ops import mpi_threads_supported as mpi_threads_supported
    from horovod.tensorflow.mpi_ops import nccl_built as nccl_built
    from horovod.tensorflow.mpi_ops import rank as rank
    from horovod.tensorflow.mpi_ops import rocm_built as rocm_built
    from horovod.tensorflow.mpi_ops import shutdown as shutdown
    from horovod.tensorflow.mpi_ops import size as size
    from horovod.tensorflow.mpi_ops import start_timeline as start_timeline
    from horovod.tensorflow.mpi_ops import stop_timeline as stop_timeline

    load_model = _api.loader(_keras)
