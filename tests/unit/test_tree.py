"""Limits for the source tree: lines of a file and files of a folder."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 700
MOST_FILES = 25
SUFFIXES = {".py", ".rs", ".cc", ".h", ".cu", ".cuh"}


@pytest.fixture(scope="module")
def sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout: generated files cannot be told from sources")
    paths = (ROOT / line for line in listed.stdout.splitlines())
    found = sorted(path for path in paths if path.suffix in SUFFIXES and path.exists())
    assert len(found) > 500, "the sources have moved"
    return found


def test_a_source_is_at_most_700_lines_long(sources):
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


def test_a_folder_has_at_most_25_sources(sources):
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in sources)
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


#: PyTorch functions that make tensors on the default device, which users may set.
_CONSTRUCTORS = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm",
    "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
#: Files that may use the default device: they make parameters of the user's model.
_ON_THE_DEFAULT_DEVICE = {"python/smdistributed/modelparallel/torch/nn/module.py"}


def test_tensors_of_the_library_name_their_device(sources):
    """`torch.set_default_device("cuda")` must not move tensors whose bytes are sent from host memory."""
    found = []
    for path in sources:
        name = str(path.relative_to(ROOT))
        if not name.startswith("python/") or path.suffix != ".py" or name in _ON_THE_DEFAULT_DEVICE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if (
                of_torch
                and node.func.attr in _CONSTRUCTORS
                and not {"device", None} & {each.arg for each in node.keywords}
            ):
                found.append(f"{name}:{node.lineno}: torch.{node.func.attr}")
    assert found == []
