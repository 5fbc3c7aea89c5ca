"""The methods that libraries and torch's hooks call on the ``reducer`` of torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from smdistributed._common import errors
from smdistributed.dataparallel.exceptions import CLASSES
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.torch import distributed as dist

if TYPE_CHECKING:
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel


class ReducerMethods:
    """The ``reducer`` of one model; methods have the meaning of torch's methods of the same names.

    Args:
        model: The model.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """Reduce the gradients of the next backward, even if its forward ran inside ``no_sync``.

        Args:
            outputs: Ignored: the reducer searches the whole graph.
        """
        del outputs
        self._model._reducer.expect_sync()

    def _rebuild_buckets(self) -> bool:
        """Do nothing: buckets are rebuilt automatically after the first step."""
        return False

    def _remove_autograd_hooks(self) -> None:
        self._model._reducer.remove_hooks()

    def _check_reducer_finalized(self) -> None:
        """Raise if a backward is running."""
        with errors.translated(CLASSES):
            self._model._reducer.await_step()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self._model._reducer.set_sample_rate(sample_rate)

    def _run_allreduce_hook(self, bucket: Any) -> torch.futures.Future[list[torch.Tensor]]:
        """Sum a bucket over the ranks; for communication hooks, on the thread that calls them."""
        with errors.translated(CLASSES):
            dist.all_reduce(bucket.buffer(), op=ReduceOp.SUM, group=self._model._own_group)
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([bucket.buffer()])
        return future
