"""Reductions between peers' GPUs without NCCL: results equal those on CPUs bit by bit, calls keep their order on all
streams, and no failure hangs.
"""

from __future__ import annotations

import functools
import os
import time

import pytest

from support import devices, run_ranks, start_ranks
from support.devices import NUM_RANKS, SHARED, needs_four, needs_one

pytestmark = [pytest.mark.timeout(120), needs_one]

#: Smaller than a vector, whole vectors and not, one block and several, and both algorithms, one-shot and two-shot.
SIZES = (0, 1, 7, 1000, 4096, 65_537, 300_007, 700_001)
CASES = [
    ("float32", "sum"),
    ("float32", "average"),
    ("float32", "min"),
    ("bfloat16", "sum"),
    ("bfloat16", "average"),
    ("float16", "product"),
    ("float64", "average"),
    ("uint8", "sum"),
    ("int64", "average"),
    ("int32", "bit_xor"),
    ("int16", "max"),
    ("bool", "sum"),
    ("complex64", "product"),
]
several = pytest.mark.parametrize("n", [2, pytest.param(4, marks=needs_four)])


def _start():
    import torch

    import smdistributed.dataparallel.torch.distributed as dist

    dist.init_process_group()
    torch.cuda.set_device(devices.own())
    return torch, dist, dist.get_rank(), dist.get_world_size()


