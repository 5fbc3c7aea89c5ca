"""The tests that docs/contributing/horovod-conformance.md names exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

TESTS = Path(__file__).parents[2]
JOBS = sorted((TESTS / "multiproc" / "horovod").glob("test_*.py"))


@functools.cache
def functions(path):
    tree = ast.parse((TESTS / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_cited_functions_exist():
    page = (TESTS.parent / "docs" / "contributing" / "horovod-conformance.md").read_text()
    cited = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert len(cited) > 80
    missing = [f"{path}::{name}" for path, name in cited if name not in functions(path)]
    assert missing == []


def test_every_part_of_a_job_has_a_row():
    page = (TESTS.parent / "docs" / "contributing" / "horovod-conformance.md").read_text()
    jobs = {path: re.search(r"^PARTS = \((.*?)\)", path.read_text(), re.DOTALL | re.MULTILINE) for path in JOBS}
    assert sum(parts is not None for parts in jobs.values()) >= 6
    for path, parts in jobs.items():
        for part in re.findall(r"\w+", parts[1]) if parts else ():
            assert f"multiproc/horovod/{path.name}::{part}`" in page, (path.name, part)
