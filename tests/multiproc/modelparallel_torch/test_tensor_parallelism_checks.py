"""Tensor parallelism: bad input, checkpoints of other degrees, dropout, recomputation, initial values, master
weights."""

from __future__ import annotations

import pytest

from support import Forked, run_ranks
from support.ranks import RanksFailedError


def _refused_body():
    import torch

    import smdistributed.modelparallel.torch as smp
    from smdistributed import _core

    smp.init({})
    rank = _core.rank()
    smp.shutdown()
    error = smp.exceptions.SMPConfigError
    with pytest.raises(error, match="`optimize` is 'speed' on rank 0 and 'memory' on rank 1"):
        smp.init({"tensor_parallel_degree": 2, "ddp": True, "optimize": ("speed", "memory")[rank]})
    with pytest.raises(ValueError, match=r"2 .*3"):
        smp.init({"tensor_parallel_degree": 3, "ddp": True})
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    assert torch.distributed.get_world_size(smp.get_tp_process_group()) == 2
    refused = smp.exceptions.SMPValidationError
    with pytest.raises(refused, match="`num_attention_heads` is 3: expected a multiple of `tensor_parallel_degree` 2"):
        smp.nn.DistributedAttentionLayer(3, 4, 12)
    with pytest.raises(refused, match="`intermediate_size` is 7"):
        smp.nn.DistributedTransformerOutputLayer(4, 7)
    with pytest.raises(refused, match="`in_features` of DistributedLinear is 5"):
        smp.nn.DistributedLinear(5, 4)
    with pytest.raises(refused, match="both False"):
        smp.nn.DistributedTransformerLayer(2, 2, 4, 4, pre_layernorm=False, post_layernorm=False)
    linear = smp.nn.DistributedLinear(4, 2)
    with pytest.raises(smp.exceptions.SMPMismatchError, match=r"rank 0 .* rank 1"):
        linear(torch.zeros(2 + rank, 4))
    with smp.tensor_parallelism():
        network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    with pytest.warns(UserWarning, match="`in_features` of DistributedLinear is 3"):
        model = smp.DistributedModel(network)
    assert [type(each).__name__ for each in model.module] == ["DistributedLinear", "DistributedLinear", "Linear"]
    unsupported = smp.exceptions.SMPUnsupportedError
    with pytest.raises(unsupported, match=r"`join\(\)` with `tensor_parallel_degree` 2"):
        model.join()
    with pytest.raises(unsupported, match="`register_comm_hook"):
        model.register_comm_hook(None, print)

    # A class of the same name, as transformers defines one.
    class Adafactor(torch.optim.SGD):
        pass

    for kind in (Adafactor, torch.optim.Adafactor):
        with pytest.raises(unsupported, match="`Adafactor` updates a parameter as a whole"):
            smp.DistributedOptimizer(kind(model.parameters(), lr=0.1))
    assert smp.state.optimizer is None
    smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    return model.is_distributed_parameter(model.module[0].weight), model.is_distributed_parameter(
        model.module[2].weight
    )


@pytest.mark.timeout(100)
def test_bad_input_is_refused_with_the_values_on_every_rank():
    assert run_ranks(_refused_body, 2, launcher=Forked("torch"), timeout=90) == [(True, False)] * 2


def _make(dropout=0.0):
    import smdistributed.modelparallel.torch as smp

    return smp.nn.DistributedTransformerLMHead(
        num_layers=2, num_attention_heads=4, attention_head_size=4, hidden_size=16, intermediate_size=24, vocab_size=53,
        num_positions=8, attention_dropout_prob=dropout, hidden_dropout_prob=dropout, causal_mask_size=8,
        pre_layernorm=True, post_layernorm=False,
    )  # fmt: skip


def _trained(settings, seed, steps=1, before=None, dropout=0.0, recompute=False):
    """Returns a model and its optimizer after `steps` steps with the same batches on all ranks."""
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import tokens

    smp.init(settings)
    torch.manual_seed(seed)
    model = smp.DistributedModel(_make(dropout))
    if recompute:
        for layer in model.module.transformer.seq_layers:
            smp.set_activation_checkpointing(layer)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 1e-2))

    @smp.step
    def step(model, ids):
        loss, _ = model((ids, None, None, None, ids))
        model.backward(loss)
        return loss

    if before is not None:
        before(model, optimizer)
    for number in range(steps):
        optimizer.zero_grad()
        step(model, tokens(number, 0))
        optimizer.step()
    return model, optimizer


