"""Offloaded activations of checkpointed modules: gradients equal one process, and the originals are freed.

A fake host copies tensors on the CPU; `tests/gpu/test_modelparallel.py` tests real devices.
"""

from __future__ import annotations

import pytest

from support import Forked, run_ranks


def _check_offloading():
    import copy
    from types import SimpleNamespace

    import torch
    from torch import nn
    from torch.multiprocessing.reductions import StorageWeakRef

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.runtime import offloading

    class Host:
        """A fake offloader that copies tensors, counts them, and counts originals that are still alive at the
        prefetch."""

        def __init__(self):
            self.left, self.came, self.stayed, self.dropped = 0, 0, 0, 0

        def is_on_device(self, tensor):
            return True

        def offload(self, tensor):
            self.left += 1
            return tensor.clone(), StorageWeakRef(tensor.untyped_storage())

        def prefetch(self, copy):
            tensor, memory = copy
            self.came += 1
            self.stayed += not memory.expired()
            return tensor.clone()

        def wait(self, arriving):
            return arriving

        def drop(self, arriving):
            self.dropped += 1

    torch.set_default_dtype(torch.float64)
    rows, width, layers, microbatches = 1024, 128, 6, 8
    x, y = (torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    torch.manual_seed(3)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
    alone = copy.deepcopy(plain)
    for a, b in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        (nn.functional.mse_loss(alone(a), b) / microbatches).backward()

    def run(partitions, horizon, reads_loss=False, **config):
        manual = {"auto_partition": False, "default_partition": 0, "offload_activations": True}
        smp.init(
            {
                "partitions": partitions, "microbatches": microbatches, "active_microbatches": microbatches,
                "activation_loading_horizon": horizon, **manual, **config,
            }
        )  # fmt: skip
        host = Host()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(offloading, "make_offloader", lambda wanted, device, far: offloading.Offloader(host, far))
            network = copy.deepcopy(plain)
            for place, part in enumerate(network):
                smp.set_partition(part, place * partitions // layers)
            smp.set_activation_checkpointing(network)
            model = smp.DistributedModel(network)

        @smp.step
        def step(model, x, y):
            loss = nn.functional.mse_loss(model(x), y)
            if reads_loss:
                assert loss.item() > 0
            model.backward(loss)
            return loss

        step(model, x, y)
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter.grad, alone.get_parameter(name).grad, rtol=1e-12, atol=1e-18)
        # Each offloaded tensor is prefetched once. The first partition's input is the script's batch, which stays
        # alive. Stages that run before the step function has ended get a copy of the batch, which is freed.
        assert host.came == host.left
        is_kept = host.left and smp.pp_rank() == 0 and not reads_loss
        assert host.stayed == (microbatches if is_kept else 0), host.stayed
        place = smp.pp_rank()
        smp.shutdown()
        assert host.dropped == 0, "each prefetched tensor is used"
        return SimpleNamespace(left=host.left, place=place)

    # The simple schedule runs all forwards first, so activations are offloaded unless the horizon exceeds the program.
    each = layers // 2 * microbatches
    assert run(2, 1, pipeline="simple").left >= each - layers
    assert run(2, 1000, pipeline="simple").left == 0
    # The last partition runs each backward right after its forward, so only the first one offloads.
    for pipeline in ("interleaved", "zero_bubble"):
        found = run(2, 1, pipeline=pipeline)
        assert (found.left > 0) == (found.place == 0), (pipeline, found)
    # Stages that run while the step is recorded, and a single partition.
    assert run(2, 1, reads_loss=True).left == each
    assert run(1, 2).left == layers * microbatches

    smp.init({"offload_activations": True})
    with pytest.warns(UserWarning, match="on CPUs they are there already"):
        smp.DistributedModel(copy.deepcopy(plain))
    smp.shutdown()


def test_a_small_tensor_that_is_changed_in_place_is_an_error_as_without_offloading():
    import torch

    from smdistributed.modelparallel.torch.runtime import offloading

    x, scale = torch.ones(4, requires_grad=True), torch.ones(4)
    with offloading.Batch(None, 1).hooks():
        loss = (x * scale).sum()
    scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.timeout(120)
def test_offloaded_activations_are_freed_and_prefetched():
    run_ranks(_check_offloading, 2, launcher=Forked("torch"), timeout=110)
