"""Partitions of layers, variables and operations: the core decides, and a partition file can store the decision."""

from __future__ import annotations

from dataclasses import dataclass, field

from smdistributed._common import errors
from smdistributed.modelparallel import partition_file
from smdistributed.modelparallel.config import Config
from smdistributed.modelparallel.exceptions import CLASSES, SMPPartitionError
from smdistributed.modelparallel.tensorflow.partitioning.delayed_initialization import handle_of
from smdistributed.modelparallel.tensorflow.tracing.operations import Operations
from smdistributed.modelparallel.tensorflow.tracing.recording import Trace

_CLASSES = {**CLASSES, "invalid_argument": SMPPartitionError}


@dataclass
class PartitionAssignment:
    """The partitions of layers and variables.

    Attributes:
        layers: Partitions of layers with variables, by the layers' ids.
        variables: Partitions of variables, by the ids of their handles; other variables are on every rank.
    """

    layers: dict[int, int] = field(default_factory=dict)
    variables: dict[int, int] = field(default_factory=dict)


def decide(trace: Trace, operations: Operations, config: Config) -> PartitionAssignment:
    """Assign the layers that were called to partitions, unless the script has placed all operations.

    Raises:
        SMPPartitionError: The layers cannot be partitioned in this way.
    """
    if config.load_partition and config.partition_file:
        paths = partition_file.read(config.partition_file, config.partitions)
        unknown = sorted(set(paths) - set(trace.paths))
        if unknown:
            raise SMPPartitionError(
                f"`{config.partition_file}` names layers that the model does not have: {', '.join(unknown[:5])}"
            )
    elif config.auto_partition:
        paths = _automatic(trace, operations, config)
    else:
        return PartitionAssignment()
    named = zip(trace.units, trace.paths, strict=True)
    return PartitionAssignment({id(layer): paths[path] for layer, path in named if path in paths})


def save(trace: Trace, assignment: PartitionAssignment, config: Config) -> None:
    """Write the assignment to the partition file of the configuration."""
    if not config.partition_file or config.load_partition:
        return
    found = {}
    for layer, path in zip(trace.units, trace.paths, strict=True):
        of_variables = (assignment.variables.get(id(handle_of(each))) for each in layer.variables)
        places = [assignment.layers.get(id(layer)), *of_variables]
        place = next((each for each in places if each is not None), None)
        if place is not None:
            found[path] = place
    partition_file.write(config.partition_file, found)


def _automatic(trace: Trace, operations: Operations, config: Config) -> dict[str, int]:
    with errors.translated(_CLASSES):
        partitions, table = operations.core.partition_layers(
            trace.paths,
            partitions=config.partitions,
            memory_weight=config.memory_weight,
            microbatches=config.microbatches,
            active_microbatches=config.active_microbatches,
            schedule=config.pipeline,
        )
    partition_file.log_table(table)
    found = zip(trace.paths, partitions, strict=True)
    return {path: partition for path, partition in found if partition is not None}


def place(trace: Trace, operations: Operations, assignment: PartitionAssignment, config: Config) -> object:
    """Return the core's placement of every operation; add the partitions of variables to ``assignment``.

    Raises:
        SMPPartitionError: a variable would be on two partitions.
    """
    by_script = not config.auto_partition and not config.load_partition
    with errors.translated(_CLASSES):
        placement = operations.core.place(
            [assignment.layers.get(id(layer)) for layer in trace.units],
            config.default_partition if by_script else None,
            [assignment.variables.get(id(handle)) for handle in operations.handles],
        )
    for handle, partition in zip(operations.handles, placement.variables(), strict=True):
        if partition is not None:
            assignment.variables[id(handle)] = partition
    return placement
