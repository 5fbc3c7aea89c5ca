"""Where the layers, variables and operations of a step are: the core decides, and files keep it."""

from __future__ import annotations

from dataclasses import dataclass, field

from smdistributed._common import errors
from smdistributed.modelparallel import partition_file
from smdistributed.modelparallel.config import Config
from smdistributed.modelparallel.exceptions import CLASSES, SMPPartitionError
from smdistributed.modelparallel.tensorflow.partition.delayed_initialization import handle_of
from smdistributed.modelparallel.tensorflow.tracing.operations import Operations
from smdistributed.modelparallel.tensorflow.tracing.recording import Trace

_CLASSES = CLASSES | {"invalid_argument": SMPPartitionError}


@dataclass
class Homes:
    """What was decided when the model was divided.

    Attributes:
        layers: Partitions of layers with variables, by identity.
        variables: Partitions of variables, by the identity of their handles; others are on every rank.
    """

    layers: dict[int, int] = field(default_factory=dict)
    variables: dict[int, int] = field(default_factory=dict)


def decide(trace: Trace, operations: Operations, config: Config) -> Homes:
    """Divides the layers that were called, unless the script says where their operations are.

    Raises:
        SMPPartitionError: they cannot be divided so.
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
        return Homes()
    named = zip(trace.units, trace.paths, strict=True)
    return Homes({id(layer): paths[path] for layer, path in named if path in paths})


def keep(trace: Trace, homes: Homes, config: Config) -> None:
    """Writes what has been decided, or what the script has, into the configuration's file."""
    if not config.partition_file or config.load_partition:
        return
    found = {}
    for layer, path in zip(trace.units, trace.paths, strict=True):
        of_variables = (homes.variables.get(id(handle_of(each))) for each in layer.variables)
        places = [homes.layers.get(id(layer)), *of_variables]
        place = next((each for each in places if each is not None), None)
        if place is not None:
            found[path] = place
    partition_file.write(config.partition_file, found)


def _automatic(trace: Trace, operations: Operations, config: Config) -> dict[str, int]:
    with errors.translated(_CLASSES):
        partitions, table = operations.core.divide(
            trace.paths,
            partitions=config.partitions,
            memory_weight=config.memory_weight,
            microbatches=config.microbatches,
            active_microbatches=config.active_microbatches,
            schedule=config.pipeline,
        )
    partition_file.tell(table)
    found = zip(trace.paths, partitions, strict=True)
    return {path: partition for path, partition in found if partition is not None}


def place(trace: Trace, operations: Operations, homes: Homes, config: Config) -> object:
    """The core's placement of every operation; notes in ``homes`` where variables are.

    Raises:
        SMPPartitionError: a variable would be on two partitions.
    """
    by_script = not config.auto_partition and not config.load_partition
    with errors.translated(_CLASSES):
        placement = operations.core.place(
            [homes.layers.get(id(layer)) for layer in trace.units],
            config.default_partition if by_script else None,
            [homes.variables.get(id(handle)) for handle in operations.handles],
        )
    for handle, partition in zip(operations.handles, placement.variables(), strict=True):
        if partition is not None:
            homes.variables[id(handle)] = partition
    return placement
