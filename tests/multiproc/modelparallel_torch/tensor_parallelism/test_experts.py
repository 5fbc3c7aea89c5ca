"""Mixtral under tensor parallelism, compared with Hugging Face's model in one process."""

from __future__ import annotations

import itertools
import math
import pathlib
import tempfile

import pytest

from support import Forked, run_ranks

pytestmark = pytest.mark.timeout(200)

#: Factor of the auxiliary loss that balances the experts.
FACTOR = 0.3


def _make(seed=None, **more):
    import torch
    import transformers

    from support.exact_models import exact

    sizes = {
        "vocab_size": 53, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
        "num_key_value_heads": 2, "max_position_embeddings": 12, "num_local_experts": 5, "num_experts_per_tok": 2,
        "output_router_logits": True, "router_aux_loss_coef": FACTOR, "sliding_window": 3, "use_cache": False,
    }  # fmt: skip
    config = transformers.MixtralConfig(**sizes | more)
    if hasattr(config, "rope_parameters"):
        config._experts_implementation = "eager"
    if seed is not None:
        torch.manual_seed(seed)
    return exact(transformers.MixtralForCausalLM(config))


def _run(model, ids):
    import torch

    mask = (ids % 11 != 0).long().index_fill_(1, torch.tensor([0]), 1)
    output = model(input_ids=ids, attention_mask=mask)
    losses = torch.nn.functional.cross_entropy(output.logits.transpose(1, 2), ids, reduction="none")
    assert len(output.router_logits) == 2
    # Outputs at padding differ between the implementations, so the mask removes them from the loss.
    return (losses * mask).mean() + FACTOR * output.aux_loss, torch.cat(output.router_logits, -1)


def _check(layout, modes):
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import compare, tokens

    torch.set_default_dtype(torch.float64)

    def make():
        with smp.tensor_parallelism():
            return _make()

    for prescaled, optimize in modes:
        print(prescaled, optimize)
        compare(
            make, _run, lambda step, replica: (tokens(step, replica),), *layout, prescaled, optimize, steps=5,
            names=smp.nn.huggingface.mixtral.translate_state_dict_to_hf_mixtral, together=True,
        )  # fmt: skip


MODES = list(itertools.product((False, True), ("memory", "speed")))


@pytest.mark.parametrize("modes", [[MODES[0]], pytest.param(MODES[1:], marks=pytest.mark.more)])
@pytest.mark.parametrize("layout", [(2, 1, 1), (2, 2, 1), pytest.param((2, 1, 2), marks=pytest.mark.more)], ids=str)
def test_mixtral_trains_as_one_process(layout, modes):
    pytest.importorskip("transformers")
    run_ranks(_check, math.prod(layout), layout, modes, launcher=Forked("transformers"), timeout=190)


def _check_states():
    import safetensors.torch
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import config

    torch.set_default_dtype(torch.float64)
    module = smp.nn.huggingface.mixtral
    smp.init(config(2, 1, False, "memory"))
    alone = _make(seed=1)
    with smp.tensor_parallelism():
        whole = _make(seed=1 + smp.rank())
    model = smp.DistributedModel(whole)
    experts = model.module.transformer.seq_layers[0].output.experts
    assert [tuple(each.shape) for each in experts.parameters()] == [(5, 12, 16), (5, 12, 16), (5, 16, 12)]
    weights, own = alone.state_dict(), model.state_dict()
    theirs = module.translate_state_dict_to_hf_mixtral(own)
    assert theirs.keys() == weights.keys(), theirs.keys() ^ weights.keys()
    assert all(torch.equal(theirs[key], each) for key, each in weights.items())
    # Files have the names of transformers 4, with the weights of each expert.
    with tempfile.TemporaryDirectory() as folder:
        alone.save_pretrained(folder)
        files = [safetensors.torch.load_file(each) for each in pathlib.Path(folder).glob("*.safetensors")]
    saved = smp.allgather(files, smp.WORLD)[0][0]
    assert "model.layers.1.block_sparse_moe.experts.4.w3.weight" in saved
    divided = module.translate_state_dict_to_hf_mixtral(own, joins_experts=False)
    assert divided.keys() == saved.keys(), divided.keys() ^ saved.keys()
    assert all(torch.equal(divided[key], each) for key, each in saved.items())
    for state in (theirs, saved):
        back = module.translate_hf_state_dict_to_smdistributed_mixtral(state)
        assert back.keys() == own.keys(), back.keys() ^ own.keys()
        assert all(torch.equal(back[key], each) for key, each in own.items())
        for each in model.local_parameters():
            each.data.zero_()
        model.load_state_dict(state)
        assert all(torch.equal(own[key], each) for key, each in model.state_dict().items())
    with tempfile.TemporaryDirectory() as folder:
        folder = smp.allgather(folder, smp.WORLD)[0]
        smp.save_checkpoint(folder, "whole", partial=False, model=model)
        assert torch.load(f"{folder}/whole").keys() == weights.keys()
        for each in model.local_parameters():
            each.data.zero_()
        assert smp.resume_from_checkpoint(folder, "whole", partial=False) == {}
        smp.barrier()
    assert all(torch.equal(own[key], each) for key, each in model.state_dict().items())
    smp.shutdown()


def test_states_of_mixtral_are_translated():
    pytest.importorskip("transformers", minversion="5")
    run_ranks(_check_states, 2, launcher=Forked("transformers"), timeout=100)


