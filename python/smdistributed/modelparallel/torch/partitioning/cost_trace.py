"""The cost of each module, measured by one forward pass over fake tensors (shapes without memory).

The cost of an operation belongs to the module whose parameter it uses; without one, to the module in whose forward it
runs; between modules, to the module that computed its newest operand. Execution assigns operations by the same rules.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from smdistributed import _core
from smdistributed.modelparallel.torch import pytree as structures
from smdistributed.modelparallel.torch.nn.module import units
from smdistributed.modelparallel.torch.partitioning import cost_model, shared_memory
from smdistributed.modelparallel.torch.runtime.generators import HostGenerators
from smdistributed.modelparallel.torch.tracing import shape_probe
from smdistributed.modelparallel.torch.tracing.attributes import object_state
from smdistributed.modelparallel.torch.tracing.attributes.preserved_attributes import preserved_attributes
from smdistributed.modelparallel.torch.tracing.metadata import OutputSpecs, UnknownOutputError
from smdistributed.modelparallel.torch.tracing.remote_tensor import TensorMeta
from smdistributed.modelparallel.torch.tracing.restored_tensors import RestoredTensors

# A backward computes gradients of inputs and of parameters; each of them takes about as long as the forward.
FORWARDS_A_MICROBATCH = 3
# For each parameter: its gradient, and the two moments of Adam.
STATE_BYTES_PER_PARAMETER_BYTE = 3


@dataclass
class ModuleCost:
    """A module's own costs, without those of its submodules. See the core's `partition::ModuleCost`."""

    path: str
    parent: int | None
    parameter_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0
    time: int = 0
    first_run: int | None = None
    follows: int | None = None

    @property
    def costs_something(self) -> bool:
        """Return whether any of its costs is not zero."""
        return bool(self.parameter_bytes or self.state_bytes or self.activation_bytes or self.time)


@dataclass
class Trace:
    """A model's cost tree.

    It contains modules; values between them as (producer, consumers, bytes); the host's cost of splitting modules as
    (module, module that runs instead, nanoseconds); modules that must be on one partition; and modules whose own
    forward failed on fake tensors, with the error.
    """

    modules: list[ModuleCost]
    values: list[tuple[int, list[int], int]] = field(default_factory=list)
    tasks: list[tuple[int, int, int]] = field(default_factory=list)
    ties: list[list[int]] = field(default_factory=list)
    undivided: dict[int, str] = field(default_factory=dict)

    def place_ties(self) -> None:
        """Places modules that share a parameter and cost nothing themselves with the first module of their tie.

        The core only places modules that cost something. A tied module costs nothing without a forward, where the
        shared parameter counts for the first module alone, and where a forward uses the parameter under one of its
        names only.
        """
        has_place = {at for producer, consumers, _ in self.values for at in (producer, *consumers)} | {
            at for _, at, _ in self.tasks
        }
        for tie in self.ties:
            first = next((at for at in tie if self.modules[at].costs_something or at in has_place), None)
            for at in tie:
                module = self.modules[at]
                if first is not None and not module.costs_something and at not in has_place:
                    module.follows = first

    def undivided_bytes(self) -> list[tuple[int, int, int]]:
        """Return the outermost undivided modules, largest first.

        Each is a triple with the bytes of the parameters and buffers in it, and with those of them that could be on
        another partition if the module were divided: all but those of the module in it that holds most.
        """
        found: dict[int, list[int]] = {}
        for at, module in enumerate(self.modules):
            outermost = None
            above: int | None = at
            while above is not None:
                outermost = above if above in self.undivided else outermost
                above = self.modules[above].parent
            if outermost is not None:
                found.setdefault(outermost, []).append(module.parameter_bytes)
        rows = [(at, sum(sizes), sum(sizes) - max(sizes)) for at, sizes in found.items()]
        return sorted(rows, key=lambda row: -row[1])


class TraceError(RuntimeError):
    """The forward cannot run on fake tensors."""


def structure(module: nn.Module) -> Trace:
    """Return the modules, their parameters and shared parameters, without running a forward."""
    index: dict[nn.Module, int] = {}
    modules: list[ModuleCost] = []
    for path, part in module.named_modules():
        index[part] = len(modules)
        modules.append(ModuleCost(path, None))
    for part, at in index.items():
        for child in part.children():
            # A module with several parents gets its path from the first parent in the order of `named_modules`.
            if index[child] > at and modules[index[child]].parent is None:
                modules[index[child]].parent = at
    trace = Trace(modules)
    owners: dict[int, list[int]] = {}
    for part, at in index.items():
        for tensor, trained in [
            *((p, p.requires_grad) for p in part._parameters.values() if p is not None),
            *((b, False) for b in part._buffers.values() if b is not None),
        ]:
            known = owners.setdefault(id(tensor), [])
            if not known:
                size = tensor.numel() * tensor.element_size()
                modules[at].parameter_bytes += size
                modules[at].state_bytes += STATE_BYTES_PER_PARAMETER_BYTE * size * trained
            known.append(at)
    trace.ties = [sorted(set(known)) for known in owners.values() if len(set(known)) > 1]
    trace.ties += _ties_of_views(module, index)
    trace.ties += [sorted(index[part] for part in unit) for unit in units(module) if len(unit) > 1]
    return trace


def _ties_of_views(module: nn.Module, index: dict[nn.Module, int]) -> list[list[int]]:
    """Return the modules that share memory of a parameter or buffer, but not as a tied tensor (SHARE-1).

    An attribute of a module around the tensor's module is not a tie: if that module is split, its forward runs on all
    ranks.
    """
    pairs = {
        tuple(sorted((index[each.owner], index[each.other])))
        for each in shared_memory.find(module)
        if each.is_strict and not each.is_inside and not (each.is_registered and each.is_alias)
    }
    merged: list[set[int]] = []
    for pair in sorted(pairs):
        near = [tie for tie in merged if tie & set(pair)]
        merged = [tie for tie in merged if tie not in near] + [set(pair).union(*near)]
    return [sorted(tie) for tie in merged]


def trace(module: nn.Module, args: tuple, kwargs: dict[str, Any], *, measure_times: bool = False) -> Trace:
    """Run one forward of `module` on the arguments of a microbatch.

    Args:
        module: The model, with or without materialized parameters. Afterwards its parameters, buffers and attributes
        are as before.
        args: The positional arguments.
        kwargs: The keyword arguments.
        measure_times: Whether to run on real tensors, and measure the time of each operation instead of estimating it
        from its FLOPs and bytes. Ranks measure different times, so one of them must decide for all.

    Raises:
        TraceError: The forward cannot run in this way; on fake tensors, for example because it depends on values.
    """
    device = _device(args, kwargs)
    recorder = _Recorder(module, structure(module), measure_times)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        if not measure_times:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(shape_probe.failures_not_logged())
        copies: dict[int, torch.Tensor] = {}

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in copies:
                if measure_times and tensor.is_meta:
                    raise TraceError("times are measured on parameters with values, and some have none yet")
                # A forward may update a buffer, such as a counter, so it gets copies.
                copy = (
                    tensor.detach().to(device, copy=True) if measure_times else torch.empty_like(tensor, device=device)
                )
                copies[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
                recorder.note_own(copy)
            return copies[id(tensor)]

        state = {name: copied(tensor) for name, tensor in _named_state(module)}
        # So do lists, dictionaries and objects among the arguments, such as caches.
        args, kwargs = object_state.snapshot(args, kwargs, copied)
        recorder.own_state(module, state)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(HostGenerators())
        stack.enter_context(preserved_attributes(module, recorder.output_specs.fake, measure_times))
        stack.enter_context(_hooks_left_out(module))
        stack.enter_context(recorder)
        if not measure_times:
            stack.enter_context(_failures_are_tried(recorder))
        try:
            _take(torch.func.functional_call(module, state, args, kwargs, tie_weights=False))
        except Exception as error:
            raise TraceError(f"{type(error).__name__}: {error}") from error
    return recorder.finish()


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def _hooks_left_out(module: nn.Module) -> Iterator[None]:
    """Return a context in which the script's forward hooks do not run, because they may count calls or keep tensors.

    Afterwards, `preserved_attributes` restores the tables of the modules.
    """
    for part in module.modules():
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            table = vars(part).get(name)
            if table:
                part.__dict__[name] = type(table)((key, hook) for key, hook in table.items() if _is_needed(hook))
    tables = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
    before = [dict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update(hooks)


def _is_needed(hook: Any) -> bool:
    """Return whether a hook computes parameters or outputs.

    Those of `torch.nn.utils` and of this library do, and those with which Hugging Face's models collect hidden states.
    """
    package = getattr(hook, "__module__", None) or type(hook).__module__
    return package.startswith(("torch.nn.utils", "smdistributed.", "transformers."))


@contextlib.contextmanager
def _failures_are_tried(recorder: _Recorder) -> Iterator[None]:
    """Run a module on random values if it cannot run on fake tensors.

    The module then stays in one partition (PROBE-1), which the assignment reports. A forward may fail with any error:
    PyTorch raises its own where values are read; operators and libraries raise others for tensors without memory.
    """
    original = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        frames = len(recorder.frames)
        try:
            return original(self, *args, **kwargs)
        except Exception as error:
            at = recorder.index.get(self)
            if at is None or recorder.paused:
                raise
            del recorder.frames[frames:]
            return recorder.opaque(self, at, args, kwargs, error)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


def _take(result: Any) -> None:
    """Represent the computation of the step's body with the model's result.

    If the result is not a loss, a loss is computed from it. If it is large, such as the logits of a language model,
    the cost of a softmax is added, which saves as much memory again.
    """
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not outputs or not all(output.dim() for output in outputs):
        return
    # Only floating-point outputs go through a softmax.
    if outputs[0].is_floating_point() and outputs[0].layout == torch.strided:
        nn.functional.log_softmax(outputs[0], -1)


def _named_state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each entry of a module's tables once, also where the module has several parents.

    ``functional_call`` would otherwise restore such an entry to the fake tensor that it put there first. Tensors that
    several modules share have an entry in each of them.
    """
    for path, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor


