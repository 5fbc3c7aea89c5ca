"""Tensors that the body keeps for a later microbatch or a later step, such as a memory or a running loss.

- KEEP-1: a later microbatch takes a copy of the numbers, without a graph: what is kept requires no gradient, or is detached first. The
  copy is made on the partition of the tensor, by a task of the later microbatch; nothing is sent.
- KEEP-2: a microbatch that takes what an earlier one of the same step keeps runs after that one.
- KEEP-3: a copy that stands for a tensor whose storage the body has elsewhere as well must not be changed in place.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

import torch

from smdistributed.modelparallel.exceptions import SMPError, SMPUsageError
from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.tracing.metadata import Outcome
from smdistributed.modelparallel.torch.tracing.remote_tensor import Handle, Lost
from smdistributed.modelparallel.torch.tracing.tasks import Context, Task, Value

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.tracing.recording import Recording


class KeptTensor:
    """The numbers of a value, on its partition, once its task has run."""

    __slots__ = ("tensor",)

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        """A copy.

        Raises:
            SMPError: the task has not run, since the step failed.
        """
        if self.tensor is None:
            raise SMPError("a tensor of an earlier `smp.step` call, which failed, is used in this one")
        return self.tensor.clone()


class KeptTensors:
    """Those of one recording: what later microbatches take of it, and what it takes of earlier ones.

    Attributes:
        by_value: What is kept of it, by the index of the value.
        needs_earlier: Whether it takes something of an earlier microbatch of the same step (KEEP-2).
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.by_value: dict[int, KeptTensor] = {}
        self.needs_earlier = False
        self._handles: list[weakref.ref[Handle]] = []
        #: Values that stand here for values of other recordings.
        self._taken: dict[tuple[Recording, int], Value] = {}
        #: Storages of which the caller or another recording has a copy.
        self._copied: set[Value] = set()
        #: Storages of copies that must not change (KEEP-3).
        self._frozen: set[Value] = set()

    def watch(self, handle: Handle) -> None:
        """The body gets a handle, and may keep it."""
        self._handles.append(weakref.ref(handle))

    def keep_living(self) -> None:
        """The bodies of the step have ended: what they still refer to may be used in a later step."""
        for reference in self._handles:
            handle = reference()
            if handle is not None and handle.recording is self._recording and type(handle.value) is Value:
                self._keep(handle.value)
        # A handle that lives on must not keep the recordings of earlier microbatches and steps.
        self._handles.clear()
        self._taken.clear()
        self._recording.earlier = ()

    def returns(self, value: Value) -> None:
        """The caller gets a value as it is now."""
        self._copied.add(value.storage)

    def _keep(self, value: Value) -> KeptTensor:
        kept = self.by_value.get(value.index)
        if kept is None:
            kept = self.by_value[value.index] = KeptTensor()
            if self._recording.begun is not None:
                kept.tensor = self._recording.begun.made(value.index)
        return kept

    def take(self, handle: Handle, detached: bool = False) -> Value:
        """The value that stands for a handle of another recording (KEEP-1).

        Raises:
            SMPUsageError: it has a graph, or is not there any more.
        """
        recording, other, value = self._recording, handle.recording, handle.value
        if type(value) is Lost:
            raise SMPUsageError(value.reason)
        is_same_step = other in recording.earlier
        needs_graph = value.meta.requires_grad and torch.is_grad_enabled() and not detached
        is_there = is_same_step or (other.pipeline is recording.pipeline and value.index in other.kept.by_value)
        if needs_graph or not is_there:
            raise SMPUsageError(_reason(recording, other))
        taken = self._taken.get((other, value.index))
        if taken is not None:
            self._frozen.add(taken)
        else:
            taken = self._taken[other, value.index] = self._copy(other, value, is_same_step)
            if value.meta.requires_grad or other.kept._is_shared(handle, value.storage):
                self._frozen.add(taken)
        if not value.meta.requires_grad:
            handle.value, handle.recording = taken, recording
            self.watch(handle)
        return taken

    def _copy(self, other: Recording, value: Value, is_same_step: bool) -> Value:
        recording = self._recording
        if is_same_step and not self.needs_earlier:
            self.needs_earlier = True
            warnings.warn(
                "the `smp.step` function uses a tensor of an earlier microbatch: microbatches run one after the other. Return the tensor "
                "from the function instead and combine the microbatches' values in its `StepOutput`",
                stacklevel=2,
            )
        kept = other.kept._keep(value) if is_same_step else other.kept.by_value[value.index]
        meta = value.meta
        with torch._C.DisableTorchFunction():
            stride = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta").clone().stride()
        meta = meta._replace(stride=stride, requires_grad=False)
        task = Task("kept", kept.read, (), {}, [])
        task.rank, task.context = value.rank, Context(True, ())
        task.outcome = Outcome(pytree.Slot(0), (meta,), (), (None,))
        distance = recording.microbatch - other.microbatch if is_same_step else -other.microbatch
        return recording.add_source(task, ("kept", is_same_step, distance, value.index, meta))

    def _is_shared(self, handle: Handle, storage: Value) -> bool:
        """Whether the body can reach the storage of a handle by something else; from now on there is a copy of it."""
        is_shared = storage in self._copied or self._recording.storages.has_others(handle, storage)
        self._copied.add(storage)
        return is_shared

    def check_write(self, storage: Value) -> None:
        """Checks that a storage may change.

        Raises:
            SMPUsageError: it is a copy of one that the body can reach by another tensor as well (KEEP-3).
        """
        if storage in self._frozen:
            raise SMPUsageError(
                "a tensor of an earlier microbatch or step is changed in place, and the body has returned it or has another tensor with the same "
                "storage: change a copy"
            )


def _reason(recording: Recording, other: Recording) -> str:
    if other in recording.earlier:
        return (
            f"a tensor of microbatch {other.microbatch} that requires a gradient is used in microbatch {recording.microbatch}: microbatches have "
            "graphs of their own, so detach the tensor, or return it from the `smp.step` function and combine the microbatches' values in its "
            "`StepOutput`"
        )
    return (
        "a tensor of an earlier `smp.step` call that requires a gradient is used in this one: detach it, or return it from the function and take it "
        "from the `StepOutput`"
    )