def _check_jitter():
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import config, tokens

    for optimize in ("memory", "speed"):
        smp.init(config(2, 1, True, optimize))
        with smp.tensor_parallelism():
            whole = _make(router_jitter_noise=0.2, attention_dropout=0.2)
        model = smp.DistributedModel(whole)

        @smp.step
        def step(model, ids):
            output = model(input_ids=ids)
            model.backward(output.logits.square().mean())
            return output.logits

        logits = [step(model, tokens(0, 0)).concat() for _ in range(2)]
        for each in logits:
            assert torch.equal(*smp.allgather(each, smp.TP_GROUP))
        assert not torch.allclose(*logits)
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(input_ids=tokens(0, 0)).logits, model(input_ids=tokens(0, 0)).logits)
        smp.shutdown()


def test_ranks_draw_the_same_jitter():
    pytest.importorskip("transformers")
    run_ranks(_check_jitter, 2, launcher=Forked("transformers"), timeout=100)


def _check_created():
    import torch
    import transformers

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import config, tokens

    smp.init(config(2, 2, False, "memory"))
    torch.manual_seed(smp.rank())
    with smp.model_creation(tensor_parallelism=True, dtype=torch.float32):
        whole = transformers.AutoModelForCausalLM.from_config(_make().config)
    assert all(each.is_meta for each in whole.parameters())
    model = smp.DistributedModel(whole)

    @smp.step
    def step(model, ids):
        output = model(input_ids=ids, labels=ids)
        model.backward(output.loss)
        return output.loss, output.aux_loss

    loss, balancing = (each.reduce_mean().item() for each in step(model, tokens(0, smp.dp_rank())))
    # Each token selects two experts; with balanced experts the auxiliary loss is about 2.
    assert 1.9 < balancing < 2.5
    assert 3.5 + FACTOR * balancing < loss < 4.5 + FACTOR * balancing
    state = model.state_dict()
    for name in ("router.weight", "experts.gate", "experts.dense2"):
        assert 0.014 < state[f"transformer.seq_layers.0.output.{name}"].std().item() < 0.026
    smp.shutdown()


def test_mixtral_is_created_in_slices():
    pytest.importorskip("transformers")
    run_ranks(_check_created, 4, launcher=Forked("transformers"), timeout=100)


def _check_grouped():
    import warnings
    from unittest import mock

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.nn import experts as module

    smp.init({"tensor_parallel_degree": 2, "ddp": True})

    def run(experts, inputs):
        tokens, weights = (each.clone().requires_grad_() for each in inputs[:2])
        experts.zero_grad()
        output = experts(tokens, weights, inputs[2])
        output.float().square().sum().backward()
        return [output, tokens.grad, weights.grad, *(each.grad for each in experts.parameters())]

    for dtype, has_autocast in ((torch.bfloat16, False), (torch.float32, True)):
        torch.manual_seed(5)
        experts = module.Experts(4, 16, 48, "silu", 0.5, True).to(dtype)
        # No token uses the third expert.
        chosen = torch.tensor([[0, 3], [1, 0], [3, 1], [0, 1], [1, 3]])
        inputs = torch.randn(5, 16, dtype=dtype), torch.rand(5, 2), chosen
        with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast), warnings.catch_warnings():
            warnings.simplefilter("error")
            found = run(experts, inputs)
            with mock.patch.object(module, "_can_be_grouped", return_value=False):
                expected = run(experts, inputs)
            # A read of the counts would break the graph.
            compiled = found if has_autocast else run(torch.compile(experts, backend="eager", fullgraph=True), inputs)
        for one, other, third in zip(found, expected, compiled, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * other.abs().max().item())
            torch.testing.assert_close(third, one, rtol=0.0, atol=0.0)
        assert not found[3][2].any()
    # Fake tensors have no values, so an operation whose result the host reads raises.
    experts.to(torch.bfloat16)
    with FakeTensorMode() as mode:
        parameters = {name: mode.from_tensor(each) for name, each in experts.named_parameters()}
        values = torch.randn(5, 16, dtype=torch.bfloat16), torch.rand(5, 2), torch.zeros(5, 2, dtype=torch.long)
        assert torch.func.functional_call(experts, parameters, values).shape == (5, 16)
    narrow = module.Experts(4, 16, 24, "silu", 0.5, True).bfloat16()
    with pytest.warns(UserWarning, match=r"one by one.* rows of \[12, 16\] and \[16, 12\]"):
        run(narrow, (torch.randn(5, 16).bfloat16(), torch.rand(5, 2), torch.zeros(5, 2, dtype=torch.long)))
    smp.shutdown()


def test_experts_are_multiplied_together_without_reading_counts():
    torch = pytest.importorskip("torch")
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this PyTorch has no torch.nn.functional.grouped_mm")
    run_ranks(_check_grouped, 2, launcher=Forked("torch"), timeout=100)


def _refused():
    import smdistributed.modelparallel.torch as smp

    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "attention_head_size": 4}
    texts = []
    for more in ({"num_experts": 4}, {"num_experts": 4, "gated": True, "mlp_bias": False, "experts_per_token": 5}):
        with pytest.raises(smp.exceptions.SMPValidationError) as caught:
            smp.nn.DistributedTransformerLayer(**sizes, options=smp.nn.BlockOptions(**more))
        texts.append(str(caught.value))
    smp.shutdown()
    return texts


def test_unsupported_experts_are_refused():
    for texts in run_ranks(_refused, 2, launcher=Forked("torch"), timeout=100):
        assert texts == [
            "`num_experts` needs `gated=True` and `mlp_bias=False`",
            "`experts_per_token` is 5: expected 1 to `num_experts` 4",
        ]
