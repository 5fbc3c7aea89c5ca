"""Handles of pending operations: their submission to the core, `poll` and `synchronize`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from smdistributed import _core
from smdistributed._common import shims

# Before `import torch`: if PyTorch is not installed, this raises an ImportError that says how to install it.
shims.load_torch()

import torch  # noqa: E402

from horovod.common import basics  # noqa: E402
from horovod.common.exceptions import at_execution, at_submission  # noqa: E402
from horovod.common.process_sets import ProcessSet  # noqa: E402


class _Pending:
    """A pending operation.

    Args:
        work: The core's handle.
        outputs: Outputs of an in-place form; other forms have them in `work`.
        finish: Creates the result of `synchronize` from the outputs.
        like: A tensor of the operation, whose device has the stream; ``None`` without one.
    """

    __slots__ = ("finish", "outputs", "stream", "work")

    def __init__(self, work: Any, outputs: list[torch.Tensor] | None, finish: Callable[[list], Any], like: Any) -> None:
        self.work = work
        self.outputs = outputs
        self.finish = finish
        # The stream that was current when an operation on a GPU was enqueued.
        self.stream = torch.cuda.current_stream(like.device) if like is not None and like.is_cuda else None

    def wait(self) -> Any:
        try:
            self.work.wait()
        except (RuntimeError, ValueError) as error:
            raise at_execution(error) from None
        outputs = self.work.results() if self.outputs is None else self.outputs
        if self.stream is not None:
            current = torch.cuda.current_stream(self.stream.device)
            if current != self.stream:
                current.wait_stream(self.stream)
                for output in outputs if self.outputs is None else ():
                    # Its memory belongs to the stream of the submission, which must not reuse it too early.
                    if output.is_cuda:
                        output.record_stream(current)
        return self.finish(outputs)


_handle_map: dict[int, _Pending] = {}
_numbers = itertools.count()

basics._cleanups.append(_handle_map.clear)


def _check_devices(tensors: Sequence[torch.Tensor]) -> None:
    """Raise an error if the tensors of a group are on several devices."""
    for tensor in tensors:
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"tensors of a group must be on same device: one is on {tensors[0].device}, another on {tensor.device}"
            )


def _in_host_memory(kind: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors for an operation that the core runs only in host memory."""
    if any(tensor.is_cuda for tensor in tensors):
        _core.note_fallback("through_host_memory")
        basics.warn_once(
            f"{kind} of CUDA tensors runs on copies in host memory and blocks the host, because the core runs it by "
            "name only there"
        )
    return [tensor.cpu() for tensor in tensors]


def _first(outputs: list[torch.Tensor]) -> torch.Tensor:
    return outputs[0]


def _number(process_set: ProcessSet) -> int:
    number = process_set.process_set_id
    if number is None:
        raise ValueError(f"{process_set} does not exist, or has not been registered: call `add_process_set` first")
    return number


def _submit(
    call: Callable[..., Any],
    *args: Any,
    like: torch.Tensor | None = None,
    outputs: list[torch.Tensor] | None = None,
    finish: Callable[[list], Any] = _first,
) -> _Pending:
    try:
        work = call(*args)
    except (RuntimeError, ValueError, TypeError) as error:
        raise at_submission(error) from None
    return _Pending(work, outputs, finish, like)


def _kept(pending: _Pending) -> int:
    handle = next(_numbers)
    _handle_map[handle] = pending
    return handle


class _Nothing:
    """The operation of a group without tensors."""

    @staticmethod
    def wait() -> None:
        pass

    @staticmethod
    def is_completed() -> bool:
        return True

    @staticmethod
    def results() -> list[torch.Tensor]:
        return []


_NOTHING = _Nothing()


def poll(handle: int) -> bool:
    """Return whether an operation is complete or has failed, without waiting.

    Args:
        handle: The handle.

    Returns:
        ``True`` if :func:`synchronize` would return or raise at once.

    Raises:
        ValueError: There is no such handle, or it is used up.
    """
    if handle not in _handle_map:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return _handle_map[handle].work.is_completed()


def synchronize(handle: int) -> Any:
    """Wait for an operation, and return its result; the handle is then used up.

    Args:
        handle: The handle.

    Returns:
        The result of the operation; ``None`` for an unknown handle.

    Raises:
        HorovodInternalError: The operation failed.
    """
    pending = _handle_map.pop(handle, None)
    return None if pending is None else pending.wait()
