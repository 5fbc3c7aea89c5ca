"""One call of a ``smp.step`` function: its microbatches are recorded, executed, and their outputs collected."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.runtime.failures import reporting_failures
from smdistributed.modelparallel.torch.runtime.gradients import GradientSnapshot, warn_of_sums
from smdistributed.modelparallel.torch.runtime.overlapped_run import Expectation, OverlappedRun
from smdistributed.modelparallel.torch.state import state
from smdistributed.modelparallel.torch.tracing.interception import intercepted
from smdistributed.modelparallel.torch.tracing.outside_tensors import write_back
from smdistributed.modelparallel.torch.tracing.recording import Recording
from smdistributed.modelparallel.torch.tracing.remote_tensor import RemoteTensor
from smdistributed.modelparallel.torch.tracing.tasks import Value

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.model import DistributedModel

#: The positional and keyword arguments of the body for one microbatch.
Call = tuple[tuple[Any, ...], dict[str, Any]]


class StepRun:
    """The state that the body, the model and the pipeline share while a step function runs.

    Args:
        model: The wrapped model.
        step: The step function; the calls of its last microbatch are kept under it, for replay.
        body: The decorated function.
        microbatches: Number of microbatches.
        detach: Whether the body's results are detached from autograd's graph.
        expectation: The expected recording of each microbatch, equal on all ranks of the pipeline; ``None`` if
        unknown.

    Attributes:
        has_backward: Whether ``model.backward`` has been called.
        recording: The recording of the microbatch whose body is running, if it is recorded.
    """

    def __init__(
        self,
        model: DistributedModel,
        step: Hashable,
        body: Callable[..., Any],
        microbatches: int,
        detach: bool,
        expectation: Expectation | None,
    ) -> None:
        self._model, self._step, self._body, self._detach = model, step, body, detach
        self._expectation = expectation
        #: The execution during the recording, if there is one.
        self._overlapped: OverlappedRun | None = None
        self.has_backward = False
        self._gradient_scale = model.replicas.gradient_scale(microbatches)
        self.recording: Recording | None = None
        #: For each microbatch, tensors from outside of the body to which it has written.
        self._written: list[list[tuple[torch.Tensor, Value]]] = []
        self._recordings: list[Recording] = []
        self._begin_recording: Callable[[], None] | None = None

    @property
    def scale(self) -> float:
        """Return the factor of each microbatch's gradients; the partition in the first step may load the loss scale."""
        return self._gradient_scale * state.loss_scale

    def model_was_partitioned(self) -> None:
        """Begin to record, because the body's first call has partitioned the model."""
        begin, self._begin_recording = self._begin_recording, None
        assert begin is not None
        begin()

    def run_alone(self, calls: Sequence[Call]) -> list[Any]:
        """Run the body once for each microbatch on a single partition, and return the outputs."""
        model, replicas = self._model, self._model.replicas
        before = GradientSnapshot(model.local_parameters()) if replicas.are_reduced else None
        replicas.sync_buffers(model)
        torch.ops.smd.begin_step_of_products()
        outputs = []
        for args, kwargs in calls:
            with contextlib.nullcontext() if model.offloader is None else model.offloader.collecting():
                output = self._body(*args, **kwargs)
            if self._detach:
                output = pytree.transform(output, torch.Tensor.detach)
            else:
                for tensor in pytree.tensors_of(output):
                    replicas.watch_late_backward(model, tensor)
            outputs.append(output)
        if model.sharded is not None:
            model.sharded.end_microbatch()
            model.sharded.finish_backward()
        if before is None:
            return outputs
        if not self.has_backward and before.has_changed(model.local_parameters()):
            # The body has called `loss.backward()`, or has set gradients.
            self.has_backward = True
            if self.scale != 1.0:
                warn_of_sums()
        if replicas.must_reduce(self.has_backward):
            replicas.reduce(model)
        return outputs

    def run_pipeline(self, calls: Sequence[Call]) -> list[Any]:
        """Record the body for each microbatch and execute the tasks on all partitions.

        Return the body's result for each microbatch.
        """
        try:
            return self._run_pipeline(calls)
        finally:
            if self._overlapped is not None:
                self._overlapped.end_step()
            if self._model.pipeline is not None:
                self._model.pipeline.overlapped = None

    def _run_pipeline(self, calls: Sequence[Call]) -> list[Any]:
        model, recordings = self._model, self._recordings
        model.replicas.sync_buffers(model)
        torch.ops.smd.begin_step_of_products()
        outputs = []
        returned: list[list[Value]] = []
        # Classes are patched once for all microbatches, because each patch invalidates Python's method cache.
        with contextlib.ExitStack() as calls_are_recorded, model.rng_state.shared():
            try:
                for args, kwargs in calls:
                    output, values = self._record(args, kwargs, calls_are_recorded)
                    outputs.append(output)
                    returned.append(values)
                    self._execute_beside(values)
            except Exception:
                if self._overlapped is not None:
                    self._overlapped.abandon()
                raise
        pipeline = model.pipeline
        if pipeline is not None:
            pipeline.module_state.end_bodies()
        if pipeline is None or len(recordings) != len(calls):
            # If the body has not called the model, the other replicas of a join still wait for this replica's round.
            model.replicas.must_reduce(self.has_backward)
            return outputs
        for values in returned:
            _refuse_parameters(values)
        overlapped = self._overlapped
        microbatches = model.replicas.run_pipeline(
            model, pipeline, recordings, returned, self.scale, self.has_backward, overlapped
        )
        # Other ranks already wait for this one's results.
        with reporting_failures():
            pipeline.module_state.end_of_step()
            pipeline.expect_again(self._step, microbatches, overlapped)
            tensors = pipeline.results(microbatches, self._detach)
            for place, numbers in enumerate([] if overlapped is None else overlapped.returned):
                found = tensors[place]
                tensors[place] = {
                    value.index: found[number] for value, number in zip(returned[place], numbers, strict=True)
                }
            for written, found in zip(self._written, tensors, strict=True):
                write_back(written, found, pipeline.stale_storages)
        pipeline.timeline.end_step()
        return [
            _with_tensors(output, values, found, self._detach)
            for output, values, found in zip(outputs, returned, tensors, strict=True)
        ]

    def _execute_beside(self, returned: Sequence[Value]) -> None:
        """Execute the recorded microbatches as far as possible; the last of them returns ``returned``."""
        model = self._model
        if self._expectation is None or model.pipeline is None:
            return
        if len(self._recordings) == 1:
            self._overlapped = model.pipeline.begin_overlapped(self._expectation, self.scale)
        if self._overlapped is not None:
            self._overlapped.add(self._recordings[-1], returned)

    def _record(self, args: Any, kwargs: Any, calls_are_recorded: contextlib.ExitStack) -> tuple[Any, list[Value]]:
        """Return the body's result for a microbatch, and the values of the remote tensors in it."""
        model, recordings = self._model, self._recordings
        with contextlib.ExitStack() as stack:

            def begin() -> None:
                pipeline = model.pipeline
                assert pipeline is not None
                if not recordings:
                    if model.sharded is not None:
                        # The gradients are sharded within this step.
                        model.sharded.enter_step()
                    if self._expectation is None:
                        pipeline.refresh()
                    pipeline.module_state.begin()
                    calls_are_recorded.enter_context(intercepted(pipeline))
                recording = self.recording = Recording(
                    pipeline, recordings, pipeline.calls.get(self._step), self._detach
                )
                recordings.append(recording)
                stack.callback(self._end_recording)
                stack.enter_context(recording)

            if model.pipeline is None:
                model._partition_manually()
            if model.pipeline is None:
                # The model's first call partitions it, by a trace with that call's arguments.
                self._begin_recording = begin
            else:
                begin()
            if self._overlapped is not None:
                stack.enter_context(self._overlapped.body())
            output = self._body(*args, **kwargs)
            values = []
            if recordings:
                values = [
                    recordings[-1].returned(leaf, self._detach)
                    for leaf in pytree.tensors_of(output)
                    if type(leaf) is RemoteTensor
                ]
                written = recordings[-1].outside_tensors.written(recordings[-1].located)
                self._written.append(written)
                values += [value for _, value in written]
        if model.pipeline is not None and recordings:
            model.pipeline.calls[self._step] = recordings[-1].calls if recordings[-1].executed is None else []
        return output, values

    def _end_recording(self) -> None:
        self.recording = None


def _refuse_parameters(values: Sequence[Value]) -> None:
    for value in values:
        if value.parameter is not None:
            raise SMPUsageError(f"a `smp.step` function returned the parameter `{value.parameter}` itself")


def _with_tensors(output: Any, values: Sequence[Value], found: Mapping[int, torch.Tensor], detach: bool) -> Any:
    """Return ``output`` with remote tensors replaced by the tensors in ``found``."""
    left = iter(values)

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is RemoteTensor:
            return found[next(left).index]
        return tensor.detach() if detach else tensor

    return pytree.transform(output, leaf)
