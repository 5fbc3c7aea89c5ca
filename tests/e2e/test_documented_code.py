"""Every Python block of README.md and of the quickstart pages runs as it stands, on two ranks."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from support import Forked, run_ranks

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "quickstart").glob("*.md")))
_ENV = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
_ENV["CUDA_VISIBLE_DEVICES"] = ""


def blocks():
    """One test for each block: the page, the first line of the block, and its text."""
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, match.start(1)) + 1
            yield pytest.param(page, line, match[1], id=f"{page.name}:{line}")


def block(source, name, line):
    """Runs a block; returns what has to be equal on all ranks: the loss of a pipeline, else the model's parameters."""
    namespace = {"__name__": "__main__"}
    # The empty lines give tracebacks the line numbers of the page.
    exec(compile("\n" * (line - 1) + source, name, "exec"), namespace)
    if "smp" in namespace:
        return float(namespace["loss"])
    model, optimizer = namespace["model"], namespace.get("optimizer")
    if hasattr(optimizer, "iterations"):
        assert int(optimizer.iterations) > 0, "the block applies no gradients"
    if hasattr(model, "parameters"):
        return [parameter.detach().flatten().tolist() for parameter in model.parameters()]
    return [variable.numpy().ravel().tolist() for variable in model.variables]


@pytest.mark.parametrize(("page", "line", "source"), list(blocks()))
@pytest.mark.timeout(180)
def test_blocks_run_on_two_ranks(page, line, source, tmp_path, monkeypatch):
    """All ranks end with the same parameters, although each has data of its own."""
    framework = "tensorflow" if re.search(r"\.tensorflow|horovod\.keras", source) else "torch"
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    monkeypatch.chdir(tmp_path)
    first, second = run_ranks(block, 2, source, page.name, line, launcher=Forked(framework), env=_ENV, timeout=150)
    assert first == second
