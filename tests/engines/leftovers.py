"""Files and processes that a job leaves behind.

before = shared_memory()
... a job whose TMPDIR is `folder` ...
assert processes_left(folder) == {}
assert files_left(folder, before) == []
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

from support.neighbours import processes


def shared_memory() -> set[str]:
    """Names of the files in /dev/shm."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def shared_memory_left(before: set[str]) -> list[str]:
    """Files in /dev/shm that are not in `before` and that no process has mapped.

    Call it when no process of the job is left: a file in use is another program's.
    """
    if shared_memory() - before:
        # Another program's file may be there for a moment. A file that the job left stays.
        time.sleep(1.0)
    return sorted(f"/dev/shm/{name}" for name in shared_memory() - before - _mapped())


def files_left(folder: Path, before: set[str]) -> list[str]:
    """Files below `folder`, and those of `shared_memory_left`. PyTorch leaves empty folders, which do not count."""
    files = [str(path) for path in folder.rglob("*") if not path.is_dir()]
    return sorted([*files, *shared_memory_left(before)])


def _mapped() -> set[str]:
    """Names of the files in /dev/shm that processes have mapped."""
    names: set[str] = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        # Processes end meanwhile.
        with contextlib.suppress(OSError):
            names.update(re.findall(r"/dev/shm/(\S+)$", path.read_text(errors="replace"), re.MULTILINE))
    return names


def processes_left(folder: Path) -> dict[int, processes.Process]:
    """Processes whose TMPDIR is `folder`, by their ids."""
    # The kernel needs a moment to end a process that was killed.
    deadline = time.monotonic() + 1.0
    while (left := processes.having("TMPDIR", folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
