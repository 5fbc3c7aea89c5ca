"""Registers the backend ``smddp`` with ``torch.distributed``.

    import smdistributed.dataparallel.torch.torch_smddp
    torch.distributed.init_process_group(backend="smddp")

Everything in PyTorch that works over process groups then works over OpenSMD's core: DistributedDataParallel, FSDP,
DTensor, functional collectives. Groups of other backends may exist beside it.

``init_process_group`` joins the job by itself: through the launcher's variables where they name this rank, otherwise
through the store (``init_method="file://.."``, ``store=..``). If ``smdistributed...init_process_group()`` was called
before, both share one session, and must agree about rank and size. A collective that fails raises
``torch.distributed.DistBackendError``, whose text names the ranks.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from smdistributed._common import lifecycle, shims

# PyTorch first, through the loader: it says what is missing.
_ops = shims.load_torch()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

NAME = "smddp"


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """``torch.distributed.monitored_barrier`` for groups of this backend: torch's own asks for gloo by name.

    Args:
        group: ``None`` means the default group. On ranks that are not in it, nothing happens.
        timeout: A number counts seconds. ``None`` means the group's.
        wait_all_ranks: Whether the group's first rank names all ranks that did not come, or the first one only.

    Raises:
        DistBackendError: Not all ranks came in time.
    """
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return
    if isinstance(timeout, int | float):
        timeout = timedelta(seconds=timeout)
    group = group or dist.group.WORLD
    arguments = () if timeout is None else (timeout,)
    group.monitored_barrier(*arguments, wait_all_ranks=wait_all_ranks)


def _create(options: Any, _: object) -> Any:
    """The backend of a new process group, from torch's description of it."""
    carrier = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    milliseconds = max(1, round(options.timeout.total_seconds() * 1000))
    lifecycle.watch()
    _ops.add_backend(carrier.boxed(), list(options.global_ranks_in_group), milliseconds)
    return carrier._get_backend(torch.device("cpu"))


# A module that is loaded anew, or under another name, must not register a second time.
if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
