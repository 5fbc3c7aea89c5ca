"""Collectives on PyTorch tensors, spelled as in ``torch.distributed``.

The module stands beside ``torch.distributed`` and does not need it to be initialized. Every rank of a group calls the
same functions in the same order with tensors of the same shape and type. Where ranks disagree, each of them gets a
``MismatchError`` that names the ranks and the difference. (For CUDA tensors that NCCL moves, the error comes once the
operation is stuck.) If a rank dies, the calls of the others end with a ``PeerFailedError`` that names it.

Tensors are used where they lie. One that is not contiguous is copied, and copied back where it is an output. As in
``torch.distributed``, collectives are not differentiable: a backward through a tensor that was reduced treats the
operation as the identity.

Extensions to the documented API: ``new_group`` and groups as arguments, ``reduce``, ``gather``, ``scatter``,
``reduce_scatter``, ``all_to_all``, ``send``, ``recv``, the ``_tensor`` forms of ``torch.distributed``, and
``destroy_process_group``.

Examples:
    >>> import smdistributed.dataparallel.torch.distributed as dist
    >>> dist.init_process_group()
    >>> tensor = torch.ones(3) * dist.get_rank()
    >>> dist.all_reduce(tensor)  # the sum over all ranks, on each rank
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from smdistributed import _core
from smdistributed._common import errors, lifecycle, shims
from smdistributed.dataparallel.exceptions import CLASSES
from smdistributed.dataparallel.reduce_op import ReduceOp, core_name

# PyTorch is imported through the loader, which reports missing packages.
_ops = shims.load_torch()

import torch  # noqa: E402


class ProcessGroup:
    """A group of ranks that communicate with each other, created by :func:`new_group`.

    Args:
        id: The core's number of the group; ``None`` on ranks that are not members.
        ranks: Global ranks in the order of their ranks inside the group; ``None`` means all ranks.

    Attributes:
        id: As the argument.
        ranks: As the argument.
    """

    def __init__(self, id: int | None, ranks: tuple[int, ...] | None) -> None:
        self.id = id
        self.ranks = ranks

    def __repr__(self) -> str:
        return "group.WORLD" if self.ranks is None else f"ProcessGroup(id={self.id}, ranks={list(self.ranks)})"


class group:  # noqa: N801 - the documented name
    """Groups that always exist.

    Attributes:
        WORLD: The group of all ranks.
    """

    WORLD = ProcessGroup(0, None)


# Most functions have an argument `group`.
_WORLD = group.WORLD


class Work:
    """A handle of an operation that is under way.

    The tensors of the operation belong to it until it is complete: do not read outputs or write inputs before.
    Dropping the handle does not cancel the operation.

    Args:
        work: The handle of the operator library.
    """

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> bool:
        """Wait until the operation is complete.

        Returns:
            ``True``.

        Raises:
            SmdistributedError: The operation failed; each call raises it again.
        """
        _call(self._work.wait)
        return True

    def is_completed(self) -> bool:
        """Return whether the operation is complete or has failed, without waiting.

        Returns:
            ``True`` if :meth:`wait` would return or raise at once.
        """
        return self._work.is_completed()


def is_available() -> bool:
    """Return whether a launcher (``smdrun``, ``torchrun``, ``mpirun``, ``srun``) started this process.

    Returns:
        ``True`` if the environment describes a job.
    """
    with errors.translated(CLASSES):
        return _core.is_launched()


def init_process_group(*args: object, **kwargs: object) -> None:
    """Join the job that the launcher's environment describes, and wait until all ranks have joined.

    Args:
        *args: Ignored; accepted for parity with ``torch.distributed``.
        **kwargs: Ignored, as well. A warning names those that would change something.

    Raises:
        SMDDPAlreadyInitializedError: This process is in a job already.
        ConfigError: The environment contradicts itself.
        PeerFailedError: A rank ended before all had joined.
        SMDDPTimeoutError: Not all ranks joined within the timeout.
    """
    ignored = sorted(name for name in kwargs if name != "backend")
    if ignored:
        remedy = "; `SMD_TIMEOUT_SECONDS` sets the time limit" if "timeout" in ignored else ""
        warnings.warn(
            f"`init_process_group` ignores {', '.join(ignored)}: the job is that of the launcher{remedy}", stacklevel=2
        )
    with errors.translated(CLASSES):
        lifecycle.init()


def destroy_process_group() -> None:
    """Leave the job; do nothing if this process is in none.

    The end of the process does the same.
    """
    with errors.translated(CLASSES):
        lifecycle.shutdown()


def is_initialized() -> bool:
    """Return whether this process is in a job.

    Returns:
        ``True`` between :func:`init_process_group` and :func:`destroy_process_group`.
    """
    return _core.is_initialized()


def get_rank(group: ProcessGroup | None = group.WORLD) -> int:
    """Return this process's rank in a group.

    Args:
        group: The group; ``None`` means ``group.WORLD``.

    Returns:
        The rank inside the group, from 0 to its size - 1. For ``group.WORLD`` this is the global rank.

    Raises:
        SMDDPNotInitializedError: ``init_process_group()`` was not called.
        ValueError: This rank is not a member of the group.
    """
    with errors.translated(CLASSES):
        return _core.rank() if _is_world(group) else _members(group).index(_core.rank())


def get_world_size(group: ProcessGroup | None = group.WORLD) -> int:
    """Return the number of processes in a group.

    Args:
        group: The group; ``None`` means ``group.WORLD``.

    Returns:
        The number of members.

    Raises:
        SMDDPNotInitializedError: ``init_process_group()`` was not called.
        ValueError: This rank is not a member of the group.
    """
    with errors.translated(CLASSES):
        return _core.size() if _is_world(group) else len(_members(group))


def get_local_rank() -> int:
    """Return this process's rank among the processes of its host.

    Returns:
        The local rank, from 0; usually the index of the GPU to use.

    Raises:
        SMDDPNotInitializedError: ``init_process_group()`` was not called.
    """
    with errors.translated(CLASSES):
        return _core.local_rank()


def new_group(ranks: Sequence[int] | None = None) -> ProcessGroup:
    """Create a group.

    All members call it. Ranks that are members of several new groups call it for them in the same order.

    Args:
        ranks: Global ranks, in the order of their ranks inside the group; ``None`` for all.

    Returns:
        The group. On a rank that is not a member, calls with it raise ``ValueError``.

    Raises:
        SMDDPNotInitializedError: ``init_process_group()`` was not called.
        InvalidArgumentError: A rank does not exist or is named twice.
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
    """Reduce ``tensor`` over the ranks, in place; the result is bitwise the same on every rank.

    Args:
        tensor: Input and output; same shape and type on all ranks.
        op: The reduction; ``None`` means ``SUM``.
        group: ``None`` means ``group.WORLD``.
        async_op: Whether to return at once.

    Returns:
        A handle if ``async_op``, else ``None``.

    Raises:
        ValueError: ``op`` is not a reduction, or this rank is not a member of ``group``.
        MismatchError: Ranks call different operations, or with different shapes, types or reductions.
        PeerFailedError: A member has ended.
    """
    return _run(_ALL_REDUCE, async_op, tensor, core_name(op, ReduceOp.SUM), _id(group))


