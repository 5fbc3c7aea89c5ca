"""Jobs under ``jsrun`` of IBM's LSF: not available."""

from __future__ import annotations

import shutil
from typing import Any


def is_jsrun_installed() -> bool:
    """Whether there is a ``jsrun``."""
    return shutil.which("jsrun") is not None


def js_run(settings: Any, nics: Any, env: dict[str, str], command: Any, stdout: Any = None, stderr: Any = None) -> None:
    """Would start a job.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError("jsrun is not available here: start the job through `mpirun`, or with `--gloo`")
