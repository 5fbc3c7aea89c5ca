"""docs/contributing/horovod-conformance.md names what is there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

TESTS = Path(__file__).parents[2]


@functools.cache
def functions(path):
    tree = ast.parse((TESTS / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_what_the_rows_name_exists():
    page = (TESTS.parent / "docs" / "contributing" / "horovod-conformance.md").read_text()
    proofs = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert len(proofs) > 80
    missing = [f"{path}::{name}" for path, name in proofs if name not in functions(path)]
    assert missing == []


def test_every_part_of_a_job_has_a_row():
    page = (TESTS.parent / "docs" / "contributing" / "horovod-conformance.md").read_text()
    for path in ("torch", "tensorflow", "keras"):
        text = (TESTS / "multiproc" / "horovod" / f"test_{path}.py").read_text()
        parts = re.search(r"^PARTS = \((.*?)\)", text, re.DOTALL | re.MULTILINE)[1]
        for part in re.findall(r"\w+", parts):
            assert f"multiproc/horovod/test_{path}.py::{part}`" in page, part
