"""The c10d backend `smddp`: collectives, DDP, FSDP, DTensor and other users of process groups, compared with gloo."""

from __future__ import annotations

import pytest

from support import Forked, missing, more, run_ranks

pytest.importorskip("torch", reason="PyTorch is not installed")

LAUNCHED = [
    ("smdrun", "env://"),
    ("mpirun", "env://"),
    more("torchrun", "env://"),
    more("slurm", "env://"),
    ("raw", "file"),
    ("raw", "tcp"),
    ("raw", "store"),
]


def _init(backend="smddp", **arguments):
    import torch
    import torch.distributed as dist

    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    dist.init_process_group(backend, **arguments)
    return torch, dist, dist.get_rank(), dist.get_world_size()


def _leave(number):
    """Destroys the default group, and returns when all ranks have destroyed it.

    A rank that creates the next group too early would connect to the store of this one, which torch is about to close.
    """
    import os

    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    between = dist.FileStore(f"{os.environ['SMD_TEST_FOLDER']}/left{number}", size)
    dist.destroy_process_group()
    between.set(str(rank), "")
    between.wait([str(other) for other in range(size)])


def _compare_with_gloo(body):
    """Runs `body` over smddp, then over gloo in the same process, and asserts that the results are close."""
    torch, dist, rank, size = _init()
    found = body(torch, dist, rank, size)
    _leave(0)
    torch.manual_seed(0)
    _init("gloo")
    expected = body(torch, dist, rank, size)
    dist.destroy_process_group()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    return True


def _init_and_communicate(how, place):
    import os
    from datetime import timedelta

    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    # mpirun and srun set neither; the import does.
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    arguments = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=30)}
    if how == "env://":
        arguments = {"init_method": how}
    else:
        # Without a launcher's environment variables.
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SMD_RENDEZVOUS", "SMD_SECRET"):
            os.environ.pop(name, None)
        if how == "file":
            arguments["init_method"] = f"file://{place}"
        elif how == "tcp":
            arguments["init_method"] = f"tcp://127.0.0.1:{place}"
        else:
            import torch.distributed as dist

            arguments["store"] = dist.FileStore(place, size)
    for attempt in range(2):
        torch, dist, rank, size = _init(**arguments)
        assert dist.get_backend() == "smddp"
        values = torch.full((3,), float(rank + 1))
        dist.all_reduce(values)
        assert values.tolist() == [size * (size + 1) / 2] * 3
        gathered = [None] * size
        dist.all_gather_object(gathered, {"rank": rank})
        assert gathered == [{"rank": other} for other in range(size)]
        _leave(attempt)
        if how != "env://":
            break
    return rank


@pytest.mark.parametrize(("launcher", "how"), LAUNCHED)
def test_init_methods_and_launchers(launcher, how, tmp_path):
    import socket

    if reason := missing(launcher):
        pytest.skip(reason)
    place = str(tmp_path / "store")
    if how == "tcp":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = free.getsockname()[1]
    assert run_ranks(_init_and_communicate, 2, how, place, launcher=launcher) == [0, 1]