def _values(torch, dtype, elems, salt):
    generator = torch.Generator().manual_seed(salt)
    if dtype is torch.bool:
        return torch.randint(0, 2, (elems,), generator=generator).bool()
    if dtype.is_complex:
        return torch.randn(elems, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return torch.randn(elems, generator=generator).to(dtype)
    return torch.randint(0 if dtype is torch.uint8 else -100, 100, (elems,), generator=generator).to(dtype)


def _differ(torch, found, expected):
    """Describes the first element whose bits differ; None if there is none."""
    a, b = (x.cpu().contiguous().view(torch.uint8) for x in (found, expected))
    if torch.equal(a, b):
        return None
    at = (a != b).nonzero()[0].item() // found.element_size()
    return f"at {at} of {found.numel()}: {found.cpu()[at].item()} instead of {expected.cpu()[at].item()}"


def bits_body():
    torch, dist, rank, size = _start()
    failed = []
    for name, op in CASES:
        dtype = getattr(torch, name)
        for turn, elems in enumerate(SIZES):
            expected = _values(torch, dtype, elems, 100 * turn + rank)
            # Addresses are not always multiples of 16 bytes.
            shift = turn % 3
            whole = torch.zeros(elems + shift + 3, dtype=dtype, device="cuda")
            x = whole[shift : shift + elems]
            x.copy_(expected)
            torch.ops.smd.all_reduce_(x, op, 0)
            torch.ops.smd.all_reduce_(expected, op, 0)
            if text := _differ(torch, x, expected):
                failed.append(f"all_reduce {name} {op} {elems}: {text}")
            if whole[:shift].any() or whole[shift + elems :].any():
                failed.append(f"all_reduce {name} {op} {elems}: wrote outside of the tensor")
    for elems in SIZES:
        whole = _values(torch, torch.bfloat16, elems * size, 7 * elems + rank)
        found, expected = torch.empty(elems, dtype=whole.dtype, device="cuda"), torch.empty(elems, dtype=whole.dtype)
        dist.reduce_scatter_tensor(found, whole.cuda(), dist.ReduceOp.AVERAGE)
        dist.reduce_scatter_tensor(expected, whole, dist.ReduceOp.AVERAGE)
        if text := _differ(torch, found, expected):
            failed.append(f"reduce_scatter {elems}: {text}")
    for elems in SIZES:
        # NCCL does not reduce int16. Blocks of different lengths are reduced to one member after the other.
        expected = _values(torch, torch.int16, elems, rank)
        x, root = expected.cuda(), elems % size
        for tensor in (x, expected):
            dist.reduce(tensor, root)
        if text := _differ(torch, x, expected):
            failed.append(f"reduce int16 {elems}: {text}")
        blocks = [_values(torch, torch.int16, elems + to, rank + to) for to in range(size)]
        found, expected = (torch.zeros(elems + rank, dtype=torch.int16, device=device) for device in ("cuda", "cpu"))
        dist.reduce_scatter(found, [block.cuda() for block in blocks])
        dist.reduce_scatter(expected, blocks)
        if text := _differ(torch, found, expected):
            failed.append(f"reduce_scatter int16 {elems} and more: {text}")
    # NCCL does not support int16, so a tensor larger than the staging memory is reduced in pieces.
    expected = _values(torch, torch.int16, (9 << 20) + 5, rank)
    x = expected.cuda()
    for tensor in (x, expected):
        torch.ops.smd.all_reduce_(tensor, "sum", 0)
    if text := _differ(torch, x, expected):
        failed.append(f"all_reduce int16 in pieces: {text}")
    return failed


@several
def test_results_equal_those_of_cpus_bit_by_bit(n):
    failed = run_ranks(bits_body, n, env={"SMD_TIMEOUT_SECONDS": "15"}, timeout=90)
    assert failed == [[]] * n, "\n".join(line for rank in failed for line in rank)


def blocks_body():
    torch, dist, rank, size = _start()
    failed = []

    def compare(found, expected, what):
        if text := _differ(torch, found, expected):
            failed.append(f"{what}: {text}")

    def gathered(mine, outputs):
        dist.all_gather(outputs, mine)
        return torch.cat(outputs)

    for name in [*sorted({name for name, _ in CASES}), "int8", "complex128"]:
        dtype = getattr(torch, name)
        for turn, elems in enumerate((*SIZES, (1 << 20) + 3)):
            shift, what = turn % 3, f"{name} {elems}"
            expected = _values(torch, dtype, elems + shift, 100 * turn + rank)
            x = expected.cuda()
            mine, outputs = expected[shift:], [torch.empty(elems, dtype=dtype) for _ in range(size)]
            found = gathered(x[shift:], [torch.empty(elems, dtype=dtype, device="cuda") for _ in range(size)])
            compare(found, gathered(mine, outputs), f"all_gather {what}")
            # The input lies in the output.
            whole = torch.zeros(size * elems + 2, dtype=dtype, device="cuda")
            inner = whole[1:-1]
            own = inner[rank * elems : (rank + 1) * elems]
            own.copy_(mine)
            dist.all_gather_into_tensor(inner, own)
            compare(inner, torch.cat(outputs), f"all_gather in place {what}")
            if whole[0].item() or whole[-1].item():
                failed.append(f"all_gather in place {what}: wrote outside of the tensor")
            for root in range(size):
                found, sent = (tensor.clone() for tensor in (x, expected))
                dist.broadcast(found[shift:], root)
                dist.broadcast(sent[shift:], root)
                compare(found, sent, f"broadcast of {root} {what}")
    return failed


@several
def test_blocks_arrive_whole_at_any_address(n):
    failed = run_ranks(blocks_body, n, env={"SMD_TIMEOUT_SECONDS": "15"}, timeout=90)
    assert failed == [[]] * n, "\n".join(line for rank in failed for line in rank)


def _kinds(torch, elems, salt):
    """Float32 values that fit bfloat16 ("narrow"), that do not ("full"), and a mixture of rows of both."""
    full, narrow = _values(torch, torch.float32, elems, salt), _values(torch, torch.bfloat16, elems, salt + 1).float()
    rows = torch.arange(elems) // 700 % 5 == 0
    return {"full": full, "narrow": narrow, "mixed": torch.where(rows, full, narrow)}


def _any_bits(torch, dtype, elems, salt):
    """Values of any 16 bits: subnormal numbers, infinities and NaNs too."""
    generator = torch.Generator().manual_seed(salt)
    return torch.randint(-(1 << 15), 1 << 15, (elems,), dtype=torch.int16, generator=generator).view(dtype)


def _all_reduces_in_chunks(torch, values, shift, op, name):
    """Reduces a part of a larger tensor three times; returns how results differ from the CPU's."""
    failed, elems = [], values.numel()
    whole = torch.zeros(elems + shift + 3, dtype=values.dtype, device="cuda")
    x, expected = whole[shift : shift + elems], values.clone()
    torch.ops.smd.all_reduce_(expected, op, 0)
    for turn in range(3):
        x.copy_(values)
        torch.ops.smd.all_reduce_(x, op, 0)
        # A NaN must stay one, with any bits.
        found, reduced = (torch.where(each.isnan(), torch.ones_like(each), each) for each in (x, expected))
        if text := _differ(torch, found, reduced) or _differ(torch, x.isnan(), expected.isnan()):
            failed.append(f"all_reduce {name} {op} {elems}, turn {turn}: {text}")
    if whole[:shift].any() or whole[shift + elems :].any():
        failed.append(f"all_reduce {name} {op} {elems}: wrote outside of the tensor")
    return failed


def chunks_body():
    torch, dist, rank, size = _start()
    import torch.distributed as c10d

    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 - registers the backend

    failed = []
    # Few rounds and many, whole chunks and not, addresses that are not multiples of 16 bytes.
    for elems, shift, op in (
        (2_500_003, 1, "sum"),
        (3_145_728, 0, "average"),
        (20_000_001, 2, "average"),
        (2_400_000, 0, "max"),
    ):
        for kind, values in _kinds(torch, elems, elems + 10 * rank).items():
            failed += _all_reduces_in_chunks(torch, values, shift, op, kind)
    # Numbers of 16 bits.
    for dtype, elems, shift, op in (
        (torch.bfloat16, 5_000_003, 1, "sum"),
        (torch.bfloat16, 16_777_216, 0, "average"),
        (torch.bfloat16, 6_291_456, 8, "max"),
        (torch.float16, 6_291_456, 0, "sum"),
        (torch.float16, 9_000_001, 3, "average"),
        (torch.bfloat16, 40_000_001, 0, "sum"),
    ):
        values = _values(torch, dtype, elems, elems + 10 * rank)
        failed += _all_reduces_in_chunks(torch, values, shift, op, dtype)
    for dtype in (torch.bfloat16, torch.float16):
        for op in ("sum", "average", "product", "max"):
            values = _any_bits(torch, dtype, 5_000_000, rank)
            failed += _all_reduces_in_chunks(torch, values, 0, op, f"any bits of {dtype}")
    # Many tensors in one coalesced call, more than one launch can take, some of them empty; with small calls before and
    # after.
    c10d.init_process_group("smddp", rank=rank, world_size=size)
    lengths = [(turn * 7919) % 90_001 for turn in range(300)]
    for kind in ("full", "narrow", "mixed", "bfloat16"):
        values = [
            _values(torch, torch.bfloat16, n, n + rank) if kind == "bfloat16" else
            _kinds(torch, max(n, 1), n + rank)[kind][:n] for n in lengths
        ]  # fmt: skip
        expected = [x.clone() for x in values]
        for x in expected:
            torch.ops.smd.all_reduce_(x, "sum", 0)
        tensors = [x.cuda() for x in values]
        small = torch.full((5,), float(rank + 1), device="cuda")
        torch.ops.smd.all_reduce_(small, "sum", 0)
        with c10d._coalescing_manager(device=torch.device("cuda"), async_ops=False):
            for x in tensors:
                c10d.all_reduce(x)
        torch.ops.smd.all_reduce_(small, "sum", 0)
        assert (small == size * size * (size + 1) / 2).all()
        for x, right in zip(tensors, expected, strict=True):
            if text := x.numel() and _differ(torch, x, right):
                failed.append(f"{kind} of {len(x)} among {len(lengths)}: {text}")
    # The same in a CUDA graph.
    x = torch.empty(5_000_000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
    for turn in range(3):
        values = [_values(torch, torch.float32, x.numel(), 10 * turn + member) for member in range(size)]
        x.copy_(values[rank])
        graph.replay()
        torch.ops.smd.all_reduce_(small, "max", 0)
        if text := _differ(torch, x, functools.reduce(torch.add, values)):
            failed.append(f"replay {turn}: {text}")
    c10d.destroy_process_group()
    return failed


def test_large_tensors_equal_those_of_cpus_bit_by_bit():
    failed = run_ranks(chunks_body, 2, env={"SMD_TIMEOUT_SECONDS": "20"}, timeout=100)
    assert failed == [[]] * 2, "\n".join(line for rank in failed for line in rank)


def kernels_body():
    """The kernels of the device that large all-reduces run."""
    torch, dist, _, _ = _start()
    found = {}
    for dtype, elems in ((torch.float32, 3_000_000), (torch.bfloat16, 6_000_000), (torch.float16, 60_000_000)):
        x = torch.ones(elems, dtype=dtype, device="cuda")
        dist.all_reduce(x)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            dist.all_reduce(x)
            torch.cuda.synchronize()
        found[str(dtype)] = [event.key for event in profile.key_averages()]
    return found


def test_large_all_reduces_between_two_run_in_chunks():
    for found in run_ranks(kernels_body, 2, env={"SMD_TIMEOUT_SECONDS": "20"}, timeout=60):
        assert all("exchange_chunks" in kernels for kernels in found.values()), found


def large_blocks_body():
    """Reduce-scatters and all-gathers above the size that small kernels run."""
    torch, _, rank, size = _start()
    import torch.distributed as c10d

    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 - registers the backend

    c10d.init_process_group("smddp", rank=rank, world_size=size)
    failed = []

    def compare(found, expected, what):
        if text := _differ(torch, found, expected):
            failed.append(f"{what}: {text}")

    # Few rounds and many, whole chunks and not; addresses of outputs are not always multiples of 16 bytes. Blocks
    # whose length is no multiple of 16 bytes are left to NCCL.
    lengths = (2_200_004, 4_194_304)
    for name, op in (("float32", "sum"), ("bfloat16", "average"), ("float16", "max")):
        dtype = getattr(torch, name)
        for turn, elems in enumerate(lengths):
            elems = elems * 4 // dtype.itemsize
            values = _values(torch, dtype, size * elems, 10 * turn + rank)
            if name == "float32" and turn == 1:
                values = values.bfloat16().float()
            expected, x = torch.empty(elems, dtype=dtype), values.cuda()
            whole = torch.zeros(elems + turn + 3, dtype=dtype, device="cuda")
            found = whole[turn : turn + elems]
            reduction = {"sum": c10d.ReduceOp.SUM, "average": c10d.ReduceOp.AVG, "max": c10d.ReduceOp.MAX}[op]
            c10d.reduce_scatter_tensor(expected, values, reduction)
            for repeat in range(2):
                found.zero_()
                c10d.reduce_scatter_tensor(found, x, reduction)
                compare(found, expected, f"reduce_scatter {name} {op} {elems}, repeat {repeat}")
            if whole[:turn].any() or whole[turn + elems :].any():
                failed.append(f"reduce_scatter {name} {op} {elems}: wrote outside of the tensor")
            own = x[rank * elems : (rank + 1) * elems]
            c10d.reduce_scatter_tensor(own, x, reduction)
            compare(own, expected, f"reduce_scatter in place {name} {op} {elems}")
    for name in ("float32", "bfloat16", "uint8", "int64", "complex128"):
        dtype = getattr(torch, name)
        for turn, elems in enumerate(lengths):
            elems = elems * 4 // dtype.itemsize + turn
            both = [_values(torch, dtype, elems, 10 * turn + member) for member in range(size)]
            mine = both[rank]
            whole = torch.zeros(size * elems + 2, dtype=dtype, device="cuda")
            inner = whole[1:-1]
            c10d.all_gather_into_tensor(inner, mine.cuda())
            compare(inner, torch.cat(both), f"all_gather {name} {elems}")
            own = inner[rank * elems : (rank + 1) * elems]
            inner.zero_()
            own.copy_(mine)
            c10d.all_gather_into_tensor(inner, own)
            compare(inner, torch.cat(both), f"all_gather in place {name} {elems}")
            if whole[0].item() or whole[-1].item():
                failed.append(f"all_gather {name} {elems}: wrote outside of the tensor")
    # Several at once, more than one launch can take, some of them empty.
    lengths = [4 * ((turn * 7919) % 15_001) for turn in range(300)]
    blocks = [[_values(torch, torch.float32, n, n + member) for n in lengths] for member in range(size)]
    outputs = [torch.zeros(size * n, device="cuda") for n in lengths]
    parts = [torch.zeros(n, device="cuda") for n in lengths]
    with c10d._coalescing_manager(device=torch.device("cuda"), async_ops=False):
        for output, block in zip(outputs, blocks[rank], strict=True):
            c10d.all_gather_into_tensor(output, block.cuda())
    with c10d._coalescing_manager(device=torch.device("cuda"), async_ops=False):
        for output, part in zip(outputs, parts, strict=True):
            c10d.reduce_scatter_tensor(part, output)
    for at, n in enumerate(lengths):
        if n:
            compare(outputs[at], torch.cat([member[at] for member in blocks]), f"all_gather {n} of {len(lengths)}")
            compare(parts[at], size * blocks[rank][at], f"reduce_scatter {n} of {len(lengths)}")
    # In a CUDA graph, with another call of the group before and after.
    x, part = torch.empty(8_000_000, device="cuda"), torch.empty(4_000_000, device="cuda")
    small = torch.ones(5, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c10d.reduce_scatter_tensor(part, x)
        c10d.all_gather_into_tensor(x, part)
    for turn in range(3):
        values = [_values(torch, torch.float32, x.numel(), 10 * turn + member) for member in range(size)]
        x.copy_(values[rank])
        c10d.all_reduce(small)
        graph.replay()
        compare(x, functools.reduce(torch.add, values), f"replay {turn}")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        c10d.reduce_scatter_tensor(part, x)
        c10d.all_gather_into_tensor(x, part)
        torch.cuda.synchronize()
    if sum(event.count for event in profile.key_averages() if event.key == "exchange_chunks") != 2:
        failed.append(f"ran {[event.key for event in profile.key_averages()]}")
    c10d.destroy_process_group()
    return failed


def test_large_blocks_equal_those_of_cpus_bit_by_bit():
    failed = run_ranks(large_blocks_body, 2, env={"SMD_TIMEOUT_SECONDS": "20"}, timeout=100)
    assert failed == [[]] * 2, "\n".join(line for rank in failed for line in rank)


def buckets_body():
    """Reduces gradients with known values as buckets of DDP. Later steps reduce them in place in their slots."""
    torch, _, rank, _ = _start()
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP

    failed = []
    for elems in (2_500_003, 9_000_000, 30_000_001):
        for kind, values in _kinds(torch, elems, elems + 10 * rank).items():
            expected = values.clone()
            torch.ops.smd.all_reduce_(expected, "average", 0)
            inner = torch.nn.Module()
            inner.weight, inner.bias = (torch.nn.Parameter(torch.zeros(n, device="cuda")) for n in (elems, 5))
            inner.forward = lambda x, inner=inner: (inner.weight * x).sum() + inner.bias.sum()
            model = DDP(inner)
            for step in range(3):
                model(values.cuda()).backward()
                if text := _differ(torch, inner.weight.grad, expected):
                    failed.append(f"{kind} of {elems} in step {step}: {text}")
                model.zero_grad(set_to_none=step == 0)
    return failed


@several
def test_gradients_of_large_buckets_equal_those_of_cpus_bit_by_bit(n):
    failed = run_ranks(buckets_body, n, env={"SMD_TIMEOUT_SECONDS": "20"}, timeout=100)
    assert failed == [[]] * n, "\n".join(line for rank in failed for line in rank)


def check_order():
    torch, dist, rank, size = _start()
    total = size * (size + 1) // 2
    # On several streams, with sizes that change the number of blocks from call to call; NCCL reduces some of them.
    sizes = [5, 300_000, 17, 1_500_000, 64, 3_000_000, 2048, 9_000_001]
    side = torch.cuda.Stream()
    sums, works = [], []
    for turn in range(400):
        elems = sizes[turn % len(sizes)]
        x = torch.full((elems,), float(rank + 1), device="cuda")
        if turn % 3 == 0:
            works.append((dist.all_reduce(x, async_op=True), x))
        elif turn % 3 == 1:
            dist.all_reduce(x)
        else:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                dist.all_reduce(x)
            torch.cuda.current_stream().wait_stream(side)
        if turn % 3:
            sums.append((x == total).all())
        if len(works) == 10:
            for work, reduced in works:
                work.wait()
                sums.append((reduced == total).all())
            works.clear()
    assert torch.stack(sums).all().item()

    # Calls alternate with replays of a graph; each replay counts as a call of its own.
    small, large = torch.zeros(1000, device="cuda"), torch.zeros(1 << 20, device="cuda")
    dist.all_reduce(large)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        small += 1
        dist.all_reduce(small)
        large += rank
        dist.all_reduce(large)
        work = dist.all_reduce(small, async_op=True)
        work.wait()
        small *= 0.5
    expected_small, expected_large = 0.0, 0.0
    for turn in range(20):
        graph.replay()
        expected_small = (expected_small + 1) * size * size * 0.5
        expected_large = size * expected_large + size * (size - 1) // 2
        if turn % 4 == 3:
            y = torch.ones(777, device="cuda")
            dist.all_reduce(y)
            assert (y == size).all()
            assert (small == expected_small).all(), (turn, small[0].item(), expected_small)
            assert (large == expected_large).all(), (turn, large[0].item(), expected_large)
            small.zero_()
            large.zero_()
            expected_small, expected_large = 0.0, 0.0


@several
def test_calls_in_any_stream_and_graph_keep_their_order(n):
    run_ranks(check_order, n, env={"SMD_TIMEOUT_SECONDS": "15"}, timeout=90)


def without_peers_body():
    torch, dist, rank, size = _start()
    x = torch.full((10,), float(rank), device="cuda")
    dist.all_reduce(x)
    assert (x == size * (size - 1) / 2).all()
    try:
        torch.ops.smd.all_reduce_(x.to(torch.int16), "sum", 0)
    except NotImplementedError as error:
        return str(error)
    return ""


def test_all_ranks_use_nccl_if_one_rank_has_to():
    # The launcher cannot set the variable for one rank only, so the body sets it.
    texts = run_ranks(without_peers_on_one_rank_body, 2, env={"SMD_TIMEOUT_SECONDS": "15"}, timeout=60)
    assert all("NCCL has no reduction" in text for text in texts), texts


def without_peers_on_one_rank_body():
    if os.environ["LOCAL_RANK"] == "1":
        os.environ["SMD_P2P_MAX_BYTES"] = "0"
    return without_peers_body()


def mismatch_body(elems):
    torch, dist, rank, _ = _start()
    x = torch.ones(elems, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    start = time.monotonic()
    try:
        dist.all_reduce(x[: elems - rank])
        while time.monotonic() < start + 10:
            dist.all_reduce(x)
            torch.cuda.synchronize()
    except (RuntimeError, ValueError) as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


@pytest.mark.parametrize("elems", [1000, 5_000_001], ids=["small", "chunks"])
def test_calls_that_differ_are_an_error_that_names_both(elems):
    outcomes = run_ranks(mismatch_body, 2, elems, timeout=60)
    calls = [f"rank {rank} called all_reduce(sum) of {elems - rank} float32" for rank in range(2)]
    for text, seconds in outcomes:
        assert ", ".join(calls) in text
        assert seconds < 5


def late_body(elems, pause):
    torch, dist, rank, _ = _start()
    x = torch.ones(5_000_000, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    start = time.monotonic()
    try:
        if rank:
            # By now the other rank's kernel runs and has written all that it can without this rank.
            time.sleep(pause)
        dist.all_reduce(x[: elems[rank]])
        while time.monotonic() < start + 10:
            torch.cuda.synchronize()
            dist.all_reduce(x)
    except (RuntimeError, ValueError) as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


# Chunked all-reduces and others, with the same number of blocks and with more. A pause of 1 s exceeds the 0.5 s after
# which waiting members look for errors in the store.
@pytest.mark.parametrize(
    ("elems", "pause"), [((5_000_000, 1000), 0.1), ((5_000_000, 200_000), 1.0), ((200_000, 5_000_000), 0.1)]
)
def test_a_rank_that_is_late_with_another_call_gets_the_error_too(elems, pause):
    outcomes = run_ranks(late_body, 2, elems, pause, env={"SMD_TIMEOUT_SECONDS": "20"}, timeout=60)
    calls = [f"rank {rank} called all_reduce(sum) of {elems[rank]} float32" for rank in range(2)]
    for text, seconds in outcomes:
        assert ", ".join(calls) in text
        assert seconds < 5


def coalesced_body():
    torch, _, rank, size = _start()
    import torch.distributed as c10d

    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 - registers the backend

    c10d.init_process_group("smddp", rank=rank, world_size=size)
    tensors = [torch.ones(100_000, device="cuda") for _ in range(40)]
    start = time.monotonic()
    try:
        for short in (0, rank):
            tensors[30] = tensors[30][: 100_000 - short]
            with c10d._coalescing_manager(device=torch.device("cuda"), async_ops=False):
                for x in tensors:
                    c10d.all_reduce(x)
        while time.monotonic() < start + 10:
            torch.cuda.synchronize()
            c10d.all_reduce(tensors[0])
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        c10d.destroy_process_group()
    return ""


def test_the_call_that_differs_among_coalesced_calls_is_named():
    texts = run_ranks(coalesced_body, 2, env={"SMD_TIMEOUT_SECONDS": "20"}, timeout=60)
    calls = [f"rank {r} called all_reduce(sum) of {100_000 - r} float32 as number 31 of 40 at once" for r in range(2)]
    for text in texts:
        assert ", ".join(calls) in text


def death_body(how):
    torch, dist, rank, _ = _start()
    from support.rank_main import announce

    x = torch.ones(30_000_000 if how == "chunks" else 100_000, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 0:
        announce("running")
    graph = None
    if how == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(x, dist.ReduceOp.AVERAGE)
    while True:
        if graph is None:
            dist.all_reduce(x, dist.ReduceOp.AVERAGE)
        else:
            graph.replay()
            dist.all_reduce(x[:1], dist.ReduceOp.AVERAGE)
        if how != "ahead":
            torch.cuda.synchronize()


@pytest.mark.parametrize("how", ["ahead", "in step", "graph", "chunks"])
def test_survivors_of_a_death_raise_and_exit(how):
    n = 2 if how == "chunks" else NUM_RANKS
    with start_ranks(death_body, n, how, timeout=60) as job:
        job.wait_for("running")
        time.sleep(0.5)
        died = job.kill(n - 1)
        outcome = job.wait()
    assert not outcome.timed_out, outcome.describe()
    for rank in outcome.ranks[:-1]:
        assert rank.error is not None, outcome.describe()
        assert f"rank {n - 1}" in rank.error, rank.error
        assert rank.ended_at - died < 10, rank.ended_at - died
    assert not outcome.left_behind


def tuned_body():
    torch, dist, rank, size = _start()
    x = torch.full((1 << 18,), float(rank + 1), device="cuda")
    dist.all_reduce(x)
    # A second group with as many members reuses the measurement.
    dist.all_reduce(x, group=dist.new_group())
    assert x[0].item() == size * size * (size + 1) / 2
    from smdistributed import _core
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP

    measured = _core.measure_bucket_bytes(0, torch.cuda.current_device())
    # Also if nothing has used the model's group on its device yet.
    for init_sync in (True, False):
        model = DDP(torch.nn.Linear(100, 100).cuda(), init_sync=init_sync)
        assert model.bucket_bytes_cap == measured
    return model.bucket_bytes_cap


@pytest.mark.skipif(SHARED, reason="ranks share the only device, so measured times mean nothing")
@several
def test_measured_choices_are_logged_once_and_stored(n, tmp_path):
    import json

    stored = tmp_path / "tuned.json"
    for turn, env in enumerate(({"SMD_AUTOTUNE": "1"}, {})):
        env = {"SMD_AUTOTUNE_FILE": str(stored), "SMD_TIMEOUT_SECONDS": "20", **env}
        with start_ranks(tuned_body, n, env=env, timeout=60) as job:
            outcome = job.wait()
        logged = [line for line in outcome.output.splitlines() if "opensmd: autotune:" in line]
        assert len(logged) == (1 - turn), outcome.output
        [choice] = json.loads(stored.read_text())
        assert choice["members"] == n
        assert choice["peers"]["channels"] >= 16
        assert choice["bucket_bytes"] >= 1 << 20
        assert outcome.values == [choice["bucket_bytes"]] * n, outcome.describe()
