"""Python, the PyTorch operations and the TensorFlow operations of one process share one session."""

from __future__ import annotations

import importlib.util

import pytest

from support import more, run_ranks


def one_session(first):
    import sys

    from smdistributed import _core
    from smdistributed._common import lifecycle, shims

    loaders = {"torch": shims.load_torch, "tensorflow": shims.load_tensorflow}
    second = "tensorflow" if first == "torch" else "torch"
    ops = {first: loaders[first]()}
    assert second not in sys.modules
    ops[second] = loaders[second]()
    import tensorflow as tf
    import torch

    lifecycle.init()
    python = (_core.rank(), _core.size(), _core.session_id())
    from_torch = tuple(getattr(ops["torch"], name)() for name in ("rank", "size", "session_id"))
    from_tf = tuple(int(getattr(ops["tensorflow"], f"smd_{name}")()) for name in ("rank", "size", "session_id"))

    # Collectives of both frameworks run in one group, in the order of the calls.
    rank, size = _core.rank(), _core.size()
    x = torch.full((5,), float(rank))
    work = ops["torch"].all_reduce__async(x, "sum", 0)
    y = ops["tensorflow"].smd_all_reduce(tensor=tf.fill([5], float(rank)), op="max")
    work.wait()
    _core.barrier()
    z = ops["tensorflow"].smd_all_gather(tensor=tf.constant([[rank]])).output
    assert x.tolist() == [sum(range(size))] * 5
    assert y.numpy().tolist() == [size - 1] * 5
    assert z.numpy().tolist() == [[r] for r in range(size)]
    return [python, from_torch, from_tf]


@pytest.mark.parametrize("first", [more("torch"), "tensorflow"])
def test_one_session(first):
    for name in ("torch", "tensorflow"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    ranks = run_ranks(one_session, 2, first, timeout=110)
    for rank, views in enumerate(ranks):
        assert views == [views[0]] * 3
        assert views[0][:2] == (rank, 2)
    assert ranks[0][0][2] == ranks[1][0][2]
