"""Commits in files, for launchers that restart all processes after a failure, as torchrun does.

The first process of each host writes each commit to a file in the user's cache folder. Before training, all ranks load
the newest of these files of all hosts. A file begins with the id of the agent that started its writer, so that files of
other jobs are ignored.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovod.common import basics
from smdistributed import _core


def _file() -> Path | None:
    """Return the file for states of this job; `None` if no launcher would restart the processes."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None or os.environ.get("SMD_WORKER") or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0:
        return None
    # Only this user and root may write to it, because its files are unpickled.
    folder, warning = _core.cache_folder("elastic")
    if warning is not None:
        print(f"horovod: {warning}", file=sys.stderr, flush=True)
    # For jobs without an id: port and address identify the job.
    name = (
        f"{run_id}-{os.environ.get('MASTER_ADDR', '')}-{os.environ.get('MASTER_PORT', '')}"
        if run_id == "none"
        else run_id
    )
    return folder / re.sub(r"[^\w.-]", "_", name)


def _agent() -> bytes:
    """Return an id of the process that starts the ranks of this host and outlives them.

    It is the nearest ancestor that is not a part of a rank.
    """
    pid = os.getppid()
    with contextlib.suppress(OSError):
        while b"\0TORCHELASTIC_RESTART_COUNT=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(_stat(pid)[1])
    # Process ids are reused, so the start time is added.
    return f"{pid} {_stat(pid)[19]}\n".encode()


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` after the process's name, which may contain any character."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class CommitFiles:
    """The commits of a job; without effect if no launcher would restart the processes."""

    def __init__(self) -> None:
        self._path = _file()
        self._agent = b"" if self._path is None else _agent()
        self._writes = os.environ.get("LOCAL_RANK") == "0"
        self._number = 0

    def write(self, saved: Callable[[], Any]) -> None:
        """Write a commit.

        Args:
            saved: Returns the state that :meth:`read` returns.
        """
        if self._path is None:
            return
        self._number += 1
        if not self._writes:
            return
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        partial.write_bytes(self._agent + pickle.dumps((self._number, saved())))
        partial.rename(self._path)

    def read(self, bcast_object: Callable[..., Any]) -> Any:
        """Return the newest commit from before the restart, on all ranks.

        Args:
            bcast_object: Sends an object of one rank to all ranks.

        Returns:
            The state, or ``None`` if there is no commit.
        """
        if self._path is None:
            return None
        # All ranks take part, even without a file: other hosts may have newer ones, or none.
        own: tuple[int, Any] = (0, None)
        if self._writes:
            with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
                why = _core.untrusted(self._path)
                if why is not None:
                    print(f"horovod: commits from before the restart are not used: {why}", file=sys.stderr, flush=True)
                elif file.readline() == self._agent:
                    own = pickle.load(file)
        core = basics.shared()
        numbers = [bcast_object(own[0], root_rank=rank) for rank in range(core.size())]
        self._number = max(numbers)
        if self._number == 0:
            return None
        return bcast_object(own[1], root_rank=numbers.index(self._number))

    def remove(self) -> None:
        """Remove the commits when the training is done."""
        if self._path is not None and self._writes:
            self._path.unlink(missing_ok=True)
