"""Distributed modules compared with one process: losses, outputs, gradients, norms and parameters."""

from __future__ import annotations

import pytest

from support import Forked, more, run_ranks

LAYOUTS = [(2, 1, 1), more((4, 1, 1)), more((2, 2, 1)), (2, 1, 2)]


def _check_models(names, layout, variants, **more):
    from support.smp.models import models
    from support.tensor_parallel import compare

    for name in names:
        for prescaled, optimize in variants:
            try:
                compare(*models()[name][:3], *layout, prescaled, optimize, **more)
            except BaseException as error:
                raise AssertionError(f"{name}, {layout}, prescaled {prescaled}, {optimize}") from error


VARIANTS = [(prescaled, optimize) for prescaled in (False, True) for optimize in ("speed", "memory")]
#: NAMES are tested in all layouts, OTHERS in one.
NAMES = ["ends", "gpt", "llama", "bert"]
OTHERS = ["mqa", "gptj", "alibi", "output", "layer", "stack", "flash", "attention", "cross", "experts"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "x".join(map(str, layout)))
def test_equal_to_one_process(layout):
    ranks = layout[0] * layout[1] * layout[2]
    run_ranks(_check_models, ranks, NAMES, layout, VARIANTS, launcher=Forked("torch"), timeout=290)


@pytest.mark.timeout(300)
def test_other_parts_are_equal_to_one_process():
    run_ranks(_check_models, 2, OTHERS, (2, 1, 1), VARIANTS, launcher=Forked("torch"), timeout=290)


def _check_recomputed():
    _check_models(["gpt", "experts"], (2, 1, 1), [(False, "memory"), (True, "speed")], recompute=True)
    _check_models(
        ["llama", "flash"], (2, 1, 1), [(True, "memory")], recompute=True, more={"sharded_data_parallel_degree": 2}
    )


@pytest.mark.timeout(200)
def test_recomputed_blocks_are_equal_to_one_process():
    run_ranks(_check_recomputed, 2, launcher=Forked("torch"), timeout=190)


def _check_compiled_layers(layers):
    import torch
    from torch._dynamo.utils import counters

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import compare

    def make():
        model = smp.nn.DistributedTransformerLMHead(
            num_layers=layers, num_attention_heads=4, attention_head_size=4, hidden_size=16, intermediate_size=32,
            vocab_size=53, num_positions=6, attention_dropout_prob=0.0, hidden_dropout_prob=0.0, causal_mask_size=6,
            pre_layernorm=True, post_layernorm=False,
        )  # fmt: skip
        if smp.tp_size() > 1:
            for layer in model.transformer.seq_layers:
                layer.compile(backend="aot_eager")
        return model

    def run(model, tokens):
        logits = model((tokens,))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits

    def batch(step, replica):
        return (torch.randint(53, (2, 6), generator=torch.Generator().manual_seed(10 * step + replica)),)

    for optimize in ("speed", "memory"):
        counters.clear()
        compare(make, run, batch, 2, 1, 1, True, optimize)
        assert not any(counters["graph_break"].values()), counters["graph_break"]
        # All layers share one compiled graph.
        assert counters["stats"]["unique_graphs"] == 1, counters["stats"]


def test_compiled_layers_are_equal_to_one_process():
    run_ranks(_check_compiled_layers, 2, 10, launcher=Forked("torch"), timeout=110)


def _check_column_products(optimize):
    import torch

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.nn import layout
    from smdistributed.modelparallel.torch.nn.column_products import column_products

    smp.init({"tensor_parallel_degree": 3, "ddp": True, "prescaled_batch": True, "optimize": optimize})
    batch, length, width = 2, 5, 8

    def plain(hidden, batch, length, slices):
        tokens = layout.enter_product(hidden, batch, length)
        return [torch.nn.functional.linear(tokens, *each) for each in slices]

    for dtype, has_autocast in ((torch.float64, False), (torch.float32, True)):
        for is_frozen in (False, True):
            torch.manual_seed(5)
            # Ten tokens over three ranks: the last rank's share is padded.
            shape = (4, width) if optimize == "memory" else (batch, length, width)
            hidden = torch.randn(shape, dtype=dtype)
            weights = [torch.randn(rows, width, dtype=dtype) for rows in (6, 4)]
            results = []
            for products in (plain, column_products):
                inputs = [hidden.clone().requires_grad_(), *(each.clone().requires_grad_() for each in weights)]
                inputs[1].requires_grad_(not is_frozen)
                with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
                    outputs = products(inputs[0], batch, length, [(each, None) for each in inputs[1:]])
                sum(each.float().square().sum() for each in outputs).backward()
                results.append([each.grad for each in inputs] + outputs)
            for expected, found in zip(*results, strict=True):
                assert (expected is None) == (found is None)
                if expected is not None:
                    assert found.dtype == expected.dtype
                    error = (found - expected).abs().max() / expected.abs().max()
                    assert error < (2e-2 if has_autocast else 1e-12), (dtype, is_frozen, error)


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_column_products_are_plain_products(optimize):
    run_ranks(_check_column_products, 3, optimize, launcher=Forked("torch"))
