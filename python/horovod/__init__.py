"""Horovod's API over OpenSMD: scripts written for Horovod run unchanged.

``docs/contributing/horovod-conformance.md`` lists all public names of Horovod and says which are supported. The import
of a module that is missing raises an ``ImportError`` that says so. Scripts that make Horovod optional handle this
error. Importing this package imports no framework.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Sequence
from types import ModuleType

# Scripts compare it with the original's last version; comparisons ignore what follows the plus sign.
__version__ = "0.28.1+smd.1"

#: Modules of the original that do not exist here, with the alternative.
_MISSING = {
    "mxnet": "MXNet's last release is of 2022; Horovod 0.28.1 is the last one for it",
}


class _NotYet(importlib.abc.MetaPathFinder):
    """Raise an error that names the alternative to a module that does not exist here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        instead = _MISSING.get(rest)
        if package != __name__ or instead is None:
            return None
        raise ModuleNotFoundError(f"`{fullname}` is not part of this release of OpenSMD: {instead}", name=fullname)


def _refuse_to_shadow() -> None:
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"Horovod {version} and OpenSMD are both installed, and both have a package `horovod`. Uninstall one of them: "
        "`pip uninstall horovod` keeps OpenSMD, `pip uninstall opensmd` (and then reinstalling horovod) keeps Horovod",
        name=__name__,
    )


_refuse_to_shadow()
sys.meta_path.insert(0, _NotYet())

from horovod.runner import run as run  # noqa: E402
