"""Hugging Face's models with default options on partitions, compared with one process.

With `SMD_STRICT_PIPELINE` a call that the pipeline cannot run is an error. This is a sample of the cases that
`tests/parity/huggingface_models.py` runs.
"""

from __future__ import annotations

import pytest

from support import Forked, run_ranks

STRICT = {"SMD_STRICT_PIPELINE": "1"}
#: Caches, grouped-query attention, tied weights, sliding windows, experts, encoders, audio, losses of mixed dtypes.
FAMILIES = [
    "llama",
    "llama-tied",
    "mistral",
    "gemma2",
    "mixtral",
    "qwen2-moe",
    "deepseek-v3",
    "bert",
    "electra",
    "wav2vec2",
]


def _families_body(names, dtype, partitions):
    from support.huggingface_steps import run_rows

    return {name: run_rows(name, dtype, partitions, ["interleaved"], steps=1) for name in names}


def _check(found, tolerance, partitions):
    for name, rows in found.items():
        for row in rows:
            assert row["difference"] <= tolerance, (name, row)
            assert row["partitions"] == list(range(partitions)), (name, row)


@pytest.mark.timeout(300)
def test_families_equal_one_process_and_stay_in_the_pipeline():
    pytest.importorskip("transformers")
    for found in run_ranks(
        _families_body, 2, FAMILIES, "float64", 2, launcher=Forked("transformers"), env=STRICT, timeout=290
    ):
        _check(found, 1e-10, 2)


@pytest.mark.timeout(200)
def test_grouped_products_of_experts():
    pytest.importorskip("transformers")
    names = ["mixtral", "gpt-oss"]
    for found in run_ranks(
        _families_body, 3, names, "float32", 3, launcher=Forked("transformers"), env=STRICT, timeout=190
    ):
        _check(found, 1e-5, 3)


def _unwritten_body():
    import torch

    # In this mode torch fills uninitialized memory with NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    return _families_body(["longformer"], "float64", 2)


@pytest.mark.timeout(200)
def test_results_do_not_depend_on_uninitialized_memory():
    pytest.importorskip("transformers")
    for found in run_ranks(_unwritten_body, 2, launcher=Forked("transformers"), env=STRICT, timeout=190):
        _check(found, 1e-10, 2)


def _options_body():
    import torch
    from torch import nn

    from support import huggingface
    from support.huggingface_steps import run_model

    torch.set_default_dtype(torch.float64)

    class Captured(nn.Module):
        """A model whose loss depends on hidden states and attentions."""

        def __init__(self):
            super().__init__()
            self.inner = huggingface.make("llama")
            self.inner.set_attn_implementation("eager")

        def forward(self, **arguments):
            outputs = self.inner(output_hidden_states=True, output_attentions=True, **arguments)
            features = (*outputs.hidden_states, *outputs.attentions)
            return {"loss": outputs.loss + sum(each.square().mean() for each in features), "logits": outputs.logits}

    def steps(model):
        return run_model(model, lambda step: huggingface.batch("llama", step), "interleaved", 2)

    # Each process draws its own default seed, and all ranks have to make the same parameters.
    torch.manual_seed(7)
    found = [steps(Captured())]
    for reentrant in (False, True):
        torch.manual_seed(7)
        model = huggingface.make("llama")
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found.append(steps(model))
    return found


@pytest.mark.timeout(200)
def test_hidden_states_attentions_and_gradient_checkpointing():
    pytest.importorskip("transformers")
    for found in run_ranks(_options_body, 2, launcher=Forked("transformers"), env=STRICT, timeout=190):
        assert [row["difference"] <= 1e-10 for row in found] == [True] * 3, found


def _cache_body():
    import warnings

    import torch

    import smdistributed.modelparallel.torch as smp
    from support import huggingface
    from support.huggingface_steps import run_model

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)

    class Cached(torch.nn.Module):
        """A model that asks for a cache, on which its loss depends."""

        def __init__(self):
            super().__init__()
            self.inner = huggingface.make("llama")

        def forward(self, **arguments):
            outputs = self.inner(use_cache=True, **arguments)
            keys = [layer.keys for layer in outputs.past_key_values.layers]
            return {"loss": outputs.loss + sum(key.square().mean() for key in keys), "logits": outputs.logits}

    asked = run_model(Cached(), lambda step: huggingface.batch("llama", step), "interleaved", 2)
    smp.shutdown()
    smp.init({"partitions": 2, "microbatches": 2})
    model = smp.DistributedModel(huggingface.make("llama"))
    caches = []

    @smp.step
    def step(model, **batch):
        output = model(**batch)
        caches.append(output.past_key_values)
        model.backward(output.loss)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            step(model, **huggingface.batch("llama", number))
    containers = [bool(call.task.has_containers) for calls in model.pipeline.calls.values() for call in calls]
    return asked, caches, containers, [str(each.message) for each in caught if "cache of keys" in str(each.message)]


@pytest.mark.timeout(150)
def test_a_model_that_trains_makes_a_cache_only_if_it_is_asked_for():
    pytest.importorskip("transformers")
    for asked, caches, containers, warned in run_ranks(
        _cache_body, 2, launcher=Forked("transformers"), env=STRICT, timeout=140
    ):
        assert asked["difference"] <= 1e-10
        assert caches == [None] * 4
        assert containers
        assert not any(containers)
        assert len(warned) == 1


def _dropout_body(probability):
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.inner(x).chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=probability)

    smp.init({"partitions": 2, "microbatches": 2})
    model = smp.DistributedModel(nn.Sequential(Attention(), Attention()))

    @smp.step
    def step(model, x):
        model.backward(model(x).sum())

    step(model, torch.randn(4, 5, 8))
    return [sorted(call.task.output_spec.draws) for calls in model.pipeline.calls.values() for call in calls][:2]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("probability", "draws"), [(0.0, []), (0.5, ["cpu"])])
def test_attention_draws_random_numbers_only_with_dropout(probability, draws):
    for found in run_ranks(_dropout_body, 2, probability, launcher=Forked("transformers"), timeout=110):
        assert found == [draws, draws]
