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
    """Join the job, and read its configuration. A script calls it first.

    Args:
        config: Keys of the configuration; those that the launcher gives take precedence.

    Raises:
        SMPConfigError: A value is not acceptable, or the ranks cannot be divided that way.
        SMPUsageError: It was called before with another configuration.

    Examples:
        >>> smp.init({"partitions": 2, "microbatches": 4})
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
    """Forget the configuration and the model and the optimizer. All ranks call it.

    :func:`init` may be called again. The process stays in the job.
    """
    if state.initialized:
        state.groups.close()
        state.leave()


def is_initialized() -> bool:
    """Return whether :func:`init` has been called.

    Returns:
        ``True`` between :func:`init` and :func:`shutdown`.
    """
    return state.initialized


def is_tracing() -> bool:
    """Return whether the first step is recording the model in order to partition it.

    Returns:
        Whether it is.
    """
    return state.tracing
