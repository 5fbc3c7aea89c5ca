"""The library works under `torch.set_default_device("meta")`: it passes a device for each tensor that it creates."""

from __future__ import annotations

import pytest

from support import Forked, run_ranks


def _check_modelparallel(folder):
    import torch

    import smdistributed.modelparallel.torch as smp

    # Meta tensors have no values: a tensor that the library made on the default device would fail.
    torch.set_default_device("meta")
    for config in ({"partitions": 2, "ddp": True, "microbatches": 2}, {"sharded_data_parallel_degree": 2, "ddp": True}):
        smp.init({"auto_partition": False, "default_partition": 0, "sdp_param_persistence_threshold": 9, **config})
        with torch.device("cpu"):
            torch.manual_seed(1)
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 4))
        if smp.pp_size() == 2:
            smp.set_partition(model[2], 1)
        model = smp.DistributedModel(model)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))

        @smp.step
        def step(model, x):
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        x = torch.ones(4, 4, device="cpu")
        for _ in range(2):
            optimizer.zero_grad()
            assert step(model, x).reduce_mean().item() > 0
            optimizer.step()
        assert smp.allgather({"rank": smp.rank()}, smp.WORLD) == [{"rank": each} for each in range(smp.size())]
        if smp.rank() == 0:
            smp.broadcast("text", smp.WORLD)
        else:
            assert smp.recv_from(0, smp.RankType.WORLD_RANK) == "text"
        smp.save_checkpoint(f"{folder}/{smp.pp_size()}", "t", model=model, optimizer=optimizer)
        smp.save_checkpoint(f"{folder}/{smp.pp_size()}", "s", format="sharded")
        weights = {name: each.clone() for name, each in model.state_dict().items()}
        for tag in ("t", "s"):
            smp.resume_from_checkpoint(f"{folder}/{smp.pp_size()}", tag)
            for name, each in model.state_dict().items():
                assert torch.equal(each, weights[name]), (tag, name)
        smp.barrier()
        torch.distributed.destroy_process_group()
        smp.shutdown()


def test_smp_trains_and_saves(tmp_path):
    run_ranks(_check_modelparallel, 2, str(tmp_path), launcher=Forked("torch"), timeout=60)


def _check_dataparallel():
    import torch

    import horovod.torch as hvd
    import smdistributed.dataparallel.torch.distributed as dist
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

    torch.set_default_device("meta")
    dist.init_process_group()
    with torch.device("cpu"):
        torch.manual_seed(1)
        model, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    wrapped = DistributedDataParallel(model)
    with wrapped.join():
        for _ in range(1 + dist.get_rank()):
            wrapped(x).square().mean().backward()
    hvd.init()
    assert hvd.broadcast_object(["rank", hvd.rank()]) == ["rank", 0]
    assert hvd.allgather_object(hvd.rank()) == [0, 1]
    rows = torch.ones(1 + hvd.rank(), 3, device="cpu", requires_grad=True)
    gathered = hvd.allgather(rows)
    gathered.sum().backward()
    assert gathered.shape == (3, 3)
    assert torch.equal(rows.grad, torch.full_like(rows, 2.0)) or torch.equal(rows.grad, torch.ones_like(rows))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), model.named_parameters()
    )
    model(x).square().mean().backward()
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.shutdown()


@pytest.mark.timeout(90)
def test_ddp_and_horovod_train():
    run_ranks(_check_dataparallel, 2, launcher=Forked("torch"), timeout=60)