def _collectives():
    def body(torch, dist, rank, size):
        results = []

        def mine(salt, *shape):
            return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * rank + salt))

        for op in ("SUM", "PRODUCT", "MIN", "MAX"):
            value = mine(1, 5)
            dist.all_reduce(value, op=getattr(dist.ReduceOp, op))
            results.append(value)
        for op in ("BAND", "BOR", "BXOR"):
            value = torch.arange(5) + rank
            dist.all_reduce(value, op=getattr(dist.ReduceOp, op))
            results.append(value)
        value = mine(2, 2, 3)
        dist.broadcast(value, 1)
        results.append(value)
        value = mine(3, 4)
        dist.reduce(value, 1)
        results.append(value if rank == 1 else torch.zeros(0))
        outputs = [torch.empty(2, 2) for _ in range(size)]
        dist.all_gather(outputs, mine(4, 2, 2))
        results += outputs
        output = torch.empty(size * 3)
        dist.all_gather_into_tensor(output, mine(5, 3))
        results.append(output)
        output = torch.empty(3)
        dist.reduce_scatter_tensor(output, mine(6, size * 3))
        results.append(output)
        output = torch.empty(2)
        dist.reduce_scatter(output, [mine(7 + r, 2) for r in range(size)])
        results.append(output)
        output = torch.empty(size * 2)
        dist.all_to_all_single(output, mine(20, size * 2))
        results.append(output)
        # Rank r sends r + 1 rows to each rank.
        output = torch.empty(sum(range(1, size + 1)))
        dist.all_to_all_single(output, mine(21, size * (rank + 1)), list(range(1, size + 1)), [rank + 1] * size)
        results.append(output)
        outputs = [torch.empty(2) for _ in range(size)] if rank == 0 else None
        dist.gather(mine(22, 2), outputs, 0)
        results += outputs or []
        output = torch.empty(2)
        dist.scatter(output, [mine(23 + r, 2) for r in range(size)] if rank == 1 else None, 1)
        results.append(output)
        # A ring of sends and receives, in one batch.
        received = torch.empty(4)
        sends = [
            dist.P2POp(dist.isend, mine(30, 4), (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(sends):
            work.wait()
        results.append(received)
        if rank == 0:
            results.append(torch.tensor(sorted(dist.recv(torch.empty(2), tag=3) for _ in range(size - 1))))
        else:
            dist.send(torch.ones(2), 0, tag=3)
        values = [mine(40, 3), mine(41, 2, 2)]
        with dist._coalescing_manager(async_ops=True) as pending:
            for value in values:
                dist.all_reduce(value)
        pending.wait()
        results += values
        groups = [dist.new_group(members) for members in ([0, 1], list(range(1, size)), [size - 1])]
        for members in groups:
            value = torch.full((2,), float(rank))
            if members is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.all_reduce(value, group=members)
            results.append(value)
        sparse = torch.sparse_coo_tensor([[rank, rank + 1]], [1.0, 2.0], (size + 2,))
        dist.all_reduce(sparse)
        results.append(sparse.to_dense())
        # A strided tensor and a 0-dimensional one.
        value = mine(50, 4, 4).t()
        dist.all_reduce(value)
        results.append(value)
        value = torch.tensor(float(rank))
        dist.all_reduce(value)
        results.append(value)
        objects = [{"from": rank}]
        dist.broadcast_object_list(objects, 1)
        assert objects == [{"from": 1}]
        dist.barrier()
        return results

    return _compare_with_gloo(body)


def test_collectives_give_what_gloo_gives():
    assert run_ranks(_collectives, 3, launcher=Forked("torch")) == [True] * 3


def _works():
    from datetime import timedelta

    torch, dist, rank, size = _init()
    value = torch.full((3,), float(rank))
    work = dist.all_reduce(value, op=dist.ReduceOp.AVG, async_op=True)
    future = work.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert doubled.wait().tolist() == [size - 1.0] * 3
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    # A future's callback may start a collective on the same group and wait for it.
    other = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    again = other.then(lambda done: dist.all_reduce(done.value()[0], async_op=True).get_future().wait()[0])
    assert again.wait().tolist() == [size**2] * 2
    # A gloo group in the same job.
    gloo = dist.new_group(backend="gloo")
    value = torch.ones(1)
    dist.all_reduce(value, group=gloo)
    assert value.item() == size
    assert dist.get_backend(gloo) == "gloo"
    # Mismatched calls raise on all ranks, and the group stays usable.
    with pytest.raises(dist.DistBackendError, match=r"rank 0 called all_reduce\(sum\) of 3 float32, rank 1 called"):
        dist.all_reduce(torch.ones(3 + rank))
    dist.barrier()
    with pytest.raises(TypeError, match="UInt16"):
        dist.all_reduce(torch.ones(2, dtype=torch.uint16))
    # Timeouts: of one wait for a receive, and of a group with a timeout of its own.
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="ended after 100 ms"):
            dist.irecv(torch.empty(1), 1, tag=9).wait(timedelta(milliseconds=100))
    impatient = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match=r"timed out after .*: no sign of rank\(s\) \[1\]"):
            dist.all_reduce(torch.ones(1), group=impatient)
    dist.barrier()
    return rank


def test_works_futures_and_errors():
    assert run_ranks(_works, 2, launcher=Forked("torch")) == [0, 1]


def _both_interfaces():
    import smdistributed.dataparallel.torch.distributed as smd

    smd.init_process_group()
    torch, dist, _, _ = _init(init_method="env://")
    ours, torchs = torch.ones(2), torch.ones(3)
    smd.all_reduce(ours)
    dist.all_reduce(torchs)
    dist.destroy_process_group()
    smd.all_reduce(ours)
    return ours.tolist(), torchs.tolist()


def test_smd_and_c10d_interfaces_share_a_session():
    assert run_ranks(_both_interfaces, 2, launcher=Forked("torch")) == [([4.0, 4.0], [2.0, 2.0, 2.0])] * 2


def _ddp(torch, dist, rank, size):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _fsdp(torch, dist, rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    mesh = init_device_mesh("cpu", (size,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


def _dtensor(torch, dist, rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    left = torch.arange(24.0).reshape(4, 6)
    right = torch.arange(12.0).reshape(6, 2)
    product = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
    moved = distribute_tensor(left, mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])
    return [product.redistribute(mesh, [Replicate()]).to_local(), moved.to_local()]


def _compiled(torch, dist, rank, size):
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD

    def step(value):
        summed = functional.all_reduce(value * 2, "sum", group)
        return functional.all_gather_tensor(summed + rank, 0, group)

    value = torch.arange(3.0) + rank
    return [step(value), torch.compile(step, backend="aot_eager")(value)]


def _zero(torch, dist, rank, size):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 3))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.05)
    for step in range(3):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _checkpoint(torch, dist, rank, size):
    import shutil
    import tempfile

    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    folder = [tempfile.mkdtemp(prefix="smd-test-")]
    dist.broadcast_object_list(folder)
    mesh = init_device_mesh("cpu", (size,))
    saved = {"values": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]), "step": 3}
    checkpoint.save(saved, checkpoint_id=folder[0])
    loaded = {"values": distribute_tensor(torch.zeros(8), mesh, [Shard(0)]), "step": 0}
    checkpoint.load(loaded, checkpoint_id=folder[0])
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    assert loaded["step"] == 3
    return loaded["values"].full_tensor()


def _torch_features():
    bodies = [_ddp, _fsdp, _dtensor, _compiled, _zero, _checkpoint]
    return _compare_with_gloo(lambda *places: {body.__name__: body(*places) for body in bodies})


def test_torch_features_match_gloo():
    assert run_ranks(_torch_features, 2, launcher=Forked("torch"), timeout=100) == [True, True]
