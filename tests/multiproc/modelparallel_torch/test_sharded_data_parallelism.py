"""Sharded data parallelism compared with one process: Llama, GPT-2, and a model with unusual uses of parameters."""

from __future__ import annotations

import copy

import pytest

from support import Forked, more, run_ranks

CONFIG = {"microbatches": 2, "ddp": True, "sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 0.05}


def _odd(torch):
    """Returns a model with a shared embedding, weights used outside their module, a frozen layer and an unused
    parameter."""
    torch.manual_seed(3)

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(64, 6)
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(
                    torch.nn.Linear(6, 7), torch.nn.GELU(), torch.nn.LayerNorm(7), torch.nn.Linear(7, 6)
                )
                for _ in range(3)
            )
            self.head = torch.nn.Linear(6, 64, bias=False)
            self.head.weight = self.embedding.weight
            self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
            self.functional = torch.nn.Linear(6, 6)
            self.scale = torch.nn.Parameter(torch.ones(6))
            self.unused = torch.nn.Parameter(torch.ones(5))

        def forward(self, input_ids):
            x = self.embedding(input_ids)
            for layer in self.layers:
                x = x + layer(x)
            x = torch.nn.functional.linear(self.frozen(x), self.functional.weight, self.functional.bias)
            return self.head(x * self.scale)

    return Odd()


def _model(torch, kind):
    if kind == "odd":
        return _odd(torch)
    from support import huggingface

    torch.manual_seed(3)
    return huggingface.make(kind)


def _tokens(torch, number, replica):
    return torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(100 * number + replica))


def _loss(torch, model, tokens):
    output = model(input_ids=tokens)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1) if logits.dtype.itemsize < 4
                                             else logits.flatten(0, 1), tokens.flatten())  # fmt: skip


def _start(torch, smp, kind, config, passes=1, checkpointed=False, delayed=False, **scales):
    smp.init({**CONFIG, **config})
    with smp.delay_param_initialization(delayed):
        module = _model(torch, kind)
    model = smp.DistributedModel(module, backward_passes_per_step=passes)
    if checkpointed:
        for layer in model.module.layers if kind == "odd" else model.module.model.layers:
            smp.set_activation_checkpointing(layer)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(trained, lr=0.01), **scales)

    @smp.step
    def step(model, tokens):
        loss = _loss(torch, model, tokens)
        model.backward(loss)
        return loss

    return model, optimizer, step


def _gradients(torch, smp, model):
    """Returns whole gradients, concatenated from the shards of a sharding group."""
    found = {name: each.grad for name, each in model.sharded.replicated}
    own = {}
    for each in model.sharded.parameters():
        gradient = each.parameter.grad
        own[each.piece.name] = None if gradient is None else each.piece.trimmed(gradient, gradient.numel()).clone()
    parts = smp.allgather(own, smp.WORLD)[: model.sharded.groups.degree]
    for each in model.sharded.parameters():
        name = each.piece.name
        row = [part[name] for part in parts]
        found[name] = None if row[0] is None else torch.cat(row).view(each.shape)
    return found


def _equality(torch, smp, kind, config, passes=1, checkpointed=False):
    model, optimizer, step = _start(torch, smp, kind, config, passes, checkpointed)
    alone = _model(torch, kind)
    own = dict(alone.named_parameters())
    reference = torch.optim.AdamW([each for each in alone.parameters() if each.requires_grad], lr=0.01)
    tolerance = 1e-10 if torch.get_default_dtype() == torch.float64 else 1e-5
    for number in range(5):
        optimizer.zero_grad()
        reference.zero_grad()
        for part in range(passes):
            at = number * passes + part
            losses = step(model, _tokens(torch, at, smp.dp_rank()))
            for replica in range(smp.dp_size()):
                for index, piece in enumerate(_tokens(torch, at, replica).chunk(2)):
                    loss = _loss(torch, alone, piece)
                    (loss / 2 / smp.dp_size()).backward()
                    if replica == smp.dp_rank():
                        torch.testing.assert_close(losses[index], loss.detach(), rtol=tolerance, atol=tolerance)
        for name, gradient in _gradients(torch, smp, model).items():
            wanted = own[name].grad
            assert (gradient is None) == (wanted is None), name
            if wanted is not None:
                torch.testing.assert_close(gradient, wanted, rtol=tolerance, atol=tolerance, msg=name)
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), CONFIG["sdp_gradient_clipping"])
        assert norm > CONFIG["sdp_gradient_clipping"]
        optimizer.step()
        reference.step()
        torch.testing.assert_close(optimizer._global_grad_norm.to(norm), norm, rtol=tolerance, atol=tolerance)
    whole = model.state_dict()
    assert whole.keys() == alone.state_dict().keys()
    for name, parameter in own.items():
        torch.testing.assert_close(whole[name], parameter.detach(), rtol=tolerance, atol=tolerance, msg=name)
    with torch.no_grad():
        for training in (False, True):
            tokens = _tokens(torch, 99, 0)
            expected = _loss(torch, alone.train(training), tokens)
            torch.testing.assert_close(_loss(torch, model.train(training), tokens), expected, rtol=tolerance, atol=0)
    assert not any(unit.is_present for unit in model.sharded.units)
    smp.barrier()
    torch.distributed.destroy_process_group()
    smp.shutdown()


