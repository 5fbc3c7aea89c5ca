"""The model-parallel API on several ranks: groups, objects, steps, optimizers, mismatches, timeline."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from collections import Counter

import pytest

from smdistributed.modelparallel import partition_file
from support import Forked, run_ranks

MANUAL = {"auto_partition": False, "default_partition": 0}


def _chain(torch, smp, partitions, width=6, layers=4):
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    for place, layer in enumerate(model):
        smp.set_partition(layer, place * partitions // layers)
    return model


def _api_body():
    import warnings

    import torch

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch import exceptions

    assert not smp.is_initialized()
    assert not smp.core.initialized
    with pytest.raises(exceptions.SMPNotInitializedError, match="init"):
        smp.rank()
    smp.init({"partitions": 2, "ddp": True, "microbatches": 2})
    assert smp.core.initialized
    assert smp.state.cfg.active_microbatches == 4
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        smp.init()
    assert "called before" in str(seen[0].message)
    with pytest.raises(exceptions.SMPUsageError, match="another configuration"):
        smp.init({"partitions": 4})
    rank = smp.rank()
    assert (smp.size(), smp.local_size(), smp.local_rank()) == (4, 4, rank)
    assert (smp.pp_rank(), smp.dp_rank(), smp.mp_rank(), smp.rdp_rank()) == (rank % 2, rank // 2, rank % 2, rank // 2)
    assert (smp.pp_size(), smp.dp_size(), smp.mp_size(), smp.tp_size(), smp.rdp_size()) == (2, 2, 2, 1, 2)
    assert smp.get_mp_group() == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert smp.get_dp_group() == [rank % 2, rank % 2 + 2]

    # Collectives of torch on the library's process groups.
    for name, expected in (
        ("world", 6.0),
        ("dp", rank % 2 * 2.0 + 2),
        ("mp", rank // 2 * 4.0 + 1),
        ("pp", rank // 2 * 4.0 + 1),
    ):
        tensor = torch.tensor(float(rank))
        torch.distributed.all_reduce(tensor, group=getattr(smp, f"get_{name}_process_group")())
        assert tensor == expected, name

    # Collectives and messages with Python objects.
    thing = {"rank": rank, "tensor": torch.arange(rank + 1), "half": torch.ones(2, 2).bfloat16()}
    gathered = smp.allgather(thing, smp.WORLD)
    assert [each["rank"] for each in gathered] == [0, 1, 2, 3]
    assert [len(each["tensor"]) for each in gathered] == [1, 2, 3, 4]
    assert gathered[3]["half"].dtype == torch.bfloat16
    assert smp.allgather(rank, smp.DP_GROUP) == [rank % 2, rank % 2 + 2]
    if smp.mp_rank() == 0:
        frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        smp.send([rank, torch.zeros(0), torch.nn.Parameter(torch.ones(3)), frozen], 1, smp.RankType.MP_RANK)
    else:
        number, empty, parameter, frozen = smp.recv_from(0, smp.RankType.MP_RANK)
        assert (number, empty.numel(), type(parameter)) == (rank - 1, 0, torch.nn.Parameter)
        assert (parameter.requires_grad, frozen.requires_grad) == (True, False)
    if rank == 2:
        smp.broadcast("word", smp.WORLD)
    else:
        assert smp.recv_from(2, smp.RankType.WORLD_RANK) == "word"
    with pytest.raises(ValueError, match="this process itself"):
        smp.send(1, rank, smp.RankType.WORLD_RANK)
    with pytest.raises(ValueError, match="does not exist"):
        smp.recv_from(4, smp.RankType.WORLD_RANK)
    for wait in (smp.barrier, smp.mp_barrier, smp.dp_barrier, smp.pp_barrier, smp.tp_barrier, smp.rdp_barrier):
        wait()
    smp.shutdown()
    smp.init({"partitions": 4, "placement_strategy": "spread"})
    with pytest.raises(exceptions.SMPUsageError, match="`ddp: true`"):
        smp.get_dp_process_group()
    assert smp.get_pp_group() == [0, 1, 2, 3]
    smp.shutdown()
    torch.distributed.destroy_process_group()
    return rank


@pytest.mark.timeout(300)
def test_ranks_groups_and_objects():
    assert run_ranks(_api_body, 4, launcher=Forked("torch"), timeout=290) == [0, 1, 2, 3]


def _keys_body(port):
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({"ddp": True, "ddp_port": port, "ddp_dist_backend": "nccl", "delayed_parameter_initialization": True})
    # `ddp_dist_backend: nccl` falls back to gloo without a GPU.
    assert torch.distributed.get_backend() == "gloo"
    store = torch.distributed.distributed_c10d._get_default_store()
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    assert store.port == port
    total = torch.ones(())
    torch.distributed.all_reduce(total, group=smp.get_dp_process_group())
    layer = torch.nn.Linear(4, 4)
    tied = torch.nn.Linear(4, 4)
    tied.weight = layer.weight
    assert layer.weight.is_meta
    assert tied.weight is layer.weight
    assert not torch.ones(2).is_meta
    model = smp.DistributedModel(torch.nn.Sequential(layer, tied))
    assert torch.equal(tied.weight, layer.weight)
    assert float(layer.weight.std()) > 0
    assert not torch.nn.Linear(2, 2).weight.is_meta
    assert all(torch.equal(*pair) for pair in zip(*smp.allgather(list(model.parameters()), smp.WORLD), strict=True))
    smp.shutdown()
    torch.distributed.destroy_process_group()
    return float(total)


@pytest.mark.timeout(120)
def test_process_group_and_delayed_parameter_settings():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert run_ranks(_keys_body, 2, port, launcher=Forked("torch"), timeout=110) == [2.0, 2.0]


def _replicas_body(pipeline):
    """Two replicas of two partitions, compared with one process on the whole batch."""
    import functools

    import torch

    import smdistributed.modelparallel.torch as smp

    torch.set_default_dtype(torch.float64)

    def forward(layers, x):
        return layers[3](layers[2](torch.relu(layers[1](layers[0](x)))))

    for options in ({}, {"overlapping_allreduce": False}, {"backward_passes_per_step": 2, "bucket_cap_mb": 0.0001}):
        smp.init({"partitions": 2, "ddp": True, "microbatches": 2, "pipeline": pipeline, **MANUAL})
        torch.manual_seed(smp.dp_rank())
        model = _chain(torch, smp, 2)
        model.register_module("unused", torch.nn.Linear(2, 2))
        model.forward = functools.partial(forward, model)
        whole = smp.DistributedModel(model, **options)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        with pytest.raises(smp.exceptions.SMPUsageError, match="is not wrapped in DistributedDataParallel"):
            torch.nn.parallel.DistributedDataParallel(whole)

        @smp.step
        def step(model, x, y):
            loss = torch.nn.functional.mse_loss(model(x), y)
            model.backward(loss)
            return loss

        alone = None
        passes = options.get("backward_passes_per_step", 1)
        for number in range(4):
            batch = torch.randn(16, 6, generator=torch.Generator().manual_seed(number))
            mine = batch.chunk(2)[smp.dp_rank()]
            if alone is None:
                # All replicas start with the parameters of replica 0.
                torch.manual_seed(0)
                alone = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)))
                reference = torch.optim.SGD(alone.parameters(), lr=0.05)
            loss = step(whole, mine, mine.flip(0)).reduce_mean()
            loss = sum(smp.allgather(loss, smp.DP_GROUP)) / 2
            losses = []
            for half in batch.chunk(2):
                for x, y in zip(half.chunk(2), half.flip(0).chunk(2), strict=True):
                    losses.append(torch.nn.functional.mse_loss(forward(alone, x), y))
            expected = torch.stack(losses).mean()
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
            expected.backward()
            if (number + 1) % passes == 0:
                gradients = dict(alone.named_parameters())
                for name, parameter in whole.local_named_parameters():
                    if name.startswith("unused"):
                        assert parameter.grad is None
                        continue
                    torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-11, atol=1e-15)
                for each in (optimizer, reference):
                    each.step()
                    each.zero_grad()
        del model, whole, optimizer, alone, reference
        smp.shutdown()
    return True


@pytest.mark.timeout(300)
@pytest.mark.parametrize("pipeline", ["interleaved", "zero_bubble"])
def test_replicas_reduce_their_gradients(pipeline):
    assert run_ranks(_replicas_body, 4, pipeline, launcher=Forked("torch"), timeout=290) == [True] * 4


def _with_gradient(torch):
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    return parameter


def _features_body():
    import contextlib
    import copy
    import math
    import resource

    import torch
    from torch import nn
    from torch.nn.utils import clip_grad_norm_

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch import exceptions

    torch.set_default_dtype(torch.float64)
    functional = nn.functional
    config = {"partitions": 2, "microbatches": 4, **MANUAL}

    # Arguments and outputs of a step.
    smp.init(config)
    model = smp.DistributedModel(_chain(torch, smp, 2))
    calls = []

    class Sliced:
        def smp_slice(self, num_mb, mb, axis):
            calls.append((num_mb, mb, axis))
            return mb

    @smp.step(non_split_inputs=["table"], input_split_axes={"turned": 1})
    def look(model, x, turned, table, piece, names=("a",), more=None):
        output = model(x)
        assert turned.shape == (6, 2)
        assert table.shape == (3,)
        assert more["deep"][0].shape[0] == 2
        return {"output": output, "sum": [output.sum() + turned.sum()], "piece": piece, "nothing": None}, len(names)

    x = torch.randn(8, 6)
    found, count = look(model, x, x.T.contiguous(), torch.zeros(3), Sliced(), more={"deep": [x, "word"]})
    assert (found["piece"], found["nothing"], count) == ([0, 1, 2, 3], None, [1, 1, 1, 1])
    assert calls == [(4, mb, 0) for mb in range(4)]
    assert isinstance(found["output"], smp.StepOutput)
    assert found["output"].concat().shape == (8, 6)
    assert found["output"].stack().shape == (4, 2, 6)
    assert torch.equal(found["output"].merge(), torch.cat(list(found["output"])))
    assert torch.equal(found["sum"][0].reduce_sum() / 4, found["sum"][0].accumulate())
    assert len(found["output"]) == 4
    assert not found["output"][0].requires_grad
    with pytest.raises(ValueError, match="`x` has 6 rows"):
        look(model, x[:6], x.T, torch.zeros(3), 0, more={"deep": [x]})
    with pytest.raises(ValueError, match="non_split_inputs"):
        look(model, torch.tensor(1.0), x.T, torch.zeros(3), 0, more={"deep": [x]})

    # Steps under no_grad, and calls outside a step.
    with torch.no_grad():
        output, _ = look(model, x, x.T.contiguous(), torch.zeros(3), 0, more={"deep": [x]})
    assert torch.equal(output["output"].concat(), found["output"].concat())
    with pytest.raises(exceptions.SMPUsageError, match="inside of `smp"):
        model(x)
    leaked = []

    @smp.step
    def leak(model, x):
        leaked.append(model(x))
        with pytest.raises(exceptions.SMPUsageError, match="call `model"):
            leaked[-1].sum().backward()
        return leaked[-1].sum()

    leak(model, x)
    assert leaked[0].shape == (2, 6)
    with pytest.raises(exceptions.SMPUsageError, match="StepOutput"):
        leaked[0].sum()
    with pytest.raises(exceptions.SMPUsageError, match="there is a"):
        smp.DistributedModel(nn.Linear(2, 2))

    # Parameters of this partition, and of the other one.
    own = dict(model.local_named_parameters())
    assert set(own) == (
        {"0.weight", "0.bias", "1.weight", "1.bias"}
        if smp.pp_rank() == 0
        else {"2.weight", "2.bias", "3.weight", "3.bias"}
    )
    other = model.module[3 - 3 * smp.pp_rank()].weight
    assert isinstance(other, nn.Parameter)
    assert other.shape == (6, 6)
    with pytest.raises(exceptions.SMPUsageError, match="partition"):
        other.sum()
    assert model.partition_of("2") == 1
    assert model.partitioned

    # Norms over partitions, the scaler, hooks.
    @smp.step
    def train(model, x, y, scaler=None):
        output = model(x)
        loss = functional.mse_loss(output, y)
        model.backward(scaler.scale(loss) if scaler is not None else loss)
        return loss

    train(model, x, -x)
    squares = sum(float(p.grad.square().sum()) for p in model.local_parameters())
    expected = math.sqrt(sum(smp.allgather(squares, smp.PP_GROUP)))
    norm = smp.clip_grad_norm_(model.parameters(), 0.5 * expected)
    assert math.isclose(norm, expected, rel_tol=1e-12)
    squares = sum(float(p.grad.square().sum()) for p in model.local_parameters())
    assert math.isclose(math.sqrt(sum(smp.allgather(squares, smp.PP_GROUP))), 0.5 * expected, rel_tol=1e-5)
    largest = max(smp.allgather(max(float(p.grad.abs().max()) for p in model.local_parameters()), smp.PP_GROUP))
    assert math.isclose(smp.clip_grad_norm_(model.parameters(), 1e9, math.inf), largest)
    # PyTorch's clip_grad_norm_ also counts the gradients of all partitions. A subset together with other parameters
    # raises.
    norm = smp.clip_grad_norm_(model.parameters(), 1e9)
    assert math.isclose(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9), norm, rel_tol=1e-6)
    assert math.isclose(torch.nn.utils.clip_grad_norm_(list(model.local_parameters()), 0.5 * norm), norm, rel_tol=1e-6)
    gradients = [p.grad for p in model.local_parameters()]
    assert math.isclose(torch.nn.utils.get_total_norm(gradients), 0.5 * norm, rel_tol=1e-5)
    for infinite in (math.inf, "inf"):
        assert math.isclose(torch.nn.utils.get_total_norm(gradients, infinite), 0.5 * largest, rel_tol=1e-5)
    first = torch.nn.utils.get_total_norm(gradients, 1)
    expected_first = sum(smp.allgather(sum(float(each.abs().sum()) for each in gradients), smp.PP_GROUP))
    assert math.isclose(first, expected_first, rel_tol=1e-5)
    with pytest.raises(exceptions.SMPUsageError, match="and 1 other tensors: clip them one after the other"):
        torch.nn.utils.clip_grad_norm_([*list(model.local_parameters()), _with_gradient(torch)], 1.0)
    with pytest.raises(exceptions.SMPUsageError, match="norm would lack what other partitions have"):
        torch.nn.utils.get_total_norm([*gradients, _with_gradient(torch).grad])
    # Some parameters: exactly one partition, and some of both.
    for places in ((0, 1), (2, 3), (1, 2, 3), (0, 3)):
        some = [p for place in places for p in model.module[place].parameters()]
        squares = sum(float(p.grad.square().sum()) for p in some if p.grad is not None)
        expected_of_some = math.sqrt(sum(smp.allgather(squares, smp.PP_GROUP)))
        # A function that was imported by name counts other partitions, too.
        found = clip_grad_norm_((p for p in some), 1e9, error_if_nonfinite=True)
        assert math.isclose(found, expected_of_some, rel_tol=1e-6), places
        assert math.isclose(smp.clip_grad_norm_(some, 1e9), expected_of_some, rel_tol=1e-6), places
    # Lists that are empty, or have one parameter, on some ranks only.
    for place in (0, 3):
        for some in ([p for p in model.module[place].parameters() if p.grad is not None], [model.module[place].weight]):
            squares = sum(float(p.grad.square().sum()) for p in some if p.grad is not None)
            expected_of_some = math.sqrt(sum(smp.allgather(squares, smp.PP_GROUP)))
            assert math.isclose(clip_grad_norm_(some, 1e9), expected_of_some, rel_tol=1e-6), place
    for p in model.parameters():
        single = torch.nn.utils.clip_grad_norm_(p, 1e9)
        assert math.isclose(single, 0.0 if p.grad is None else p.grad.norm(), rel_tol=1e-6)
    # Another model's parameters: without communication.
    assert math.isclose(torch.nn.utils.clip_grad_norm_([_with_gradient(torch)], 1e9), 2.0)
    if smp.pp_rank() == 0:
        pair = [_with_gradient(torch), _with_gradient(torch)]
        assert math.isclose(torch.nn.utils.clip_grad_norm_(pair, 1e9), math.sqrt(8))
    assert model.module.module.module[0] is model.module[0]
    assert not hasattr(model.module.module.module, "module")

    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer._global_grad_norm is None
    norm = smp.clip_grad_norm_(model.parameters(), 1e9)
    assert optimizer._global_grad_norm is norm
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = smp.amp.GradScaler(init_scale=1024.0, device="cpu")
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.local_parameters()]
    train(model, x, -x, scaler)
    if smp.pp_rank() == 0:
        next(model.local_parameters()).grad[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.local_parameters(), strict=True))
    assert scaler.get_scale() == 512.0
    assert optimizer.param_groups[0]["lr"] == 0.05
    seen = []
    model.register_post_partition_hook(lambda model, optimizer: seen.append((model, optimizer)))
    assert seen == [(model, optimizer)]
    smp.shutdown()

    # Automatic partitioning, with hooks and an optimizer from before it, and activation checkpointing.
    smp.init({"partitions": 2, "microbatches": 2})
    torch.manual_seed(3)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)))
    alone = copy.deepcopy(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(plain.parameters(), lr=0.01))
    reference = torch.optim.AdamW(alone.parameters(), lr=0.01)
    model = smp.DistributedModel(plain)
    smp.set_activation_checkpointing(plain, strategy="group_2")
    assert not model.partitioned
    seen.clear()
    removed = model.register_post_partition_hook(lambda: seen.append("removed"))
    model.register_post_partition_hook(lambda model: seen.append(model.partitioned))
    removed.remove()
    x = torch.randn(4, 16)
    for _ in range(3):
        loss = train(model, x, x).reduce_mean()
        expected = functional.mse_loss(alone(x), x)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert seen == [True]
    assert len(dict(model.local_named_parameters())) == 6
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 6
    smp.shutdown()

    # bf16 autocast around the step and inside of it.
    for inside in (False, True):
        smp.init(config)
        torch.manual_seed(3)
        model = smp.DistributedModel(_chain(torch, smp, 2).float())
        torch.manual_seed(3)
        alone = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).float()

        @smp.step
        def mixed(model, x, inside=inside):
            with torch.autocast("cpu", torch.bfloat16) if inside else contextlib.nullcontext():
                output = model(x)
                loss = output.float().square().mean()
            model.backward(loss)
            return loss, output

        x = torch.randn(8, 6, dtype=torch.float32)
        with contextlib.nullcontext() if inside else torch.autocast("cpu", torch.bfloat16):
            loss, output = mixed(model, x)
        with torch.autocast("cpu", torch.bfloat16):
            expected = torch.cat([alone(piece) for piece in x.chunk(4)])
        assert output.concat().dtype == torch.bfloat16
        assert torch.equal(output.concat(), expected)
        smp.shutdown()

    # A step that reads a loss value in some calls only, and draws random numbers.
    smp.init(config)
    torch.manual_seed(3)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 1)))
    smp.set_partition(model.module[2], 1)
    asked, x = [], x.double()

    @smp.step
    def now_and_then(model, x, ask):
        loss = model(x).square().mean()
        if ask:
            asked.append(loss.item())
        model.backward(loss / 2)
        return torch.rand(3)

    drawn = [now_and_then(model, x, ask).concat() for ask in (False, True, False, True)]
    assert len(asked) == 8
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.local_parameters())
    before = [parameter.grad.clone() for parameter in model.local_parameters()]
    drawn.append(now_and_then(model, x, True).concat())
    assert all(not torch.equal(a, p.grad) for a, p in zip(before, model.local_parameters(), strict=True))
    assert all(torch.equal(*pair) for pair in zip(*smp.allgather(drawn), strict=True))
    smp.shutdown()

    # A backward in some steps only, from different losses, with operations after it; a parameter that is added later.
    smp.init({**config, "microbatches": 2})
    torch.manual_seed(3)
    model = smp.DistributedModel(_chain(torch, smp, 2))
    torch.manual_seed(3)
    alone = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    @smp.step
    def sometimes(model, x, of):
        output = model(x)
        if hasattr(model.module[1], "factor"):
            output = output * model.module[1].factor
        losses = output.square().mean(), output.exp().mean()
        if of is not None:
            model.backward(losses[of])
        return losses[0], output.argmax(1)

    for of in (None, 0, 1, None, 0):
        sometimes(model, x, of)
        if of is not None:
            output = alone(x)
            (output.square().mean(), output.exp().mean())[of].backward()
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter.grad, alone.get_parameter(name).grad, rtol=1e-11, atol=1e-15)
        for parameter in (*model.local_parameters(), *alone.parameters()):
            parameter.grad = None

    @smp.step
    def positive(model, x):
        output = model(x)
        return output[: (output[:, 0] > 0).sum()].sum()

    for batch in (x, x.flip(0), x[:4]):
        sums = [output[: (output[:, 0] > 0).sum()].sum() for output in alone(batch).chunk(2)]
        torch.testing.assert_close(positive(model, batch).stack(), torch.stack(sums).detach(), rtol=1e-12, atol=1e-15)

    layer = model.module[1]
    model.module[1] = nn.Linear(6, 6)
    with pytest.raises(exceptions.SMPUsageError, match="the module `1`, a Linear, was added after"):
        sometimes(model, x, 0)
    model.module[1] = layer
    layer.factor = nn.Parameter(torch.tensor(2.0))
    sometimes(model, x, 0)
    assert (layer.factor.grad is None) == (smp.pp_rank() == 1)
    smp.shutdown()

    # `activation_memory_bytes` below the size of one microbatch.
    smp.init({**config, "activation_memory_bytes": 100})
    model = smp.DistributedModel(_chain(torch, smp, 2))
    with pytest.raises(ValueError, match="bytes of activations on rank 0, and the bound is 100"):
        train(model, x, -x)
    smp.shutdown()

    # Delayed initialization: no rank ever holds the whole model.
    smp.init({**config, "microbatches": 2})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with smp.model_creation(dtype=torch.float32):
        layers = [nn.Linear(2048, 2048) for _ in range(8)]
    model = nn.Sequential(*layers)
    for place, layer in enumerate(layers):
        smp.set_partition(layer, place // 4)
    whole = sum(p.numel() * 4 for p in model.parameters())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model = smp.DistributedModel(model)

    @smp.step
    def forward(model, x):
        return model(x)

    with torch.no_grad():
        output = forward(model, torch.randn(2, 2048, dtype=torch.float32)).concat()
    assert torch.isfinite(output).all()
    own = sum(p.numel() * 4 for p in model.local_parameters())
    assert own == whole // 2
    assert len(optimizer.param_groups[0]["params"]) == 8
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 0.75 * whole, f"{grown} of {whole} bytes"
    smp.shutdown()
    return True


@pytest.mark.timeout(300)
def test_features_of_steps_models_and_optimizers():
    assert run_ranks(_features_body, 2, launcher=Forked("torch"), timeout=290) == [True, True]


def _mismatch_body():
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({"partitions": 2, "microbatches": 2, **MANUAL})
    model = smp.DistributedModel(_chain(torch, smp, 2))
    texts = []

    @smp.step
    def other(model, x):
        output = model(x)
        output = torch.tanh(output) if smp.rank() == 0 else torch.sigmoid(output)
        return output.sum()

    @smp.step
    def asks(model, x):
        output = model(x).sum()
        if smp.rank() == 1:
            output.item()
        return output

    for step in (other, asks):
        with pytest.raises(smp.exceptions.SMPMismatchError) as error:
            step(model, torch.ones(4, 6))
        texts.append(str(error.value))

    # The pipeline is usable after the errors.
    @smp.step
    def right(model, x):
        output = model(x).square().mean()
        model.backward(output)
        return output

    assert torch.isfinite(right(model, torch.ones(4, 6)).reduce_mean())
    return texts


@pytest.mark.timeout(300)
def test_different_steps_show_the_first_task_that_differs():
    first, second = run_ranks(_mismatch_body, 2, launcher=Forked("torch"), timeout=290)
    assert first == second
    assert "task 4 of microbatch 0 is `tanh` on partition 1" in first[0]
    assert "`sigmoid` on partition 1" in first[0]
    assert "reading values in microbatch 0" in first[1]


def _timeline_body(decision):
    """Runs two steps of a model with skip connections: stage 2 has inputs from stages 0 and 1."""
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    smp.init({"partitions": 2, "microbatches": 3, "partition_file": decision, **MANUAL})

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = _chain(torch, smp, 2)

        def forward(self, x):
            first = self.layers[0](x)
            second = self.layers[2](first)
            third = self.layers[1](second + first)
            return self.layers[3](third + first)

    model = smp.DistributedModel(Skips())

    @smp.step
    def train(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for _ in range(2):
        train(model, torch.ones(6, 6))


def test_the_timeline_shows_what_ranks_do_for_each_microbatch(tmp_path):
    path = tmp_path / "timeline.json"
    decision = tmp_path / "partitions.json"
    env = {"SMD_TIMELINE": str(path)}
    run_ranks(_timeline_body, 2, str(decision), launcher=Forked("torch"), timeout=100, env=env)
    assert partition_file.read(str(decision), 2) == {
        "": 0, "layers": 0, "layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1,
    }  # fmt: skip
    events = [json.loads(line.rstrip(",\n")) for line in path.read_text().splitlines()[1:] if line.startswith("{")]
    spans = Counter((e["pid"], e["name"], e["args"]["microbatch"]) for e in events if "microbatch" in e.get("args", {}))
    kinds = ("forward", "backward", "send", "receive", "wait")
    assert spans.keys() == {(rank, kind, index) for rank in range(2) for kind in kinds for index in range(3)}
    # Each rank runs two stages in each of two steps.
    assert {count for (_, kind, _), count in spans.items() if kind in kinds[:2]} == {4}
    stages = {e["tid"]: int(e["args"]["name"].split()[1]) for e in events if "of the pipeline" in str(e.get("args"))}
    inputs = {(stages[e["tid"]], e["args"]["stage"]) for e in events if e["name"] == "stage input"}
    assert inputs == {(1, 0), (2, 0), (2, 1), (3, 2)}
    picture = tmp_path / "report.svg"
    command = [sys.executable, "-m", "smdistributed", "report", str(path), "--svg", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("step 1 of 2, ranks [0, 1]\nmeasured: "), (done.stdout, done.stderr)
    assert "simulated from mean times: " in done.stdout
    assert picture.read_text().count("<title>") == 2 * 2 * 2 * 2 * 3, (
        "expected 2 stages x 2 ranks x forward and backward x 2 pictures x 3 microbatches"
    )


def _overflow_in_one_shard_body(config):
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({"ddp": True, **config})
    torch.manual_seed(0)
    model = smp.DistributedModel(torch.nn.Linear(8, 8))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = smp.amp.GradScaler(init_scale=4.0, device="cpu")

    @smp.step
    def step(model, x, factor):
        # Only the last row of the weights has a gradient.
        model.backward(scaler.scale(model(x)[:, -1].sum() * factor))

    scales, weights = [], []
    for factor in (1.0, math.inf, 1.0):
        step(model, torch.ones(2, 8), factor)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        weights.append(model.state_dict()["weight"].clone())
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(weights[0], weights[1])
    return scales


@pytest.mark.parametrize("config", [{"shard_optimizer_state": True}, {"sharded_data_parallel_degree": 2}])
def test_an_overflow_in_one_shard_skips_the_step_on_all_ranks(config):
    found = run_ranks(_overflow_in_one_shard_body, 2, config, launcher=Forked("torch"), timeout=50)
    assert found == [[4.0, 2.0, 2.0]] * 2
