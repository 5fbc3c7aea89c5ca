"""Compares one step function on several partitions with the same function in one process: results, gradients and
buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

Body = Callable[..., Any]


def leaves(value: Any) -> list[torch.Tensor]:
    """Flattens a result into its tensors; numbers become tensors."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [torch.tensor(float(value))] if isinstance(value, int | float) else []


def compare(
    build: Callable[[], nn.Module],
    body: Body,
    *,
    partitions: int = 2,
    microbatches: int = 4,
    steps: int = 2,
    width: int = 6,
    schedule: str = "interleaved",
    tolerance: float = 1e-10,
) -> None:
    """Runs ``body(model, backward, x, y)`` in float64 as a step on the partitions, with ``backward`` being
    ``model.backward``, and on a copy of the model in plain PyTorch; compares both.

    Args:
        build: Makes the model and sets its partitions.
        body: Called with the model, a function that runs the backward of a loss, and the two tensors of a microbatch.

    Raises:
        AssertionError: A result, a gradient or a buffer differs; the message names it.
    """
    torch.set_default_dtype(torch.float64)
    smp.init(
        {"partitions": partitions, "microbatches": microbatches, "pipeline": schedule, "auto_partition": False,
         "default_partition": 0}
    )  # fmt: skip
    try:
        torch.manual_seed(3)
        module = build()
        alone = copy.deepcopy(module)
        model = smp.DistributedModel(module)

        @smp.step
        def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
            return body(model, model.backward, x, y)

        generator = torch.Generator().manual_seed(11)
        for number in range(steps):
            x, y = (torch.randn(microbatches * 3, width, generator=generator) for _ in range(2))
            model.zero_grad(), alone.zero_grad()
            ours = step(model, x.clone(), y.clone())
            theirs = []
            for pieces in zip(x.clone().chunk(microbatches), y.clone().chunk(microbatches), strict=True):
                theirs.append(body(alone, lambda loss: (loss / microbatches).backward(), *pieces))
            expected = [leaves(each) for each in theirs]
            found = [leaves(structure_of(ours, each)) for each in range(microbatches)]
            for microbatch, (a, b) in enumerate(zip(found, expected, strict=True)):
                assert len(a) == len(b), f"step {number}, microbatch {microbatch}: {len(a)} results instead of {len(b)}"
                for place, (left, right) in enumerate(zip(a, b, strict=True)):
                    _check(f"step {number}, microbatch {microbatch}, result {place}", left, right.detach(), tolerance)
            reference = dict(alone.named_parameters())
            for path, parameter in model.local_named_parameters():
                wanted = reference[path].grad
                assert (parameter.grad is None) == (wanted is None), f"step {number}: gradient of `{path}`"
                if wanted is not None:
                    _check(f"step {number}, gradient of `{path}`", parameter.grad, wanted, tolerance)
            buffers = dict(alone.named_buffers())
            for path, buffer in model.local_named_buffers():
                _check(f"step {number}, buffer `{path}`", buffer, buffers[path], tolerance)
    finally:
        smp.shutdown()


def structure_of(output: Any, microbatch: int) -> Any:
    """Returns the part of the step's result that the body returned for one microbatch."""
    if isinstance(output, smp.StepOutput):
        return output[microbatch]
    if isinstance(output, dict):
        return {key: structure_of(item, microbatch) for key, item in output.items()}
    if isinstance(output, tuple):
        return [structure_of(item, microbatch) for item in output]
    if isinstance(output, list):
        return output[microbatch] if not output or not isinstance(output[0], smp.StepOutput) else [
            structure_of(item, microbatch) for item in output
        ]  # fmt: skip
    return output


def _check(where: str, ours: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert ours.shape == expected.shape, f"{where}: {tuple(ours.shape)} instead of {tuple(expected.shape)}"
    scale = max(expected.abs().max().item(), 1e-3) if expected.numel() else 1.0
    difference = (ours - expected).abs().max().item() / scale if expected.numel() else 0.0
    assert difference <= tolerance, f"{where} is off by {difference:.1e}"
