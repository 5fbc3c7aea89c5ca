"""Which classes tensor parallelism replaces, and by which."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from smdistributed.modelparallel.exceptions import SMPValidationError
from smdistributed.modelparallel.torch.nn.embedding import DistributedEmbedding
from smdistributed.modelparallel.torch.nn.linear import DistributedLinear
from smdistributed.modelparallel.torch.nn.module import DistributedModule

_Class = TypeVar("_Class", bound=type)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
#: From the state of a module, and the module, to the state of the module in its place, with whole parameters.
Translation = Callable[[Mapping[str, torch.Tensor], nn.Module], Mapping[str, torch.Tensor]]

StateTranslations = tuple[Callable[[dict[str, Any]], dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]]

#: In a module's `__dict__`: the arguments of its constructor.
_ARGUMENTS = "_smp_arguments"


@dataclass(frozen=True)
class Registration:
    """How modules of one class are replaced.

    Attributes:
        dist_module: The class in its place.
        arguments: The arguments of that class, for a module.
        forward_hook: The arguments of its ``forward``, for those of the module's.
        return_hook: What the module's ``forward`` would return, for what its own returns.
        translate: The state of the new module, from that of the module; ``None``: it gets initial values of its own.
        model_translations: For a module, two functions that translate the state of a whole model with the new module to
            the names of the model without, and back; ``None`` if the names are the same.
    """

    dist_module: type[DistributedModule]
    arguments: Callable[[nn.Module], Arguments]
    forward_hook: Callable[..., Arguments] | None = None
    return_hook: Callable[[Any], Any] | None = None
    translate: Translation | None = None
    model_translations: Callable[[nn.Module], StateTranslations] | None = None

    @functools.cached_property
    def adapted(self) -> type[DistributedModule]:
        """The class in its place, called as the module's."""
        if self.forward_hook is None and self.return_hook is None:
            return self.dist_module
        before, after, dist_module = self.forward_hook, self.return_hook, self.dist_module

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if before is not None:
                args, kwargs = before(*args, **kwargs)
            result = dist_module.forward(self, *args, **kwargs)
            return result if after is None else after(result)

        return type(dist_module.__name__, (dist_module,), {"forward": forward, "__module__": dist_module.__module__})


def _linear(module: nn.Module) -> Arguments:
    assert isinstance(module, nn.Linear)
    return (module.in_features, module.out_features, module.bias is not None), {}


def _embedding(module: nn.Module) -> Arguments:
    assert isinstance(module, nn.Embedding)
    options = (module.padding_idx, module.max_norm, module.norm_type, module.scale_grad_by_freq, module.sparse)
    return (module.num_embeddings, module.embedding_dim, *options), {}


def _as_it_is(state_dict: Mapping[str, torch.Tensor], module: nn.Module) -> Mapping[str, torch.Tensor]:
    del module
    return state_dict


_registered: dict[type, Registration] = {
    nn.Linear: Registration(DistributedLinear, _linear, translate=_as_it_is),
    nn.Embedding: Registration(DistributedEmbedding, _embedding, translate=_as_it_is),
}
#: Asked for classes that are not registered, such as those of a library that may be imported later.
_finders: list[Callable[[type], Registration | None]] = []


def find(module_cls: type) -> Registration | None:
    """Return how modules of a class are replaced.

    Args:
        module_cls: The class itself, not one that inherits from it.

    Returns:
        The registration, if there is one.
    """
    found = _registered.get(module_cls)
    return found or next((each for finder in _finders if (each := finder(module_cls)) is not None), None)


def add_finder(finder: Callable[[type], Registration | None]) -> None:
    """Ask a function for classes that are not registered.

    Args:
        finder: The function.
    """
    _finders.append(finder)


def tp_register(
    dist_module: type,
    init_hook: Callable[..., Arguments] | None = None,
    forward_hook: Callable[..., Arguments] | None = None,
    return_hook: Callable[[Any], Any] | None = None,
) -> Callable[[_Class], _Class]:
    """Name the class that replaces the decorated one under tensor parallelism.

    Args:
        dist_module: A class that inherits from ``smp.nn.DistributedModule``.
        init_hook: From the arguments of the decorated constructor, ``(args, kwargs)`` of that of ``dist_module``; by
            default the same.
        forward_hook: From the arguments of the decorated ``forward``, ``(args, kwargs)`` of that of ``dist_module``; by
            default the same.
        return_hook: From what ``dist_module`` returns, what the decorated ``forward`` would.

    Returns:
        A decorator that returns the class.

    Examples:
        >>> @smp.tp_register(smp.nn.DistributedTransformerOutputLayer, init_hook=lambda config: ((config.size,), {}))
        ... class FeedForward(nn.Module): ...
    """

    def register(module_cls: _Class) -> _Class:
        tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)
        return module_cls

    return register


def tp_register_with_module(
    module_cls: type,
    dist_module: type,
    init_hook: Callable[..., Arguments] | None = None,
    forward_hook: Callable[..., Arguments] | None = None,
    return_hook: Callable[[Any], Any] | None = None,
) -> None:
    """Name the class that replaces another one, as :func:`tp_register` does.

    Args:
        module_cls: The class that is replaced. Modules of it that are created from now on can be.
        dist_module: As of :func:`tp_register`.
        init_hook: As of :func:`tp_register`.
        forward_hook: As of :func:`tp_register`.
        return_hook: As of :func:`tp_register`.

    Raises:
        SMPValidationError: A class is none of modules.
    """
    if not (isinstance(module_cls, type) and issubclass(module_cls, nn.Module)):
        raise SMPValidationError(f"`{module_cls!r}` is no class of modules")
    if not (isinstance(dist_module, type) and issubclass(dist_module, DistributedModule)):
        raise SMPValidationError(f"`{dist_module!r}` does not inherit from `smp.nn.DistributedModule`")
    _keep_arguments(module_cls)

    def arguments(module: nn.Module) -> Arguments:
        if _ARGUMENTS not in module.__dict__:
            raise SMPValidationError(
                f"a {module_cls.__name__} was created before its class was registered: the arguments of its "
                "constructor are not known"
            )
        args, kwargs = module.__dict__[_ARGUMENTS]
        return (args, kwargs) if init_hook is None else init_hook(*args, **kwargs)

    _registered[module_cls] = Registration(dist_module, arguments, forward_hook, return_hook)


def _keep_arguments(module_cls: type) -> None:
    """Modules of this class keep the arguments of their constructor."""
    original = module_cls.__init__
    if hasattr(original, "_smp_keeps_arguments"):
        return

    @functools.wraps(original)
    def constructor(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if type(self) is module_cls:
            self.__dict__[_ARGUMENTS] = args, kwargs
        original(self, *args, **kwargs)

    constructor._smp_keeps_arguments = True  # type: ignore[attr-defined]
    constructor.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    module_cls.__init__ = constructor  # type: ignore[misc]
