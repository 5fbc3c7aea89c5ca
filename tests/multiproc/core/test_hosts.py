"""Several hosts: network namespaces, joined by a switch, with Open MPI between them, or TCP alone."""

from __future__ import annotations

import pytest

from support import hosts, more, run_ranks, start_ranks

pytestmark = [
    pytest.mark.skipif(hosts.missing_network() is not None, reason=hosts.missing_network() or ""),
    # Most of a test is the import of torch by four processes.
    pytest.mark.timeout(220),
]
needs_mpi = pytest.mark.skipif(hosts.missing() is not None, reason=hosts.missing() or "")

#: The longest time in which survivors must learn of a death.
NOTICE_SECONDS = 5.0
BY_NODE = ["--map-by", "node"]


@pytest.fixture(scope="module")
def two():
    with hosts.Hosts(2) as two_hosts:
        yield two_hosts


def place():
    from smdistributed import _core
    from smdistributed._common import lifecycle

    found = []
    for _ in range(2):
        lifecycle.init()
        for _ in range(20):
            _core.barrier()
        found.append((_core.rank(), _core.size(), _core.local_rank(), _core.local_size()))
        lifecycle.shutdown()
    assert found[0] == found[1], "a second session uses the MPI that the first one started"
    return found[0]


@needs_mpi
@pytest.mark.parametrize(
    ("n", "options", "local"),
    [(4, [], [(0, 2), (1, 2), (0, 2), (1, 2)]), (3, BY_NODE, [(0, 2), (0, 1), (1, 2)])],
    ids=["one host after the other", "in turn"],
)
def test_each_host_has_its_local_ranks(two, n, options, local):
    assert run_ranks(place, n, launcher=two, options=options) == [(r, n, *local[r]) for r in range(n)]


def suite(names):
    """The contract of the collectives as tests of one host have it: equal bit by bit to the fold in rank order."""
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
def test_collectives_give_what_they_give_on_one_host(two, n, options, names):
    """Asserted on each rank, in `suite`."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    run_ranks(suite, n, names, launcher=two, options=options, timeout=100)


def test_without_mpi_collectives_go_over_tcp(two):
    """Asserted on each rank, in `suite`."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    # At the interface that is named first of those that there are.
    env = {"SMD_INTERFACE": "ib0, eth0"}
    run_ranks(suite, 4, ["reductions", "movements", "messages", "groups"], launcher=two.by_hand(), env=env, timeout=100)


@pytest.mark.parametrize("trusting", [4, 3], ids=["all ranks", "all but one"])
def test_on_a_network_that_all_ranks_trust_collectives_give_the_same(two, trusting):
    """Asserted on each rank, in `suite`. If a rank does not trust the network, rank 0 says that frames stay authenticated."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    launcher = two.by_hand(own={rank: {"SMD_TRUSTED_NETWORK": "1"} for rank in range(trusting)})
    body = (suite, 4, ["reductions"]) if trusting == 4 else (meet, 4)
    with start_ranks(*body, launcher=launcher, timeout=100) as job:
        outcome = job.wait()
    assert outcome.exit_code == 0, outcome.describe()
    warning = "`SMD_TRUSTED_NETWORK` is set, but not on rank 3 on host"
    assert (warning in outcome.output) == (trusting < 4), outcome.describe()


def training():
    """What some steps leave behind, to the bit: our DDP, torch's DDP and FSDP over the backend, and an object."""
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

    # It also sets the variables that `env://` reads, which mpirun does not.
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


@pytest.mark.parametrize("way", [pytest.param("mpirun", marks=needs_mpi), more("torchrun")])
def test_training_gives_what_it_gives_on_one_host(two, trained_on_one, way):
    launcher = two if way == "mpirun" else two.torchrun()
    on_two = run_ranks(training, 4, launcher=launcher, timeout=100)
    assert on_two == trained_on_one
    assert all(rank["ours"] == on_two[0]["ours"] for rank in on_two), "replicas stay equal"


def meet():
    from smdistributed import _core
    from smdistributed._common import lifecycle

    lifecycle.init()
    for _ in range(20):
        _core.barrier()
    lifecycle.shutdown()


@needs_mpi
def test_without_the_compiler_of_mpi_tcp_does_and_it_is_said_what_to_install(two, tmp_path):
    environment = {"MPICC": "/nowhere/mpicc", "SMD_CACHE_DIR": str(tmp_path), "SMD_LOG": "info"}
    with start_ranks(meet, 4, launcher=two, options=_passed_on(environment), env=environment) as job:
        outcome = job.wait()
    assert outcome.exit_code == 0, outcome.describe()
    assert (
        "TCP moves CPU tensors between the 2 hosts, since `/nowhere/mpicc` is not there to compile the MPI plug-in with: "
        "install the compiler of the MPI whose `mpirun` starts the job (Debian: libopenmpi-dev or libmpich-dev), or set "
        "`MPICC`" in outcome.output
    ), outcome.describe()


def _passed_on(variables):
    """mpirun hands only some variables to other hosts."""
    return [word for name in variables for word in ("-x", name)]


def test_an_interface_that_is_not_there_is_told(two):
    launcher = two.by_hand(own={3: {"HOROVOD_GLOO_IFACE": "ib0"}})
    with start_ranks(meet, 4, launcher=launcher, env={"SMD_INIT_TIMEOUT_SECONDS": "8"}) as job:
        outcome = job.wait()
    assert not outcome.timed_out
    text = "`HOROVOD_GLOO_IFACE` is `ib0`: this host has no such network interface that is up, only eth0, lo"
    assert text in outcome.ranks[3].error, outcome.describe()


def test_a_rank_with_another_secret_is_no_part_of_the_job(two):
    """It is turned away where the ranks meet; the connections between ranks have unit tests of their own."""
    launcher = two.by_hand(own={3: {"SMD_SECRET": "guess"}})
    environment = {"SMD_SECRET": "secret", "SMD_INIT_TIMEOUT_SECONDS": "8"}
    with start_ranks(meet, 4, launcher=launcher, env=environment) as job:
        outcome = job.wait()
    assert not outcome.timed_out
    assert "does not know the job's secret" in outcome.output, outcome.describe()
    for rank in outcome.ranks[:3]:
        assert "no sign of rank(s) [3]" in rank.error, outcome.describe()
    assert "does not accept this job's secret" in outcome.ranks[3].error, outcome.describe()