def _device(args: tuple, kwargs: dict[str, Any]) -> torch.device:
    """Return the device of the inputs, to which the model is moved."""
    found = [leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return next((device for device in found if device.type != "cpu"), torch.device("cpu"))


@dataclass(eq=False)
class _Storage:
    """The memory of a tensor and its views."""

    # Kept alive, so that the address is not reused. A sparse tensor, which has no storage, is kept itself.
    ref: StorageWeakRef | torch.Tensor
    bytes: int
    # The module that wrote the storage last; `None` for an input and for values computed from inputs only.
    producer: int | None = None
    made_at: int = 0
    # The modules that hold the parameter or buffer.
    owners: list[int] = field(default_factory=list)
    consumers: set[int] = field(default_factory=set)
    saved: bool = False
    # Whether it exists for the trace only.
    is_own: bool = False


@dataclass(eq=False)
class _Frame:
    """A running call of a module."""

    module: int
    # Whether an operation has run in the frame.
    ran: bool = False


class _Recorder(TorchDispatchMode):
    """Observes calls of modules, operations, and tensors that autograd saves."""

    def __init__(self, module: nn.Module, trace: Trace, measure_times: bool):
        super().__init__()
        self.trace = trace
        self.measure_times = measure_times
        self.index = {part: at for at, part in enumerate(module.modules())}
        owns = {at for part, at in self.index.items() if _has_state(part)}
        # Ancestors of modules with parameters or buffers, whose own forward may contain only glue operations.
        self.above_owners = {
            at
            for part, at in self.index.items()
            if any(self.index[below] in owns for below in part.modules() if below is not part)
        }
        self.owns = owns
        self.frames: list[_Frame] = []
        # Number of tasks, by module and owner of the operations, if the module were split.
        self.tasks: collections.Counter[tuple[int, int]] = collections.Counter()
        self.storages: dict[int, _Storage] = {}
        self.last_owner: int | None = None
        self.clock = 0
        self.nanoseconds = [0.0] * len(trace.modules)
        self.casts_are_cached = cost_model.casts_are_cached()
        self.handles: list[Any] = []
        #: Whether the running operations do not belong to the forward.
        self.paused = False
        self.output_specs = OutputSpecs()
        self.restored = RestoredTensors()

    def note_own(self, tensor: torch.Tensor) -> None:
        """Record that a tensor exists for the trace only, so that it may change."""
        self._storage(tensor).is_own = True

    def _is_own(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, FakeTensor) or self._storage(tensor).is_own

    def own_state(self, module: nn.Module, state: dict[str, torch.Tensor]) -> None:
        """Record the parameters of a module."""
        for name, tensor in state.items():
            owner = self.index[module.get_submodule(name.rpartition(".")[0])]
            owners = self._storage(tensor).owners
            if owner not in owners:
                owners.append(owner)

    def __enter__(self) -> Any:
        for part, at in self.index.items():
            if not isinstance(part, torch.jit.ScriptModule):
                self.handles += [
                    part.register_forward_pre_hook(lambda *_, at=at: self._begin_frame(at), prepend=True),
                    part.register_forward_hook(lambda *_: self._end_frame(), always_call=True),
                ]
        self.saving = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
        self.saving.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.restored.restore()
        self.saving.__exit__(*exception)
        for handle in self.handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            # A query of a tensor's metadata, such as its device, is not an operation.
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self.restored.before(func, args, kwargs, self._is_own)
        self.clock += 1
        start = self._now()
        out = func(*args, **kwargs)
        measured = self._now() - start
        taken = [self._storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [self._storage(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        for storage in made:
            storage.is_own = storage.is_own or storage not in taken
        owner = self._owner(taken)
        if self.casts_are_cached and cost_model.is_cast(func) and owner is not None and taken[0].owners:
            # All microbatches share the cast.
            made[0].owners = taken[0].owners
            self.trace.modules[owner].state_bytes += made[0].bytes
            return out
        is_view = not func._schema.is_mutable and any(storage in taken for storage in made)
        for storage in made:
            if not storage.owners and (storage not in taken or func._schema.is_mutable):
                storage.producer, storage.made_at = owner, self.clock
        if owner is None:
            return out
        for storage in taken:
            if storage.producer is not None:
                storage.consumers.add(owner)
        module = self.trace.modules[owner]
        if module.first_run is None:
            module.first_run = self.clock
        if not is_view:
            moved = sum(storage.bytes for storage in (*taken, *made))
            self.nanoseconds[owner] += (
                measured if self.measure_times else cost_model.nanoseconds(func, args, kwargs, out, moved)
            )
        self.last_owner = owner
        if self.frames:
            self._follow(self.frames[-1].module)
            self._count_tasks(owner)
        return out

    def finish(self) -> Trace:
        modules = self.trace.modules
        for at, nanoseconds in enumerate(self.nanoseconds):
            modules[at].time = round(nanoseconds * FORWARDS_A_MICROBATCH)
        for storage in self.storages.values():
            consumers = sorted(storage.consumers - {storage.producer})
            if storage.producer is not None and consumers and not storage.owners:
                self.trace.values.append((storage.producer, consumers, storage.bytes))
        self.trace.values.sort()
        self._finish_tasks()
        return self.trace

    def _count_tasks(self, owner: int) -> None:
        """Count an operation in a module's own forward, or a call of a submodule, as a task."""
        self.tasks[self.frames[-1].module, owner] += 1
        for above, frame in itertools.pairwise(self.frames):
            if not frame.ran:
                self.tasks[above.module, owner] += 1
        for frame in self.frames:
            frame.ran = True

    def _finish_tasks(self) -> None:
        modules = self.trace.modules
        # For each module, the owners of the operations in it, in order of execution.
        places: dict[int, list[int]] = {}
        for owner in sorted({owner for _, owner in self.tasks}, key=lambda at: (modules[at].first_run, at)):
            above: int | None = owner
            while above is not None:
                places.setdefault(above, []).append(owner)
                above = modules[above].parent
        sums: collections.Counter[tuple[int, int]] = collections.Counter()
        for (module, owner), count in self.tasks.items():
            inside = places.get(module, [])
            # A module whose operations all belong to one owner cannot be split.
            if len(inside) > 1:
                sums[module, owner if owner in inside else inside[0]] += count
        self.trace.tasks = [(*key, count * _core.task_nanoseconds()) for key, count in sorted(sums.items())]

    def _owner(self, taken: list[_Storage]) -> int | None:
        frame = self.frames[-1].module if self.frames else None
        owners = [owner for storage in taken for owner in storage.owners]
        if owners:
            if frame in owners:
                return frame
            if frame in self.owns:
                # A module that uses parameters of another one, as `nn.MultiheadAttention` does.
                self.trace.ties.append([frame, owners[0]])
            return owners[0]
        if frame in self.owns and frame not in self.above_owners:
            return frame
        newest = max(
            (storage for storage in taken if storage.producer is not None), key=lambda s: s.made_at, default=None
        )
        return newest.producer if newest else None

    def opaque(self, module: nn.Module, at: int, args: Any, kwargs: Any, error: Exception) -> Any:
        """Record the call of a module that cannot run on fake tensors, because of ``error``.

        The whole module is on one partition, so that the call is one task.
        """
        leaves: list[torch.Tensor] = []

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            leaves.append(tensor)
            return tensor

        copier = object_state.Copier(leaf)
        copier.copy(args)
        for item in kwargs.values():
            copier.copy(item)
        self.paused = True
        try:
            with _disable_current_modes():
                call = self.output_specs.module(module, module)
                spec = self.output_specs.of(call, args, kwargs, TensorMeta.of, is_module=True)
        except UnknownOutputError:
            raise error from None
        finally:
            self.paused = False
        self.trace.ties.append(sorted(self.index[each] for each in module.modules()))
        self.trace.undivided.setdefault(at, _first_line(error))
        self.clock += 1
        own = self.trace.modules[at]
        own.first_run = self.clock if own.first_run is None else own.first_run
        own.activation_bytes += spec.cost.kept_bytes
        self.nanoseconds[at] += spec.cost.forward
        for tensor in leaves:
            taken = self._storage(tensor)
            if taken.producer is not None:
                taken.consumers.add(at)
        outputs = []
        for place, meta in zip(spec.aliases, spec.metas, strict=True):
            tensor = (
                leaves[place]
                if place is not None
                else torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
            )
            if place is None and meta.requires_grad:
                tensor.requires_grad_()
            made = self._storage(tensor)
            if not made.owners:
                made.producer, made.made_at = at, self.clock
            outputs.append(tensor)
        self.last_owner = at
        if self.frames:
            self._follow(self.frames[-1].module)
            self._count_tasks(at)
        if spec.effects:
            return spec.template.apply(copier.originals, outputs, leaves)
        return structures.filled(spec.template, outputs)

    def _begin_frame(self, at: int) -> None:
        if not self.paused:
            self.frames.append(_Frame(at))

    def _end_frame(self) -> None:
        if not self.paused and self.frames:
            self._follow(self.frames.pop().module)

    def _follow(self, frame: int) -> None:
        """Assign a module without parameters in it to the module that computed its first operand."""
        if frame not in self.owns and frame not in self.above_owners and self.trace.modules[frame].follows is None:
            self.trace.modules[frame].follows = self.last_owner

    def _storage(self, tensor: torch.Tensor) -> _Storage:
        if tensor.layout != torch.strided:
            # A sparse tensor has no storage itself, but its components have.
            return self.storages.setdefault(-id(tensor), _Storage(tensor, 0))
        memory = tensor.untyped_storage()
        ref = StorageWeakRef(memory)
        found = self.storages.get(ref.cdata)
        if found is None:
            found = self.storages[ref.cdata] = _Storage(ref, memory.nbytes())
        return found

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = self._storage(tensor)
        if not storage.saved and not storage.owners:
            storage.saved = True
            frame = self.frames[-1].module if self.frames else None
            inside = frame in self.owns and frame not in self.above_owners
            owner = frame if inside else storage.producer if storage.producer is not None else self.last_owner
            if owner is not None:
                self.trace.modules[owner].activation_bytes += storage.bytes
        return tensor

    def _now(self) -> int:
        if not self.measure_times:
            return 0
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter_ns()


def _has_state(part: nn.Module) -> bool:
    return any(tensor is not None for tensor in (*part._parameters.values(), *part._buffers.values()))
