"""Variables of the environment: a process's rank, and which variables other hosts receive."""

from __future__ import annotations

import os
import re

LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]

#: Variables that are not passed on to other hosts.
IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD", ".*CUDA_VISIBLE_DEVICES", "_HOROVOD_SECRET_KEY"}


def is_exportable(v: str) -> bool:
    """Return whether a variable is passed on to other hosts.

    Args:
        v: Its name.

    Returns:
        ``True`` if the variable is passed on.
    """
    return not any(re.fullmatch(pattern, v) for pattern in IGNORE_REGEXES)


def get_env_rank_and_size() -> tuple[int, int]:
    """Return rank and size as the launcher's variables say them.

    Returns:
        Rank and size; 0 and 1 without a launcher.

    Raises:
        RuntimeError: Only one of both variables is set.
    """
    variable_names = [
        ("HOROVOD_RANK", "HOROVOD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
    ]
    for rank_name, size_name in variable_names:
        rank, size = os.environ.get(rank_name), os.environ.get(size_name)
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            raise RuntimeError(
                f"Could not determine process rank and size: only one of {rank_name} and {size_name} is in the "
                "environment"
            )
    # torchrun sets both. Other programs use such names as well, so one alone proves nothing.
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1
