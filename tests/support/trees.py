"""Cost trees of the models in `models.py`, for the core's tests of partitioning.

PYTHONPATH=python:tests python -m support.trees > rust-core/src/partition/models.json
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.partitioning import cost_trace
from support.models import MODELS, Case


def call_of(case: Case) -> tuple[Any, Any]:
    """Returns the arguments with which a step calls the model."""
    calls = []
    hook = case.model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    case.body(case.model, *(each[:4] for each in case.batch(0)))
    hook.remove()
    return calls[0]


def tree_of(model: nn.Module, args: Any, kwargs: Any) -> cost_trace.Trace:
    """Traces the model's costs. A model that cannot be traced gets the tree of its parameters."""
    try:
        return cost_trace.trace(model, args, kwargs)
    except cost_trace.TraceError:
        return cost_trace.structure(model)


def main() -> None:
    """Prints the trees as JSON."""
    torch.set_default_dtype(torch.float64)
    lines = []
    for name, make in MODELS.items():
        torch.manual_seed(7)
        case = make()
        tree = tree_of(case.model, *call_of(case))
        modules = [list(vars(module).values()) for module in tree.modules]
        rest = {"values": tree.values, "tasks": tree.tasks, "ties": tree.ties}
        lines.append(json.dumps({"name": name, "modules": modules, **rest}))
    print("[\n" + ",\n".join(lines) + "\n]")


if __name__ == "__main__":
    main()
