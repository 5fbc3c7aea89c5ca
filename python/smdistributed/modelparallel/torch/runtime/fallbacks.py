"""Slower paths of a pipeline, each of which is counted, with a warning the first time.

Synchronous calls cannot be pipelined: one rank runs the call while all others wait for it. With
``SMD_STRICT_PIPELINE``, they are an error.
"""

from __future__ import annotations

import collections
import sys
import warnings
from pathlib import Path
from typing import Literal

import torch

import smdistributed
from smdistributed import _core
from smdistributed.modelparallel.exceptions import SMPUsageError

_OURS = str(Path(smdistributed.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)

#: `run`: a task with an unknown output spec; `read`: a value that the body reads.
Kind = Literal["run", "read"]


class Fallbacks:
    """The synchronous calls of a model.

    Attributes:
        counts: Number of synchronous calls, by what was called and the reason.
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self._strict = _is_strict()

    def note(self, kind: Kind, what: str, partition: int, reason: str) -> None:
        """Count a synchronous call that is about to run.

        Args:
            kind: The kind of the call.
            what: The module's path, or the operation's name and the line of the script that calls it.
            partition: The partition that runs it.
            reason: Why it cannot be pipelined.

        Raises:
            SMPUsageError: ``SMD_STRICT_PIPELINE`` is 1.
        """
        if kind == "read":
            text = (
                f"the body of the step reads values of tensors: {what}. Each microbatch waits there for all calls "
                "before the read, so "
                "the pipeline runs empty; return the tensor from the body instead, and read it after the step"
            )
        else:
            text = (
                f"`{what}` on partition {partition} cannot be pipelined: {reason}. All ranks run its microbatch up to "
                "this call and wait for its outputs"
            )
        if self._strict:
            raise SMPUsageError(f"{text} (SMD_STRICT_PIPELINE=1)")
        first = (what, reason) not in self.counts
        self.counts[what, reason] += 1
        if first:
            warnings.warn(text, stacklevel=script_level())


_unsplit: set[str] = set()


def note_unsplit_backward(node: str) -> None:
    """Count a backward that a zero-bubble schedule could not split; the first time, warn with the reason.

    Args:
        node: The autograd node that computes the gradient of a weight, and the weight's shape.
    """
    _core.note_fallback("backward_not_split")
    if node in _unsplit:
        return
    _unsplit.add(node)
    text = (
        "`zero_bubble` could not split most of a stage's backward: autograd computes the gradients of these weights "
        f"together with those of inputs ({node}), so other ranks wait for both. Compiled layers, checkpoints with "
        "`use_reentrant=True`, custom autograd functions and weights with hooks cannot be split"
    )
    warnings.warn(text, stacklevel=script_level())


def _is_strict() -> bool:
    return _core.setting("SMD_STRICT_PIPELINE").lower() not in ("", "0", "false", "no", "off")


def call_site() -> str:
    """Return the line of the script, or of its model, that is being recorded."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def script_level() -> int:
    """Return the `stacklevel` of a warning in the calling function that shows the line of the script or its model."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def _is_library(file: str) -> bool:
    return file.startswith((_OURS, _TORCH, "<"))
