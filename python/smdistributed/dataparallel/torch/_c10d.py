"""Replacements of functions in ``torch.distributed`` that accept only PyTorch's own backends.

These functions check the backend by name and refuse every other one, or leave out a backend that could serve the call.
:func:`install` replaces each of them by a function that serves the groups of ``smddp`` and passes calls for any other
group to PyTorch's function unchanged.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

NAME = "smddp"
_CPU = torch.device("cpu")
#: What ``split_group`` returns to a rank that is in no split: ``None`` before PyTorch 2.14.
_OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER if hasattr(distributed_c10d, "_NonGroupMember") else None
#: First number of groups that are numbered here. PyTorch's own counter never reaches it.
_FIRST_NUMBER = 1 << 40
_num_created: Counter[tuple[int, ...]] = Counter()
_parent: ContextVar[dist.ProcessGroup | None] = ContextVar("parent", default=None)


def _resolved(group: dist.ProcessGroup | None) -> Any:
    """Return a group; the default group for ``None``. Untyped: PyTorch's stubs lack many methods of groups."""
    return group or dist.group.WORLD


def is_ours(group: Any) -> bool:
    """Return whether CPU tensors of a group go through this backend.

    Args:
        group: The group; ``None`` means the default group.

    Returns:
        ``False`` also where this rank is not a member or ``torch.distributed`` is not initialized.
    """
    if group == dist.GroupMember.NON_GROUP_MEMBER or not dist.is_initialized():
        return False
    group = _resolved(group)
    if not isinstance(group, dist.ProcessGroup) or _CPU not in group._device_types:
        return False
    return NAME in (dist.get_backend(group), group._get_backend(_CPU).name())


def parent() -> dist.ProcessGroup | None:
    """Return the parent of the group that is being created.

    Returns:
        The parent, if all its ranks take part in the creation; else ``None``.
    """
    return _parent.get()


@contextmanager
def _splitting(group: dist.ProcessGroup) -> Iterator[None]:
    token = _parent.set(group)
    try:
        yield
    finally:
        _parent.reset(token)


