"""``@smp.step``: a function that runs once for each microbatch, over all partitions."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from smdistributed._common import errors
from smdistributed.modelparallel.binding import takes_instance
from smdistributed.modelparallel.exceptions import CLASSES, SMPUsageError
from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.activation_checkpointing import torch_checkpoints
from smdistributed.modelparallel.torch.model import DistributedModel
from smdistributed.modelparallel.torch.output import StepOutput
from smdistributed.modelparallel.torch.runtime import input_broadcast
from smdistributed.modelparallel.torch.split import check_names, split
from smdistributed.modelparallel.torch.state import state
from smdistributed.modelparallel.torch.tracing.interception import intercepted
from smdistributed.modelparallel.torch.tracing.recording import Recording
from smdistributed.modelparallel.torch.tracing.remote_tensor import Handle
from smdistributed.modelparallel.torch.tracing.tasks import Value


class StepFunction:
    """A decorated function; as a class attribute, it gets the object if its body takes one.

    Args:
        function: The body.
        non_split_inputs: Names of parameters that every microbatch gets whole.
        input_split_axes: The batch's axis, by name of the parameter; 0 for others.
        detach_outputs: Whether what is returned leaves autograd's graph. Without, only the partition where a tensor
            was made has its graph.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        non_split_inputs: Sequence[str],
        input_split_axes: Mapping[str, int],
        detach_outputs: bool,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._signature = inspect.signature(function)
        self._whole, self._axes, self._detach = set(non_split_inputs), dict(input_split_axes), detach_outputs
        check_names(self._whole, self._signature.parameters, "non_split_inputs")
        check_names(self._axes, self._signature.parameters, "input_split_axes")

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else _OfAnObject(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the body for each microbatch of the batch; on all ranks of the job."""
        cfg = state.cfg
        if state.model is None:
            raise SMPUsageError("a `smp.step` function needs a model: wrap it in `smp.DistributedModel` first")
        if state.model.in_step:
            raise SMPUsageError("a `smp.step` function was called inside of another one")
        with errors.translated(CLASSES):
            calls = self._calls(args, kwargs, cfg.microbatches)
        with errors.translated(CLASSES), state.model.step():
            if cfg.pipeline_parallel_degree == 1:
                outputs = self._run_alone(state.model, calls)
            else:
                with torch_checkpoints():
                    outputs = self._run_pipeline(state.model, calls)
                state.model.randomness.end_of_step()
        return _merged(outputs)

    def _calls(self, args: Any, kwargs: Any, microbatches: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        if state.cfg.pipeline_parallel_degree == 1:
            arguments = self._signature.bind(*args, **kwargs).arguments
        else:
            arguments = input_broadcast.of_first(self._signature, args, kwargs)
        pieces: dict[str, list[Any]] = {}
        for name, value in arguments.items():
            pieces[name] = split(value, name, microbatches, self._axes.get(name, 0), name in self._whole)
        calls = []
        for index in range(microbatches):
            each = inspect.BoundArguments(self._signature, {name: part[index] for name, part in pieces.items()})  # type: ignore[arg-type]
            calls.append((each.args, each.kwargs))
        return calls

    def _run_alone(self, model: DistributedModel, calls: Sequence[tuple[Any, Any]]) -> list[Any]:
        """With one partition: microbatch after microbatch."""
        outputs = []
        for args, kwargs in calls:
            model.begin_microbatch(len(calls))
            with contextlib.nullcontext() if model.offloader is None else model.offloader.gathering():
                output = self._function(*args, **kwargs)
            if self._detach:
                output = pytree.transform(output, torch.Tensor.detach)
            else:
                for tensor in pytree.tensors_of(output):
                    model.leaves_step(tensor)
            outputs.append(output)
        model.finish_alone()
        return outputs

    def _run_pipeline(self, model: DistributedModel, calls: Sequence[tuple[Any, Any]]) -> list[Any]:
        recordings: list[Recording] = []
        outputs = []
        returned: list[list[Value]] = []
        # Classes are changed once for all microbatches: Python forgets what it knows of their methods each time.
        with contextlib.ExitStack() as calls_are_recorded, model.randomness.shared():
            for args, kwargs in calls:
                model.begin_microbatch(len(calls))
                output, values = self._record(model, args, kwargs, recordings, calls_are_recorded)
                outputs.append(output)
                returned.append(values)
        if model.pipeline is not None:
            model.pipeline.module_state.end_of_bodies()
        pipeline = model.pipeline
        if pipeline is None or len(recordings) != len(calls):
            # The body has not called the model; in a join, the other replicas ask for a round all the same.
            model.reduces()
            return outputs
        for values in returned:
            _refuse_parameters(values)
        microbatches = model.execute(recordings, returned)
        tensors = pipeline.results(microbatches, self._detach)
        return [
            _real(output, values, found, self._detach)
            for output, values, found in zip(outputs, returned, tensors, strict=True)
        ]

    def _record(
        self,
        model: DistributedModel,
        args: Any,
        kwargs: Any,
        recordings: list[Recording],
        calls_are_recorded: contextlib.ExitStack,
    ) -> tuple[Any, list[Value]]:
        """What the body of a microbatch returned, and the values of the remote tensors in it."""
        with contextlib.ExitStack() as stack:

            def begin() -> None:
                pipeline = model.pipeline
                assert pipeline is not None
                pipeline.detach = self._detach
                if not recordings:
                    pipeline.refresh()
                    pipeline.module_state.begin()
                    calls_are_recorded.enter_context(intercepted(pipeline))
                recording = model.recording = Recording(pipeline, recordings, pipeline.calls.get(self))
                recordings.append(recording)
                stack.callback(model.end_recording)
                stack.enter_context(recording)

            if model.pipeline is None:
                model.divide_by_hand()
            if model.pipeline is None:
                # The model is divided when it is called for the first time, by what it is called with.
                model.when_divided = begin
            else:
                begin()
            output = self._function(*args, **kwargs)
            if model.pipeline is not None:
                model.pipeline.module_state.check_contents()
            values = []
            if recordings:
                values = [
                    recordings[-1].returned(leaf, self._detach)
                    for leaf in pytree.tensors_of(output)
                    if type(leaf) is Handle
                ]
        if model.pipeline is not None and recordings:
            model.pipeline.calls[self] = recordings[-1].calls if recordings[-1].begun is None else []
        return output, values


class _OfAnObject:
    """A step function that was looked up on an object."""

    def __init__(self, step: StepFunction, instance: Any) -> None:
        functools.update_wrapper(self, step, updated=())
        self.__self__, self.__func__ = instance, step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self.__func__
        if takes_instance(step._signature, self.__self__, args, kwargs):
            return step(self.__self__, *args, **kwargs)
        return step(*args, **kwargs)


def _refuse_parameters(values: Sequence[Value]) -> None:
    for value in values:
        if value.parameter is not None:
            raise SMPUsageError(f"a `smp.step` function returned the parameter `{value.parameter}` itself")


def _real(output: Any, values: Sequence[Value], found: Mapping[int, torch.Tensor], detach: bool) -> Any:
    left = iter(values)

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is Handle:
            return found[next(left).index]
        return tensor.detach() if detach else tensor

    return pytree.transform(output, leaf)


def _merged(outputs: Sequence[Any]) -> Any:
    """What the caller gets: a :class:`StepOutput` where the body returned a tensor, a list where it returned anything
    else, inside of the same structure."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return StepOutput(outputs)
    if isinstance(first, dict):
        items = {key: _merged([output[key] for output in outputs]) for key in first}
        try:
            return type(first)(items)
        except TypeError:
            return items
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*[_merged(row) for row in zip(*outputs, strict=True)])
    if isinstance(first, tuple | list):
        return type(first)([_merged(row) for row in zip(*outputs, strict=True)])
    if first is None and all(output is None for output in outputs):
        return None
    return list(outputs)


def step(
    non_split_inputs: Any = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Makes a function one that runs over microbatches and partitions: ``@smp.step`` or ``@smp.step(..)``.

    Inside, the model is called and ``model.backward(loss)`` instead of ``loss.backward()``. Tensors that the function
    returns become :class:`StepOutput` on every rank.

    Args:
        non_split_inputs: Names of parameters that are not split, which tensors without a batch axis need; as
            ``@smp.step``, the function.
        input_split_axes: The batch's axis, by name of the parameter; 0 for others.
        detach_outputs: Whether returned tensors are detached.
    """
    if callable(non_split_inputs):
        return StepFunction(non_split_inputs, (), {}, True)

    def decorate(function: Callable[..., Any]) -> StepFunction:
        return StepFunction(function, non_split_inputs, input_split_axes or {}, detach_outputs)

    return decorate
