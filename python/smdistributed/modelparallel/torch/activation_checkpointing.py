"""Activation checkpointing: activations are recomputed in the backward instead of being kept.

A checkpointed unit is a module that is completely on one partition, or adjacent children of an ``nn.Sequential`` that
are on one partition. Its inputs and outputs are kept; intermediate activations are not.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from smdistributed.modelparallel.exceptions import SMPPartitionError, SMPValidationError
from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.nn import collectives
from smdistributed.modelparallel.torch.nn.random import recomputation
from smdistributed.modelparallel.torch.partitioning import cost_model
from smdistributed.modelparallel.torch.state import state
from smdistributed.modelparallel.torch.tracing.recording import Recording, active
from smdistributed.modelparallel.torch.tracing.remote_tensor import RemoteTensor

#: Groups of children of sequentials, by their length and the pipeline. Not stored in modules, whose copies need
#: others.
_known_rows: weakref.WeakKeyDictionary[nn.Sequential, dict[Any, list[nn.Module]]] = weakref.WeakKeyDictionary()

_STRATEGY = re.compile(r"each|contiguous|group_([1-9]\d*)")


def checkpoint(module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """Call ``module``, and call it again in the backward.

    Args:
        module: A module that is on one partition with all its submodules.
        *args: Its positional arguments.
        preserve_rng_state: Whether the second call draws the same random numbers.
        **kwargs: Its keyword arguments.

    Returns:
        The result of the module.

    Raises:
        SMPPartitionError: The script divided the module among partitions. A module that the automatic partition
        divides runs without checkpointing.
    """
    if not isinstance(module, nn.Module):
        raise SMPValidationError(f"`checkpoint` takes a module, not {module!r}")
    again = functools.partial(_run, module, preserve_rng_state)
    recording = active.recording
    if recording is None:
        return again(*args, **kwargs)
    placement = recording.pipeline.placement
    rank = placement.whole.get(id(module))
    if rank is None and not _has_parameters(module):
        return _call_where_input_is(recording, module, args, kwargs, again, module)
    if rank is None:
        path = recording.pipeline.paths.get(id(module), type(module).__name__)
        if not state.cfg.auto_partition:
            raise SMPPartitionError(f"`{path}` is checkpointed as a whole, and spread over partitions")
        warnings.warn(f"`{path}` is spread over partitions: it runs without checkpointing", stacklevel=2)
        return module(*args, **kwargs)
    return recording.call_module(module, recording.pipeline.paths[id(module)], rank, args, kwargs, again)


def _run(function: Callable[..., Any], preserve_rng_state: bool, *args: Any, **kwargs: Any) -> Any:
    """Run PyTorch's checkpoint, which saves the arguments with the hooks around it, and other tensors with its own."""
    counter = cost_model.counter()
    if counter is not None:
        with counter.recomputing(args, kwargs):
            return function(*args, **kwargs)
    offloader = None if state.model is None else state.model.offloader
    if preserve_rng_state and collectives.tp_size() > 1:
        kwargs["context_fn"] = recomputation
    with contextlib.nullcontext() if offloader is None else offloader.hooks():
        return torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs
        )


@contextlib.contextmanager
def torch_checkpoints() -> Iterator[None]:
    """Return a context for PyTorch's own checkpointing in a step, such as that of ``gradient_checkpointing_enable()``.

    In a module on one partition, the checkpoint is a part of the task. The reentrant variant would run a backward
    inside of the pipeline's backward and bypass its gradients of weights, so the other variant runs instead;
    gradients are equal, and there are none if no argument requires them. In the body, and in a module that is divided
    among partitions, the checkpointed function's calls become tasks, which keep their activations: hooks are called
    once, and a tensor that a hook keeps has a graph. A write in place to a tensor that the function reads, before the
    next `model.backward`, raises: one process would compute the function again with the changed tensor.
    """
    module: Any = torch.utils.checkpoint
    # From PyTorch 2.15 on, the second is called, with the arguments of the function as a tuple and a dictionary.
    packed = "_checkpoint_without_reentrant_generator_impl"
    name = packed if hasattr(module, packed) else "_checkpoint_without_reentrant_generator"
    function, generator = module.CheckpointFunction, getattr(module, name)

    class Reentrant:
        """Replaces the autograd function of the reentrant variant."""

        @staticmethod
        def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            wants_gradients = any(isinstance(each, torch.Tensor) and each.requires_grad for each in args)
            with torch.set_grad_enabled(wants_gradients and torch.is_grad_enabled()):
                if active.recording is not None:
                    _warn_spread(function)
                    with active.recording.checkpointed():
                        return function(*args)
                return module.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)

    def checkpoint_generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        counter = cost_model.counter()
        # In the unpacked form, the first arguments are settings of the checkpoint itself.
        given = args[:2] if name == packed else (args[5:], kwargs)
        if active.recording is not None:
            _warn_spread(function)
            with active.recording.checkpointed():
                yield
        elif counter is not None:
            with counter.recomputing(*given):
                yield
        else:
            yield from generator(function, *args, **kwargs)

    module.CheckpointFunction = Reentrant
    setattr(module, name, checkpoint_generator)
    try:
        yield
    finally:
        module.CheckpointFunction = function
        setattr(module, name, generator)


