"""Materializes one rank's partition: its own parameters get memory on its device, those of other ranks none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.exceptions import SMPPartitionError
from smdistributed.modelparallel.torch.partitioning.placement import Placement, own_tensors
from smdistributed.modelparallel.torch.partitioning.shared_memory import SharedMemory, follow_moves
from smdistributed.modelparallel.torch.tracing.remote_tensor import MetaParameter

#: Parameters are broadcast in batches of this many bytes.
_BATCH = 32 << 20


def materialize(
    root: nn.Module,
    placement: Placement,
    partition: int,
    device: torch.device,
    shared: Sequence[SharedMemory] = (),
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Replace the tensors of other partitions by :class:`MetaParameter`, and move own tensors to ``device``.

    Own tensors that were created without memory are allocated and initialized.

    Args:
        root: The model.
        placement: The partitions of its modules.
        partition: This rank's partition.
        device: This rank's device.
        shared: The memory that several places of the model refer to.

    Returns:
        For each replaced parameter by id: itself and its replacement.

    Raises:
        SMPPartitionError: The initial values of a delayed tensor are not known, or shared memory cannot be moved.
    """
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    fresh: dict[int, str] = {}
    delayed: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for path, module in root.named_modules():
        if placement.of(module) != partition:
            continue
        for table, name, tensor in own_tensors(module):
            if tensor.is_meta:
                delayed.append((table, name, tensor))
            known = replaced.get(id(tensor))
            if known is not None:
                table[name] = known[1]
            elif tensor.is_meta:
                new = _blank(tensor, device)
                table[name] = new
                replaced[id(tensor)] = tensor, new
                fresh[id(new)] = f"{path}.{name}" if path else name
            elif tensor.device != device:
                if isinstance(tensor, nn.Parameter):
                    tensor.data = tensor.data.to(device)
                else:
                    table[name] = tensor.to(device)
                    replaced[id(tensor)] = tensor, table[name]
        if isinstance(module, nn.RNNBase):
            # Recurrent modules also keep a list of their parameters.
            module._init_flat_weights()
    follow_moves([each for each in shared if placement.of(each.owner) == partition])
    if fresh:
        try:
            _initialize(root, fresh)
        except BaseException:
            # The script may fix the model and try again, so tensors without values must look uninitialized again.
            for table, name, tensor in delayed:
                table[name] = tensor
            raise
    # Removed last, because a module's initializer may read or write tensors of other partitions.
    for path, module in root.named_modules():
        rank = placement.of(module)
        for table, name, tensor in own_tensors(module) if rank != partition else ():
            if id(tensor) not in replaced:
                full = f"{path}.{name}" if path else name
                replaced[id(tensor)] = tensor, MetaParameter(tensor, full, rank, device)
            table[name] = replaced[id(tensor)][1]
        if rank != partition and isinstance(module, nn.RNNBase):
            # The module's list would keep the memory. PyTorch's method to update it would query addresses from CUDA.
            module._flat_weights = [module._parameters.get(name) for name in module._flat_weights_names]
    return replaced


def move_buffers(root: nn.Module, device: torch.device) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Move all buffers to ``device``.

    Returns:
        For each replaced buffer by id: itself and its replacement.

    Raises:
        SMPPartitionError: A buffer was created without memory.
    """
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for path, module in root.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.device == device:
                continue
            if buffer.is_meta:
                raise SMPPartitionError(f"the buffer `{path}.{name}` has no memory, and so no values")
            if id(buffer) not in replaced:
                replaced[id(buffer)] = buffer, buffer.to(device)
            module._buffers[name] = replaced[id(buffer)][1]
    return replaced


def materialize_parameters(
    root: nn.Module, wanted: Mapping[int, tuple[str, Sequence[tuple[nn.Module, str]]]], device: torch.device
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Move some parameters to ``device``; those that were created without memory are allocated and initialized.

    Args:
        root: The model.
        wanted: For each parameter by id: its name in the model, and the modules' entries that contain it.
        device: The device.

    Returns:
        For each replaced parameter by id: itself and its replacement.

    Raises:
        SMPPartitionError: The initial values of a delayed parameter are not known.
    """
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    fresh: dict[int, str] = {}
    for key, (name, slots) in wanted.items():
        parameter = slots[0][0]._parameters[slots[0][1]]
        assert parameter is not None
        if parameter.is_meta:
            new = _blank(parameter, device)
            replaced[key], fresh[id(new)] = (parameter, new), name
            for module, own in slots:
                module._parameters[own] = new  # type: ignore[assignment]
        elif parameter.device != device:
            parameter.data = parameter.data.to(device)
    if fresh:
        _initialize(root, fresh)
    return replaced


