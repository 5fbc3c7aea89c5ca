"""Jobs on two simulated hosts (network namespaces joined by a bridge), over Open MPI and over TCP."""

from __future__ import annotations

import pytest

from support import hosts, more, run_ranks, start_ranks

pytestmark = [
    pytest.mark.skipif(hosts.missing_network() is not None, reason=hosts.missing_network() or ""),
    # Most of the time goes into four processes that import torch.
    pytest.mark.timeout(220),
]
needs_mpi = pytest.mark.skipif(hosts.missing() is not None, reason=hosts.missing() or "")

BY_NODE = ["--map-by", "node"]


@pytest.fixture(scope="module")
def two():
    with hosts.Hosts(2) as two_hosts:
        yield two_hosts


def local_ranks():
    from smdistributed import _core
    from smdistributed._common import lifecycle

    found = []
    for _ in range(2):
        lifecycle.init()
        for _ in range(20):
            _core.barrier()
        found.append((_core.rank(), _core.size(), _core.local_rank(), _core.local_size()))
        lifecycle.shutdown()
    assert found[0] == found[1], "the second session reuses the MPI that the first one has initialized"
    return found[0]


@needs_mpi
@pytest.mark.parametrize(
    ("n", "options", "local"),
    [(4, [], [(0, 2), (1, 2), (0, 2), (1, 2)]), (3, BY_NODE, [(0, 2), (0, 1), (1, 2)])],
    ids=["one host after the other", "in turn"],
)
def test_local_ranks_on_two_hosts(two, n, options, local):
    assert run_ranks(local_ranks, n, launcher=two, options=options) == [(r, n, *local[r]) for r in range(n)]


def suite(names):
    """Runs checks of `test_torch_collectives`: results are bitwise equal to a reduction in rank order."""
    import smdistributed.dataparallel.torch.distributed as dist
    from multiproc.dataparallel import test_torch_collectives as one_host

    bodies = (one_host.reductions, one_host.movements, one_host.messages, one_host.groups, one_host.handles)
    by_name = {body.__name__: body for body in bodies}
    for name in names:
        by_name[name]()
        dist.destroy_process_group()


@needs_mpi
@pytest.mark.parametrize(
    ("n", "options", "names"),
    [(4, [], ["reductions", "movements", "messages", "groups"]), more(3, BY_NODE, ["reductions", "handles"])],
    ids=["two a host", "ranks in turn"],
)
def test_collectives_match_one_host(two, n, options, names):
    """The assertions are in `suite`, which runs on each rank."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    run_ranks(suite, n, names, launcher=two, options=options, timeout=100)


def test_without_mpi_collectives_go_over_tcp(two):
    """The assertions are in `suite`, which runs on each rank."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    # The first listed interface that exists is used, here eth0.
    env = {"SMD_INTERFACE": "ib0, eth0"}
    run_ranks(suite, 4, ["reductions", "movements", "messages", "groups"], launcher=two.by_hand(), env=env, timeout=100)


