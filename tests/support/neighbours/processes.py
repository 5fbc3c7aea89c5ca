"""Processes of a job on this machine, found by a variable that only they have, as a process may outlive its parent.

processes.having("TMPDIR", folder)      # {id: process}
processes.ranks(folder, script)         # {rank: id}
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

#: Where launchers tell a process its rank: torchrun and users, Open MPI, MPICH.
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


@dataclass(frozen=True)
class Process:
    """The words and the variables with which a process was started."""

    words: list[str]
    variables: dict[str, str]


def having(name: str, value: object) -> dict[int, Process]:
    """Returns the processes whose environment has this value of the variable, by process id; zombies are not among them."""
    found = {}
    for folder in Path("/proc").iterdir():
        # Others end meanwhile.
        with contextlib.suppress(OSError):
            if folder.name.isdigit():
                text = os.fsdecode((folder / "environ").read_bytes())
                variables = dict(each.partition("=")[::2] for each in text.split("\0"))
                if variables.get(name) == str(value):
                    words = os.fsdecode((folder / "cmdline").read_bytes()).rstrip("\0").split("\0")
                    found[int(folder.name)] = Process(words, variables)
    return found


def ranks(temporary: object, script: str) -> dict[int, int]:
    """Ids by rank of the processes of Python that train, in a job whose TMPDIR is `temporary`. Launchers have no rank."""
    found = {}
    for pid, each in having("TMPDIR", temporary).items():
        rank = next((each.variables[name] for name in _RANK if name in each.variables), None)
        if rank is not None and script in each.words and Path(each.words[0]).name.startswith("python"):
            found[int(rank)] = pid
    return found
