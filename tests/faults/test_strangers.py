"""Processes outside the job try to join it. They know all variables that the launcher sets, but not the job's
secret.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import hosts, more, run_ranks, start_ranks
from support.forks import Forked
from support.hosts import ByHand, Hosts, address

NOBODY_USER = 65534
INIT_TIMEOUT_SECONDS = "3"

#: Script: joins with the variables of rank 1, then connects to each named socket and asks for the secret. It runs as
#: user `argv[1]`.
INTRUDER_SCRIPT = """
import os, socket, sys
from smdistributed import _core

if sys.argv[1] != "0":
    user = int(sys.argv[1])
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
try:
    _core.init()
except Exception as error:
    print(type(error).__name__, error)
else:
    print("joined")
for name in sys.argv[2:]:
    asking = socket.socket(socket.AF_UNIX)
    asking.settimeout(5)
    asking.connect("\\0" + name)
    print("was given", asking.recv(4096))
os._exit(0)
"""


def join_late(folder):
    """Joins the job. Rank 1 first waits for the file `go`, so that an intruder can try to take its place."""
    from smdistributed import _core
    from support.rank_main import announce

    if os.environ["RANK"] == "1":
        announce("waiting")
        deadline = time.monotonic() + 40
        while not Path(folder, "go").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    else:
        announce("joining")
    _core.init()
    _core.barrier()
    return _core.rank(), _core.is_authenticated()


def _sockets(pid):
    """Names of the abstract sockets that a process listens on."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
        except FileNotFoundError:
            continue
    lines = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return [line[7][1:] for line in lines if len(line) > 7 and line[6] in inodes and line[7].startswith("@opensmd/")]


def _eventually(find):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = find()
        if found:
            return found
        time.sleep(0.05)
    return find()


def _environment(pid):
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


def _try_to_join(variables, *arguments, on=()):
    command = [*on, sys.executable, "-c", INTRUDER_SCRIPT, *arguments]
    variables = variables | {"SMD_INIT_TIMEOUT_SECONDS": INIT_TIMEOUT_SECONDS}
    run = subprocess.run(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start processes of another user")
@pytest.mark.parametrize("launcher", ["raw", more("torchrun")])
def test_another_user_of_the_host_does_not_get_the_secret(launcher, tmp_path):
    with start_ranks(join_late, 2, str(tmp_path), launcher=launcher, timeout=110) as job:
        job.wait_for("joining")
        job.wait_for("waiting")
        time.sleep(1)
        variables = _environment(job.pid(1))
        output = _try_to_join(variables, str(NOBODY_USER))
        assert "joined" not in output, output
        assert "this user on this host (no server listens) timed out" in output, output
        names = _eventually(lambda: _sockets(job.pid(0)))
        assert names, "rank 0 serves no socket"
        # An intruder that reads /proc/net/unix finds the socket, and connects to it as another user.
        secret_reply = _try_to_join(variables, str(NOBODY_USER), names[0])
        (tmp_path / "go").touch()
        outcome = job.wait()
    assert outcome.exit_code == 0, outcome.describe()
    assert outcome.values == [(0, True), (1, True)]
    assert "was given b''" in secret_reply, secret_reply
    assert re.search(r"refused process \d+ of user 65534, which requested the secret", outcome.output), (
        outcome.describe()
    )


@dataclass(frozen=True)
class _OnHosts(ByHand):
    """Starts ranks by hand on the given hosts, the same number on each."""

    places: tuple[int, ...] = (0,)

    def starts(self, n, program):
        local = n // len(self.places)
        common = {"WORLD_SIZE": str(n), "MASTER_ADDR": address(0), "MASTER_PORT": "29500"}
        common["LOCAL_WORLD_SIZE"] = str(local)
        return [
            (
                [*self.hosts.on(self.places[rank // local]), sys.executable, *program],
                common | {"RANK": str(rank), "LOCAL_RANK": str(rank % local)},
            )
            for rank in range(n)
        ]


needs_network = pytest.mark.skipif(hosts.missing_network() is not None, reason=str(hosts.missing_network()))


@needs_network
@pytest.mark.parametrize("case", ["one host", "two hosts with a secret"])
def test_another_host_without_the_secret_does_not_join(case, tmp_path):
    spread = case != "one host"
    with Hosts(3) as three:
        launcher = _OnHosts(three, places=(0, 1) if spread else (0,))
        secret = {"SMD_SECRET": "of this job"} if spread else {}
        with start_ranks(join_late, 2, str(tmp_path), launcher=launcher, env=secret) as job:
            job.wait_for("joining")
            job.wait_for("waiting")
            time.sleep(1)
            variables = _environment(job.pid(1)) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            variables.pop("SMD_SECRET", None)
            output = _try_to_join(variables, "0", on=three.on(2))
            (tmp_path / "go").touch()
            outcome = job.wait()
    assert "joined" not in output, output
    assert "init(): finding the rendezvous" in output, output
    assert "to wait longer, set `SMD_INIT_TIMEOUT_SECONDS`" in output, output
    assert "`MASTER_ADDR` must be an address of its host" in output, output
    assert ("does not accept this job's secret" in output) is spread, output
    assert outcome.exit_code == 0, outcome.describe()
    assert outcome.values == [(0, True), (1, True)]
    assert "open to the network" not in outcome.output, outcome.describe()


@needs_network
def test_a_job_on_several_hosts_without_a_secret_warns_that_it_is_open(tmp_path):
    (tmp_path / "go").touch()
    with Hosts(2) as two, start_ranks(join_late, 2, str(tmp_path), launcher=_OnHosts(two, places=(0, 1))) as job:
        outcome = job.wait()
    assert outcome.values == [(0, False), (1, False)], outcome.describe()
    assert outcome.output.count("this job is open to the network") == 1, outcome.describe()
    assert "Set `SMD_SECRET` to the same random text for all ranks" in outcome.output


def exchange_objects(evidence):
    """Rank 1 sends an object whose unpickling would run a command; returns the errors of this rank."""
    import pickle

    import smdistributed.modelparallel.torch as smp

    class Command:
        def __reduce__(self):
            return os.system, (f"touch {evidence}",)

    smp.init({})
    found = []
    for kind in ("allgather", "broadcast"):
        try:
            if kind == "allgather":
                smp.allgather(Command() if smp.rank() == 1 else "fine")
            elif smp.rank() == 1:
                smp.broadcast(Command())
            else:
                smp.recv_from(1)
        except pickle.UnpicklingError as error:
            found.append(str(error))
    # A rejected object does not end the job.
    assert smp.allgather(smp.rank()) == [0, 1]
    return found


def test_objects_of_other_ranks_run_no_code(tmp_path):
    evidence = tmp_path / "evidence"
    first, second = run_ranks(exchange_objects, 2, str(evidence), launcher=Forked("torch"))
    assert not evidence.exists()
    assert len(first) == 2
    assert len(second) == 1, "the source of a broadcast does not unpickle its own object"
    for text in first:
        assert text.startswith("rank 1 sent an object of `posix.system`, which is not unpickled: it is not a class"), (
            text
        )
        assert "SMD_SAFE_GLOBALS=posix.system" in text
