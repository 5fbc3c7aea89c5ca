"""`horovod.torch` and `horovod.tensorflow` on CUDA tensors: results compared with those on CPU tensors, names, errors,
optimizers.
"""

from __future__ import annotations

import importlib.util
import math
import random
import warnings

import pytest

from support import devices, run_ranks
from support.devices import NUM_RANKS, needs_one

pytestmark = [pytest.mark.timeout(240), needs_one]


def _start():
    import torch

    import horovod.torch as hvd

    hvd.init()
    torch.cuda.set_device(devices.own())
    return torch, hvd, hvd.rank(), hvd.size()


def _same(torch, on_cpu, on_gpu):
    """Compares the result of a call on CPU tensors with that on CUDA tensors."""
    if isinstance(on_cpu, (list, tuple)):
        assert len(on_cpu) == len(on_gpu)
        for one, other in zip(on_cpu, on_gpu, strict=True):
            _same(torch, one, other)
        return
    assert on_cpu.dtype == on_gpu.dtype
    if on_cpu.is_floating_point():
        tolerance = 1e-2 if on_cpu.dtype in (torch.float16, torch.bfloat16) else 1e-5
        assert torch.allclose(on_cpu, on_gpu.cpu(), rtol=tolerance, atol=tolerance), (on_cpu, on_gpu)
    else:
        assert torch.equal(on_cpu, on_gpu.cpu()), (on_cpu, on_gpu)


def collectives():
    torch, hvd, rank, size = _start()
    types = [torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
    for dtype in types:
        for shape in [(size * 2,), (size, 3), (0,), (5 * size, 2, 2)]:
            x = (torch.arange(torch.Size(shape).numel()).reshape(shape) % 7 + rank).to(dtype)
            calls = {
                "sum": lambda x: hvd.allreduce(x, op=hvd.Sum),
                "average": lambda x: hvd.allreduce(x),
                "min": lambda x: hvd.allreduce(x, op=hvd.Min),
                "max": lambda x: hvd.allreduce(x, op=hvd.Max),
                "product": lambda x: hvd.allreduce(x, op=hvd.Product),
                "scaled": lambda x: hvd.allreduce(x, prescale_factor=0.5, postscale_factor=3.0),
                "scaled in place": lambda x: hvd.allreduce_(x.clone(), op=hvd.Sum, prescale_factor=0.5),
                "in place": lambda x: hvd.allreduce_(x.clone(), op=hvd.Sum),
                "async": lambda x: hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum)),
                "async in place": lambda x: hvd.synchronize(hvd.allreduce_async_(x.clone(), op=hvd.Sum)),
                "grouped": lambda x: hvd.grouped_allreduce([x, x + 1], op=hvd.Sum),
                "grouped in place": lambda x: hvd.synchronize(hvd.grouped_allreduce_async_([x.clone(), x + 1])),
                "broadcast": lambda x: hvd.broadcast(x, size - 1),
                "broadcast in place": lambda x: hvd.broadcast_(x.clone(), 0),
                "allgather": lambda x: hvd.allgather(x[: x.shape[0] - rank] if x.shape[0] else x),
                "grouped allgather": lambda x: hvd.grouped_allgather([x, x]),
                "alltoall": lambda x: hvd.alltoall(x),
                "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum),
                "scaled reducescatter": lambda x: hvd.reducescatter(x, prescale_factor=0.5, postscale_factor=3.0),
                "grouped reducescatter": lambda x: hvd.grouped_reducescatter([x, x], op=hvd.Sum),
            }
            for name, call in calls.items():
                on_gpu = call(x.cuda())
                first = on_gpu[0] if isinstance(on_gpu, (list, tuple)) else on_gpu
                assert first.is_cuda, name
                try:
                    _same(torch, call(x), on_gpu)
                except AssertionError as error:
                    raise AssertionError(f"{name} of {dtype} {shape}: {error}") from None
    if size & (size - 1) == 0:
        x = torch.randn(50, generator=torch.Generator().manual_seed(rank))
        _same(torch, hvd.allreduce(x, op=hvd.Adasum), hvd.allreduce(x.cuda(), op=hvd.Adasum))


