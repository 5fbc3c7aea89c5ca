"""Intercepts module calls while a step is recorded.

``nn.Module.__call__``, and the method of each class in the model that overrides it, is replaced during the recording.
``super().forward()`` and all other code inside of a forward is unchanged. Also replaced are ``nn.Module.__setattr__``
and ``__delattr__``, because tasks run with the attributes that their modules had at the call, and
``torch.autograd.Function.apply``, which PyTorch does not pass to function modes.

- HOOK-1: forward hooks are Python code that gets inputs and outputs, so they run in the body, on all ranks.
- HOOK-2: a module that contains modules with hooks runs its own forward in the body, so that each module with hooks
  is called there. Hooks of ``torch.nn.utils`` that compute parameters, and backward hooks, stay on the module's
  partition.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.apis
from torch import nn
from torch.nn.modules import module as torch_module

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.runtime.pipeline import Pipeline
from smdistributed.modelparallel.torch.tracing.buffers import set_buffer
from smdistributed.modelparallel.torch.tracing.key_value_caches import without_new_cache
from smdistributed.modelparallel.torch.tracing.recording import active
from smdistributed.modelparallel.torch.tracing.remote_tensor import RemoteTensor, storage_write

#: Names of a module's tables of hooks that get inputs or outputs of its forward.
_FORWARD_TABLES = ("_forward_pre_hooks", "_forward_hooks")
_BACKWARD_TABLES = ("_backward_pre_hooks", "_backward_hooks")


class _Hooks:
    """The modules of a pipeline with forward hooks, and the modules that contain such modules."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[list[Any], list[Any]]] = {}
        #: Modules whose hooks are running in the body.
        self.entered: set[int] = set()

    def _of(self, module: nn.Module) -> tuple[list[Any], list[Any]]:
        known = self._tables.get(id(module))
        if known is None:
            own = [getattr(module, name) for name in _FORWARD_TABLES]
            below = [getattr(each, name) for each in module.modules() if each is not module for name in _FORWARD_TABLES]
            known = self._tables[id(module)] = own, below
        return known

    def below(self, module: nn.Module) -> bool:
        """Return whether a submodule has forward hooks."""
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return any(True for _ in module.children())
        tables = self._of(module)[1]
        return any(tables) and any(table and _any_visible(table) for table in tables)

    def on(self, module: nn.Module) -> bool:
        """Return whether the module itself has forward hooks."""
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return True
        tables = self._of(module)[0]
        return any(tables) and any(table and _any_visible(table) for table in tables)


def _computes_parameters(hook: Any) -> bool:
    return getattr(hook, "__module__", None) is not None and hook.__module__.startswith("torch.nn.utils")


def _any_visible(table: dict[int, Any]) -> bool:
    return not all(map(_computes_parameters, table.values()))


@contextmanager
def _tables_replaced(module: nn.Module, keep: Callable[[str, Any], bool]) -> Iterator[None]:
    """Remove hooks of a module in the context, except those for which ``keep(table, hook)`` is true."""
    originals = {name: getattr(module, name) for name in (*_FORWARD_TABLES, *_BACKWARD_TABLES)}
    try:
        for name, table in originals.items():
            if table:
                module.__dict__[name] = type(table)((key, hook) for key, hook in table.items() if keep(name, hook))
        yield
    finally:
        module.__dict__.update(originals)


def _without_forward_hooks(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module on its partition."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            _tables_replaced(module, lambda name, hook: name in _BACKWARD_TABLES or _computes_parameters(hook))
        )
        return module(*args, **kwargs)


