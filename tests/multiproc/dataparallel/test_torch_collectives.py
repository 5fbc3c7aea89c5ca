"""Every collective of the PyTorch interface on several ranks, compared with the result computed in one process.

Inputs depend on the rank only, so each rank can compute the inputs of all ranks.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import pytest

from support import Forked, more, run_ranks, start_ranks

SIZES = [0, 1, 7, 1000, 65_537]


def _start():
    import torch

    import smdistributed.dataparallel.torch.distributed as dist

    dist.init_process_group()
    return torch, dist, dist.get_rank(), dist.get_world_size()


def _input(torch, dtype, elems, rank, salt=0):
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, (elems,), generator=generator).bool()
    if dtype.is_complex:
        real = torch.float32 if dtype is torch.complex64 else torch.float64
        return torch.complex(*(torch.randn(elems, generator=generator, dtype=real) for _ in range(2)))
    if dtype.is_floating_point:
        return torch.randn(elems, generator=generator).to(dtype)
    return torch.randint(0 if dtype is torch.uint8 else -100, 100, (elems,), generator=generator).to(dtype)


def _expected(torch, op, inputs):
    """Returns the reduction of the inputs in rank order, in the accumulation type, rounded once at the end."""
    dtype = inputs[0].dtype
    if dtype is torch.bool:
        stacked = torch.stack(inputs)
        return {
            "SUM": stacked.any(0),
            "MAX": stacked.any(0),
            "BOR": stacked.any(0),
            "PRODUCT": stacked.all(0),
            "MIN": stacked.all(0),
            "BAND": stacked.all(0),
            "BXOR": stacked.sum(0) % 2 == 1,
        }[op]
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    folded = inputs[0].to(wide)
    for value in (value.to(wide) for value in inputs[1:]):
        if op in ("SUM", "AVERAGE"):
            folded = folded + value
        elif op == "PRODUCT" and wide.is_complex:
            # torch's complex product may use fused multiply-add, which rounds differently.
            a, b, c, d = folded.real, folded.imag, value.real, value.imag
            folded = torch.complex(a * c - b * d, a * d + b * c)
        elif op == "PRODUCT":
            folded = folded * value
        elif op == "MIN":
            folded = torch.minimum(folded, value)
        elif op == "MAX":
            folded = torch.maximum(folded, value)
        elif op == "BAND":
            folded = folded & value
        elif op == "BOR":
            folded = folded | value
        else:
            folded = folded ^ value
    if op == "AVERAGE" and wide.is_complex:
        folded = torch.complex(folded.real / len(inputs), folded.imag / len(inputs))
    elif op == "AVERAGE":
        folded = folded / len(inputs) if wide.is_floating_point else folded.div(len(inputs), rounding_mode="trunc")
    return folded.to(dtype)


def _dtypes(torch):
    integers = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    floats = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    return integers, floats, [torch.complex64, torch.complex128]


def reductions():
    torch, dist, rank, size = _start()
    integers, floats, complexes = _dtypes(torch)
    names = {
        "bits": ["SUM", "AVERAGE", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"],
        "bool": ["SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"],
        "floats": ["SUM", "AVERAGE", "MIN", "MAX", "PRODUCT"],
        "complex": ["SUM", "AVERAGE", "PRODUCT"],
    }
    table = [(dtype, op) for dtype in integers for op in names["bits"]]
    table += [(torch.bool, op) for op in names["bool"]]
    table += [(dtype, op) for dtype in floats for op in names["floats"]]
    table += [(dtype, op) for dtype in complexes for op in names["complex"]]
    for dtype, op in table:
        for elems in SIZES:
            inputs = [_input(torch, dtype, elems, r) for r in range(size)]
            expected = _expected(torch, op, inputs)
            result = inputs[rank].clone()
            dist.all_reduce(result, getattr(dist.ReduceOp, op))
            assert torch.equal(result, expected), f"all_reduce {op} of {elems} {dtype}"
            result = inputs[rank].clone()
            dist.reduce(result, size - 1, getattr(dist.ReduceOp, op))
            assert torch.equal(result, expected if rank == size - 1 else inputs[rank]), f"reduce {op} {dtype}"
        blocks = [[_input(torch, dtype, 33, r, salt=1 + to) for to in range(size)] for r in range(size)]
        expected = _expected(torch, op, [blocks[r][rank] for r in range(size)])
        for form in ("list", "single"):
            output = torch.empty(33, dtype=dtype)
            if form == "list":
                dist.reduce_scatter(output, blocks[rank], getattr(dist.ReduceOp, op))
            else:
                dist.reduce_scatter_tensor(output, torch.cat(blocks[rank]), getattr(dist.ReduceOp, op))
            assert torch.equal(output, expected), f"reduce_scatter ({form}) {op} of {dtype}"
    for dtype, op in [(torch.bool, "AVERAGE"), (torch.float32, "BAND"), (torch.complex64, "MAX")]:
        with pytest.raises(NotImplementedError, match=f"all_reduce: .*{str(dtype).removeprefix('torch.')}"):
            dist.all_reduce(torch.zeros(3, dtype=dtype), getattr(dist.ReduceOp, op))


@pytest.mark.parametrize("ranks", [1, 2, 3, more(4)])
def test_reductions(ranks):
    """The assertions are in `reductions`, which runs on each rank."""
    run_ranks(reductions, ranks, launcher=Forked("torch"), timeout=110)


def movements():
    torch, dist, rank, size = _start()
    integers, floats, complexes = _dtypes(torch)
    for dtype in [*integers, *floats, *complexes, torch.bool]:
        for elems in SIZES:
            inputs = [_input(torch, dtype, elems, r) for r in range(size)]
            for root in range(size):
                result = inputs[rank].clone()
                dist.broadcast(result, root)
                assert torch.equal(result, inputs[root]), f"broadcast of {elems} {dtype} from {root}"
            outputs = [torch.empty_like(value) for value in inputs]
            dist.all_gather(outputs, inputs[rank])
            assert all(map(torch.equal, outputs, inputs)), f"all_gather of {elems} {dtype}"
            together = torch.empty(size * elems, dtype=dtype)
            dist.all_gather_into_tensor(together, inputs[rank])
            assert torch.equal(together, torch.cat(inputs)), f"all_gather_into_tensor of {elems} {dtype}"
            stacked = torch.empty(size, elems, dtype=dtype)
            dist.all_gather_into_tensor(stacked, inputs[rank])
            assert torch.equal(stacked, torch.stack(inputs))
            # Shapes as in torch's SyncBatchNorm: a leading dimension of 1.
            flat = torch.empty(1, size * elems, dtype=dtype)
            dist.all_gather_into_tensor(flat, inputs[rank][None])
            assert torch.equal(flat[0], together)
        root = size - 1
        inputs = [_input(torch, dtype, 10 + r, r) for r in range(size)]
        outputs = [torch.empty_like(value) for value in inputs]
        dist.gather(inputs[rank], outputs if rank == root else None, root)
        assert rank != root or all(map(torch.equal, outputs, inputs)), f"gather of {dtype}"
        output = torch.empty_like(inputs[rank])
        dist.scatter(output, inputs if rank == root else None, root)
        assert torch.equal(output, inputs[rank]), f"scatter of {dtype}"

        # Rank i sends i + j + 1 rows to rank j.
        parts = [
            [_input(torch, dtype, 2 * (i + j + 1), i, salt=j).view(-1, 2) for j in range(size)] for i in range(size)
        ]
        expected = [parts[i][rank] for i in range(size)]
        outputs = [torch.empty_like(part) for part in expected]
        dist.all_to_all(outputs, parts[rank])
        assert all(map(torch.equal, outputs, expected)), f"all_to_all of {dtype}"
        output = torch.empty_like(torch.cat(expected))
        sizes = [len(part) for part in expected], [len(part) for part in parts[rank]]
        dist.all_to_all_single(output, torch.cat(parts[rank]), *sizes)
        assert torch.equal(output, torch.cat(expected)), f"all_to_all_single of {dtype}"
        equal = [_input(torch, dtype, 3 * size, i).view(size, 3) for i in range(size)]
        output = torch.empty(size, 3, dtype=dtype)
        dist.all_to_all_single(output, equal[rank])
        assert torch.equal(output, torch.stack([equal[i][rank] for i in range(size)]))
    dist.barrier()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_movements(ranks):
    """The assertions are in `movements`, which runs on each rank."""
    run_ranks(movements, ranks, launcher=Forked("torch"), timeout=110)


def layouts():
    torch, dist, rank, size = _start()
    values = [torch.arange(24.0).view(4, 6) * (r + 1) for r in range(size)]
    total = torch.stack(values).sum(0)

    transposed = values[rank].clone().t()
    dist.all_reduce(transposed)
    assert torch.equal(transposed, total.t())
    base = torch.zeros(8, 6)
    base[::2] = values[rank]
    dist.all_reduce(base[::2])
    assert torch.equal(base[::2], total)
    assert torch.equal(base[1::2], torch.zeros(4, 6))
    work = dist.all_reduce(base[::2], dist.ReduceOp.MAX, async_op=True)
    work.wait()
    assert torch.equal(base[::2], total)
    channels_last = torch.arange(48.0).view(2, 3, 2, 4).contiguous(memory_format=torch.channels_last)
    dist.broadcast(channels_last, 1)
    assert torch.equal(channels_last, torch.arange(48.0).view(2, 3, 2, 4))
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar.item() == sum(range(size))

    # Views with the conjugate or the negative bit: the memory holds the values before conjugation or negation.
    numbers = [torch.complex(torch.full((5,), r + 1.0), torch.full((5,), 2.0)) for r in range(size)]
    conjugate = numbers[rank].clone().conj()
    assert conjugate.is_conj()
    dist.all_reduce(conjugate)
    assert torch.equal(conjugate, torch.stack(numbers).sum(0).conj())
    negative = numbers[rank].clone().conj().imag
    assert negative.is_neg()
    dist.broadcast(negative, 0)
    assert torch.equal(negative, torch.full((5,), -2.0))
    gathered = [torch.empty(5, dtype=torch.complex64) for _ in range(size)]
    dist.all_gather(gathered, numbers[rank].conj())
    assert all(torch.equal(gathered[r], numbers[r].conj()) for r in range(size))

    # Strided outputs, and strided inputs with other strides than the output.
    columns = torch.full((3, size), -1.0)
    dist.all_gather([columns[:, r] for r in range(size)], torch.full((3,), float(rank)))
    assert torch.equal(columns, torch.arange(float(size)).expand(3, size))
    output = torch.zeros(2, size).t()
    dist.all_to_all_single(output, torch.arange(2.0 * size).view(2, size).t() + 100 * rank)
    assert output.tolist() == [[100 * r + rank, 100 * r + rank + size] for r in range(size)]

    # Inputs that share memory with outputs.
    whole = torch.zeros(size, 4)
    whole[rank] = rank + 1
    dist.all_gather_into_tensor(whole, whole[rank])
    assert whole[:, 0].tolist() == [r + 1.0 for r in range(size)]
    for call in range(20):
        # The last calls may take the other path of large collectives.
        whole = torch.zeros(size, 70_001)
        whole[rank] = rank + call
        dist.all_gather_into_tensor(whole, whole[rank])
        assert torch.equal(whole, (torch.arange(float(size)) + call)[:, None].expand_as(whole))
    row = torch.zeros(4 * size)
    row[2:6] = rank + 1
    dist.all_gather_into_tensor(row, row[2:6])
    assert torch.equal(row.view(size, 4)[:, 0], torch.arange(1.0, size + 1))
    square = torch.arange(float(size * size)).view(size, size) + 10 * rank
    mine = square.clone()
    dist.all_to_all_single(mine, mine)
    assert mine.tolist() == [[rank * size + c + 10.0 * r for c in range(size)] for r in range(size)]

    with pytest.raises(RuntimeError, match="more than one element"):
        dist.all_reduce(torch.zeros(1).expand(5))
    expanded = [torch.empty(5) for _ in range(size)]
    dist.all_gather(expanded, torch.full((1,), float(rank)).expand(5))
    assert expanded[1].tolist() == [1.0] * 5

    # A collective that writes a tensor increments its version counter, so autograd raises in the backward.
    leaf = torch.ones(3, requires_grad=True)
    product = leaf.exp()
    loss = product.sum()
    dist.all_reduce(product.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.no_grad():
        dist.broadcast(leaf, 0)
    with torch.inference_mode():
        inference = torch.full((3,), float(rank))
        dist.all_reduce(inference)
        assert inference[0] == sum(range(size))


def test_layouts():
    """The assertions are in `layouts`, which runs on each rank."""
    run_ranks(layouts, 3, launcher=Forked("torch"))


def copies():
    torch, dist, _, size = _start()
    # Small copies, and those of parameters, are not worth a warning.
    dist.all_reduce(torch.ones(10, 10).t())
    weights = torch.ones(64, 512, 8, 8).contiguous(memory_format=torch.channels_last)
    dist.broadcast(weights, 0)
    for _ in range(3):
        dist.all_reduce(weights[1:])
    assert weights.is_contiguous(memory_format=torch.channels_last)
    assert (weights[1:] == size**3).all()


def test_copies_of_large_tensors_warn_once():
    """Tensors that are not in row-major order are copied; the results are checked in `copies`."""
    with start_ranks(copies, 2, launcher=Forked("torch")) as job:
        outcome = job.wait()
    assert outcome.exit_code == 0, outcome.describe()
    warned = [line for line in outcome.output.splitlines() if "a collective copies a tensor" in line]
    assert len(warned) == 2, outcome.output
    for line in warned:
        assert "of shape [63, 512, 8, 8]" in line
        assert "not in row-major order" in line


def handles():
    torch, dist, rank, size = _start()
    tensors = [torch.full((1000 + i,), float(rank + i)) for i in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert work.wait() is True
        assert work.is_completed()
        assert work.wait() is True
        assert (tensor == sum(r + i for r in range(size))).all()

    # Every function accepts `async_op=True`.
    whole, part = torch.arange(float(size)), torch.full((1,), float(rank))
    parts = list(torch.zeros(size, 1))
    calls = [
        dist.reduce(part, 0, async_op=True),
        dist.broadcast(part, 1, async_op=True),
        dist.all_gather(parts, part, async_op=True),
        dist.all_gather_into_tensor(whole, part, async_op=True),
        dist.gather(part, parts if rank == 1 else None, 1, async_op=True),
        dist.scatter(part, parts if rank == 1 else None, 1, async_op=True),
        dist.reduce_scatter(part, parts, async_op=True),
        dist.reduce_scatter_tensor(part, whole, async_op=True),
        dist.all_to_all([torch.zeros(1) for _ in range(size)], parts, async_op=True),
        dist.all_to_all_single(torch.zeros(size), whole, async_op=True),
        dist.barrier(async_op=True),
    ]
    assert all(call.wait() for call in calls)

    # Dropping a work handle does not cancel the operation, and its tensors are kept alive until it completes.
    dist.all_reduce(torch.ones(100_000), async_op=True)
    gc.collect()
    dist.barrier()

    # A barrier completes on no rank before the last rank enters it, and waiting releases the GIL: rank 0 enters only
    # after a second thread of rank 1 has run while rank 1's main thread waits.
    folder = Path(os.environ["SMD_TEST_FOLDER"])
    for form in ("blocking", "asynchronous"):
        dist.barrier()
        seen = folder / form
        if rank == 0:
            while not seen.exists():
                time.sleep(0.01)
        work = dist.barrier(async_op=True) if form == "asynchronous" else None
        assert rank == 0 or work is None or not work.is_completed()
        ticker = threading.Thread(target=_tick, args=(seen,))
        if rank == 1:
            ticker.start()
        if work is None:
            dist.barrier()
        else:
            work.wait()
        if rank == 1:
            ticker.join()


def _tick(seen):
    for _ in range(20):
        time.sleep(0.01)
    seen.touch()


@pytest.mark.parametrize("ranks", [2, 3])
def test_handles(ranks):
    """The assertions are in `handles`, which runs on each rank."""
    run_ranks(handles, ranks, launcher=Forked("torch"))


def messages():
    torch, dist, rank, size = _start()
    after, before = (rank + 1) % size, (rank - 1) % size
    received = torch.empty(1000, dtype=torch.int64)
    work = dist.isend(torch.full((1000,), rank), after)
    assert dist.recv(received, before) == before
    assert (received == before).all()
    work.wait()
    # Messages of one pair of ranks are matched by tag, not by order.
    works = [dist.isend(torch.full((3,), float(10 * tag + rank)), after, tag=tag) for tag in range(4)]
    for tag in reversed(range(4)):
        strided = torch.zeros(6)[::2]
        dist.irecv(strided, before, tag=tag).wait()
        assert (strided == 10 * tag + before).all()
    for work in works:
        work.wait()
    with pytest.raises(ValueError, match="tag -1"):
        dist.send(torch.zeros(1), after, tag=-1)
    dist.barrier()


@pytest.mark.parametrize("ranks", [2, 3])
def test_messages(ranks):
    """The assertions are in `messages`, which runs on each rank."""
    run_ranks(messages, ranks, launcher=Forked("torch"))


def groups():
    torch, dist, rank, _ = _start()
    odd = dist.new_group([3, 1])
    even = dist.new_group([0, 2])
    everyone = dist.new_group()
    mine, other = (odd, even) if rank % 2 else (even, odd)
    assert dist.get_world_size(mine) == 2
    assert dist.get_rank(odd if rank % 2 else even) == {3: 0, 1: 1, 0: 0, 2: 1}[rank]
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=mine)
    assert value.item() == (4 if rank % 2 else 2)
    # Roots are global ranks; lists are ordered by group rank.
    value = torch.tensor([float(rank)])
    dist.broadcast(value, 3 if rank % 2 else 2, group=mine)
    assert value.item() == (3 if rank % 2 else 2)
    gathered = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(gathered, torch.tensor([float(rank)]), group=mine)
    assert [t.item() for t in gathered] == ([3, 1] if rank % 2 else [0, 2])
    # Operations of two groups are in flight together, and ranks wait for them in different orders.
    a, b = torch.ones(10), torch.ones(10)
    works = [dist.all_reduce(a, group=everyone, async_op=True), dist.all_reduce(b, group=mine, async_op=True)]
    for work in works if rank % 2 else reversed(works):
        work.wait()
    assert (a == 4).all()
    assert (b == 2).all()
    dist.barrier(group=None)
    dist.barrier(group=dist.group.WORLD)
    with pytest.raises(ValueError, match=f"rank {rank} is not a member of ProcessGroup"):
        dist.all_reduce(a, group=other)
    with pytest.raises(ValueError, match="is not a member of ProcessGroup"):
        dist.broadcast(a, 0 if rank % 2 else 1, group=mine)
    with pytest.raises(ValueError, match="'nccl' is not a group"):
        dist.barrier(group="nccl")


def test_groups():
    """The assertions are in `groups`, which runs on each rank."""
    run_ranks(groups, 4, launcher=Forked("torch"))


def life_cycle():
    import torch

    import smdistributed.dataparallel.torch as face
    from smdistributed.dataparallel.exceptions import SMDDPAlreadyInitializedError, SMDDPNotInitializedError

    dist = face.distributed
    assert face.dist is dist
    assert dist.is_available()
    assert not dist.is_initialized()
    calls = [dist.get_rank, dist.get_world_size, dist.get_local_rank, dist.barrier]
    calls += [lambda: dist.all_reduce(torch.ones(1)), lambda: dist.all_reduce(torch.ones(1), async_op=True)]
    for call in calls:
        with pytest.raises(SMDDPNotInitializedError, match=r"call `init\(\)` first"):
            call()
    dist.init_process_group(backend="smddp", timeout=3)
    assert dist.is_initialized()
    text = r"^init\(\) called more than once\. smdistributed\.dataparallel is already initialized\.$"
    with pytest.raises(SMDDPAlreadyInitializedError, match=text):
        dist.init_process_group()
    ranks = face.get_rank(), face.get_world_size(), face.get_local_rank()
    dist.destroy_process_group()
    assert not dist.is_initialized()
    dist.destroy_process_group()
    dist.init_process_group()
    assert (face.get_rank(), face.get_world_size(), face.get_local_rank()) == ranks
    value = torch.ones(1)
    dist.all_reduce(value)
    return (*ranks, value.item())


def test_life_cycle():
    assert run_ranks(life_cycle, 2, launcher=Forked("torch")) == [(0, 2, 0, 2.0), (1, 2, 1, 2.0)]