def streams_and_errors():
    torch, hvd, rank, size = _start()
    # The operation waits for work that the current stream still runs, and later work of the stream waits for the
    # result.
    x = torch.ones(1 << 20, device="cuda")
    torch.cuda._sleep(50_000_000)
    x *= 3
    handle = hvd.allreduce_async(x, op=hvd.Sum)
    got = hvd.synchronize(handle) * 2
    assert (got == 6.0 * size).all()
    with torch.cuda.stream(torch.cuda.Stream()):
        y = torch.full((1000,), float(rank), device="cuda")
        hvd.broadcast_(y, size - 1)
        assert (y == size - 1).all()
    # Operations of several streams may run as one: it waits for all of these streams.
    streams = [torch.cuda.Stream() for _ in range(4)]
    for _ in range(5):
        handles = []
        for at, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                z = torch.ones(1000, device="cuda")
                torch.cuda._sleep(5_000_000 * at)
                z *= at + 2
                handles.append(hvd.allreduce_async(z, op=hvd.Sum, name=f"stream {at}"))
        for at, handle in enumerate(handles):
            assert (hvd.synchronize(handle) == (at + 2.0) * size).all()
    # Many operations at once, which each rank submits in an order of its own.
    names = [f"t{at}" for at in range(30)]
    random.Random(rank).shuffle(names)
    handles = {
        name: hvd.allreduce_async_(torch.full((100,), float(name[1:]), device="cuda"), name=name) for name in names
    }
    for name, handle in handles.items():
        assert (hvd.synchronize(handle) == float(name[1:])).all()
    # One rank passes a tensor on the CPU, of another dtype or of another shape: all ranks get an error, and the name
    # can be used again.
    odd = rank == size - 1
    for text, mine in (
        ("CPU/GPU device selection", torch.ones(2) if odd else torch.ones(2, device="cuda")),
        ("Mismatched data types", torch.ones(2, device="cuda").double() if odd else torch.ones(2, device="cuda")),
        ("Mismatched ALLREDUCE tensor shapes", torch.ones(2 + odd, device="cuda")),
    ):
        with pytest.raises(hvd.HorovodInternalError, match=text):
            hvd.allreduce(mine, name="m")
    assert hvd.allreduce(torch.ones(1, device="cuda"), op=hvd.Sum, name="m").item() == size
    # Each rank applies the factors itself; nevertheless they must be equal.
    for call in (hvd.allreduce, hvd.reducescatter):
        with pytest.raises(hvd.HorovodInternalError, match="Mismatched prescale and/or postscale factors"):
            call(torch.ones(size, device="cuda"), name="m", prescale_factor=2.0 if odd else 4.0)
    for call in (hvd.grouped_allreduce, hvd.grouped_allgather):
        with pytest.raises(ValueError, match="must be on same device"):
            call([torch.ones(1), torch.ones(1, device="cuda")])


def rows():
    """Gathers and all-to-all, whose outputs are allocated when the numbers of rows are known."""
    torch, hvd, rank, size = _start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                # The inputs are computed late, and the outputs are used at once.
                x = torch.ones(1 << 18, 4, device="cuda")
                torch.cuda._sleep(50_000_000)
                x *= rank + 1
                handles = [hvd.allgather_async(x[: 1000 * (rank + 1)], name=f"late {at}") for at in range(4)]
                exchanged = hvd.alltoall_async(x)
                for handle in handles:
                    got = hvd.synchronize(handle) * 2
                    starts = torch.cumsum(torch.arange(size) * 1000, 0).tolist()
                    assert got.shape[0] == sum(1000 * (one + 1) for one in range(size))
                    assert all(
                        (got[start:][: 1000 * (one + 1)] == 2 * (one + 1)).all() for one, start in enumerate(starts)
                    )
                got, counts = hvd.synchronize(exchanged)
                assert counts.tolist() == [(1 << 18) // size] * size
                assert all((part == one + 1).all() for one, part in enumerate(got.chunk(size)))
                assert hvd.allgather(x[:0]).shape == (0, 4)
        # The memory of a result that another stream uses is not reused before that stream is done.
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            handle = hvd.allgather_async(torch.full((1 << 20,), 7.0, device="cuda"))
        got = hvd.synchronize(handle)
        torch.cuda._sleep(50_000_000)
        copy = got.clone()
        del got, handle
        with torch.cuda.stream(side):
            others = [torch.zeros(size << 20, device="cuda") for _ in range(4)]
        torch.cuda.synchronize()
        assert (copy == 7.0).all(), "a later tensor has overwritten it"
        del others
    # The last rank has no memory for the second output: all ranks get an error, and the name can be used again.
    x = torch.ones(16 << 20, device="cuda")
    torch.cuda.empty_cache()
    if rank == size - 1:
        total = torch.cuda.get_device_properties(x.device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (8 << 20)) / total)
    for call in (hvd.allgather, lambda x, name: hvd.grouped_allgather([x[:4], x], name=name), hvd.alltoall):
        with pytest.raises(hvd.HorovodInternalError, match="out of memory") as caught:
            call(x, name="m")
        assert f"rank {size - 1}" in str(caught.value) or rank == size - 1, caught.value
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert hvd.allgather(x[:2], name="m").tolist() == [1.0] * 2 * size


