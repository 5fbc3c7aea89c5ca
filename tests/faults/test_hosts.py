"""A host disappears: every rank on the other hosts gets an error that names a rank of that host."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from support import hosts, start_ranks

pytestmark = pytest.mark.skipif(hosts.missing_network() is not None, reason=hosts.missing_network() or "")
needs_mpi = pytest.mark.skipif(hosts.missing() is not None, reason=hosts.missing() or "")

#: Longest time until survivors learn of a death, in seconds.
NOTICE_SECONDS = 10.0
#: Silence after which a host counts as gone, in seconds, and the one without a setting.
SILENCE_SECONDS, DEFAULT_SILENCE_SECONDS = 3, 7


def repeat_barriers():
    from smdistributed import _core
    from smdistributed._common import lifecycle
    from support.rank_main import announce

    lifecycle.init()
    _core.barrier()
    announce(f"met.{_core.rank()}")
    while True:
        _core.barrier()


def repeat_long_reductions():
    import torch

    import smdistributed.dataparallel.torch.distributed as dist
    from support.rank_main import announce

    dist.init_process_group()
    tensor = torch.ones(6_000_000)
    dist.all_reduce(tensor)
    announce(f"met.{dist.get_rank()}")
    try:
        while True:
            dist.all_reduce(tensor)
    finally:
        # Nothing writes to the tensor any more.
        tensor.fill_(7)
        time.sleep(0.5)
        assert bool((tensor == 7).all()), "the tensor was written after the error"


def kill_the_second_host(_, job):
    for rank in (2, 3):
        job.kill(rank)


def kill_the_second_host_of_mpirun(_, job):
    """Kills the ranks and also mpirun's daemon on the host, through which mpirun would learn of their death."""
    parent = int(Path(f"/proc/{job.pid(2)}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in (job.pid(2), job.pid(3), parent):
        os.kill(pid, signal.SIGKILL)


def kill_rank_3(_, job):
    job.kill(3)


def cut_the_second_host_off(two, _):
    two.cut(1)


KILLED = r"rank [23] died \(process \d+ on host smd-host-1 ended without `shutdown\(\)`\) while rank \d was in barrier"
RANK_3 = KILLED.replace("[23]", "3")
SILENT = r"rank [23] died \(no sign of host smd-host-1, where ranks \[2, 3\] ran, for 3s\) while rank \d was in barrier"
OTHER_SIDE = r"rank 0 died \(no sign of its host, which served the rendezvous, for 3s\) while rank \d was in barrier"
ALL_CUT_OFF = {0: SILENT, 1: SILENT, 2: OTHER_SIDE, 3: OTHER_SIDE}


def check_that_survivors_name_the_host(start, disappear, errors, environment):
    # By default mpirun kills the other ranks when a rank dies, possibly before they can report their error.
    options = ["--enable-recovery"] if start == "mpirun" else []
    with hosts.Hosts(2) as two:
        launcher = two if start == "mpirun" else two.by_hand()
        with start_ranks(repeat_barriers, 4, launcher=launcher, options=options, env=environment, timeout=60) as job:
            for rank in range(4):
                job.wait_for(f"met.{rank}")
            disappear(two, job)
            # To take a link down can take seconds while the kernel removes the network of an earlier test.
            began = time.monotonic()
            for rank in errors:
                job.wait_for_end(rank)
            if start == "mpirun":
                # mpirun may wait for the host that is gone, or for ranks that ended without its daemon.
                os.kill(job.launcher_pid, signal.SIGKILL)
            outcome = job.wait()
    for rank, text in errors.items():
        assert re.search(f"PeerFailedError: {text}", outcome.ranks[rank].error), outcome.describe()
        assert outcome.ranks[rank].ended_at - began < NOTICE_SECONDS, outcome.describe()


@pytest.mark.parametrize(
    ("start", "disappear", "errors"),
    [
        pytest.param("mpirun", kill_the_second_host_of_mpirun, {0: KILLED, 1: KILLED}, marks=needs_mpi),
        pytest.param("mpirun", cut_the_second_host_off, ALL_CUT_OFF, marks=needs_mpi),
        ("by hand", kill_the_second_host, {0: KILLED, 1: KILLED}),
        ("by hand", kill_rank_3, {0: RANK_3, 1: RANK_3, 2: RANK_3}),
        ("by hand", cut_the_second_host_off, ALL_CUT_OFF),
    ],
    ids=["mpirun, killed", "mpirun, cut off", "TCP, killed", "TCP, one killed", "TCP, cut off"],
)
def test_all_survivors_name_the_host_that_disappears(start, disappear, errors):
    environment = {"SMD_PEER_TIMEOUT_SECONDS": str(SILENCE_SECONDS)}
    check_that_survivors_name_the_host(start, disappear, errors, environment)


@pytest.mark.parametrize("start", [pytest.param("mpirun", marks=needs_mpi), "by hand"])
def test_the_default_silence_is_short_enough(start, monkeypatch):
    """Without a setting, all survivors name a host that is cut off within 10 s."""
    for name in [name for name in os.environ if name.startswith("SMD_")]:
        monkeypatch.delenv(name)
    errors = {rank: text.replace("for 3s", f"for {DEFAULT_SILENCE_SECONDS}s") for rank, text in ALL_CUT_OFF.items()}
    check_that_survivors_name_the_host(start, cut_the_second_host_off, errors, {})


@needs_mpi
@pytest.mark.more
@pytest.mark.parametrize("disappears", ["killed", "cut off"])
def test_a_long_reduction_over_mpi_ends_with_the_host_that_disappears(disappears):
    """MPI is then moving bytes between the tensors of both hosts."""
    environment = {"SMD_PEER_TIMEOUT_SECONDS": str(SILENCE_SECONDS)}
    with (
        hosts.Hosts(2) as two,
        start_ranks(
            repeat_long_reductions, 2, launcher=two, options=["--enable-recovery"], env=environment, timeout=60
        ) as job,
    ):
        for rank in range(2):
            job.wait_for(f"met.{rank}")
        time.sleep(0.2)
        if disappears == "killed":
            parent = int(Path(f"/proc/{job.pid(1)}/stat").read_text().rpartition(")")[2].split()[1])
            for pid in (job.pid(1), parent):
                os.kill(pid, signal.SIGKILL)
        else:
            two.cut(1)
        began = time.monotonic()
        job.wait_for_end(0)
        os.kill(job.launcher_pid, signal.SIGKILL)
        outcome = job.wait()
    assert re.search("PeerFailedError: rank 1 died .* was in all_reduce", outcome.ranks[0].error), outcome.describe()
    assert outcome.ranks[0].ended_at - began < NOTICE_SECONDS, outcome.describe()
