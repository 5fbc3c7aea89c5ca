"""Jobs of IBM's LSF."""

from __future__ import annotations

import os


class LSFUtils:
    """What LSF tells."""

    @staticmethod
    def using_lsf() -> bool:
        """Whether this process is in such a job."""
        return "LSB_JOBID" in os.environ
