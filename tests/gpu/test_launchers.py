"""Ranks that each launcher starts train on a GPU each: MPI and the variables of Slurm reach only the control path."""

from __future__ import annotations

import os

import pytest

from support import devices, needs, run_ranks
from support.devices import NUM_RANKS, SHARED, needs_one
from support.launchers import LAUNCHERS

pytestmark = [pytest.mark.timeout(150), needs_one]


def train_body():
    """Returns the largest difference from a training with the whole batch in one process."""
    if SHARED:
        # Launchers other than torchrun and smdrun give no LOCAL_RANK.
        os.environ["NCCL_HOSTID"] = f"process {os.getpid()}"
    import torch

    import horovod.torch as hvd

    hvd.init()
    device = torch.device("cuda", hvd.local_rank() % devices.NUM_DEVICES)
    torch.cuda.set_device(device)

    def make():
        torch.manual_seed(5)
        model = (
            torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3)).double().to(device)
        )
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = make()
    alone, alone_optimizer = make()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    x = torch.randn(8 * hvd.size(), 12, generator=torch.Generator().manual_seed(6)).double().to(device)
    y = x[:, :3].sin()
    for _ in range(5):
        for network, chosen, inputs, targets in (
            (model, optimizer, x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]),
            (alone, alone_optimizer, x, y),
        ):
            chosen.zero_grad()
            (network(inputs) - targets).square().mean().backward()
            chosen.step()
    assert hvd.local_size() == hvd.size()
    differences = [(a - b).abs().max() for a, b in zip(model.parameters(), alone.parameters(), strict=True)]
    assert not torch.equal(alone[0].weight, make()[0][0].weight)
    return torch.stack(differences).max().item()


@pytest.mark.parametrize("launcher", [pytest.param(each, marks=needs(each)) for each in LAUNCHERS])
def test_ranks_of_each_launcher_train_on_a_gpu_each(launcher):
    assert max(run_ranks(train_body, NUM_RANKS, launcher=launcher)) < 1e-12