@contextmanager
def _with_own_number(ranks: Sequence[int] | None) -> Iterator[None]:
    """Return a context for the creation of a group that only its members create.

    PyTorch names a group by the number of groups before it, and gloo's ranks connect under that name. Since PyTorch
    2.14, a group that only its members create counts, too. The ranks would then no longer agree on the names of later
    groups.
    The group gets a number of its own instead, on which only its members agree.
    """
    members = tuple(ranks or ())
    _num_created[members] += 1
    world = distributed_c10d._world
    count = world.group_count
    world.group_count = _FIRST_NUMBER + _num_created[members]
    try:
        yield
    finally:
        world.group_count = count


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait for all ranks of a group, and name the ranks that are missing.

    Replaces ``torch.distributed.monitored_barrier``.

    Args:
        group: ``None`` means the default group.
        timeout: Longest wait; a number counts seconds. ``None`` means the group's timeout.
        wait_all_ranks: Whether the group's first rank names all missing ranks, or the first one only.

    Raises:
        DistBackendError: Not all ranks arrived within the timeout.
    """
    if isinstance(timeout, int | float):
        timeout = timedelta(seconds=timeout)
    arguments = () if timeout is None else (timeout,)
    _resolved(group).monitored_barrier(*arguments, wait_all_ranks=wait_all_ranks)


def split_group(
    parent_pg: dist.ProcessGroup | None = None,
    split_ranks: list[list[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> Any:
    """Split a group, whether a device is bound to the default group or not.

    Replaces ``torch.distributed.split_group``. All ranks of the parent call it. If the parent was not used on CUDA
    devices, the ranks of a split connect without the others.

    Args:
        parent_pg: The group to split; ``None`` means the default group.
        split_ranks: For each split its ranks in the parent. Not all ranks of the parent need be in one.
        timeout: Timeout of the new group; ``None`` means PyTorch's default.
        pg_options: Passed on.
        group_desc: Passed on.
        backend: Backend of the new group; ``None`` means the parent's.

    Returns:
        The group of the split that this rank is in, or what this version of PyTorch returns to others.

    Raises:
        ValueError: A split is empty, names a rank twice or one that does not exist, or a rank is in two.
    """
    parent = _resolved(parent_pg)
    if not split_ranks:
        raise ValueError("`split_ranks` is empty: expected a list of ranks for each split")
    size = dist.get_world_size(parent)
    named = [rank for split in split_ranks for rank in split]
    if not all(split_ranks) or len(set(named)) != len(named) or not set(named) <= set(range(size)):
        raise ValueError(
            f"`split_ranks` is {split_ranks}: expected disjoint lists of ranks 0 to {size - 1} of the parent"
        )
    me = dist.get_rank(parent)
    mine = next((split for split in split_ranks if me in split), None)
    if mine is None:
        _stay_out(parent)
        return _OUTSIDE
    members = [dist.get_global_rank(parent, rank) for rank in sorted(mine)]
    with _splitting(parent), _with_own_number(members):
        return _theirs["new_group"](
            members,
            timeout=timeout,
            backend=backend or dist.get_backend(parent),
            pg_options=pg_options,
            use_local_synchronization=True,
            group_desc=group_desc,
        )


def new_group(
    ranks: list[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    *more: Any,
    **options: Any,
) -> Any:
    """Create a group as a split of the default group.

    Replaces ``torch.distributed.new_group``. All ranks call it unless they synchronize locally. A backend that must
    learn of the new group on every rank can therefore split the default group.

    Args:
        ranks: Passed on.
        timeout: Passed on.
        backend: Passed on.
        pg_options: Passed on.
        use_local_synchronization: Passed on.
        group_desc: Passed on.
        device_id: Passed on.
        *more: Arguments of newer versions of PyTorch, passed on.
        **options: The same by name: ``sort_ranks`` since 2.12.

    Returns:
        The result of PyTorch's function.
    """
    arguments = (ranks, timeout, backend, pg_options, use_local_synchronization, group_desc, device_id, *more)
    if (backend or dist.get_backend()) != NAME:
        return _theirs["new_group"](*arguments, **options)
    if use_local_synchronization:
        with _with_own_number(ranks):
            return _theirs["new_group"](*arguments, **options)
    if not _is_valid(ranks, timeout, device_id):
        return _theirs["new_group"](*arguments, **options)
    if ranks is not None and dist.get_rank() not in ranks:
        _stay_out(_resolved(None))
        return _theirs["new_group"](*arguments, **options)
    with _splitting(_resolved(None)):
        return _theirs["new_group"](*arguments, **options)


def _get_split_source(pg: dist.ProcessGroup) -> None:
    """Return no group for PyTorch to split.

    Where a device is bound to the default group, PyTorch splits it inside ``new_group``, by methods that only its own
    backends have. :func:`new_group` splits it here.
    """


def _is_valid(ranks: Any, timeout: Any, device_id: Any) -> bool:
    """Return whether PyTorch accepts these arguments. It rejects others before any rank creates a group."""
    size = dist.get_world_size()
    members = list(range(size) if ranks is None else ranks)
    is_rank = [isinstance(rank, int) and 0 <= rank < size for rank in members]
    if not (all(is_rank) and 0 < len(set(members)) == len(members)):
        return False
    bound = _resolved(None).bound_device_id
    has_time = timeout is None or (isinstance(timeout, timedelta) and timeout > timedelta(0))
    return has_time and (device_id is None or bound is None or device_id == bound)


def _stay_out(group: dist.ProcessGroup) -> None:
    """Record that this rank is in none of the groups that other ranks create out of `group` now."""
    torch.ops.smd.split_nocolor(group.boxed())


def _set_pg_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of later operations. Trainers use it to wait longer for the first step than for others."""
    _resolved(group)._get_backend(_CPU).set_timeout(timeout)
    if not _is_all_ours(group):
        _theirs["_set_pg_timeout"](timeout, group)


def _is_all_ours(group: dist.ProcessGroup | None) -> bool:
    """Return whether no other backend serves some type of devices in the group."""
    if not is_ours(group):
        return False
    group = _resolved(group)
    return all(group._get_backend(device).name() == NAME for device in group._device_types)


#: PyTorch's own functions.
_theirs: dict[str, Callable] = {}


def install() -> None:
    """Replace the functions in every module of PyTorch that contains them."""
    _replace(monitored_barrier, 0, "group", is_ours)
    _replace(new_group, None, "", _is_all_ours)
    _replace(split_group, 0, "parent_pg", _is_all_ours)
    _replace(_get_split_source, 0, "pg", _is_all_ours)
    _replace(_set_pg_timeout, 1, "group", is_ours)


def _replace(ours: Callable, position: int | None, name: str, serves: Callable[[Any], bool]) -> None:
    """Replace torch's function of the same name by one that chooses between it and `ours`.

    `ours` runs where `serves` accepts the group. The group is the argument at `position`, which is called `name`; if it
    is missing, `serves` gets ``None``, the default group.
    """
    theirs = getattr(distributed_c10d, ours.__name__, None)
    if theirs is None:
        warnings.warn(
            f"this PyTorch has no `{ours.__name__}`, which `{NAME}` adapts: report it to OpenSMD", stacklevel=2
        )
        return
    _theirs[ours.__name__] = theirs

    @functools.wraps(theirs)
    def either(*args: Any, **kwargs: Any) -> Any:
        group = args[position] if position is not None and len(args) > position else kwargs.get(name)
        return (ours if serves(group) else theirs)(*args, **kwargs)

    for module in (distributed_c10d, dist, device_mesh):
        if hasattr(module, ours.__name__):
            setattr(module, ours.__name__, either)
