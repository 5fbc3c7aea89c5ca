"""``@smp.step``: a function that runs once for each microbatch, over all partitions."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager import record

from smdistributed import _core
from smdistributed._common import errors, interrupts
from smdistributed.modelparallel.binding import binds_instance
from smdistributed.modelparallel.exceptions import CLASSES, SMPMismatchError, SMPUsageError
from smdistributed.modelparallel.splitting import check_names
from smdistributed.modelparallel.tensorflow import gradients, optimizer
from smdistributed.modelparallel.tensorflow.output import Origin, StepOutput, sum_of
from smdistributed.modelparallel.tensorflow.partitioning import placement
from smdistributed.modelparallel.tensorflow.partitioning.delayed_initialization import handle_of
from smdistributed.modelparallel.tensorflow.runtime import agreement, channels
from smdistributed.modelparallel.tensorflow.runtime.program import Program
from smdistributed.modelparallel.tensorflow.runtime.segment_graph import SegmentGraph
from smdistributed.modelparallel.tensorflow.split import split
from smdistributed.modelparallel.tensorflow.state import state
from smdistributed.modelparallel.tensorflow.tracing import interception
from smdistributed.modelparallel.tensorflow.tracing.operations import Operations
from smdistributed.modelparallel.tensorflow.tracing.recording import Trace, trace_calls


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Return a context for calls of steps that translates errors of the core.

    It also reports the failure of an operation on this rank to the other ranks.
    """
    try:
        with errors.translated(CLASSES):
            yield
    except RuntimeError as error:
        interrupts.raise_what_replaced(error)
        raise
    except tf.errors.OpError as error:
        translation = errors.from_report(error.message, CLASSES)
        if translation is not None:
            raise translation from None
        # A failure of hooks is raised on all ranks already.
        if tf.executing_eagerly() and len(state.groups.members["pp"]) > 1 and not hasattr(error, "_smp_is_known"):
            # The other ranks wait for this rank's part of the step.
            _core.report_failure(f"{type(error).__name__}: {error.message}")
        raise


