"""Collectives on CUDA tensors, compared with PyTorch's NCCL backend in the same processes.

A job on GPUs takes long to start, so each job makes many checks and reports those that failed.
"""

from __future__ import annotations

import pytest

from support import devices, run_ranks
from support.checks import Checks, start_on_device
from support.devices import NUM_RANKS, needs_one

pytestmark = [pytest.mark.timeout(240), needs_one]

SIZES = (0, 1, 7, 1000, 65_537, 3 << 20)


def _values(torch, dtype, elems, salt):
    generator = torch.Generator(device="cuda").manual_seed(salt)
    options = {"generator": generator, "device": "cuda"}
    if dtype is torch.bool:
        return torch.randint(0, 2, (elems,), **options).bool()
    if dtype.is_complex:
        real = torch.float32 if dtype is torch.complex64 else torch.float64
        return torch.complex(*(torch.randn(elems, dtype=real, **options) for _ in range(2)))
    if dtype.is_floating_point:
        return torch.randn(elems, **options).to(dtype)
    return torch.randint(0 if dtype is torch.uint8 else -8, 8, (elems,), **options).to(dtype)


def _equal(torch, mine, theirs, what):
    if not torch.equal(mine, theirs):
        index = (mine != theirs).nonzero()[0].tolist()
        raise AssertionError(f"{what}: at {index} {mine[tuple(index)].item()} instead of {theirs[tuple(index)].item()}")


