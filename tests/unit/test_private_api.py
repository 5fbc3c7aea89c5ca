"""Private names of PyTorch, TensorFlow and Keras that the package uses. Another version may lack them.

`tests/goldens/private_api.txt` lists them. Each new one is a deliberate decision: `SMD_UPDATE_GOLDENS=1` rewrites the
list. Another test checks that the installed frameworks have all of them.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/goldens/private_api.txt"
FRAMEWORKS = ("torch", "tensorflow", "keras", "tf_keras")


def _is_private(name):
    framework, *parts = name.split(".")
    if framework not in FRAMEWORKS:
        return False
    internal = {"tensorflow": "python"}.get(framework, "src")
    return any(part == internal or (part.startswith("_") and not part.startswith("__")) for part in parts)


def _names(node, aliases):
    """Yields the full names that a module or function imports, and those of attributes that it reads from imported
    modules.
    """
    aliases = dict(aliases)
    nodes, inner = [], []
    pending = list(ast.iter_child_nodes(node))
    while pending:
        each = pending.pop()
        nodes.append(each)
        is_function = isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        (inner if is_function else pending).extend([each] if is_function else ast.iter_child_nodes(each))
    for each in nodes:
        if isinstance(each, ast.Import):
            for item in each.names:
                aliases[item.asname or item.name.split(".")[0]] = item.name if item.asname else item.name.split(".")[0]
                yield item.name
        elif isinstance(each, ast.ImportFrom) and each.module and each.level == 0:
            for item in each.names:
                aliases[item.asname or item.name] = f"{each.module}.{item.name}"
                yield f"{each.module}.{item.name}"
    for each in nodes:
        parts = []
        while isinstance(each, ast.Attribute):
            parts.append(each.attr)
            each = each.value
        if parts and isinstance(each, ast.Name) and each.id in aliases:
            yield ".".join([aliases[each.id], *reversed(parts)])
    for each in inner:
        yield from _names(each, aliases)


def _used():
    used = set()
    for file in sorted((ROOT / "python").rglob("*.py")):
        used.update(filter(_is_private, _names(ast.parse(file.read_text()), {})))
    # Of `torch._C` and `torch._C.Future`, only the longer name is listed.
    return [name for name in sorted(used) if not any(other.startswith(f"{name}.") for other in used)]


def test_the_list_of_private_names_is_complete():
    found = "".join(f"{name}\n" for name in _used())
    if os.environ.get("SMD_UPDATE_GOLDENS"):
        GOLDEN.write_text(found)
    assert GOLDEN.read_text() == found, "rewrite the list with SMD_UPDATE_GOLDENS=1"


def _resolve(name):
    module, parts = name, []
    while True:
        try:
            value = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            parts.insert(0, last)
    for part in parts:
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_private_names_exist_in_what_is_installed(framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    names = [name for name in _used() if name.split(".")[0] == framework]
    assert names
    missing = []
    for name in names:
        try:
            _resolve(name)
        except (AttributeError, ValueError):
            missing.append(name)
    assert missing == []
