"""Offloading of checkpointed activations to host memory.

A checkpointed module keeps its inputs. With offloading, they are copied to pinned memory when they are saved, and
prefetched before their use, on separate streams.

- OFF-1: activations whose backward is at most ``activation_loading_horizon`` tasks ahead stay on the device.
- OFF-2: the prefetch begins that many tasks ahead, for all activations of a stage at once. Without a program, as with
  one partition, it begins that many checkpointed modules ahead, from the last module on.
- OFF-3: a stage's inputs enter its autograd graph through a function that does not save them (:class:`StageBoundary`);
  as leaves they would stay on the device.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from smdistributed.modelparallel.torch.runtime.recomputation import KeptTensor

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.runtime.executor import Microbatch

#: Smaller tensors are not offloaded, because a separate copy costs more than it saves.
_MIN_BYTES = 64 << 10
#: Number of tensors whose copies to the host may be running; the computation continues meanwhile.
_MAX_PENDING_COPIES = 2


class Host(Protocol):
    """Moves tensors from the device to the host and back, asynchronously."""

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the device."""
        ...

    def offload(self, tensor: torch.Tensor) -> Any:
        """Begin to copy a tensor to the host; the caller may drop it at once."""
        ...

    def prefetch(self, copy: Any) -> Any:
        """Begin to copy a tensor back to the device, given the result of :meth:`offload`."""
        ...

    def wait(self, pending_copy: Any) -> torch.Tensor:
        """Return the tensor of :meth:`prefetch`, for work that is queued from now on."""
        ...

    def drop(self, pending_copy: Any) -> None:
        """Take back the result of :meth:`prefetch` for which :meth:`wait` was never called; called on any thread."""
        ...


