"""Options of DistributedDataParallel, and its use with optimizers, checkpointing and the compiler.

Results are compared with torch's DistributedDataParallel over gloo, or with the documented effect of the option.
"""

from __future__ import annotations

import contextlib

import pytest

from support import Forked, run_ranks


def _start(backend="gloo"):
    import torch

    import smdistributed.dataparallel.torch.distributed as dist
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

    if backend == "smddp":
        import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

        torch.distributed.init_process_group("smddp")
    else:
        dist.init_process_group()
        torch.distributed.init_process_group(backend)
    torch.manual_seed(0)
    return torch, dist, DistributedDataParallel


def _mlp(torch):
    nn = torch.nn
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def _x(torch, rank, step=0):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def _assert_gradients(torch, mine, expected, tolerance=1e-6, where=""):
    pairs = zip(mine.named_parameters(), expected.parameters(), strict=True)
    for (name, a), b in pairs:
        assert (a.grad is None) == (b.grad is None), (where, name)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=tolerance, atol=tolerance, msg=f"{where} {name}")


def _is_same_everywhere(torch, tensor):
    copies = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(copies, tensor.contiguous())
    return all(torch.equal(copy, copies[0]) for copy in copies)


def _check_arguments():
    import copy

    torch, dist, ddp_class = _start()
    rank = dist.get_rank()
    torch_ddp = torch.nn.parallel.DistributedDataParallel
    base = _mlp(torch)
    mesh = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("other", "data"))
    whole = torch.distributed.init_device_mesh("cpu", (2,))
    plain = torch_ddp(copy.deepcopy(base))
    for step in range(3):
        plain(_x(torch, rank, step)).square().mean().backward()

    # Options that do not change the gradients.
    for keywords in (
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb_list": [512 / 2**20, 256 / 2**20, 1]},
        {"device_mesh": whole},
        {"device_mesh": mesh["data"]},
        {"process_group": torch.distributed.new_group([0, 1])},
        {"process_group": dist.new_group([0, 1])},
        {"skip_all_reduce_unused_params": True},
        {"find_unused_parameters": True, "static_graph": True},
        {"dim": 1, "device_ids": None, "output_device": None},
    ):
        model = ddp_class(copy.deepcopy(base), **keywords)
        for step in range(3):
            model(_x(torch, rank, step)).square().mean().backward()
        _assert_gradients(torch, model.module, plain.module, where=str(keywords))
        if "bucket_cap_mb_list" in keywords:
            assert model.bucket_bytes_cap_list == [512, 256, 2**20]
            assert [line.split(":")[0] for line in model.describe_buckets().splitlines()] == [
                f"bucket {index}" for index in range(3)
            ]
        if "device_mesh" in keywords:
            assert model.device_mesh is keywords["device_mesh"]
            assert torch.distributed.get_world_size(model.process_group) == 2
    with pytest.warns(FutureWarning, match="check_reduction"):
        ddp_class(copy.deepcopy(base), check_reduction=True)
    import warnings

    from smdistributed.dataparallel.torch.parallel import arguments

    arguments.warn_of_dim.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            ddp_class(copy.deepcopy(base), dim=1, gradient_as_bucket_view=True)
    ((text, file),) = [(str(one.message), one.filename) for one in caught]
    assert "dim=1` of DistributedDataParallel is ignored: " in text
    assert file == __file__
    with pytest.raises(RuntimeError, match="one dimension"):
        ddp_class(copy.deepcopy(base), device_mesh=mesh)

    from torch.distributed.tensor import distribute_module

    with pytest.raises(TypeError, match="`weight` is a DTensor"):
        ddp_class(distribute_module(torch.nn.Linear(4, 4), whole))

    # Without `init_sync` every rank keeps its own parameters; gradients are averaged.
    replica = copy.deepcopy(base)
    with torch.no_grad():
        replica[0].bias.fill_(float(rank))
    model = ddp_class(replica, init_sync=False)
    assert replica[0].bias[0].item() == rank
    model(_x(torch, rank)).sum().backward()
    assert all(_is_same_everywhere(torch, parameter.grad) for parameter in replica.parameters())

    # Delayed parameters are in the last buckets and may stay without a gradient.
    class Delayed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.late = (torch.nn.Linear(6, 6) for _ in range(3))

        def forward(self, x, with_late):
            x = self.first(x)
            return self.second(self.late(x) if with_late else x)

    delayed = Delayed()
    late = [(name, parameter) for name, parameter in delayed.named_parameters() if name.startswith("late")]
    alone = copy.deepcopy(delayed)
    model = ddp_class(delayed, delay_all_reduce_named_params=late, param_to_hook_all_reduce=delayed.first.weight)
    for step, with_late in enumerate((True, False, True)):
        model.zero_grad()
        alone.zero_grad()
        model(_x(torch, rank, step), with_late).square().mean().backward()
        for r in range(2):
            (alone(_x(torch, r, step), with_late).square().mean() / 2).backward()
        if not with_late:
            for name, parameter in late:
                assert parameter.grad is not None, name
                assert not parameter.grad.any(), name
                parameter.grad = None
        _assert_gradients(torch, delayed, alone, 1e-5, f"delayed, step {step}")
        buckets = model.describe_buckets().splitlines()
        assert len(buckets) == 2
        assert "late.weight" in buckets[1]
        assert "late.bias" in buckets[1]

    # Ignored parameters and buffers are neither reduced nor broadcast.
    ours, theirs = (torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    wrapped = []
    for module, kind in ((ours, ddp_class), (theirs, torch_ddp)):
        kind._set_params_and_buffers_to_ignore_for_model(module, ["0.bias", "1.running_mean"])
        wrapped.append(kind(module))
    for step in range(2):
        for model in wrapped:
            model.zero_grad()
            model(_x(torch, rank, step)).pow(3).sum().backward()
        _assert_gradients(torch, ours, theirs, 1e-5, "ignored")
    assert not _is_same_everywhere(torch, ours[0].bias.grad)
    assert not _is_same_everywhere(torch, ours[1].running_mean)
    assert _is_same_everywhere(torch, ours[1].running_var)
    assert len(list(ddp_class._get_data_parallel_params(ours))) == 3

    # A DistributedDataParallel inside another one.
    results = []
    for kind in (ddp_class, torch_ddp):
        torch.manual_seed(3)
        inner = kind(torch.nn.Linear(6, 6))
        outer = kind(torch.nn.Sequential(inner, torch.nn.Tanh(), torch.nn.Linear(6, 3)))
        for step in range(2):
            outer(_x(torch, rank, step)).square().mean().backward()
        results.append(outer)
    assert list(results[0].state_dict()) == list(results[1].state_dict())
    _assert_gradients(torch, results[0], results[1], 1e-6, "nested")
    _check_precision(torch, dist, ddp_class)


def _check_precision(torch, dist, ddp_class):
    import copy

    from torch.nn.parallel.distributed import _MixedPrecision

    rank = dist.get_rank()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = _mlp(torch)
            self.register_buffer("scale", torch.full((3,), 1.5))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.seen = None

        def forward(self, x):
            self.seen = (x.dtype, self.layers[0].weight.dtype, self.scale.dtype)
            return self.layers(x) * self.scale

    base = Model()
    exact = copy.deepcopy(base)
    for r in range(2):
        (exact(_x(torch, r)).square().mean() / 2).backward()
    full, half, brain = torch.float32, torch.float16, torch.bfloat16
    for config, seen, tolerance in (
        (_MixedPrecision(param_dtype=brain, buffer_dtype=brain), (brain, brain, brain), 3e-2),
        (_MixedPrecision(param_dtype=half, reduce_dtype=full), (half, half, full), 4e-3),
        (_MixedPrecision(reduce_dtype=half), (full, full, full), 2e-3),
    ):
        model = ddp_class(copy.deepcopy(base), mixed_precision=config)
        for _ in range(2):
            model.zero_grad()
            model(_x(torch, rank)).float().square().mean().backward()
        assert model.module.seen == seen, config
        assert model.module.count.dtype == torch.int64
        assert {p.dtype for p in model.parameters()} == {full}
        assert {p.grad.dtype for p in model.parameters()} == {full}
        assert all(_is_same_everywhere(torch, p.grad) for p in model.parameters())
        _assert_gradients(torch, model.module, exact, tolerance, str(config))

    # GradScaler: after an overflow on one rank both ranks see it and skip the step.
    model = ddp_class(copy.deepcopy(base))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for overflow in (False, True, False):
        before = model.module.layers[0].weight.detach().clone()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(_x(torch, rank)).square().mean()
        scaler.scale(loss * (float("inf") if overflow and rank == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.module.layers[0].weight) == overflow
        assert _is_same_everywhere(torch, model.module.layers[0].weight.detach())
    assert scaler.get_scale() == 512.0


def test_constructor_options():
    run_ranks(_check_arguments, 2, launcher=Forked("torch"))


def _check_unused_gradients():
    torch, dist, ours = _start()
    rank = dist.get_rank()

    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.at_times = torch.nn.Linear(6, 40), torch.nn.Linear(6, 40)

        def forward(self, x, both):
            return self.always(x) + self.at_times(x) if both else self.always(x)

    models = [Branches(), Branches()]
    models[1].load_state_dict(models[0].state_dict())
    mine = ours(models[0], find_unused_parameters=True)
    theirs = torch.nn.parallel.DistributedDataParallel(models[1], find_unused_parameters=True)
    kept = [model.at_times.weight for model in models]

    def backward(both, step, sync=True):
        for model in (mine, theirs):
            with contextlib.nullcontext() if sync else model.no_sync():
                model(_x(torch, rank, step), both).square().mean().backward()

    def compare(where):
        _assert_gradients(torch, *models, where=where)

    # Gradients accumulate in all of these backwards: zero_grad is never called.
    backward(True, 0)
    compare("used by all")
    for step in (1, 2):
        before = kept[0].grad.clone()
        backward(False, step)
        assert torch.equal(kept[0].grad, before), "a gradient that no rank added to is not reduced again"
        compare("used by none")
    for weight in kept:
        weight.grad.add_(rank)
    before = kept[0].grad.clone()
    backward(False, 3)
    assert torch.equal(kept[0].grad, before), "each rank keeps its own gradient if no rank added to it"
    compare("own values, used by none")
    backward(rank == 1, 4)
    compare("used by one")
    assert _is_same_everywhere(torch, kept[0].grad)
    backward(rank == 2, 5, sync=False)
    backward(False, 6)
    compare("used by one before")
    assert _is_same_everywhere(torch, kept[0].grad)

    # In join the sum is divided by the number of ranks that have inputs left. A gradient that no rank added to is not.
    before = kept[0].grad.clone()
    for model in (mine, theirs):
        with model.join(divide_by_initial_world_size=False):
            for step in range(1 + rank):
                model(_x(torch, rank, 7 + step), False).square().mean().backward()
    assert torch.equal(kept[0].grad, before), "a gradient that no rank added to is not divided"
    if rank == 2:
        compare("uneven inputs")


def test_gradients_that_no_rank_computed_stay_unchanged():
    run_ranks(_check_unused_gradients, 3, launcher=Forked("torch"))


def _checkpoints_body():
    import copy

    torch, dist, ddp_class = _start()
    from torch.utils.checkpoint import checkpoint

    rank = dist.get_rank()
    torch_ddp = torch.nn.parallel.DistributedDataParallel

    class Checkpointed(torch.nn.Module):
        """Two checkpointed calls use the same layer if `shared`; one layer is never called if `unused`."""

        def __init__(self, reentrant, shared, unused):
            super().__init__()
            self.first, self.second, self.head = (torch.nn.Linear(6, 6) for _ in range(3))
            self.unused = torch.nn.Linear(6, 6) if unused else None
            self.reentrant, self.shared = reentrant, shared

        def forward(self, x):
            x = checkpoint(self.first, x, use_reentrant=self.reentrant)
            x = checkpoint(self.first if self.shared else self.second, torch.tanh(x), use_reentrant=self.reentrant)
            return self.head(x)[:, :3]

    cases = [
        ((False, False, False), {}),
        ((False, True, True), {"find_unused_parameters": True}),
        ((True, False, False), {}),
        ((True, True, True), {"static_graph": True}),
        ((False, True, True), {"static_graph": True}),
    ]
    for arguments, keywords in cases:
        base = Checkpointed(*arguments)
        if arguments[1]:
            base.second = None
        models = [kind(copy.deepcopy(base), **keywords) for kind in (ddp_class, torch_ddp)]
        for step in range(4):
            for model in models:
                model.zero_grad()
                x = _x(torch, rank, step).requires_grad_()
                if step == 2:  # accumulation and checkpoints together
                    with model.no_sync():
                        model(x).square().mean().backward()
                model(x).square().mean().backward()
            _assert_gradients(torch, models[0].module, models[1].module, 1e-5, f"{arguments}, {keywords}, {step}")

    # A parameter used in two re-entrant checkpoints needs `static_graph=True`; the error says so.
    shared = Checkpointed(True, True, False)
    shared.second = None
    model = ddp_class(shared)
    with pytest.raises(Exception, match=r"`first\.(weight|bias)` got a second gradient.*static_graph=True"):
        model(_x(torch, rank).requires_grad_()).sum().backward()

    # On rank 1 the loss of step 1 depends on no parameter; rank 0's reduction still completes.
    class Skipping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(6, 3)

        def forward(self, x, skip):
            return x * 1 if skip else self.layer(x)

    model = ddp_class(Skipping(), find_unused_parameters=True)
    for step in range(3):
        model.zero_grad()
        skip = rank == 1 and step == 1
        model(torch.ones(2, 6, requires_grad=True), skip).sum().backward()
        assert model.module.layer.bias.grad.tolist() == [1.0 if step == 1 else 2.0] * 3

    # Without `find_unused_parameters` both ranks raise. A model that is frozen on all ranks for one step is not an error.
    model = ddp_class(Skipping())
    for step in range(4):
        inputs = torch.ones(2, 6, requires_grad=True)
        if step == 1:
            with pytest.raises(Exception, match="2 of 2 parameters got no gradient in this backward on rank 1: `layer"):
                model(inputs, rank == 1).sum().backward()
        elif step == 2:
            model.requires_grad_(False)
            model(inputs, False).sum().backward()
            assert inputs.grad is not None
            model.requires_grad_(True)
        else:
            model.zero_grad()
            model(inputs, False).sum().backward()
            assert model.module.layer.bias.grad.tolist() == [2.0] * 3

    # With `create_graph=True` the gradient keeps its graph.
    alone = _mlp(torch)
    model = ddp_class(copy.deepcopy(alone))
    for r in range(2):
        (alone(_x(torch, r))[0, 0] / 2).backward()
    with pytest.warns(UserWarning, match="a graph of its own"):
        model(_x(torch, rank))[0, 0].backward(create_graph=True)
    _assert_gradients(torch, model.module, alone, 1e-6, "create_graph")
    again = torch.autograd.grad(model.module[0].weight.grad.sum(), model.module[2].weight)[0]
    assert again.abs().sum() > 0


def test_activation_checkpointing_and_differing_graphs():
    run_ranks(_checkpoints_body, 2, launcher=Forked("torch"))


def _check_logging_and_hooks():
    import copy

    torch, dist, ddp_class = _start()
    rank = dist.get_rank()
    torch_ddp = torch.nn.parallel.DistributedDataParallel
    base = _mlp(torch)

    # Logging data.
    models = [kind(copy.deepcopy(base), bucket_cap_mb=1) for kind in (ddp_class, torch_ddp)]
    for model in models:
        model._set_ddp_runtime_logging_sample_rate(2)
        for step in range(13):
            model(_x(torch, rank, step)).sum().backward()
    models[1](_x(torch, rank, 0))  # torch updates the logging data of a step at the start of the next one
    ours, theirs = (model._get_ddp_logging_data() for model in models)
    same = (
        "world_size rank backend_name module_name device_ids output_device broadcast_buffers bucket_cap_bytes dtypes "
        "find_unused_parameters gradient_as_bucket_view is_multi_device_module has_sync_bn num_parameter_tensors "
        "total_parameter_size_bytes bucket_sizes rebuilt_bucket_sizes has_rebuilt_buckets unused_parameter_size "
        "prev_iteration_grad_ready_order_indices rebuilt_per_bucket_param_indices num_buckets_reduced master_addr"
    )
    for name in same.split():
        assert ours[name] == theirs[name], name
    assert ours["iteration"] == 12
    assert {name for name in theirs if "time" in name} <= set(ours)
    starts = [f"{part}_time_start" for part in ("forward_compute", "backward_compute", "backward_comm")]
    assert sorted(starts, key=ours.__getitem__) == starts
    for name in ("forward_compute_time", "backward_compute_time", "backward_comm_time"):
        assert ours[name] > 0, name
        assert ours[f"avg_{name}"] > 0, name
    with pytest.raises(ValueError, match="greater than 1"):
        models[0]._set_ddp_runtime_logging_sample_rate(0)

    # `static_graph` after construction.
    late = ddp_class(copy.deepcopy(base))
    late._set_static_graph()
    with pytest.warns(UserWarning, match="already"):
        late._set_static_graph()
    assert late._get_ddp_logging_data()["static_graph"] == 1

    # Buffers are synchronized by a user's hook.
    from torch.nn.parallel.distributed import _BufferCommHookLocation

    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(6, 3)
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.count += 1 + rank
            return self.layer(x)

    def add_up(state, buffers):
        works = [torch.distributed.all_reduce(buffer, async_op=True) for buffer in buffers.values()]
        if state == _BufferCommHookLocation.POST_FORWARD:
            return [work.get_future() for work in works]
        for work in works:  # before the forward the hook itself has to wait
            work.wait()
        return None

    for location in _BufferCommHookLocation:
        counts = []
        for kind in (ddp_class, torch_ddp):
            model = kind(Counter())
            model._register_buffer_comm_hook(location, add_up, location)
            assert model.will_sync_module_buffers()
            for step in range(2):
                model(_x(torch, rank, step)).sum().backward()
            counts.append(model.module.count.item())
        assert counts[0] == counts[1], location

    # `reducer.prepare_for_backward` after a forward inside no_sync: the backward is reduced.
    model = ddp_class(copy.deepcopy(base))
    with model.no_sync():
        model(_x(torch, rank)).sum().backward()
        assert not _is_same_everywhere(torch, model.module[0].weight.grad)
        output = model(_x(torch, rank))
    model.reducer.prepare_for_backward([output])
    output.sum().backward()
    assert _is_same_everywhere(torch, model.module[0].weight.grad)
    model._check_reducer_finalized()
    assert model._has_rebuilt_buckets

    # Without its autograd hooks, the model no longer reduces.
    model._remove_autograd_hooks()
    model.zero_grad()
    model(_x(torch, rank)).sum().backward()
    assert not _is_same_everywhere(torch, model.module[0].weight.grad)

    # State dicts of torch.distributed.checkpoint, and a new process group.
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model = ddp_class(copy.deepcopy(base))
    state = get_model_state_dict(model)
    assert list(state) == list(base.state_dict())
    set_model_state_dict(model, {name: value + 1 for name, value in state.items()})
    assert torch.equal(model.module[0].bias, base[0].bias + 1)
    model._update_process_group(torch.distributed.new_group([0, 1]))
    model(_x(torch, rank)).sum().backward()
    assert _is_same_everywhere(torch, model.module[0].weight.grad)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(model)


def test_logging_data_buffer_hooks_and_private_methods():
    run_ranks(_check_logging_and_hooks, 2, launcher=Forked("torch"))


def _check_optimizers():
    """Optimizers that step inside the backward (registered by torch's helpers), ZeRO hooks, and quantization hooks."""
    import copy

    torch, dist, ddp_class = _start("smddp")
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks, quantization_hooks
    from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward

    rank = dist.get_rank()
    base = _mlp(torch)

    def train(model, optimizer):
        for step in range(4):
            loss = model(_x(torch, rank, step)).square().mean()
            loss.backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    def close(mine, expected, where, tolerance=1e-5):
        for a, b in zip(mine, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=where)

    for optimizer_class, options in ((torch.optim.SGD, {"lr": 0.1}), (torch.optim.Adam, {"lr": 0.01})):
        plain = ddp_class(copy.deepcopy(base), bucket_cap_mb=512 / 2**20)
        expected = train(plain, optimizer_class(plain.parameters(), **options))
        fused = ddp_class(copy.deepcopy(base), bucket_cap_mb=512 / 2**20)
        fused._register_fused_optim(optimizer_class, **options)
        close(train(fused, None), expected, f"fused {optimizer_class}")
        for before in (True, False):
            module = copy.deepcopy(base)
            if before:
                _apply_optimizer_in_backward(optimizer_class, module.parameters(), options)
            model = ddp_class(module, bucket_cap_mb=512 / 2**20, gradient_as_bucket_view=before)
            if not before:
                _apply_optimizer_in_backward(optimizer_class, module.parameters(), options)
            close(train(model, None), expected, f"in backward {optimizer_class}, {before}")
            model(_x(torch, rank)).sum().backward()
            assert all(parameter.grad is None for parameter in model.parameters())

    # ZeroRedundancyOptimizer steps inside the hook; this needs `static_graph=True`.
    plain = ddp_class(copy.deepcopy(base))
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for make in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved):
        model = ddp_class(copy.deepcopy(base), static_graph=True)
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        model.register_comm_hook(None, make(default_hooks.allreduce_hook, model, zero, shard_buckets=False))
        for step in range(2):  # the hook's first two steps only record the buckets
            model(_x(torch, rank, step)).sum().backward()
        model.zero_grad()
        close([parameter.detach() for parameter in model.parameters()], list(base.parameters()), "zero, before")
        close(train(model, None), expected, make.__name__)

    # Gradients quantized to eight bits.
    for hook in (quantization_hooks.quantization_pertensor_hook, quantization_hooks.quantization_perchannel_hook):
        model = ddp_class(copy.deepcopy(base))
        model.register_comm_hook(torch.distributed.group.WORLD, hook)
        exact = copy.deepcopy(base)
        for step in range(2):
            model.zero_grad()
            model(_x(torch, rank, step)).square().mean().backward()
        for r in range(2):
            (exact(_x(torch, r, 1)).square().mean() / 2).backward()
        largest = max(parameter.grad.abs().max().item() for parameter in exact.parameters())
        for a, b in zip(model.parameters(), exact.parameters(), strict=True):
            assert _is_same_everywhere(torch, a.grad)
            assert (a.grad - b.grad).abs().max().item() < largest / 50, hook.__name__


def test_optimizers_and_hooks_that_need_more_than_gloo():
    run_ranks(_check_optimizers, 2, launcher=Forked("torch"))


def _check_compile():
    import copy

    torch, dist, ddp_class = _start()
    rank = dist.get_rank()

    class Layers(torch.nn.Module):
        """A module of our own: the compiler does not compile a bare `nn.Sequential`."""

        def __init__(self):
            super().__init__()
            nn = torch.nn
            self.layers = nn.Sequential(nn.Linear(6, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 3))

        def forward(self, x):
            return self.layers(x)

    base = Layers()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    plain = ddp_class(copy.deepcopy(base), bucket_cap_mb=1)
    over = torch.compile(ddp_class(copy.deepcopy(base), bucket_cap_mb=1), backend=count)
    under = ddp_class(torch.compile(copy.deepcopy(base), backend="aot_eager"))
    inside = ddp_class(copy.deepcopy(base), static_graph=True)
    whole = torch.compile(lambda x: inside(x).square().mean(), backend="aot_eager")
    for step in range(3):
        x = _x(torch, rank, step)
        plain.zero_grad()
        plain(x).square().mean().backward()
        for name, model, loss in (
            ("over", over, lambda x: over(x).square().mean()),
            ("under", under, lambda x: under(x).square().mean()),
            ("inside", inside, whole),
        ):
            model.zero_grad()
            if step == 1:
                with (over._orig_mod if model is over else model).no_sync():
                    loss(x).backward()
                model.zero_grad()
            loss(x).backward()
            _assert_gradients(torch, model, plain, 1e-6, f"{name}, step {step}")
    assert len(graphs) > 1, f"the compiler splits the graph at bucket boundaries, but made {len(graphs)} graph(s)"


def test_compiled_models():
    run_ranks(_check_compile, 2, launcher=Forked("torch"), timeout=100)
