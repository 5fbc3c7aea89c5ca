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


def _check_compiled_architectures(names):
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.smp.models import models
    from support.tensor_parallel import compare

    for name in names:
        make, run, batch = models()[name][:3]

        def compiled(make=make):
            model = make()
            if smp.tp_size() > 1:
                for layer in model.transformer.seq_layers:
                    # Raises if a compiler cannot take a layer as a whole.
                    layer.compile(backend="aot_eager", fullgraph=True)
            return model

        for optimize in ("speed", "memory"):
            # The number of graphs for one function is limited.
            torch.compiler.reset()
            compare(compiled, run, batch, 2, 1, 1, True, optimize)


def test_compiled_layers_of_several_architectures_are_equal_to_one_process():
    names = ["llama", "mqa", "gptj", "bert", "alibi"]
    run_ranks(_check_compiled_architectures, 2, names, launcher=Forked("torch"), timeout=110)


def _check_products(optimize):
    import torch
    from torch.nn import functional

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.nn import layout, products

    smp.init({"tensor_parallel_degree": 3, "ddp": True, "prescaled_batch": True, "optimize": optimize})
    batch, length, width = 2, 5, 8

    def plain_columns(hidden, *slices):
        tokens = layout.enter_product(hidden, batch, length)
        return [functional.linear(tokens, *each) for each in slices]

    def our_columns(hidden, *slices):
        return products.column_products(hidden, batch, length, slices)

    def plain_row(input, weight):
        return [layout.leave_product(functional.linear(input, weight))]

    def our_row(input, weight):
        return [products.row_product(input, weight)]

    def run(function, leaves, has_autocast):
        leaves = [each.detach().clone().requires_grad_(each.requires_grad) for each in leaves]
        arguments = leaves if len(leaves) == 2 else [leaves[0], (leaves[1], leaves[2]), (leaves[3], None)]
        with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
            outputs = function(*arguments)
        sum(each.float().square().sum() for each in outputs).backward()
        return [each.grad for each in leaves] + outputs

    for dtype, has_autocast in ((torch.float64, False), (torch.float32, True)):
        torch.manual_seed(5)
        # Ten tokens over three ranks: the last rank's share is padded.
        shape = (4, width) if optimize == "memory" else (batch, length, width)
        columns = [torch.randn(*sizes, dtype=dtype) for sizes in (shape, (6, width), (6,), (4, width))]
        # With fewer features than the input has, gradients are multiplied as one matrix.
        narrow = [torch.randn(*sizes, dtype=dtype) for sizes in (shape, (2, width), (2,), (1, width))]
        row = [torch.randn(*sizes, dtype=dtype) for sizes in ((batch, length, 4), (width, 4))]
        for leaves, plain, ours in (
            (columns, plain_columns, our_columns), (narrow, plain_columns, our_columns), (row, plain_row, our_row)
        ):  # fmt: skip
            for frozen in (None, 0, 1):
                for at, each in enumerate(leaves):
                    each.requires_grad_(at != frozen)
                expected, found = run(plain, leaves, has_autocast), run(ours, leaves, has_autocast)
                for one, other in zip(expected, found, strict=True):
                    assert (one is None) == (other is None)
                    if one is not None:
                        assert one.dtype == other.dtype
                        assert one.shape == other.shape
                        error = (other - one).abs().max() / one.abs().max()
                        assert error < (2e-2 if has_autocast else 1e-12), (ours.__name__, dtype, frozen, error)


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_products_that_run_beside_collectives_are_plain_products(optimize):
    run_ranks(_check_products, 3, optimize, launcher=Forked("torch"))
