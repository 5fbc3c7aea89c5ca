"""Sharded data parallelism beside a pipeline: the parameters of a partition are whole during a step.

All microbatches of a step use the parameters of all layers of the partition, forwards and backwards alternate, and
each partition has an order of its own. So a rank gathers its partition once when a step begins, and frees it when the
step has ended. Between steps it has shards of parameters and gradients, and always of the optimizer's states.

- PSH-1: a whole parameter is the same object in each step, so that recordings of earlier steps stay valid. Between
  steps it has its shape and no memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from smdistributed._common import errors
from smdistributed.modelparallel.config import Config
from smdistributed.modelparallel.exceptions import CLASSES
from smdistributed.modelparallel.torch.sharding.sharded_model import ShardedModel
from smdistributed.modelparallel.torch.sharding.sharding_groups import ShardingGroups
from smdistributed.modelparallel.torch.sharding.unit import Unit


class PipelineShards(ShardedModel):
    """The sharded parameters of a partition, gathered for whole steps.

    Args:
        groups: As of :class:`ShardedModel`.
        slice_groups: As of :class:`ShardedModel`.
        cfg: The configuration.
    """

    def __init__(self, groups: ShardingGroups, slice_groups: ShardingGroups, cfg: Config) -> None:
        super().__init__(groups, slice_groups, cfg)
        self._whole: dict[Unit, list[nn.Parameter]] = {}
        self._is_entered = False

    def attach(self, needs: dict[nn.Module, list[Unit]]) -> None:
        """Does nothing: units are gathered for steps, not for modules."""
        del needs

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around a forward of the model, whose parameters are whole already."""
        yield

    @torch.no_grad()
    def enter_step(self) -> None:
        """Gives modules the whole parameters, unless they have them."""
        if self._is_entered:
            return
        self._is_entered = True
        with errors.translated(CLASSES):
            # The next one is on its way while one is put together.
            for unit, following in zip(self.units, [*self.units[1:], None], strict=True):
                unit.begin_gather()
                if following is not None:
                    following.begin_gather()
                self._install(unit)

    def _install(self, unit: Unit) -> None:
        full = unit.finish_gather()
        if unit not in self._whole:
            self._whole[unit] = [nn.Parameter(each, requires_grad=False) for each in full]
        for whole, values, shard in zip(self._whole[unit], full, unit.parameters, strict=True):
            whole.data = values
            whole.requires_grad_(shard.parameter.requires_grad)
        unit.install(self._whole[unit])
        unit.free()

    @torch.no_grad()
    def leave_step(self) -> None:
        """Gives modules the shards, and frees the whole parameters."""
        if not self._is_entered:
            return
        self._is_entered = False
        for unit, whole in self._whole.items():
            unit.uninstall()
            for each in whole:
                each.grad = None
                # One element for the shape (PSH-1).
                each.data = each.data.new_empty(1).expand(each.shape)

    def finish_backward(self) -> None:
        """Reduces the gradients of the step to their shards."""
        for unit, whole in self._whole.items():
            if unit.is_trained and self._is_entered:
                self._reduce(unit, [each.grad for each in whole])
                for each in whole:
                    each.grad = None
        super().finish_backward()
