"""Replicas with different numbers of batches.

- JOI-1: inside of the context, each step begins with a round in which replicas say whether they have a batch, and before
  gradients are reduced another one tells who has some.
  Who stands by does what the mode of the first one that has a batch asks for: its own may be another.
- JOI-2: a replica that has left the context takes part in these, and adds zeros to what is reduced, until nobody has a
  batch. So gradients are divided by the number of all replicas. In the end all have the parameters of one that came last.
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

#: Of what a replica says in a round: its model is in training mode.
TRAINING = 2


class Join:
    """The context that ``model.join()`` returns.

    Args:
        model: The model.
        group: The ranks that hold the same partition; ``None`` if this is the only one.
    """

    def __init__(self, model: DistributedModel, group: dist.ProcessGroup | None) -> None:
        self._model, self._group = model, group

    def __enter__(self) -> None:
        if self._model.joining is not None:
            raise SMPUsageError("`model.join()` inside of another one")
        self._model.joining = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del error, trace
        self._model.joining = None
        if kind is None and self._group is not None:
            with errors.translated(CLASSES):
                self._stand_by(self._group)

    def round(self, has: bool) -> list[int]:
        """What each replica says: 0 if it has none, else 1, and ``TRAINING`` more if its model is in training mode."""
        mine = 1 + TRAINING * self._model.training if has else 0
        if self._group is None:
            return [mine]
        everybody = torch.empty(len(self._group.ranks or ()), dtype=torch.int64)
        dist.all_gather_into_tensor(everybody, torch.tensor([mine]), self._group)
        return everybody.tolist()

    def _stand_by(self, group: dist.ProcessGroup) -> None:
        model, last = self._model, None
        while True:
            active = self.round(False)
            if not any(active):
                break
            if not model.is_partitioned:
                raise SMPUsageError(
                    "a replica had no batch at all: the model is divided in the first step of all of them"
                )
            last = active
            model.follow_buffers(active)
            if any(self.round(False)):
                model.stand_in()
        # Those that come last hear it from the others' rounds only that nobody is behind them.
        latest = self.round(last is None)
        model.follow(latest)
