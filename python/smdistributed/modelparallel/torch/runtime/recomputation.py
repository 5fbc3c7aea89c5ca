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
        return _Kept(tensor) if dropped is None else dropped

    with saved_tensors_hooks(pack, _unpack):
        recorder.start()
        try:
            yield recorder
        finally:
            recorder.stop()
    if recorder.obstacle():
        raise UnrepeatableForwardError(recorder.obstacle())


class _Kept:
    """A saved tensor, whose version is checked as autograd does without hooks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, None if tensor.is_inference() else tensor._version


def _unpack(packed: Any) -> torch.Tensor:
    if not isinstance(packed, _Kept):
        return packed.compute()
    if packed.version is not None and packed.tensor._version != packed.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{packed.tensor.dtype}{list(packed.tensor.shape)} is at version {packed.tensor._version} instead of "
            f"{packed.version}"
        )
    return packed.tensor
