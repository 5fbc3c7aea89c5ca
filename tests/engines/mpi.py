"""The `mpirun` of each MPI that tests start jobs with: Debian's Open MPI 4 and MPICH 4, and Open MPI 5 and MPICH 5 of PyPI.

MPIS["mpich"].command(2)            # starts two ranks of the Python file that is appended to it
MPIS["mpich"].on_hosts(hosts, 2)    # one on each network namespace
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support import hosts
from support.launchers import clean_environment

ROOT = Path(__file__).resolve().parents[2]
#: Variables of a job that Open MPI passes to other hosts.
_VARIABLES = ("MPICC", "PYTHONPATH", "SMD_LOG", "OMP_NUM_THREADS")
_AS_ROOT = ["--allow-run-as-root"] if os.getuid() == 0 else []


@dataclass(frozen=True)
class Mpi:
    """An MPI. `folder` is where `make test-engines` installs it, None for that of the system, whose tools end in `suffix`."""

    family: str
    folder: Path | None = None
    suffix: str = ""

    def tool(self, name: str) -> str | None:
        """Path of `mpirun` or `mpicc`."""
        return shutil.which(f"{name}{self.suffix}", path=str(self.folder / "bin") if self.folder else None)

    def missing(self) -> str | None:
        """Why it cannot be used here; None if it can."""
        package = "mpich and libmpich-dev" if self.family == "mpich" else "openmpi-bin"
        where = f"package {package}" if self.folder is None else "`make test-engines` installs it"
        return None if self.tool("mpirun") and self.tool("mpicc") else f"this MPI is not installed ({where})"

    def environment(self, temporary: Path) -> dict[str, str]:
        """The variables of a job, all of whose temporary files are to lie in a folder."""
        own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(temporary), "SMD_LOG": "info"}
        return {**clean_environment(), **own, "MPICC": str(self.tool("mpicc")), "PYTHONPATH": str(ROOT / "python")}

    def command(self, n: int, options: Sequence[str] = ()) -> list[str]:
        """What starts `n` ranks on this host."""
        return [str(self.tool("mpirun")), *self._placed(), *options, "-n", str(n), sys.executable]

    def survival(self) -> list[str]:
        """Options with which ranks go on when another one is killed. MPICH ends those of the same host even so."""
        recovery = {
            "openmpi4": ["--enable-recovery"],
            "openmpi5": ["--runtime-options", "recoverable,continuous"],
            "mpich": ["-disable-auto-cleanup"],
        }
        return recovery[self.family]

    def on_hosts(
        self, two: hosts.Hosts, n: int, variables: Sequence[str] = (), options: Sequence[str] = ()
    ) -> list[str]:
        """What starts `n` ranks on network namespaces, the same number on each. Ranks get the variables of a job and `variables`."""
        slots = n // two.count
        names = [hosts.address(host) for host in range(two.count)]
        network = f"{names[0].rpartition('.')[0]}.0/24"
        passed = [word for name in (*_VARIABLES, *variables) for word in ("-x", name)]
        btl = ["--mca", "btl_tcp_if_include", network]
        shell = two.remote_shell()
        # The settings of the launcher itself.
        settings = {
            "openmpi4": {"plm_rsh_agent": shell, "orte_keep_fqdn_hostnames": "1", "oob_tcp_if_include": network},
            "openmpi5": {"plm_ssh_agent": shell, "prte_keep_fqdn_hostnames": "1", "prte_if_include": network},
        }
        if self.family == "mpich":
            words = ["-launcher", "ssh", "-launcher-exec", shell, "-iface", "eth0"]
        else:
            kind = "--mca" if self.family == "openmpi4" else "--prtemca"
            own = [word for name, value in settings[self.family].items() for word in (kind, name, value)]
            words = [*own, *btl, *passed]
        places = ["-hosts" if self.family == "mpich" else "--host", ",".join(f"{name}:{slots}" for name in names)]
        return [
            *two.on(0),
            str(self.tool("mpirun")),
            *self._placed(),
            *options,
            *places,
            *words,
            "-n",
            str(n),
            sys.executable,
        ]

    def _placed(self) -> list[str]:
        return [] if self.family == "mpich" else [*_AS_ROOT, "--oversubscribe", "--bind-to", "none"]


MPIS = {
    "openmpi4": Mpi("openmpi4"),
    "openmpi5": Mpi("openmpi5", ROOT / "build" / "openmpi"),
    "mpich4": Mpi("mpich", suffix=".mpich"),
    "mpich": Mpi("mpich", ROOT / "build" / "mpich"),
}