class StepFunction:
    """A decorated function, which binds to objects as functions do.

    Args:
        function: The body.
        non_split_inputs: Names of parameters that are not split.
        input_split_axes: The batch's axis, by name of the parameter; 0 for others.
        options: Arguments of ``tf.function``.
        uneven: Whether batches that the number of microbatches does not divide are accepted, and batches with fewer
            rows get one microbatch for each row. The body must then weight its results by rows.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        non_split_inputs: Sequence[str],
        input_split_axes: Mapping[str, int],
        options: Mapping[str, Any],
        uneven: bool = False,
    ) -> None:
        functools.update_wrapper(self, function)
        self._signature = inspect.signature(function)
        self._whole, self._axes, self._uneven = set(non_split_inputs), dict(input_split_axes), uneven
        check_names(self._whole, self._signature.parameters, "non_split_inputs")
        check_names(self._axes, self._signature.parameters, "input_split_axes")
        options = dict(options)
        for name in ("experimental_compile", "jit_compile"):
            if options.pop(name, None):
                warnings.warn(
                    f"`{name}` is ignored: a step is not one piece; layers may be compiled, or all of it by "
                    "`tf.config.optimizer.set_jit(True)`",
                    stacklevel=4,
                )
        autograph = options.pop("autograph", True)
        features = options.pop("experimental_autograph_options", None)
        # The model at the time of the last trace.
        self._model: Any = None
        self._body = function
        if autograph:
            self._body = tf.__internal__.autograph.tf_convert(
                function, ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED, options=features), user_requested=True
            )

        @functools.wraps(function)
        def build(*args: Any, **kwargs: Any) -> Any:
            return self._build(args, kwargs)

        self._make = lambda: tf.function(build, autograph=False, **options)
        self._function, self._has_built = self._make(), False

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else _BoundStepFunction(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body for each microbatch of the batch; all ranks of the job call it."""
        return self._run(self._function, args, kwargs)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``tf.function``'s concrete function for these arguments.

        All ranks call it: the first call partitions the model.
        """
        return self._run(self._function.get_concrete_function, args, kwargs)

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        state.groups  # noqa: B018 - raises before `init`
        interception.install()
        optimizer.install()
        if state.trace is not None:
            raise SMPUsageError("a `smp.step` function was called inside of another one")
        agreement.wait_for_report(state.groups)
        with translate_errors():
            try:
                return function(*args, **kwargs)
            except Exception:
                if not self._has_built:
                    # If the first trace created variables and failed, TensorFlow treats the function as traced, so a
                    # new one is made.
                    self._function = self._make()
                raise

    # This code runs while TensorFlow traces.

    def _build(self, args: Any, kwargs: Any) -> Any:
        try:
            built = self._build_program(args, kwargs)
            self._has_built = True
            return built
        except SMPMismatchError:
            raise
        except Exception as error:
            _report_trace_failure(error)
            raise

    def _build_program(self, args: Any, kwargs: Any) -> Any:
        cfg, groups = state.cfg, state.groups
        rank, size = groups.rank_in("pp"), len(groups.members["pp"])
        calls = self._calls(args, kwargs, cfg.microbatches)
        microbatches = len(calls)
        model = state.model
        traced, rows = trace_calls(self._body, calls, model is not None and self._model is model)
        if not traced.called:
            raise SMPUsageError("the body of a `smp.step` function calls no `smp.DistributedModel`")
        model = self._model = state.model
        assert model is not None, "the model was called"
        is_first = not model.is_partitioned
        operations = Operations(traced)
        assignment = placement.decide(traced, operations, cfg) if is_first else model._smp_assignment
        state.has_gradients |= traced.gradient_tracker.has_found_any
        places = placement.place(traced, operations, assignment, cfg)
        reduces = cfg.ddp and groups.dp_group is not None
        template, wanted = self._step_outputs(traced, assignment, size, reduces)
        _check_dependence(traced, wanted)
        segment_graph = SegmentGraph(operations, places, wanted, rank, microbatches, cfg)
        if is_first:
            if groups.pp_group is not None:
                # All ranks have compared their traces before any of them partitions the model.
                agreement.compare_now(agreement.in_pipeline(segment_graph.lines, groups))
            placement.save(traced, assignment, cfg)
            model._smp_partition(assignment)
            if groups.pp_group is not None:
                channels.open_between(groups, segment_graph)
        model._smp_call_hooks()
        found = _gradients(template[rank])
        early = {part.name for each in found for part in _parts(each)} if reduces else set()
        to_sum = {
            each.value.name: handle_of(each.variable).device for each in found if isinstance(each.value, tf.Tensor)
        }
        comparisons = []
        if reduces and traced.gradient_tracker.has_found_any:
            everywhere = [(each.value, each.variable) for part in template for each in _gradients(part)]
            comparisons.append(gradients.between_replicas(everywhere))
        program = Program(traced, segment_graph, rows, groups, to_sum, early, comparisons)
        results = program.build()
        totals = {id(each): program.sums[each.value.name] for each in found if isinstance(each.value, tf.Tensor)}
        if comparisons:
            sums = [totals[id(each)] if id(each) in totals else _sum(each, results) for each in found]
            # A gradient tape around the step must not record these operations.
            with record.stop_recording():
                reduced = gradients.over_replicas(sums, [each.variable for each in found], program.compared)
            totals = {id(each): mean for each, mean in zip(found, reduced, strict=True)}
        results, totals = program.end((results, totals))
        return _filled(template[rank], results, totals, reduces)

    def _calls(self, args: Any, kwargs: Any, microbatches: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        bound = self._signature.bind(*args, **kwargs)
        if self._uneven:
            microbatches = min([microbatches, *_rows(dict(bound.arguments))])
        pieces: dict[str, list[Any]] = {}
        for name, value in bound.arguments.items():
            axis, keep = self._axes.get(name, 0), name in self._whole
            pieces[name] = split(value, name, microbatches, axis, keep, self._uneven)
        calls = []
        for index in range(microbatches):
            each = inspect.BoundArguments(self._signature, {name: part[index] for name, part in pieces.items()})
            calls.append((each.args, each.kwargs))
        return calls

    def _step_outputs(
        self, traced: Trace, assignment: placement.PartitionAssignment, size: int, reduces: bool
    ) -> tuple[list[Any], list[list[tf.Tensor]]]:
        """Return, for each rank, the step's results there in their structure, and the tensors in them.

        ``reduces`` tells whether replicas reduce gradients.
        """
        before, state.trace = state.trace, traced
        try:
            variables = list(state.model.trainable_variables) if state.model is not None else []
        finally:
            state.trace = before

        def on(rank: int, value: Any) -> Any:
            if gradients.starts_with_gradients(value, variables, traced.gradient_tracker):
                found = zip(value, variables, [assignment.variables.get(id(handle_of(each))) for each in variables])  # noqa: B905 - more may follow
                mine = [_Gradient(each, variable, home) for each, variable, home in found if home in (rank, None)]
                return type(value)([*mine, *(on(rank, item) for item in value[len(variables) :])])
            if isinstance(value, dict):
                return _like(value, {key: on(rank, item) for key, item in value.items()})
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*(on(rank, item) for item in value))
            if isinstance(value, tuple | list):
                return type(value)(on(rank, item) for item in value)
            # Gradients of variables that all partitions have are on every rank.
            variable = traced.gradient_tracker.variable_of(value, variables, reduces)
            return value if variable is None else _Gradient(value, variable)

        templates = [on(rank, traced.returned) for rank in range(size)]
        return templates, [_leaves(template) for template in templates]


class _BoundStepFunction:
    """A step function that was looked up on an object."""

    def __init__(self, step: StepFunction, instance: Any) -> None:
        functools.update_wrapper(self, step, updated=())
        self.__self__, self._step = instance, step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the step function with the object."""
        return self._step(*self._arguments(args, kwargs), **kwargs)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """Return the concrete function of the step function with the object."""
        return self._step.get_concrete_function(*self._arguments(args, kwargs), **kwargs)

    def _arguments(self, args: Any, kwargs: Any) -> Any:
        bound = binds_instance(self._step._signature, self.__self__, args, kwargs)
        return (self.__self__, *args) if bound else args


