"""What few scripts call of the original's extension module."""

from __future__ import annotations

from horovod.torch import mpi_ops


def horovod_torch_poll(handle: int) -> bool:
    """As :func:`horovod.torch.poll`."""
    return mpi_ops.poll(handle)


def horovod_torch_wait_and_clear(handle: int) -> None:
    """As :func:`horovod.torch.synchronize`."""
    mpi_ops.synchronize(handle)


def horovod_torch_reset() -> None:
    """Forgets all handles."""
    mpi_ops._handle_map.clear()
