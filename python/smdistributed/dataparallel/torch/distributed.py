"""Collectives on PyTorch tensors, spelled as in ``torch.distributed``.

It stands beside ``torch.distributed`` and needs no call of it. Every rank of a group calls the same functions in the
same order with tensors of the same shape and type; where ranks disagree, each of them gets a ``MismatchError`` that
names the ranks and the difference (for CUDA tensors that NCCL moves, once the operation is stuck). If a rank dies, the calls of the others end with a ``PeerFailedError`` that names
it.

Tensors are used where they lie. One that is not contiguous is copied, and copied back where it is an output. As in
``torch.distributed``, autograd does not follow: a backward through a tensor that was reduced takes the operation for
the identity.

Extensions to the documented API: ``new_group`` and groups as arguments, ``reduce``, ``gather``, ``scatter``,
``reduce_scatter``, ``all_to_all``, ``send``, ``recv``, the ``_tensor`` forms of ``torch.distributed``, and
``destroy_process_group``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from smdistributed import _core
from smdistributed._common import errors, lifecycle, shims
from smdistributed.dataparallel.exceptions import CLASSES
from smdistributed.dataparallel.reduce_op import ReduceOp, core_name

# PyTorch first, through the loader: it says what is missing.
_ops = shims.load_torch()

import torch  # noqa: E402


class ProcessGroup:
    """Ranks that work together; made by :func:`new_group`.

    Attributes:
        id: The core's name of the group; ``None`` on ranks that are not members.
        ranks: Global ranks in the order that they have inside the group; ``None`` stands for all.
    """

    def __init__(self, id: int | None, ranks: tuple[int, ...] | None) -> None:
        self.id = id
        self.ranks = ranks

    def __repr__(self) -> str:
        return "group.WORLD" if self.ranks is None else f"ProcessGroup(id={self.id}, ranks={list(self.ranks)})"


class group:  # noqa: N801 - the documented name
    """Names of groups that always exist."""

    WORLD = ProcessGroup(0, None)


# Most functions have an argument `group`.
_WORLD = group.WORLD


class Work:
    """An operation in flight.

    The tensors of the operation belong to it until it is complete: do not read outputs or write inputs before.
    Dropping the handle does not cancel the operation.
    """

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> bool:
        """Returns ``True`` when the operation is complete.

        Raises:
            SmdistributedError: What the operation failed with; each call raises it.
        """
        _call(self._work.wait)
        return True

    def is_completed(self) -> bool:
        """Whether the operation is complete or failed; does not wait."""
        return self._work.is_completed()


def is_available() -> bool:
    """Whether this process was started by a launcher (``smdrun``, ``torchrun``, ``mpirun``, ``srun``)."""
    with errors.translated(CLASSES):
        return _core.is_launched()


def init_process_group(*args: object, **kwargs: object) -> None:
    """Joins the job that the launcher's environment describes; returns when all ranks have joined.

    Args:
        *args: Ignored; there for parity with ``torch.distributed``.
        **kwargs: Ignored, as well.

    Raises:
        SMDDPAlreadyInitializedError: It was called before.
    """
    with errors.translated(CLASSES):
        lifecycle.init()


def destroy_process_group() -> None:
    """Leaves the job; does nothing if this process is in none. Happens by itself when the process ends."""
    with errors.translated(CLASSES):
        lifecycle.shutdown()


def is_initialized() -> bool:
    """Whether this process is in a job."""
    return _core.is_initialized()


def get_rank(group: ProcessGroup | None = group.WORLD) -> int:
    """This process's rank inside ``group``: the global rank, 0 to world size - 1, for ``group.WORLD``."""
    with errors.translated(CLASSES):
        return _core.rank() if _is_world(group) else _members(group).index(_core.rank())


def get_world_size(group: ProcessGroup | None = group.WORLD) -> int:
    """Number of processes in ``group``."""
    with errors.translated(CLASSES):
        return _core.size() if _is_world(group) else len(_members(group))


def get_local_rank() -> int:
    """This process's rank on its host."""
    with errors.translated(CLASSES):
        return _core.local_rank()


