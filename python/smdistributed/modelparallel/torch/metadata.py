"""What an operation or a module would return, without computing it: fake tensors go through it once for each
signature, and the answer is kept.

Every rank can do so for every module, since fake parameters take no memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from smdistributed.modelparallel.torch import structure
from smdistributed.modelparallel.torch.handle import Meta
from smdistributed.modelparallel.torch.prices import UNKNOWN, Counter, Price

#: Signatures that are remembered; a step that never repeats one must not fill the memory.
_LIMIT = 1 << 14


@dataclass(frozen=True)
class Outcome:
    """What comes out of a call.

    Attributes:
        template: The structure, with slots for tensors.
        metas: Of these tensors.
        mutated: Places, among the tensors that went in, of those that the call changes.
        aliases: For each tensor that comes out, the place of the one that went in if it is the same object.
        price: What it is estimated to cost; equal on all ranks.
    """

    template: Any
    metas: tuple[Meta, ...]
    mutated: tuple[int, ...]
    aliases: tuple[int | None, ...]
    price: Price = UNKNOWN


class UnknownOutcomeError(Exception):
    """It takes the numbers themselves to tell what comes out."""


class Outcomes:
    """Keeps what was found."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Any, Outcome] = {}
        self._counter = Counter()

    def known(self, key: Any) -> Outcome | None:
        """What was found for a signature before."""
        return self._known.get(key) if key is not None else None

    def keep(self, key: Any, outcome: Outcome) -> None:
        """From now on, this is known."""
        if key is None:
            return
        if len(self._known) >= _LIMIT:
            self._known.clear()
        self._known[key] = outcome

    def of(self, call: Callable[..., Any], args: Any, kwargs: Any, meta_of: Callable[[Any], Meta]) -> Outcome:
        """Finds out. ``args`` and ``kwargs`` are structures with leaves that ``meta_of`` describes.

        Raises:
            UnknownOutcomeError: the call looks at numbers, or does not work without them.
        """
        leaves: list[torch.Tensor] = []
        counter = self._counter = Counter()

        def fake(leaf: Any) -> torch.Tensor:
            leaves.append(self.fake(meta_of(leaf)))
            if getattr(leaf, "parameter", None) is not None:
                counter.parameter(leaves[-1])
            return leaves[-1]

        try:
            with self._mode:
                fake_args, fake_kwargs = structure.transform((_own(args), _own(kwargs)), fake)
                versions = [leaf._version for leaf in leaves]
                with counter:
                    result = call(*fake_args, **fake_kwargs)
                shape, outputs = structure.template(result)
                if not all(isinstance(output, torch.Tensor) and output.layout == torch.strided for output in outputs):
                    raise UnknownOutcomeError("its result is not strided")
                metas = tuple(Meta.of(output) for output in outputs)
        except UnknownOutcomeError:
            raise
        except Exception as error:
            # Whatever it is: the real call will say it again, or work.
            raise UnknownOutcomeError(str(error)) from error
        places = {id(leaf): place for place, leaf in enumerate(leaves)}
        mutated = tuple(place for place, leaf in enumerate(leaves) if leaf._version != versions[place])
        for tensor in (*leaves, *outputs):
            counter.outside(tensor)
        aliases = tuple(places.get(id(output)) for output in outputs)
        return Outcome(shape, metas, mutated, aliases, counter.price())

    def fake(self, meta: Meta, leaf: bool = False) -> torch.Tensor:
        """A fake tensor; unless ``leaf``, one that may be changed in place even if it requires a gradient."""
        with self._mode, torch.enable_grad():
            tensor = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
            if not meta.requires_grad:
                return tensor
            tensor.requires_grad_()
            return tensor if leaf else _Alias.apply(tensor)

    def module(self, module: nn.Module, what: Callable[..., Any]) -> Callable[..., Any]:
        """``what``, which calls ``module`` or is it, with fake parameters."""
        module = getattr(module, "_orig_mod", module)
        caller = module if isinstance(what, nn.Module) else _Caller(module, what)

        def call(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(each, torch.jit.ScriptModule) for each in module.modules()):
                raise UnknownOutcomeError("its code is TorchScript's")
            tensors = {}
            for name, tensor in (
                *module.named_parameters(remove_duplicate=False),
                *module.named_buffers(remove_duplicate=False),
            ):
                tensors[name if caller is module else f"module.{name}"] = self._counter.parameter(
                    self.fake(Meta.of(tensor), leaf=True)
                )
            with preserved_attributes(module):
                return torch.func.functional_call(caller, tensors, args, kwargs, tie_weights=True)

        return call


class _Caller(nn.Module):
    """A function that calls a module, as a module with its parameters."""

    def __init__(self, module: nn.Module, what: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.what = module, what

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return self.what(*args, **kwargs)


class _Alias(torch.autograd.Function):
    """The same memory, neither a leaf nor a view: it may be changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class preserved_attributes:  # noqa: N801 - a context
    """What modules note in themselves during a call (counters, caches) is taken back."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())

    def __enter__(self) -> None:
        self._before = [dict(module.__dict__) for module in self._modules]

    def __exit__(self, *_: object) -> None:
        for module, before in zip(self._modules, self._before, strict=True):
            if module.__dict__.keys() != before.keys():
                for name in module.__dict__.keys() - before.keys():
                    del module.__dict__[name]
            for name, value in before.items():
                if module.__dict__.get(name) is not value:
                    module.__dict__[name] = value


def _own(value: Any) -> Any:
    """Objects that the call may change, such as caches of keys and values, are copied; tensors, modules and functions
    are not."""
    if isinstance(value, tuple | list):
        return type(value)(_own(item) for item in value) if type(value) in (tuple, list) else value
    if type(value) is dict:
        return {key: _own(item) for key, item in value.items()}
    if type(value) in structure.ATOMS or isinstance(value, slice | torch.Tensor | nn.Module) or callable(value):
        return value
    if getattr(type(value), "_smp_leaf", False) or isinstance(value, tuple | list | dict):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:
        return value
