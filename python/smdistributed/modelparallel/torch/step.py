"""``@smp.step``: a function that runs once for each microbatch, over all partitions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from smdistributed._common import errors
from smdistributed.modelparallel.binding import binds_instance
from smdistributed.modelparallel.exceptions import CLASSES, SMPUsageError
from smdistributed.modelparallel.splitting import check_names
from smdistributed.modelparallel.torch.activation_checkpointing import torch_checkpoints
from smdistributed.modelparallel.torch.model import DistributedModel
from smdistributed.modelparallel.torch.output import StepOutput
from smdistributed.modelparallel.torch.runtime import input_broadcast
from smdistributed.modelparallel.torch.runtime.overlapped_run import Expectation, comparable
from smdistributed.modelparallel.torch.runtime.step_run import Call, StepRun
from smdistributed.modelparallel.torch.split import split
from smdistributed.modelparallel.torch.state import state


class StepFunction:
    """A decorated function; as a class attribute, it passes the object if its body accepts one.

    Args:
        function: The body.
        non_split_inputs: Names of parameters that are not split.
        input_split_axes: The batch's axis, by name of the parameter; 0 for others.
        detach_outputs: Whether results are detached from autograd's graph. Otherwise, only the partition that
        computed a tensor has its graph.
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
        return self if instance is None else _BoundStepFunction(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body for each microbatch of the batch; all ranks of the job call it."""
        cfg = state.cfg
        if state.model is None:
            raise SMPUsageError("a `smp.step` function needs a model: wrap it in `smp.DistributedModel` first")
        if state.model.step_run is not None:
            raise SMPUsageError("a `smp.step` function was called inside of another one")
        model = state.model
        try:
            if model.sharded is not None:
                model.sharded.enter_step()
            with errors.translated(CLASSES):
                calls, expectation = self._calls(model, args, kwargs, cfg.microbatches)
            with errors.translated(CLASSES):
                outputs = self._run(model, calls, expectation)
        finally:
            if model.sharded is not None:
                model.sharded.leave_step()
        model._call_post_step_hooks()
        return _merged(outputs)

    def _run(self, model: DistributedModel, calls: Sequence[Call], expectation: Expectation | None) -> list[Any]:
        """Return the body's result for each microbatch, with remote tensors replaced by tensors."""
        run = model.step_run = StepRun(model, self, self._function, len(calls), self._detach, expectation)
        try:
            if state.cfg.pipeline_parallel_degree == 1:
                outputs = run.run_alone(calls)
            else:
                with torch_checkpoints():
                    outputs = run.run_pipeline(calls)
                model.rng_state.end_of_step()
        except BaseException:
            if model.sharded is not None:
                model.sharded.cancel()
            raise
        finally:
            model.step_run = None
        return outputs

    def _calls(
        self, model: DistributedModel, args: Any, kwargs: Any, microbatches: int
    ) -> tuple[list[Call], Expectation | None]:
        """Return the arguments of each microbatch, and the expected recording, equal on all ranks of the pipeline."""
        expectation = None
        if state.cfg.pipeline_parallel_degree == 1:
            arguments = self._signature.bind(*args, **kwargs).arguments
        else:
            if model.pipeline is not None:
                expectation = model.pipeline.expectation(self)
                if expectation is not None and expectation.microbatches != microbatches:
                    expectation = None
            arguments, all_expect_it = input_broadcast.broadcast_arguments(
                self._signature, args, kwargs, comparable(expectation)
            )
            if not all_expect_it:
                expectation = None
        pieces: dict[str, list[Any]] = {}
        for name, value in arguments.items():
            pieces[name] = split(value, name, microbatches, self._axes.get(name, 0), name in self._whole)
        calls = []
        for index in range(microbatches):
            each = inspect.BoundArguments(self._signature, {name: part[index] for name, part in pieces.items()})
            calls.append((each.args, each.kwargs))
        return calls, expectation


class _BoundStepFunction:
    """A step function that was looked up on an object."""

    def __init__(self, step: StepFunction, instance: Any) -> None:
        functools.update_wrapper(self, step, updated=())
        self.__self__, self.__func__ = instance, step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self.__func__
        if binds_instance(step._signature, self.__self__, args, kwargs):
            return step(self.__self__, *args, **kwargs)
        return step(*args, **kwargs)


def _merged(outputs: Sequence[Any]) -> Any:
    """Merge the results of the microbatches, in the same structure.

    Each tensor of the body becomes a :class:`StepOutput`, and other values become a list.
    """
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
    """Make a function run once for each microbatch, over all partitions: ``@smp.step`` or ``@smp.step(..)``.

    Inside, the script calls the model, and ``model.backward(loss)`` instead of ``loss.backward()``. Tensors that the
    function returns become :class:`StepOutput` on every rank.

    Args:
        non_split_inputs: Names of parameters that are not split, which tensors without a batch axis need; as
            ``@smp.step``, the function.
        input_split_axes: The batch's axis, by name of the parameter; 0 for others.
        detach_outputs: Whether returned tensors are detached.

    Returns:
        The :class:`StepFunction`, or for ``@smp.step(..)`` a decorator.

    Examples:
        >>> @smp.step
        ... def train_step(model, x, y):
        ...     loss = loss_function(model(x), y)
        ...     model.backward(loss)
        ...     return loss
        >>> loss = train_step(model, x, y).reduce_mean()
    """
    if callable(non_split_inputs):
        return StepFunction(non_split_inputs, (), {}, True)

    def decorate(function: Callable[..., Any]) -> StepFunction:
        return StepFunction(function, non_split_inputs, input_split_axes or {}, detach_outputs)

    return decorate
