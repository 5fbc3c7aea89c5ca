"""Joining the job, its groups, and the device of this process."""

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
from smdistributed.modelparallel.tensorflow import saving
from smdistributed.modelparallel.tensorflow.state import state
from smdistributed.modelparallel.topology import GROUPS, Topology

ranks = Ranks(lambda: state.groups)


class Groups:
    """The place of this process in the job.

    Attributes:
        topology: Who has which part.
        rank: Global rank.
        members: For each kind of group, global ranks of ours.
        pipe: The core's group in which the pipeline moves tensors; ``None`` if it would have one member.
        data: That in which gradients are reduced; likewise.
    """

    def __init__(self, cfg: configuration.Config) -> None:
        self.rank = _core.rank()
        self.topology = Topology.of(
            _core.size(), cfg.pipeline_parallel_degree, cfg.tensor_parallel_degree, cfg.placement_strategy
        )
        self.members = {name: self.topology.group(name, self.rank) for name in ("world", *GROUPS)}
        self.pipe = self._make("pp")
        self.data = self._make("dp")
        # Of the communication API: kinds with the same members share one.
        self._objects: dict[tuple[int, ...], int | None] = {}
        for name in self.members:
            members = tuple(self.members[name])
            if members not in self._objects:
                self._objects[members] = self._make(name)

    def _make(self, name: str) -> int | None:
        members = self.members[name]
        return _core.new_group(members) if len(members) > 1 else None

    def objects(self, name: str) -> int | None:
        """The core's group for objects of the script."""
        return self._objects[tuple(self.members[name])]

    def close(self) -> None:
        """Forgets the core's groups."""
        for group in (self.pipe, self.data, *self._objects.values()):
            if group is not None:
                _core.remove_group(group)

    def rank_in(self, name: str) -> int:
        """Our place in a group."""
        return self.members[name].index(self.rank)


def init(config: Mapping[str, Any] | None = None) -> None:
    """Joins the job; the first call of a script.

    With GPUs, this process sees the one with the number of its local rank, whose memory grows as it is needed.

    Args:
        config: Keys of the configuration; those that the launcher gives win.

    Raises:
        SMPConfigError: a value is not acceptable, or the job's processes cannot be divided so.
        SMPUsageError: it was called before with another configuration.
    """
    # For a Keras that the script has imported after this package.
    compat.install()
    saving.install()
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
        groups = Groups(cfg)
        if cfg.horovod:
            _start_horovod(groups)
        state.enter(cfg, groups)


def _start_horovod(groups: Groups) -> None:
    """Horovod's world is the ranks that hold the same partition; a later ``hvd.init()`` finds it made."""
    from horovod.common import basics

    basics.shared().init(groups.members["dp"])


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
    """Forgets the configuration and the model; ``init`` may be called again, on all ranks. The process stays in the
    job."""
    if state.initialized:
        state.groups.close()
        state.leave()


def is_initialized() -> bool:
    """Whether ``smp.init()`` has been called."""
    return state.initialized


def process_groups(*_: Any, **__: Any) -> NoReturn:
    """Process groups are PyTorch's."""
    raise SMPUnsupportedError("process groups are `torch.distributed`'s: TensorFlow has none")
