"""Makes the model of a script what one rank holds: its own parameters on its device, nothing of the others'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.exceptions import SMPPartitionError
from smdistributed.modelparallel.torch.handle import Absent
from smdistributed.modelparallel.torch.placement import Placement, own_tensors

#: Bytes that are broadcast at once.
_BATCH = 32 << 20


def settle(
    root: nn.Module, placement: Placement, partition: int, device: torch.device
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Parameters and buffers of other partitions become :class:`Absent`; own ones go to ``device``, and those that were
    created without memory get theirs.

    Returns:
        By the identity of each parameter that was replaced, itself and what stands in its place.
    """
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for path, module in root.named_modules():
        rank = placement.of(module)
        delayed = False
        for table, name, tensor in own_tensors(module):
            full = f"{path}.{name}" if path else name
            known = replaced.get(id(tensor))
            if known is not None:
                table[name] = known[1]
            elif rank != partition:
                table[name] = Absent(tensor, full, rank, device)
                replaced[id(tensor)] = tensor, table[name]
            elif tensor.is_meta:
                new = torch.empty_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    new = _alike(tensor, new)
                table[name] = new
                replaced[id(tensor)] = tensor, new
                delayed = True
            elif tensor.device != device:
                if isinstance(tensor, nn.Parameter):
                    tensor.data = tensor.data.to(device)
                else:
                    table[name] = tensor.to(device)
                    replaced[id(tensor)] = tensor, table[name]
        if delayed:
            _initialize(root, module, path)
    return replaced


def gather(root: nn.Module, parts: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Makes the model whole, on CPUs.

    Args:
        root: The model, with parameters that are :class:`Absent`.
        parts: What each rank holds, by names in the model.
    """
    content = {name: tensor for part in parts for name, tensor in part.items()}
    replaced: dict[int, torch.Tensor] = {}
    for path, module in root.named_modules():
        for table, name, tensor in own_tensors(module):
            if not isinstance(tensor, Absent):
                continue
            if id(tensor) not in replaced:
                whole = content[f"{path}.{name}" if path else name]
                is_parameter = isinstance(tensor, nn.Parameter)
                replaced[id(tensor)] = nn.Parameter(whole, tensor.requires_grad) if is_parameter else whole
            table[name] = replaced[id(tensor)]
    root.cpu()


def _initialize(root: nn.Module, module: nn.Module, path: str) -> None:
    """Gives parameters that were created without memory the values that their module starts with."""
    with torch.no_grad():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        elif hasattr(root, "_init_weights"):
            # Hugging Face's models.
            root._init_weights(module)
        else:
            raise SMPPartitionError(
                f"`{path or type(module).__name__}` was created under `smp.delay_param_initialization` and has no method "
                "`reset_parameters`, so nobody knows the values that its parameters start with"
            )
        if hasattr(root, "_init_weights") and hasattr(module, "reset_parameters"):
            root._init_weights(module)


@torch.no_grad()
def broadcast(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None, source: int) -> None:
    """Gives all ranks of ``group`` the values of global rank ``source``, many tensors at once."""
    for batch in _batches(tensors):
        whole = torch.cat([tensor.detach().reshape(-1) for tensor in batch])
        dist.broadcast(whole, source, group)
        for tensor, part in zip(batch, whole.split([tensor.numel() for tensor in batch]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    kinds: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for kind in kinds.values():
        batch: list[torch.Tensor] = []
        size = 0
        for tensor in kind:
            if batch and size + tensor.nbytes > _BATCH:
                yield batch
                batch, size = [], 0
            batch.append(tensor)
            size += tensor.nbytes
        yield batch


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Parameters that are created inside take no memory until the model is divided; then each rank makes its own,
    by ``reset_parameters`` of the module, or ``_init_weights`` of a model of Hugging Face's."""
    if not enabled:
        yield
        return
    with torch.device("meta"):
        yield


def delay_parameters() -> RemovableHandle:
    """The same for all parameters that modules get from now on until the handle is removed; other tensors are left alone,
    and so are lazy parameters, which have no memory yet."""
    # What is registered twice stays one parameter.
    twins = WeakIdKeyDictionary()

    def delayed(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        del module, name
        if parameter is None or parameter.is_meta or is_lazy(parameter):
            return None
        if parameter not in twins:
            twins[parameter] = _alike(parameter, parameter.detach().to("meta"))
        return twins[parameter]

    return register_module_parameter_registration_hook(delayed)


def _alike(parameter: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """``values`` as a parameter of the same class, with the same attributes."""
    new = nn.Parameter(values, parameter.requires_grad)
    if type(new) is not type(parameter):
        new.__class__ = type(parameter)
    vars(new).update(vars(parameter))
    return new