def gradients():
    torch, hvd, rank, size = _start()
    calls = {
        "allreduce": lambda x: hvd.allreduce(x),
        "grouped": lambda x: hvd.grouped_allreduce([x, x])[1],
        "allgather": lambda x: hvd.allgather(x),
        "broadcast": lambda x: hvd.broadcast(x, 0),
        "alltoall": lambda x: hvd.alltoall(x),
        "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum),
    }
    for name, call in calls.items():
        grads = []
        for device in ("cpu", "cuda"):
            x = torch.ones(size, 2, device=device, requires_grad=True)
            (call(x) * (rank + 1.0)).sum().backward()
            grads.append(x.grad)
        assert torch.allclose(grads[0], grads[1].cpu()), (name, grads)


def optimizers():
    torch, hvd, rank, size = _start()
    generator = torch.Generator().manual_seed(5)
    inputs, targets = torch.randn(size * 4, 4, generator=generator), torch.randn(size * 4, 1, generator=generator)
    mine = slice(4 * rank, 4 * rank + 4)
    for options in ({}, {"groups": 2}, {"gradient_predivide_factor": 2.0}, {"compression": hvd.Compression.fp16}):
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).cuda()
        hvd.broadcast_parameters(model.state_dict(), 0)
        torch.manual_seed(0)
        alone = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
        hvd.broadcast_optimizer_state(optimizer, 0)
        single = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            for net, one, rows in ((model, optimizer, mine), (alone, single, slice(None))):
                one.zero_grad()
                torch.nn.functional.mse_loss(net(inputs[rows].cuda()), targets[rows].cuda()).backward()
                one.step()
        tolerance = 1e-2 if options.get("compression") else 1e-5
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(one, other, atol=tolerance), (options, (one - other).abs().max())
    layer, plain = hvd.SyncBatchNorm(4).cuda(), torch.nn.BatchNorm1d(4).cuda()
    got, expected = layer(inputs[mine].cuda()), plain(inputs.cuda())[mine]
    assert torch.allclose(got, expected, atol=1e-4)


def joins():
    """Rank r submits r + 1 rounds of operations, then joins. Joined ranks contribute neutral elements from memory of
    their own devices.
    """
    torch, hvd, rank, size = _start()
    for device in (-1, devices.own()):
        for at in range(rank + 1):
            active = range(at + 1, size + 1)
            results = {
                hvd.Sum: sum(active),
                hvd.Average: sum(active) / size,
                hvd.Min: at + 1,
                hvd.Max: size,
                hvd.Product: math.prod(active),
            }
            pending = []
            for dtype in (torch.float32, torch.float16, torch.float64, torch.int32, torch.int64):
                for op, expected in results.items():
                    expected = expected if dtype.is_floating_point else int(expected)
                    for elems in (1, 1000, 1 << 20):
                        x = torch.full((elems,), rank + 1, dtype=dtype, device="cuda")
                        name = f"{dtype} {op} {elems}"
                        pending.append((name, expected, hvd.allreduce_async(x, op=op, name=name)))
            for name, expected, handle in pending:
                got = hvd.synchronize(handle)
                assert torch.allclose(got, torch.full_like(got, expected), rtol=1e-3), (name, expected, got[:4])
            pair = [torch.ones(4, device="cuda"), torch.ones(3, 2, device="cuda")]
            pair = hvd.grouped_allreduce(pair, op=hvd.Sum, prescale_factor=2.0)
            assert all((each == 2.0 * len(active)).all() for each in pair), pair
            if at > 0:
                with pytest.raises(hvd.HorovodInternalError, match="Broadcast is not supported with Join"):
                    hvd.broadcast(torch.ones(1, device="cuda"), size - 1, name="never")
        assert hvd.join(device) == size - 1
    assert hvd.allreduce(torch.ones(1, device="cuda"), op=hvd.Sum).item() == size
    # Trains with a different number of batches on each rank; results must equal those on CPUs.
    weights = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        generator = torch.Generator().manual_seed(rank)
        for _ in range(2 + rank):
            inputs = torch.randn(4, 4, generator=generator).to(device)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        assert hvd.join() == size - 1
        weights.append([each.detach().cpu() for each in model.parameters()])
    _same(torch, *weights)