class CudaHost:
    """Uses one stream for each direction, because a device can copy in both directions at the same time.

    The host may be many tasks ahead of the device. So an offloaded tensor is kept until the computing stream was made
    to wait for its copy, and a prefetched one is allocated in that stream. The allocator thus reuses memory in the
    order of the program. A prefetched tensor that nothing has used is the exception: the computing stream has not
    waited for its copy, so :meth:`drop` makes the allocator wait. Used tensors do not need that, which would delay the
    reuse of their memory until the host sees that the copy has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._pending_copies: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the device."""
        return tensor.device == self._device

    def offload(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Begin to copy a tensor to the host."""
        # PyTorch caches pinned memory, and reuses it when the copies from it are complete.
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream = torch.cuda.current_stream(self._device)
        self._out.wait_stream(stream)
        with torch.cuda.stream(self._out):
            copy.copy_(tensor, non_blocking=True)
        left = self._out.record_event()
        self._pending_copies.append((tensor, left))
        self._release(_MAX_PENDING_COPIES)
        return copy, left

    def prefetch(self, copy: tuple[torch.Tensor, torch.cuda.Event]) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Begin to copy a tensor back to the device."""
        self._release(0)
        whole, left = copy
        tensor = torch.empty_like(whole, device=self._device)
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        self._back.wait_event(left)
        with torch.cuda.stream(self._back):
            tensor.copy_(whole, non_blocking=True)
        return tensor, self._back.record_event()

    def wait(self, pending_copy: tuple[torch.Tensor, torch.cuda.Event]) -> torch.Tensor:
        """Return a prefetched tensor for work that is queued from now on."""
        tensor, came = pending_copy
        torch.cuda.current_stream(self._device).wait_event(came)
        return tensor

    def drop(self, pending_copy: tuple[torch.Tensor, torch.cuda.Event]) -> None:
        """Keep the memory of a prefetched tensor from being reused before its copy has ended."""
        tensor, _ = pending_copy
        tensor.record_stream(self._back)

    def _release(self, but: int) -> None:
        while len(self._pending_copies) > but:
            _, left = self._pending_copies.popleft()
            torch.cuda.current_stream(self._device).wait_event(left)


class _OffloadedTensor:
    """A tensor in host memory, owned by the autograd graph."""

    __slots__ = ("__weakref__", "batch", "copy", "is_used", "pending_copy", "place")

    def __init__(self, batch: Batch, place: int, copy: Any) -> None:
        self.batch, self.place, self.copy = batch, place, copy
        self.pending_copy: Any = None
        self.is_used = False

    def __del__(self) -> None:
        # A graph whose backward does not run, or fails, drops tensors that are on their way to the device.
        if self.pending_copy is not None and not self.is_used:
            self.batch.drop(self.pending_copy)


class Batch:
    """The offloaded activations of one forward."""

    def __init__(self, host: Host, horizon: int) -> None:
        self._host, self._horizon = host, horizon
        self._offloaded: list[weakref.ref[_OffloadedTensor]] = []

    def __len__(self) -> int:
        return len(self._offloaded)

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which autograd saves tensors in this batch."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def prefetch_all(self) -> None:
        """Begin to copy all tensors back, in the order of their use."""
        self._prefetch(0, len(self._offloaded))

    def _pack(self, tensor: torch.Tensor) -> KeptTensor | _OffloadedTensor:
        small = tensor.numel() * tensor.element_size() < _MIN_BYTES
        if small or isinstance(tensor, torch.nn.Parameter) or not self._host.is_on_device(tensor):
            return KeptTensor(tensor)
        offloaded = _OffloadedTensor(self, len(self._offloaded), self._host.offload(tensor.detach()))
        self._offloaded.append(weakref.ref(offloaded))
        return offloaded

    def _prefetch(self, start: int, end: int) -> None:
        for ref in reversed(self._offloaded[max(start, 0) : end]):
            offloaded = ref()
            if offloaded is not None and offloaded.pending_copy is None:
                offloaded.pending_copy = self._host.prefetch(offloaded.copy)

    def unpack(self, offloaded: _OffloadedTensor) -> torch.Tensor:
        """Return a tensor that is used now, and prefetch those that are used next."""
        self._prefetch(offloaded.place - self._horizon, offloaded.place + 1)
        tensor = self._host.wait(offloaded.pending_copy)
        offloaded.is_used = True
        return tensor

    def drop(self, pending_copy: Any) -> None:
        """Take back a prefetched tensor that is never used."""
        self._host.drop(pending_copy)


def _unpack(packed: KeptTensor | _OffloadedTensor) -> torch.Tensor:
    return packed.compute() if isinstance(packed, KeptTensor) else packed.batch.unpack(packed)


class Offloader:
    """The batches of this rank, and the one that is currently collected."""

    def __init__(self, host: Host, horizon: int) -> None:
        self._host, self.horizon = host, horizon
        self._current: Batch | None = None

    @contextlib.contextmanager
    def collecting(self) -> Iterator[Batch]:
        """Return a context whose checkpointed modules save their inputs into one batch."""
        before, self._current = self._current, Batch(self._host, self.horizon)
        try:
            yield self._current
        finally:
            self._current = before

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for the call of a checkpointed module."""
        return contextlib.nullcontext() if self._current is None else self._current.hooks()


def make_offloader(wanted: bool, device: torch.device, horizon: int) -> Offloader | None:
    """Return the offloader, or ``None`` if it is disabled or activations are in host memory already."""
    if not wanted:
        return None
    if device.type != "cuda":
        warnings.warn(
            "`offload_activations` moves activations from devices to the host: on CPUs they are there already, and "
            "stay",
            stacklevel=2,
        )
        return None
    return Offloader(CudaHost(device), horizon)


class StageBoundary:
    """An input of a stage that replaces an autograd leaf (OFF-3).

    ``tensor`` enters the graph, and ``grad`` is its gradient.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.grad: torch.Tensor | None = None
        #: The leaf of the autograd graph.
        self.leaf = torch.empty((), requires_grad=True, device="cpu")

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a node of the graph."""
        return _BoundaryFunction.apply(self, self.leaf, tensor)

    def zeros(self) -> torch.Tensor:
        """Return a zero gradient."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class _BoundaryFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, boundary: StageBoundary, leaf: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.boundary = boundary
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        ctx.boundary.grad = gradients[0]
        return None, None, None


class ActivationPrefetcher:
    """Determines when activations of a program's stages are prefetched (OFF-1, OFF-2)."""

    def __init__(self, offloader: Offloader | None, program: Sequence[tuple[str, int, int, int | None]]) -> None:
        horizon = 0 if offloader is None else offloader.horizon
        backwards = [] if offloader is None else list(_backwards(program))
        self._near = {(stage, index) for stage, index, at, forward in backwards if at - forward <= horizon}
        self._due = deque((at - horizon, stage, index) for stage, index, at, _ in backwards)
        self._tasks = 0

    def is_backward_near(self, number: int, index: int) -> bool:
        """Return whether the backward of a stage is so near that its activations stay on the device."""
        return (number, index) in self._near

    def begin(self, microbatches: Sequence[Microbatch]) -> None:
        """Begin the prefetches that are due; called before each task."""
        while self._due and self._due[0][0] <= self._tasks:
            _, number, index = self._due.popleft()
            stage_state = microbatches[index].stage_states.get(number)
            if stage_state is not None and stage_state.offloaded is not None:
                stage_state.offloaded.prefetch_all()
        self._tasks += 1


def _backwards(program: Sequence[tuple[str, int, int, int | None]]) -> Iterator[tuple[int, int, int, int]]:
    """List the backwards of a program in its order.

    Each entry is a stage, a microbatch, the number of tasks before it, and the number of tasks before its forward, or
    -1 for an early forward. Transfers do not count as tasks.
    """
    tasks = [(kind, stage, index) for kind, stage, index, _ in program if kind in "FBIW"]
    forwards = {(stage, index): at for at, (kind, stage, index) in enumerate(tasks) if kind == "F"}
    for at, (kind, stage, index) in enumerate(tasks):
        if kind in "BI":
            yield stage, index, at, forwards.get((stage, index), -1)
