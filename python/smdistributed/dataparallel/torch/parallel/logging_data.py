"""The data of ``DistributedDataParallel._get_ddp_logging_data``, under the names of torch's method."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from smdistributed.dataparallel.torch.parallel import groups

if TYPE_CHECKING:
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

_TYPES = {
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")


def collect(model: DistributedDataParallel) -> dict[str, int | str]:
    """Collect the data of ``DistributedDataParallel._get_ddp_logging_data``.

    Args:
        model: The model.

    Returns:
        How the model was wrapped, its buckets, and the times of the last sampled step in nanoseconds.
    """
    trained = model._trained
    sizes = [parameter.numel() * parameter.element_size() for parameter in trained]
    statistics = dict(model._reducer.statistics())
    buckets = model._reducer.buckets()
    rebuilt = statistics["has_rebuilt_buckets"]
    described: dict[str, int | str] = {
        "world_size": model._group_size,
        "rank": model._group_rank,
        "backend_name": groups.backend_name(model.process_group),
        "module_name": type(model.module).__name__,
        "device_ids": ", ".join(map(str, model.device_ids or ())),
        "output_device": -1 if model.output_device is None else model.output_device,
        "broadcast_buffers": int(model.broadcast_buffers),
        "bucket_cap_bytes": model.bucket_bytes_cap,
        "find_unused_parameters": int(model.find_unused_parameters),
        "gradient_as_bucket_view": int(model.gradient_as_bucket_view),
        "static_graph": int(model.static_graph),
        "is_multi_device_module": int(model.is_multi_device_module),
        "has_sync_bn": int(any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in model.module.modules())),
        "dtypes": ", ".join(sorted({_TYPES.get(p.dtype, str(p.dtype)) for p in trained})),
        "num_parameter_tensors": len(trained),
        "total_parameter_size_bytes": sum(sizes),
        "bucket_sizes": _sizes(model._first_buckets, sizes),
        "num_buckets_reduced": len(buckets),
        "prev_iteration_grad_ready_order_indices": ", ".join(map(str, model._reducer.last_order())),
    }
    if model._comm_hook_name is not None:
        described["comm_hook"] = model._comm_hook_name
    if rebuilt:
        described["rebuilt_bucket_sizes"] = _sizes(buckets, sizes)
        described["rebuilt_per_bucket_param_indices"] = ", ".join(" ".join(map(str, bucket)) for bucket in buckets)
    environment = {name.lower(): os.environ.get(name, "N/A") for name in _ENVIRONMENT}
    return described | statistics | environment


def _sizes(buckets: list[list[int]], sizes: list[int]) -> str:
    return ", ".join(str(sum(sizes[index] for index in bucket)) for bucket in buckets)