def gather(root: nn.Module, parts: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Restore the whole model on CPUs.

    Args:
        root: The model, some of whose parameters are :class:`MetaParameter`.
        parts: The tensors of each rank, by name in the model.
    """
    content = {name: tensor for part in parts for name, tensor in part.items()}
    replaced: dict[int, torch.Tensor] = {}
    for path, module in root.named_modules():
        for table, name, tensor in own_tensors(module):
            if not isinstance(tensor, MetaParameter):
                continue
            if id(tensor) not in replaced:
                whole = content[f"{path}.{name}" if path else name]
                is_parameter = isinstance(tensor, nn.Parameter)
                replaced[id(tensor)] = nn.Parameter(whole, tensor.requires_grad) if is_parameter else whole
            table[name] = replaced[id(tensor)]
    root.cpu()


def _blank(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Allocate memory for a tensor, filled with NaN to detect whether it gets values."""
    new = torch.empty_like(tensor, device=device)
    if new.is_floating_point() or new.is_complex():
        new.fill_(torch.nan)
    return _alike(tensor, new) if isinstance(tensor, nn.Parameter) else new


@torch.no_grad()
def _initialize(root: nn.Module, fresh: Mapping[int, str]) -> None:
    """Initialize tensors that were created without memory, in the order of a model's constructor.

    Inner modules come first. PyTorch's methods run for all of them before Hugging Face's.

    Args:
        root: The model.
        fresh: Names of the tensors in the model, by id.
    """
    # For tensors that cannot hold NaN, only the version counter shows a write, but not writes through `.data`.
    versions = {
        id(tensor): tensor._version
        for tensor in _tensors(root)
        if id(tensor) in fresh and not (tensor.is_floating_point() or tensor.is_complex())
    }
    modules = [module for module in inside_first(root) if any(id(tensor) in fresh for tensor in _tensors(module))]
    owners: dict[int, nn.Module] = {}
    _find_owners(root, None, owners)
    with _others_out_of_reach(root, fresh):
        for module in modules:
            reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset):
                with _parametrized_in_reach(module, fresh):
                    reset()
        for module in modules:
            if id(module) in owners:
                owner: Any = owners[id(module)]
                owner._init_weights(module)
    for tensor in _tensors(root):
        if (
            id(tensor) in fresh
            and tensor.numel()
            and (tensor._version == versions[id(tensor)] if id(tensor) in versions else _has_nan(tensor))
        ):
            raise SMPPartitionError(
                f"`{fresh[id(tensor)]}` was created without memory, as under `smp.delay_param_initialization`, and has "
                f"no initial "
                "values: neither `reset_parameters` of its module nor `_init_weights` of the model sets them"
            )


