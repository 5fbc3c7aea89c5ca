"""``smp.init`` and ``smp.shutdown``: the configuration and the groups of this process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from smdistributed import _core
from smdistributed._common import errors, lifecycle
from smdistributed.modelparallel import config as configuration
from smdistributed.modelparallel.exceptions import CLASSES, SMPUsageError
from smdistributed.modelparallel.ranks import Ranks
from smdistributed.modelparallel.torch.groups import TorchGroups
from smdistributed.modelparallel.torch.partitioning.materialize import delay_parameters
from smdistributed.modelparallel.torch.state import state

ranks = Ranks(lambda: state.groups)


def init(config: Mapping[str, Any] | None = None) -> None:
    """Joins the job; the first call of a script.

    Args:
        config: Keys of the configuration; those that the launcher gives win.

    Raises:
        SMPConfigError: a value is not acceptable, or the job's processes cannot be divided so.
        SMPUsageError: it was called before with another configuration.
    """
    cfg = configuration.read(config)
    if state.initialized:
        if config is not None and dict(cfg) != dict(state.cfg):
            raise SMPUsageError("`smp.init()` was called before, with another configuration")
        warnings.warn("`smp.init()` was called before; this call does nothing", stacklevel=2)
        return
    with errors.translated(CLASSES):
        if not _core.is_initialized():
            lifecycle.init()
        state.enter(cfg, TorchGroups(cfg))
    if cfg.delayed_parameter_initialization:
        state.delay = delay_parameters()


def shutdown() -> None:
    """Forgets the configuration, the model and the optimizer; ``init`` may be called again, on all ranks. The process
    stays in the job."""
    if state.initialized:
        state.groups.close()
        state.leave()


def is_initialized() -> bool:
    """Whether ``smp.init()`` has been called."""
    return state.initialized


def is_tracing() -> bool:
    """Whether the model is being looked at to divide it, in the first step."""
    return state.tracing
