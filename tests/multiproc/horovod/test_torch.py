"""`import horovod.torch` on real ranks: values, types, errors, gradients, names, joins, process sets, optimizers."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest

from support import Forked, run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")

ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


def start():
    import torch

    import horovod.torch as hvd

    hvd.init()
    return torch, hvd, hvd.rank(), hvd.size()


def raises(kind, text, call):
    with pytest.raises(kind, match=text):
        call()


def reductions():
    torch, hvd, rank, size = start()
    total = sum(range(1, size + 1))
    ints = [torch.uint8, torch.int8, torch.int32, torch.int64]
    floats = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    for dtype in ints + floats:
        for shape in [(), (0,), (3, 5)]:
            x = torch.full(shape, rank + 1).to(dtype)
            kept = x.clone()
            got = hvd.allreduce(x, op=hvd.Sum)
            assert got.dtype == dtype
            assert got.shape == x.shape
            assert torch.equal(got, torch.full(shape, total).to(dtype))
            assert torch.equal(x, kept)
            if shape == (3, 5):
                assert torch.equal(hvd.allreduce(x, op=hvd.Min), torch.full(shape, 1).to(dtype))
                assert torch.equal(hvd.allreduce(x, op=hvd.Max), torch.full(shape, size).to(dtype))
                product = 1
                for factor in range(1, size + 1):
                    product *= factor
                assert torch.equal(hvd.allreduce(x, op=hvd.Product), torch.full(shape, product).to(dtype))
            average = hvd.allreduce(x)
            expected = torch.full(shape, total // size if dtype in ints else total / size).to(dtype)
            assert torch.equal(average, expected), (dtype, average, expected)
            assert hvd.allreduce_(x, op=hvd.Sum) is x
            assert torch.equal(x, got)
    # Factors: floats in their own type, integers in float64, truncated toward zero once.
    x = torch.arange(6.0) + rank
    sums = sum(torch.arange(6.0) + other for other in range(size))
    assert torch.allclose(hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), sums * 1.5)
    assert torch.allclose(hvd.allreduce(x, prescale_factor=0.5, postscale_factor=2.0), sums / size)
    ints = torch.tensor([7, -7]) * (rank + 1)
    before = sum(int(7 * (other + 1) * 0.5) for other in range(size))
    got = hvd.allreduce(ints, op=hvd.Sum, prescale_factor=0.5)
    assert got.tolist() == [before, -before]
    assert hvd.allreduce(ints, postscale_factor=3.0).tolist() == [
        int(7 * total * (3.0 / size)),
        -int(7 * total * (3.0 / size)),
    ]
    # What is not contiguous, and complex values.
    matrix = (torch.arange(6.0).reshape(2, 3) + rank).t()
    assert torch.equal(hvd.allreduce(matrix, op=hvd.Sum), sums.reshape(2, 3).t())
    hvd.allreduce_(matrix, op=hvd.Sum)
    assert torch.equal(matrix, sums.reshape(2, 3).t())
    assert hvd.allreduce(torch.tensor([1 + 2j]), op=hvd.Sum).tolist() == [(1 + 2j) * size]
    # Groups: all or nothing, of different types and shapes.
    group = [torch.full((3,), rank + 1.0), torch.tensor(rank + 1), torch.ones(0), torch.full((2, 2), rank + 1).half()]
    got = hvd.grouped_allreduce(group, op=hvd.Sum)
    assert isinstance(got, list)
    assert all(
        torch.equal(one, torch.full(like.shape, total).to(like.dtype)) for one, like in zip(got, group, strict=True)
    )
    assert hvd.grouped_allreduce([]) == []
    assert hvd.grouped_allreduce_(group, op=hvd.Sum)[0] is group[0]
    # Compression.
    assert hvd.allreduce(torch.ones(3), compression=hvd.Compression.fp16).dtype == torch.float32
    # The old argument.
    with pytest.warns(DeprecationWarning, match="average"):
        assert hvd.allreduce(torch.ones(1), average=False).item() == size
    raises(ValueError, "supersedes average", lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum))
    raises(ValueError, "is not supported", lambda: hvd.allreduce(torch.ones(1).bool(), op=hvd.Sum))
    # Adasum.
    if size & (size - 1):
        raises(NotImplementedError, "non-power of 2", lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum))
    else:

        def adasum(vectors):
            while len(vectors) > 1:
                pairs = zip(vectors[::2], vectors[1::2], strict=True)
                vectors = [(1 - (a @ b) / (2 * (a @ a))) * a + (1 - (a @ b) / (2 * (b @ b))) * b for a, b in pairs]
            return vectors[0]

        vectors = [torch.randn(50, generator=torch.Generator().manual_seed(other)).double() for other in range(size)]
        got = hvd.grouped_allreduce([vectors[rank], vectors[rank].float() * 2], op=hvd.Adasum)
        assert torch.allclose(got[0], adasum(vectors))
        assert torch.allclose(got[1].double(), adasum(vectors) * 2, atol=1e-5)
        assert hvd.allreduce(torch.zeros(3), op=hvd.Adasum).tolist() == [0.0] * 3
        raises(ValueError, "not supported", lambda: hvd.allreduce(torch.ones(2).int(), op=hvd.Adasum))
    # Sparse tensors.
    index = torch.tensor([[rank, size]])
    sparse = torch.sparse_coo_tensor(index, torch.tensor([1.0, 2.0]), (size + 1,))
    got = hvd.sparse_allreduce_async(sparse, name="sparse", op=hvd.Average)().to_dense()
    assert torch.allclose(got, torch.tensor([1.0 / size] * size + [2.0]))
    raises(NotImplementedError, "sparse", lambda: hvd.sparse_allreduce_async(sparse, name="s", op=hvd.Max))


def moving():
    torch, hvd, rank, size = start()
    for dtype in [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.float32]:
        mine = torch.full((rank + 1, 2), rank).to(dtype)
        got = hvd.allgather(mine)
        assert torch.equal(got, torch.cat([torch.full((other + 1, 2), other) for other in range(size)]).to(dtype))
        assert torch.equal(hvd.broadcast(mine[:1], size - 1), torch.full((1, 2), size - 1).to(dtype))
    assert hvd.allgather(torch.ones(0 if rank == 0 else 2)).shape == (2 * (size - 1),)
    first, second = hvd.grouped_allgather([torch.ones(1), torch.full((rank, 2), rank)])
    assert first.shape == (size,)
    assert second[:, 0].tolist() == [other for other in range(size) for _ in range(other)]
    x = torch.full((3,), float(rank))
    assert hvd.broadcast_(x, 0) is x
    assert x.tolist() == [0.0] * 3
    # Scalars have no rows.
    raises(ValueError, "rank-zero tensor", lambda: hvd.allgather(torch.tensor(1.0)))
    raises(ValueError, "does not support scalar inputs", lambda: hvd.reducescatter(torch.tensor(1.0)))
    # All-to-all: equal parts, splits, rows that go nowhere.
    mine = torch.arange(2 * size) + 100 * rank
    assert hvd.alltoall(mine).tolist() == [100 * other + 2 * rank + at for other in range(size) for at in range(2)]
    splits = [other + 1 for other in range(size)]
    mine = torch.arange(sum(splits) + 1) + 100 * rank
    got, received = hvd.alltoall(mine, splits=torch.tensor(splits, dtype=torch.int32))
    start_of_mine = sum(splits[:rank])
    assert received.dtype == torch.int32
    assert received.tolist() == [rank + 1] * size
    assert got.tolist() == [100 * other + start_of_mine + at for other in range(size) for at in range(rank + 1)]
    got, received = hvd.alltoall(torch.ones(0), splits=[0] * size)
    assert got.shape == (0,)
    raises(
        ValueError,
        "not an even multiple of the number of workers",
        lambda: hvd.alltoall(torch.ones(size + 1)) if size > 1 else 0,
    )
    raises(ValueError, "greater than the first dimension", lambda: hvd.alltoall(torch.ones(1), splits=[2] * size))
    raises(ValueError, "does not equal number of workers", lambda: hvd.alltoall(torch.ones(9), splits=[1] * (size + 1)))
    raises(ValueError, "32-bit integer", lambda: hvd.alltoall(torch.ones(9), splits=torch.ones(size)))
    raises(ValueError, "1D splits", lambda: hvd.alltoall(torch.ones(9), splits=torch.ones(1, size, dtype=torch.int32)))
    # A rank that is refused does not use up a name.
    if rank == 0:
        raises(ValueError, "number of workers", lambda: hvd.alltoall(torch.ones(9), splits=[1] * (size + 1)))
    hvd.alltoall(torch.ones(size))
    # Reduce-scatter: the first ranks get the rest.
    for height in [0, 1, size, 2 * size + 1]:
        mine = torch.arange(height * 3.0).reshape(height, 3) + rank
        rows = [height // size + (other < height % size) for other in range(size)]
        whole = sum(torch.arange(height * 3.0).reshape(height, 3) + other for other in range(size))
        own = whole[sum(rows[:rank]) : sum(rows[: rank + 1])]
        assert torch.equal(hvd.reducescatter(mine, op=hvd.Sum), own)
        assert torch.allclose(hvd.reducescatter(mine, prescale_factor=2.0, postscale_factor=3.0), own * 6 / size)
        one, two = hvd.grouped_reducescatter([mine, mine.int()], op=hvd.Sum)
        assert torch.equal(one, own)
        assert torch.equal(two, own.int())
    raises(hvd.HorovodInternalError, "only supports AVERAGE and SUM", lambda: hvd.reducescatter(mine, op=hvd.Max))
    # Objects.
    assert hvd.broadcast_object({"rank": rank}, size - 1) == {"rank": size - 1}
    assert hvd.broadcast_object([1.5] if rank == 0 else None) == [1.5]
    assert hvd.allgather_object("x" * rank) == ["x" * other for other in range(size)]
    hvd.barrier()


def handles_and_names():
    torch, hvd, rank, size = start()
    # In any order; results follow the names.
    names = [f"t{at}" for at in range(40)]
    random.Random(rank).shuffle(names)
    handles = {name: hvd.allreduce_async(torch.tensor([float(name[1:])]), op=hvd.Sum, name=name) for name in names}
    for name, handle in handles.items():
        assert hvd.synchronize(handle).item() == float(name[1:]) * size
    assert hvd.synchronize(handles["t0"]) is None
    raises(ValueError, "was not created or has been cleared", lambda: hvd.poll(handles["t0"]))
    # The same name while it is under way.
    for call in [
        lambda: hvd.allreduce_async(torch.ones(2), name="twice"),
        lambda: hvd.allgather_async(torch.ones(2), name="twice"),
        lambda: hvd.broadcast_async(torch.ones(2), 0, name="twice"),
        lambda: hvd.reducescatter_async(torch.ones(2), name="twice"),
        lambda: hvd.grouped_allreduce_async([torch.ones(2)], name="twice"),
    ]:
        if rank == 0:
            handle = call()
            if size > 1:
                raises(
                    ValueError, "twice.*with the same name as another tensor that is currently being processed", call
                )
            hvd.barrier()
        else:
            hvd.barrier()
            handle = call()
        hvd.synchronize(handle)
    # A handle that nobody waits for.
    hvd.allreduce_async(torch.ones(3), name="dropped")
    hvd.mpi_ops._handle_map.clear()
    handle = hvd.allreduce_async(torch.ones(1), name="poll")
    while not hvd.poll(handle):
        time.sleep(0.001)
    hvd.synchronize(handle)
    # Mismatches: on every rank, with who sent what; the name is free again.
    odd = rank == size - 1 and size > 1
    for text, call in [
        (
            "Mismatched data types: One rank had type",
            lambda: hvd.allreduce(torch.ones(2, dtype=torch.float64 if odd else None), name="m"),
        ),
        (
            "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape",
            lambda: hvd.allreduce(torch.ones(2 + odd), name="m"),
        ),
        (
            "Mismatched reduction operation",
            lambda: hvd.allreduce(torch.ones(2), op=hvd.Max if odd else hvd.Min, name="m"),
        ),
        (
            "Mismatched prescale and/or postscale factors",
            lambda: hvd.allreduce(torch.ones(2), prescale_factor=1.0 + odd, name="m"),
        ),
        ("root ranks: One rank specified root rank", lambda: hvd.broadcast(torch.ones(2), int(odd), name="m")),
        ("sent a tensor of rank", lambda: hvd.allgather(torch.ones((2, 1) if odd else (2,)), name="m")),
        ("sent a tensor with dimension", lambda: hvd.allgather(torch.ones(2, 2 + odd), name="m")),
        ("sent a tensor of shape", lambda: hvd.reducescatter(torch.ones(4 + odd), name="m")),
        ("Mismatched groups", lambda: hvd.grouped_allreduce([torch.ones(1)] * (2 + odd), name="m")),
        (
            "tensor 2of2: Mismatched data types",
            lambda: hvd.grouped_allreduce([torch.ones(1), torch.ones(1).int() if odd else torch.ones(1)], name="m"),
        ),
    ]:
        if size == 1:
            continue
        with pytest.raises(hvd.HorovodInternalError) as caught:
            call()
        assert text in str(caught.value), str(caught.value)
        assert f"rank {size - 1} asks for" in str(caught.value), str(caught.value)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="m").item() == size


def gradients():
    torch, hvd, rank, size = start()

    def gradient(call, shape=(size, 2)):
        x = torch.ones(shape, requires_grad=True)
        out = call(x)
        outs = out if isinstance(out, (list, tuple)) else [out]
        sum((one * (rank + 1.0)).sum() for one in outs if one.is_floating_point()).backward()
        return x.grad

    total = sum(range(1, size + 1))
    assert torch.allclose(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum)), torch.full((size, 2), float(total)))
    assert torch.allclose(gradient(lambda x: hvd.allreduce(x)), torch.full((size, 2), total / size))
    assert torch.allclose(gradient(lambda x: hvd.grouped_allreduce([x, x])[1]), torch.full((size, 2), total / size))
    assert torch.allclose(gradient(lambda x: hvd.allgather(x)), torch.full((size, 2), total / size))
    assert torch.allclose(gradient(lambda x: hvd.grouped_allgather([x, x])), torch.full((size, 2), 2.0 * total / size))
    root = torch.full((size, 2), total / size if rank == 0 else 0.0)
    assert torch.allclose(gradient(lambda x: hvd.broadcast(x, 0)), root)
    to_each = torch.tensor([[other + 1.0] * 2 for other in range(size)])
    assert torch.allclose(gradient(lambda x: hvd.alltoall(x)), to_each)
    assert torch.allclose(gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum)), to_each * size)
    assert torch.allclose(gradient(lambda x: hvd.reducescatter(x, postscale_factor=2.0)), to_each * 2)
    assert torch.allclose(gradient(lambda x: hvd.grouped_reducescatter([x])), to_each)


def joins():
    torch, hvd, rank, size = start()
    for first in range(size):
        # Unnamed calls, fewer of them on the rank that joins first.
        if rank != first:
            for _ in range(3):
                assert torch.allclose(hvd.allreduce(torch.full((4,), 2.0)), torch.full((4,), 2.0 * (size - 1) / size))
            assert hvd.allreduce(torch.tensor([5]), op=hvd.Min).item() == 5
            group = hvd.grouped_allreduce([torch.ones(2), torch.ones(3).int()], op=hvd.Sum)
            assert [one[0].item() for one in group] == [size - 1, size - 1]
            for text, call in [
                ("Allgather is not supported with Join", lambda: hvd.allgather(torch.ones(1))),
                ("Broadcast is not supported with Join", lambda: hvd.broadcast(torch.ones(1), 0)),
                ("Alltoall is not supported with Join", lambda: hvd.alltoall(torch.ones(size))),
                ("Reducescatter is not supported with Join", lambda: hvd.reducescatter(torch.ones(size))),
                ("Barrier is not supported with Join", hvd.barrier),
            ]:
                if size > 1:
                    raises(hvd.HorovodInternalError, text, call)
        last = hvd.join()
        assert hvd.allgather(torch.tensor([last])).tolist() == [last] * size
        assert last != first or size == 1
    # The current device, which may be nobody's choice, is told apart from one that the script has named.
    from horovod.torch import mpi_ops

    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(mpi_ops, "_submit", wraps=mpi_ops._submit) as submit,
    ):
        hvd.join()
        hvd.join(1)
    assert [call.args[1:] for call in submit.call_args_list] == [(-1, 0), (1, 0)]
    # All is as before.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    hvd.barrier()


def other_gradients():
    """Of a rank that has frozen another parameter all ranks are told, by name and at once."""
    torch, hvd, rank, size = start()
    if size == 1:
        return
    others = "rank 0 has" if size == 2 else f"ranks {'0, 1' if size == 3 else '0-2'} have"
    # By plan, and by name.
    for number, factor in enumerate((1.0, 2.0)):
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        named = [(f"{number}.{name}", parameter) for name, parameter in net.named_parameters()]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, named, gradient_predivide_factor=factor)

        def step(net=net, optimizer=optimizer):
            optimizer.zero_grad()
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        for _ in range(3):
            step()
        net[1].bias.requires_grad_(rank != size - 1)
        raises(
            hvd.HorovodInternalError,
            rf"ranks disagree: rank {size - 1} has no gradient of `{number}.1.bias`, {others} one",
            # Who has all gradients takes its step, and hears of it at the next one.
            lambda step=step: [step() for _ in range(2)],
        )
        net[1].bias.requires_grad_(True)
        step()


def process_sets():
    torch, hvd, rank, size = start()
    assert hvd.global_process_set.ranks == list(range(size))
    assert str(hvd.ProcessSet([1, 0])) == "ProcessSet(process_set_id=None, ranks=[0, 1], mpi_comm=None)"
    raises(ValueError, "list of process ranks or an mpi4py Comm object", lambda: hvd.ProcessSet(["a"]))
    raises(
        ValueError,
        "does not exist, or has not been registered",
        lambda: hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0])),
    )
    raises(ValueError, "Attempted to add a duplicate process set", lambda: hvd.add_process_set(range(size)))
    raises(ValueError, "there is no rank", lambda: hvd.add_process_set([0, size]))
    if size == 1:
        return
    even = hvd.add_process_set(range(0, size, 2))
    members = [0, 1] if size > 2 else [1]
    pair = hvd.add_process_set(hvd.ProcessSet(members[::-1]))  # overlaps
    assert (even.process_set_id, pair.process_set_id) == (1, 2)
    raises(ValueError, "rank 0 adds.*rank 1 adds", lambda: hvd.add_process_set([0] if rank == 0 else [1]))
    for one in [even, pair]:
        if one.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=one).item() == one.size()
            assert hvd.allgather(torch.tensor([rank]), process_set=one).tolist() == one.ranks
            assert hvd.broadcast(torch.tensor([rank]), one.ranks[-1], process_set=one).item() == one.ranks[-1]
            assert one.ranks[one.rank()] == rank
            hvd.barrier(one)
            if one is pair and size > 2:
                raises(
                    ValueError,
                    "broadcast received invalid root rank",
                    lambda: hvd.broadcast(torch.ones(1), 2, process_set=pair),
                )
            raises(
                NotImplementedError,
                "does not support non-global process sets",
                lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum, process_set=even),
            )
        else:
            raises(
                ValueError,
                "is not a member of the provided process set",
                lambda one=one: hvd.allreduce(torch.ones(1), process_set=one),
            )
            raises(ValueError, "not part of provided process set", one.rank)
    # Names that the engine gives stay in step although some ranks made fewer calls.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    assert hvd.remove_process_set(even)
    assert even.process_set_id is None
    assert not hvd.remove_process_set(hvd.global_process_set)
    again = hvd.add_process_set([size - 1] if size > 2 else [0])
    assert again.process_set_id == 1
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: list(range(size)), 1: again.ranks, 2: members}
    # The world ends, and another begins.
    hvd.shutdown()
    raises(ValueError, "has not been initialized; use hvd.init", hvd.rank)
    raises(hvd.HorovodInternalError, "has not been initialized; use hvd.init", lambda: hvd.allreduce(torch.ones(1)))
    some = [hvd.ProcessSet([0])] if rank == 0 else None
    raises(ValueError, "ranks ask for different process sets", lambda: hvd.init(process_sets=some))
    hvd.shutdown()
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([0, 1])]
    if size > 2:
        hvd.init(process_sets=sets)
        assert [one.process_set_id for one in sets] == [1, 2]
    else:
        raises(ValueError, "is a duplicate", lambda: hvd.init(process_sets=sets))
        hvd.init(process_sets=sets[:1])
    assert sets[0].process_set_id == 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def optimizers():
    torch, hvd, rank, size = start()

    def model(seed=0):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3), torch.nn.Linear(3, 1))

    def batches(step):
        generator = torch.Generator().manual_seed(step)
        return torch.randn(size * 4, 4, generator=generator), torch.randn(size * 4, 1, generator=generator)

    def trained(make, steps=3):
        ours, theirs = model(rank), model(0)
        hvd.broadcast_parameters(ours.state_dict(), 0)
        single = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
        optimizer = make(torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9), ours)
        for step in range(steps):
            x, y = batches(step)
            mine = slice(4 * rank, 4 * rank + 4)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(ours(x[mine]), y[mine]).backward()
            optimizer.step()
            single.zero_grad()
            torch.nn.functional.mse_loss(theirs(x), y).backward()
            single.step()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-5), (one - other).abs().max()
        return optimizer

    plain = trained(lambda optimizer, net: hvd.DistributedOptimizer(optimizer, net.named_parameters()))
    assert isinstance(plain, torch.optim.SGD)
    assert type(plain).__name__ == "SGD"
    trained(lambda optimizer, net: hvd.DistributedOptimizer(optimizer))
    trained(lambda optimizer, net: hvd.DistributedOptimizer(optimizer, net.named_parameters(), groups=2))
    trained(
        lambda optimizer, net: hvd.DistributedOptimizer(
            optimizer, groups=[list(net.parameters())[:3]], gradient_predivide_factor=2.0
        )
    )
    trained(
        lambda optimizer, net: hvd.DistributedOptimizer(
            optimizer, net.named_parameters(), gradient_predivide_factor=float(size)
        )
    )
    # Passes that are summed.
    net = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters(), backward_passes_per_step=2
    )
    before = net[0].bias.detach().clone()
    for _ in range(2):
        net(torch.ones(1, 4) * (rank + 1)).sum().backward()
    if size > 1:
        raises(
            AssertionError,
            "Gradients were computed more than backward_passes_per_step times",
            lambda: net(torch.ones(1, 4)).sum().backward(),
        )
        raises(AssertionError, "zero_grad\\(\\) was called after loss.backward", optimizer.zero_grad)
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert torch.allclose(before - net[0].bias, net[0].bias.grad)
    alone = model()
    for other in range(size):
        (alone(torch.ones(1, 4) * (other + 1)).sum() * 2 / size).backward()
    assert torch.allclose(net[0].bias.grad, alone[0].bias.grad)
    assert torch.allclose(net[0].weight.grad, alone[0].weight.grad)
    # Parameters that come later, and frozen ones in a group.
    net = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([net[0].weight, net[0].bias], lr=1.0, weight_decay=0.1), groups=1
    )
    optimizer.add_param_group({"params": [net[2].weight]})
    net[0].bias.requires_grad_(False)
    frozen = net[0].bias.detach().clone()
    net(torch.ones(1, 4) * (rank + 1)).sum().backward()
    optimizer.step()
    assert torch.equal(net[0].bias, frozen)
    for weight in (net[0].weight, net[2].weight):
        assert len(set(hvd.allgather_object(tuple(weight.detach().flatten().tolist())))) == 1
    # A parameter without a gradient on some ranks.
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
    (net(torch.ones(1, 4)) if rank == 0 else net[0](torch.ones(1, 4))).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="called without optimizer.skip_synchronize"):
        optimizer.step()
    assert len({tuple(bias) for bias in hvd.allgather(net[3].bias.detach().reshape(1, -1)).tolist()}) == 1
    # Arguments.
    parameters = list(net.named_parameters())
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    for text, kwargs in [
        ("backward_passes_per_step must be > 0", {"backward_passes_per_step": 0}),
        ("not supported with op != Average", {"op": hvd.Sum, "gradient_predivide_factor": 2.0}),
        ("should be a sequence of tuples", {"named_parameters": net.parameters()}),
        ("must be unique", {"named_parameters": parameters + parameters[:1]}),
        ("were not named", {"named_parameters": parameters[:1]}),
        ("groups should be a non-negative integer", {"groups": -1}),
    ]:
        raises(ValueError, text, lambda kwargs=kwargs: hvd.DistributedOptimizer(sgd, **kwargs))
    # Adasum of the same step on all ranks is that step.
    if size & (size - 1) == 0:
        net, alone = model(), model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.5), net.named_parameters(), op=hvd.Adasum
        )
        single = torch.optim.SGD(alone.parameters(), lr=0.5)
        for module, one in ((net, optimizer), (alone, single)):
            module(torch.ones(2, 4)).sum().backward()
            one.step()
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(net.parameters(), alone.parameters(), strict=True))
        # Steps in orthogonal directions add up, which takes the other ranks.
        weight = torch.nn.Parameter(torch.zeros(size))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), [("orthogonal", weight)], op=hvd.Adasum)
        (weight[rank] * (rank + 1.0)).backward()
        optimizer.step()
        assert weight.tolist() == [-0.5 * (other + 1.0) for other in range(size)]
    # An embedding with sparse gradients that only rank 0 uses: the others have no rows to add.
    for as_dense in (False, True):
        table = torch.nn.Embedding(4, 2, sparse=True)
        torch.nn.init.zeros_(table.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), [("table", table.weight)], sparse_as_dense=as_dense
        )
        if rank == 0:
            table(torch.tensor([1, 3])).sum().backward()
        optimizer.step()
        assert torch.allclose(table.weight[:, 0], torch.tensor([0.0, -1.0, 0.0, -1.0]) / size)
    # State.
    for make in [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad]:
        net = model(rank)
        optimizer = make(net.parameters(), lr=0.1 * (rank + 1))
        if rank == 0:
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        kept = [parameter.detach().clone() for parameter in net.parameters()]
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert all(torch.equal(a, b) for a, b in zip(kept, net.parameters(), strict=True))
        assert optimizer.param_groups[0]["lr"] == 0.1
        digests = hvd.allgather_object(str(optimizer.state_dict()))
        assert len(set(digests)) == 1
    raises(
        ValueError,
        "cannot broadcast torch.optim.LBFGS state",
        lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(net.parameters()), 0),
    )
    raises(ValueError, "invalid params of type", lambda: hvd.broadcast_parameters(3, 0))
    # Batch normalisation over batches of different sizes.
    heights = [other + 2 for other in range(size)]
    whole = torch.randn(sum(heights), 3, 2, generator=torch.Generator().manual_seed(1))
    mine = whole[sum(heights[:rank]) : sum(heights[: rank + 1])].clone().requires_grad_()
    reference = whole.clone().requires_grad_()
    synced, plain = hvd.SyncBatchNorm(3), torch.nn.BatchNorm1d(3)
    weights = torch.arange(whole.numel()).reshape(whole.shape).float()
    (synced(mine) * weights[sum(heights[:rank]) : sum(heights[: rank + 1])]).sum().backward()
    (plain(reference) * weights).sum().backward()
    assert torch.allclose(mine.grad, reference.grad[sum(heights[:rank]) : sum(heights[: rank + 1])], atol=1e-3)
    assert torch.allclose(synced.running_var, plain.running_var, atol=1e-5)
    assert torch.allclose(hvd.allreduce(synced.weight.grad, op=hvd.Sum), plain.weight.grad, rtol=1e-3)
    raises(ValueError, "expected at least 2D input", lambda: synced(torch.ones(3)))


def life():
    """Without a session, and worlds of some ranks."""
    torch, hvd, rank, size = start()
    if size > 1:
        raises(ValueError, "received invalid root rank", lambda: hvd.broadcast(torch.ones(1), size))

        def different():
            x = torch.ones(1)
            return hvd.allgather(x, name="one") if rank == 0 else hvd.allreduce(x, name="two")

        raises(hvd.HorovodInternalError, "one|two", different)
    duplicates = [hvd.ProcessSet([0]), hvd.ProcessSet([0])]
    raises(ValueError, "is a duplicate", lambda: hvd.init(process_sets=duplicates))
    hvd.shutdown()
    assert not hvd.is_initialized()
    text = r"Horovod has not been initialized; use hvd\.init\(\)\."
    raises(hvd.HorovodInternalError, text, lambda: hvd.allreduce(torch.ones(1)))
    for ask in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size, hvd.is_homogeneous):
        raises(ValueError, text, ask)
    raises(ValueError, "Invalid type of argument comm", lambda: hvd.init(comm="everybody"))
    # A part of the job, in an order of its own; the others are alone.
    part = list(range(size))[: max(size - 1, 1)][::-1]
    hvd.init(comm=part)
    assert hvd.size() == (len(part) if rank in part else 1)
    assert hvd.rank() == (part.index(rank) if rank in part else 0)
    assert hvd.allgather(torch.tensor([rank])).tolist() == (part if rank in part else [rank])
    assert hvd.global_process_set.ranks == list(range(hvd.size()))
    hvd.shutdown()
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


@contextlib.contextmanager
def standard_error():
    """What is written there, by the core as well: a function that gives it."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: Path(f"/proc/self/fd/{file.fileno()}").read_text()
        finally:
            os.dup2(kept, 2)
            os.close(kept)


