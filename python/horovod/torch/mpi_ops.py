"""Collectives on PyTorch tensors.

Ranks submit them in any order, on any thread. They are matched by name within a process set. The asynchronous forms
return a handle. In-place forms end in an underscore and are not differentiable.
"""

from __future__ import annotations

from horovod.torch.handles import (  # noqa: F401
    _handle_map,
    _number,
    _submit,
    poll,
    synchronize,
)

# isort: split
import torch

from horovod.common.exceptions import HorovodInternalError  # noqa: F401
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.session import (  # noqa: F401
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
from horovod.common.util import (  # noqa: F401
    check_installed_version,
    gpu_available,
    num_rank_is_power_2,
)
from horovod.torch.compression import Compression  # noqa: F401
from horovod.torch.exchanges import (  # noqa: F401
    HorovodAllgather,
    HorovodAlltoall,
    HorovodBroadcast,
    HorovodGroupedAllgather,
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from horovod.torch.raw import (  # noqa: F401
    _allgather_async,
    _allreduce_async,
    _alltoall_async,
    _broadcast_async,
    _grouped_allgather_async,
    _grouped_allreduce_async,
    _grouped_reducescatter_async,
    _reducescatter_async,
)
from horovod.torch.reductions import (  # noqa: F401
    _OPS,
    HorovodAllreduce,
    HorovodGroupedAllreduce,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from horovod.torch.scatters import (  # noqa: F401
    HorovodGroupedReducescatter,
    HorovodReducescatter,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from horovod.torch.sparse import sparse_allreduce_async  # noqa: F401


def join(device: int = -1) -> int:
    """Declare that this rank has no more data, and wait until all ranks have declared it.

    Meanwhile the rank contributes neutral elements to the others' all-reduces. Their other collectives fail.

    Args:
        device: Number of the CUDA device on which this rank takes part in all-reduces of CUDA tensors. If the rank has
            called collectives on another device, that one is used, with a warning. The default is the current device if
            CUDA is in use in this process, else the device with this rank's number on the host. If there is none,
            others' all-reduces of CUDA tensors fail on every rank.

    Returns:
        The rank that joined last.
    """
    # The current device is 0 in a script that never calls `set_device`, even if its tensors are on another device.
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
    pending = _submit(torch.ops.smd.named_join.default, device, current, finish=lambda _: None)
    pending.wait()
    return pending.work.last()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every member of a process set has called it.

    Args:
        process_set: The ranks that take part.
    """
    _submit(torch.ops.smd.named_barrier.default, "barrier", _number(process_set), finish=lambda _: None).wait()


def _check_has_gpu() -> bool:
    return torch.cuda.is_available()
