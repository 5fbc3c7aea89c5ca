"""Hugging Face's models with defaults untouched, on partitions beside one process, none of their calls leaving the pipeline: a part of
the table that `tests/parity/huggingface_models.py` runs as a whole."""

from __future__ import annotations

import pytest

from support import Forked, run_ranks

STRICT = {"SMD_STRICT_PIPELINE": "1"}
#: Caches, grouped-query attention, tied weights, sliding windows, experts, encoders, sound, losses of mixed types.
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
        _families_body, 2, FAMILIES, "float64", 2, launcher=Forked("torch"), env=STRICT, timeout=290
    ):
        _check(found, 1e-10, 2)


@pytest.mark.timeout(200)
def test_grouped_products_of_experts():
    pytest.importorskip("transformers")
    names = ["mixtral", "gpt-oss"]
    for found in run_ranks(_families_body, 3, names, "float32", 3, launcher=Forked("torch"), env=STRICT, timeout=190):
        _check(found, 1e-5, 3)


def _options_body():
    import torch
    from torch import nn

    from support import huggingface
    from support.huggingface_steps import run_model

    torch.set_default_dtype(torch.float64)

    class Captured(nn.Module):
        """Hidden states and attentions are in the loss."""

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
    for found in run_ranks(_options_body, 2, launcher=Forked("torch"), env=STRICT, timeout=190):
        assert [row["difference"] <= 1e-10 for row in found] == [True] * 3, found
