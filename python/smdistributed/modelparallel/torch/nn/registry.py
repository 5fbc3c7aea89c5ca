"""The classes of modules that tensor parallelism replaces, and their replacements."""

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
#: Converts the state of a module, given the module, to that of its replacement, with whole parameters.
Translation = Callable[[Mapping[str, torch.Tensor], nn.Module], Mapping[str, torch.Tensor]]

StateTranslations = tuple[Callable[[dict[str, Any]], dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]]

#: The key in a module's `__dict__` of its constructor's arguments.
_ARGUMENTS = "_smp_arguments"


@dataclass(frozen=True)
class Registration:
    """The replacement of the modules of one class.

    Attributes:
        dist_module: The class of the replacement.
        arguments: Returns the replacement's constructor arguments for a module.
        forward_hook: Converts the arguments of the module's ``forward`` to those of the replacement's.
        return_hook: Converts the result of the replacement's ``forward`` to that of the module's.
        translate: Converts the module's state to the replacement's; ``None``: the replacement is initialized anew.
        model_translations: For a module, two functions that convert the names in a whole model's state from the
        replacement's to the module's, and back; ``None`` if the names are the same.
    """

    dist_module: type[DistributedModule]
    arguments: Callable[[nn.Module], Arguments]
    forward_hook: Callable[..., Arguments] | None = None
    return_hook: Callable[[Any], Any] | None = None
    translate: Translation | None = None
    model_translations: Callable[[nn.Module], StateTranslations] | None = None

    @functools.cached_property
    def adapted(self) -> type[DistributedModule]:
        """The replacement's class, with the calling convention of the module's class."""
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
#: Functions that provide registrations of further classes, such as those of a library that may be imported later.
_finders: list[Callable[[type], Registration | None]] = []


def find(module_cls: type) -> Registration | None:
    """Return how modules of a class are replaced.

    Args:
        module_cls: The class itself; registrations are not inherited.

    Returns:
        The registration, if there is one.
    """
    found = _registered.get(module_cls)
    return found or next((each for finder in _finders if (each := finder(module_cls)) is not None), None)


def add_finder(finder: Callable[[type], Registration | None]) -> None:
    """Add a function that provides registrations of further classes.

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
    """Register the class that replaces the decorated one under tensor parallelism.

    Args:
        dist_module: A subclass of ``smp.nn.DistributedModule``.
        init_hook: Converts the arguments of the decorated constructor to ``(args, kwargs)`` of that of
        ``dist_module``; by default they are unchanged.
        forward_hook: Converts the arguments of the decorated ``forward`` to ``(args, kwargs)`` of that of
        ``dist_module``; by default they are unchanged.
        return_hook: Converts the result of ``dist_module`` to that of the decorated ``forward``.

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
    """Register the class that replaces another one, as :func:`tp_register` does.

    Args:
        module_cls: The class to replace. Only modules that are created from now on are replaced.
        dist_module: As for :func:`tp_register`.
        init_hook: As for :func:`tp_register`.
        forward_hook: As for :func:`tp_register`.
        return_hook: As for :func:`tp_register`.

    Raises:
        SMPValidationError: A class is not a class of modules.
    """
    if not (isinstance(module_cls, type) and issubclass(module_cls, nn.Module)):
        raise SMPValidationError(f"`{module_cls!r}` is not a class of modules")
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
    """Make modules of this class store the arguments of their constructor."""
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
