"""Functions of the original's extension module that few scripts call."""

from __future__ import annotations

from horovod.torch import mpi_ops


def horovod_torch_poll(handle: int) -> bool:
    """Return whether an operation is complete, as :func:`horovod.torch.poll`.

    Args:
        handle: The handle.

    Returns:
        ``True`` if an operation is complete.
    """
    return mpi_ops.poll(handle)


def horovod_torch_wait_and_clear(handle: int) -> None:
    """Wait for an operation, as :func:`horovod.torch.synchronize`.

    Args:
        handle: The handle.
    """
    mpi_ops.synchronize(handle)


def horovod_torch_reset() -> None:
    """Forget all handles."""
    mpi_ops._handle_map.clear()