@pytest.mark.parametrize("trusting", [4, 3], ids=["all ranks", "all but one"])
def test_trusted_network_needs_all_ranks_and_changes_no_result(two, trusting):
    """Results are asserted on each rank, in `suite`. If a rank lacks the setting, rank 0 warns that frames stay authenticated."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    launcher = two.by_hand(own={rank: {"SMD_TRUSTED_NETWORK": "1"} for rank in range(trusting)})
    body = (suite, 4, ["reductions"]) if trusting == 4 else (init_and_barrier, 4)
    with start_ranks(*body, launcher=launcher, timeout=100) as job:
        outcome = job.wait()
    assert outcome.exit_code == 0, outcome.describe()
    warning = "`SMD_TRUSTED_NETWORK` is set, but not on rank 3 on host"
    assert (warning in outcome.output) == (trusting < 4), outcome.describe()


def training():
    """Trains with our DDP, and with torch's DDP and FSDP over smddp; returns the parameters as bytes.

    Also gathers objects over the backend.
    """
    import torch
    import torch.distributed as torchs
    from torch.distributed.fsdp import fully_shard

    import smdistributed.dataparallel.torch.distributed as dist
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

    def sharded(model):
        for layer in (model[0], model[3], model):
            fully_shard(layer)
        return model

    def steps(wrap, rank):
        torch.manual_seed(1)
        norm = torch.nn.BatchNorm1d(300)
        model = wrap(torch.nn.Sequential(torch.nn.Linear(50, 300), norm, torch.nn.Tanh(), torch.nn.Linear(300, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            inputs = torch.randn(4, 50, generator=torch.Generator().manual_seed(100 * step + rank))
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = (getattr(value, "full_tensor", lambda value=value: value)() for value in model.parameters())
        return [value.detach().numpy().tobytes() for value in whole]

    # This also sets the environment variables that `env://` reads; mpirun does not set them.
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {"ours": steps(DistributedDataParallel, rank)}
    torchs.init_process_group("smddp")
    found |= {"torch": steps(torch.nn.parallel.DistributedDataParallel, rank), "fsdp": steps(sharded, rank)}
    objects = [None] * size
    torchs.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": other} for other in range(size)]
    torchs.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def trained_on_one():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    return run_ranks(training, 4, timeout=100)


@pytest.mark.parametrize("launched_by", [pytest.param("mpirun", marks=needs_mpi), more("torchrun")])
def test_training_matches_one_host(two, trained_on_one, launched_by):
    launcher = two if launched_by == "mpirun" else two.torchrun()
    on_two = run_ranks(training, 4, launcher=launcher, timeout=100)
    assert on_two == trained_on_one
    assert all(rank["ours"] == on_two[0]["ours"] for rank in on_two), "replicas are not equal"


def init_and_barrier():
    from smdistributed import _core
    from smdistributed._common import lifecycle

    lifecycle.init()
    for _ in range(20):
        _core.barrier()
    lifecycle.shutdown()


@needs_mpi
def test_without_mpicc_collectives_use_tcp_and_a_hint_is_logged(two, tmp_path):
    environment = {"MPICC": "/nowhere/mpicc", "SMD_CACHE_DIR": str(tmp_path), "SMD_LOG": "info"}
    with start_ranks(init_and_barrier, 4, launcher=two, options=_mpirun_options(environment), env=environment) as job:
        outcome = job.wait()
    assert outcome.exit_code == 0, outcome.describe()
    assert (
        "TCP moves CPU tensors between the 2 hosts, since `/nowhere/mpicc` is not there to compile the MPI plug-in with: "
        "install the compiler of the MPI whose `mpirun` starts the job (Debian: libopenmpi-dev or libmpich-dev), or set "
        "`MPICC`" in outcome.output
    ), outcome.describe()


def _mpirun_options(variables):
    """Returns mpirun options that pass environment variables on to other hosts; by default mpirun passes few."""
    return [word for name in variables for word in ("-x", name)]


def test_a_missing_interface_is_named(two):
    launcher = two.by_hand(own={3: {"HOROVOD_GLOO_IFACE": "ib0"}})
    with start_ranks(init_and_barrier, 4, launcher=launcher, env={"SMD_INIT_TIMEOUT_SECONDS": "8"}) as job:
        outcome = job.wait()
    assert not outcome.timed_out
    text = "`HOROVOD_GLOO_IFACE` is `ib0`: this host has no such network interface that is up, only eth0, lo"
    assert text in outcome.ranks[3].error, outcome.describe()


def test_a_rank_with_another_secret_is_rejected(two):
    """The rendezvous rejects the rank. Unit tests cover the connections between ranks."""
    launcher = two.by_hand(own={3: {"SMD_SECRET": "guess"}})
    environment = {"SMD_SECRET": "secret", "SMD_INIT_TIMEOUT_SECONDS": "8"}
    with start_ranks(init_and_barrier, 4, launcher=launcher, env=environment) as job:
        outcome = job.wait()
    assert not outcome.timed_out
    assert "does not know the job's secret" in outcome.output, outcome.describe()
    for rank in outcome.ranks[:3]:
        assert "no sign of rank(s) [3]" in rank.error, outcome.describe()
    assert "does not accept this job's secret" in outcome.ranks[3].error, outcome.describe()
