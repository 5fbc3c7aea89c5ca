"""Hosts join, leave and disappear during elastic training: every sample is seen, and all ranks end in the same
state.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

sys.path.insert(0, str(Path(__file__).parent))

import elastic

from support import hosts

pytestmark = [
    pytest.mark.skipif(hosts.missing_network() is not None, reason=hosts.missing_network() or ""),
    pytest.mark.timeout(240),
]

#: Silence after which a host counts as gone, in seconds.
SILENCE_SECONDS = 3
#: Loss of an undisturbed job, near the noise of the targets.
LOSS = 0.01


@contextlib.contextmanager
def training(folder, network, slots):
    """Starts `horovodrun` on the first host, for the given number of slots on each host; yields the job, then waits for
    its end and checks its result.
    """
    listed = {hosts.address(host): count for host, count in slots.items()}
    variables = {
        **network.with_ssh(),
        "SMD_PEER_TIMEOUT_SECONDS": str(SILENCE_SECONDS),
        # `horovodrun` keeps results of its network tests in the home directory.
        "HOME": str(folder),
        "SMD_CACHE_DIR": os.environ.get("SMD_CACHE_DIR", str(Path.home() / ".cache" / "opensmd")),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    job = elastic.Job(folder, listed, 0.1, network.on(0), variables)
    try:
        job.wait_for(lambda: job.runs_on(job.hosts), "the first session began")
        yield job
        (folder / "finish").touch()
        assert job.process.wait(elastic.LONGEST_RUN) == 0
        elastic.check(folder, [len(members) for members in job.sessions()], LOSS)
    except BaseException:
        print((folder / "output").read_text()[-8000:])
        raise
    finally:
        job.process.kill()
        job.process.wait()


def change_hosts(job, *, add=(), remove=()):
    """Changes the hosts that the discovery script lists, and waits until the job runs on them."""
    for host in remove:
        job.hosts.pop(hosts.address(host))
    for host in add:
        job.hosts[hosts.address(host)] = 1
    job.announce()
    job.wait_for(lambda: job.runs_on(job.hosts), f"the hosts became {job.hosts}")


def test_a_host_joins_and_another_one_leaves(tmp_path):
    with hosts.Hosts(3) as network, training(tmp_path, network, {0: 1, 1: 1}) as job:
        change_hosts(job, add=[2])
        change_hosts(job, remove=[1])
        change_hosts(job, add=[1])
        sessions = job.sessions()
    assert [len(members) for members in sessions] == [2, 3, 2, 3]
    # A worker whose host stays keeps its process.
    first, last = ({each["host"]: each["pid"] for each in members} for members in (sessions[0], sessions[-1]))
    assert first[hosts.address(0)] == last[hosts.address(0)]
    assert first[hosts.address(1)] != last[hosts.address(1)]


def test_the_host_of_rank_0_leaves(tmp_path):
    """`horovodrun` itself continues on that host."""
    with hosts.Hosts(3) as network, training(tmp_path, network, {0: 1, 1: 1, 2: 1}) as job:
        change_hosts(job, remove=[0])
        members = job.sessions()[-1]
    assert {each["host"] for each in members} == {hosts.address(1), hosts.address(2)}


@pytest.mark.parametrize("end", ["killed", "cut off"])
def test_a_host_disappears(tmp_path, end):
    """The discovery script still lists the host for a while. Later another host takes its place."""
    with hosts.Hosts(4) as network, training(tmp_path, network, {0: 1, 1: 1, 2: 1}) as job:
        (lost,) = [each for each in job.sessions()[-1] if each["host"] == hosts.address(2)]
        if end == "killed":
            os.kill(lost["pid"], signal.SIGKILL)
        else:
            network.cut(2)
        left = {host: 1 for host in job.hosts if host != hosts.address(2)}
        job.wait_for(lambda: job.runs_on(left), "the others went on")
        change_hosts(job, add=[3], remove=[2])
        job.wait_for(lambda: not os.path.exists(f"/proc/{lost['pid']}"), "the lost worker ended")
