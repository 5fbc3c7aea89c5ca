"""Compares steps of Hugging Face models on several partitions with one process, and lists the calls that ran
synchronously.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from support import huggingface
from support.pipelines import Worst

#: Largest difference that is allowed, relative to the largest element of a tensor.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
MICROBATCHES = 4


def _outputs(output: Any) -> tuple[torch.Tensor, ...]:
    logits = next((output[key] for key in ("logits", "prediction_logits") if key in output), None)
    return (output["loss"],) if logits is None else (output["loss"], logits)


def run_model(
    model: nn.Module,
    batch: Callable[[int], dict[str, torch.Tensor]],
    schedule: str,
    partitions: int,
    steps: int = 2,
    place: Callable[[nn.Module], None] | None = None,
    **config: Any,
) -> dict[str, Any]:
    """Runs steps of `model` on partitions and in one process with the keyword arguments of `batch(step)`, and compares
    them.

    Args:
        model: Returns a dictionary with a loss.
        batch: Returns the keyword arguments of a step.
        schedule: Schedule of the pipeline.
        partitions: Number of partitions.
        steps: Number of steps.
        place: Assigns modules to partitions by hand.
        config: Further entries of the configuration.

    Returns:
        The largest difference and its place, the calls that ran synchronously, and the partitions that have modules.
    """
    smp.init({"partitions": partitions, "microbatches": MICROBATCHES, "pipeline": schedule, **config})
    worst = Worst(TOLERANCES[torch.get_default_dtype()])
    alone = copy.deepcopy(model)
    if place is not None:
        place(model)
    divided = smp.DistributedModel(model)
    optimizers = [
        smp.DistributedOptimizer(torch.optim.SGD(divided.parameters(), lr=0.02, momentum=0.9)),
        torch.optim.SGD(alone.parameters(), lr=0.02, momentum=0.9),
    ]

    @smp.step
    def step(model: nn.Module, arguments: dict[str, torch.Tensor]) -> Any:
        outputs = _outputs(model(**arguments))
        model.backward(outputs[0])
        return outputs

    for number in range(steps):
        arguments = batch(number)
        outputs = step(divided, arguments)
        pieces = {key: value.chunk(MICROBATCHES) for key, value in arguments.items()}
        for place in range(MICROBATCHES):
            expected = _outputs(alone(**{key: value[place] for key, value in pieces.items()}))
            (expected[0] / MICROBATCHES).backward()
            for index, theirs in enumerate(expected):
                worst.look(f"step {number}: output {index} of microbatch {place}", outputs[index][place], theirs)
        reference = dict(alone.named_parameters())
        for path, parameter in divided.local_named_parameters():
            theirs = reference[path].grad
            assert (parameter.grad is None) == (theirs is None), f"step {number}: gradient of `{path}`"
            if theirs is not None:
                worst.look(f"step {number}: gradient of `{path}`", parameter.grad, theirs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for path, parameter in divided.local_named_parameters():
        worst.look(f"`{path}` after {steps} steps", parameter, reference[path])
    used = sorted({divided.partition_of(path) for path, _ in divided.get_module().named_modules() if path})
    synchronous = dict(divided.pipeline.fallbacks.counts)
    smp.shutdown()
    return {"difference": worst.difference, "where": worst.where, "synchronous": synchronous, "partitions": used}


@contextlib.contextmanager
def float32_is_float64() -> Iterator[None]:
    """Makes casts to float32 inside a model casts to float64."""
    names = {"float32": torch.float64, "float": torch.float64}
    before = {name: getattr(torch, name) for name in names} | {"cast": torch.Tensor.float}
    try:
        for name, dtype in names.items():
            setattr(torch, name, dtype)
        torch.Tensor.float = torch.Tensor.double
        yield
    finally:
        torch.Tensor.float = before.pop("cast")
        for name, dtype in before.items():
            setattr(torch, name, dtype)


def run_rows(
    name: str, dtype: str, partitions: int, schedules: list[str], steps: int = 2, skip_tracing: bool = True
) -> list[dict[str, Any]]:
    """Runs one architecture with each of the schedules."""
    torch.set_default_dtype(getattr(torch, dtype))
    rows = []
    is_widened = dtype == "float64" and name in huggingface.FLOAT32_INSIDE
    for schedule in schedules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(7)
            model = huggingface.make(name)
        with float32_is_float64() if is_widened else contextlib.nullcontext():
            rows.append(
                run_model(
                    model,
                    lambda number: huggingface.batch(name, number),
                    schedule,
                    partitions,
                    steps,
                    # With tracing, partitioning by cost may leave a partition of so small a model empty. Without it,
                    # parameters are spread.
                    skip_tracing=skip_tracing,
                )
            )
    return rows
