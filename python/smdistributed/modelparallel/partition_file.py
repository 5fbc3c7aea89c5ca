"""Logs and stores a partition: paths of modules or layers, and their partitions."""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.modelparallel.exceptions import CLASSES

_log = logging.getLogger("smdistributed.modelparallel")


def log_table(table: str) -> None:
    """Log a partition as a table. Without configured logging, the first rank prints it."""
    text = f"Partition assignments:\n{table.rstrip()}"
    if _log.hasHandlers():
        _log.info("%s", text)
    elif not _core.is_initialized() or _core.rank() == 0:
        print(text, file=sys.stderr, flush=True)


def write(file: str, partitions: Mapping[str, int]) -> None:
    """Write a partition file atomically. Several ranks may write at once, also containers with equal process ids."""
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _core.partition_to_json(dict(partitions))
    whole = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with whole.open("x") as written:
            written.write(text)
        whole.replace(path)
    except BaseException:
        whole.unlink(missing_ok=True)
        raise


def read(file: str, partitions: int) -> dict[str, int]:
    """Read a partition file."""
    with errors.translated(CLASSES):
        return dict(_core.partition_from_json(file, Path(file).read_text(), partitions))
