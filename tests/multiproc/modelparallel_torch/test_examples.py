"""The model-parallel examples learn, and a benchmark's model is distributed evenly over the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import Forked, more, run_ranks

ROOT = Path(__file__).resolve().parents[3]


def _examples_body(root):
    """Runs every pipeline example as a script, one after the other in the same processes."""
    import math
    import runpy
    import sys

    import smdistributed.modelparallel.torch as smp

    lines = [
        "digits --epochs 3",
        "digits --epochs 3 --manual --pipeline simple",
        "resnet18 --epochs 1 --steps 3 --width 8 --batch 32",
        "gpt --partitions 4 --pipeline zero_bubble --layers 4 --width 32 --length 32 --steps 20",
    ]
    found = []
    for line in lines:
        name, *words = line.split()
        script = f"{root}/examples/modelparallel_{name}.py"
        sys.argv = [script, *words]
        script_globals = runpy.run_path(script, run_name="__main__")
        found.append((float(script_globals["loss"]), int(script_globals.get("right", 0))))
        del script_globals
        smp.shutdown()
    assert all(math.isfinite(loss) for loss, _ in found), found
    return found


@pytest.mark.more
@pytest.mark.timeout(300)
def test_the_examples_run():
    pytest.importorskip("sklearn")
    found = run_ranks(_examples_body, 4, str(ROOT), launcher=Forked("torch"), timeout=290)
    # All ranks of a pipeline return the same loss.
    assert found[0] == found[1], found
    automatic, manual, _, gpt = found[0]
    assert min(automatic[1], manual[1]) > 128, "expected more than half of 256 digits to be right"
    assert gpt[0] < 5.5, "expected a loss below that of a uniform guess of a byte, ln(256) = 5.5 nats"


def _tensor_parallel_body(root):
    """Runs the example with a pipeline and without."""
    import runpy
    import sys

    import smdistributed.modelparallel.torch as smp

    found = []
    for line in ("--partitions 2", "--optimize speed --prescaled"):
        sys.argv = ["", *line.split(), "--layers", "2", "--width", "32", "--length", "32", "--steps", "30"]
        script_globals = runpy.run_path(f"{root}/examples/tensor_parallel_gpt.py", run_name="__main__")
        found.append((float(script_globals["mean"]), script_globals["held"] / script_globals["whole"]))
        del script_globals
        smp.shutdown()
    return found


@pytest.mark.more
@pytest.mark.timeout(200)
def test_the_example_of_tensor_parallelism_learns():
    for both in run_ranks(_tensor_parallel_body, 4, str(ROOT), timeout=190):
        (first, _), (second, share) = both
        assert max(first, second) < 4.6, "expected a loss well below the initial 5.5 nats"
        assert share < 0.55, "expected each rank to hold about half of the parameters at degree 2"


def _sharded_body(root, words):
    import runpy
    import sys

    import smdistributed.modelparallel.torch as smp

    sys.argv = [f"{root}/examples/sharded_llama.py", *words.split()]
    script_globals = runpy.run_path(sys.argv[0], run_name="__main__")
    smp.shutdown()
    return float(script_globals["loss"]), script_globals["own"], script_globals["whole"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("precision", [more("fp32"), "bf16"])
def test_a_sharded_llama_learns(precision):
    pytest.importorskip("transformers")
    words = f"--degree 2 --layers 2 --width 64 --length 32 --steps 30 --precision {precision}"
    for loss, own, whole in run_ranks(_sharded_body, 2, str(ROOT), words, launcher=Forked("transformers"), timeout=190):
        assert loss < 4.0, "expected a loss well below the initial ln(256) = 5.5 nats"
        assert own <= 0.54 * whole


def _memory_body(root):
    import sys

    sys.path.insert(0, f"{root}/benches/modelparallel")
    import memory

    return memory.measure(4, 24, 640)


@pytest.mark.more
@pytest.mark.timeout(300)
def test_a_rank_never_holds_the_whole_model():
    found = run_ranks(_memory_body, 4, str(ROOT), timeout=290)
    whole = found[0][0]
    assert sum(held for _, held, _ in found) == whole
    assert max(held for _, held, _ in found) <= 0.30 * whole, found
    assert max(grown for *_, grown in found) < 0.75 * whole, found
