"""Assignment of modules to partitions: by the script, from a file, or by the core from a trace of the model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from smdistributed import _core
from smdistributed.modelparallel import partition_file
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.torch import communication
from smdistributed.modelparallel.torch.device import current_device
from smdistributed.modelparallel.torch.partitioning import cost_trace
from smdistributed.modelparallel.torch.runtime.fallbacks import script_level
from smdistributed.modelparallel.torch.state import state

#: A module that cannot be divided is reported if this share of a partition, or more, cannot move to another one.
_REPORTED_SHARE = 1 / 4


def auto_partition(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    config: Any,
    manual: dict[str, int],
    *,
    measure_times: bool = False,
    memory_bytes: int | None = None,
) -> dict[str, int]:
    """Return the partition of every module.

    All ranks get the same result if they pass the same model and the same shapes, unless times are measured: then one
    rank must decide for all.

    Args:
        module: The model.
        args: The positional arguments of one microbatch.
        kwargs: The keyword arguments of one microbatch.
        config: The configuration.
        manual: Partitions that the script chose, by module path. They apply if `auto_partition` is off; otherwise the
            caller applies them with :func:`with_manual`.
        measure_times: Whether measured times are balanced instead of estimates.
        memory_bytes: The memory of each rank's device for the model; if every partition fits, only time is balanced.

    Returns:
        The partition by module path (empty for the model itself).

    Raises:
        ValueError: Modules that share a parameter are on different partitions, or a partition does not exist.
    """
    partitions = config.partitions
    if getattr(config, "load_partition", None) and getattr(config, "partition_file", None):
        return load(module, config.partition_file, partitions)
    if not config.auto_partition:
        return by_hand(module, manual, config.default_partition, partitions)
    if partitions == 1:
        return {path: 0 for path, _ in module.named_modules()}
    return _automatic(module, args, kwargs, config, manual, measure_times, memory_bytes)


def with_manual(module: nn.Module, found: Mapping[str, int], manual: Mapping[str, int], config: Any) -> dict[str, int]:
    """Return the result of :func:`auto_partition` with the script's partitions, which also apply to submodules.

    If the automatic partition leaves partitions without parameters, warn.

    Args:
        module: The model.
        found: The result of :func:`auto_partition`.
        manual: Partitions that the script chose, by module path.
        config: The configuration.

    Returns:
        The partition by module path.
    """
    assignment = {path: index for path, index in found.items() if _nearest(path, manual) is None} | dict(manual)
    if config.auto_partition and not (config.load_partition and config.partition_file):
        homes = {
            _nearest(path, assignment) or 0
            for path, part in module.named_modules()
            if any(parameter is not None for parameter in part._parameters.values())
        }
        empty = [index for index in range(config.partitions) if index not in homes]
        if homes and empty:
            which = f"partition {empty[0]}" if len(empty) == 1 else f"partitions {', '.join(map(str, empty))}"
            warnings.warn(
                f"the automatic partition leaves {which} of {config.partitions} without parameters, so their ranks "
                "have little or nothing to compute: use fewer partitions, or assign modules with `smp.set_partition`",
                stacklevel=script_level(),
            )
    return assignment


def _nearest(path: str, assignment: Mapping[str, int]) -> int | None:
    """Return the partition of the module with this path, or of its nearest ancestor that has one."""
    while path:
        if path in assignment:
            return assignment[path]
        path = path.rpartition(".")[0]
    return assignment.get("")


def device_memory() -> int | None:
    """Return the number of bytes that every rank's device has for its partition. Collective.

    It is ``None`` if the configuration sets the weight of memory, and on CPUs, whose memory the ranks of a host
    share.
    """
    device, cfg = current_device(), state.cfg
    if device.type != "cuda" or cfg.is_given("memory_weight") or cfg.is_given("optimize"):
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    # A reserve for memory that the trace does not count: kernel workspaces, fragmentation, errors of the estimate.
    return int(min(communication.allgather(total, CommGroup.WORLD)) * 0.6)


def by_hand(module: nn.Module, manual: dict[str, int], default: int, partitions: int) -> dict[str, int]:
    """Return the script's partitions; a module without one has that of its nearest ancestor, or the default."""
    found: dict[str, int] = {}
    for path, _ in module.named_modules():
        above = path.rpartition(".")[0]
        found[path] = manual.get(path, found[above] if path else default)
        if not 0 <= found[path] < partitions:
            raise ValueError(f"module `{path}` is put on partition {found[path]}, but there are {partitions}")
    tree = cost_trace.structure(module)
    for tie in tree.ties:
        names = [tree.modules[at].path for at in tie]
        places = {name: found[name] for name in names}
        if len(set(places.values())) > 1:
            text = ", ".join(f"`{name}` on {place}" for name, place in places.items())
            raise ValueError(f"modules that share a parameter, or are one unit, lie on different partitions: {text}")
    return found