def _recorded(original: Callable[..., Any], pipeline: Pipeline, hooks: _Hooks) -> Callable[..., Any]:
    whole, paths = pipeline.placement.whole, pipeline.paths

    def with_hooks(self: nn.Module, rank: int, args: Any, kwargs: Any) -> Any:
        bare = functools.partial(_without_forward_hooks, self)

        def restore() -> None:
            if own is None:
                self.__dict__.pop("forward", None)
            else:
                self.__dict__["forward"] = own

        def forward(*args: Any, **kwargs: Any) -> Any:
            # The output spec is found with the module's original call.
            restore()
            recording = active.recording
            assert recording is not None
            return recording.call_module(self, paths[id(self)], rank, args, kwargs, bare)

        own = self.__dict__.get("forward")
        self.__dict__["forward"] = forward
        hooks.entered.add(id(self))
        keep = _tables_replaced(self, lambda name, hook: name in _FORWARD_TABLES and not _computes_parameters(hook))
        try:
            with keep:
                return original(self, *args, **kwargs)
        finally:
            hooks.entered.discard(id(self))
            restore()

    @functools.wraps(original)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recording = active.recording
        rank = whole.get(id(self)) if recording is not None else None
        if (
            rank is None
            and recording is not None
            and (self._backward_hooks or self._backward_pre_hooks)
            and id(self) in paths
        ):
            raise SMPUsageError(
                f"`{paths[id(self)]}` has backward hooks and is spread over partitions, so no partition has its "
                "inputs and outputs: register the hooks on modules that are on one partition"
            )
        if rank is None and recording is not None:
            kwargs = without_new_cache(self, args, kwargs)
        if rank is None or id(self) in hooks.entered or hooks.below(self):
            return original(self, *args, **kwargs)
        if hooks.on(self):
            return with_hooks(self, rank, args, kwargs)
        assert recording is not None
        return recording.call_module(self, paths[id(self)], rank, args, kwargs)

    return call


def _recorded_vmap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def vmap(
        func: Any, in_dims: Any, out_dims: Any, randomness: str, chunk_size: int | None, *args: Any, **kwargs: Any
    ) -> Any:
        recording = active.recording
        if recording is None or not any(map(recording.is_located, pytree.tensors_of((args, kwargs)))):
            return original(func, in_dims, out_dims, randomness, chunk_size, *args, **kwargs)
        mapped = functools.partial(original, func, in_dims, out_dims, randomness, chunk_size)
        return recording.call_function("vmap", mapped, args, kwargs)

    return vmap


