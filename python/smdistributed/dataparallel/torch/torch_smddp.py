"""Registers the backend ``smddp`` with ``torch.distributed``.

    import smdistributed.dataparallel.torch.torch_smddp
    torch.distributed.init_process_group(backend="smddp")

Everything in PyTorch that works over process groups then works over OpenSMD's core: DistributedDataParallel, FSDP,
DTensor, functional collectives. Groups of other backends may exist beside it.

Scripts of any launcher find ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` in the
environment after this import: it sets those that ``mpirun`` and ``srun`` leave out.

``init_process_group`` joins the job by itself: through the launcher's variables where they name this rank, otherwise
through the store (``init_method="file://.."``, ``store=..``). If ``smdistributed...init_process_group()`` was called
before, both share one session, and must agree about rank and size. A collective that fails raises
``torch.distributed.DistBackendError``, whose text names the ranks.

``torch.distributed.monitored_barrier`` and ``split_group`` accept only PyTorch's own backends, and ``new_group`` lets
only these create a group from an existing one. This import replaces them by functions that serve groups of ``smddp``
and forward all other calls (:mod:`._c10d`).
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from smdistributed import _core
from smdistributed._common import lifecycle, shims

# PyTorch is imported through the loader, which reports missing packages.
_ops = shims.load_torch()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from smdistributed.dataparallel.torch import _accelerate, _c10d  # noqa: E402
from smdistributed.dataparallel.torch._c10d import NAME, monitored_barrier  # noqa: E402, F401


def _create(options: Any, backend_options: object) -> Any:
    """Create the backend of a new process group, from torch's description of it."""
    if backend_options is not None:
        warnings.warn(f"`pg_options` has no effect: `{NAME}` has no options", stacklevel=2)
    carrier = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    milliseconds = max(1, round(options.timeout.total_seconds() * 1000))
    lifecycle.watch()
    # The list is empty for the default group, which joins the job, and for the first group if the default group has
    # another backend.
    ranks = list(options.global_ranks_in_group)
    if ranks and not _core.is_initialized():
        if len(ranks) < dist.get_world_size():
            raise ValueError(
                f"a group of ranks {ranks} of {dist.get_world_size()} cannot be the first one of `{NAME}`: make one of "
                f'all ranks before, with `torch.distributed.new_group(backend="{NAME}")`'
            )
        ranks = []
    try:
        parent = _c10d.parent() if ranks else None
        _ops.add_backend(carrier.boxed(), ranks, milliseconds, None if parent is None else parent.boxed())
    except dist.DistBackendError as error:
        if str(error).endswith("[smd:interrupted]"):
            _core.raise_interrupt()
        raise
    return carrier._get_backend(torch.device("cpu"))


# If the module is imported again, or under another name, it must not register a second time.
if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    _c10d.install()
    _accelerate.install()

if "RANK" not in os.environ and _core.is_launched():
    lifecycle.export_environment()
