"""Activations of checkpointed modules that wait in host memory, where devices have less memory than the host.

What a checkpointed module keeps is what it was called with. It is copied to pinned memory when it is kept and comes back
ahead of its use, both on streams of their own beside the computation.

- OFF-1: what is wanted soon stays: a stage whose backward is at most `activation_loading_horizon` tasks ahead keeps its
  activations where they are.
- OFF-2: coming back begins that many tasks ahead, at once for all that a stage keeps. Where no program says what comes
  when, as with one partition, it begins that many checkpointed modules ahead, from the last one on.
- OFF-3: a stage's inputs enter its graph through a node that does not hold them (:class:`Entrance`): as leaves they would stay.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.runtime.executor import Microbatch

#: Smaller tensors stay: a copy of its own takes longer than it is worth.
_LEAST_BYTES = 64 << 10
#: Tensors that are still on the device while their copies leave: the computation goes on meanwhile.
_LEAVING = 2


class Host(Protocol):
    """Moves tensors out of the device and back, in its own time."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        ...

    def out(self, tensor: torch.Tensor) -> Any:
        """Begins to copy it to the host; the tensor may be dropped at once."""
        ...

    def back(self, copy: Any) -> Any:
        """Begins to copy what :meth:`out` returned to the device."""
        ...

    def here(self, arriving: Any) -> torch.Tensor:
        """What :meth:`back` returned, for work that is queued from now on."""
        ...


class CudaHost:
    """By a stream for each direction, since a device can copy both ways at once.

    The host may be many tasks ahead of the device. So what leaves is held until the computing stream has been told to wait for
    its copy, and what comes is allocated in that stream: memory is given out again in the order of the program, as all other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._leaving: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.device == self._device

    def out(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Begins to copy it to the host."""
        # PyTorch keeps pinned memory, and gives it out again when the copies from it are done.
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream = torch.cuda.current_stream(self._device)
        self._out.wait_stream(stream)
        with torch.cuda.stream(self._out):
            copy.copy_(tensor, non_blocking=True)
        left = self._out.record_event()
        self._leaving.append((tensor, left))
        self._let_go(_LEAVING)
        return copy, left

    def back(self, copy: tuple[torch.Tensor, torch.cuda.Event]) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Begins to copy it to the device."""
        self._let_go(0)
        whole, left = copy
        tensor = torch.empty_like(whole, device=self._device)
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        self._back.wait_event(left)
        with torch.cuda.stream(self._back):
            tensor.copy_(whole, non_blocking=True)
        return tensor, self._back.record_event()

    def here(self, arriving: tuple[torch.Tensor, torch.cuda.Event]) -> torch.Tensor:
        """The tensor, for what is queued into the current stream."""
        tensor, came = arriving
        torch.cuda.current_stream(self._device).wait_event(came)
        return tensor

    def _let_go(self, but: int) -> None:
        while len(self._leaving) > but:
            _, left = self._leaving.popleft()
            torch.cuda.current_stream(self._device).wait_event(left)


class _Kept:
    """A tensor that is away. A graph holds it; when that goes, it goes."""

    __slots__ = ("__weakref__", "arriving", "batch", "copy", "place")

    def __init__(self, batch: Batch, place: int, copy: Any) -> None:
        self.batch, self.place, self.copy = batch, place, copy
        self.arriving: Any = None


class Batch:
    """What one forward keeps."""

    def __init__(self, host: Host, horizon: int) -> None:
        self._host, self._horizon = host, horizon
        self._kept: list[weakref.ref[_Kept]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which autograd keeps tensors here."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def load(self) -> None:
        """Everything begins to come back, what is wanted first first."""
        self._load(0, len(self._kept))

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Kept:
        small = tensor.numel() * tensor.element_size() < _LEAST_BYTES
        if small or isinstance(tensor, torch.nn.Parameter) or not self._host.takes(tensor):
            return tensor
        kept = _Kept(self, len(self._kept), self._host.out(tensor.detach()))
        self._kept.append(weakref.ref(kept))
        return kept

    def _load(self, start: int, end: int) -> None:
        for ref in reversed(self._kept[max(start, 0) : end]):
            kept = ref()
            if kept is not None and kept.arriving is None:
                kept.arriving = self._host.back(kept.copy)

    def unpack(self, kept: _Kept) -> torch.Tensor:
        """It is wanted now, and those before it soon."""
        self._load(kept.place - self._horizon, kept.place + 1)
        return self._host.here(kept.arriving)


def _unpack(kept: torch.Tensor | _Kept) -> torch.Tensor:
    return kept if isinstance(kept, torch.Tensor) else kept.batch.unpack(kept)


class Offloader:
    """Batches of this rank, and whose turn it is."""

    def __init__(self, host: Host, horizon: int) -> None:
        self._host, self.horizon = host, horizon
        self._current: Batch | None = None

    @contextlib.contextmanager
    def gathering(self) -> Iterator[Batch]:
        """A batch for what checkpointed modules keep that run inside."""
        before, self._current = self._current, Batch(self._host, self.horizon)
        try:
            yield self._current
        finally:
            self._current = before

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """Around the call of a checkpointed module."""
        return contextlib.nullcontext() if self._current is None else self._current.hooks()


def make(wanted: bool, device: torch.device, horizon: int) -> Offloader | None:
    """What moves activations, if the configuration has it so and there is somewhere to move them."""
    if not wanted:
        return None
    if device.type != "cuda":
        warnings.warn(
            "`offload_activations` moves activations from devices to the host: on CPUs they are there already, and stay",
            stacklevel=2,
        )
        return None
    return Offloader(CudaHost(device), horizon)


class Entrance:
    """An input of a stage (OFF-3), in the place of a leaf: ``tensor`` goes into the graph, ``grad`` is what comes out."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.grad: torch.Tensor | None = None
        #: The leaf that autograd sees.
        self.leaf = torch.empty((), requires_grad=True)

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the graph has it."""
        return _Enter.apply(self, self.leaf, tensor)  # type: ignore[no-any-return]

    def zeros(self) -> torch.Tensor:
        """A gradient that nobody has added to."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, entrance: Entrance, leaf: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.entrance = entrance
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        ctx.entrance.grad = gradients[0]
        return None, None, None


