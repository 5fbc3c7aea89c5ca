"""Several hosts: network namespaces, joined by a switch, with Open MPI between them."""

from __future__ import annotations

import pytest

from support import hosts, run_ranks

pytestmark = [
    pytest.mark.skipif(hosts.missing() is not None, reason=hosts.missing() or ""),
    # Most of a test is the import of torch by four processes.
    pytest.mark.timeout(100),
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
    run_ranks(suite, n, names, launcher=two, options=options, timeout=90)
