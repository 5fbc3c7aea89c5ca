"""Training jobs for tests on several hosts, each with another library or another kind of parallelism.

A job makes the model of :func:`layers` and returns a :class:`Training`. :func:`compare_with_one_process` trains with it
and compares losses and parameters with a training in one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.rank_main import announce

WIDTH, ROWS, LEARNING_RATE = 64, 8, 0.05
#: Rounding of float64, whose sums have another order than those of one process.
TOLERANCE = 1e-10


@dataclass
class Training:
    """A model and optimizer that a library has wrapped."""

    #: Trains with the batch of this replica, and returns its loss.
    step: Callable[[Any, Any], Any]
    #: The whole parameters by name, or those of this rank's partition.
    parameters: Callable[[], dict[str, Any]]
    #: Number of this data-parallel replica, and their count.
    replica: int
    replicas: int
    save: Callable[[str], None] | None = None
    load: Callable[[str], None] | None = None


def select_device(kind: str) -> Any:
    """Returns the device of this rank; ranks of a host share its GPUs if there are too few."""
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def layers(device: Any) -> Any:
    """A model whose initial weights are the same on all ranks, in float64."""
    import torch
    from torch import nn

    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(6)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 4)).double().to(device)


def batch(step: int, replica: int, device: Any) -> tuple[Any, Any]:
    """Inputs and targets of a replica's step."""
    import torch

    generator = torch.Generator().manual_seed(100 * step + replica)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)
    return x.to(device), torch.randn(ROWS, 4, dtype=torch.float64, generator=generator).to(device)


def loss_of(outputs: Any, targets: Any) -> Any:
    """The mean squared error."""
    return (outputs - targets).square().mean()


def sgd(parameters: Any) -> Any:
    """The optimizer of all jobs."""
    import torch

    return torch.optim.SGD(parameters, LEARNING_RATE, momentum=0.9)


def _plain(model: Any, optimizer: Any) -> Callable[[Any, Any], Any]:
    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _ddp(device: Any, _: dict[str, Any]) -> Training:
    import smdistributed.dataparallel.torch.distributed as dist
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

    dist.init_process_group()
    module = layers(device)
    model = DistributedDataParallel(module, broadcast_buffers=False)
    step = _plain(model, sgd(model.parameters()))
    return Training(step, lambda: dict(module.named_parameters()), dist.get_rank(), dist.get_world_size())


def _join_smddp() -> Any:
    import torch.distributed as dist

    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    dist.init_process_group("smddp")
    return dist


def _torch_ddp(device: Any, _: dict[str, Any]) -> Training:
    from torch.nn.parallel import DistributedDataParallel

    dist, module = _join_smddp(), layers(device)
    model = DistributedDataParallel(module)
    step = _plain(model, sgd(model.parameters()))
    return Training(step, lambda: dict(module.named_parameters()), dist.get_rank(), dist.get_world_size())


def _fsdp2(device: Any, _: dict[str, Any]) -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist, model = _join_smddp(), layers(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    step = _plain(model, sgd(model.parameters()))

    def parameters() -> dict[str, Any]:
        return {name: each.full_tensor() for name, each in model.named_parameters()}

    return Training(step, parameters, dist.get_rank(), dist.get_world_size())


def _horovod(device: Any, _: dict[str, Any]) -> Training:
    import horovod.torch as hvd

    hvd.init()
    assert (hvd.local_size(), hvd.cross_size()) == (2, 2) or hvd.size() == hvd.cross_size() == 2
    model = layers(device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
    return Training(_plain(model, optimizer), lambda: dict(model.named_parameters()), hvd.rank(), hvd.size())


def _smp(device: Any, settings: dict[str, Any]) -> Training:
    import smdistributed.modelparallel.torch as smp

    smp.init({"ddp": True, "microbatches": 4, "sdp_param_persistence_threshold": 9, **settings})
    with smp.tensor_parallelism(settings.get("tensor_parallel_degree", 1) > 1):
        module = layers(device)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(sgd(model.parameters()))

    @smp.step
    def run(model: Any, x: Any, y: Any) -> Any:
        loss = loss_of(model(x), y)
        model.backward(loss)
        return loss

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = run(model, x, y).reduce_mean()
        optimizer.step()
        return loss

    if "placement_strategy" in settings:
        is_over_hosts = settings["placement_strategy"] == "spread" or os.environ["LOCAL_WORLD_SIZE"] == "1"
        names = smp.allgather(os.uname().nodename, smp.PP_GROUP)
        assert len(set(names)) == (2 if is_over_hosts else 1), names

    is_whole = settings.get("tensor_parallel_degree", 1) > 1 or "sharded_data_parallel_degree" in settings

    def save(path: str) -> None:
        smp.save_checkpoint(path, "now", partial=True, model=model, optimizer=optimizer, format="sharded")

    def load(path: str) -> None:
        smp.resume_from_checkpoint(path, "now", partial=True)

    def parameters() -> dict[str, Any]:
        return model.state_dict() if is_whole else dict(model.local_named_parameters())

    return Training(step, parameters, smp.dp_rank(), smp.dp_size(), save, load)


#: Jobs by name, with smp's settings.
JOBS: dict[str, tuple[Callable[[Any, dict[str, Any]], Training], dict[str, Any]]] = {
    "ddp": (_ddp, {}),
    "torch ddp": (_torch_ddp, {}),
    "fsdp2": (_fsdp2, {}),
    "horovod": (_horovod, {}),
    # With "cluster", both stages of a replica are on one host if a host has two ranks; with "spread", on two hosts.
    "pipeline": (_smp, {"partitions": 2, "placement_strategy": "cluster"}),
    "pipeline over hosts": (_smp, {"partitions": 2, "placement_strategy": "spread"}),
    "tensors": (_smp, {"tensor_parallel_degree": 2}),
    # Its default clips gradients whose norm is larger than 1.
    "sharded": (_smp, {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 1e9}),
}


def compare_with_one_process(name: str, kind: str, folder: Path) -> None:
    """Trains six steps, of which the last two follow a saved and loaded checkpoint where the job has one."""
    device = select_device(kind)
    make, settings = JOBS[name]
    training = make(device, settings)
    alone = layers(device)
    optimizer = sgd(alone.parameters())
    for number in range(6):
        if number == 4 and training.save is not None and training.load is not None:
            training.save(str(folder))
            training.step(*batch(number + 50, training.replica, device))
            training.load(str(folder))
        optimizer.zero_grad()
        losses = []
        for replica in range(training.replicas):
            x, y = batch(number, replica, device)
            losses.append(loss_of(alone(x), y))
            (losses[-1] / training.replicas).backward()
        optimizer.step()
        loss = training.step(*batch(number, training.replica, device)).item()
        expected = losses[training.replica].item()
        assert abs(loss - expected) <= TOLERANCE * expected, (number, loss, expected)
    reference, parameters = dict(alone.named_parameters()), training.parameters()
    assert parameters
    assert parameters.keys() <= reference.keys()
    for path, parameter in parameters.items():
        difference = (parameter.to(device) - reference[path]).abs().max().item()
        assert difference <= TOLERANCE * reference[path].abs().max().item(), (path, difference)


def train_until_an_error(name: str, kind: str) -> None:
    """Trains the same batch until a step raises, and announces `trained.RANK` after ten steps."""
    import torch

    device = select_device(kind)
    make, settings = JOBS[name]
    training = make(device, settings)
    x, y = batch(0, training.replica, device)
    number = 0
    while True:
        training.step(x, y)
        if kind == "cuda":
            torch.cuda.synchronize()
        number += 1
        if number == 10:
            announce(f"trained.{os.environ['RANK']}")
