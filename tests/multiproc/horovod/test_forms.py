"""Horovod calls as in the test suites of the original: positional arguments, error types, return types, attributes.

Each function is one case. A job runs all cases, then reports those that failed.
``python tests/multiproc/horovod/test_forms.py`` runs them on 2, 3 and 4 ranks.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import traceback
import warnings
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from support import Forked, run_ranks

ENV = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def torch_positional_arguments(torch, hvd, rank, size):
    one = torch.ones(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert hvd.allreduce(one, False, "by place", hvd.Compression.none).sum() == 6 * size
        assert hvd.allreduce(one, True).sum() == 6
        assert hvd.allreduce_(one.clone(), False, "in place").sum() == 6 * size
        assert hvd.synchronize(hvd.allreduce_async(one, False, "async")).sum() == 6 * size
        assert hvd.synchronize(hvd.allreduce_async_(one.clone(), average=False, name="async_")).sum() == 6 * size
        assert len(hvd.grouped_allreduce([one, one], False, "group")) == 2
        got = hvd.synchronize(hvd.grouped_allreduce_async([one, one], average=False))
        assert isinstance(got, tuple)
    assert hvd.allreduce(one, None, "n", hvd.Compression.fp16, hvd.Sum, 0.5, 2.0).sum() == 6 * size
    assert hvd.allgather(one, "gather").shape == (2 * size, 3)
    assert hvd.broadcast(one * rank, 0, "cast").sum() == 0
    assert hvd.broadcast_(one * rank, root_rank=size - 1, name="cast_").sum() == 6 * (size - 1)
    assert hvd.reducescatter(torch.ones(size, 2), "rs", hvd.Compression.none, hvd.Sum).sum() == 2 * size
    out, splits = hvd.alltoall(torch.ones(size), torch.ones(size, dtype=torch.int32), "a2a")
    assert (out.shape, splits.tolist()) == ((size,), [1] * size)
    assert isinstance(hvd.synchronize(hvd.alltoall_async(torch.ones(size))), tuple)
    assert hvd.broadcast_object({"a": rank}, 0, "an object") == {"a": 0}
    assert hvd.allgather_object(rank, "objects") == list(range(size))


def torch_handles(torch, hvd, rank, size):
    handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
    assert isinstance(handle, int)
    while not hvd.poll(handle):
        pass
    assert hvd.mpi_ops.synchronize(handle).tolist() == [size] * 3
    with pytest.raises(ValueError, match="was not created or has been cleared"):
        hvd.poll(handle)
    from horovod.torch import mpi_lib_v2

    assert mpi_lib_v2.horovod_torch_poll(hvd.allreduce_async(torch.ones(1), name="polled")) in (True, False)


def torch_output_arguments(torch, hvd, rank, size):
    ops = hvd.mpi_ops
    x = torch.full((2,), rank + 1.0)
    total = sum(range(1, size + 1))
    out, more = torch.empty(2), torch.empty(0)
    assert ops.synchronize(ops._allreduce_async(x, out, None, hvd.Sum, 1.0, 2.0)) is out
    assert out.tolist() == [2 * total] * 2
    assert ops.synchronize(ops._grouped_allreduce_async([x, x], [out, more], "raw", hvd.Sum))[1] is more
    assert more.tolist() == [total] * 2
    assert ops.synchronize(ops._allgather_async(x, more, "raw")).shape == (2 * size,)
    assert ops.synchronize(ops._grouped_allgather_async([x], [out], "raw")) is out
    ops.synchronize(ops._broadcast_async(x, out, size - 1, "raw"))
    assert out.tolist() == [size] * 2
    received = torch.empty(0, dtype=torch.int32)
    ops.synchronize(ops._alltoall_async(torch.arange(size * 2.0), None, out, received, "raw"))
    assert (out.shape, received.tolist()) == ((2 * size,), [2] * size)
    rows = torch.ones(size, 2)
    assert ops.synchronize(ops._reducescatter_async(rows, out, "raw", hvd.Sum)).tolist() == [[size] * 2]
    ops.synchronize(ops._grouped_reducescatter_async([rows], [out], "raw"))
    assert out.tolist() == [[1.0] * 2]


def torch_errors(torch, hvd, rank, size):
    one, odd = torch.ones(4), rank % 2
    for kind, call in [
        (RuntimeError, lambda: hvd.allreduce(torch.ones(2, 2 + odd))),
        (RuntimeError, lambda: hvd.allreduce(one.int() if odd else one)),
        (RuntimeError, lambda: hvd.allgather(torch.ones(2, 2 + odd))),
        (RuntimeError, lambda: hvd.allgather(one.int() if odd else one)),
        (RuntimeError, lambda: hvd.grouped_allgather([torch.ones(2, 2 + odd)])),
        (RuntimeError, lambda: hvd.broadcast(torch.ones(2 + odd), 0)),
        (RuntimeError, lambda: hvd.broadcast(one.int() if odd else one, 0)),
        (RuntimeError, lambda: hvd.broadcast(one, odd)),
        (RuntimeError, lambda: hvd.alltoall(torch.ones(size, 1 + odd))),
        (RuntimeError, lambda: hvd.alltoall(torch.ones(size).int() if odd else torch.ones(size))),
        (RuntimeError, lambda: hvd.reducescatter(torch.ones(2 + odd, 2))),
        (RuntimeError, lambda: hvd.reducescatter(one.int() if odd else one)),
        (RuntimeError, lambda: hvd.reducescatter(torch.tensor(1.0))),
        (ValueError, lambda: hvd.reducescatter(torch.tensor(1.0))),
        (RuntimeError, lambda: hvd.allgather(torch.tensor(1.0))),
        (ValueError, lambda: hvd.alltoall(torch.ones(size + 1))),
        (ValueError, lambda: hvd.alltoall(torch.ones(size), torch.tensor([2] * size, dtype=torch.int32))),
        (ValueError, lambda: hvd.alltoall(torch.ones(size), torch.ones(size))),
        (ValueError, lambda: hvd.alltoall(torch.ones(size), torch.ones(1, dtype=torch.int32))),
        (ValueError, lambda: hvd.broadcast(one, size + 3)),
        (ValueError, lambda: hvd.allreduce(one, average=True, op=hvd.Sum)),
        # Invalid arguments, which are not HorovodInternalErrors: elastic training must not retry them.
        (ValueError, lambda: hvd.allreduce(torch.ones(2, device="meta"))),
        (ValueError, lambda: hvd.allreduce_(torch.ones(1).expand(3))),
        (ValueError, lambda: hvd.allreduce(one, name=5)),
    ]:
        with pytest.raises(kind) as caught:
            call()
        if kind is RuntimeError:
            assert isinstance(caught.value, hvd.HorovodInternalError)
    assert hvd.allreduce(one, op=hvd.Sum).sum() == 4 * size
    # Empty splits mean equal splits.
    for none in ([], torch.tensor([], dtype=torch.int32)):
        assert hvd.alltoall(torch.ones(size), splits=none)[1].tolist() == [1] * size


def repeated(times, call):
    for _ in range(times):
        call()


def torch_duplicates(torch, hvd, rank, size):
    """A name that is still in use is rejected, tested as in the original's suite.

    Some calls are still pending at the barrier, and some are never matched; the join at the end fails them.
    """
    for call in [
        lambda: hvd.allreduce_async(torch.ones(17, 17), name="duplicate_name"),
        lambda: hvd.allgather_async(torch.ones(17, 17), name="duplicate_name"),
        lambda: hvd.broadcast_async(torch.ones(17, 17), root_rank=0, name="duplicate_name"),
        lambda: hvd.alltoall_async(torch.ones(17 * size), name="duplicate_name"),
        lambda: hvd.reducescatter_async(torch.ones(17, 17), name="duplicate_name"),
    ]:
        if rank == 0:
            call()
            with pytest.raises(ValueError, match="with the same name as another tensor"):
                repeated(10, call)
        hvd.barrier()
        if rank > 0:
            call()
            with pytest.raises(ValueError, match="with the same name as another tensor"):
                repeated(10, call)
        hvd.barrier()
    hvd.join()


def torch_gradients(torch, hvd, rank, size):
    for op, prescale in itertools.product((hvd.Sum, hvd.Average), (1.0, 2.0)):
        x = torch.ones(3, requires_grad=True)
        hvd.allreduce(x, op=op, prescale_factor=prescale).backward(torch.ones(3))
        assert x.grad.tolist() == [prescale * (size if op == hvd.Sum else 1)] * 3
    x = torch.ones(rank + 1, 2, requires_grad=True)
    gathered = hvd.allgather(x)
    parts = torch.split(gathered, [other + 1 for other in range(size)])
    torch.autograd.backward(parts, [torch.full_like(part, other) for other, part in enumerate(parts)])
    assert torch.equal(x.grad, torch.full_like(x, rank))
    x = torch.ones(3, requires_grad=True)
    hvd.broadcast(x, 0).backward(torch.ones(3))
    assert x.grad.tolist() == [float(rank == 0)] * 3
    x = torch.ones(size, requires_grad=True)
    out, _ = hvd.alltoall(x, splits=[1] * size)
    out.backward(torch.full_like(out, rank))
    assert x.grad.tolist() == list(range(size))
    for op in (hvd.Sum, hvd.Average):
        x = torch.ones(size, 2, requires_grad=True)
        hvd.reducescatter(x, op=op).backward(torch.ones(1, 2))
        assert torch.equal(x.grad, torch.full((size, 2), float(size if op == hvd.Sum else 1)))
        xs = [torch.ones(size, requires_grad=True) for _ in range(2)]
        sum(one.sum() for one in hvd.grouped_reducescatter(xs, op=op)).backward()
        assert xs[1].grad.tolist() == [float(size if op == hvd.Sum else 1)] * size


def torch_compression(torch, hvd, rank, size):
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int32, torch.uint8):
        tensor = torch.ones(5, 5).to(dtype)
        small, ctx = hvd.Compression.fp16.compress(tensor)
        assert small.dtype == (torch.float16 if dtype.is_floating_point else dtype)
        assert torch.equal(hvd.Compression.fp16.decompress(small, ctx), tensor)
        assert hvd.Compression.none.compress(tensor) == (tensor, None) or dtype

    class Mine(hvd.compression.Compressor if hasattr(hvd, "compression") else object):
        @staticmethod
        def compress(tensor):
            return tensor * 2, tensor.dtype

        @staticmethod
        def decompress(tensor, ctx):
            return tensor.to(ctx) / 2

    assert hvd.allreduce(torch.ones(2), compression=Mine, op=hvd.Sum).tolist() == [size] * 2


def torch_optimizers(torch, hvd, rank, size):
    net = torch.nn.Linear(4, 2)
    named = list(net.named_parameters())
    for text, options in [
        ("should be a sequence of tuples", {"named_parameters": net.parameters()}),
        ("must be unique", {"named_parameters": [("a", one) for _, one in named]}),
        ("were not named", {"named_parameters": named[:1]}),
        ("backward_passes_per_step must be > 0", {"backward_passes_per_step": 0}),
        ("not supported with op != Average", {"gradient_predivide_factor": 2.0, "op": hvd.Sum}),
        ("groups should be a non-negative integer", {"groups": -1}),
        ("groups should be a non-negative integer", {"groups": "all"}),
        ("torch.Tensor", {"groups": [["weight"]]}),
        ("appear once", {"groups": [[named[0][1], named[0][1]]]}),
    ]:
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), **options)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), named)
    with pytest.raises(ValueError, match="is a DistributedOptimizer already"):
        hvd.DistributedOptimizer(optimizer, named)
    assert type(optimizer).__name__ == "SGD"
    assert isinstance(optimizer, torch.optim.SGD)
    assert sorted(optimizer._parameter_names.values()) == ["bias", "weight"]
    assert set(optimizer._allreduce_delay.values()) == {1}
    assert optimizer._requires_update == set(net.parameters())
    loss = net(torch.ones(1, 4)).sum()
    loss.backward()
    assert len(optimizer._handles) == 2
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net(torch.ones(1, 4)).sum().backward()
        optimizer.synchronize()
        optimizer.step()
    assert len([one for one in caught if "skip_synchronize" in str(one.message)]) == 1
    optimizer.zero_grad(set_to_none=True)
    with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
        repeated(2, lambda: net(torch.ones(1, 4)).sum().backward())
    optimizer.synchronize()
    # `step` with a closure.
    optimizer.step(lambda: 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), num_groups=2)
    assert any(issubclass(one.category, DeprecationWarning) for one in caught)


def torch_states(torch, hvd, rank, size):
    for kind, options in [
        (torch.optim.SGD, {"lr": 0.1 * (rank + 1), "momentum": 0.1 * (rank + 1), "nesterov": True}),
        (torch.optim.SGD, {"lr": 0.1 * (rank + 1)}),
        (torch.optim.Adam, {"lr": 0.1, "betas": (0.1 * (rank + 1), 0.9), "amsgrad": rank == 0}),
        (torch.optim.Adadelta, {"rho": 0.1 * (rank + 1)}),
        (torch.optim.ASGD, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Rprop, {"etas": (0.5, 1.2 + rank)}),
    ]:
        torch.manual_seed(rank)
        net = torch.nn.Linear(3, 2)
        net.bias.requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(kind(net.parameters(), **options), net.named_parameters())
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        is_new = not optimizer.state_dict()["state"]
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        types = hvd.allgather_object(
            [
                [(key, type(value).__name__, str(value)) for key, value in group.items() if key != "params"]
                for group in optimizer.param_groups
            ]
        )
        assert all(one == types[0] for one in types), types
        assert net.bias.grad is None
        if is_new:
            # Broadcasting an optimizer without state sets gradients to zeros, which scripts broadcast or read. Adagrad
            # has state from the start.
            assert torch.equal(hvd.broadcast(net.weight.grad, root_rank=0), torch.zeros(2, 3))
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        weights = hvd.allgather(net.weight.detach()[None])
        assert all(torch.equal(one, weights[0]) for one in weights), kind
    table = torch.nn.Embedding(3, 2, sparse=True)
    kept = table.weight.detach().clone()
    for make in (torch.optim.SGD, torch.optim.SparseAdam):
        table.weight.grad = None
        hvd.broadcast_optimizer_state(make(table.parameters(), lr=0.1), root_rank=0, model=table)
        assert table.weight.grad.is_sparse
        assert not table.weight.grad.to_dense().any()
        assert torch.equal(table.weight, kept)
    net.weight.grad = torch.full((2, 3), 7.0)
    hvd.broadcast_optimizer_state(torch.optim.SGD(net.parameters(), lr=0.1), root_rank=0)
    assert (net.weight.grad == 7).all(), "an existing gradient is not overwritten"
    with pytest.raises(ValueError, match=r"cannot broadcast torch\.optim\.LBFGS state"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(net.parameters()), root_rank=0)
    with pytest.raises(ValueError, match="invalid params of type"):
        hvd.broadcast_parameters("weights", root_rank=0)
    hvd.broadcast_parameters([torch.ones(1), torch.ones(2)], 0)
    hvd.broadcast_parameters([("a", torch.ones(1)), ("b", None)], 0)


def torch_process_sets(torch, hvd, rank, size):
    even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))
    assert (even.process_set_id, even.size(), even.rank(), odd.ranks) == (None, None, None, list(range(1, size, 2)))
    with pytest.raises(ValueError, match="does not exist, or has not been registered"):
        hvd.allreduce(torch.ones(1), process_set=even)
    hvd.add_process_set(even)
    hvd.add_process_set(odd)
    mine, other = (even, odd) if rank % 2 == 0 else (odd, even)
    assert str(even) == f"ProcessSet(process_set_id={even.process_set_id}, ranks={even.ranks}, mpi_comm=None)"
    assert mine.included()
    assert not other.included()
    assert hvd.mpi_ops._basics._process_set_size(mine.process_set_id) == mine.size() == len(mine.ranks)
    assert hvd.mpi_ops._basics._process_set_rank(mine.process_set_id) == mine.rank()
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks()[odd.process_set_id] == odd.ranks
    with pytest.raises(ValueError, match="Process is not part of provided process set"):
        other.rank()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=mine).item() == mine.size()
    for call in [
        lambda: hvd.allreduce(torch.ones(1), process_set=other),
        lambda: hvd.allgather(torch.ones(1), process_set=other),
        lambda: hvd.broadcast(torch.ones(1), other.ranks[0], process_set=other),
        lambda: hvd.alltoall(torch.ones(size), process_set=other),
        lambda: hvd.barrier(process_set=other),
    ]:
        with pytest.raises(ValueError, match="is not a member of the provided process set"):
            call()
    with pytest.raises(ValueError, match=r"Invalid process set id for this rank|is not a member"):
        hvd.reducescatter(torch.ones(size), process_set=other)
    root = mine.ranks[-1]
    assert hvd.broadcast(torch.full((1,), rank), root, process_set=mine).item() == root
    if size > mine.size():
        with pytest.raises(ValueError, match="invalid root rank"):
            hvd.broadcast(torch.ones(1), other.ranks[0], process_set=mine)
    with pytest.raises(ValueError, match="Attempted to add a duplicate process set"):
        hvd.add_process_set(list(reversed(even.ranks)))
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert hvd.remove_process_set(odd)
    assert odd.process_set_id is None
    assert not hvd.remove_process_set(odd)
    assert hvd.remove_process_set(even)
    assert isinstance(hvd.add_process_set(range(size - 1)), hvd.ProcessSet)
    known = hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
    number = next(number for number, ranks in known.items() if ranks == list(range(size - 1)))
    from horovod.common.process_sets import _temp_process_set_object

    assert hvd.remove_process_set(_temp_process_set_object(number))


def torch_optimizers_in_a_set(torch, hvd, rank, size):
    """Members of the process set step with their average, other ranks with their own gradient.

    The bias is frozen in the first step and is reduced from the second step on.
    """
    part = hvd.add_process_set(range(size - 1))
    for process_set in (part, hvd.global_process_set):
        net = torch.nn.Linear(2, 1)
        torch.nn.init.zeros_(net.weight)
        torch.nn.init.zeros_(net.bias)
        net.bias.requires_grad_(False)
        sgd = torch.optim.SGD(net.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(sgd, net.named_parameters(), process_set=process_set)
        assert optimizer.process_set is process_set
        steps = []
        for thawed in (False, True):
            net.bias.requires_grad_(thawed)
            optimizer.zero_grad()
            (net(torch.ones(1, 2)) * (rank + 1)).sum().backward()
            optimizer.step()
            steps.append((-net.weight[0, 0].item(), -net.bias.item()))
        members = [other + 1 for other in process_set.ranks]
        mine = sum(members) / len(members) if process_set.included() else rank + 1
        assert steps == [(mine, 0), (2 * mine, mine)], steps
    hvd.remove_process_set(part)


def torch_joins(torch, hvd, rank, size):
    for first in range(size):
        if rank == first:
            last = hvd.join()
        else:
            got = hvd.allreduce(torch.ones(2), name="while joined")
            assert torch.allclose(got, torch.full((2,), (size - 1) / size))
            for text, call in [
                ("Allgather is not supported with Join", lambda: hvd.allgather(torch.ones(2))),
                ("Broadcast is not supported with Join", lambda: hvd.broadcast(torch.ones(2), rank)),
                ("Reducescatter is not supported with Join", lambda: hvd.reducescatter(torch.ones(size))),
                ("Alltoall is not supported with Join", lambda: hvd.alltoall(torch.ones(size))),
            ]:
                if "Broadcast" in text and size > 2:
                    # Each rank passes itself as root, and more than one rank has not joined.
                    continue
                with pytest.raises(hvd.HorovodInternalError, match=text):
                    call()
            last = hvd.join()
        assert last != first or size == 1
        assert len(set(hvd.allgather_object(last))) == 1
    assert isinstance(last, int)


def torch_sparse(torch, hvd, rank, size):
    with warnings.catch_warnings():
        # PyTorch warns about sparse tensors that are created without invariant checks.
        warnings.simplefilter("error")
        assert torch.equal(hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "eye")().to_dense(), torch.eye(2))
    x = torch.sparse_coo_tensor(torch.tensor([[0, rank]]), torch.tensor([1.0, 2.0]), (size,))
    got = hvd.sparse_allreduce_async(x, name=None, op=hvd.Sum)()
    assert got.is_sparse
    dense = hvd.allreduce(x.to_dense(), op=hvd.Sum)
    assert torch.allclose(got.to_dense(), dense)
    assert hvd.sparse_allreduce_async(torch.sparse_coo_tensor(size=(3,)), "empty", hvd.Average)().to_dense().sum() == 0


def tensorflow_positional_arguments(tf, hvd, rank, size):
    one = tf.ones([2, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert float(tf.reduce_sum(hvd.allreduce(one, False))) == 6 * size
        assert float(tf.reduce_sum(hvd.allreduce(one, average=True, name="averaged"))) == 6
    with tf.device("/cpu:0"):
        summed = hvd.allreduce(one, op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0)
    assert float(tf.reduce_sum(summed)) == 6 * size
    assert isinstance(hvd.grouped_allreduce([one, one * 2], op=hvd.Sum), list)
    assert hvd.grouped_allreduce([]) == []
    assert hvd.grouped_reducescatter([]) == []
    assert hvd.grouped_allgather([]) == []
    assert hvd.allgather(one, "gather").shape == (2 * size, 3)
    assert float(hvd.broadcast(tf.constant(float(rank)), size - 1, "cast")) == size - 1
    _, splits = hvd.alltoall(tf.ones([size]), tf.ones([size], tf.int32))
    assert splits.dtype == tf.int32
    assert hvd.alltoall(tf.ones([size]), name="equal").shape == (size,)
    assert float(hvd.reducescatter(tf.ones([size]), op=hvd.Sum)[0]) == size
    assert hvd.util._executing_eagerly()
    assert int(hvd.size_op()) == size
    assert int(hvd.rank_op()) == rank
    assert int(hvd.process_set_included_op()) == 1
    assert int(hvd.local_size_op(name="local")) == hvd.local_size()
    variables = [tf.Variable([float(rank)]), tf.Variable(rank)]
    assert len(hvd.broadcast_(variables, 0)) == 2
    hvd.broadcast_variables([variables[0].assign([float(rank)]) and variables[0]], root_rank=size - 1, inplace=True)
    assert (float(variables[0][0]), int(variables[1])) == (size - 1, 0)
    assert hvd.broadcast_object({"a": rank}, root_rank=0) == {"a": 0}
    assert hvd.broadcast_object_fn(root_rank=size - 1)(rank) == size - 1
    assert hvd.allgather_object(rank) == list(range(size))
    with pytest.raises(RuntimeError, match="does not support eager execution"):
        hvd.broadcast_global_variables(0)


def tensorflow_errors(tf, hvd, rank, size):
    odd = rank % 2
    one = tf.ones([size])
    other = tf.cast(one, tf.int32) if odd else one
    failed, bad = tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError

    def in_a_graph(call):
        return tf.function(call, autograph=False)

    for kind, call in [
        (failed, lambda: hvd.allreduce(tf.ones([2 + odd]))),
        (failed, lambda: hvd.allreduce(other, name="types")),
        (failed, lambda: hvd.grouped_allreduce([tf.ones([2 + odd])])),
        (failed, lambda: hvd.allgather(tf.ones([2, 2 + odd]))),
        (failed, lambda: hvd.allgather(other, name="types")),
        (failed, lambda: hvd.broadcast(tf.ones([2 + odd]), 0)),
        (failed, lambda: hvd.broadcast(other, 0, name="types")),
        (failed, lambda: hvd.broadcast(one, odd)),
        (failed, lambda: hvd.alltoall(tf.ones([size, 1 + odd]))),
        (failed, lambda: hvd.alltoall(other, name="types")),
        (failed, lambda: hvd.reducescatter(tf.ones([2 + odd, 2]))),
        (failed, lambda: hvd.reducescatter(other, name="types")),
        ((bad, ValueError, failed), lambda: hvd.reducescatter(tf.constant(1.0))),
        ((bad, ValueError, failed), lambda: hvd.allgather(tf.constant(1.0))),
        (bad, lambda: hvd.alltoall(tf.ones([size + 1]))),
        (bad, lambda: hvd.alltoall(tf.ones([size]), [2] * size)),
        (bad, lambda: hvd.alltoall(tf.ones([size]), tf.ones([size]))),
        (bad, lambda: hvd.alltoall(tf.ones([size]), [1])),
        (bad, lambda: hvd.broadcast(one, size + 3)),
        (tf.errors.AbortedError, lambda: hvd.reducescatter(one, op=hvd.Max)),
        (ValueError, lambda: hvd.allreduce(one, average=True, op=hvd.Sum)),
    ]:
        for made in (call, in_a_graph(call)):
            with pytest.raises(kind):
                made()
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank]), tf.constant([size, 2]))
    for call in [
        lambda: hvd.allreduce(slices, op=hvd.Max),
        lambda: hvd.allreduce(slices, op=hvd.Adasum),
        lambda: hvd.allreduce(slices, prescale_factor=2.0),
        lambda: hvd.grouped_allreduce([one, slices], postscale_factor=2.0),
        lambda: hvd.grouped_allreduce([slices, slices], op=hvd.Min),
    ]:
        with pytest.raises(NotImplementedError):
            call()
    got = hvd.allreduce(slices, op=hvd.Sum)
    assert isinstance(got, tf.IndexedSlices)
    assert got.indices.numpy().tolist() == list(range(size))
    assert float(hvd.allreduce(one, op=hvd.Sum)[0]) == size


def tensorflow_gradients(tf, hvd, rank, size):
    for op in (hvd.Sum, hvd.Average):
        x = tf.Variable(tf.ones([size, 2]))
        with tf.GradientTape(persistent=True) as tape:
            results = {
                "allreduce": hvd.allreduce(x, op=op),
                "grouped": tf.add_n(hvd.grouped_allreduce([x, x], op=op)) / 2,
                "reducescatter": hvd.reducescatter(x, op=op),
                "gather": hvd.allgather(x) * (rank + 1.0),
                "broadcast": hvd.broadcast(x, 0),
                "alltoall": hvd.alltoall(x),
            }
        expected = float(size if op == hvd.Sum else 1)
        own = [expected, expected, expected, sum(range(1, size + 1)) / size, float(rank == 0), 1.0]
        for (name, result), wanted in zip(results.items(), own, strict=True):
            got = tape.gradient(result, x).numpy()
            assert abs(got - wanted).max() < 1e-6, (name, got, wanted)


def tensorflow_process_sets(tf, hvd, rank, size):
    even, odd = hvd.add_process_set([*range(0, size, 2)]), hvd.add_process_set(hvd.ProcessSet(range(1, size, 2)))
    mine, other = (even, odd) if rank % 2 == 0 else (odd, even)
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum, process_set=mine)) == mine.size()
    for call in [
        lambda: hvd.allreduce(tf.ones([1]), process_set=other),
        lambda: hvd.allgather(tf.ones([1]), process_set=other),
        lambda: hvd.broadcast(tf.ones([1]), other.ranks[0], process_set=other),
        lambda: hvd.alltoall(tf.ones([size]), process_set=other),
        lambda: hvd.reducescatter(tf.ones([size]), process_set=other),
    ]:
        with pytest.raises(tf.errors.InvalidArgumentError):
            call()
    assert int(hvd.size_op(mine.process_set_id)) == mine.size()
    assert int(hvd.process_set_included_op(other.process_set_id)) == 0
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks()[odd.process_set_id] == odd.ranks
    assert hvd.remove_process_set(odd)
    assert hvd.remove_process_set(even)


def tensorflow_joins(tf, hvd, rank, size):
    for first in range(size):
        if rank == first:
            last = int(hvd.join())
        else:
            got = hvd.allreduce(tf.ones([2]), name="while joined")
            assert abs(got.numpy() - (size - 1) / size).max() < 1e-6
            for call in (
                lambda: hvd.allgather(tf.ones([2])),
                lambda: hvd.reducescatter(tf.ones([size])),
                lambda: hvd.alltoall(tf.ones([size])),
                lambda root=(first + 1) % size: hvd.broadcast(tf.ones([2]), root),
            ):
                with pytest.raises(tf.errors.FailedPreconditionError, match="is not supported with Join"):
                    call()
            last = int(hvd.join())
        assert last != first
        assert len(set(hvd.allgather_object(last))) == 1


def tensorflow_keras(tf, hvd, rank, size):
    import horovod.tensorflow.keras as khvd

    with pytest.raises(ValueError, match="op currently only supports Average and Sum"):
        khvd.DistributedOptimizer(tf.keras.optimizers.SGD(), op=hvd.Max)
    with pytest.raises(ValueError, match="not supported with op != Average"):
        khvd.DistributedOptimizer(tf.keras.optimizers.SGD(), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match=r"must be of tf\.keras\.layers\.Layer type"):
        khvd.PartialDistributedOptimizer(tf.keras.optimizers.SGD(), local_layers=["dense"])
    with pytest.raises(ValueError, match="op == Adasum is not supported yet with Keras"):
        hvd.DistributedOptimizer(tf.keras.optimizers.SGD(), op=hvd.Adasum)
    optimizer = khvd.DistributedOptimizer(tf.keras.optimizers.RMSprop(0.5), "ours", compression=hvd.Compression.fp16)
    config = optimizer.get_config()
    assert type(optimizer).__name__ == "RMSprop"
    assert type(optimizer).__module__ == "horovod._keras"
    for copy in (optimizer.from_config(config), type(optimizer).from_config(config)):
        assert copy.get_config() == config
    assert khvd.DistributedOptimizer(tf.keras.optimizers.Adam()).name.endswith("Adam")
    with pytest.raises(ValueError, match="initial_lr"):
        khvd.callbacks.LearningRateScheduleCallback(None, 1.0)
    with pytest.raises(ValueError, match=r"must be of tf\.Variable type"):
        khvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables="weights")
    for value in (1.0, [1.0, 2.0], tf.ones([2])):
        assert float(tf.reduce_sum(khvd.allreduce(value, average=False, name="value"))) == size * float(
            tf.reduce_sum(value)
        )
    assert len(khvd.allgather([[1.0]], name="rows")) == size
    assert float(khvd.broadcast(float(rank), 0, name="cast")) == 0
    assert len(khvd.reducescatter([1.0] * size, "rs", hvd.Sum)) == 1
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile(loss="mse", optimizer=khvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), run_eagerly=True)
    x = tf.random.stateless_normal([8, 2], [rank, 0])
    history = model.fit(
        x, x[:, :1], epochs=2, batch_size=4, verbose=0,
        callbacks=[
            khvd.callbacks.BroadcastGlobalVariablesCallback(0),
            khvd.callbacks.MetricAverageCallback(),
            khvd.callbacks.LearningRateWarmupCallback(0.1 * size, warmup_epochs=1),
            khvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=lambda epoch: 0.5**epoch, start_epoch=1),
        ],
    )  # fmt: skip
    assert len(set(map(str, hvd.allgather_object(history.history["loss"])))) == 1
    weights = hvd.allgather(model.trainable_variables[0][None])
    assert abs(weights.numpy() - weights.numpy()[:1]).max() == 0


TENSORFLOW = [
    tensorflow_positional_arguments, tensorflow_errors, tensorflow_gradients, tensorflow_process_sets, tensorflow_joins,
    tensorflow_keras,
]  # fmt: skip

TORCH = [
    torch_positional_arguments, torch_handles, torch_output_arguments, torch_errors, torch_duplicates, torch_gradients,
    torch_compression, torch_optimizers, torch_states, torch_process_sets, torch_optimizers_in_a_set, torch_joins, torch_sparse,
]  # fmt: skip


def failures(cases, framework, hvd):
    found = []
    for case in cases:
        try:
            case(framework, hvd, hvd.rank(), hvd.size())
        except BaseException:
            found.append(f"{case.__name__} on rank {hvd.rank()}:\n{traceback.format_exc()}")
    return found


def forms_of_torch():
    import torch

    import horovod.torch as hvd

    hvd.init()
    found = failures(TORCH, torch, hvd)
    assert not found, "\n".join(found)


def forms_of_tensorflow():
    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.init()
    found = failures(TENSORFLOW, tf, hvd)
    assert not found, "\n".join(found)


FORMS = {"torch": forms_of_torch, "tensorflow": forms_of_tensorflow}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("framework", "size"), [("torch", 3), ("tensorflow", 2)])
def test_forms(framework, size):
    """The assertions are in `forms_of_tensorflow` and `forms_of_torch`, which run on each rank."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    run_ranks(FORMS[framework], size, launcher=Forked(framework), env=ENV, timeout=100)


if __name__ == "__main__":
    for framework, body in FORMS.items():
        for size in (2, 3, 4):
            run_ranks(body, size, launcher=Forked(framework), env=ENV, timeout=100)
            print(f"{framework}, {size} ranks: all forms pass", flush=True)
