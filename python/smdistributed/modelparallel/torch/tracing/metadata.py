"""Output specs: descriptions of what an operation or module would return.

Each signature is called once with fake tensors, and the result is cached.

Every rank can do so for every module, because fake parameters take no memory. If fake tensors fail, because the
module reads values or calls an operator without a fake implementation, random values are used
(``tracing/shape_probe.py``). A call that fails with both in the same way is an error of the script, and is raised on
all ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.partitioning.cost_model import UNKNOWN_COST, Counter, OpCost
from smdistributed.modelparallel.torch.partitioning.placement import own_tensors
from smdistributed.modelparallel.torch.runtime.generators import HostGenerators
from smdistributed.modelparallel.torch.tracing import shape_probe
from smdistributed.modelparallel.torch.tracing.attributes import object_state
from smdistributed.modelparallel.torch.tracing.attributes.preserved_attributes import (
    Content,
    StatePart,
    preserved_attributes,
)
from smdistributed.modelparallel.torch.tracing.remote_tensor import TensorMeta, offset_of, version_of

#: Largest number of cached signatures, which limits the memory if a step never repeats one.
_LIMIT = 1 << 14


@dataclass(frozen=True)
class OutputSpec:
    """The outputs of a call: structure, shapes, dtypes and effects.

    Attributes:
        template: The structure, with slots for tensors; with ``effects``, :class:`object_state.Effects` of such
        structures.
        metas: Descriptions of these tensors.
        mutated: Indices of the input tensors that the call changes.
        aliases: For each output tensor, the index of the input if it is the same object.
        cost: The estimated cost; equal on all ranks.
        storages: For each output tensor, whose storage it shares, if any.
        attributes: Attributes of modules that the call sets to tensors, as (path in the called module, name). If
        there are any, the template is a pair of the result and the tuple of their values.
        draws: Kinds of generators from which the call draws.
        effects: Whether the call changes containers among its arguments, or returns objects.
        unread: Indices of the input tensors in containers that the call never reads.
        observed: Whether the spec was found with random values.
        saved: Tensors that autograd saves for the backward: the index of an input tensor, or -1 minus the index of an
        output tensor.
        unversioned: Those of ``mutated`` that are changed through ``.data``, which autograd's version counter does
        not register.
    """

    template: Any
    metas: tuple[TensorMeta, ...]
    mutated: tuple[int, ...]
    aliases: tuple[int | None, ...]
    cost: OpCost = UNKNOWN_COST
    storages: tuple[SharedStorage | None, ...] = ()
    attributes: tuple[tuple[str, str], ...] = ()
    draws: frozenset[str] = frozenset()
    #: Whether it changes buffers or attributes of the called module, which the next call may read.
    changes_state: bool = False
    effects: bool = False
    unread: tuple[int, ...] = ()
    observed: bool = False
    saved: tuple[int, ...] = ()
    unversioned: tuple[int, ...] = ()
    #: Paths, relative to the called module, of parameters and buffers that the call writes to.
    written_state: tuple[str, ...] = ()
    #: Paths of those that autograd saves for the backward.
    saved_state: tuple[str, ...] = ()
    #: Attributes without tensors that the call changes: path relative to the called module, name.
    plain_attributes: tuple[tuple[str, str], ...] = ()
    #: Containers and tensors in attributes that the call changes.
    changed_state: tuple[StatePart, ...] = ()
    #: Attributes with remote tensors that the call reads: path relative to the called module, name.
    read_attributes: tuple[tuple[str, str], ...] = ()
    #: Whether the result is one tensor of its own, and nothing is changed: so it is of most calls.
    is_single_output: bool = field(init=False, compare=False, default=False)
    #: Number of tensors that belong to the result, and not to attributes.
    results: int = field(init=False, compare=False, default=0)

    def __post_init__(self) -> None:
        simple = type(self.template) is pytree.Slot and not self.mutated and not any(self.storages)
        object.__setattr__(self, "is_single_output", simple)
        whole = self.template.result if isinstance(self.template, object_state.Effects) else self.template
        results = len(pytree.tensors_of(whole[0])) if self.attributes else len(self.metas)
        object.__setattr__(self, "results", results)


class SharedStorage(NamedTuple):
    """The tensor whose storage an output shares.

    Attributes:
        place: The index of an input tensor, or -1 minus the index of an earlier output tensor; ``None`` for a
        parameter or buffer of the called module.
        offset: Offset in that tensor's storage range, in elements.
        state: The path of the parameter or buffer in the called module, if it is one of its own.
    """

    place: int | None
    offset: int
    state: str | None = None


class UnknownOutputError(Exception):
    """The output spec depends on values; the text gives the reason."""


class ReadsNumbersError(Exception):
    """An operation reads the value of a replicated tensor, such as a size that was computed with tensors."""


#: Operators whose result has a shape that depends on values.
_SHAPES = (DynamicOutputShapeException,)
_NUMBERS = (DataDependentOutputException, *_SHAPES)
_UNSUPPORTED = (UnsupportedFakeTensorException, UnsupportedOperatorException)


def describe_result(
    result: Any, watch: object_state.Watch | None, given: Mapping[int, int] | None = None
) -> tuple[Any, list[torch.Tensor], bool]:
    """Describe a result: a template, its tensors, and whether the template contains effects on containers.

    Args:
        result: The result of the call.
        watch: The containers among the arguments, in their state before the call.
        given: Indices of the input tensors by id; tensors that stay in a container are not outputs.

    Raises:
        UnknownOutputError: The result contains sparse tensors.
    """
    effects = None if watch is None else watch.effects(result)
    shape: Any
    has_effects = effects is not None and bool(effects.states or object_state.has_objects(result))
    if has_effects and effects is not None and watch is not None:
        outputs: list[Any] = []

        def slot(output: Any) -> pytree.Slot:
            outputs.append(output)
            return pytree.Slot(len(outputs) - 1)

        shape = effects.template(watch.containers, slot, given or {})
    else:
        shape, outputs = pytree.template(result)
    if not all(isinstance(output, torch.Tensor) and output.layout == torch.strided for output in outputs):
        raise UnknownOutputError("it returns an object that is not a strided tensor")
    return shape, outputs, has_effects


class OutputSpecs:
    """Finds and caches output specs."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Any, OutputSpec] = {}
        self._counter = Counter()
        #: Attributes that modules have set to tensors, as (path, name), by the id of the called module.
        self._known_attributes: dict[int, list[tuple[str, str]]] = {}
        #: Other attributes that calls have changed, in the same form.
        self._plain_attributes: dict[int, dict[tuple[str, str], None]] = {}
        #: Modules that were seen to change their own attributes.
        self._changing: set[int] = set()
        #: Attributes that the current call has set: path, name, value.
        self._attributes: list[tuple[str, str, Any]] = []
        self._changes_attributes = False
        #: Paths of parameters and buffers that the current call has written to.
        #: Fake parameters and buffers of the called module, by their paths in it.
        self._called_state: dict[str, torch.Tensor] = {}
        #: Attributes without tensors that this or an earlier call of the module has changed.
        self._changed: tuple[tuple[str, str], ...] = ()
        #: The called module; and its fake tensors in attributes with remote tensors, by path and name.
        self._module: nn.Module | None = None
        self._remote: dict[tuple[str, str], list[torch.Tensor]] = {}
        #: Entries that the current call has added to dictionaries and objects in attributes.
        self._additions: list[tuple[Content, dict[Any, Any]]] = []
        #: Containers and tensors in attributes that the last call has changed, and other tensors from outside.
        self.changed_state: list[StatePart] = []
        self.changed_others: list[torch.Tensor] = []
        #: The values invented for number arguments, while a call is tried with such to find its result's shape.
        self._numbers: shape_probe.Numbers | None = None

    def known(self, key: Any) -> OutputSpec | None:
        """Return the cached spec of a signature."""
        return self._known.get(key) if key is not None else None

    def keep(self, key: Any, spec: OutputSpec) -> None:
        """Cache a spec."""
        if key is None:
            return
        if len(self._known) >= _LIMIT:
            self._known.clear()
        self._known[key] = spec

    def of(
        self,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        meta_of: Callable[[Any], TensorMeta],
        is_module: bool = False,
        in_containers: Sequence[int] = (),
        has_numbers: bool = False,
    ) -> OutputSpec:
        """Find the output spec of a call.

        Args:
            call: The function or module.
            args: Positional arguments: a structure whose leaves ``meta_of`` describes.
            kwargs: Keyword arguments, likewise.
            meta_of: Returns the description of a leaf, without its values.
            is_module: Whether ``call`` calls a module, which may change containers among its arguments.
            in_containers: Indices, among the leaves, of those that are in such containers.
            has_numbers: Whether leaves contain tensors that all ranks can pass as integers instead.

        Raises:
            ReadsNumbersError: With ``has_numbers``, the call reads values.
            UnknownOutputError: The output depends on values.
            Exception: The call itself fails, whatever the values are.
        """
        wants_gradients = torch.is_grad_enabled()
        found: Exception
        try:
            # Inference tensors have no versions; tasks run without gradients instead.
            with (
                torch.inference_mode(False), torch.set_grad_enabled(wants_gradients), self._mode,
                shape_probe.failures_not_logged(),
            ):  # fmt: skip
                spec = self._output_spec(call, args, kwargs, meta_of, is_module, in_containers)
                if self._additions:
                    again = functools.partial(self._output_spec, call, args, kwargs, meta_of, is_module, in_containers)
                    spec = self._with_additions(spec, again)
                return spec
        except UnknownOutputError:
            raise
        except _NUMBERS as error:
            if has_numbers:
                raise ReadsNumbersError from error
            found, reason = error, "it reads values of tensors"
        except _UNSUPPORTED as error:
            found, reason = error, f"PyTorch's fake tensors do not support an operation that it calls ({_line(error)})"
        except Exception as error:
            found, reason = error, f"it fails with fake tensors ({type(error).__name__}: {_line(error)})"
        return self._observe(call, args, kwargs, meta_of, is_module, in_containers, found, reason)

    def _observe(
        self, call: Any, args: Any, kwargs: Any, meta_of: Any, is_module: bool, in_containers: Sequence[int],
        found: Exception, reason: str,
    ) -> OutputSpec:  # fmt: skip
        """Return the output spec of calls with random values (PROBE-1)."""
        try:
            specs = self._samples(call, args, kwargs, meta_of, is_module, in_containers)
        except UnknownOutputError:
            raise
        except Exception as error:
            if type(error) is type(found) and not isinstance(found, (*_NUMBERS, *_UNSUPPORTED)):
                # The failure does not depend on values.
                raise
            text = f"{reason}, and with made-up values it fails ({type(error).__name__}: {_line(error)})"
            try:
                specs = self._samples(call, args, kwargs, meta_of, is_module, in_containers, replicated=True)
            except Exception:
                raise UnknownOutputError(text) from error
            if any(meta.shape for meta in specs[0].metas):
                # Replicated tensors of the next microbatch have other values, on which a shape may depend.
                raise UnknownOutputError(text) from error
        first = specs[0]
        if not is_module and isinstance(found, _SHAPES) and any(meta.shape for meta in first.metas):
            # For a single operation whose shape depends on values, random values may agree by chance; a scalar is
            # accepted.
            raise UnknownOutputError("the shapes of its outputs depend on values") from found
        if not all(_alike(first, other) for other in specs[1:]):
            raise UnknownOutputError(f"{reason}, and returns other shapes for other values")
        unread = set(first.unread).intersection(*(other.unread for other in specs))
        draws = frozenset().union(*(each.draws for each in specs))
        state = tuple(dict.fromkeys(part for each in specs for part in each.changed_state))
        return dataclasses.replace(first, unread=tuple(sorted(unread)), draws=draws, changed_state=state, observed=True)

    def _samples(
        self, call: Any, args: Any, kwargs: Any, meta_of: Any, is_module: bool, in_containers: Sequence[int],
        replicated: bool = False,
    ) -> list[OutputSpec]:  # fmt: skip
        """Call with several sets of random values; with ``replicated``, replicated tensors keep theirs (PROBE-3)."""
        specs = []
        for sample in range(shape_probe.SAMPLES):
            self._numbers = shape_probe.Numbers(sample, replicated)
            try:
                with shape_probe.random_numbers(sample):
                    specs.append(self._output_spec(call, args, kwargs, meta_of, is_module, in_containers))
            finally:
                self._numbers = None
        return specs

    def _output_spec(
        self, call: Any, args: Any, kwargs: Any, meta_of: Any, is_module: bool, in_containers: Sequence[int]
    ) -> OutputSpec:
        leaves: list[torch.Tensor] = []
        counter = self._counter = Counter()
        counter.written_real = [] if self._numbers is None else None
        self._attributes, self._changes_attributes, self._called_state, self._changed = [], False, {}, ()
        self._module, self._remote, self._additions = None, {}, []
        self.changed_state, self.changed_others = [], []

        def tensor(leaf: Any) -> torch.Tensor:
            meta = meta_of(leaf)
            made = self.fake(meta) if self._numbers is None else self._numbers.of(leaf, meta)
            leaves.append(counter.argument(made))
            if getattr(leaf, "parameter", None) is not None:
                counter.parameter(leaves[-1])
            return leaves[-1]

        watch = None
        host = HostGenerators()
        if is_module:
            copier = object_state.Copier(tensor)
            own_args = copier.copy(args)
            own_kwargs = {key: copier.copy(item) for key, item in kwargs.items()}
            watch = object_state.Watch(copier.copies)
        else:
            own_args, own_kwargs = pytree.transform((args, kwargs), tensor)
        versions = [version_of(leaf) for leaf in leaves]
        with host, counter:
            result = call(*own_args, **own_kwargs)
        if not is_module:
            self.changed_others = list(counter.written_real or ())
        if counter.mistrusted and self._numbers is None:
            raise UnsupportedOperatorException(counter.mistrusted)
        attributes = tuple((path, name) for path, name, _ in self._attributes)
        if attributes:
            result = (result, tuple(value for _, _, value in self._attributes))
        places = {id(leaf): place for place, leaf in enumerate(leaves)}
        shape, outputs, effects = describe_result(result, watch, places)
        mutated = tuple(
            place
            for place, leaf in enumerate(leaves)
            if version_of(leaf) != versions[place] or counter.storage(leaf) in counter.written
        )
        unversioned = tuple(place for place in mutated if version_of(leaves[place]) == versions[place])
        saved = (
            *(place for place, leaf in enumerate(leaves) if counter.is_saved(leaf)),
            *(-1 - place for place, output in enumerate(outputs) if counter.is_saved(output)),
        )
        returned = {counter.storage(output) for output in outputs}
        read_attributes = tuple(
            key
            for key, tensors in self._remote.items()
            if any(counter.has_read(each) or counter.storage(each) in returned for each in tensors)
        )
        unread = counter.unread({place: leaves[place] for place in in_containers}, outputs)
        for each in (*leaves, *outputs):
            counter.outside(each)
        metas = tuple(map(TensorMeta.of, outputs))
        aliases = tuple(places.get(id(output)) for output in outputs)
        storages = _shared_storages(counter, leaves, outputs, self._called_state)
        return OutputSpec(
            shape,
            metas,
            mutated,
            aliases,
            counter.cost(),
            storages,
            attributes,
            frozenset(counter.draws | host.draws),
            self._changes_attributes or counter.writes_parameters(),
            effects,
            unread,
            saved=saved,
            unversioned=unversioned,
            written_state=tuple(
                name for name, state in self._called_state.items() if counter.storage(state) in counter.written
            ),
            saved_state=tuple(
                name
                for name, state in self._called_state.items()
                if counter.is_saved(state) and counter.storage(state) not in counter.statistics
            ),
            plain_attributes=self._changed,
            changed_state=tuple(self.changed_state),
            read_attributes=read_attributes,
        )

    def _with_additions(self, spec: OutputSpec, again: Callable[[], OutputSpec]) -> OutputSpec:
        """Return the spec of a call that has added entries to dictionaries or objects in attributes.

        Most such calls fill a cache whose entries depend on nothing but shapes. Any other call changes its module: an
        equal call that follows changes the entries again, or they contain numbers of arguments or parameters.
        """
        additions, module, others = self._additions, self._module, self.changed_others
        assert module is not None, "attributes are those of a module"
        is_derived = self._counter.is_derived
        changed = {
            id(content.part): content
            for content, entries in additions
            if any(map(is_derived, object_state.parts_of(list(entries.values()))[1]))
        }
        for content, entries in additions:
            content.value.update(entries)
        try:
            again()
        finally:
            for content, _ in additions:
                content.restore()
        mine = {id(content.part) for content, _ in additions}
        changed |= {id(content.part): content for content, _ in self._additions if id(content.part) in mine}
        parts = [*spec.changed_state, *self.changed_state, *(content.where for content in changed.values())]
        others += [tensor for tensor in self.changed_others if all(tensor is not each for each in others)]
        plain = self._plain_attributes[id(module)]
        plain.update({(content.path, content.name): None for content in changed.values()})
        if changed:
            self._changing.add(id(module))
        self._additions, self.changed_others = [], others
        known = self._known_attributes[id(module)]
        return dataclasses.replace(
            spec,
            changes_state=spec.changes_state or id(module) in self._changing,
            plain_attributes=tuple(each for each in plain if each not in known),
            changed_state=tuple(dict.fromkeys(parts)),
        )

    def fake(self, meta: TensorMeta, leaf: bool = False) -> torch.Tensor:
        """Return a fake tensor; unless ``leaf``, one that can be changed in place even if it requires a gradient."""
        with self._mode, torch.enable_grad():
            tensor = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
            if not meta.requires_grad:
                return tensor
            tensor.requires_grad_()
            return tensor if leaf else _Alias.apply(tensor)

    def module(self, module: nn.Module, what: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``what``, which calls ``module`` or is it, with fake parameters."""
        module = getattr(module, "_orig_mod", module)
        caller = module if isinstance(what, nn.Module) else _Caller(module, what)

        def call(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(each, torch.jit.ScriptModule) for each in module.modules()):
                raise UnknownOutputError("its code is TorchScript's")
            # A parameter under several names is one fake tensor, too.
            made: dict[int, torch.Tensor] = {}
            tensors = {}
            # Each entry once: for a module with several parents, `functional_call` would restore the second name to
            # the fake tensor.
            for path, part in module.named_modules():
                for _, name, tensor in own_tensors(part):
                    if id(tensor) not in made:
                        made[id(tensor)] = self._counter.parameter(self._state(tensor))
                    full = f"{path}.{name}" if path else name
                    tensors[full if caller is module else f"module.{full}"] = made[id(tensor)]
            make_fake = self.fake if self._numbers is None else self._numbers.tensor
            with preserved_attributes(module, make_fake, self._numbers is not None) as attributes:
                self._module, self._remote = module, attributes.remote
                result = torch.func.functional_call(caller, tensors, args, kwargs, tie_weights=False)
                self._look_at_attributes(module, attributes)
                self._called_state = {
                    name if caller is module else name.removeprefix("module."): tensor
                    for name, tensor in tensors.items()
                }
                return result

        return call

    def _state(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake tensor of a parameter or buffer."""
        meta = TensorMeta.of(tensor)
        if self._numbers is None:
            return self.fake(meta, leaf=True)
        return self._numbers.state(meta, isinstance(tensor, nn.Parameter))

    def _look_at_attributes(self, module: nn.Module, attributes: preserved_attributes) -> None:
        """Record attributes; ranks may differ in what a module has cached, so findings apply to all later calls."""
        found = attributes.set_by_call()
        known = self._known_attributes.setdefault(id(module), [])
        known += [name for name, value in found.items() if name not in known and _is_of_tensors(value)]
        counter = self._counter
        contents = attributes.changed_contents()
        additions = attributes.additions()
        if self._numbers is not None:
            # Not tried again with the entries, as for fake tensors.
            contents, additions = [*contents, *(content for content, _ in additions)], []
        tensors = [each for each in attributes.tensors if counter.storage(each[1]) in counter.written]
        known_storages = {counter.storage(tensor) for _, tensor in tensors}
        others = [each for each in counter.written_real or () if counter.storage(each) not in known_storages]
        if found or contents or tensors or others:
            self._changing.add(id(module))
        self._changes_attributes = id(module) in self._changing
        self._additions = additions
        self.changed_state = [*(content.where for content in contents), *(where for where, _ in tensors)]
        self.changed_others = others
        plain = self._plain_attributes.setdefault(id(module), {})
        plain.update(dict.fromkeys(found))
        plain.update({(content.path, content.name): None for content in contents})
        plain.update({(where.path, where.name): None for where, _ in tensors})
        self._changed = tuple(each for each in plain if each not in known)
        values = {(path, name): getattr(module.get_submodule(path), name, None) for path, name in known}
        self._attributes = [(*name, value) for name, value in values.items() if _is_of_tensors(value)]


def _is_of_tensors(value: Any) -> bool:
    if type(value) in pytree.ATOMS:
        return False
    leaves = pytree.tensors_of(value)
    return bool(leaves) and all(isinstance(leaf, torch.Tensor) for leaf in leaves)


class _Caller(nn.Module):
    """A function that calls a module, as a module with its parameters."""

    def __init__(self, module: nn.Module, what: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.what = module, what

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return self.what(*args, **kwargs)


class _Alias(torch.autograd.Function):
    """Returns a tensor with the same memory that is neither a leaf nor a view, so that it can be changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _shared_storages(
    counter: Counter,
    leaves: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    state: Mapping[str, torch.Tensor],
) -> tuple[SharedStorage | None, ...]:
    homes: dict[int, tuple[int, int]] = {}
    own = {counter.storage(tensor): (name, offset_of(tensor)) for name, tensor in state.items()}
    for place, leaf in enumerate(leaves):
        homes.setdefault(counter.storage(leaf), (place, offset_of(leaf)))
    found: list[SharedStorage | None] = []
    for place, output in enumerate(outputs):
        storage = counter.storage(output)
        home = homes.get(storage)
        if home is not None:
            found.append(SharedStorage(home[0], offset_of(output) - home[1]))
            continue
        homes[storage] = (-1 - place, offset_of(output))
        if storage in own:
            name, offset = own[storage]
            found.append(SharedStorage(None, offset_of(output) - offset, name))
        else:
            found.append(SharedStorage(None, 0) if counter.is_parameter(output) else None)
    return tuple(found) if any(found) else ()


def _alike(one: OutputSpec, other: OutputSpec) -> bool:
    """Return whether two specs are equal, except for constants that are numbers, and for costs."""
    first, second = (
        (each.metas, each.mutated, each.aliases, each.effects, each.storages, each.attributes) for each in (one, other)
    )
    return first == second and object_state.described(one.template) == object_state.described(other.template)


def _line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return (str(error).strip().splitlines() or [""])[0][:200]
