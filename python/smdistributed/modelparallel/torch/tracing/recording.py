"""Recording of one microbatch: the body of the step runs on every rank and leaves a list of tasks.

- REC-1: a value is *located* (on one partition, a :class:`RemoteTensor` on all ranks) or *replicated* (an ordinary
  tensor with the same values on all ranks of a pipeline). Operations on replicated values only are computed at once, on
  all ranks.
- REC-2: a call of a module that is on one partition with its submodules is one task there. Another operation with a
  located operand is a task on the operand's partition. A module that is divided among partitions runs its own forward
  on every rank.
- REC-3: a value never changes. A write in place makes a new value, and the remote tensor refers to it from then on, as
  do the remote tensors of all other views of the storage.
- REC-4: ranks record the same tasks, because the body runs in the same way on all of them. Values that the body reads
  (``.item()``, ``if loss > x``) are computed on their partition and broadcast.
- REC-5: a replicated tensor in a task's arguments never changes: before the body writes to its storage, tasks get a
  copy.
- REC-6: a tensor that cannot be followed (of another microbatch, or a view whose storage changed on another partition)
  raises when it is used.
- REC-7: an operation that reads the value of a replicated tensor, such as a size that was computed with tensors, is
  recorded with that number, because signatures do not contain values of tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.runtime.fallbacks import call_site
from smdistributed.modelparallel.torch.runtime.rng import Draw
from smdistributed.modelparallel.torch.tracing import masks, queries, replicated_operations
from smdistributed.modelparallel.torch.tracing.attributes import changed_state
from smdistributed.modelparallel.torch.tracing.attributes.module_state import UNCHANGED
from smdistributed.modelparallel.torch.tracing.copy_on_write import CopyOnWriteTensors
from smdistributed.modelparallel.torch.tracing.encoder import Encoder, leave_out
from smdistributed.modelparallel.torch.tracing.functions import (
    BACKWARDS,
    CHANGED_METADATA,
    DATA,
    DETACHES,
    GRAPH_READS,
    PLAIN_METADATA,
    READS,
    REQUIRES_GRAD,
    STORAGE_WRITES,
    VERSION,
    WANTS_GRADIENT,
    is_integer,
    recorded_as,
)
from smdistributed.modelparallel.torch.tracing.metadata import OutputSpec, ReadsNumbersError, UnknownOutputError
from smdistributed.modelparallel.torch.tracing.outside_tensors import OutsideTensors
from smdistributed.modelparallel.torch.tracing.remote_tensor import (
    InvalidatedValue,
    RemoteTensor,
    TensorMeta,
    storage_write,
)
from smdistributed.modelparallel.torch.tracing.replay import Call, Replay, next_number
from smdistributed.modelparallel.torch.tracing.retained_tensors import RetainedTensors
from smdistributed.modelparallel.torch.tracing.shared_storages import SharedStorages
from smdistributed.modelparallel.torch.tracing.state_order import StateOrder
from smdistributed.modelparallel.torch.tracing.tasks import (
    Context,
    Task,
    Value,
    WithAttributes,
    chained_digest,
    digest_of,
    partition_of,
)

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.runtime.executor import Microbatch
    from smdistributed.modelparallel.torch.runtime.pipeline import Pipeline


class Active(threading.local):
    """The recording of this thread, if there is one."""

    recording: Recording | None = None


active = Active()


class Recording(TorchFunctionMode):
    """The tasks of one microbatch; the body runs inside this context."""

    def __init__(
        self,
        pipeline: Pipeline,
        earlier: Sequence[Recording] = (),
        before: list[Call] | None = None,
        detach_outputs: bool = True,
    ) -> None:
        super().__init__()
        #: Whether the tensors that the body returns are detached from autograd's graph.
        self.detach_outputs = detach_outputs
        self.pipeline, self.microbatch = pipeline, len(earlier)
        #: The recordings of earlier microbatches of the same step.
        self.earlier = tuple(earlier)
        #: Replicated tensors to which tasks of this step refer.
        self.copy_on_write: CopyOnWriteTensors = (
            earlier[0].copy_on_write if earlier else CopyOnWriteTensors(pipeline.module_state)
        )
        #: Attributes of modules at the time of `model.backward`.
        self.backward_modules = UNCHANGED
        self.storages = SharedStorages(self)
        self.outside_tensors = OutsideTensors()
        self.retained = RetainedTensors(self)
        self.order = StateOrder()
        #: The generators that each task draws from, by task number (RNG-3).
        self.draws: dict[int, list[Draw]] = {}
        self.tasks: list[Task] = []
        #: Number of tasks that have run already, because the body read a value.
        self.num_executed = 0
        self.base_level = 0
        self.digest = 0
        #: If the tasks were reordered: the digest before, and the numbers that the tasks had.
        self.reordered: tuple[int, list[int]] | None = None
        self.backward_roots: list[tuple[Value, Any]] = []
        self.fetched: dict[int, torch.Tensor] = {}
        #: The part that was executed during the recording, if any.
        self.executed: Microbatch | None = None
        self.located: dict[int, Any] = dict(pipeline.located)
        self._kept: list[torch.Tensor] = []
        self._count = self._levels = 0
        #: Buffers that the body has replaced by casts of themselves: module, name, buffer.
        self.cast_buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        #: The calls, for the replay by the next microbatch.
        self.calls: list[Call] = []
        self._replay = Replay(before, self.located, self) if before else None

    def __enter__(self) -> Recording:
        active.recording = self
        return super().__enter__()

    def __exit__(self, *problem: Any) -> None:
        active.recording = None
        self.pipeline.constants.end_of_body()
        for module, name, buffer in reversed(self.cast_buffers):
            module._buffers[name] = buffer
        self.cast_buffers.clear()
        super().__exit__(*problem)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PLAIN_METADATA and (func not in CHANGED_METADATA or not self._is_asked(func, args[0])):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.Tensor.__repr__:
            return func(*args, **kwargs)
        if active.recording is not self:
            return func(*args, **kwargs)
        if func == VERSION or func is torch.Tensor.storage_offset:
            return queries.of_first_rank(self, func, args[0])
        if func == WANTS_GRADIENT:
            return self.located[id(args[0])].meta.requires_grad
        if func is torch.Tensor.__iter__ and self.is_located(args[0]):
            return iter(self.operation(torch.unbind, args, {}))
        if func in REQUIRES_GRAD and id(args[0]) in self.pipeline.located:
            wanted = bool(args[1]) if len(args) > 1 else kwargs.get("requires_grad", True)
            return queries.set_requires_grad(self, args[0], wanted)
        if func in GRAPH_READS:
            if self.is_located(args[0]):
                answer = queries.of_graph(self, func, args[0])
                if answer is not None:
                    return answer
            else:
                self.pipeline.stale_storages.check_graph(args[0])
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return self.operation(func, args, kwargs)

    def _is_asked(self, func: Any, tensor: torch.Tensor) -> bool:
        """Return whether the body asks with one of ``CHANGED_METADATA`` for what the tensor itself does not know."""
        if active.recording is not self:
            return False
        if func is torch.Tensor.storage_offset or type(self.located.get(id(tensor))) is Value:
            return True
        if type(tensor) is not RemoteTensor:
            self.pipeline.stale_storages.check_graph(tensor)
        return False

    def has_located(self, arguments: Any) -> bool:
        """Return whether the arguments contain a located tensor."""
        return any(isinstance(leaf, torch.Tensor) and self.is_located(leaf) for leaf in pytree.tensors_of(arguments))

    def _remote_tensor(self, value: Value) -> RemoteTensor:
        remote = RemoteTensor(value, self)
        self.retained.watch(remote)
        return remote

    def is_located(self, tensor: Any) -> bool:
        """Return whether a tensor is located on one partition, and not replicated."""
        return type(tensor) is RemoteTensor or id(tensor) in self.located

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record a call of a function, or compute it if all of its operands are replicated."""
        if (
            func in DETACHES
            and type(args[0]) is RemoteTensor
            and args[0].recording is not self
            and args[0].requires_grad
        ):
            return self._remote_tensor(self.retained.take(args[0], detached=True))
        if func in masks.SELECTIONS:
            selection = masks.with_indices(self, func, args, kwargs)
            if selection is not None:
                func, args, kwargs = torch.Tensor.__getitem__, selection, {}
        elif func in masks.REPETITIONS:
            kwargs = masks.with_output_size(self, args, kwargs)
        number_readers = self.pipeline.number_readers
        if number_readers and number_readers.get(func):
            args, kwargs = pytree.transform((args, kwargs), self._as_integer)
        if self._replay is not None:
            tensors: list[torch.Tensor] = []
            self._replay.body_calls_function()
            call = self._replay.find(func, False, args, kwargs, tensors, self.digest)
            task = None if call is None else self._replay.task(call, self.pipeline.module_state.current, args, kwargs)
            if call is not None and task is not None and self.storages.writes_alike(task, tensors):
                return self._replay_call(call, task, tensors)
        operands = replicated_operations.operands(self, args, kwargs)
        if operands is not None:
            return replicated_operations.run(self, func, args, kwargs, operands)
        encoder = Encoder(self.located, self)
        new_args = encoder.encode(args)
        new_kwargs = encoder.encode(kwargs) if kwargs else kwargs
        if not encoder.inputs:
            return replicated_operations.run(self, func, args, kwargs, encoder.leaves, encoder)
        if func in STORAGE_WRITES:
            raise storage_write(getattr(func, "__name__", str(func)))
        if func in READS:
            self.pipeline.fallbacks.note(
                "read", f"`{func.__name__}` at {call_site()}", partition_of(encoder.inputs), "the body reads the value"
            )
            real = pytree.transform((args, kwargs), self._fetch_leaf)
            return func(*real[0], **real[1])
        if func in BACKWARDS:
            raise SMPUsageError(
                f"`{getattr(func, '__name__', func)}` inside of a `smp.step` function: call `model.backward(loss)` "
                f"instead"
            )
        func = recorded_as(func, args, kwargs)
        name = getattr(func, "__name__", None) or str(func)
        if kwargs and isinstance(kwargs.get("generator"), torch.Generator):
            raise SMPUsageError(
                f"`{name}` of a tensor on partition {partition_of(encoder.inputs)} with a `torch.Generator` of the "
                f"body: draw into a tensor of the body, such "
                "as `torch.rand(x.shape, generator=generator)`, or use the default generator"
            )
        if name in ("__get__", "__set__"):
            name = f"{getattr(func.__self__, '__name__', '')}.{name}"
        encoder.may_read = func not in number_readers
        try:
            result = self._function(name, func, new_args, new_kwargs, encoder)
        except ReadsNumbersError:
            return self._with_numbers(func, args, kwargs)
        if func is torch.Tensor.requires_grad_ and type(args[0]) is RemoteTensor:
            # The body's tensor represents the result from now on.
            args[0].value = result.value
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return result

    def _with_numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an operation that reads values of replicated tensors (REC-7)."""
        self.pipeline.number_readers[func] = True
        try:
            return self.operation(func, args, kwargs)
        except TypeError:
            # The function also accepts tensors there, so it has read no value and nothing was recorded.
            self.pipeline.number_readers[func] = False
            return self.operation(func, args, kwargs)

    def _as_integer(self, leaf: Any) -> Any:
        """Return an integer instead of a replicated tensor that contains one (REC-7)."""
        return int(leaf) if not self.is_located(leaf) and is_integer(leaf) else leaf

    def call_function(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a function call as one task, on the partition of its operands."""
        encoder = Encoder(self.located, self)
        return self._function(name, func, encoder.encode(args), encoder.encode(kwargs), encoder)

    def _function(self, name: str, func: Callable[..., Any], new_args: Any, new_kwargs: Any, encoder: Encoder) -> Any:
        task = Task(name, func, new_args, new_kwargs, encoder.inputs)
        return self._new(Call(func, False, task, new_args, new_kwargs), task, encoder, func, None)

    def call_module(
        self, module: nn.Module, path: str, rank: int, args: Any, kwargs: Any, call: Callable[..., Any] | None = None
    ) -> Any:
        """Records a call of a module that is wholly on one partition; ``call`` runs there instead of it, if given."""
        parts = self.pipeline.module_state.before_call(module, self.pipeline.stale_storages)
        for attribute, tensor in self.pipeline.module_state.take_assigned():
            if self.is_located(tensor) and id(tensor) not in self.pipeline.located:
                raise SMPUsageError(
                    f"the `smp.step` function puts a tensor with values of a partition into `{attribute}`: pass the "
                    "tensor to the module instead"
                )
            self.copy_on_write.hold_attribute(tensor, attribute, self.tasks)
        what = call or module
        if self._replay is not None:
            tensors: list[torch.Tensor] = []
            containers: list[Any] = []
            known = self._replay.find(what, module.training, args, kwargs, tensors, self.digest, containers)
            now = self.pipeline.module_state.current
            again = None if known is None else self._replay.task(known, now, args, kwargs)
            if (
                known is not None
                and again is not None
                and self.storages.writes_alike(again, tensors)
                and (again.parts == parts or not self.pipeline.module_state.shared.matter)
                and changed_state.is_alike(module, again.known_spec)
            ):
                return self._replay_call(known, again, tensors, containers)
        encoder = Encoder(self.located, self)
        new_args, new_kwargs = encoder.encode_call(args, kwargs)
        task = Task(path or type(module).__name__, what, new_args, new_kwargs, encoder.inputs)
        task.module, task.has_containers, task.parts = module, bool(encoder.containers), parts
        key = (id(module), module.training, self.pipeline.version, call is None)
        return self._new(Call(what, module.training, task, task.args, task.kwargs), task, encoder, key, rank)

    def _replay_call(self, call: Call, task: Task, tensors: list[torch.Tensor], containers: Sequence[Any] = ()) -> Any:
        """Reuse a call of the previous microbatch (RPL-1)."""
        assert self._replay is not None
        self._replay.place += 1
        self.calls.append(call)
        if call.before:
            self.tasks += call.before
        self.tasks.append(task)
        self.order.note(task)
        self.digest, self._levels, self._count = call.state_after
        if call.task.overwritten:
            self.storages.lose_views_of_state(task)
        if not call.is_plain:
            self.copy_on_write.add_strided(task, self._replay.replicated, self.microbatch)
        spec = task.known_spec
        if spec.changed_state:
            changed_state.note(self.pipeline, task, spec)
        if spec.draws:
            self._draw(task, spec.draws)
        if spec.is_single_output:
            return self._remote_tensor(task.outputs[0])
        return self._values(task, tensors, containers)

    def _new(self, call: Call, task: Task, encoder: Encoder, key: Any, rank: int | None) -> Any:
        """Record a call that differs from the previous microbatch, like all later calls (RPL-2)."""
        self._count, self._replay = next_number(self._replay, self.tasks, self._count), None
        call.digest_before = self.digest
        first = len(self.tasks)
        result = self._add(task, encoder, key, rank)
        call.complete(task, self.tasks[first:-1], (self.digest, self._levels, self._count))
        self.calls.append(call)
        return result

    def _add(self, task: Task, encoder: Encoder, what: Any, rank: int | None) -> Any:
        task.context = Context.current(self.pipeline.module_state.current)
        key = None if encoder.unknown else (what, encoder.key(), task.context.key())
        specs = self.pipeline.output_specs
        spec = specs.known(key)
        if spec is not None and not changed_state.is_alike(task.module, spec):
            spec = None
        reason, others = "", []
        if spec is None:
            active.recording = None
            try:
                call = specs.module(task.module, task.call) if task.module is not None else task.call
                is_module = task.module is not None
                has_numbers = encoder.may_read and any(map(is_integer, encoder.leaves))
                spec = specs.of(
                    call, task.args, task.kwargs, _meta_of_leaf, is_module, encoder.in_containers, has_numbers
                )
                others = specs.changed_others
                specs.keep(key, spec)
            except UnknownOutputError as error:
                reason = str(error)
            finally:
                active.recording = self
        if spec is not None and spec.attributes and not isinstance(task.call, WithAttributes):
            assert task.module is not None, "attributes are those of a module"
            task.call = WithAttributes(task.call, task.module, spec.attributes)
        if spec is not None and task.module is not None:
            self.pipeline.module_state.note_changes(task.module, spec.plain_attributes)
        if task.module is not None:
            attributes = None if spec is None else spec.read_attributes
            if attributes != ():
                self.pipeline.module_state.check_given(task.module, attributes)
        if spec is not None and spec.unread:
            leave_out(task, spec.unread)
        if spec is not None:
            changed_state.note_changes(self.pipeline, task, spec, others)
        self._place(task, encoder, spec, rank)
        if others:
            changed_state.note_parts(self.pipeline, task, others)
        if spec is not None and spec.changed_state:
            changed_state.note(self.pipeline, task, spec)
        if spec is None:
            name = task.name if task.module is not None else f"{task.name} at {call_site()}"
            self.pipeline.fallbacks.note("run", name, task.rank, reason)
        self.tasks.append(task)
        if spec is None or spec.draws:
            self._draw(task, None if spec is None else spec.draws)
        self.copy_on_write.add(
            task, [leaf for leaf in encoder.leaves if isinstance(leaf, torch.Tensor)], self.microbatch
        )
        if spec is None:
            # Only the rank with the inputs can find the outputs: it runs the task now and informs the others.
            numbers_matter = task.module is None or self.pipeline.depends_on_numbers(task.module)
            spec = self._run_now(task, encoder)
            if not numbers_matter:
                specs.keep(key, spec)
        return self._results(task, encoder, spec)

    def _draw(self, task: Task, kinds: Collection[str] | None) -> None:
        found = self.pipeline.rng_state.draws(kinds, task.rank)
        if found:
            self.draws[len(self.tasks) - 1] = found

    def _place(self, task: Task, encoder: Encoder, spec: OutputSpec | None, rank: int | None) -> None:
        inputs = task.inputs
        if rank is None:
            changed = [encoder.leaves[place] for place in spec.mutated] if spec is not None else []
            located = [leaf for leaf in changed if isinstance(leaf, Value)]
            rank = located[0].rank if located else partition_of(inputs)
        task.rank = rank
        if any(value.rank != rank and value.parameter is not None for value in inputs):
            self._send_parameters(task, rank)
        level = self.base_level
        written = self.storages.written(spec, encoder.leaves, rank) if spec is not None and spec.mutated else {}
        for base in written:
            self.retained.check_write(base)
            if base.parameter is not None:
                self.pipeline.attribute_views.note_written(self, task, (base.parameter,))
            self.copy_on_write.check_checkpointed(base, task.name)
            if self.backward_roots:
                self.storages.check_not_saved(base, task)
        for value in (*task.inputs, *itertools.chain(*written.values())):
            level = max(level, value.level + (value.rank != rank))
        writes_state = any(base.parameter is not None for base in written)
        task.level = level = self.order.level(task, level, writes_state, spec)
        self._levels = max(self._levels, level)

    def _send_parameters(self, task: Task, rank: int) -> None:
        """Convert parameters that a task on another partition uses to values.

        They are sent, and their gradients come back.
        """
        sent: dict[int, Value] = {}
        for value in task.inputs:
            if value.rank != rank and value.parameter is not None and id(value) not in sent:
                read = Task("parameter", _copied, (value,), {}, [value])
                read.rank, read.context = value.rank, Context(True, ())
                read.output_spec = OutputSpec(pytree.Slot(0), (value.meta,), (), (None,))
                sent[id(value)] = self.add_source(read, ("parameter", value.parameter))
        task.replace_leaves(lambda leaf: sent.get(id(leaf), leaf))
        task.inputs = [sent.get(id(value), value) for value in task.inputs]

    def add_source(self, task: Task, key: Any) -> Value:
        """Add a task that uses no values of this microbatch and computes one; ``key`` is equal on all ranks."""
        task.level = self.order.level(task, self.base_level, False, None)
        self._levels = max(self._levels, task.level)
        value = self.new_value(task.rank, task.level, task.known_spec.metas[0])
        task.outputs = [value]
        task.signature = key
        task.digest = digest_of((*key, value.index))
        self.digest = chained_digest(self.digest, task.digest)
        self.tasks.append(task)
        return value

    def new_value(self, rank: int, level: int, meta: TensorMeta) -> Value:
        """Create the value of a task on ``rank``, with the next number."""
        value = Value(self._count, rank, level, meta)
        self._count += 1
        return value

    def _run_now(self, task: Task, encoder: Encoder) -> OutputSpec:
        """Run all tasks so far, including this one, whose output spec is unknown."""
        task.signature = task.digest = digest_of((task.name, task.rank, encoder.stable()))
        self.digest = chained_digest(self.digest, task.digest)
        number = len(self.tasks) - 1
        spec = self.pipeline.run_unknown(self, task)
        if spec.draws:
            self.pipeline.rng_state.has_drawn(self.draws[number], spec.draws, task.rank)
        self._finish(task, encoder, spec)
        self.pipeline.adopt(self, task)
        return spec

    def _finish(self, task: Task, encoder: Encoder, spec: OutputSpec) -> None:
        task.output_spec = spec
        task.outputs = [self.new_value(task.rank, task.level, meta) for meta in spec.metas]
        for value, shared in zip(task.outputs, spec.storages, strict=False):
            if shared is None:
                continue
            place = shared.place
            if place is None:
                # Only the partition of a module writes to its parameters and buffers.
                other = self.storages.state_of_call(task, shared.state)
            else:
                other = task.outputs[-1 - place] if place < 0 else encoder.leaves[place]
            if isinstance(other, Value):
                value.base, value.offset = other.storage, other.offset + shared.offset
                value.versioned = other.versioned and task.call != DATA
                value.detached = value.index if task.call in DETACHES else other.detached
        if spec.written_state:
            self.storages.lose_views_of_state(task)
            self.retained.note_written_state(task)
        if spec.mutated:
            self.storages.check_unversioned(task, encoder.leaves)
            self.storages.add_writes(task, encoder.leaves)

    def _results(self, task: Task, encoder: Encoder, spec: OutputSpec) -> Any:
        if task.output_spec is None:
            self._finish(task, encoder, spec)
            key = task.signature = (
                task.name,
                task.rank,
                encoder.stable(),
                spec.metas[: spec.results],
                spec.mutated,
                task.context.key(),
                self.order.partners(task),
            )
            inputs = tuple(value.parameter or value.index for value in task.inputs)
            task.digest = self.pipeline.digest(key, inputs)
            self.digest = chained_digest(self.digest, task.digest)
        return self._values(task, encoder.tensors, encoder.containers)

    def _values(self, task: Task, tensors: list[torch.Tensor], containers: Sequence[Any] = ()) -> Any:
        """Return the body's result of a task that was called with these tensors, some of them in these containers."""
        spec = task.known_spec
        if task.writes:
            self.storages.follow_writes(task, tensors)
        results: list[torch.Tensor] = []
        for place, value in zip(spec.aliases, task.outputs, strict=False):
            if place is not None and (place in spec.mutated or task.module is not None):
                # A module that returns its argument returns the body's own tensor.
                results.append(tensors[place])
            else:
                results.append(self._remote_tensor(value))
        for result, shared in zip(results, spec.storages, strict=False):
            if shared is not None:
                self.storages.add_view(result, shared, tensors, results)
        if spec.effects:
            found = spec.template.apply(list(containers), results, tensors)
        else:
            found = pytree.filled(spec.template, results)
        if not spec.attributes:
            return found
        result, values = found
        assert task.module is not None, "attributes are those of a module"
        for (path, name), value in zip(spec.attributes, values, strict=True):
            owner = task.module.get_submodule(path) if path else task.module
            self.pipeline.module_state.put(owner, name, value)
        return result

    def rebound_views(self, storage: Value) -> list[torch.Tensor]:
        """Return replicated tensors that a write has made views of a located storage, each once."""
        tensors = {id(tensor): tensor for tensor in self._kept if id(tensor) in self.located}
        values = {place: self.located[place] for place in tensors}
        return [tensors[at] for at, value in values.items() if type(value) is Value and value.storage is storage]

    def rebind(self, tensor: torch.Tensor, value: Value | InvalidatedValue) -> None:
        """Make a tensor of the body refer to another value."""
        if type(tensor) is RemoteTensor:
            tensor.set_value(value)
            return
        if id(tensor) not in self.located:
            has_graph = type(value) is Value and value.meta.requires_grad
            self.pipeline.stale_storages.add(tensor, has_graph=has_graph)
        if id(tensor) not in self.pipeline.located:
            self.outside_tensors.note_write(tensor)
        for each in (tensor, *self.pipeline.attribute_views.same_as(tensor)):
            self._kept.append(each)
            self.located[id(each)] = value

    def value_of_replicated(self, tensor: torch.Tensor) -> Value | None:
        """Return the value of a replicated tensor to which an earlier microbatch has written values of a partition.

        It is ``None`` for a tensor whose values this rank has.

        Raises:
            SMPUsageError: This rank does not have them, and there is no such value.
        """
        if not self.pipeline.stale_storages.has(tensor):
            return None
        for earlier in reversed(self.earlier):
            value = earlier.located.get(id(tensor)) if earlier.outside_tensors.has_written(tensor) else None
            if type(value) is Value:
                taken = self.located[id(tensor)] = self.retained.take_value(earlier, value)
                self._kept.append(tensor)
                return taken
        raise self.pipeline.stale_storages.error(tensor)

    # Functions that the body calls directly.

    def backward(self, tensors: Any, gradients: Any) -> None:
        """Implement ``model.backward``."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        gradients = [None] * len(tensors) if gradients is None else gradients
        gradients = [gradients] if isinstance(gradients, torch.Tensor) else list(gradients)
        for tensor, gradient in zip(tensors, gradients, strict=True):
            if not isinstance(tensor, RemoteTensor) or not tensor.value.meta.requires_grad:
                raise SMPUsageError(
                    "`model.backward` of a tensor that does not depend on a parameter of the model"
                    + ("" if torch.is_grad_enabled() else ": gradients are off here")
                )
            if gradient is None and torch.Size(tensor.value.meta.shape).numel() != 1:
                raise SMPUsageError(
                    f"`model.backward` of {tensor.value.meta}: without `grad_tensors` it takes one number, such as a "
                    f"loss"
                )
            if isinstance(gradient, RemoteTensor):
                gradient = self.fetch(self.value_of(gradient))
            self.value_of(tensor)
            self.backward_roots.append((tensor.value, gradient))
            self.pipeline.module_state.note_contents()
            self.backward_modules = self.pipeline.module_state.current
            self.copy_on_write.has_backward = True
            self.copy_on_write.end_of_checkpoints()
            self.digest = chained_digest(self.digest, digest_of(("backward", tensor.value.index)))

    @contextlib.contextmanager
    def checkpointed(self) -> Iterator[None]:
        """Return a context for a checkpointed function, whose inputs must not change before the backward."""
        if not torch.is_grad_enabled():
            yield
            return
        first = len(self.tasks)
        self.copy_on_write.begin_checkpoint()
        try:
            yield
        finally:
            new = self.tasks[first:]
            self.copy_on_write.end_checkpoint(self._read_by(new), [each.module for each in new if each.module])

    def _read_by(self, tasks: Sequence[Task]) -> list[Value]:
        """Return the storages that tasks read and that none of them has made."""
        made = {value.storage for task in tasks for value in task.outputs}
        read = {value.storage for task in tasks for value in task.inputs}
        for task in tasks:
            state = () if task.module is None else itertools.chain(task.module.parameters(), task.module.buffers())
            read.update(value.storage for value in map(self.located.get, map(id, state)) if type(value) is Value)
        return [value for value in read if value not in made]

    def returned(self, remote: RemoteTensor, detach: bool) -> Value:
        """Return the value of a remote tensor that the body returns."""
        value = self.value_of(remote) if remote.recording is self else self.retained.take(remote, detached=detach)
        self.retained.returns(value)
        return value

    def fetch(self, value: Value) -> torch.Tensor:
        """Return the tensor of a value on every rank."""
        if value.parameter is not None:
            return self.pipeline.fetch(self, value)
        if value.index not in self.fetched:
            self.fetched[value.index] = self.pipeline.fetch(self, value)
        return self.fetched[value.index]

    def _fetch_leaf(self, leaf: Any) -> Any:
        if type(leaf) is RemoteTensor:
            return self.fetch(self.value_of(leaf))
        value = self.located.get(id(leaf))
        return leaf if value is None else self.fetch(value)

    def value_of(self, remote: RemoteTensor) -> Value:
        """Return the value of a remote tensor.

        Raises:
            SMPUsageError: It belongs to another microbatch and has a graph there, or cannot be tracked any more.
        """
        if remote.recording is not self:
            return self.retained.take(remote)
        if isinstance(remote.value, InvalidatedValue):
            raise SMPUsageError(remote.value.reason)
        return remote.value

    def close_level(self) -> None:
        """Order all later tasks after all tasks so far."""
        self.num_executed = len(self.tasks)
        self._count, self._replay = next_number(self._replay, self.tasks, self._count), None
        self.base_level = self._levels + 1
        self._levels = self.base_level
        # The following tasks form separate stages, which the digest must show to plans and other replicas.
        self.digest = chained_digest(self.digest, digest_of(("asked", self.num_executed)))


def _meta_of_leaf(leaf: Any) -> TensorMeta:
    return leaf.meta if isinstance(leaf, Value) else TensorMeta.of(leaf)


def _copied(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy to send, because a later task of the stage may write to the parameter before it is sent."""
    return parameter.clone()