class Loads:
    """When the activations of a program's stages come back to the device (OFF-1, OFF-2)."""

    def __init__(self, offloader: Offloader | None, program: Sequence[tuple[str, int, int, int | None]]) -> None:
        horizon = 0 if offloader is None else offloader.horizon
        backwards = [] if offloader is None else list(_backwards(program))
        self._soon = {(stage, index) for stage, index, at, forward in backwards if at - forward <= horizon}
        self._due = deque((at - horizon, stage, index) for stage, index, at, _ in backwards)
        self._tasks = 0

    def are_soon(self, number: int, index: int) -> bool:
        """Whether the backward of a stage is so near that nothing goes away before."""
        return (number, index) in self._soon

    def begin(self, microbatches: Sequence[Microbatch]) -> None:
        """Before each task: begins what is due."""
        while self._due and self._due[0][0] <= self._tasks:
            _, number, index = self._due.popleft()
            run = microbatches[index].runs.get(number)
            if run is not None and run.kept is not None:
                run.kept.load()
        self._tasks += 1


def _backwards(program: Sequence[tuple[str, int, int, int | None]]) -> Iterator[tuple[int, int, int, int]]:
    """The backwards of a program in its order: stage, microbatch, how many tasks lie before it, and how many of them before its
    forward, -1 for one that has run early. Transfers are no tasks."""
    tasks = [(kind, stage, index) for kind, stage, index, _ in program if kind in "FBIW"]
    forwards = {(stage, index): at for at, (kind, stage, index) in enumerate(tasks) if kind == "F"}
    for at, (kind, stage, index) in enumerate(tasks):
        if kind in "BI":
            yield stage, index, at, forwards.get((stage, index), -1)