def _rows(value: Any) -> list[int]:
    """Return the known, nonzero numbers of rows of the tensors in ``value``."""
    tensors = [each for each in tf.nest.flatten(value) if isinstance(each, tf.Tensor)]
    return [each.shape[0] for each in tensors if each.shape.rank and each.shape[0]]


def _report_trace_failure(error: Exception) -> None:
    """Report a failed trace to the other partitions, which wait for this rank in the step."""
    groups = state.groups
    if groups.pp_group is None:
        return
    kind, *lines = type(error).__name__, *str(error).strip().splitlines()
    last = lines[-1].strip() if lines else ""
    text = f"rank {groups.rank}: {last if last.startswith(kind) else f'{kind}: {last}'}"
    agreement.report_failure("could not trace a step that others run", text, groups, agreement.TRACING_SECONDS)


@dataclass(eq=False)
class _Gradient:
    """A gradient in a body's result, which may be ``None``.

    Attributes:
        value: The gradient.
        variable: The variable of the gradient.
        partition: The only partition that gets it; ``None`` if all do.
    """

    value: Any
    variable: Any
    partition: int | None = None


def _parts(value: Any) -> list[tf.Tensor]:
    if isinstance(value, _Gradient):
        return _parts(value.value)
    if isinstance(value, tf.__internal__.CompositeTensor):
        # Composite tensors: slices, ragged and sparse tensors.
        return tf.nest.flatten(value, expand_composites=True)
    return [value] if isinstance(value, tf.Tensor) else []


