"""Transfers of tensors between the ranks of a pipeline.

The program determines the order of messages, so they have no header (PIPE-2). On devices, each direction of each pair
of ranks that exchanges tensors has its own communicator (a channel). NCCL runs the operations of a communicator in
order, so with one for both directions, two ranks that send to each other first would deadlock.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from smdistributed import _core
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.exceptions import SMPError
from smdistributed.modelparallel.torch.tracing.remote_tensor import TensorMeta

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.runtime.program_run import Action


class Transfers:
    """Sends and receives of one rank."""

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int], place: int, device: torch.device) -> None:
        self._group, self._members, self._place, self._device = group, list(members), place, device
        #: Handles of messages from CPU memory.
        self._pending_sends: deque[tuple[dist.Work, torch.Tensor]] = deque()
        #: The last message from a device to each partition.
        self._latest: dict[int, dist.Work] = {}
        self._channels: dict[tuple[int, int], dist.ProcessGroup] = {}
        #: A separate group for comparisons that run at the same time as other operations of the pipeline.
        self._comparison_group: dist.ProcessGroup | None = None

    def open(self, edges: Iterable[tuple[int, int]]) -> None:
        """Open channels in both directions between the pairs of ranks that exchange tensors.

        All ranks of the pipeline call it with the same pairs. Each channel is used once here, because the first use
        blocks its two ranks, which could deadlock with a third rank in a program.
        """
        if self._device.type != "cuda":
            return
        for source, target in sorted({(a, b) for a, b in edges if a != b} | {(b, a) for a, b in edges if a != b}):
            if self._place not in (source, target) or (source, target) in self._channels:
                continue
            members = [self._members[source], self._members[target]]
            channel = self._channels[source, target] = dist.new_group(members)
            number = torch.zeros(1, device=self._device)
            if self._place == source:
                dist.send(number, members[1], channel)
            else:
                dist.recv(number, members[0], channel)

    def close(self) -> None:
        """Remove the channels and the group of comparisons from the core, in an order that is equal on both ends."""
        groups = [*self._channels.values(), self._comparison_group]
        self._channels, self._comparison_group = {}, None
        for group in groups:
            if group is not None:
                assert group.id is not None, "this rank is a member"
                _core.remove_group(group.id)

    def max_posted_receives(self, messages: int) -> int:
        """Return how many receives may be posted ahead of their use in the program: none on devices.

        On a device, a receive is a kernel that runs until its message arrives. The first launch of another kernel may
        have to wait for it, while the message depends on that kernel.
        """
        return 0 if self._device.type == "cuda" else messages

    def _channel(self, source: int, target: int, device: torch.device) -> dist.ProcessGroup:
        return self._channels[source, target] if device.type == "cuda" else self._group

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send ``tensor`` to the partition ``to``; return at once."""
        tensor = tensor.detach().contiguous()
        if tensor.numel() == 0:
            return
        work = dist.isend(tensor, self._members[to], self._channel(self._place, to, tensor.device))
        if tensor.is_cuda:
            # Messages of a channel are sent in order, so the handle of the last one is sufficient. Dropping a handle
            # lets the allocator reuse the memory once the device is done. Keeping handles until the host sees that
            # would need more memory, the farther the host is ahead.
            self._latest[to] = work
            return
        self._pending_sends.append((work, tensor))
        while self._pending_sends and self._pending_sends[0][0].is_completed():
            self._pending_sends.popleft()[0].wait()

    def receive(self, meta: TensorMeta, source: int) -> PendingReceive:
        """Receive a tensor from the partition ``source``; return at once."""
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device=meta.device)
        if tensor.numel() == 0:
            return PendingReceive(tensor, None)
        channel = self._channel(source, self._place, tensor.device)
        return PendingReceive(tensor, dist.irecv(tensor, self._members[source], channel))

    def finish(self) -> None:
        """Wait until all messages are sent; on a device, make the current stream wait for that."""
        while self._latest:
            self._latest.popitem()[1].wait()
        while self._pending_sends:
            self._pending_sends.popleft()[0].wait()

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Broadcast ``tensor`` of ``source`` to all ranks of the pipeline, in place."""
        if tensor.numel():
            dist.broadcast(tensor, self._members[source], self._group)

    def programs_of_first_rank(self, plan: Callable[[int], list[Action]]) -> list[list[Action]]:
        """Return the programs of all ranks of the pipeline, as its first rank plans them.

        Args:
            plan: Returns a rank's program.

        Raises:
            SMPError: The first rank cannot plan. Its own error is that of ``plan``, as on ranks with the same costs.
        """
        text = ""
        ranks = range(len(self._members))
        if self._place == 0:
            try:
                text = json.dumps([plan(rank) for rank in ranks])
            except Exception:
                # The other ranks wait for the programs.
                self._broadcast_text("")
                raise
        text = self._broadcast_text(text)
        if not text:
            plan(self._place)
            raise SMPError("the first rank of the pipeline cannot plan this step: see its error")
        return [[(kind, *numbers) for kind, *numbers in program] for program in json.loads(text)]

    def _broadcast_text(self, text: str) -> str:
        data = text.encode()
        sizes = self.compare([len(data)])
        content = torch.zeros(sizes[0][0], dtype=torch.uint8, device="cpu")
        if self._place == 0 and data:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.broadcast(content, 0)
        return bytes(content.numpy()).decode()

    def compare(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all ranks of the pipeline, in their order."""
        mine = torch.tensor(numbers, device="cpu")
        gathered = torch.empty(len(self._members) * len(numbers), dtype=torch.int64, device="cpu")
        dist.all_gather_into_tensor(gathered, mine, self._group)
        return gathered.view(len(self._members), -1).tolist()

    def begin_comparison(self, numbers: Sequence[int]) -> Comparison:
        """Begin :meth:`compare` on a group of its own, in parallel with other transfers; return at once."""
        if self._comparison_group is None:
            self._comparison_group = dist.new_group(self._members)
        mine = torch.tensor(numbers, device="cpu")
        gathered = torch.empty(len(self._members) * len(numbers), dtype=torch.int64, device="cpu")
        work = dist.all_gather_into_tensor(gathered, mine, self._comparison_group, async_op=True)
        assert work is not None
        return Comparison(mine, gathered, len(self._members), work)


class Comparison:
    """A running exchange of numbers between all ranks of a pipeline."""

    __slots__ = ("_gathered", "_mine", "_ranks", "_work")

    def __init__(self, mine: torch.Tensor, gathered: torch.Tensor, ranks: int, work: dist.Work) -> None:
        self._mine, self._gathered, self._ranks, self._work = mine, gathered, ranks, work

    def wait(self) -> list[list[int]]:
        """Return the numbers, in the order of the ranks."""
        self._work.wait()
        return self._gathered.view(self._ranks, -1).tolist()


class PendingReceive:
    """A tensor that is being received."""

    __slots__ = ("_tensor", "_work")

    def __init__(self, tensor: torch.Tensor, work: dist.Work | None) -> None:
        self._tensor, self._work = tensor, work

    def wait(self) -> torch.Tensor:
        """Return the tensor when it has arrived."""
        if self._work is not None:
            self._work.wait()
        return self._tensor
