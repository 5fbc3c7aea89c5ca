"""Float32 copies of 16-bit parameters, which the wrapped optimizer updates.

- MAS-1: a step is skipped on all ranks of the job, or on none: each rank contributes whether it found a gradient that
  is not finite.
- MAS-2: a 16-bit parameter is its master weight, rounded. Code that changes the parameter by other means calls
  :meth:`MasterWeights.refresh`, which keeps master weights that still round to the parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.torch import distributed as dist
from smdistributed.modelparallel.exceptions import CLASSES
from smdistributed.modelparallel.torch.device import current_device
from smdistributed.modelparallel.torch.optimizers import steps_here
from smdistributed.modelparallel.torch.state import state

_HALF = (torch.float16, torch.bfloat16)


class MasterWeights:
    """Master weights of one optimizer, which replace its parameters.

    Args:
        optimizer: The wrapped optimizer. Its 16-bit parameters are replaced.
        scale: The factor of the losses.
        checks: Whether gradients are checked for overflow, as with float16.

    Attributes:
        scale: The factor of the losses.
        sources: For each master weight by id, the 16-bit parameter of the model or of its shard.
        groups: 16-bit parameters of each group.
        flat: The concatenated master weights of each group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scale: _core.LossScale, checks: bool) -> None:
        self._optimizer, self.scale, self._checks = optimizer, scale, checks
        self.overflow = False
        self.sources: dict[int, torch.Tensor] = {}
        self.groups: list[list[torch.Tensor]] = []
        self.flat: list[torch.Tensor] = []
        #: The concatenated gradients of the master weights, in the layout of `flat`.
        self._gradients: list[torch.Tensor] = []
        self._rows: list[list[tuple[torch.Tensor, nn.Parameter, torch.Tensor]]] = []
        self._others: list[torch.Tensor] = []
        self._is_unscaled = False
        #: A state of the scale that was loaded when gradients of the current step existed already.
        self._next_scale: tuple[float, int, int] | None = None
        self.adopt()

    def adopt(self) -> None:
        """Create master weights for 16-bit parameters in groups that have none yet."""
        for group in self._optimizer.param_groups[len(self.groups) :]:
            halves = [each for each in group["params"] if each.dtype in _HALF]
            total = sum(each.numel() for each in halves)
            device = halves[0].device if halves else current_device()
            flat = torch.zeros(total, dtype=torch.float32, device=device)
            gradients = torch.zeros_like(flat)
            rows, begin = [], 0
            masters: dict[int, nn.Parameter] = {}
            for half in halves:
                end = begin + half.numel()
                master = nn.Parameter(flat[begin:end].view(half.shape), requires_grad=half.requires_grad)
                with torch.no_grad():
                    master.copy_(half)
                masters[id(half)] = master
                self.sources[id(master)] = half
                rows.append((half, master, gradients[begin:end].view(half.shape)))
                if half in self._optimizer.state:
                    self._optimizer.state[master] = self._optimizer.state.pop(half)
                begin = end
            self._others += [each for each in group["params"] if id(each) not in masters]
            group["params"] = [masters.get(id(each), each) for each in group["params"]]
            self.groups.append(halves)
            self.flat.append(flat)
            self._gradients.append(gradients)
            self._rows.append(rows)

    @torch.no_grad()
    def refresh(self) -> None:
        """Update master weights from 16-bit parameters that were changed, for example by loading a state."""
        for half, master, _ in self._all_rows():
            changed = master.to(half.dtype) != half
            master.copy_(torch.where(changed, half.to(torch.float32), master))

    def named(self, names: dict[int, str]) -> dict[str, torch.Tensor]:
        """Return master weights by the names of their 16-bit parameters."""
        return {names[id(master)]: master.detach() for _, master, _ in self._all_rows()}

    @torch.no_grad()
    def publish(self) -> None:
        """Set the 16-bit parameters to their master weights, rounded."""
        for half, master, _ in self._all_rows():
            half.copy_(master)

    def _all_rows(self) -> list[tuple[torch.Tensor, nn.Parameter, torch.Tensor]]:
        return [row for rows in self._rows for row in rows]

    @torch.no_grad()
    def unscale(self) -> bool:
        """Move gradients to the master weights and divide them by the scale; once in each step.

        All ranks of the job call it.

        Returns:
            Whether a gradient on any rank is not finite.
        """
        if self._is_unscaled:
            return self.overflow
        for half, master, gradient in self._all_rows():
            if half.grad is None:
                # Set to zero, because the check and the norm use the whole concatenated tensor.
                gradient.zero_()
                master.grad = None
            else:
                gradient.copy_(half.grad)
                master.grad = gradient
        factor = 1.0 / self.scale.scale
        rows = [*self._gradients, *(each.grad for each in self._others if each.grad is not None)]
        if factor != 1.0:
            for row in rows:
                row.mul_(factor)
        self.overflow = self._checks and self._has_overflow(rows)
        self._is_unscaled = True
        return self.overflow

    def _has_overflow(self, rows: list[torch.Tensor]) -> bool:
        found = torch.zeros(1, dtype=torch.float32, device=current_device())
        for row in rows:
            if row.numel():
                largest = torch.linalg.vector_norm(row, torch.inf)
                found = torch.maximum(found, (~largest.isfinite()).to(found))
        if state.groups.topology.size > 1:
            with errors.translated(CLASSES):
                dist.all_reduce(found, ReduceOp.MAX, state.groups.objects("world"))
        return bool(found)

    def gradients(self, sources: set[int]) -> list[torch.Tensor]:
        """Return the gradients of these parameters (ids) that the wrapped optimizer uses; after :meth:`unscale`."""
        masters = [(half, master) for half, master, _ in self._all_rows()]
        pairs = [*masters, *((each, each) for each in self._others)]
        return [own.grad for source, own in pairs if id(source) in sources and own.grad is not None]

    def step(self) -> Any:
        """Update master weights and the 16-bit parameters, unless gradients overflowed."""
        overflow = self.unscale()
        result = None
        if not overflow:
            if steps_here(self._optimizer):
                result = self._optimizer.step()
            self.publish()
        self._update_scale(overflow)
        self._is_unscaled = False
        return result

    def _update_scale(self, overflow: bool) -> None:
        used = self.scale.scale
        if self._next_scale is not None:
            self.scale.restore(*self._next_scale)
            self._next_scale = None
            if overflow and used > self.scale.scale:
                # The loaded scale is smaller, so this overflow says nothing about it.
                return
        self.scale.update(overflow)

    def scale_state(self) -> tuple[float, int, int]:
        """Return the state of the scale for a checkpoint."""
        return self.scale.state() if self._next_scale is None else self._next_scale

    def load_scale(self, found: tuple[float, int, int], has_gradients: bool) -> None:
        """Continue from a state of the scale.

        Args:
            found: The result of :meth:`scale_state`.
            has_gradients: Whether gradients of the current step exist. They have been multiplied by the present scale,
                which then stays until the step has ended.
        """
        present = self.scale.state()
        self.scale.restore(*found)
        self._next_scale = None
        if has_gradients and self.scale.scale != present[0]:
            self._next_scale = self.scale.state()
            self.scale.restore(*present)

    def forget_gradients(self) -> None:
        """Begin a new step: unscaled gradients are not used any more."""
        self._is_unscaled = False
        for _, master, _ in self._all_rows():
            master.grad = None