def collectives_body():
    torch, c10d, dist, rank, size = start_on_device()
    checks = Checks()
    ops = {
        "SUM": c10d.ReduceOp.SUM,
        "AVERAGE": c10d.ReduceOp.AVG,
        "MIN": c10d.ReduceOp.MIN,
        "MAX": c10d.ReduceOp.MAX,
        "PRODUCT": c10d.ReduceOp.PRODUCT,
    }
    floats = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    whole = [torch.uint8, torch.int8, torch.int32, torch.int64]
    for dtype in [*floats, *whole]:
        for name, op in ops.items():
            if name == "AVERAGE" and dtype in whole:
                continue
            for elems in SIZES:

                def check(dtype=dtype, name=name, op=op, elems=elems):
                    mine = _values(torch, dtype, elems, rank)
                    theirs = mine.clone()
                    dist.all_reduce(mine, getattr(dist.ReduceOp, name))
                    c10d.all_reduce(theirs, op)
                    _equal(torch, mine, theirs, "all_reduce")

                checks(f"all_reduce {dtype} {name} {elems}", check)

    everything = [*floats, *whole, torch.bool, torch.complex64, torch.complex128, torch.int16]
    for dtype in everything:
        for elems in SIZES:

            def check(dtype=dtype, elems=elems):
                inputs = [_values(torch, dtype, elems, 50 + r) for r in range(size)]
                x = inputs[rank].clone()
                dist.broadcast(x, size - 1)
                _equal(torch, x, inputs[size - 1], "broadcast")
                outputs = [torch.empty_like(x) for _ in range(size)]
                dist.all_gather(outputs, inputs[rank])
                for output, expected in zip(outputs, inputs, strict=True):
                    _equal(torch, output, expected, "all_gather")
                flat = torch.empty(size * elems, dtype=dtype, device="cuda")
                dist.all_gather_into_tensor(flat, inputs[rank])
                _equal(torch, flat, torch.cat(inputs), "all_gather_into_tensor")
                gathered = [torch.empty_like(x) for _ in range(size)] if rank == 1 else None
                dist.gather(inputs[rank], gathered, dst=1)
                for output, expected in zip(gathered or [], inputs, strict=False):
                    _equal(torch, output, expected, "gather")
                received = torch.empty_like(x)
                dist.scatter(received, inputs if rank == 0 else None, src=0)
                _equal(torch, received, inputs[rank], "scatter")
                blocks = [_values(torch, dtype, elems, 1000 * rank + to) for to in range(size)]
                outputs = [torch.empty_like(x) for _ in range(size)]
                dist.all_to_all(outputs, blocks)
                for source, output in enumerate(outputs):
                    _equal(torch, output, _values(torch, dtype, elems, 1000 * source + rank), "all_to_all")
                if rank == 0:
                    dist.send(inputs[0], 1)
                elif rank == 1:
                    dist.recv(received, 0)
                    _equal(torch, received, inputs[0], "recv")

            checks(f"moves {dtype} {elems}", check)

    def reductions():
        for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.bool):
            inputs = [_values(torch, dtype, 5 * size, 70 + r) for r in range(size)]
            total = torch.stack(inputs).any(0) if dtype is torch.bool else torch.stack(inputs).sum(0)
            # NCCL rounds to the dtype after each addition.
            close = {"rtol": 2**-6, "atol": 2**-5} if dtype is torch.bfloat16 else {"rtol": None, "atol": None}
            x = inputs[rank].clone()
            dist.reduce(x, 1)
            torch.testing.assert_close(x, total if rank == 1 else inputs[rank], **close)
            part = torch.empty(5, dtype=dtype, device="cuda")
            dist.reduce_scatter_tensor(part, inputs[rank])
            torch.testing.assert_close(part, total[5 * rank : 5 * rank + 5], **close)
            part.zero_()
            dist.reduce_scatter(part, [block.clone() for block in inputs[rank].chunk(size)])
            torch.testing.assert_close(part, total[5 * rank : 5 * rank + 5], **close)

            # Adjacent blocks, also with the output among them.
            blocks = list(inputs[rank].clone().chunk(size))
            part.zero_()
            dist.reduce_scatter(part, blocks)
            torch.testing.assert_close(part, total[5 * rank : 5 * rank + 5], **close)
            dist.reduce_scatter(blocks[rank], blocks)
            torch.testing.assert_close(blocks[rank], total[5 * rank : 5 * rank + 5], **close)

    checks("reduce and reduce_scatter", reductions)

    def adjacent():
        mine = [_values(torch, torch.float32, 6, 90 + r) for r in range(size)]
        for in_place in (False, True):
            whole = torch.zeros(size, 6, device="cuda")
            blocks = list(whole.unbind())
            blocks[rank].copy_(mine[rank])
            dist.all_gather(blocks, blocks[rank] if in_place else mine[rank])
            _equal(torch, whole, torch.stack(mine), "all_gather into adjacent blocks")

    checks("adjacent blocks", adjacent)

    def uneven():
        outputs = [torch.empty(r + 1, device="cuda") for r in range(size)]
        dist.all_gather(outputs, torch.full((rank + 1,), float(rank), device="cuda"))
        for r, output in enumerate(outputs):
            _equal(torch, output, torch.full((r + 1,), float(r), device="cuda"), "all_gather of several sizes")
        sizes = [(rank + to) % 3 for to in range(size)]
        x = torch.cat([torch.full((n,), 10.0 * rank + to, device="cuda") for to, n in enumerate(sizes)])
        y = torch.empty(sum(sizes), device="cuda")
        dist.all_to_all_single(y, x, sizes, sizes)
        expected = torch.cat([torch.full((n,), 10.0 * source + rank, device="cuda") for source, n in enumerate(sizes)])
        _equal(torch, y, expected, "all_to_all_single")

    checks("uneven blocks", uneven)

    def views():
        x = torch.arange(12.0, device="cuda").reshape(3, 4)
        dist.all_reduce(x.t())
        _equal(torch, x, size * torch.arange(12.0, device="cuda").reshape(3, 4), "a transposed view")
        work = dist.all_reduce(x[:, 1:3], async_op=True)
        work.wait()
        expected = size * torch.arange(12.0, device="cuda").reshape(3, 4)
        expected[:, 1:3] *= size
        _equal(torch, x, expected, "a strided view, asynchronous")

    checks("tensors that are not dense", views)

    def refusals():
        for tensor, op in ((torch.ones(3, dtype=torch.int32), "bit_xor"), (torch.ones(3, dtype=torch.int16), "sum")):
            with pytest.raises(NotImplementedError, match="NCCL has no reduction"):
                torch.ops.smd.all_reduce_(tensor.cuda(), op, 0)
        with pytest.raises((ValueError, NotImplementedError), match=r"mixed|CPU memory"):
            dist.all_gather([torch.empty(1) for _ in range(size)], torch.ones(1, device="cuda"))

    checks("what NCCL lacks", refusals)

    def order_and_memory():
        # An operation must wait for the work that produces its tensor, and the caching allocator must not reuse the
        # tensor's memory before the operation is done.
        side = torch.cuda.Stream()
        for turn in range(20):
            with torch.cuda.stream(side if turn % 2 else torch.cuda.current_stream()):
                x = torch.zeros(1 << 20, device="cuda")
                torch.cuda._sleep(2_000_000)
                x += rank + 1
                y = x * 1
                work = dist.all_reduce(x, async_op=True)
                dropped = dist.all_reduce(y, async_op=True)
                del y, dropped
                junk = [torch.full((1 << 20,), -1.0, device="cuda") for _ in range(4)]
                work.wait()
                assert x.sum().item() == (1 << 20) * size * (size + 1) / 2
                del junk
        torch.cuda.synchronize()
        assert dist.all_reduce(x, async_op=True).wait()

    checks("order and memory of asynchronous operations", order_and_memory)

    def graph():
        x = torch.zeros(1000, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x += 1
            dist.all_reduce(x)
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            x *= 2
        expected = torch.zeros(1000, device="cuda")
        for _ in range(5):
            graph.replay()
            expected = 2 * size * size * (expected + 1)
        _equal(torch, x, expected, "a captured all_reduce")

    checks("CUDA graph", graph)
    torch.cuda.synchronize()
    c10d.destroy_process_group()
    return checks.failed


def test_collectives_equal_nccl():
    # All-reduces between peers are disabled (`SMD_P2P_MAX_BYTES` is 0): NCCL sums in another order, so only its own
    # results are equal bit by bit.
    failed = run_ranks(
        collectives_body, NUM_RANKS, env={"SMD_TIMEOUT_SECONDS": "40", "SMD_P2P_MAX_BYTES": "0"}, timeout=90
    )
    assert failed == [[]] * NUM_RANKS, "\n".join(line for rank in failed for line in rank)


def backend_body():
    torch, c10d, _, rank, size = start_on_device()
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    checks = Checks()
    group = c10d.new_group(backend="smddp")

    def compare(name, run):
        def check():
            mine, theirs = run(group), run(None)
            torch.cuda.synchronize()
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)

        checks(name, check)

    def fill(elems, salt=0, dtype=torch.float32):
        return _values(torch, dtype, elems, 100 * salt + rank)

    for asynchronous in (False, True):

        def finish(work):
            if work is not None:
                work.wait()

        def all_reduce(pg, asynchronous=asynchronous):
            x = fill(1000)
            finish(c10d.all_reduce(x, group=pg, async_op=asynchronous))
            return [x]

        def all_gather(pg, asynchronous=asynchronous):
            outputs = [torch.empty(10, device="cuda") for _ in range(size)]
            finish(c10d.all_gather(outputs, fill(10), group=pg, async_op=asynchronous))
            return outputs

        def into_tensor(pg, asynchronous=asynchronous):
            x = torch.empty(10 * size, device="cuda")
            finish(c10d.all_gather_into_tensor(x, fill(10), group=pg, async_op=asynchronous))
            y = torch.empty(10, device="cuda")
            finish(c10d.reduce_scatter_tensor(y, fill(10 * size), group=pg, async_op=asynchronous))
            return [x, y]

        def all_to_all(pg, asynchronous=asynchronous):
            x = torch.empty(4 * size, device="cuda")
            finish(c10d.all_to_all_single(x, fill(4 * size), group=pg, async_op=asynchronous))
            return [x]

        def rooted(pg, asynchronous=asynchronous):
            x, y = fill(9), fill(9, 3)
            finish(c10d.broadcast(x, 1, group=pg, async_op=asynchronous))
            finish(c10d.reduce(y, 0, group=pg, async_op=asynchronous))
            return [x, y if rank == 0 else x]

        def coalesced(pg, asynchronous=asynchronous):
            xs = [fill(n, n) for n in (3, 100, 5000)]
            with c10d._coalescing_manager(group=pg, async_ops=asynchronous) as manager:
                for x in xs:
                    c10d.all_reduce(x, group=pg)
            if asynchronous:
                manager.wait()
            return xs

        def future(pg):
            x = fill(1000)
            work = c10d.all_reduce(x, group=pg, async_op=True)
            return [work.get_future().then(lambda done: [done.value()[0] * 2]).wait()[0]]

        for run in (all_reduce, all_gather, into_tensor, all_to_all, rooted, coalesced, future):
            compare(f"{run.__name__} async={asynchronous}", run)

    def ring(pg):
        out, received = fill(1 << 18), torch.empty(1 << 18, device="cuda")
        ops = [
            c10d.P2POp(c10d.isend, out, (rank + 1) % size, group=pg),
            c10d.P2POp(c10d.irecv, received, (rank - 1) % size, group=pg),
        ]
        for work in c10d.batch_isend_irecv(ops):
            work.wait()
        return [received]

    compare("batch_isend_irecv", ring)

    def premul(pg):
        x = fill(64)
        c10d.all_reduce(x, op=c10d._make_nccl_premul_sum(0.5), group=pg)
        return [x]

    compare("premul_sum", premul)

    def completion():
        x = torch.ones(1 << 22, device="cuda")
        torch.cuda._sleep(100_000_000)
        work = c10d.all_reduce(x, group=group, async_op=True)
        assert not work.is_completed()
        work.wait()
        torch.cuda.synchronize()
        assert work.is_completed()
        assert work.is_success()
        assert x[0].item() == size

    checks("completion follows the device", completion)

    def objects():
        received = [None] * size
        c10d.all_gather_object(received, {"rank": rank}, group=group)
        assert received == [{"rank": r} for r in range(size)]
        c10d.barrier(group=group)

    checks("objects and barrier", objects)

    def sub_group():
        pair = c10d.new_group([0, 1], backend="smddp")
        if rank < 2:
            x = torch.full((3,), float(rank + 1), device="cuda")
            c10d.all_reduce(x, group=pair)
            assert x.tolist() == [3.0] * 3
            c10d.destroy_process_group(pair)

    checks("a group of two", sub_group)

    def functional():
        import torch.distributed._functional_collectives as funcol

        def step(x):
            return funcol.all_reduce(x * 2, "sum", group) + 1

        x = fill(128)
        expected = step(x)
        torch.testing.assert_close(torch.compile(step)(x), expected)

    checks("functional collectives under torch.compile", functional)
    torch.cuda.synchronize()
    c10d.destroy_process_group()
    return checks.failed


