"""Marks modules for tensor parallelism, and replaces them when the model is wrapped."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from smdistributed._common import errors
from smdistributed.modelparallel.exceptions import CLASSES, SMPUnsupportedError, SMPValidationError
from smdistributed.modelparallel.torch.module_creation import created_modules
from smdistributed.modelparallel.torch.nn import collectives, registry
from smdistributed.modelparallel.torch.nn.module import DistributedModule, NotDivisibleError
from smdistributed.modelparallel.torch.nn.options import OPTION_NAMES, BlockOptions
from smdistributed.modelparallel.torch.partitioning.materialize import broadcast
from smdistributed.modelparallel.torch.state import state

#: The key in a module's `__dict__` of its mark: whether it is marked, and arguments for its replacement.
_MARK = "_smp_tensor_parallelism"

#: Keyword arguments of the original that select equivalent implementations, or belong to features that do not
#: exist here. They are ignored with a warning.
_WITHOUT_EFFECT = {
    "fused_softmax": "PyTorch chooses the kernel of the attention",
    "fused_dropout": "PyTorch chooses the kernel of dropout",
    "fused_bias_gelu": "PyTorch chooses the kernel of the activation",
    "flash_attention": "PyTorch chooses the kernel of the attention",
    "query_key_layer_scaling": "scores are computed without an overflow",
    "zero_init": "weights are initialized as the module's configuration says",
}


@contextmanager
def tensor_parallelism(enabled: bool = True, **kwargs: Any) -> Iterator[None]:
    """Mark modules that are created in the context, so that ``smp.DistributedModel`` replaces them by distributed ones.

    If marked modules contain each other, only the outermost one with a supported class is replaced. The innermost
    context takes precedence.

    Args:
        enabled: Whether modules are marked.
        **kwargs: Arguments of the distributed module, which take precedence over those derived from the module.

    Yields:
        Nothing.
    """

    def mark(module: nn.Module) -> None:
        module.__dict__[_MARK] = enabled, kwargs

    with created_modules(mark):
        yield


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **kwargs: Any) -> None:
    """Mark an existing module, or remove the marks of it and of all its submodules.

    Args:
        module: The module, which must not be wrapped yet.
        enabled: Whether it is marked; the outermost supported modules in it are replaced.
        **kwargs: Arguments of the distributed modules.
    """
    for each in module.modules():
        each.__dict__[_MARK] = enabled, kwargs


def replace_marked(root: nn.Module) -> nn.Module:
    """Replace the outermost marked modules with a supported class. All ranks of a tensor-parallel group call it.

    A module is not replaced if a size is not divisible, or if it shares parameters with other modules.

    Args:
        root: The model; its submodules are replaced in place.

    Returns:
        The model, or its replacement.
    """
    owners: dict[int, int] = {}
    for module in root.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    made: dict[int, nn.Module] = {}
    return _replaced(root, "", owners, made)


def _replaced(module: nn.Module, path: str, owners: Mapping[int, int], made: dict[int, nn.Module]) -> nn.Module:
    known = made.get(id(module))
    if known is not None:
        return known
    made[id(module)] = module
    enabled, kwargs = module.__dict__.get(_MARK, (False, {}))
    registration = registry.find(type(module)) if enabled else None
    if registration is not None:
        new = _distributed(module, path, registration, kwargs, owners)
        if new is not None:
            made[id(module)] = new
            # A module with several parents is found once for each of them.
            made[id(new)] = new
            return new
    if isinstance(module, DistributedModule):
        return module
    for name, child in list(module._modules.items()):
        if child is not None:
            module._modules[name] = _replaced(child, f"{path}.{name}" if path else name, owners, made)
    return module


def _distributed(
    module: nn.Module,
    path: str,
    registration: registry.Registration,
    kwargs: Mapping[str, Any],
    owners: Mapping[int, int],
) -> nn.Module | None:
    """Return the replacement of a module; ``None`` if it is not replaced."""
    inside: dict[int, int] = {}
    for each in module.modules():
        for parameter in each._parameters.values():
            if parameter is not None:
                inside[id(parameter)] = inside.get(id(parameter), 0) + 1
    if any(owners[key] != count for key, count in inside.items()):
        _warn_skipped(type(module).__name__, f"`{path}` shares a parameter with another module")
        return None
    try:
        args, own_kwargs = registration.arguments(module)
        new = _make(registration.adapted, args, own_kwargs, kwargs, module)
    except NotDivisibleError as error:
        _warn_skipped(type(module).__name__, str(error))
        return None
    except SMPUnsupportedError as error:
        _warn_skipped(type(module).__name__, str(error))
        return None
    if registration.translate is not None and not any(each.is_meta for each in module.parameters()):
        _load(new, registration.translate(_state_of_first(module), module))
    if registration.model_translations is not None:
        state.module_manager.add(type(module), registration.model_translations(module))
    new.train(module.training)
    if hasattr(module, "config"):
        new.config = module.config
    for parameter in new.parameters():
        # The replacement's parameters require gradients only if the module's did.
        parameter.requires_grad_(any(each.requires_grad for each in module.parameters()) or not inside)
    return new


def _make(
    kind: type[DistributedModule], args: Any, own_kwargs: Mapping[str, Any], given: Mapping[str, Any], old: nn.Module
) -> nn.Module:
    """Create a distributed module; arguments of the mark take precedence over those derived from the module."""
    signature = inspect.signature(kind.__init__)
    bound = signature.bind(None, *args, **own_kwargs)
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in signature.parameters and name != "self":
            bound.arguments[name] = value
        elif name in OPTION_NAMES and "options" in signature.parameters:
            options[name] = value
        elif name in _WITHOUT_EFFECT or name in OPTION_NAMES:
            _warn_without_effect(name, _WITHOUT_EFFECT.get(name, f"{kind.__name__} has no module that uses it"))
        elif name == "distribute_embedding":
            _warn_without_effect(name, "embeddings of distributed transformers are always divided")
        elif not _is_argument_of_any(name):
            raise SMPValidationError(f"`smp.tensor_parallelism` has no argument `{name}`")
    if options:
        bound.arguments["options"] = dataclasses.replace(bound.arguments.get("options") or BlockOptions(), **options)
    parameter = next(old.parameters(), None)
    before = torch.get_default_dtype()
    if parameter is not None and parameter.is_floating_point():
        torch.set_default_dtype(parameter.dtype)
    try:
        with torch.device(parameter.device if parameter is not None else "cpu"):
            return kind(*bound.args[1:], **bound.kwargs)
    finally:
        torch.set_default_dtype(before)


@functools.cache
def _is_argument_of_any(name: str) -> bool:
    from smdistributed.modelparallel.torch import nn as smp_nn

    classes = [each for each in vars(smp_nn).values() if isinstance(each, type) and issubclass(each, DistributedModule)]
    return any(name in inspect.signature(each.__init__).parameters for each in classes)


def _state_of_first(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's state on the first rank of the group, so that all slices are parts of the same tensors."""
    found = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    if state.groups.tp_group is not None:
        with errors.translated(CLASSES):
            broadcast(list(found.values()), state.groups.tp_group, state.groups.members["tp"][0])
    return found


def _load(module: nn.Module, whole: Mapping[str, torch.Tensor]) -> None:
    """Set all parameters of a distributed module to slices of a whole state."""
    left = set(whole)
    for path, each in module.named_modules():
        for name in each._parameters:
            full = f"{path}.{name}" if path else name
            if full in whole and isinstance(each, DistributedModule):
                each.load_whole(name, whole[full])
                left.discard(full)
    assert not left, f"the translation has names that the module has not: {sorted(left)}"


@functools.cache
def _warn_skipped(kind: str, reason: str) -> None:
    warnings.warn(f"a {kind} is not distributed over {collectives.tp_size()} ranks: {reason}", stacklevel=2)


@functools.cache
def _warn_without_effect(name: str, reason: str) -> None:
    warnings.warn(f"`{name}` of `smp.tensor_parallelism` has no effect: {reason}", stacklevel=2)
