"""Collectives of `horovod.torch`: values, dtypes, errors, gradients, handles, names and joins."""

from __future__ import annotations

import importlib.util
import random
import time
from unittest import mock

import pytest

from support import Forked, run_ranks
from support.horovod_ranks import ENV, raises, start

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


def reductions():
    torch, hvd, rank, size = start("torch")
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
    # Scale factors: floats are scaled in their dtype; integers in float64, truncated toward zero once.
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
    # Non-contiguous tensors and complex values.
    matrix = (torch.arange(6.0).reshape(2, 3) + rank).t()
    assert torch.equal(hvd.allreduce(matrix, op=hvd.Sum), sums.reshape(2, 3).t())
    hvd.allreduce_(matrix, op=hvd.Sum)
    assert torch.equal(matrix, sums.reshape(2, 3).t())
    assert hvd.allreduce(torch.tensor([1 + 2j]), op=hvd.Sum).tolist() == [(1 + 2j) * size]
    # Groups of tensors with different dtypes and shapes.
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
    # The deprecated argument `average`.
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


def data_movement():
    torch, hvd, rank, size = start("torch")
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
    # Scalars have no first dimension.
    raises(ValueError, "rank-zero tensor", lambda: hvd.allgather(torch.tensor(1.0)))
    raises(ValueError, "does not support scalar inputs", lambda: hvd.reducescatter(torch.tensor(1.0)))
    # All-to-all: equal parts, explicit splits, and a last row that no split covers.
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
    # A call that fails its argument check on rank 0 alone does not advance the counter of automatic names.
    if rank == 0:
        raises(ValueError, "number of workers", lambda: hvd.alltoall(torch.ones(9), splits=[1] * (size + 1)))
    hvd.alltoall(torch.ones(size))
    # Reduce-scatter: the first ranks get one of the remaining rows each.
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
    torch, hvd, rank, size = start("torch")
    # Named calls in a different order on each rank; results are matched by name.
    names = [f"t{at}" for at in range(40)]
    random.Random(rank).shuffle(names)
    handles = {name: hvd.allreduce_async(torch.tensor([float(name[1:])]), op=hvd.Sum, name=name) for name in names}
    for name, handle in handles.items():
        assert hvd.synchronize(handle).item() == float(name[1:]) * size
    assert hvd.synchronize(handles["t0"]) is None
    raises(ValueError, "was not created or has been cleared", lambda: hvd.poll(handles["t0"]))
    # A second call with a name whose first call is still pending.
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
    # A handle that is never synchronized.
    hvd.allreduce_async(torch.ones(3), name="dropped")
    hvd.mpi_ops._handle_map.clear()
    handle = hvd.allreduce_async(torch.ones(1), name="poll")
    while not hvd.poll(handle):
        time.sleep(0.001)
    hvd.synchronize(handle)
    # Mismatches raise on every rank and name the ranks; afterwards the name can be used again.
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
    torch, hvd, rank, size = start("torch")

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
    torch, hvd, rank, size = start("torch")
    for first in range(size):
        # Calls without names; the rank that joins first makes none of them.
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
    # `join` submits whether its device is the current one (the default) or one that the script has passed.
    from horovod.torch import mpi_ops

    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(mpi_ops, "_submit", wraps=mpi_ops._submit) as submit,
    ):
        hvd.join()
        hvd.join(1)
    assert [call.args[1:] for call in submit.call_args_list] == [(-1, 0), (1, 0)]
    # Collectives work as before.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    hvd.barrier()


PARTS = (reductions, data_movement, handles_and_names, gradients, joins)  # fmt: skip


def all_parts():
    """Runs all parts in one job, because ranks take long to start."""
    for part in PARTS:
        part()


@pytest.mark.timeout(220)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives(size):
    """The assertions are in `all_parts`, which runs on each rank."""
    run_ranks(all_parts, size, launcher=Forked("torch"), env=ENV, timeout=200)
