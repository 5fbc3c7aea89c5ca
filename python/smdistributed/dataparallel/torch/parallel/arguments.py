"""Checks the arguments of ``DistributedDataParallel``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from smdistributed.dataparallel.bucket_size import bucket_bytes


def bucket_bytes_list(bucket_cap_mb_list: Sequence[float] | None) -> list[int]:
    """Return the sizes of buckets in bytes.

    Args:
        bucket_cap_mb_list: Sizes in MiB; ``None`` means none.

    Returns:
        The sizes, each checked as :func:`bucket_bytes` does.

    Raises:
        ValueError: A size is not positive, or not a multiple of 128 bytes.
    """
    return [bucket_bytes(size) for size in bucket_cap_mb_list or ()]


def accumulation_steps(steps: int) -> int:
    """Check ``gradient_accumulation_steps``, and warn if it is used.

    Args:
        steps: The argument.

    Returns:
        ``steps``.

    Raises:
        ValueError: It is not a whole number from 1 to 2^31 - 1.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 2**31:
        raise ValueError(f"`gradient_accumulation_steps` is {steps!r}: expected a whole number of at least 1")
    if steps > 1:
        warnings.warn(
            f"gradient_accumulation_steps={steps}: gradients are reduced in every {steps}th backward only; the keyword "
            "is deprecated, use `no_sync()`",
            FutureWarning,
            stacklevel=4,
        )
    return steps


@functools.cache
def warn_of_dim(dim: int) -> None:
    """Warn once that an argument of torch's class changes nothing.

    Args:
        dim: The argument.
    """
    if dim != 0:
        warnings.warn(f"`dim={dim}` of DistributedDataParallel is ignored: inputs are not scattered", stacklevel=3)


def devices(
    parameters: Iterable[torch.Tensor],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[int] | None, int | None]:
    """Check ``device_ids`` and ``output_device`` by the rules of torch's class.

    Args:
        parameters: The module's parameters.
        device_ids: The argument.
        output_device: The argument.

    Returns:
        Both as indices of devices.

    Raises:
        ValueError: They do not fit each other or the module.
    """
    places = {parameter.device for parameter in parameters}
    types = sorted({place.type for place in places})
    if len(types) > 1:
        raise ValueError(f"the module's parameters are on {' and '.join(types)}: expected one type of device")
    if not device_ids:
        if output_device is not None:
            raise ValueError(f"`output_device` is {output_device!r}: expected None without `device_ids`")
        return None, None
    if len(device_ids) > 1:
        raise ValueError(f"`device_ids` is {list(device_ids)}: expected at most one device, or None")
    if types == ["cpu"]:
        raise ValueError(
            f"`device_ids` is {list(device_ids)}, but the module is on the CPU: expected None, or a module that was "
            "moved to the device before"
        )
    if len(places) > 1:
        raise ValueError(f"`device_ids` is {list(device_ids)}, but the module is on several devices: expected None")
    index = torch.device(types[0], device_ids[0]) if isinstance(device_ids[0], int) else torch.device(device_ids[0])
    output = index if output_device is None else output_device
    return [index.index], output if isinstance(output, int) else torch.device(output).index


def check_parameters(named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Check that parameters have memory that can be broadcast, and gradients that can be averaged.

    Args:
        named: Names and parameters.

    Raises:
        RuntimeError: A parameter has no shape yet.
        TypeError: A parameter is a tensor subclass that consists of other tensors.
    """
    for name, parameter in named:
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise RuntimeError(f"parameter `{name}` has no shape yet: run a forward of the module before it is wrapped")
        if is_traceable_wrapper_subclass(parameter):
            raise TypeError(
                f"parameter `{name}` is a {type(parameter).__name__}, which DistributedDataParallel cannot average: "
                "for sharded parameters use `torch.distributed.fsdp.fully_shard` over the backend `smddp`"
            )


def check_sync_batch_norm(module: torch.nn.Module, device_type: str) -> None:
    """Check that ``torch.nn.SyncBatchNorm`` layers will do what their name says.

    Args:
        module: The model.
        device_type: Where it is, such as ``cpu``.

    Raises:
        ValueError: The module is on the CPU, where torch's layer does not work.
        RuntimeError: ``torch.distributed`` is not initialized, so that the layers would see their own rank only.
    """
    named = module.named_modules()
    layers = [
        f"`{name}`" if name else "the module" for name, layer in named if isinstance(layer, torch.nn.SyncBatchNorm)
    ]
    if not layers:
        return
    if device_type == "cpu":
        raise ValueError(f"{layers[0]} is a torch.nn.SyncBatchNorm, which works on GPUs only: use a BatchNorm layer")
    if not torch.distributed.is_initialized():
        raise RuntimeError(
            f"{layers[0]} is a torch.nn.SyncBatchNorm, which needs `torch.distributed`: call "
            '`torch.distributed.init_process_group(backend="smddp")` first'
        )
