"""Docstrings of public names describe every argument and the result, which ruff's rules do not check."""

from __future__ import annotations

import ast
from pathlib import Path

PYTHON = Path(__file__).resolve().parents[2] / "python"
PACKAGES = ["horovod", "smdistributed/_common", "smdistributed/_launch", "smdistributed/dataparallel"]


def _own_nodes(function):
    """Yields the nodes of a function except those of nested functions."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield node
            yield from _own_nodes(node)


def _arguments(function):
    given = function.args
    plain = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    starred = [(prefix, one) for prefix, one in (("*", given.vararg), ("**", given.kwarg)) if one is not None]
    return [one.arg for one in plain if one.arg not in ("self", "cls")] + [f"{star}{one.arg}" for star, one in starred]


def _missing(function, docstring):
    decorators = {ast.unparse(decorator) for decorator in function.decorator_list}
    if not docstring:
        return ["a docstring"]
    if decorators & {"property", "functools.cached_property"}:
        return []
    lines = {line.strip().split(":")[0] for line in docstring.splitlines()}
    missing = [f"`{name}`" for name in _arguments(function) if name not in lines]
    returns = ast.unparse(function.returns) if function.returns is not None else "Any"
    has_result = returns not in ("None", "NoReturn") and any(
        isinstance(node, ast.Return) and node.value is not None for node in _own_nodes(function)
    )
    return missing + ["its result"] * (has_result and not {"Returns", "Yields"} & lines)


def _gaps(node, where):
    for child in node.body:
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        name = f"{where}.{child.name}" if isinstance(node, ast.ClassDef) else f"{where}: {child.name}"
        if isinstance(child, ast.ClassDef):
            if not child.name.startswith("_"):
                yield from _gaps(child, name)
        elif child.name == "__init__":
            both = f"{ast.get_docstring(node) or ''}\n{ast.get_docstring(child) or ''}"
            yield from (f"{name} lacks {gap}" for gap in _missing(child, both) if gap != "its result")
        elif not child.name.startswith("_"):
            yield from (f"{name} lacks {gap}" for gap in _missing(child, ast.get_docstring(child)))


def test_docstrings_of_public_names_describe_arguments_and_results():
    files = [path for package in PACKAGES for path in sorted((PYTHON / package).rglob("*.py"))]
    assert len(files) > 100
    gaps = [gap for path in files for gap in _gaps(ast.parse(path.read_text()), str(path.relative_to(PYTHON)))]
    assert not gaps, "\n".join(gaps)