def _check_equality(ranks):
    import torch

    import smdistributed.modelparallel.torch as smp

    torch.set_default_dtype(torch.float64)
    for degree in {2, ranks}:
        for kind in ("llama", "gpt2", "odd"):
            _equality(torch, smp, kind, {"sharded_data_parallel_degree": degree})
    config = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 50}
    _equality(torch, smp, "odd", config, passes=2)
    _equality(torch, smp, "llama", config, checkpointed=True)
    # The limits force smaller units that are gathered one at a time, and messages of one parameter.
    small = {"sharded_data_parallel_degree": 2, "sdp_max_live_parameters": 60, "sdp_reduce_bucket_size": 20}
    _equality(torch, smp, "odd", small, checkpointed=True)
    torch.set_default_dtype(torch.float32)
    for kind in ("llama", "gpt2"):
        _equality(torch, smp, kind, {"sharded_data_parallel_degree": ranks})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, more(4)])
def test_sharded_training_is_that_of_one_process(ranks):
    pytest.importorskip("transformers")
    run_ranks(_check_equality, ranks, ranks, launcher=Forked("transformers"), timeout=280)


def _limited_body(kind, limits):
    """Returns for each limit the warnings of three steps, and how many of them had no prefetches."""
    import os
    import warnings

    import torch

    import smdistributed.modelparallel.torch as smp
    from smdistributed import _core

    found, before = [], 0
    for limit in limits:
        config = {"sharded_data_parallel_degree": 2, "sdp_max_live_parameters": limit}
        model, _, step = _start(torch, smp, kind, config)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(3):
                step(model, _tokens(torch, number, smp.dp_rank()))
        ((_, _, counts),) = _core.running_fallbacks(os.getpid())
        times = dict(counts)["without_prefetch"]
        found.append(([str(one.message) for one in caught if "sdp_max_live" in str(one.message)], times - before))
        before = times
        smp.barrier()
        torch.distributed.destroy_process_group()
        smp.shutdown()
    return found


@pytest.mark.timeout(100)
def test_steps_without_space_for_prefetches_are_told_with_the_space_they_need():
    # The largest neighbors are the embedding of 384 elements and a layer of 114; a bias and a scale take 12.
    for found in run_ranks(_limited_body, 2, "odd", [400, 510], launcher=Forked("torch"), timeout=90):
        ((text,), times), (none, later) = found
        assert "`sdp_max_live_parameters` 400 is too small" in text
        assert text.endswith("prefetching needs 510 or more")
        assert (times, none, later) == (3, [], 0)