def _layout(tp, pp, **more):
    return {"tensor_parallel_degree": tp, "partitions": pp, "ddp": True, "optimize": "memory", **more}


def _checkpoints_body(folder):
    import copy

    import torch

    import smdistributed.modelparallel.torch as smp

    torch.set_default_dtype(torch.float64)
    model, optimizer = _trained(_layout(2, 2), 0, steps=2)
    smp.save_checkpoint(folder, "partial", model=model, optimizer=optimizer, user_content={"step": 2})
    smp.save_checkpoint(folder, "full", partial=False, model=model)
    smp.save_checkpoint(folder, "sharded", model=model, optimizer=optimizer, user_content={"step": 2}, format="sharded")
    weights, states = model.state_dict(), optimizer.state_dict()
    smp.shutdown()
    found = {}
    for tp, pp in ((2, 2), (4, 1), (1, 4), (1, 1), (2, 1)):
        for tag in ("partial", "full", "sharded"):

            def resume(model, optimizer, tag=tag):
                content = smp.resume_from_checkpoint(folder, tag, partial=tag == "partial")
                assert content == ({} if tag == "full" else {"step": 2})

            def loaded(model, optimizer, tag=tag):
                found["weights"] = {name: each.clone() for name, each in model.state_dict().items()}
                found["states"] = copy.deepcopy(optimizer.state_dict())

            def before(model, optimizer):
                resume(model, optimizer)
                if model.is_partitioned:
                    loaded(model, optimizer)
                else:
                    model.register_post_partition_hook(loaded)

            model, optimizer = _trained(_layout(tp, pp), 5, before=before)
            assert all(torch.equal(found["weights"][name], weight) for name, weight in weights.items()), (tp, pp, tag)
            if tag != "full":
                assert found["states"]["state"].keys() == states["state"].keys()
                for name, state in states["state"].items():
                    for key, value in state.items():
                        assert torch.equal(torch.as_tensor(found["states"]["state"][name][key]), torch.as_tensor(value))
            smp.shutdown()
    # `load_state_dict` with whole states, and with a state that does not fit.
    model, optimizer = _trained(_layout(4, 1), 7)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    assert all(torch.equal(each, weights[name]) for name, each in model.state_dict().items())
    wrong = {**weights, "embeddings.position_embedding.weight": torch.zeros(9, 16)}
    with pytest.raises(smp.exceptions.SMPCheckpointError, match=r"shape \[9, 16\] in the state and \[8, 16\]"):
        model.load_state_dict(wrong)


@pytest.mark.more
@pytest.mark.timeout(200)
def test_checkpoints_load_at_other_degrees(tmp_path):
    run_ranks(_checkpoints_body, 4, str(tmp_path), launcher=Forked("torch"), timeout=190)


def _check_dropout():
    import torch

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.nn.module import shards

    torch.set_default_dtype(torch.float64)
    for optimize in ("speed", "memory"):
        ends = []
        for recompute in (False, True):
            settings = _layout(2, 1, optimize=optimize)
            model, _ = _trained(settings, 0, steps=3, dropout=0.3, recompute=recompute)
            # Parameters that are not sliced stay equal on all ranks.
            divided = shards(model.module)
            for name, parameter in model.local_named_parameters():
                if id(parameter) not in divided:
                    others = smp.allgather(parameter.detach(), smp.TP_GROUP)
                    assert all(torch.equal(others[0], other) for other in others), name
            ends.append(model.state_dict())
            smp.shutdown()
        for name, first in ends[0].items():
            assert torch.allclose(first, ends[1][name], rtol=1e-12, atol=1e-14), name


@pytest.mark.timeout(100)
def test_dropout_and_recomputation():
    run_ranks(_check_dropout, 2, launcher=Forked("torch"), timeout=90)


