"""Hugging Face's accelerate, which divides data over all processes and gathers results from them.

Ranks of a pipeline need the same data, so an ``Accelerator`` gets the size and the rank of data parallelism instead.
The Trainer of transformers has one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from smdistributed._common import import_hooks
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.torch.communication import allgather
from smdistributed.modelparallel.torch.state import state

_MODULE = "accelerate.accelerator"
#: The label of tokens that the Trainer adds to make batches equally long.
_PADDING = -100
#: Classes that were adapted.
_adapted: set[type] = set()


def install() -> None:
    """Adapt ``Accelerator``, now or when it is imported."""
    if hasattr(sys.modules.get(_MODULE), "Accelerator"):
        _adapt()
    import_hooks.after_import(_MODULE, _adapt)


def _adapt() -> None:
    kind: Any = vars(sys.modules[_MODULE])["Accelerator"]
    if kind in _adapted:
        return
    _adapted.add(kind)
    initialize = kind.__init__

    @functools.wraps(initialize)
    def initialize_and_divide(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if state.initialized:
            _divide_data(self)

    kind.__init__ = initialize_and_divide


def _divide_data(accelerator: Any) -> None:
    """Make accelerate divide data over the ranks that train with different data, and gather results from them."""
    name = "rdp" if state.cfg.prescaled_batch else "dp"
    module: Any = sys.modules["accelerate.state"]
    for each in (module.PartialState(), accelerator.state):
        each.num_processes, each.process_index = len(state.groups.members[name]), state.groups.rank_in(name)
        # accelerate must not communicate itself, since it knows the group of all ranks only.
        each.distributed_type = module.DistributedType.NO
    group = CommGroup[f"{name.upper()}_GROUP"]
    accelerator.gather = functools.partial(_gather, group)
    accelerator.gather_for_metrics = functools.partial(_gather_for_metrics, accelerator, group)


def _gather(group: CommGroup, tensor: Any) -> Any:
    """Gather tensors in any structure, as ``Accelerator.gather``."""
    return _concatenated(allgather(tensor, group))


def _gather_for_metrics(accelerator: Any, group: CommGroup, input_data: Any, use_gather_object: bool = False) -> Any:
    """Gather results, as ``Accelerator.gather_for_metrics``: without samples that fill up the last batch."""
    del use_gather_object
    whole = _gather(group, input_data)
    gradient_state = accelerator.gradient_state
    if gradient_state.end_of_dataloader and gradient_state.remainder > 0:
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[: gradient_state.remainder], whole)
    return whole


def _concatenated(parts: Sequence[Any]) -> Any:
    """Concatenate the results of ranks, which have the same structure."""
    leaves, structure = pytree.tree_flatten(parts[0])
    others = [pytree.tree_leaves(part) for part in parts[1:]]
    columns = [_joined(column) for column in zip(leaves, *others, strict=True)]
    return pytree.tree_unflatten(columns, structure)


def _joined(tensors: Sequence[Any]) -> torch.Tensor:
    if not all(isinstance(each, torch.Tensor) for each in tensors):
        raise TypeError(f"results to gather are tensors in lists, tuples and dictionaries: got {type(tensors[0])}")
    rows = [torch.atleast_1d(each) for each in tensors]
    if rows[0].dim() > 1:
        # Batches of ranks may have sequences of different lengths.
        length = max(each.shape[1] for each in rows)
        rows = [
            functional.pad(each, (0, 0) * (each.dim() - 2) + (0, length - each.shape[1]), value=_PADDING)
            for each in rows
        ]
    return torch.cat([each.to(rows[0].device) for each in rows])