def _storages(torch, tensors):
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def _memory_body(degree):
    import torch

    import smdistributed.modelparallel.torch as smp

    found = []
    for delayed in (False, True):
        started = _start(torch, smp, "llama", {"sharded_data_parallel_degree": degree}, delayed=delayed)
        model, optimizer, step = started
        step(model, _tokens(torch, 0, smp.dp_rank()))
        gradients = [each.grad for each in model.parameters()]
        optimizer.step()
        states = [each for entry in optimizer.state.values() for each in entry.values() if each.dim()]
        found.append(_storages(torch, [*model.parameters(), *gradients, *states]))
        whole = sum(each.ds_numel for each in model.parameters()) * 4 * 4
        assert all(each.numel() < each.ds_numel for each in model.parameters())
        # Parameters were initialized layer by layer: all are finite, and equal on all ranks.
        content = model.state_dict()
        assert all(bool(each.isfinite().all()) for each in content.values())
        sums = smp.allgather(float(sum(each.double().sum() for each in content.values())), smp.WORLD)
        assert len(set(sums)) == 1
        torch.distributed.destroy_process_group()
        smp.shutdown()
    return found, whole


@pytest.mark.timeout(120)
@pytest.mark.parametrize("degree", [2, more(4)])
def test_a_rank_keeps_its_share_of_memory(degree):
    pytest.importorskip("transformers")
    for found, whole in run_ranks(_memory_body, degree, degree, launcher=Forked("transformers"), timeout=100):
        assert all(each <= 1.08 * whole / degree for each in found), (found, whole)


BAD = (1, 4)


def _half(torch, smp, config, numbers, load=None):
    scales = {"dynamic_loss_scale": True, "init_scale": 256.0, "scale_window": 2} if config.get("fp16") else {}
    model, optimizer, step = _start(torch, smp, "odd", config, **scales)
    if load is not None:
        load()
    history = []
    for number in numbers:
        optimizer.zero_grad()
        losses = [float(loss) for loss in step(model, _tokens(torch, number, smp.dp_rank())).outputs]
        if number in BAD and smp.rank() == 1 and config.get("fp16"):
            next(each.grad for each in model.parameters() if each.grad is not None)[0] = torch.nan
        scale = optimizer.loss_scale
        optimizer.step()
        history.append((losses, scale, optimizer.overflow))
        assert optimizer.overflow == (number in BAD and "fp16" in config)
    return history, model.state_dict(), optimizer.state_dict()


