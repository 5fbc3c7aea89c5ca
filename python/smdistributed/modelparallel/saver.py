"""Saves in the core's checkpoint format.

All ranks begin and end a save together. A failure on one rank raises the same error on all of them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.modelparallel import shares
from smdistributed.modelparallel.exceptions import CLASSES, SMPCheckpointError
from smdistributed.modelparallel.failures import raise_on_all_ranks

_log = logging.getLogger("smdistributed.modelparallel")
_T = TypeVar("_T")
_CLASSES = {**CLASSES, "io": SMPCheckpointError, "invalid_argument": SMPCheckpointError}


class Content(NamedTuple):
    """The content that a rank saves.

    Attributes:
        shard_slices: Slices of tensors, see ``shares.shard_slices``.
        layout: Layout of the ranks, as JSON; that of rank 0 is saved.
        text: Content beside the tensors, as JSON; that of rank 0 is saved.
        owner: Keeps the memory of the tensors alive.
    """

    shard_slices: Sequence[shares.ShardSlice]
    layout: str
    text: str
    owner: Any


class Saver:
    """The core's saver for one directory of checkpoints. All ranks create it and call its methods together.

    Args:
        directory: The directory, on a file system that all ranks share.
        rank: This rank.
        world: Number of ranks.
        gather: Returns what all ranks pass to it, in rank order.
        threads: Number of files that this rank writes in parallel.
        durable: Whether a checkpoint is synced to the disk before it counts as complete.
        keep: How many checkpoints are kept; ``None`` for all.
        timeout_seconds: How long a rank waits for others.
    """

    def __init__(
        self,
        directory: str,
        rank: int,
        world: int,
        gather: Callable[[Any], list[Any]],
        threads: int,
        durable: bool,
        keep: int | None,
        timeout_seconds: float,
    ) -> None:
        self._directory, self._rank, self._gather = directory, rank, gather

        def prepare() -> Any:
            if rank == 0:
                _core.checkpoint_prepare(directory, durable)
            return _core.CheckpointSaver(directory, rank, world, threads, durable, keep, timeout_seconds)

        self._saver = self._on_all_ranks(prepare, f"cannot write checkpoints to `{directory}`")

    def _on_all_ranks(self, do: Callable[[], _T], what: str, same: Callable[[_T], Any] | None = None) -> _T:
        def translated() -> _T:
            with errors.translated(_CLASSES):
                return do()

        with errors.translated(CLASSES):
            return raise_on_all_ranks(translated, self._rank, self._gather, what, same)

    def save(
        self, tag: str, step: int, prepare: Callable[[], Any], make: Callable[[Any], Content], asynchronous: bool
    ) -> None:
        """Save a checkpoint; returns when it is complete, or with ``asynchronous``, when the state has been copied.

        Args:
            tag: The checkpoint's name, the same on all ranks.
            step: The number of the training step, the same on all ranks.
            prepare: The part of the work that needs no other rank.
            make: Returns what this rank saves, from the result of `prepare`. It is called once that has succeeded on
                all ranks, so it may communicate.
            asynchronous: Whether files are written in the background.

        Raises:
            SMPCheckpointError: The checkpoint could not be written, here or on another rank; or the save before it
                could not.
        """
        self.wait()
        what = f"checkpoint {tag!r} could not be written to `{self._directory}`"
        number = shares.next_save_id()

        def begin() -> Any:
            prepared = prepare()
            _core.checkpoint_check_tag(tag)
            if self._rank == 0:
                self._saver.open(tag, number)
            return prepared

        def join() -> Content:
            content = make(prepared)
            if self._rank > 0:
                self._saver.open(tag, number)
            return content

        try:
            prepared = self._on_all_ranks(begin, what, lambda _: {"tag": tag, "step": step, "attempt": number})
            content = self._on_all_ranks(join, what)
            self._on_all_ranks(
                lambda: self._saver.save(
                    tag, step, number, content.layout, content.text, content.shard_slices, asynchronous, content.owner
                ),
                what,
            )
        except SMPCheckpointError:
            # Another rank has failed, so the background writer of this rank, if there is one, ends with an error that
            # is known already.
            with contextlib.suppress(errors.SmdistributedError):
                self._saver.wait()
            self._discard()
            raise

    def wait(self) -> None:
        """Wait for the running save.

        Raises:
            SMPCheckpointError: The checkpoint could not be written, here or on another rank.
        """
        try:
            self._on_all_ranks(self._saver.wait, f"a checkpoint could not be written to `{self._directory}`")
        except SMPCheckpointError:
            self._discard()
            raise

    def _discard(self) -> None:
        """Remove the files of a failed save.

        All ranks call it when none of them writes any more. If it fails, the next save removes the files.
        """
        with errors.translated(CLASSES):
            self._gather(None)
        try:
            self._saver.discard()
        except errors.SmdistributedError as error:
            _log.warning("cannot remove the files that a failed save has left in `%s`: %s", self._directory, error)
