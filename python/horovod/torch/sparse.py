"""All-reduces of sparse tensors: an all-gather of the ranks' indices and values."""

from __future__ import annotations

from collections.abc import Callable

from horovod.torch.handles import synchronize

# isort: split
import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.session import Average, Sum
from horovod.torch.exchanges import allgather_async
from horovod.torch.reductions import _OPS


def sparse_of(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Create a sparse tensor that is not coalesced.

    PyTorch's own function warns where the script has not said whether such tensors are to be checked.

    Args:
        indices: Of shape ``[sparse dimensions, entries]``.
        values: Of shape ``[entries, ...]``.
        shape: Shape of the tensor.

    Returns:
        The tensor.
    """
    return torch.ops.aten._sparse_coo_tensor_unsafe(indices, values, shape)


def no_rows(parameter: torch.Tensor) -> torch.Tensor:
    """Create a sparse gradient without entries.

    Args:
        parameter: The parameter of the gradient.

    Returns:
        The gradient, which adds nothing to those of the others.
    """
    indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    values = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    return sparse_of(indices, values, parameter.shape)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Reduce a sparse tensor by gathering the ranks' indices and values, and return at once.

    Args:
        tensor: A sparse tensor; same shape and type on all ranks.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        op: ``Average`` or ``Sum``.
        process_set: The ranks that take part.

    Returns:
        A function that waits, and returns a sparse tensor that is not coalesced.

    Raises:
        NotImplementedError: ``op`` is neither ``Average`` nor ``Sum``.
    """
    if op not in (Average, Sum):
        raise NotImplementedError(f"a sparse tensor cannot be reduced with op={_OPS.get(op, op)}: use Average or Sum")
    sparse = tensor if tensor.is_coalesced() else tensor.coalesce()
    indices = sparse.indices().transpose(0, 1).contiguous()
    values = sparse.values()
    indices_name, values_name = (f"{name}.indices", f"{name}.values") if name else (None, None)
    indices_handle = allgather_async(indices, indices_name, process_set)
    values_handle = allgather_async(values, values_name, process_set)
    members = process_set.size()

    def handle() -> torch.Tensor:
        everybodys_indices = synchronize(indices_handle)
        everybodys_values = synchronize(values_handle)
        if op == Average:
            everybodys_values = everybodys_values / members
        return sparse_of(everybodys_indices.transpose(0, 1), everybodys_values, sparse.size())

    return handle
