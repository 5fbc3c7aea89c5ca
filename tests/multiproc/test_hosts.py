"""Several hosts: network namespaces, joined by a switch, with Open MPI between them."""

from __future__ import annotations

import pytest

from support import hosts, run_ranks

pytestmark = [
    pytest.mark.skipif(hosts.missing() is not None, reason=hosts.missing() or ""),
    # Most of a test is the import of torch by four processes.
    pytest.mark.timeout(220),
]

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
    from multiproc import test_torch_collectives as one_host

    for name in names:
        getattr(one_host, name)()
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("n", "options", "names"),
    [(4, [], ["reductions", "movements", "messages", "groups"]), (3, BY_NODE, ["reductions", "handles"])],
    ids=["two a host", "ranks in turn"],
)
def test_collectives_give_what_they_give_on_one_host(two, n, options, names):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    run_ranks(suite, n, names, launcher=two, options=options, timeout=100)


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


def test_training_gives_what_it_gives_on_one_host(two):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    on_two, on_one = run_ranks(training, 4, launcher=two, timeout=100), run_ranks(training, 4, timeout=100)
    assert on_two == on_one
    assert all(rank["ours"] == on_two[0]["ours"] for rank in on_two), "replicas stay equal"


def cannot_talk():
    from smdistributed import _core
    from smdistributed._common import errors, lifecycle

    lifecycle.init()
    with pytest.raises(errors.UnsupportedError) as raised:
        _core.barrier()
    return str(raised.value)


def test_without_the_compiler_of_mpi_it_is_said_what_to_install(two, tmp_path):
    environment = {"MPICC": "/nowhere/mpicc", "SMD_CACHE_DIR": str(tmp_path)}
    texts = run_ranks(cannot_talk, 4, launcher=two, env=environment)
    assert set(texts) == {
        "CPU tensors go between hosts over MPI, and `/nowhere/mpicc` is not there to compile the plug-in for it: install "
        "the compiler of the MPI whose `mpirun` starts the job (Debian: libopenmpi-dev or libmpich-dev), or set `MPICC`"
    }
