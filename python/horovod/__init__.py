"""The place of Horovod's API in OpenSMD.

This release holds the package and no face yet: `import horovod.torch`, `horovod.tensorflow`, `horovod.keras` and
`horovod.ray` raise an `ImportError` that says so, which scripts that make Horovod optional handle.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Sequence
from types import ModuleType

# Scripts compare it with the last version of the original; what follows the plus sign does not take part.
__version__ = "0.28.1+smd.0"


class _NotYet(importlib.abc.MetaPathFinder):
    """Answers for the modules that this package will have: with the reason why they are not there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package != __name__ or not rest:
            return None
        raise ModuleNotFoundError(
            f"`{fullname}` is not part of this release of OpenSMD. For data-parallel training with PyTorch use "
            "`smdistributed.dataparallel.torch.parallel.distributed.DistributedDataParallel`",
            name=fullname,
        )


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
