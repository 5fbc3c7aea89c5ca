"""``smp.init`` and ``smp.shutdown``: the configuration and the groups of this process."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from smdistributed import _core
from smdistributed._common import errors, lifecycle
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel import config as configuration
from smdistributed.modelparallel.exceptions import (
    CLASSES,
    SMPConfigError,
    SMPError,
    SMPUnsupportedError,
    SMPUsageError,
)
from smdistributed.modelparallel.ranks import Ranks
from smdistributed.modelparallel.torch.groups import TorchGroups
from smdistributed.modelparallel.torch.integrations import accelerate
from smdistributed.modelparallel.torch.partitioning.materialize import delay_parameters
from smdistributed.modelparallel.torch.state import state

ranks = Ranks(lambda: state.groups)


_CLASSES = {**CLASSES, "config": SMPConfigError}
#: In the exchange of configurations: why a rank has none.
_FAILURE = "#failure"


def init(config: Mapping[str, Any] | None = None) -> None:
    """Join the job, and read its configuration. A script calls it first.

    Args:
        config: Keys of the configuration; those that the launcher gives take precedence.

    Raises:
        SMPConfigError: A value is not acceptable, or the ranks cannot be divided that way.
        SMPUsageError: ``smp.init()`` was called before with another configuration.

    Examples:
        >>> smp.init({"partitions": 2, "microbatches": 4})
    """
    cfg: configuration.Config | None = None
    failure: SMPError | None = None
    try:
        cfg = configuration.read(config)
    except (SMPConfigError, SMPUnsupportedError) as error:
        if state.initialized or not (_core.is_initialized() or _core.is_launched()):
            raise
        # The other ranks would wait for this one, so it joins them first.
        failure = error
    if state.initialized:
        assert cfg is not None
        if config is not None and dict(cfg) != dict(state.cfg):
            raise SMPUsageError("`smp.init()` was called before, with another configuration")
        warnings.warn("`smp.init()` was called before; this call does nothing", stacklevel=2)
        return
    with errors.translated(CLASSES):
        if not _core.is_initialized():
            lifecycle.init()
        _require_equal(cfg, failure)
    assert cfg is not None
    with errors.translated(_CLASSES):
        state.enter(cfg, TorchGroups(cfg))
    if "SMP_NCCL_THROTTLE_LIMIT" in os.environ:
        configuration.warn_once("`SMP_NCCL_THROTTLE_LIMIT` is ignored: the number of outstanding calls is not limited")
    accelerate.install()
    if cfg.delayed_parameter_initialization:
        state.delay = delay_parameters()


def _require_equal(cfg: configuration.Config | None, failure: SMPError | None) -> None:
    """Compare the configurations of all ranks; with different degrees, their groups would differ and wait forever.

    Args:
        cfg: The configuration of this rank.
        failure: Why there is none.

    Raises:
        SMPConfigError: A value differs, or is not acceptable on some rank; raised on all ranks.
    """
    if _core.size() == 1:
        if failure is not None:
            raise failure
        return
    # The path of a partition file may differ between hosts.
    known = {key: value for key, value in (cfg or {}).items() if key != "partition_file"}
    text = json.dumps(known if failure is None else {_FAILURE: str(failure)}, sort_keys=True)
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    sizes = torch.empty(_core.size(), dtype=torch.int64, device="cpu")
    dist.all_gather_into_tensor(sizes, torch.tensor([own.numel()], device="cpu"))
    longest = int(sizes.max())
    row = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    row[: own.numel()] = own
    whole = torch.empty(_core.size() * longest, dtype=torch.uint8, device="cpu")
    dist.all_gather_into_tensor(whole, row)
    parts = zip(whole.split(longest), sizes.tolist(), strict=True)
    found: list[dict[str, Any]] = [json.loads(part[:size].numpy().tobytes()) for part, size in parts]
    if failure is not None:
        raise failure
    for rank, theirs in enumerate(found):
        if _FAILURE in theirs:
            raise SMPConfigError(f"the configuration of rank {rank} is not acceptable: {theirs[_FAILURE]}")
    first = found[0]
    for rank, theirs in enumerate(found):
        differences = [
            f"`{key}` is {first.get(key)!r} on rank 0 and {theirs.get(key)!r} on rank {rank}"
            for key in sorted(first.keys() | theirs.keys())
            if first.get(key) != theirs.get(key)
        ]
        if differences:
            raise SMPConfigError(f"the ranks have different configurations: {'; '.join(differences)}")


def shutdown() -> None:
    """Forget the configuration and the model and the optimizer. All ranks call it.

    :func:`init` may be called again. The process stays in the job.
    """
    if state.initialized:
        pipeline = None if state.model is None else state.model.pipeline
        try:
            if pipeline is not None:
                pipeline.timeline.finish()
        finally:
            try:
                if pipeline is not None:
                    pipeline.transfers.close()
            finally:
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
        ``True`` if the first step is recording the model in order to partition it.
    """
    return state.tracing