def _has_nan(tensor: torch.Tensor) -> bool:
    # The sum of a tensor with NaN is NaN, and needs no memory to compute.
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def inside_first(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    """Yield every module once, after its submodules."""
    seen = set() if seen is None else seen
    if id(module) not in seen:
        seen.add(id(module))
        for child in module.children():
            yield from inside_first(child, seen)
        yield module


def _find_owners(module: nn.Module, owner: nn.Module | None, owners: dict[int, nn.Module]) -> None:
    """Find for every module the nearest one, itself or an ancestor, that has Hugging Face's ``_init_weights``."""
    own = getattr(module, "_init_weights", None)
    if callable(own) and len(inspect.signature(own).parameters) == 1:
        owner = module
    if owner is not None:
        owners.setdefault(id(module), owner)
    for child in module.children():
        _find_owners(child, owner, owners)


@contextmanager
def _others_out_of_reach(root: nn.Module, fresh: Mapping[int, str]) -> Iterator[None]:
    """Hide initialized and remote parameters while the modules around them initialize their parameters.

    A shared parameter belongs to its first module. Buffers stay readable.
    """
    kept: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    copies: dict[int, torch.Tensor] = {}
    twins: dict[int, nn.Parameter] = {}
    seen: set[int] = set()
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and (id(parameter) not in fresh or id(parameter) in seen):
                kept.append((module._parameters, name, parameter))
                twin = twins.setdefault(id(parameter), _alike(parameter, parameter.detach().to("meta")))
                module._parameters[name] = twin
            seen.add(id(parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in fresh and not is_lazy(buffer):
                kept.append((module._buffers, name, buffer))
                if id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
                module._buffers[name] = copies[id(buffer)]
    try:
        yield
    finally:
        for table, name, tensor in kept:
            table[name] = tensor


@contextmanager
def _parametrized_in_reach(module: nn.Module, fresh: Mapping[int, str]) -> Iterator[None]:
    """Let a module write to tensors that are computed from other parameters, as by ``parametrizations.weight_norm``.

    Afterwards ``right_inverse`` sets those parameters.
    """
    if not parametrize.is_parametrized(module):
        yield
        return
    chains: Any = module.parametrizations
    # With the cache, every access returns the same tensor.
    with parametrize.cached():
        values = {
            name: getattr(module, name)
            for name, chain in chains.items()
            if any(id(parameter) in fresh for parameter in chain._parameters.values())
        }
        yield
    for name, value in values.items():
        chain = chains[name]
        for step in reversed(chain):
            try:
                value = step.right_inverse(value) if hasattr(step, "right_inverse") else value
            except NotImplementedError:
                # A parametrization without `right_inverse` counts as the identity, as at its registration.
                continue
        originals = (
            [chain.original] if chain.is_tensor else [getattr(chain, f"original{at}") for at in range(chain.ntensors)]
        )
        for original, part in zip(originals, [value] if chain.is_tensor else value, strict=True):
            original.copy_(part)


@torch.no_grad()
def broadcast(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None, source: int) -> None:
    """Broadcast tensors from global rank ``source`` to all ranks of ``group``, many at once."""
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
    """Return a context in which parameters of new modules take no memory until the model is partitioned.

    Each rank then initializes its own parameters, with ``reset_parameters`` of the module or ``_init_weights`` of a
    model of Hugging Face. Buffers and other tensors are created at once, and so is a tensor that replaces such a
    parameter.

    Args:
        enabled: Whether to delay; with ``False`` the context has no effect.

    Yields:
        Nothing.
    """
    if not enabled:
        yield
        return
    handle = delay_parameters()
    try:
        yield
    finally:
        handle.remove()


def delay_parameters() -> RemovableHandle:
    """Delay parameters until the returned handle is removed.

    Lazy parameters, which have no memory yet, are not changed.
    """
    # A parameter that is registered twice must stay one parameter.
    twins = WeakIdKeyDictionary()

    def delayed(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or is_lazy(parameter):
            return None
        before = module._parameters.get(name)
        if before is not None and before.is_meta:
            # The script or a loader created it on the meta device, and sets its values later.
            return None
        if parameter not in twins:
            twins[parameter] = _alike(parameter, parameter.detach().to("meta"))
        return twins[parameter]

    # PyTorch's stubs do not allow hooks that return a parameter.
    hook: Callable[..., Any] = delayed
    return register_module_parameter_registration_hook(hook)


def _alike(parameter: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """Return ``values`` as a parameter of the same class, with the same attributes."""
    new = nn.Parameter(values, parameter.requires_grad)
    if type(new) is not type(parameter):
        new.__class__ = type(parameter)
    vars(new).update(vars(parameter))
    return new