def test_backend_equals_nccl():
    failed = run_ranks(backend_body, NUM_RANKS, env={"SMD_TIMEOUT_SECONDS": "40"}, timeout=90)
    assert failed == [[]] * NUM_RANKS, "\n".join(line for rank in failed for line in rank)


def same_device_body():
    import torch

    import smdistributed.dataparallel.torch.distributed as dist

    dist.init_process_group()
    torch.cuda.set_device(0)
    dist.all_reduce(torch.ones(3, device="cuda"))


def test_two_ranks_on_one_device_are_an_error():
    from support.ranks import RanksFailedError

    with pytest.raises(RanksFailedError) as caught:
        run_ranks(same_device_body, 2, timeout=90)
    assert "ranks 0 and 1 use the same device" in str(caught.value)


def stuck_body(kind):
    import time

    import torch

    import smdistributed.dataparallel.torch.distributed as dist

    dist.init_process_group()
    rank = dist.get_rank()
    torch.cuda.set_device(devices.own())
    x = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    start = time.monotonic()
    text = ""
    try:
        if kind == "missing" and rank == 1:
            time.sleep(20)
        elif kind == "mismatch" and rank == 1:
            dist.all_reduce(x[:1024])
        else:
            dist.all_reduce(x)
        # The device notices at once that something is wrong, the host's threads a moment later: a later call raises.
        while time.monotonic() < start + 30:
            torch.cuda.synchronize()
            dist.all_reduce(x)
    except dist_errors() as error:
        text = str(error)
    return text, time.monotonic() - start


def dist_errors():
    return (RuntimeError, ValueError)


@pytest.mark.parametrize("kind", ["missing", "mismatch"])
def test_the_error_of_a_stuck_operation_has_the_reason(kind):
    # The same limit holds for the first operation, which compiles kernels.
    env = {"SMD_TIMEOUT_SECONDS": "12"}
    (first, seconds), (second, _) = run_ranks(stuck_body, 2, kind, env=env, timeout=90)
    assert seconds < 22, seconds
    if kind == "missing":
        assert "timed out after" in first, first
        assert "no sign of rank(s) [1]" in first, first
    else:
        text = "all_reduce(sum) of 1024 float32"
        assert (text in first and text in second) or "timed out" in first, (first, second)
