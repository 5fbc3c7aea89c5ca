"""``model.join()``: replicas with different numbers of batches.

- JOI-1: inside the context, each step begins with an all-gather in which each replica reports whether it has a batch.
  A second one before the reduction reports which replicas have gradients. Replicas without a batch follow the
  training mode of the first replica that has one.
  - JOI-2: a replica that has left the context takes part in both, and adds zeros to the reduction, until no replica
    has a batch. So gradients are divided by the number of all replicas. At the end, all replicas get the parameters
    of one that ran the last step.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch

from smdistributed._common import errors
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.exceptions import CLASSES, SMPUsageError

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.model import DistributedModel

#: The part of a replica's status that says that its model is in training mode.
TRAINING = 2


class Join:
    """The context that ``model.join()`` returns.

    Args:
        model: The model.
        group: The ranks that hold the same partition; ``None`` if there is only one.
    """

    def __init__(self, model: DistributedModel, group: dist.ProcessGroup | None) -> None:
        self._model, self._group = model, group

    def __enter__(self) -> None:
        if self._model.replicas.join_context is not None:
            raise SMPUsageError("`model.join()` inside of another one")
        self._model.replicas.join_context = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del error, trace
        self._model.replicas.join_context = None
        if kind is None and self._group is not None:
            with errors.translated(CLASSES):
                self._shadow_others(self._group)

    def round(self, has: bool) -> list[int]:
        """Return the status of each replica.

        The status is 0 without a batch, else 1, plus ``TRAINING`` if the model is in training mode.
        """
        mine = 1 + TRAINING * self._model.training if has else 0
        if self._group is None:
            return [mine]
        gathered = torch.empty(len(self._group.ranks or ()), dtype=torch.int64, device="cpu")
        dist.all_gather_into_tensor(gathered, torch.tensor([mine], device="cpu"), self._group)
        return gathered.tolist()

    def _shadow_others(self, group: dist.ProcessGroup) -> None:
        model, last = self._model, None
        replicas = model.replicas
        while True:
            active = self.round(False)
            if not any(active):
                break
            if not model.is_partitioned:
                raise SMPUsageError(
                    "a replica had no batch at all, but the first step of all replicas partitions the model: give each "
                    "at least one"
                )
            last = active
            replicas.sync_buffers_from(model, active)
            if any(self.round(False)):
                replicas.join_shadow(model)
        # Only replicas that ran the last step have the final state: the others copy it.
        latest = self.round(last is None)
        replicas.copy_state_from(model, latest)
