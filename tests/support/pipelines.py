"""Compares steps of a pipeline with one process: every output, gradient, parameter and buffer."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from support.models import MODELS, Case

#: Largest difference that is allowed, relative to the largest element of a tensor.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}


class Worst:
    """Keeps the largest difference so far and its place."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance, self.difference, self.where = tolerance, 0.0, ""

    def look(self, where: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
        """Compares two tensors and records the difference."""
        assert ours.shape == expected.shape, f"{where}: {ours.shape} instead of {expected.shape}"
        if not expected.numel():
            return
        scale = max(expected.abs().max().item(), 1e-3)
        difference = (ours.double() - expected.double()).abs().max().item() / scale
        # Written as `not <=` so that NaN counts as a difference.
        if not difference <= self.difference:
            self.difference, self.where = difference, where

    def check(self, case: str) -> None:
        """Fails if the largest difference exceeds the tolerance."""
        assert self.difference <= self.tolerance, f"{case}: {self.where} is off by {self.difference:.1e}"


def _place(case: Case, partitions: int, looped: bool) -> None:
    """Assigns consecutive pieces to each partition; with `looped`, two runs of consecutive pieces."""
    rows = partitions * (2 if looped and len(case.pieces) >= 2 * partitions else 1)
    for place, piece in enumerate(case.pieces):
        place = case.together[0] if place in case.together else place
        smp.set_partition(piece, place * rows // len(case.pieces) % partitions)


def _batch(case: Case, number: int) -> list[torch.Tensor]:
    dtype = torch.get_default_dtype()
    return [each.to(dtype) if each.is_floating_point() else each for each in case.batch(number)]


def run_case(name: str, partitions: int, microbatches: int, pipeline: str, looped: bool, steps: int) -> float:
    """Runs steps of one model in PyTorch's default dtype and compares them; returns the largest difference.

    The schedule ``zero_bubble_2`` is ``zero_bubble`` with twice as many active microbatches as partitions.
    """
    schedule = pipeline.removesuffix("_2")
    config = {"partitions": partitions, "microbatches": microbatches, "pipeline": schedule}
    if schedule != pipeline:
        config["active_microbatches"] = 2 * partitions
    smp.init({**config, "auto_partition": False, "default_partition": 0})
    worst = Worst(TOLERANCES[torch.get_default_dtype()])
    torch.manual_seed(7)
    case = MODELS[name]()
    alone = copy.deepcopy(case.model) if name != "checkpointed" else MODELS[name]().model
    alone.load_state_dict(case.model.state_dict())
    _place(case, partitions, looped)
    model = smp.DistributedModel(case.model)
    # SGD with momentum is linear in the gradients. Adam would turn the rounding errors of a gradient that is 0 into
    # full steps.
    optimizers = [
        smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)),
        torch.optim.SGD(alone.parameters(), lr=0.02, momentum=0.9),
    ]

    @smp.step
    def step(model: nn.Module, *batch: torch.Tensor) -> Any:
        outputs = case.body(model, *batch)
        model.backward(outputs[0])
        return outputs

    for number in range(steps):
        batch = _batch(case, number)
        torch.manual_seed(number)
        outputs = step(model, *batch)
        torch.manual_seed(number)
        expected = []
        for piece in zip(*(each.chunk(microbatches) for each in batch), strict=True):
            expected.append(case.body(alone, *piece))
            (expected[-1][0] / microbatches).backward()
        for place, column in enumerate(zip(*expected, strict=True)):
            for microbatch, (ours, theirs) in enumerate(zip(outputs[place], column, strict=True)):
                if not isinstance(theirs, torch.Tensor):
                    ours, theirs = torch.tensor(ours), torch.tensor(theirs)
                worst.look(f"step {number}: output {place} of microbatch {microbatch}", ours, theirs)
        reference = dict(alone.named_parameters())
        for path, parameter in model.local_named_parameters():
            theirs = reference[path].grad
            assert (parameter.grad is None) == (theirs is None), f"{name}, step {number}: gradient of `{path}`"
            if theirs is not None:
                worst.look(f"step {number}: gradient of `{path}`", parameter.grad, theirs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for path, parameter in model.local_named_parameters():
        worst.look(f"`{path}` after {steps} steps", parameter, reference[path])
    buffers = dict(alone.named_buffers())
    for path, buffer in model.local_named_buffers():
        worst.look(f"buffer `{path}`", buffer, buffers[path])
    worst.check(f"{name}, {partitions} partitions, {microbatches} microbatches, {pipeline}{', looped' * looped}")
    smp.shutdown()
    return worst.difference


def run_table(
    dtype: torch.dtype, partitions: int, rows: list[tuple[int, str, bool]], names: list[str] | None, steps: int
) -> dict[str, float]:
    """Runs every model with each row (microbatches, schedule, looped); returns the largest difference of each model."""
    torch.set_default_dtype(dtype)
    found: dict[str, float] = {}
    start = time.monotonic()
    for name in names or MODELS:
        for microbatches, pipeline, looped in rows:
            difference = run_case(name, partitions, microbatches, pipeline, looped, steps)
            found[name] = max(found.get(name, 0.0), difference)
    print(f"{len(found) * len(rows)} rows in {time.monotonic() - start:.0f} s", flush=True)
    return found
