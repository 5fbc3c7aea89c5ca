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
        """Hosts of the job that compute: not one that only starts it."""
        return list(LSFUtils._allotted())

    @staticmethod
    def get_slots() -> dict[str, int]:
        """Processes that each host takes: one for each GPU, or without GPUs, as many as LSF gives it slots."""
        gpus = LSFUtils.get_num_gpus()
        return {host: gpus or slots for host, slots in LSFUtils._allotted().items()}

    @staticmethod
    def get_num_gpus() -> int:
        """GPUs of a host."""
        listed, code = tiny_shell_exec.execute("nvidia-smi -L") or ("", 1)
        return sum(line.startswith("GPU ") for line in listed.splitlines()) if code == 0 else 0

    @staticmethod
    def get_num_processes() -> int:
        """Processes of a job that takes all that its hosts have."""
        return sum(LSFUtils.get_slots().values())

    @staticmethod
    def get_num_cores() -> int:
        """Cores of a host."""
        return LSFUtils._processors("Core(s) per socket") * LSFUtils._processors("Socket(s)")

    @staticmethod
    def get_num_threads() -> int:
        """Threads of a core."""
        return LSFUtils._processors("Thread(s) per core")

    @staticmethod
    def _allotted() -> dict[str, int]:
        """Hosts that compute, and how many slots LSF gives the job on each."""
        # Names and numbers in turn.
        words = os.environ.get("LSB_MCPU_HOSTS", "").split()
        slots = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        first, *others = slots or [""]
        # Clusters with a node of its own for scripts give a job one slot there, ahead of those of the hosts that compute.
        if others and slots[first] == 1 and all(slots[other] > 1 for other in others):
            del slots[first]
        return slots

    @staticmethod
    def _processors(what: str) -> int:
        text, code = tiny_shell_exec.execute("LC_ALL=C lscpu") or ("", 1)
        found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line) if code == 0 else {}
        if what not in found:
            raise RuntimeError(f"`lscpu` does not say `{what}`")
        return int(found[what])
