"""Process groups on CUDA devices that are split from other groups."""

from __future__ import annotations

import pytest

from support import devices, start_ranks
from support.devices import NUM_RANKS, needs_one

pytestmark = [pytest.mark.timeout(150), needs_one]


def groups_body(bound):

    import torch
    import torch.distributed as dist

    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    device = torch.device("cuda", devices.own())
    torch.cuda.set_device(device)
    dist.init_process_group("smddp", **({"device_id": device} if bound else {}))
    rank, size = dist.get_rank(), dist.get_world_size()

    def total(group, elems=1000, device=device):
        x = torch.full((elems,), rank + 1.0, device=device)
        dist.all_reduce(x, group=group)
        return x[-1].item()

    sum_of_all = size * (size + 1) / 2
    if not bound:
        # The parent has no communicator that could be split before its first operation.
        assert total(None) == sum_of_all

    whole = dist.new_group()
    assert total(whole) == sum_of_all
    pair = dist.new_group([0, 1])
    if rank < 2:
        assert total(pair, 3 << 20) == 3.0
    parts = [list(range(0, size, 2)), list(range(1, size, 2))]
    mine = dist.split_group(split_ranks=parts)
    assert total(mine) == sum(other + 1 for other in parts[rank % 2])
    # The ranks of the new group differ from those of the parent, and the last rank is in no new group.
    nested = dist.split_group(whole, [list(range(size - 1))])
    assert (nested is None) == (rank == size - 1)
    if nested is not None:
        assert total(nested) == sum_of_all - size
    # On other devices than the parent's, so its communicator cannot be split.
    if not bound:
        other = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
        with torch.cuda.device(other):
            assert total(dist.new_group(), device=other) == sum_of_all
    # A group that is never used.
    dist.new_group()
    # Parent groups still work, and destroying one does not affect the groups that were split from it.
    dist.destroy_process_group(whole)
    assert total(None) == sum_of_all
    assert total(mine) == sum(other + 1 for other in parts[rank % 2])

    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cuda", (size // 2, 2), mesh_dim_names=("a", "b"))
    first = rank // 2 * 2
    assert total(mesh.get_group("b")) == 2 * first + 3
    torch.cuda.synchronize()
    dist.destroy_process_group()


@pytest.mark.parametrize("bound", [False, True])
def test_groups_are_split_from_groups(bound):
    env = {"SMD_TIMEOUT_SECONDS": "20", "SMD_P2P_MAX_BYTES": "0", "SMD_LOG": "debug"}
    with start_ranks(groups_body, NUM_RANKS, bound, env=env, timeout=70) as job:
        outcome = job.wait()
    assert all(rank.error is None for rank in outcome.ranks), outcome.describe()
    assert "was not split on devices" not in outcome.output, outcome.output
    # Each rank splits at least the five groups before the device mesh.
    assert outcome.output.count("was split on devices") >= 5 * NUM_RANKS, outcome.output
