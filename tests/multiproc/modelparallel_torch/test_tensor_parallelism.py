"""Distributed modules beside one process: losses, outputs, gradients, norms and parameters."""

from __future__ import annotations

import pytest

from support import Forked, more, run_ranks

LAYOUTS = [(2, 1, 1), more((4, 1, 1)), more((2, 2, 1)), (2, 1, 2)]


def _check_models(names, layout, variants):
    from support.smp.models import models
    from support.tensor_parallel import compare

    for name in names:
        for prescaled, optimize in variants:
            try:
                compare(*models()[name], *layout, prescaled, optimize)
            except BaseException as error:
                raise AssertionError(f"{name}, {layout}, prescaled {prescaled}, {optimize}") from error


VARIANTS = [(prescaled, optimize) for prescaled in (False, True) for optimize in ("speed", "memory")]
#: In all layouts, and in one of them.
NAMES = ["ends", "gpt", "llama", "bert"]
OTHERS = ["mqa", "gptj", "alibi", "output", "layer", "stack"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "x".join(map(str, layout)))
def test_equal_to_one_process(layout):
    ranks = layout[0] * layout[1] * layout[2]
    run_ranks(_check_models, ranks, NAMES, layout, VARIANTS, launcher=Forked("torch"), timeout=290)


@pytest.mark.timeout(300)
def test_other_parts_are_equal_to_one_process():
    run_ranks(_check_models, 2, OTHERS, (2, 1, 1), VARIANTS, launcher=Forked("torch"), timeout=290)