def _check_resume(folder):
    import torch

    import smdistributed.modelparallel.torch as smp

    for key in ("fp16", "bf16", "ddp"):
        config = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 6, key: True}
        _, whole, state = copy.deepcopy(_half(torch, smp, config, range(3)))
        where = f"{folder}/{key}"
        smp.save_checkpoint(where, "t", model=smp.state.model, optimizer=smp.state.optimizer, user_content={"at": 3})
        smp.save_checkpoint(where, "full", partial=False, model=smp.state.model)
        smp.save_checkpoint(where, "core", format="sharded", user_content={"at": 3})
        part = copy.deepcopy((smp.state.model.local_state_dict(), smp.state.optimizer.local_state_dict()))
        smp.shutdown()

        def from_files(where=where):
            assert smp.resume_from_checkpoint(where, "t") == {"at": 3}

        def from_core(where=where):
            assert smp.resume_from_checkpoint(where, "core") == {"at": 3}

        def from_dicts(whole=whole, state=state):
            smp.state.model.load_state_dict(whole)
            smp.state.optimizer.load_state_dict(copy.deepcopy(state))

        def from_parts(part=part):
            smp.state.model.load_state_dict(part[0])
            smp.state.optimizer.load_state_dict(copy.deepcopy(part[1]))

        expected = _half(torch, smp, config, range(6))
        smp.shutdown()
        for load in (from_files, from_core, from_dicts, from_parts):
            history, *content = _half(torch, smp, config, range(3, 6), load)
            assert history == expected[0][3:], (key, load.__name__)
            _same(torch, content, list(expected[1:]), f"{key}/{load.__name__}")
            smp.shutdown()
        # Loaded with another number of shards, with sharded states only, and without sharding: the same elements.
        for other in ({"sharded_data_parallel_degree": 4}, {"shard_optimizer_state": True}, {}):
            smp.init({**CONFIG, "ddp": True, key: True, **other})
            model = smp.DistributedModel(_odd(torch))
            trained = [each for each in model.parameters() if each.requires_grad]
            scales = {"dynamic_loss_scale": True} if key == "fp16" else {}
            optimizer = smp.DistributedOptimizer(torch.optim.AdamW(trained, lr=0.5), **scales)
            (from_core if key == "bf16" else from_files)()
            found = optimizer.state_dict()
            _same(torch, dict(model.state_dict()), dict(whole), f"{key}/{other}/model")
            for name in found.keys() - {"param_groups"}:
                _same(torch, found[name], state[name], f"{key}/{other}/{name}")
            assert found["param_groups"][0]["lr"] == 0.01
            smp.shutdown()
        if smp.ranks.rank() == 0 if smp.is_initialized() else torch.distributed.get_rank() == 0:
            file = torch.load(f"{where}/t_partial/optimizer_1.pt")
            assert file["partition_count"] == 2
            assert ("fp32_flat_groups" in file) == (key != "ddp")
            shards = torch.load(f"{where}/t_partial/model_1.pt")["module"]
            assert shards["layers.0.0.weight"].shape == (21,)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _same(torch, one, other, where):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            _same(torch, one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        for place, pair in enumerate(zip(one, other, strict=True)):
            _same(torch, *pair, f"{where}/{place}")
    else:
        assert one == other, where


@pytest.mark.timeout(240)
def test_sharded_training_is_resumed_bit_for_bit(tmp_path):
    run_ranks(_check_resume, 4, str(tmp_path), launcher=Forked("transformers"), timeout=220)


def _check_refusals():
    import torch

    import smdistributed.modelparallel.torch as smp

    for config, error, text in (
        ({"sharded_data_parallel_degree": 3}, "SMPConfigError", "3 does not divide the data-parallel degree 2"),
        ({"sharded_data_parallel_degree": 2, "ddp": False}, "SMPConfigError", "needs `ddp: true`"),
        (
            {"sharded_data_parallel_degree": 2, "partitions": 2},
            "SMPConfigError",
            "2 does not divide the data-parallel degree 1",
        ),
        (
            {"sharded_data_parallel_degree": 2, "shard_optimizer_state": True},
            "SMPConfigError",
            "cannot be combined with",
        ),
    ):
        with pytest.raises(getattr(smp.exceptions, error), match=text):
            smp.init({**CONFIG, **config})
    with pytest.warns(UserWarning, match="`sdp_hierarchical_allgather: false` is ignored"):
        smp.init({**CONFIG, "sharded_data_parallel_degree": 2, "sdp_hierarchical_allgather": False})
    model = smp.DistributedModel(_odd(torch))
    with pytest.raises(smp.exceptions.SMPUnsupportedError, match="cannot be sharded"):
        smp.DistributedOptimizer(smp.optimizers.FusedLAMB(model.parameters()))
    with pytest.raises(smp.exceptions.SMPUnsupportedError, match="without a batch"):
        model.join()
    smp.shutdown()
    torch.distributed.destroy_process_group()


def test_unsupported_combinations_with_shards_raise():
    run_ranks(_check_refusals, 2, launcher=Forked("transformers"), timeout=50)


def _compiled_body(layers):
    import torch
    from torch._dynamo.utils import counters
    from transformers import LlamaConfig, LlamaForCausalLM

    import smdistributed.modelparallel.torch as smp

    def make():
        torch.manual_seed(3)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                # A cache indexes its entries by layer, so each layer would be compiled separately.
                use_cache=False,
            )
        )

    smp.init({**CONFIG, "microbatches": 1, "sdp_gradient_clipping": 0, "sharded_data_parallel_degree": 2})
    module, alone = make(), make()
    for layer in module.model.layers:
        layer.compile(backend="aot_eager")
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)

    @smp.step
    def step(model, tokens):
        loss = _loss(torch, model, tokens)
        model.backward(loss)
        return loss

    for number in range(3):
        losses = [_loss(torch, alone, _tokens(torch, number, replica)) for replica in range(2)]
        reference.zero_grad()
        torch.stack(losses).mean().backward()
        reference.step()
        optimizer.zero_grad()
        found = step(model, _tokens(torch, number, smp.dp_rank())).reduce_mean()
        optimizer.step()
        assert abs(found - losses[smp.dp_rank()]) < 1e-5, (number, found, losses)
    assert not any(counters["graph_break"].values()), counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def test_compiled_layers_are_compiled_once():
    assert run_ranks(_compiled_body, 2, 12, launcher=Forked("transformers"), timeout=110) == [1, 1]
