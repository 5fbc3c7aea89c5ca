"""One table of collectives through PyTorch and through TensorFlow: the results are equal bit by bit."""

from __future__ import annotations

import importlib.util

import pytest

from support import run_ranks

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "tensorflow")),
    reason="needs PyTorch and TensorFlow",
)

DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool"]
DTYPES += ["complex64", "complex128"]
OPS = ["sum", "average", "min", "max", "product", "bit_and", "bit_or", "bit_xor"]


def both():
    import numpy
    import tensorflow as tf
    import torch

    from smdistributed._common import errors, lifecycle, shims

    torch_ops, tf_ops = shims.load_torch(), shims.load_tensorflow()
    lifecycle.init()
    rank, size = torch_ops.rank(), torch_ops.size()

    def to_tf(tensor):
        # Passes the bytes of the tensor, since NumPy lacks bfloat16.
        shape = tensor.shape
        raw = numpy.frombuffer(tensor.contiguous().view(torch.uint8).numpy().tobytes(), numpy.uint8)
        name = str(tensor.dtype).removeprefix("torch.")
        if name == "bool":
            return tf.reshape(tf.cast(tf.constant(raw), tf.bool), shape)
        return tf.reshape(tf.io.decode_raw(tf.constant(raw.tobytes()), getattr(tf, name)), shape)

    def raw(value):
        if isinstance(value, torch.Tensor):
            return value.contiguous().view(torch.uint8).numpy().tobytes()
        return value.numpy().tobytes()

    def outcome(call):
        try:
            return raw(call())
        except Exception as error:
            return errors.from_report(str(error)).code, str(errors.from_report(str(error)))

    generator = torch.Generator().manual_seed(rank)
    compared = 0
    for name in DTYPES:
        values = torch.randint(0, 2 if name == "bool" else 90, (3, 5), generator=generator).to(getattr(torch, name))
        if name.startswith(("float", "bfloat", "complex")):
            values = values / 7

        def reduce_with_torch(op, values=values):
            result = values.clone()
            torch_ops.all_reduce_(result, op, 0)
            return result

        def gather_with_torch(values=values):
            result = torch.empty(3 * size, 5, dtype=values.dtype)
            torch_ops.all_gather_single(result, values, 0)
            return result

        def broadcast_with_torch(values=values):
            result = values.clone()
            torch_ops.broadcast_(result, 1, 0)
            return result

        tensor = to_tf(values)
        cases = [
            (
                lambda op=op: reduce_with_torch(op),
                lambda op=op, tensor=tensor: tf_ops.smd_all_reduce(tensor=tensor, op=op),
            )
            for op in OPS
        ]
        cases.append((gather_with_torch, lambda tensor=tensor: tf_ops.smd_all_gather(tensor=tensor).output))
        cases.append((broadcast_with_torch, lambda tensor=tensor: tf_ops.smd_broadcast(tensor=tensor, root=1)))
        for with_torch, with_tf in cases:
            first, second = outcome(with_torch), outcome(with_tf)
            assert first == second, (name, with_torch, first, second)
            compared += isinstance(first, bytes)

    # In a function: collectives run in the order of the body, static shapes are known, and results do not share memory.
    @tf.function
    def step(x):
        total = tf_ops.smd_all_reduce(tensor=x, op="sum")
        assert total.shape == x.shape
        again = tf_ops.smd_all_reduce(tensor=x, op="sum")
        first = tf_ops.smd_broadcast(tensor=x, root=0)
        everything = tf_ops.smd_all_gather(tensor=x).output
        assert everything.shape.as_list() == [None, 2]
        return total, again, first, everything

    x = tf.fill([1, 2], float(rank))
    for _ in range(20):
        total, again, first, everything = step(x)
    assert total.numpy().tolist() == again.numpy().tolist() == [[sum(range(size))] * 2]
    assert first.numpy().tolist() == [[0.0, 0.0]]
    assert everything.numpy().tolist() == [[r, r] for r in range(size)]
    assert x.numpy().tolist() == [[rank, rank]], "a collective changed its input"
    empty = tf_ops.smd_all_gather(tensor=tf.zeros([0, 4])).output
    assert empty.shape == [0, 4]
    return compared


def test_both_frameworks_agree():
    compared = run_ranks(both, 2, timeout=110)
    # 5 integer dtypes have 8 reductions, bool 7, 4 floating-point dtypes 5, 2 complex dtypes 3. Each dtype also has
    # all-gather and broadcast.
    assert compared == [5 * 8 + 7 + 4 * 5 + 2 * 3 + 12 * 2] * 2
