"""Commits that outlive the processes: torchrun's agent, unlike horovodrun, starts all of them anew when one has failed.

The first process of each host writes each commit to a file of the user's cache folder. After a restart the ranks take the newest of
these files, whichever host has it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovod.common import basics


def _file() -> Path | None:
    """Where; nowhere if nobody would start the processes anew."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None or os.environ.get("SMD_WORKER") or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0:
        return None
    folder = Path(os.environ.get("SMD_CACHE_DIR") or Path.home() / ".cache" / "opensmd") / "elastic"
    # Port and address tell jobs apart that were given no name.
    name = (
        f"{run_id}-{os.environ.get('MASTER_ADDR', '')}-{os.environ.get('MASTER_PORT', '')}"
        if run_id == "none"
        else run_id
    )
    return folder / re.sub(r"[^\w.-]", "_", name)


class Kept:
    """The commits of a job; does nothing where they need not be kept."""

    def __init__(self) -> None:
        self._path = _file()
        self._writes = os.environ.get("LOCAL_RANK") == "0"
        self._number = 0

    def write(self, saved: Callable[[], Any]) -> None:
        """Keeps a commit.

        Args:
            saved: Gives what :meth:`read` gives back.
        """
        if self._path is None:
            return
        self._number += 1
        if not self._writes:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        partial.write_bytes(pickle.dumps((self._number, saved())))
        partial.rename(self._path)

    def read(self, bcast_object: Callable[..., Any]) -> Any:
        """The newest commit before the processes were started anew, on all ranks; ``None`` if there is none.

        Args:
            bcast_object: Gives all ranks an object of one.
        """
        if self._path is None:
            return None
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
            # What is there is of another job.
            self.forget()
            return None
        own: tuple[int, Any] = (0, None)
        with contextlib.suppress(FileNotFoundError):
            own = pickle.loads(self._path.read_bytes())
        core = basics.shared()
        numbers = [bcast_object(own[0], root_rank=rank) for rank in range(core.size())]
        self._number = max(numbers)
        if self._number == 0:
            return None
        return bcast_object(own[1], root_rank=numbers.index(self._number))

    def forget(self) -> None:
        """The training is done."""
        if self._path is not None and self._writes:
            self._path.unlink(missing_ok=True)
