"""Process groups of the c10d backend: created, split, aborted, destroyed and created again, also with gloo groups."""

from __future__ import annotations

import inspect

import pytest

from support import Forked, more, run_ranks

pytest.importorskip("torch", reason="PyTorch is not installed")


def _init(backend="smddp", **arguments):
    import torch
    import torch.distributed as dist

    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    dist.init_process_group(backend, **arguments)
    return torch, dist, dist.get_rank(), dist.get_world_size()


def _monitored_barrier(default):
    """Calls torch's monitored_barrier on groups of both backends; `default` is the backend of the default group."""
    from datetime import timedelta

    _, dist, rank, _ = _init(default)
    if default == "gloo" and rank != 1:
        # The first smddp group starts the session, so it needs all ranks.
        count = dist.distributed_c10d._world.group_count
        with pytest.raises(ValueError, match=r"ranks \[0, 2\] of 3 cannot be the first"):
            dist.new_group([0, 2], backend="smddp", use_local_synchronization=True)
        # PyTorch 2.14 and newer count the failed group on these two ranks only. The ranks would disagree on the names
        # of later groups.
        dist.distributed_c10d._world.group_count = count
    ours = dist.new_group(backend="smddp")
    gloo = dist.new_group(backend="gloo")
    for group in (None, ours, gloo):
        dist.monitored_barrier(group, timedelta(seconds=20))
        dist.monitored_barrier(group=group, timeout=timedelta(seconds=20), wait_all_ranks=True)
    part = dist.new_group([0, 2], backend="smddp")
    if rank != 1:
        dist.monitored_barrier(part, timedelta(seconds=20))
    texts = []
    for wait_all in (False, True):
        if rank == 0 or (rank == 2 and not wait_all):
            try:
                dist.monitored_barrier(ours, timedelta(seconds=1), wait_all_ranks=wait_all)
            except dist.DistBackendError as error:
                texts.append(str(error))
        dist.barrier()
    # The group is usable after a monitored barrier that failed.
    dist.monitored_barrier(ours, timedelta(seconds=20))
    return texts


@pytest.mark.parametrize("default", ["smddp", "gloo"])
def test_monitored_barrier_names_missing_ranks(default):
    first, second, third = run_ranks(_monitored_barrier, 3, default, launcher=Forked("torch"))
    assert "Rank 1 failed to pass monitoredBarrier" in first[0]
    assert "Ranks 1, 2 failed to pass monitoredBarrier" in first[1]
    assert not second
    assert "Rank 2 successfully reached monitoredBarrier" in third[0]


def _split():
    from torch.distributed import distributed_c10d

    torch, dist, rank, size = _init()
    dist.barrier(device_ids=[0])
    # Through torch's function, and through the group's own method.
    parts = [[0, 2], [1]]
    mine = dist.split_group(split_ranks=parts, group_desc="halves")
    value = torch.full((2,), rank + 1.0)
    dist.all_reduce(value, group=mine)
    assert value.tolist() == [4.0, 4.0] if rank != 1 else [2.0, 2.0]
    assert dist.get_backend(mine) == "smddp"
    # A split of a split, whose group ranks differ from the global ones, and splits that leave ranks out.
    outside = (None, dist.GroupMember.NON_GROUP_MEMBER)
    nested = dist.split_group(mine, [[1]]) if rank != 1 else None
    assert (nested not in outside) == (rank == 2)
    pair = dist.split_group(split_ranks=[[1, 2]])
    assert (pair not in outside) == (rank > 0)
    if pair not in outside:
        dist.broadcast(value, 2, group=pair)
        assert value.tolist() == [4.0, 4.0]
    for wrong in (None, [], [[]], [[0, 0]], [[0], [0, 1]], [[size]]):
        with pytest.raises(ValueError, match="split"):
            dist.split_group(split_ranks=wrong)
    # An invalid list of ranks raises on every rank at once.
    with pytest.raises(ValueError, match=r"within the world_size|out of range"):
        dist.new_group([0, size])
    # split_group of a gloo group is left to PyTorch: it works from 2.15 on and raises in earlier versions.
    gloo = dist.new_group(backend="gloo")
    refusal = ""
    try:
        assert (dist.split_group(gloo, [[0, 1]]) not in outside) == (rank < 2)
    except RuntimeError as error:
        refusal = str(error)
    assert not refusal or "No device associated" in refusal
    dist.barrier()
    if "sort_ranks" in inspect.signature(distributed_c10d.new_group).parameters:
        backwards = dist.new_group([2, 1, 0], sort_ranks=False)
        assert dist.get_rank(backwards) == 2 - rank
        values = [torch.zeros(1) for _ in range(3)]
        dist.all_gather(values, torch.full((1,), float(rank)), group=backwards)
        assert [value.item() for value in values] == [2.0, 1.0, 0.0]
    return rank


def test_groups_split():
    assert run_ranks(_split, 3, launcher=Forked("torch")) == [0, 1, 2]