def reduce(
    tensor: torch.Tensor,
    dst: int = 0,
    op: ReduceOp | None = ReduceOp.SUM,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """Reduce ``tensor`` over the ranks; only rank ``dst`` gets the result.

    Args:
        tensor: Input, and on rank ``dst`` the output; same shape and type on all ranks. It is unchanged on other ranks.
        dst: Global rank that gets the result.
        op: The reduction; ``None`` means ``SUM``.
        group: ``None`` means ``group.WORLD``.
        async_op: Whether to return at once.

    Returns:
        A handle if ``async_op``, else ``None``.

    Raises:
        ValueError: ``op`` is not a reduction, or this rank or ``dst`` is not a member of ``group``.
    """
    return _run(_REDUCE, async_op, tensor, core_name(op, ReduceOp.SUM), _group_rank(group, dst, "dst"), _id(group))


def broadcast(
    tensor: torch.Tensor,
    src: int = 0,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """Broadcast the values of rank ``src`` to all ranks, in place.

    Args:
        tensor: Input on rank ``src``, output on the others; same shape and type on all ranks.
        src: Global rank.
        group: ``None`` means ``group.WORLD``.
        async_op: Whether to return at once.

    Returns:
        A handle if ``async_op``, else ``None``.

    Raises:
        ValueError: This rank or ``src`` is not a member of ``group``.
    """
    return _run(_BROADCAST, async_op, tensor, _group_rank(group, src, "src"), _id(group))


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """Gather the tensors of all ranks on every rank.

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
    """Gather the tensors of all ranks on every rank, as equal parts of one tensor.

    Args:
        output_tensor: Output; its dimension 0 holds the inputs of all ranks one after the other.
        input_tensor: This rank's input; same shape and type on all ranks.
        group: ``None`` means ``group.WORLD``.
        async_op: Whether to return at once.

    Returns:
        A handle if ``async_op``, else ``None``.
    """
    return _run(_ALL_GATHER_SINGLE, async_op, output_tensor, input_tensor, _id(group))


def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int = 0,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """Gather the tensors of all ranks on rank ``dst``.

    Args:
        tensor: This rank's input.
        gather_list: Outputs on rank ``dst``, as ``tensor_list`` of :func:`all_gather`; ``None`` on the others.
        dst: Global rank that gets the tensors.
        group: ``None`` means ``group.WORLD``.
        async_op: Whether to return at once.

    Returns:
        A handle if ``async_op``, else ``None``.
    """
    return _run(_GATHER, async_op, list(gather_list or ()), tensor, _group_rank(group, dst, "dst"), _id(group))


def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int = 0,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """Send one tensor of rank ``src`` to each rank.

    Args:
        tensor: Output of this rank.
        scatter_list: Inputs on rank ``src``: entry i becomes rank i's ``tensor``. ``None`` on the others.
        src: Global rank that has the inputs.
        group: ``None`` means ``group.WORLD``.
        async_op: Whether to return at once.

    Returns:
        A handle if ``async_op``, else ``None``.
    """
    return _run(_SCATTER, async_op, tensor, list(scatter_list or ()), _group_rank(group, src, "src"), _id(group))


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: ReduceOp | None = ReduceOp.SUM,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """Reduce a list of tensors over the ranks, and give rank i the result of entry i.

    Args:
        output: The reduction over the ranks of their ``input_list[i]``, where i is this rank.
        input_list: One tensor for each rank.
        op: The reduction; ``None`` means ``SUM``.
        group: ``None`` means ``group.WORLD``.
        async_op: Whether to return at once.

    Returns:
        A handle if ``async_op``, else ``None``.
    """
    return _run(_REDUCE_SCATTER, async_op, output, list(input_list), core_name(op, ReduceOp.SUM), _id(group))


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOp | None = ReduceOp.SUM,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """Reduce a tensor over the ranks, and give rank i the part i of the result.

    Args:
        output: Part of this rank; its dimension 0 is that of ``input`` divided by the number of ranks.
        input: Same shape and type on all ranks.
        op: The reduction; ``None`` means ``SUM``.
        group: ``None`` means ``group.WORLD``.
        async_op: Whether to return at once.

    Returns:
        A handle if ``async_op``, else ``None``.
    """
    return _run(_REDUCE_SCATTER_SINGLE, async_op, output, input, core_name(op, ReduceOp.SUM), _id(group))


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """Send one tensor to each rank, and receive one from each.

    Args:
        output_tensor_list: Outputs; entry i of rank j becomes entry j of rank i's inputs.
        input_tensor_list: Inputs; entry j goes to rank j.
        group: ``None`` means ``group.WORLD``.
        async_op: Whether to return at once.

    Returns:
        A handle if ``async_op``, else ``None``.
    """
    return _run(_ALL_TO_ALL, async_op, list(output_tensor_list), list(input_tensor_list), _id(group))


def all_to_all_single(
    output_t: torch.Tensor,
    input_t: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """Send part j of ``input_t`` to rank j, and receive the part of rank i at place i of ``output_t``.

    Args:
        output_t: The received parts, one after the other along dimension 0.
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
    """Wait until every rank of ``group`` has called it.

    Args:
        group: ``None`` means ``group.WORLD``.
        async_op: Whether to return at once.

    Returns:
        A handle if ``async_op``, which is complete when every rank has called; else ``None``.
    """
    return _run(_BARRIER, async_op, _id(group))


def send(tensor: torch.Tensor, dst: int, group: ProcessGroup | None = group.WORLD, tag: int = 0) -> None:
    """Send ``tensor`` to a rank that calls :func:`recv`. May wait until it does.

    Args:
        tensor: The tensor to send.
        dst: Global rank of the receiver.
        group: ``None`` means ``group.WORLD``.
        tag: Matches messages; the receiver names the same.

    Raises:
        ValueError: This rank or ``dst`` is not a member of ``group``.
        PeerFailedError: The receiver has ended.
    """
    _run(_SEND, False, tensor, _group_rank(group, dst, "dst"), tag, _id(group))


def recv(tensor: torch.Tensor, src: int, group: ProcessGroup | None = group.WORLD, tag: int = 0) -> int:
    """Receive ``tensor`` from a rank. Messages of one sender and tag arrive in order.

    Args:
        tensor: Output; shape and type of the sender's tensor.
        src: Global rank of the sender.
        group: ``None`` means ``group.WORLD``.
        tag: Matches messages; the sender names the same.

    Returns:
        ``src``.

    Raises:
        ValueError: This rank or ``src`` is not a member of ``group``.
        MismatchError: The message has another size.
        PeerFailedError: The sender has ended.
    """
    _run(_RECV, False, tensor, _group_rank(group, src, "src"), tag, _id(group))
    return src


def isend(tensor: torch.Tensor, dst: int, group: ProcessGroup | None = group.WORLD, tag: int = 0) -> Work:
    """Send ``tensor`` as :func:`send`, and return at once.

    Args:
        tensor: The tensor to send; do not write to it before the handle is complete.
        dst: Global rank of the receiver.
        group: ``None`` means ``group.WORLD``.
        tag: Matches messages; the receiver names the same.

    Returns:
        A handle.
    """
    return _start(_SEND, tensor, _group_rank(group, dst, "dst"), tag, _id(group))


def irecv(tensor: torch.Tensor, src: int, group: ProcessGroup | None = group.WORLD, tag: int = 0) -> Work:
    """Receive ``tensor`` as :func:`recv`, and return at once.

    Args:
        tensor: Output; do not read it before the handle is complete.
        src: Global rank of the sender.
        group: ``None`` means ``group.WORLD``.
        tag: Matches messages; the sender names the same.

    Returns:
        A handle.
    """
    return _start(_RECV, tensor, _group_rank(group, src, "src"), tag, _id(group))


def _forms(name: str) -> tuple[Any, Any]:
    """Look up the blocking and the asynchronous form of an operation.

    They are looked up once, because a look-up costs as much as a small collective.
    """
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
    # Not `with errors.translated(...)`: this costs nothing if there is no error.
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
    """Return the core's id of the group."""
    return 0 if _is_world(group) else _member_id(group)


def _members(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a group that this rank is in and that is not the world."""
    _member_id(group)
    ranks: tuple[int, ...] | None = group.ranks
    assert ranks is not None, "the group of a DistributedDataParallel has no list of ranks"
    return ranks


def _member_id(group: Any) -> int:
    """Return the core's id of a group that this rank is in and that is not the world."""
    if not isinstance(group, ProcessGroup):
        raise ValueError(f"{group!r} is not a group: expected `group.WORLD`, None, or what `new_group` returns")
    if group.id is None:
        raise ValueError(f"rank {_core.rank()} is not a member of {group}")
    return group.id


def _group_rank(group: ProcessGroup | None, rank: int, argument: str) -> int:
    """Return the rank inside ``group`` of a global rank."""
    if _is_world(group):
        return rank
    members = _members(group)
    if rank not in members:
        raise ValueError(f"`{argument}` is rank {rank}, which is not a member of {group}")
    return members.index(rank)
