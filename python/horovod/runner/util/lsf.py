"""Jobs of IBM's LSF: what it says of the job, and what the processors and GPUs of a host are. Hosts are taken to be like this one."""

from __future__ import annotations

import os

from horovod.runner.common.util import tiny_shell_exec


class LSFUtils:
    """What LSF tells, and this host."""

    @staticmethod
    def using_lsf() -> bool:
        """Whether this process is in such a job."""
        return "LSB_JOBID" in os.environ

    @staticmethod
    def get_compute_hosts() -> list[str]:
        """Hosts of the job, without the one where its script runs, if that is not the only one."""
        # Names and numbers of slots in turn.
        names = os.environ.get("LSB_MCPU_HOSTS", "").split()[::2]
        return names[1:] or names

    @staticmethod
    def get_num_gpus() -> int:
        """GPUs of a host."""
        listed, code = tiny_shell_exec.execute("nvidia-smi -L") or ("", 1)
        return sum(line.startswith("GPU ") for line in listed.splitlines()) if code == 0 else 0

    @staticmethod
    def get_num_processes() -> int:
        """Processes of a job with one for each GPU."""
        return len(LSFUtils.get_compute_hosts()) * LSFUtils.get_num_gpus()

    @staticmethod
    def get_num_cores() -> int:
        """Cores of a host."""
        return LSFUtils._processors("Core(s) per socket") * LSFUtils._processors("Socket(s)")

    @staticmethod
    def get_num_threads() -> int:
        """Threads of a core."""
        return LSFUtils._processors("Thread(s) per core")

    @staticmethod
    def _processors(what: str) -> int:
        text, code = tiny_shell_exec.execute("LC_ALL=C lscpu") or ("", 1)
        found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line) if code == 0 else {}
        if what not in found:
            raise RuntimeError(f"`lscpu` does not say `{what}`")
        return int(found[what])
