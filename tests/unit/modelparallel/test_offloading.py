"""Prefetched activations that no backward uses are given back to the host, which keeps their memory from reuse."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

from smdistributed.modelparallel.torch.runtime import offloading  # noqa: E402

#: Elements of a tensor that is large enough to be offloaded.
ELEMS = 1 << 15


class Host:
    """A fake host that counts calls."""

    def __init__(self):
        self.prefetched = self.used = 0
        self.dropped = []

    def is_on_device(self, tensor):
        return True

    def offload(self, tensor):
        return tensor.clone()

    def prefetch(self, copy):
        self.prefetched += 1
        return copy.clone()

    def wait(self, pending_copy):
        self.used += 1
        return pending_copy

    def drop(self, pending_copy):
        self.dropped.append(pending_copy)


def _graph(host):
    """Returns a batch with three saved tensors of different values, and the end of their graph."""
    x = torch.ones(ELEMS, requires_grad=True)
    batch = offloading.Batch(host, 0)
    with batch.hooks():
        loss = sum((x * torch.full((ELEMS,), float(value))).sum() for value in (1, 2, 3))
    return batch, x, loss


def test_prefetched_tensors_without_a_backward_are_dropped():
    host = Host()
    batch, _, loss = _graph(host)
    offloaded = len(batch)
    batch.prefetch_all()
    assert host.prefetched == offloaded >= 3
    assert not host.dropped
    del loss
    gc.collect()
    assert len(host.dropped) == offloaded
    assert {1.0, 2.0, 3.0} <= {tensor[0].item() for tensor in host.dropped}


def test_tensors_that_are_used_or_never_prefetched_are_not_dropped():
    host = Host()
    batch, x, loss = _graph(host)
    batch.prefetch_all()
    loss.backward()
    assert host.used == len(batch)
    assert torch.equal(x.grad, torch.full((ELEMS,), 6.0))
    _graph(host)
    del batch, loss
    gc.collect()
    assert not host.dropped


def test_a_failing_backward_drops_the_tensors_that_it_has_not_reached():
    host = Host()
    x = torch.ones(ELEMS, requires_grad=True)
    batch = offloading.Batch(host, 0)
    with batch.hooks():
        first = x * torch.full((ELEMS,), 2.0)
        first.register_hook(lambda gradient: 1 / 0)
        loss = (first * torch.full((ELEMS,), 3.0)).sum()
    batch.prefetch_all()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    used = host.used
    assert 0 < used < host.prefetched
    del first, loss
    gc.collect()
    assert len(host.dropped) == host.prefetched - used
