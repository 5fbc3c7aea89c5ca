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

    A module that has been imported before is the caller's own business.

    Args:
        name: The full name, such as ``accelerate.state``.
        action: Takes nothing; its exceptions leave the import.
    """
    actions = _actions.setdefault(name, [])
    if action not in actions:
        actions.append(action)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """A finder without modules of its own: it lets the other finders load, and then runs the callbacks."""

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
