"""Jobs of IBM's LSF: hosts of the job, and processors and GPUs of a host.

All hosts are assumed to be like this one.
"""

from __future__ import annotations

import os

from horovod.runner.common.util import tiny_shell_exec


class LSFUtils:
    """Information of LSF and about this host."""

    @staticmethod
    def using_lsf() -> bool:
        """Return whether this process is in a job of LSF.

        Returns:
            ``True`` if this process is in a job of LSF.
        """
        return "LSB_JOBID" in os.environ

    @staticmethod
    def get_compute_hosts() -> list[str]:
        """Return the hosts of the job that compute, without a host that only starts the job.

        Returns:
            Their names.
        """
        return list(LSFUtils._allotted())

    @staticmethod
    def get_slots() -> dict[str, int]:
        """Return the number of processes of each host.

        Returns:
            One for each GPU by name of the host; without GPUs, as many as LSF assigns.
        """
        gpus = LSFUtils.get_num_gpus()
        return {host: gpus or slots for host, slots in LSFUtils._allotted().items()}

    @staticmethod
    def get_num_gpus() -> int:
        """Return the number of GPUs of a host.

        Returns:
            The number.
        """
        listed, code = tiny_shell_exec.execute("nvidia-smi -L") or ("", 1)
        return sum(line.startswith("GPU ") for line in listed.splitlines()) if code == 0 else 0

    @staticmethod
    def get_num_processes() -> int:
        """Return the number of processes of a job that uses all slots of its hosts.

        Returns:
            The number.
        """
        return sum(LSFUtils.get_slots().values())

    @staticmethod
    def get_num_cores() -> int:
        """Return the number of cores of a host.

        Returns:
            The number.
        """
        return LSFUtils._processors("Core(s) per socket") * LSFUtils._processors("Socket(s)")

    @staticmethod
    def get_num_threads() -> int:
        """Return the number of threads of a core.

        Returns:
            The number.
        """
        return LSFUtils._processors("Thread(s) per core")

    @staticmethod
    def _allotted() -> dict[str, int]:
        """Return the hosts that compute, with the number of slots that LSF gives the job on each."""
        # Names and numbers alternate.
        words = os.environ.get("LSB_MCPU_HOSTS", "").split()
        slots = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        first, *others = slots or [""]
        # Clusters with a separate node for scripts give a job one slot on it, which comes before those of the hosts
        # that compute.
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