def _recorded_set(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``Tensor.set_``, the only method that PyTorch does not pass to function modes."""

    @functools.wraps(original)
    def set_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        recording = active.recording
        if recording is None:
            return original(self, *args, **kwargs)
        if any(isinstance(each, torch.Tensor) for each in (*args, *kwargs.values())):
            # Pieces of a batch share a storage on the first rank only, so ranks would differ in what the tensor sees.
            raise storage_write("set_", "a tensor")
        result: torch.Tensor = recording.operation(original, (self, *args), kwargs)
        return result

    return set_


def _noted(original: Callable[..., Any], pipeline: Pipeline) -> Callable[..., Any]:
    state = pipeline.module_state

    @functools.wraps(original)
    def change(self: nn.Module, name: str, *value: Any) -> None:
        recording = active.recording
        if recording is None or not state.follows(self):
            sets_tensor = recording is not None and value and isinstance(value[0], torch.Tensor)
            is_buffer = sets_tensor and name in self.__dict__.get("_buffers", ()) and id(self) in pipeline.paths
            if recording is not None and is_buffer and recording.is_located(value[0]):
                set_buffer(recording, self, name, value[0])
            else:
                original(self, name, *value)
            return
        state.check_use(self, name)
        before = self.__dict__.get(name)
        if value and before is value[0] and name in self.__dict__:
            return
        tables = (self._parameters, self._buffers, self._modules)
        if any(name in table for table in tables) or (value and isinstance(value[0], nn.Module | nn.Parameter)):
            raise SMPUsageError(
                f"`{pipeline.paths.get(id(self), type(self).__name__)}.{name}` is a parameter, a buffer or a module: "
                "set it before the `smp.step` function is called"
            )
        path = f"{pipeline.paths.get(id(self), type(self).__name__)}.{name}"
        tensor = value[0] if value and isinstance(value[0], torch.Tensor) else None
        if type(tensor) is RemoteTensor or id(tensor) in pipeline.located:
            # A tensor on a partition, or a buffer of the model.
            tensor = None
        if tensor is not None and recording.is_located(tensor):
            # The tensor itself has the numbers from before the change.
            raise SMPUsageError(
                f"`{path}` is set to a tensor that was changed in place with values of a partition: pass the tensor "
                "to the module instead, or assign a copy that is made before the change"
            )
        with state.changing(self, name):
            original(self, name, *value)

    return change


def _reads_watched(pipeline: Pipeline) -> Callable[[nn.Module, str], Any]:
    """Replace ``nn.Module.__getattribute__``, to reject reads of attributes that calls change (MST-4)."""
    state, changed = pipeline.module_state, pipeline.module_state.changed_by_calls
    read = object.__getattribute__

    def get(self: nn.Module, name: str) -> Any:
        if (id(self), name) in changed and active.recording is not None:
            state.check_use(self, name)
        return read(self, name)

    return get


class _Apply:
    """Records ``torch.autograd.Function.apply`` of one class as one operation."""

    def __init__(self, function: type[torch.autograd.Function], original: Callable[..., Any]) -> None:
        self._original = original
        self.__name__ = f"{function.__qualname__}.apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._original(*args, **kwargs)


def _applied(original: Any) -> classmethod:
    """Wrap the class method ``apply`` of ``Function``: a `classmethod`, or of C since PyTorch 2.15.

    The latter has no `__func__`, so either is bound to the class as attribute access would.
    """

    @functools.wraps(original.__get__(None, torch.autograd.Function))
    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        recording = active.recording
        if recording is None or not recording.has_located((args, kwargs)):
            return original.__get__(None, cls)(*args, **kwargs)
        call = vars(cls).get("_smp_apply")
        if call is None:
            call = _Apply(cls, original.__get__(None, cls))
            setattr(cls, "_smp_apply", call)  # noqa: B010 - no attribute of `Function`
        return recording.operation(call, args, kwargs)

    return classmethod(apply)


@contextmanager
def intercepted(pipeline: Pipeline) -> Iterator[None]:
    """Return a context in which calls of modules that are on one partition are recorded as tasks."""
    replaced: list[tuple[Any, str, Any, Any]] = []
    hooks = _Hooks()
    for owner in pipeline.callers:
        original = vars(owner)["__call__"]
        replaced.append((owner, "__call__", original, _recorded(original, pipeline, hooks)))
    vmap = torch._functorch.apis.vmap_impl
    replaced.append((torch._functorch.apis, "vmap_impl", vmap, _recorded_vmap(vmap)))
    replaced.append((torch.Tensor, "set_", torch.Tensor.set_, _recorded_set(torch.Tensor.set_)))
    for name in ("__setattr__", "__delattr__"):
        original = vars(nn.Module)[name]
        replaced.append((nn.Module, name, original, _noted(original, pipeline)))
    function = torch.autograd.Function
    original = vars(function)["apply"]
    replaced.append((function, "apply", original, _applied(original)))

    def watch_reads() -> None:
        # Done only when some module changes attributes, because it slows down every access.
        owner: Any = nn.Module
        owner.__getattribute__ = _reads_watched(pipeline)

    state = pipeline.module_state
    try:
        for owner, name, _, replacement in replaced:
            setattr(owner, name, replacement)
        if state.changed_by_calls:
            watch_reads()
        else:
            state.on_first_change = watch_reads
        yield
    finally:
        state.on_first_change = None
        if "__getattribute__" in vars(nn.Module):
            del nn.Module.__getattribute__
        for owner, name, original, _ in replaced:
            setattr(owner, name, original)
