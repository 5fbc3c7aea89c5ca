"""``smp.init`` and ``smp.shutdown``: the configuration, the groups and the device of this process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

import tensorflow as tf

from smdistributed import _core
from smdistributed._common import errors, lifecycle
from smdistributed.dataparallel.tensorflow import compat
from smdistributed.modelparallel import config as configuration
from smdistributed.modelparallel.exceptions import CLASSES, SMPUnsupportedError, SMPUsageError
from smdistributed.modelparallel.ranks import Ranks
from smdistributed.modelparallel.tensorflow import optimizer
from smdistributed.modelparallel.tensorflow.checkpoint import saving
from smdistributed.modelparallel.tensorflow.groups import TensorFlowGroups
from smdistributed.modelparallel.tensorflow.partitioning import delayed_initialization
from smdistributed.modelparallel.tensorflow.state import state

ranks = Ranks(lambda: state.groups)


def init(config: Mapping[str, Any] | None = None) -> None:
    """Join the job, and read its configuration. A script calls it first.

    With GPUs, this process sees the one with the number of its local rank, whose memory grows as it is needed.

    Args:
        config: Keys of the configuration; those that the launcher gives take precedence.

    Raises:
        SMPConfigError: A value is not acceptable, or the number of ranks does not fit the configuration.
        SMPUsageError: ``smp.init()`` was called before with another configuration.

    Examples:
        >>> smp.init({"partitions": 2, "microbatches": 4})
    """
    # Again, for a Keras that the script has imported after this package.
    compat.install()
    saving.install()
    delayed_initialization.install()
    optimizer.install()
    cfg = configuration.read(config, "tensorflow")
    if state.initialized:
        if config is not None and dict(cfg) != dict(state.cfg):
            raise SMPUsageError("`smp.init()` was called before, with another configuration")
        warnings.warn("`smp.init()` was called before; this call does nothing", stacklevel=2)
        return
    with errors.translated(CLASSES):
        if not _core.is_initialized():
            lifecycle.init()
        _pin_device(_core.local_rank())
        groups = TensorFlowGroups(cfg)
        if cfg.horovod:
            _start_horovod(groups)
        state.enter(cfg, groups)


def _start_horovod(groups: TensorFlowGroups) -> None:
    """Create Horovod's world from the ranks that hold the same partition; a later ``hvd.init()`` uses it."""
    from horovod.common import basics

    basics.shared().init(groups.members["dp"])
    world = _core.world_ranks()
    if world != groups.members["dp"]:
        raise SMPUsageError(
            f"Horovod's world is the ranks {world}, as `hvd.init()` or an earlier `smp.init()` made it; "
            f'with `"horovod": True` it would have to be {groups.members["dp"]}, the ranks with the same partition; '
            "call `smp.init()` first, and with the same degrees in all of a process"
        )


def _pin_device(local_rank: int) -> None:
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    try:
        if tf.config.get_visible_devices("GPU") == gpus and len(gpus) > 1:
            gpus = [gpus[local_rank % len(gpus)]]
            tf.config.set_visible_devices(gpus, "GPU")
        for gpu in tf.config.get_visible_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError:
        warnings.warn("TensorFlow has used its devices before `smp.init()`: they stay as they are", stacklevel=3)


def shutdown() -> None:
    """Forget the configuration and the model. All ranks call it.

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


def process_groups(*_: Any, **__: Any) -> NoReturn:
    """Raise an error: process groups are PyTorch's.

    Args:
        *_: Ignored.
        **__: Ignored.

    Raises:
        SMPUnsupportedError: Always.
    """
    raise SMPUnsupportedError("process groups are `torch.distributed`'s: TensorFlow has none")
