"""Tensors that the body keeps for a later microbatch or step, such as a memory or a running loss.

- KEEP-1: a later microbatch uses a detached copy: the tensor must not require a gradient, or must be detached first.
  The copy is made on the tensor's partition by a task of the later microbatch; nothing is sent.
- KEEP-2: a microbatch that uses a tensor of an earlier one of the same step runs after that one.
- KEEP-3: a copy must not be written in place if the body also refers to the original storage in another way.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

import torch

from smdistributed.modelparallel.exceptions import SMPError, SMPUsageError
from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.tracing.metadata import OutputSpec
from smdistributed.modelparallel.torch.tracing.remote_tensor import InvalidatedValue, RemoteTensor
from smdistributed.modelparallel.torch.tracing.tasks import Context, Task, Value

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.tracing.recording import Recording


class RetainedTensor:
    """The tensor of a value on its partition, available once its task has run."""

    __slots__ = ("tensor",)

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        """Return a copy.

        Raises:
            SMPError: The task has not run, because the step failed.
        """
        if self.tensor is None:
            raise SMPError("a tensor of an earlier `smp.step` call, which failed, is used in this one")
        return self.tensor.clone()


class RetainedTensors:
    """The tensors that one recording retains for later ones, and its copies of those from earlier ones.

    Attributes:
        by_value: Retained tensors, by the index of the value.
        needs_earlier: Whether it uses tensors of an earlier microbatch of the same step (KEEP-2).
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.by_value: dict[int, RetainedTensor] = {}
        self.needs_earlier = False
        self._remote_tensors: list[weakref.ref[RemoteTensor]] = []
        #: Values of this recording that represent values of other recordings.
        self._taken: dict[tuple[Recording, int], Value] = {}
        #: Storages of which the caller or another recording has a copy.
        self._copied: set[Value] = set()
        #: Storages of copies that must not be written (KEEP-3).
        self._frozen: set[Value] = set()

    def watch(self, remote: RemoteTensor) -> None:
        """Track a remote tensor of the body, which may keep it."""
        self._remote_tensors.append(weakref.ref(remote))

    def keep_living(self) -> None:
        """End the bodies of the step: tensors to which they still refer may be used in a later step."""
        for reference in self._remote_tensors:
            remote = reference()
            if remote is not None and remote.recording is self._recording and type(remote.value) is Value:
                self._keep(remote.value)
        # A remote tensor that is kept must not keep the recordings of earlier microbatches and steps alive.
        self._remote_tensors.clear()
        self._taken.clear()
        self._recording.earlier = ()

    def returns(self, value: Value) -> None:
        """Record that the caller gets a value in its current state."""
        self._copied.add(value.storage)

    def _keep(self, value: Value) -> RetainedTensor:
        retained = self.by_value.get(value.index)
        if retained is None:
            retained = self.by_value[value.index] = RetainedTensor()
            if self._recording.executed is not None:
                retained.tensor = self._recording.executed.computed(value.index)
        return retained

    def take(self, remote: RemoteTensor, detached: bool = False) -> Value:
        """Return the value that represents a remote tensor of another recording (KEEP-1).

        Raises:
            SMPUsageError: The tensor has a graph, or is not available any more.
        """
        recording, other, value = self._recording, remote.recording, remote.value
        if isinstance(value, InvalidatedValue):
            raise SMPUsageError(value.reason)
        if value.storage.parameter in recording.pipeline.written_state:
            raise SMPUsageError(
                f"a tensor of an earlier microbatch or step is `{value.storage.parameter}`, or a view of it, which "
                "changes in place: keep a copy"
            )
        is_same_step = other in recording.earlier
        needs_graph = value.meta.requires_grad and torch.is_grad_enabled() and not detached
        is_there = is_same_step or (other.pipeline is recording.pipeline and value.index in other.retained.by_value)
        if needs_graph or not is_there:
            raise SMPUsageError(_reason(recording, other))
        taken = self._taken.get((other, value.index))
        if taken is not None:
            self._frozen.add(taken)
        else:
            taken = self._taken[other, value.index] = self._copy(other, value, is_same_step)
            if value.meta.requires_grad or other.retained._is_shared(remote, value.storage):
                self._frozen.add(taken)
        if not value.meta.requires_grad:
            remote.value, remote.recording = taken, recording
            self.watch(remote)
        return taken

    def is_copy(self, copy: Value, other: Recording, value: Value) -> bool:
        """Return whether ``copy`` is the unchanged copy of a value of an earlier microbatch."""
        return self._taken.get((other, value.index)) is copy

    def take_value(self, other: Recording, value: Value) -> Value:
        """Return the value that represents one of an earlier microbatch of the same step, without its graph."""
        return self._copy(other, value, is_same_step=True)

    def _copy(self, other: Recording, value: Value, is_same_step: bool) -> Value:
        recording = self._recording
        if is_same_step and not self.needs_earlier:
            self.needs_earlier = True
            warnings.warn(
                "the `smp.step` function uses a tensor of an earlier microbatch: microbatches run one after the other. "
                "Return the tensor from the function instead and combine the microbatches' values in its `StepOutput`",
                stacklevel=2,
            )
        retained = other.retained._keep(value) if is_same_step else other.retained.by_value[value.index]
        meta = value.meta
        with torch._C.DisableTorchFunction():
            stride = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta").clone().stride()
        meta = meta._replace(stride=stride, requires_grad=False)
        task = Task("retained", retained.read, (), {}, [])
        task.rank, task.context = value.rank, Context(True, ())
        task.output_spec = OutputSpec(pytree.Slot(0), (meta,), (), (None,))
        distance = recording.microbatch - other.microbatch if is_same_step else -other.microbatch
        return recording.add_source(task, ("retained", is_same_step, distance, value.index, meta))

    def _is_shared(self, remote: RemoteTensor, storage: Value) -> bool:
        """Return whether the body can access the storage of a remote tensor in another way.

        From now on, there is a copy of the storage.
        """
        is_shared = storage in self._copied or self._recording.storages.has_others(remote, storage)
        self._copied.add(storage)
        return is_shared

    def note_written_state(self, task: Task) -> None:
        """Record the parameters and buffers to which a call writes."""
        values = (self._recording.storages.state_of_call(task, path) for path in task.known_spec.written_state)
        paths = [value.storage.parameter for value in values if value is not None]
        self._recording.pipeline.attribute_views.note_written(self._recording, task, [each for each in paths if each])

    def check_write(self, storage: Value) -> None:
        """Check that a storage may be written.

        Raises:
            SMPUsageError: It is a copy of a storage that the body can access through another tensor as well (KEEP-3).
        """
        if storage in self._frozen:
            raise SMPUsageError(
                "a tensor of an earlier microbatch or step is changed in place, and the body has returned it or has "
                "another tensor with the same storage: change a copy"
            )


def _reason(recording: Recording, other: Recording) -> str:
    if other in recording.earlier:
        return (
            f"a tensor of microbatch {other.microbatch} that requires a gradient is used in microbatch "
            f"{recording.microbatch}: microbatches have graphs of their own, so detach the tensor, or return it from "
            "the `smp.step` function and combine the microbatches' values in its `StepOutput`"
        )
    return (
        "a tensor of an earlier `smp.step` call that requires a gradient is used in this one: detach it, or return "
        "it from the function and take it from the `StepOutput`"
    )