#: Functions for which a warning was issued.
_warned_names: set[str] = set()


def _warn_spread(function: Callable[..., Any]) -> None:
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    name = type(owner).__name__ if isinstance(owner, nn.Module) else getattr(function, "__qualname__", str(function))
    if name not in _warned_names:
        _warned_names.add(name)
        warnings.warn(
            f"`{name}` is checkpointed by torch.utils.checkpoint and is not wholly on one partition: it runs without "
            f"checkpointing",
            stacklevel=4,
        )


def checkpoint_sequential(
    sequential_module: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Call the children of ``sequential_module`` one after the other, each of them or groups of them checkpointed.

    Args:
        sequential_module: Its children may be on different partitions.
        input: The argument of the first child; a tuple is its list of arguments.
        strategy: ``each``; ``contiguous``, neighbours on the same partition together; ``group_N``, up to N of them.
        preserve_rng_state: Whether the second call draws the same random numbers.
        pack_args_as_tuple: Whether a child gets a tuple as one argument.
    """
    if not isinstance(sequential_module, nn.Sequential):
        raise SMPValidationError(
            f"`checkpoint_sequential` takes an nn.Sequential, not {type(sequential_module).__name__}"
        )
    match = _STRATEGY.fullmatch(strategy)
    if match is None:
        raise SMPValidationError(f"`strategy` is {strategy!r}: expected 'each', 'contiguous' or 'group_N'")
    limit = {"each": 1, "contiguous": len(sequential_module) or 1}.get(strategy) or int(match[1])
    for row in _rows(sequential_module, limit):
        args = input if isinstance(input, tuple) and not pack_args_as_tuple else (input,)
        input = checkpoint(row, *args, preserve_rng_state=preserve_rng_state)
    return input


def _rows(sequential: nn.Sequential, limit: int) -> list[nn.Module]:
    """Return the children as they are, or groups of them in containers."""
    recording = active.recording
    known = _known_rows.setdefault(sequential, {})
    # The children identify the groups, because a script may replace them.
    key = (limit, None if recording is None else weakref.ref(recording.pipeline), tuple(map(id, sequential)))
    if key in known:
        for container in known[key]:
            if isinstance(container, _Row):
                # Sets only the container's own mode, because children may be frozen.
                container.training = sequential.training
        return known[key]
    place = None if recording is None else recording.pipeline.placement
    rows: list[list[tuple[nn.Module, int | None]]] = []
    for child in sequential:
        rank = None if place is None else place.whole.get(id(child), place.of(child))
        whole = place is None or id(child) in place.whole or not any(True for _ in child.parameters())
        if rows and len(rows[-1]) < limit and whole and rows[-1][-1][1] == rank:
            rows[-1].append((child, rank))
        else:
            rows.append([(child, rank if whole else -1)])
    found: list[nn.Module] = []
    for row in rows:
        if len(row) == 1:
            found.append(row[0][0])
            continue
        container = _Row(*[child for child, _ in row])
        container.training = sequential.training
        if recording is not None and place is not None:
            first = recording.pipeline.paths[id(row[0][0])]
            recording.pipeline.paths[id(container)] = f"{first} to {recording.pipeline.paths[id(row[-1][0])]}"
            rank = row[0][1]
            if rank is not None:
                place.whole[id(container)] = rank
        found.append(container)
    known[key] = found
    return found


class _Row(nn.Sequential):
    """Adjacent children of another container, which keeps them."""

    def forward(self, *args: Any) -> Any:
        for child in self:
            output = child(*args)
            args = output if isinstance(output, tuple) else (output,)
        return output


def set_activation_checkpointing(
    module: nn.Module, preserve_rng_state: bool = True, pack_args_as_tuple: bool = False, strategy: str = "each"
) -> None:
    """Checkpoint ``module`` whenever it is called, without a change of its code.

    If a module is divided among partitions, its submodules are checkpointed instead, with a warning.

    Args:
        module: A module; for an ``nn.Sequential``, its children are checkpointed.
        preserve_rng_state: Whether the second call draws the same random numbers.
        pack_args_as_tuple: For a sequential: whether a child gets a tuple as one argument.
        strategy: For a sequential, as in :func:`checkpoint_sequential`.

    Raises:
        SMPValidationError: The last two are given for another kind of module.
    """
    sequential = isinstance(module, nn.Sequential)
    if not sequential and (pack_args_as_tuple or strategy != "each"):
        raise SMPValidationError("`strategy` and `pack_args_as_tuple` are for an nn.Sequential")
    if _STRATEGY.fullmatch(strategy) is None:
        raise SMPValidationError(f"`strategy` is {strategy!r}: expected 'each', 'contiguous' or 'group_N'")
    own = module.__dict__.get("forward")
    if isinstance(own, _CheckpointedForward):
        # A second call changes the settings.
        own = own.original
    module.forward = _CheckpointedForward(module, own, preserve_rng_state, pack_args_as_tuple, strategy)


class _CheckpointedForward:
    """The ``forward`` of a module that :func:`set_activation_checkpointing` has marked.

    An object that refers to its module, and not a closure: in a copy of the model, by ``copy.deepcopy`` or pickle, it
    refers to the copy.

    Args:
        module: The module.
        original: An instance attribute ``forward`` of the module, if the script has set one.
        preserve_rng_state, pack_args_as_tuple, strategy: As for :func:`set_activation_checkpointing`.
    """

    def __init__(
        self,
        module: nn.Module,
        original: Callable[..., Any] | None,
        preserve_rng_state: bool,
        pack_args_as_tuple: bool,
        strategy: str,
    ) -> None:
        self.module, self.original = module, original
        self._preserve, self._pack, self._strategy = preserve_rng_state, pack_args_as_tuple, strategy
        self._bound: Callable[..., Any] | None = None
        self._has_warned = False

    def __getstate__(self) -> dict[str, Any]:
        # A bound method is pickled by its name, which is this object's.
        return {**self.__dict__, "_bound": None}

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's ``forward`` without checkpointing; ``inspect.signature`` uses it as well.

        It is always the same object, because recordings compare it.
        """
        if self._bound is None:
            kind = type(self.module)
            self._bound = self.original or inspect.getattr_static(kind, "forward").__get__(self.module, kind)
        return self._bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, recording = self.module, active.recording
        if isinstance(module, nn.Sequential):
            first = args[0] if len(args) == 1 else args
            return checkpoint_sequential(module, first, self._strategy, self._preserve, self._pack)
        if recording is None:
            return _run(self.__wrapped__, self._preserve, *args, **kwargs)
        if not _has_parameters(module):
            again = functools.partial(_run, self.__wrapped__, self._preserve)
            return _call_where_input_is(recording, module, args, kwargs, again, self.__wrapped__)
        self._mark_parts(module, recording)
        return self.__wrapped__(*args, **kwargs)

    def _mark_parts(self, module: nn.Module, recording: Recording) -> None:
        """Checkpoint the submodules of a module that is divided among partitions and runs on all ranks."""
        if not self._has_warned:
            self._has_warned = True
            path = recording.pipeline.paths.get(id(module), type(module).__name__)
            warnings.warn(
                f"`{path}` is checkpointed and spread over partitions: each module in it is checkpointed by itself, "
                "and the activations of its own operations are kept",
                stacklevel=3,
            )
        for child in _called_parts(module):
            # PyTorch's own leaf modules keep little more than their inputs.
            is_leaf = type(child).__module__.startswith("torch.nn.") and not any(True for _ in child.children())
            if not is_leaf and not isinstance(child.__dict__.get("forward"), _CheckpointedForward):
                set_activation_checkpointing(child, self._preserve)


def _called_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children, and those of containers that are not called themselves."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called_parts(child)
        else:
            yield child


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _call_where_input_is(
    recording: Recording,
    module: nn.Module,
    args: Any,
    kwargs: Any,
    again: Callable[..., Any],
    without: Callable[..., Any],
) -> Any:
    """Call a module without parameters as one task; ``without`` is called if none of its inputs is on a partition."""
    if not any(type(tensor) is RemoteTensor for tensor in pytree.tensors_of((args, kwargs))):
        return without(*args, **kwargs)
    path = recording.pipeline.paths.get(id(module), type(module).__name__)
    return recording.call_module(module, path, None, args, kwargs, again)  # type: ignore[arg-type]