def _reinitialize(how, place):
    """Creates and ends the default group five times (one abort), with subgroups and collectives in between.

    Returns the threads and shared memory segments that remain.
    """
    import os

    from torch.distributed import FileStore

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    between = FileStore(f"{place}-between", size)
    arguments = {}
    if how != "env":
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SMD_RENDEZVOUS", "SMD_SECRET"):
            os.environ.pop(name, None)
        arguments = {
            "rank": rank,
            "world_size": size,
        }
    for attempt in range(5):
        if how != "env":
            # torch needs a file that does not exist yet.
            arguments["init_method"] = f"file://{place}{attempt}"
        torch, dist, rank, size = _init(**arguments)
        assert dist.get_backend() == "smddp"
        groups = [dist.new_group() for _ in range(attempt)]
        works = []
        for group in [None, *groups]:
            value = torch.full((1000,), float(attempt))
            works.append((value, dist.all_reduce(value, group=group, async_op=True)))
        for value, work in works:
            work.wait()
            assert value[-1] == attempt * size
        if groups:
            dist.destroy_process_group(groups[0])
        dist.barrier()
        if attempt == 2:
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
        assert not dist.is_initialized()
        # Groups and works keep threads and segments alive.
        del group, groups, value, work, works
        # A rank that starts the next attempt too early would connect to this attempt's store, which torch is about to
        # close.
        between.set(f"{attempt} {rank}", "")
        between.wait([f"{attempt} {other}" for other in range(size)])
    return _remaining(_threads), _remaining(_segments)


def _remaining(find):
    """Polls `find` for up to 5 s and returns its last result: the kernel lists a thread for a moment after its join."""
    import time

    deadline = time.monotonic() + 5
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def _threads():
    import os

    return [name for task in os.listdir("/proc/self/task") if (name := _thread_name(task)).startswith("smd-group")]


def _segments():
    import os

    return [link for number in os.listdir("/proc/self/fd") if "memfd:smd" in (link := _fd_target(number))]


def _thread_name(task):
    try:
        with open(f"/proc/self/task/{task}/comm") as file:
            return file.read().strip()
    except OSError:
        # The thread has ended since listdir.
        return ""


def _fd_target(number):
    import os

    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


@pytest.mark.parametrize(("how", "launcher"), [more("env", "smdrun"), more("env", "torchrun"), ("file", "raw")])
def test_process_groups_can_be_created_again(how, launcher, tmp_path):
    assert run_ranks(_reinitialize, 2, how, str(tmp_path / "store"), launcher=launcher) == [([], [])] * 2


def _beyond_gloo():
    """Operations that gloo does not implement; the expected values are written out here."""
    torch, dist, rank, size = _init()
    from torch.distributed import distributed_c10d

    # Lists of tensors of several sizes.
    outputs = [torch.empty(other + 1) for other in range(size)]
    dist.all_to_all(outputs, [torch.full((rank + 1,), 10.0 * rank + to) for to in range(size)])
    assert [output.tolist() for output in outputs] == [[10.0 * other + rank] * (other + 1) for other in range(size)]
    # PREMUL_SUM: each rank's factor as a number and as a tensor.
    for factor in (rank + 1.0, torch.tensor([rank + 1.0])):
        value = torch.full((3,), 2.0)
        dist.all_reduce(value, op=dist._make_nccl_premul_sum(factor))
        assert value.tolist() == [2.0 * sum(range(1, size + 1))] * 3
        output = torch.empty(2)
        dist.reduce_scatter_tensor(output, torch.ones(2 * size), op=dist._make_nccl_premul_sum(factor))
        assert output.tolist() == [sum(range(1, size + 1))] * 2
    value = torch.full((3,), rank + 1.0)
    dist.all_reduce(value, op=dist.ReduceOp.AVG)
    assert value.tolist() == [(size + 1) / 2] * 3
    # Coalesced all-reduces pack small tensors together; results are bitwise equal to those of separate calls.
    generator = torch.Generator().manual_seed(rank)
    sizes = [1, 7, 300, 20_000, 5, 3, 100_000, 2, 40]
    tensors = [torch.randn(elems, generator=generator) for elems in sizes]
    alone = [tensor.clone() for tensor in tensors]
    for tensor in alone:
        dist.all_reduce(tensor)
    for device in (None, torch.device("cpu")):
        together = [tensor.clone() for tensor in tensors]
        with dist._coalescing_manager(device=device, async_ops=True) as pending:
            for tensor in together:
                dist.all_reduce(tensor)
        pending.wait()
        assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True))
    with dist._coalescing_manager():
        gathered = [torch.empty(size * 3) for _ in range(4)]
        for at, output in enumerate(gathered):
            dist.all_gather_into_tensor(output, torch.full((3,), 10.0 * at + rank))
    for at, output in enumerate(gathered):
        assert output.view(size, 3)[:, 1].tolist() == [10.0 * at + other for other in range(size)]
    with dist._coalescing_manager():
        scattered = [torch.empty(2) for _ in range(4)]
        for at, output in enumerate(scattered):
            dist.reduce_scatter_tensor(output, torch.arange(2.0 * size) + at)
    assert scattered[3].tolist() == [size * (2.0 * rank + 3), size * (2.0 * rank + 4)]
    # Broadcasts and point-to-point messages in one coalesced batch.
    value, other, received = torch.ones(3), torch.full((2,), float(rank)), torch.empty(1)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as pending:
        dist.broadcast(other, 1)
        dist.isend(torch.tensor([float(rank)]), (rank + 1) % size)
        dist.irecv(received, (rank - 1) % size)
        dist.broadcast(value, 0)
    pending.wait()
    assert (other.tolist(), received.item()) == ([1.0, 1.0], float((rank - 1) % size))
    # A timeout set after the group was created applies to later operations; torch has two ways to set it.
    from datetime import timedelta

    for set_timeout in (
        lambda group: distributed_c10d._set_pg_timeout(timedelta(milliseconds=300), group),
        lambda group: group._get_backend(torch.device("cpu")).set_timeout(timedelta(milliseconds=300)),
    ):
        group = dist.new_group()
        set_timeout(group)
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match="timed out after "):
                dist.all_reduce(value, group=group)
    dist.barrier()
    return rank


def test_operations_that_gloo_lacks():
    assert run_ranks(_beyond_gloo, 3, launcher=Forked("torch")) == [0, 1, 2]
