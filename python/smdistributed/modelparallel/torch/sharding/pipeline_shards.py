"""Sharded data parallelism with a pipeline: the parameters of a partition are whole during a step.

All microbatches of a step use the parameters of all layers of the partition, forwards and backwards alternate, and
the order differs between partitions. So a rank gathers its partition once at the start of a step, and frees it at the
end. Between steps, parameters and gradients are sharded; optimizer states always are.

- PSH-1: a whole parameter is the same object in each step, so that recordings of earlier steps stay valid. Between
  steps it keeps its shape but has no memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from smdistributed._common import errors
from smdistributed.modelparallel.config import DEFAULTS, Config, warn_once
from smdistributed.modelparallel.exceptions import CLASSES
from smdistributed.modelparallel.torch.sharding.sharded_model import ShardedModel
from smdistributed.modelparallel.torch.sharding.sharding_groups import ShardingGroups
from smdistributed.modelparallel.torch.sharding.unit import Unit


class PipelineShards(ShardedModel):
    """The sharded parameters of a partition, gathered for whole steps.

    Args:
        groups: As for :class:`ShardedModel`.
        slice_groups: As for :class:`ShardedModel`.
        cfg: The configuration.
    """

    def __init__(self, groups: ShardingGroups, slice_groups: ShardingGroups, cfg: Config) -> None:
        super().__init__(groups, slice_groups, cfg)
        if cfg.sdp_max_live_parameters != DEFAULTS["sdp_max_live_parameters"]:
            warn_once(
                "`sdp_max_live_parameters` limits nothing with several partitions: the parameters of a partition are "
                "whole during a step"
            )
        self._whole: dict[Unit, list[nn.Parameter]] = {}
        self._is_entered = False

    def attach(self, needs: dict[nn.Module, list[Unit]]) -> None:
        """Do nothing: units are gathered for steps, not for modules."""
        del needs

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Return a context for a forward of the model, whose parameters are whole already."""
        yield

    @torch.no_grad()
    def enter_step(self) -> None:
        """Replace the modules' shards by the whole parameters, unless that has been done."""
        if self._is_entered:
            return
        self._is_entered = True
        with errors.translated(CLASSES):
            # The next unit is gathered while this one is assembled.
            for at, unit in enumerate(self.units):
                for each in self.units[at : at + 2]:
                    each.begin_gather()
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
        """Replace the modules' whole parameters by the shards, and free the whole parameters."""
        if not self._is_entered:
            return
        self._is_entered = False
        for unit, whole in self._whole.items():
            unit.uninstall()
            for each in whole:
                each.grad = None
                # One element, expanded to the shape (PSH-1).
                each.data = each.data.new_empty(1).expand(each.shape)

    def finish_backward(self) -> None:
        """Reduce the gradients of the step to their shards."""
        for unit, whole in self._whole.items():
            if unit.is_trained and self._is_entered:
                self._reduce(unit, [each.grad for each in whole])
                for each in whole:
                    each.grad = None
        super().finish_backward()