def _leaves(value: Any) -> list[tf.Tensor]:
    if isinstance(value, dict):
        return [each for item in value.values() for each in _leaves(item)]
    if isinstance(value, tuple | list):
        return [each for item in value for each in _leaves(item)]
    return _parts(value)


def _gradients(value: Any) -> list[_Gradient]:
    """Return the gradients in a step's result."""
    if isinstance(value, _Gradient):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [each for item in items for each in _gradients(item)]


def _sum(gradient: _Gradient, results: Sequence[Mapping[str, tf.Tensor]]) -> Any:
    """Add up the slices of one gradient over the microbatches."""
    return None if gradient.value is None else sum_of([_of(gradient.value, values) for values in results])


def _of(value: Any, values: Mapping[str, tf.Tensor]) -> Any:
    """Return a microbatch's value for a result of the body."""
    return tf.nest.pack_sequence_as(value, [values[part.name] for part in _parts(value)], expand_composites=True)


def _filled(
    template: Any, results: Sequence[Mapping[str, tf.Tensor]], totals: Mapping[int, Any], of_replicas: bool
) -> Any:
    """Fill ``template`` with the results of the microbatches and the sums of gradients, by their ids."""
    if isinstance(template, dict):
        return _like(template, {key: _filled(each, results, totals, of_replicas) for key, each in template.items()})
    if isinstance(template, tuple | list):
        items = [_filled(item, results, totals, of_replicas) for item in template]
        return type(template)(*items) if hasattr(template, "_fields") else type(template)(items)
    if not _parts(template):
        return None if isinstance(template, _Gradient) else template
    if isinstance(template, _Gradient):
        made = [_of(template.value, values) for values in results]
        origin = Origin(id(handle_of(template.variable)), template.partition)
        return StepOutput(made, totals.get(id(template)), of_replicas, origin)
    return StepOutput([_of(template, values) for values in results])


def _like(mapping: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return ``items`` in a dictionary of the type of ``mapping``, which has the same keys."""
    made = copy.copy(mapping)
    made.update(items)
    return made


def _check_dependence(traced: Trace, wanted: Sequence[Sequence[tf.Tensor]]) -> None:
    """Reject a step whose results do not depend on the model."""
    pending = [tensor.op for tensors in wanted for tensor in tensors]
    seen: set[str] = set()
    while pending:
        op = pending.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        label = traced.labels[op.name]
        if label.inside or label.output:
            return
        pending += [tensor.op for tensor in op.inputs]
    raise SMPUsageError("the outputs of a `smp.step` function must depend on the output of its `smp.DistributedModel`")


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    **options: Any,
) -> Any:
    """Make a function run once for each microbatch, over all partitions: ``@smp.step`` or ``@smp.step(..)``.

    It is a ``tf.function``, traced as one and callable from eager code and from other ``tf.function``. Inside, the
    model is called, and gradients are computed by ``optimizer.get_gradients``, ``optimizer.compute_gradients``,
    ``tf.gradients`` or a ``tf.GradientTape``. Tensors that it returns become :class:`StepOutput` on every rank. A list
    or tuple with a gradient for each of ``model.trainable_variables`` becomes one with those of this rank's variables.

    Args:
        function: The body.
        non_split_inputs: Names of parameters that are not split, which tensors without a batch axis need.
        input_split_axes: The batch's axis, by name of the parameter; 0 for others.
        **options: Arguments of ``tf.function``.

    Returns:
        The :class:`StepFunction`, or for ``@smp.step(..)`` a decorator.
    """

    def decorate(body: Callable[..., Any]) -> StepFunction:
        return StepFunction(body, non_split_inputs, input_split_axes or {}, options)

    return decorate if function is None else decorate(function)