@contextlib.contextmanager
def another_world(hvd, **settings):
    """One with these settings; then the one as before."""
    hvd.shutdown()
    os.environ.update(settings)
    hvd.init()
    try:
        yield
    finally:
        hvd.shutdown()
        for name in settings:
            del os.environ[name]
        hvd.init()


def tuning():
    """Sizes are tried, and the log has the original's columns."""
    torch, hvd, rank, _ = start()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.csv"
        settings = {"AUTOTUNE": "1", "AUTOTUNE_LOG": str(log), "AUTOTUNE_STEPS_PER_SAMPLE": "1"}
        settings |= {"AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "7", "AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.3"}
        with another_world(hvd, **{f"HOROVOD_{name}": value for name, value in settings.items()}):
            for _ in range(3 + 7 * 5 + 2):
                hvd.allreduce(torch.ones(100), name="tuned")
            if rank == 0:
                header, *rows = log.read_text().splitlines()
                assert header == (
                    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"
                    "tensor_fusion_threshold,score"
                )
                found = [(int(row.split(",")[5]), float(row.split(",")[6])) for row in rows]
                tried = [size for size, _ in found[:-1]]
                assert len(set(tried)) == 7
                assert {2**16, 2**27} <= set(tried)
                assert all(2**16 <= size <= 2**27 for size in tried)
                assert found[-1] == max(found[:-1], key=lambda one: one[1])


def fusion():
    """Small tensors that are ready together run together; where that is switched off, only those of one call do."""
    torch, hvd, rank, size = start()
    if size == 1:
        return
    for disabled in (0, 1):
        with (
            tempfile.TemporaryDirectory() as folder,
            another_world(hvd, HOROVOD_DISABLE_GROUP_FUSION=str(disabled)),
        ):
            path = Path(folder) / "timeline.json"
            hvd.start_timeline(str(path))
            # The last rank's calls make all of them ready.
            time.sleep(0.1 if rank == size - 1 else 0)
            ones = [hvd.allreduce_async(torch.full((8,), float(at)), name=f"one{at}", op=hvd.Sum) for at in range(40)]
            pairs = [
                hvd.grouped_allreduce_async([torch.ones(4), torch.ones(3)], name=f"pair{at}", op=hvd.Sum)
                for at in range(10)
            ]
            assert all((hvd.synchronize(handle) == float(at * size)).all() for at, handle in enumerate(ones))
            assert all((each == size).all() for handle in pairs for each in hvd.synchronize(handle))
            hvd.stop_timeline()
            if rank == 0:
                events = json.loads(path.read_text())
                names = {
                    event["pid"]: event["args"].get("name", "")
                    for event in events
                    if event.get("name") == "process_name"
                }
                fused = {names[event["pid"]] for event in events if event.get("name") == "MEMCPY_IN_FUSION_BUFFER"}
                assert sum("pair" in name for name in fused) == 10, fused
                assert any("one" in name for name in fused) == (not disabled), fused


def stalls():
    """A rank is late for longer than the limit: rank 0 says who, and everything that waits ends."""
    torch, hvd, rank, size = start()
    if size == 1:
        return
    # An end before the first warning is none.
    with standard_error() as said, another_world(hvd, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="1"):
        if rank == 0:
            time.sleep(2)
        hvd.allreduce(torch.ones(2), name="later")
        assert "`SMD_STALL_SHUTDOWN_SECONDS` is 1, less than `SMD_STALL_WARNING_SECONDS`" in said()
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    ended = Path(hvd.broadcast_object(tempfile.mktemp()))
    with another_world(hvd, **limits), standard_error() as said:
        if rank == size - 1:
            # As late as it can be: until the others have been told.
            deadline = time.monotonic() + 60
            while not ended.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        else:
            handles = [hvd.allreduce_async(torch.ones(2), name=f"late{at}") for at in range(8)]
            for handle in handles:
                raises(
                    hvd.HorovodInternalError, r"late.*Horovod has been shut down\.", lambda h=handle: hvd.synchronize(h)
                )
        if rank == 0:
            ended.touch()
            late = ", ".join(f"allreduce.late{at}" for at in range(6)) + " ..."
            text = said()
            assert "more than 1 seconds" in text, text
            assert f"Missing ranks:\n{size - 1}: [{late}]" in text, text
            assert "Will shutdown.\n" in text, text
            assert f"Missing ranks:\n{size - 1}!: [{late}]" in text, text
    if rank == 0:
        ended.unlink()


PARTS = (
    reductions, moving, handles_and_names, gradients, joins, optimizers, other_gradients, process_sets, life, tuning, fusion,
    stalls,
)  # fmt: skip


def everything():
    """All in one job, since ranks take long to start."""
    for part in PARTS:
        part()


@pytest.mark.timeout(220)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_everything(size):
    run_ranks(everything, size, launcher=Forked("torch"), env=ENV, timeout=200)
