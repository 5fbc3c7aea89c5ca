"""Saved tensors that the backward of a captured stage computes again instead of keeping them.

A graph keeps the memory of what its forward saves, for each active microbatch. Of results of pointwise operations whose
arguments are saved anyway, it keeps nothing: `torch_ext/recomputation` finds them (RECOMPUTE-1 to RECOMPUTE-5). Their
kernels are repeated in the graph of the backward, with the same bits. This needs no time of the host, because the
recorder observes operations only while a stage is captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

#: Launching another kernel costs more than the memory of smaller tensors.
_MIN_BYTES = 1 << 20


class UnrepeatableForwardError(RuntimeError):
    """A forward writes to a tensor that was saved, or that a dropped one is computed from."""


@contextlib.contextmanager
def recomputed_pointwise_results(is_split: bool) -> Iterator[Any]:
    """Drop the saved tensors that the backward can compute again, in the forward that runs inside.

    Args:
        is_split: Whether gradients of weights are computed after the backward.

    Yields:
        The recorder, a `torch.classes.smd.PointwiseRecorder`.

    Raises:
        UnrepeatableForwardError: The autograd graph must not be used.
    """
    recorder = torch.classes.smd.PointwiseRecorder(_MIN_BYTES, is_split)

    def pack(tensor: torch.Tensor) -> Any:
        dropped = recorder.pack(tensor)
        return KeptTensor(tensor) if dropped is None else dropped

    with saved_tensors_hooks(pack, _unpack):
        recorder.start()
        try:
            yield recorder
        finally:
            recorder.stop()
    if recorder.obstacle():
        raise UnrepeatableForwardError(recorder.obstacle())


class KeptTensor:
    """A saved tensor, whose version is checked as autograd does without hooks."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor, None if tensor.is_inference() else tensor._version

    def compute(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: It was changed in place since it was saved.
        """
        if self._version is not None and self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self._tensor.dtype}{list(self._tensor.shape)} is at version {self._tensor._version} instead of "
                f"{self._version}"
            )
        return self._tensor


def _unpack(packed: Any) -> torch.Tensor:
    return packed.compute()