def joins_elsewhere():
    """As in a script that never calls `set_device`: the current device is 0 on every rank, and `join` names device 0."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    rank, size, device = hvd.rank(), hvd.size(), torch.device("cuda", devices.own())
    for named in (-1, 0):
        for at in range(rank + 1):
            got = hvd.allreduce(torch.full((1000,), rank + 1.0, device=device), op=hvd.Sum, name="elsewhere")
            assert got.device == device
            assert (got == sum(range(at + 1, size + 1))).all(), got[:4]
        assert hvd.join(named) == size - 1


def all_operations():
    for part in (joins, collectives, streams_and_errors, rows, gradients, optimizers):
        part()


def test_operations_streams_errors_and_optimizers():
    """Each rank asserts, in `all_operations`."""
    run_ranks(all_operations, NUM_RANKS, timeout=220)


def test_joins_without_a_current_device():
    """Each rank asserts, in `joins_elsewhere`."""
    run_ranks(joins_elsewhere, NUM_RANKS, timeout=60)


def tensorflow():
    """Compares values and gradients with those of the same calls on CPU tensors, eagerly and in a `tf.function`."""
    import numpy as np
    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    gpus = tf.config.list_physical_devices("GPU")
    tf.config.set_visible_devices(gpus[devices.own()], "GPU")
    # Without soft placement, an operation that has no GPU kernel fails instead of running on the CPU.
    tf.config.set_soft_device_placement(False)
    calls = {
        "sum": lambda x: hvd.allreduce(x, op=hvd.Sum),
        "average": lambda x: hvd.allreduce(x),
        "scaled": lambda x: hvd.allreduce(x, prescale_factor=0.5, postscale_factor=3.0),
        "grouped": lambda x: hvd.grouped_allreduce([x, x + 1], op=hvd.Sum, prescale_factor=0.5)[1],
        "allgather": lambda x: hvd.allgather(x[: 2 * size - rank]),
        "grouped allgather": lambda x: hvd.grouped_allgather([x, x])[1],
        "alltoall": lambda x: hvd.alltoall(x, splits=[2] * size)[0],
        "broadcast": lambda x: hvd.broadcast(x, size - 1),
        "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum),
        "scaled reducescatter": lambda x: hvd.reducescatter(x, prescale_factor=0.5, postscale_factor=3.0),
    }
    if size & (size - 1) == 0:
        calls["adasum"] = lambda x: hvd.allreduce(x, op=hvd.Adasum)
    for name, call in calls.items():
        for dtype in (tf.float32, tf.float16, tf.int32, tf.int64):
            if name == "adasum" and not dtype.is_floating:
                continue
            values = (np.arange(6 * size).reshape(2 * size, 3) % 7 + rank).astype(dtype.as_numpy_dtype)
            for wrapped in (lambda function: function, tf.function):
                got = []
                for device in ("/CPU:0", "/GPU:0"):
                    with tf.device(device):
                        x = tf.constant(values)

                        def run(x, call=call, device=device):
                            with tf.device(device), tf.GradientTape() as tape:
                                tape.watch(x)
                                y = call(x)
                                loss = tf.reduce_sum(tf.cast(y, tf.float32) * (rank + 1.0))
                            return y, tape.gradient(loss, x) if x.dtype.is_floating else y

                        got.append([value.numpy() for value in wrapped(run)(x)])
                for on_cpu, on_gpu in zip(*got, strict=True):
                    assert np.allclose(on_cpu, on_gpu, rtol=1e-2 if dtype == tf.float16 else 1e-5), (name, dtype, got)
    # Joined ranks take part in an all-reduce on a GPU.
    with tf.device("/GPU:0"):
        for at in range(rank + 1):
            got = hvd.allreduce(tf.fill([1000], float(rank + 1)), op=hvd.Sum, name="joined")
            assert np.allclose(got, sum(range(at + 1, size + 1)))
    assert hvd.join() == size - 1
    # Sparse gradients (IndexedSlices), objects, and the gradients of a tape.
    with tf.device("/GPU:0"):
        rows = tf.IndexedSlices(tf.ones([rank + 1, 2]), tf.range(rank + 1), tf.constant([size, 2]))
        assert hvd.allreduce(rows).values.shape[0] == size * (size + 1) // 2
        assert hvd.allgather_object(rank) == list(range(size))
        variable = tf.Variable([1.0 + rank])
        with hvd.DistributedGradientTape(tf.GradientTape(), gradient_predivide_factor=2.0) as tape:
            loss = variable * (rank + 1.0)
        assert np.allclose(tape.gradient(loss, [variable])[0], (size + 1) / 2)


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_tensorflow():
    """Each rank asserts, in `tensorflow`."""
    import tensorflow as tf

    if not tf.test.is_built_with_cuda():
        pytest.skip("this TensorFlow is built for CPUs only")
    run_ranks(tensorflow, NUM_RANKS, env={"TF_FORCE_GPU_ALLOW_GROWTH": "true"}, timeout=220)
