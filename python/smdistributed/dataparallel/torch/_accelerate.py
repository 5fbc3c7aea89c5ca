"""Make Hugging Face's accelerate accept ``backend="smddp"`` for processes on CPUs.

The Trainer's ``ddp_backend`` with ``use_cpu`` becomes ``PartialState(cpu=True, backend=..)``. accelerate accepts only
``mpi`` and ``gloo`` there, even where another backend is registered with PyTorch.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

from smdistributed._common import import_hooks
from smdistributed.dataparallel.torch._c10d import NAME

_MODULE = "accelerate.state"


def install() -> None:
    """Make accelerate accept the backend, now or when it is imported."""
    if hasattr(sys.modules.get(_MODULE), "PartialState"):
        _adapt()
    import_hooks.after_import(_MODULE, _adapt)


def _adapt() -> None:
    state: Any = sys.modules[_MODULE]
    theirs = getattr(state.PartialState, "_prepare_backend", None)
    if theirs is None:
        warnings.warn(
            f"this accelerate has no `PartialState._prepare_backend`, which `{NAME}` adapts: on CPUs, it chooses "
            "another backend. Report it to OpenSMD",
            stacklevel=2,
        )
        return
    if hasattr(theirs, "_is_smddp"):
        return

    @functools.wraps(theirs)
    def prepare_backend(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        if not cpu or sagemaker_dp or backend != NAME:
            return theirs(self, cpu, sagemaker_dp, backend)
        # accelerate itself decides whether there are several processes.
        _, kind = theirs(self, cpu, sagemaker_dp, None)
        return (NAME, kind) if kind is state.DistributedType.MULTI_CPU else theirs(self, cpu, sagemaker_dp, backend)

    prepare_backend._is_smddp = True  # type: ignore[attr-defined]
    state.PartialState._prepare_backend = prepare_backend
