"""Every Python block of README.md and of the quickstart pages runs unchanged, on two ranks."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path

import pytest

from support import Forked, run_ranks

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "quickstart").glob("*.md")))
EXAMPLES = ROOT / "examples" / "rust-tch" / "src"
_ENV = {
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
}


def blocks(language):
    """Returns the blocks of all pages: the page, the line before the block, and its text."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, match.start(1))
            found.append(pytest.param(page.name, line, match[1], id=f"{page.name}:{line + 1}"))
    return found


def run(script):
    """Runs a block; returns a value that must be equal on all ranks: the loss of a pipeline, or the model's
    parameters.
    """
    namespace = runpy.run_path(script, run_name="__main__")
    if "smp" in namespace:
        return float(namespace["loss"])
    model, optimizer = namespace["model"], namespace.get("optimizer")
    if hasattr(optimizer, "iterations"):
        assert int(optimizer.iterations) > 0, "the block must apply gradients"
    if hasattr(model, "parameters"):
        return [parameter.detach().flatten().tolist() for parameter in model.parameters()]
    return [variable.numpy().ravel().tolist() for variable in model.trainable_variables]


@pytest.mark.parametrize(("page", "line", "source"), blocks("python"))
@pytest.mark.timeout(180)
def test_blocks_run_on_two_ranks(page, line, source, tmp_path, monkeypatch):
    """All ranks must end with the same parameters, although each trains on its own data."""
    framework = "tensorflow" if re.search(r"\.tensorflow|horovod\.keras", source) else "torch"
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    monkeypatch.chdir(tmp_path)
    script = tmp_path / page.replace(".md", ".py")
    # Leading empty lines, so that tracebacks have the line numbers of the page.
    script.write_text("\n" * line + source)
    first, second = run_ranks(run, 2, str(script), launcher=Forked(framework), env=_ENV, timeout=170)
    assert first == second


@pytest.mark.parametrize(("page", "line", "source"), blocks("rust"))
def test_rust_blocks_are_parts_of_the_example(page, line, source):
    """`make example-tch` builds and runs the example that contains the blocks."""
    assert any(source in path.read_text() for path in EXAMPLES.glob("*.rs")), f"{page}:{line}"
