"""Compares the weights of jobs: one dumps them, and another one, with other degrees, verifies that it has the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.torch.checkpoint import torch_files
from smdistributed.modelparallel.torch.communication import raise_on_all_ranks
from smdistributed.modelparallel.torch.exceptions import SMPCheckpointError
from smdistributed.modelparallel.torch.model import DistributedModel
from smdistributed.modelparallel.torch.state import state


def dump_model(model: DistributedModel, path: str | Path) -> None:
    """Write the whole model's parameters and buffers to a file. All ranks call it.

    Args:
        model: The wrapped model.
        path: The file, which rank 0 writes.

    Raises:
        SMPCheckpointError: The file could not be written; raised on all ranks.
    """
    whole = _whole(model)

    def write() -> None:
        if state.groups.rank == 0:
            torch_files.put(whole, Path(path))

    raise_on_all_ranks(write, CommGroup.WORLD, f"the model could not be written to `{path}`")


def verify(model: DistributedModel, path: str | Path, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Compare the whole model with a file of :func:`dump_model`. All ranks call it.

    Args:
        model: The wrapped model.
        path: The file.
        rtol: Largest relative difference, as for ``torch.testing.assert_close``.
        atol: Largest absolute difference.

    Raises:
        SMPCheckpointError: A tensor differs, or only one of both has it; raised on all ranks.
    """
    whole = _whole(model)

    def compare() -> None:
        expected = torch_files.get(Path(path))
        if expected.keys() != whole.keys():
            raise SMPCheckpointError(f"only one of both has {sorted(expected.keys() ^ whole.keys())[:5]}")
        for name, value in expected.items():
            if not isinstance(value, torch.Tensor):
                continue
            try:
                torch.testing.assert_close(whole[name], value, rtol=rtol, atol=atol, check_device=False, equal_nan=True)
            except AssertionError as error:
                raise SMPCheckpointError(f"`{name}` differs: {error}") from error

    raise_on_all_ranks(compare, CommGroup.WORLD, f"the model is not that of `{path}`")


def _whole(model: DistributedModel) -> dict[str, Any]:
    return {
        name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in model.state_dict().items()
    }