def new_group(ranks: Sequence[int] | None = None) -> ProcessGroup:
    """Makes a group. All members call it, in the same order where they are members of several new groups.

    Args:
        ranks: Global ranks, in the order that they get inside the group; ``None`` for all.

    Returns:
        The group. On a rank that is no member, calls with it raise ``ValueError``.
    """
    with errors.translated(CLASSES):
        me, size = _core.rank(), _core.size()
        members = tuple(range(size) if ranks is None else ranks)
        if me not in members:
            return ProcessGroup(None, members)
        return ProcessGroup(_core.new_group(list(members)), members)


def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp | None = ReduceOp.SUM,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """Reduces ``tensor`` over the ranks, in place; the result is bitwise the same on every rank.

    Args:
        tensor: Same shape and type on all ranks.
        op: The reduction; ``None`` means ``SUM``.
        group: ``None`` means ``group.WORLD``.
        async_op: Whether to return at once.

    Returns:
        A handle if ``async_op``, else ``None``.
    """
    return _run(_ALL_REDUCE, async_op, tensor, core_name(op, ReduceOp.SUM), _id(group))


def reduce(
    tensor: torch.Tensor,
    dst: int = 0,
    op: ReduceOp | None = ReduceOp.SUM,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """As :func:`all_reduce`, but only global rank ``dst`` gets the result; tensors of other ranks stay as they are."""
    return _run(_REDUCE, async_op, tensor, core_name(op, ReduceOp.SUM), _group_rank(group, dst, "dst"), _id(group))


def broadcast(
    tensor: torch.Tensor,
    src: int = 0,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """Gives every rank the values of global rank ``src``, in place.

    Args:
        tensor: Same shape and type on all ranks.
        src: Global rank.
        group: ``None`` means ``group.WORLD``.
        async_op: Whether to return at once.

    Returns:
        A handle if ``async_op``, else ``None``.
    """
    return _run(_BROADCAST, async_op, tensor, _group_rank(group, src, "src"), _id(group))


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """Gives every rank the tensors of all ranks.

    Args:
        tensor_list: Outputs; entry i becomes rank i's tensor and has its shape, which may differ between ranks.
        tensor: This rank's input.
        group: ``None`` means ``group.WORLD``.
        async_op: Whether to return at once.

    Returns:
        A handle if ``async_op``, else ``None``.
    """
    return _run(_ALL_GATHER, async_op, list(tensor_list), tensor, _id(group))


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """As :func:`all_gather` into equal parts of dimension 0 of ``output_tensor``."""
    return _run(_ALL_GATHER_SINGLE, async_op, output_tensor, input_tensor, _id(group))


def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int = 0,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """As :func:`all_gather`, but only global rank ``dst`` gets the tensors, and only it gives ``gather_list``."""
    return _run(_GATHER, async_op, list(gather_list or ()), tensor, _group_rank(group, dst, "dst"), _id(group))


def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int = 0,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """Entry i of the ``scatter_list`` of global rank ``src`` becomes rank i's ``tensor``."""
    return _run(_SCATTER, async_op, tensor, list(scatter_list or ()), _group_rank(group, src, "src"), _id(group))


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: ReduceOp | None = ReduceOp.SUM,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """``output`` becomes the reduction, over the ranks, of their ``input_list[i]``, i being this rank."""
    return _run(_REDUCE_SCATTER, async_op, output, list(input_list), core_name(op, ReduceOp.SUM), _id(group))


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOp | None = ReduceOp.SUM,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """As :func:`reduce_scatter` of equal parts of dimension 0 of ``input``."""
    return _run(_REDUCE_SCATTER_SINGLE, async_op, output, input, core_name(op, ReduceOp.SUM), _id(group))


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """Entry j of rank i's inputs becomes entry i of rank j's outputs."""
    return _run(_ALL_TO_ALL, async_op, list(output_tensor_list), list(input_tensor_list), _id(group))


def all_to_all_single(
    output_t: torch.Tensor,
    input_t: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """Sends part j of ``input_t`` to rank j and puts rank i's part at place i of ``output_t``.

    Args:
        output_t: The parts received, one after the other along dimension 0.
        input_t: The parts to send, one after the other along dimension 0.
        output_split_sizes: Rows of dimension 0 from each rank; ``None`` means equal parts.
        input_split_sizes: Rows of dimension 0 to each rank; ``None`` means equal parts.
        group: ``None`` means ``group.WORLD``.
        async_op: Whether to return at once.

    Returns:
        A handle if ``async_op``, else ``None``.
    """
    output_sizes = list(output_split_sizes or ())
    input_sizes = list(input_split_sizes or ())
    return _run(_ALL_TO_ALL_SINGLE, async_op, output_t, input_t, output_sizes, input_sizes, _id(group))


def barrier(group: ProcessGroup | None = group.WORLD, async_op: bool = False) -> Work | None:
    """Returns when every rank of ``group`` has called it; with ``async_op``, the handle is complete then."""
    return _run(_BARRIER, async_op, _id(group))


def send(tensor: torch.Tensor, dst: int, group: ProcessGroup | None = group.WORLD, tag: int = 0) -> None:
    """Sends ``tensor`` to global rank ``dst``, which calls :func:`recv`. May wait until it does."""
    _run(_SEND, False, tensor, _group_rank(group, dst, "dst"), tag, _id(group))


def recv(tensor: torch.Tensor, src: int, group: ProcessGroup | None = group.WORLD, tag: int = 0) -> int:
    """Receives ``tensor`` from global rank ``src``. Messages of one sender and tag arrive in order.

    Returns:
        ``src``.
    """
    _run(_RECV, False, tensor, _group_rank(group, src, "src"), tag, _id(group))
    return src


def isend(tensor: torch.Tensor, dst: int, group: ProcessGroup | None = group.WORLD, tag: int = 0) -> Work:
    """As :func:`send`; returns a handle at once."""
    return _start(_SEND, tensor, _group_rank(group, dst, "dst"), tag, _id(group))


def irecv(tensor: torch.Tensor, src: int, group: ProcessGroup | None = group.WORLD, tag: int = 0) -> Work:
    """As :func:`recv`; returns a handle at once."""
    return _start(_RECV, tensor, _group_rank(group, src, "src"), tag, _id(group))


def _forms(name: str) -> tuple[Any, Any]:
    """The blocking and the asynchronous form of an operation; looked up once, since a look-up costs as much as a
    small collective."""
    return getattr(_ops, name).default, getattr(_ops, f"{name}_async").default


_ALL_REDUCE = _forms("all_reduce_")
_REDUCE = _forms("reduce_")
_BROADCAST = _forms("broadcast_")
_ALL_GATHER = _forms("all_gather")
_ALL_GATHER_SINGLE = _forms("all_gather_single")
_GATHER = _forms("gather")
_SCATTER = _forms("scatter")
_REDUCE_SCATTER = _forms("reduce_scatter")
_REDUCE_SCATTER_SINGLE = _forms("reduce_scatter_single")
_ALL_TO_ALL = _forms("all_to_all")
_ALL_TO_ALL_SINGLE = _forms("all_to_all_single")
_BARRIER = _forms("barrier")
_SEND = _forms("send")
_RECV = _forms("recv_")


def _run(forms: tuple[Any, Any], async_op: bool, *arguments: Any) -> Work | None:
    if async_op:
        return _start(forms, *arguments)
    _call(forms[0], *arguments)
    return None


def _start(forms: tuple[Any, Any], *arguments: Any) -> Work:
    return Work(_call(forms[1], *arguments))


def _call(function: Any, *arguments: Any) -> Any:
    # Not `with errors.translated(...)`: on the way without errors, this costs nothing.
    try:
        return function(*arguments)
    except (RuntimeError, ValueError) as error:
        _raise_translated(error)


def _raise_translated(error: Exception) -> NoReturn:
    with errors.translated(CLASSES):
        raise error


def _is_world(group: ProcessGroup | None) -> bool:
    return group is None or group is _WORLD


def _id(group: ProcessGroup | None) -> int:
    """The core's name of the group."""
    if _is_world(group):
        return 0
    _members(group)
    return group.id


def _members(group: Any) -> tuple[int, ...]:
    """Global ranks of a group that this rank is in and that is not the world."""
    if not isinstance(group, ProcessGroup):
        raise ValueError(f"{group!r} is not a group: expected `group.WORLD`, None, or what `new_group` returns")
    if group.id is None:
        raise ValueError(f"rank {_core.rank()} is not a member of {group}")
    return group.ranks


def _group_rank(group: ProcessGroup | None, rank: int, argument: str) -> int:
    """The rank inside ``group`` of a global rank."""
    if _is_world(group):
        return rank
    members = _members(group)
    if rank not in members:
        raise ValueError(f"`{argument}` is rank {rank}, which is not a member of {group}")
    return members.index(rank)
