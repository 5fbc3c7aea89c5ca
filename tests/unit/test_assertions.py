"""Every test shows where it asserts: in its own body, in a helper that it calls, or in a function named `check_..` that
it runs on ranks. Otherwise its docstring must say so.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
#: Functions of pytest that can fail a test.
_OF_PYTEST = {"raises", "warns", "fail"}
_MOST_LINES = 80


class Source:
    """A test file with its functions and methods, and the names that it imports."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text())
        self.path = path
        self.functions: dict[str, list[ast.FunctionDef]] = {}
        #: By the name in this file: the test file that is imported, and the name of the function in it if one is
        #: imported.
        self.imported: dict[str, tuple[Path, str | None]] = {}
        #: Values of module-level variables, which may contain functions.
        self.tables: dict[str, ast.expr] = {}
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.tables[node.targets[0].id] = node.value
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                self.functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for each in node.names:
                    name = each.asname or each.name
                    if inside := _file(f"{node.module}.{each.name}"):
                        self.imported[name] = inside, None
                    elif inside := _file(node.module):
                        self.imported[name] = inside, each.name

    def mentioned(self, node: ast.AST) -> Iterator[tuple[Source, str]]:
        """Functions of test files that `node` calls, passes on, or finds in a module-level variable of this file."""
        for each in ast.walk(node):
            if isinstance(each, ast.Name | ast.Attribute):
                yield from self.named(each)
            if isinstance(each, ast.Name) and each.id in self.tables:
                yield from self.mentioned(self.tables[each.id])

    def called(self, node: ast.AST) -> Iterator[tuple[Source, str]]:
        """Functions of test files that `node` calls."""
        for each in ast.walk(node):
            if isinstance(each, ast.Call):
                yield from self.named(each.func)

    def named(self, node: ast.expr) -> Iterator[tuple[Source, str]]:
        """The function that an expression names, if a test file defines it."""
        if isinstance(node, ast.Name):
            if node.id in self.functions:
                yield self, node.id
            elif node.id in self.imported and self.imported[node.id][1]:
                path, name = self.imported[node.id]
                yield _source(path), name
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in self.imported:
                yield _source(self.imported[node.value.id][0]), node.attr
            elif node.attr in self.functions:
                yield self, node.attr


def _file(module: str) -> Path | None:
    path = TESTS.joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()), None)


@functools.cache
def _source(path: Path) -> Source:
    return Source(path)


def _is_assertion(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.Raise):
        return "AssertionError" in ast.unparse(node)
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func).split(".")
    return name[-1].startswith("assert_") or (name[0] == "pytest" and name[-1] in _OF_PYTEST)


def _asserts_itself(node: ast.AST) -> bool:
    return any(map(_is_assertion, ast.walk(node)))


def _asserts(source: Source, name: str, seen: set[tuple[Path, str]]) -> bool:
    """Whether a function, or one that it calls or passes on, contains an assertion."""
    if (source.path, name) in seen:
        return False
    seen.add((source.path, name))
    if name in source.imported and source.imported[name][1]:
        path, other = source.imported[name]
        return _asserts(_source(path), other, seen)
    return any(
        _asserts_itself(function) or any(_asserts(*other, seen) for other in source.mentioned(function))
        for function in source.functions.get(name, [])
    )


def _tests() -> Iterator[tuple[Source, ast.FunctionDef]]:
    for path in sorted(TESTS.rglob("test_*.py")):
        source = _source(path)
        for functions in source.functions.values():
            yield from ((source, each) for each in functions if each.name.startswith("test_"))


def _says_where_it_asserts(source: Source, test: ast.FunctionDef) -> bool:
    if _asserts_itself(test):
        return True
    # The harness asserts that ranks exit without an error, which does not count.
    harness = TESTS / "support" / "ranks.py", TESTS / "support" / "__init__.py"
    called = [(where, name) for where, name in source.called(test) if where.path not in harness]
    if any(_asserts(where, name, set()) for where, name in called):
        return True
    bodies = [
        (where, name)
        for where, name in source.mentioned(test)
        if where.path not in harness and _asserts(where, name, set())
    ]
    return any(name.lstrip("_").startswith("check") for _, name in bodies) or bool(bodies and ast.get_docstring(test))


def test_every_test_says_where_it_asserts():
    unclear = [
        f"{source.path.relative_to(TESTS)}::{test.name}"
        for source, test in _tests()
        if not _says_where_it_asserts(source, test)
    ]
    assert not unclear, unclear


def test_tests_have_one_subject():
    """No test is called `test_everything` or is too long to be read at once."""
    long = [
        f"{source.path.relative_to(TESTS)}::{test.name}"
        for source, test in _tests()
        if test.name == "test_everything" or test.end_lineno - test.lineno >= _MOST_LINES
    ]
    assert not long, long
