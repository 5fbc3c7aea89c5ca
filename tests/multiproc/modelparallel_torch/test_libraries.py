"""Models of timm and adapters of PEFT, with default options, on partitions compared with one process."""

from __future__ import annotations

import pytest

from support import Forked, run_ranks

STRICT = {"SMD_STRICT_PIPELINE": "1"}
#: Small sizes of some architectures. Dropout of paths is off, because partitions draw their own random numbers.
TIMM = {
    "vit_tiny_patch16_224": {"img_size": 32, "embed_dim": 32, "depth": 4, "num_heads": 4, "patch_size": 8},
    "swinv2_tiny_window8_256": {
        "img_size": 32,
        "patch_size": 2,
        "window_size": 4,
        "embed_dim": 16,
        "depths": (2, 2),
        "num_heads": (2, 4),
    },
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)},
    # This model writes in place to the output of a module without parameters.
    "mobilenetv3_small_050": {},
}
#: Arguments of PEFT's configurations by name.
PEFT = {
    "LoraConfig": {"r": 4, "target_modules": "all-linear", "init_lora_weights": False},
    "IA3Config": {
        "target_modules": ["k_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
        "init_ia3_weights": False,
    },
    # The layers of VeRA share one module object.
    "VeraConfig": {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_weights": False},
    "PromptTuningConfig": {"num_virtual_tokens": 4},
}


def _timm_body(partitions):
    import timm
    import torch
    from torch import nn

    from support.huggingface_steps import run_model

    torch.set_default_dtype(torch.float64)

    class Classifier(nn.Module):
        def __init__(self, name, options):
            super().__init__()
            self.inner = timm.create_model(name, num_classes=5, drop_path_rate=0.0, **options)

        def forward(self, pixels, labels):
            logits = self.inner(pixels)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def run(name, options):
        torch.manual_seed(7)
        model = Classifier(name, options).double().train()
        size = options.get("img_size", 64)

        def batch(step):
            generator = torch.Generator().manual_seed(step)
            pixels = torch.randn(8, 3, size, size, generator=generator)
            return {"pixels": pixels, "labels": torch.randint(0, 5, (8,), generator=generator)}

        return run_model(model, batch, "interleaved", partitions, skip_tracing=True)

    return {name: run(name, options) for name, options in TIMM.items()}


@pytest.mark.timeout(300)
def test_models_of_timm():
    pytest.importorskip("timm")
    for found in run_ranks(_timm_body, 2, 2, launcher=Forked("torch"), env=STRICT, timeout=290):
        for name, row in found.items():
            assert row["difference"] <= 1e-10, (name, row)
            assert row["partitions"] == [0, 1], (name, row)


def _peft_body(partitions):
    import peft
    import torch

    from support import huggingface
    from support.huggingface_steps import run_model

    torch.set_default_dtype(torch.float64)

    def run(name, options):
        torch.manual_seed(7)
        config = getattr(peft, name)(task_type="CAUSAL_LM", **options)
        model = peft.get_peft_model(huggingface.make("llama"), config).double().train()
        frozen = {path: each.clone() for path, each in model.named_parameters() if not each.requires_grad}
        row = run_model(
            model, lambda step: huggingface.batch("llama", step), "interleaved", partitions, skip_tracing=True
        )
        here = dict(model.named_parameters())
        # Parameters of the other partition have no values on this rank.
        kept = [path for path in frozen if type(here[path]) is torch.nn.Parameter]
        row["is frozen"] = bool(kept) and all(torch.equal(here[path], frozen[path]) for path in kept)
        return row

    return {name: run(name, options) for name, options in PEFT.items()}


@pytest.mark.timeout(300)
def test_adapters_of_peft_are_trained_alone():
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    for found in run_ranks(_peft_body, 2, 2, launcher=Forked("torch"), env=STRICT, timeout=290):
        for name, row in found.items():
            assert row["difference"] <= 1e-10, (name, row)
            assert row["is frozen"], name