def _automatic(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    config: Any,
    manual: Mapping[str, int],
    measure_times: bool,
    memory_bytes: int | None,
) -> dict[str, int]:
    tree = None
    if not config.skip_tracing:
        try:
            tree = cost_trace.trace(module, args, kwargs, measure_times=measure_times)
        except cost_trace.TraceError as error:
            warnings.warn(
                f"the model could not be traced, so it is partitioned by the sizes of parameters alone: {error}",
                stacklevel=2,
            )
    tree = tree or cost_trace.structure(module)
    _report_undivided(tree, config.partitions, manual)
    tree.place_ties()
    assignment, table, _ = _core.partition_modules(
        tree.modules,
        tree.values,
        tree.tasks,
        tree.ties,
        partitions=config.partitions,
        memory_weight=config.memory_weight,
        microbatches=config.microbatches,
        active_microbatches=config.active_microbatches,
        schedule=config.pipeline,
        memory_bytes=memory_bytes,
    )
    partition_file.log_table(table)
    return {part.path: partition for part, partition in zip(tree.modules, assignment, strict=True)}


def _report_undivided(tree: cost_trace.Trace, partitions: int, manual: Mapping[str, int]) -> None:
    """Count large modules that the partition does not divide, and warn of the largest.

    A small module does no harm, nor does one whose parameters are almost all its own or those of one submodule. Where
    the script has chosen a partition around or inside of the module, the script decides.
    """
    total = sum(module.parameter_bytes for module in tree.modules)
    rows = []
    for at, inside, movable in tree.undivided_bytes() if tree.undivided else ():
        path = tree.modules[at].path
        below = f"{path}." if path else ""
        is_chosen = _nearest(path, manual) is not None or any(each.startswith(below) for each in manual)
        if movable * partitions > total * _REPORTED_SHARE and not is_chosen:
            _core.note_fallback("undivided_module")
            rows.append((path, inside, tree.undivided[at]))
    if not rows:
        return
    path, inside, reason = rows[0]
    others = f" ({len(rows) - 1} more, too)" if len(rows) > 1 else ""
    warnings.warn(
        f"{f'`{path}`' if path else 'the model'}, with {inside / total:.0%} of the parameters, is put on one partition "
        f"as a whole{others}: its own forward failed on tensors without values, with {reason}. Move reads of values, "
        "such as `.item()` and `if tensor:`, out of this forward or into a small submodule; or divide the module with "
        "`smp.set_partition` or `skip_tracing: true`: then a read of values that the model computes makes all "
        "partitions wait",
        stacklevel=script_level(),
    )


def load(module: nn.Module, file: str, partitions: int) -> dict[str, int]:
    """Read a partition file; modules that it does not contain are on the partition of their parent."""
    listed = partition_file.read(file, partitions)
    paths = {path for path, _ in module.named_modules()}
    unknown = sorted(set(listed) - paths)
    if unknown:
        raise ValueError(f"`{file}` names modules that the model does not have: {', '.join(unknown[:5])}")
    return by_hand(module, listed, 0, partitions)
