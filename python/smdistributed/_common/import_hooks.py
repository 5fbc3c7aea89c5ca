"""Runs callbacks after another package has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from typing import Any

#: The callbacks after each import, by the module's full name.
_actions: dict[str, list[Callable[[], None]]] = {}


def after_import(name: str, action: Callable[[], None]) -> None:
    """Call ``action`` after each import of module ``name`` from now on.

    If the module has been imported already, the callback does not run until it is imported again.

    Args:
        name: The full name, such as ``accelerate.state``.
        action: Called without arguments. Its exceptions propagate from the import statement.
    """
    actions = _actions.setdefault(name, [])
    if action not in actions:
        actions.append(action)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules with the other finders of ``sys.meta_path``, and runs the callbacks after they are loaded."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        actions = _actions.get(fullname)
        if not actions:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_act(module: Any) -> None:
                execute(module)
                for action in actions:
                    action()

            loader.exec_module = execute_and_act
        return spec