def _check_seeds():
    import torch

    import smdistributed.modelparallel.torch as smp

    torch.set_default_dtype(torch.float64)
    smp.init({})
    torch.manual_seed(3)
    whole = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Embedding(5, 4)).state_dict()
    smp.shutdown()
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    # The seeds differ between ranks. Weights are slices of those that the group's first rank draws.
    torch.manual_seed(3 + 10 * smp.rank())
    with smp.model_creation(), smp.tensor_parallelism():
        delayed = torch.nn.Sequential(torch.nn.Linear(8, 6))
    del delayed
    torch.manual_seed(3 + 10 * smp.rank())
    with smp.tensor_parallelism():
        network = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Embedding(5, 4))
    model = smp.DistributedModel(network)
    assert all(torch.equal(each, whole[name]) for name, each in model.state_dict().items())
    smp.shutdown()
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    torch.manual_seed(3)
    with smp.model_creation(tensor_parallelism=True, dtype=torch.float32):
        network = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 2))
    assert network[0].weight.is_meta
    model = smp.DistributedModel(network)
    assert [each.dtype for each in model.parameters()] == [torch.float32] * 4
    assert model.module[0].weight.shape == (6, 4)
    assert not torch.equal(*smp.allgather(model.module[0].weight.detach(), smp.TP_GROUP))
    smp.shutdown()
    # If the root module itself is replaced, the original module gets the parameters of its replacement, because scripts
    # pass them to optimizers.
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    with smp.tensor_parallelism():
        linear = torch.nn.Linear(8, 6)
    model = smp.DistributedModel(linear)
    assert model.module is not linear
    assert [id(each) for each in linear.parameters()] == [id(each) for each in model.module.parameters()]


@pytest.mark.timeout(100)
def test_initial_values_are_slices_of_one_whole():
    run_ranks(_check_seeds, 2, launcher=Forked("torch"), timeout=90)


def _precision_body():
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import tokens

    ends = {}
    for key in ("bf16", "fp16", None):
        smp.init(_layout(2, 1, **({} if key is None else {key: True})))
        torch.manual_seed(0)
        model = smp.DistributedModel(_make())
        optimizer = smp.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), 1e-2), dynamic_loss_scale=key == "fp16"
        )

        @smp.step
        def step(model, ids):
            loss, _ = model((ids, None, None, None, ids))
            model.backward(loss)
            return loss

        losses = []
        for _ in range(20):
            losses.append(step(model, tokens(0, smp.dp_rank())).reduce_mean().item())
            smp.clip_grad_norm_(model.local_parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        weights = model.state_dict()
        ends[key] = losses
        for name, parameter in model.local_named_parameters():
            if not model.is_distributed_parameter(parameter):
                first, second = smp.allgather(parameter.detach(), smp.TP_GROUP)
                assert torch.equal(first, second), (key, name)
        if key is not None:
            # Master weights of slices are concatenated like the slices.
            whole = optimizer.state_dict()["master_weights"]
            for name, master in whole.items():
                assert torch.equal(master.to(weights[name].dtype), weights[name]), (key, name)
        smp.shutdown()
    return ends


@pytest.mark.timeout(150)
def test_master_weights_of_slices():
    for ends in run_ranks(_precision_body, 2, launcher=Forked("torch"), timeout=140):
        assert ends[None][-1] < ends[None][0] - 1
        for key in ("bf16", "fp16"):
            assert ends[key][-1] < ends[key][0] - 0.5, (key, ends)


def _killed_body():
    import os
    import signal

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import tokens

    smp.init(_layout(2, 1))
    model = smp.DistributedModel(_make())

    def die(module, inputs):
        os.kill(os.getpid(), signal.SIGKILL)

    if smp.rank() == 1:
        model.module.transformer.seq_layers[1].register_forward_pre_hook(die)
    smp.step(lambda model, ids: model.backward(model((ids, None, None, None, ids))[0]))(model, tokens(0, 0))


@pytest.mark.timeout(100)
def test_a_rank_that_dies_in_a_step_is_named():
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(_killed_body, 2, launcher=Forked("torch"), timeout=60)
    assert not failed.value.outcome.timed_out
    survivor = failed.value.outcome.ranks[0]
    assert "SMPPeerFailedError" in survivor.error
    assert "rank 1" in survivor.error
