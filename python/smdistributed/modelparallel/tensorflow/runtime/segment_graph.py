"""The segments of a step on this rank, as the core cuts them (``rust-core/src/pipeline/operations``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smdistributed._common import errors
from smdistributed.modelparallel.config import Config
from smdistributed.modelparallel.exceptions import CLASSES, SMPUnsupportedError
from smdistributed.modelparallel.tensorflow.tracing.operations import Operations

_CLASSES = {**CLASSES, "unsupported": SMPUnsupportedError}


@dataclass(eq=False)
class Segment:
    """Operations that this rank computes in one function.

    Attributes:
        name: Phase, stage and level.
        anchored: Whether the schedule fixes its place in the rank's order; others run when their inputs are computed.
        alone: Whether no other rank computes it.
        ops: The operations.
        inputs: Tensors from other segments.
        outputs: Tensors that other segments need.
        after: Further segments that come before it, for the same microbatch (0) or for the previous one (1).
    """

    name: str
    phase: str
    stage: int
    anchored: bool
    alone: bool
    ops: list[tf.Operation]
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]
    after: list[tuple[Segment, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Transfer:
    """A message between ranks: a tensor, or the signal that a segment has been computed.

    Attributes:
        tensor: The tensor in the graph of the trace; ``None`` for a signal.
        number: The number of the message, equal on all ranks.
        source: The partition that sends it.
        targets: The partitions that receive it.
    """

    tensor: tf.Tensor | None
    number: int
    source: int
    targets: list[int]


class SegmentGraph:
    """This rank's part of a step.

    Attributes:
        segments: The segments in topological order.
        order: The anchored segments with their microbatches, in the schedule's order.
        of: The segment of each operation, by the operation's name.
        transfers: Tensors that pass between ranks, by name.
        signals: Segments that other ranks wait for.
        messages: Names of the tensors that anchored segments compute for other ranks, with their microbatches: for
        each rank, in the order in which it computes them.
        free: Names of operations that every rank computes where it needs them.
        wanted: The tensors that the step returns on this rank.
        lines: Lines of text that must be equal on all ranks.
    """

    def __init__(
        self,
        operations: Operations,
        placement: Any,
        wanted: Sequence[Sequence[tf.Tensor]],
        rank: int,
        microbatches: int,
        config: Config,
    ) -> None:
        """Cut a trace; ``wanted`` are for each rank the tensors that the step returns there.

        Raises:
            SMPUnsupportedError: A tensor cannot be sent between ranks, or the schedule contradicts the dependencies.
        """
        with errors.translated(_CLASSES):
            segments, order, transfers, messages, signals, self.lines = placement.cut(
                [[operations.output(tensor) for tensor in tensors] for tensors in wanted],
                rank,
                microbatches=microbatches,
                schedule=config.pipeline,
                active_microbatches=config.active_microbatches,
            )
        ops, tensors = operations.ops, operations.tensors
        self.segments = [
            Segment(
                f"{phase}{0 if stage is None else stage}_level{level}",
                phase,
                0 if stage is None else stage,
                anchored,
                alone,
                [ops[each] for each in numbers],
                tensors(inputs),
                tensors(outputs),
            )
            for phase, stage, level, anchored, alone, numbers, inputs, outputs, _ in segments
        ]
        for segment, (*_, after) in zip(self.segments, segments, strict=True):
            segment.after = [(self.segments[other], back) for other, back in after]
        self.order = [(self.segments[number], mb) for number, mb in order]
        self.of = {op.name: segment for segment in self.segments for op in segment.ops}
        self.free = {ops[each].name for each in placement.free()}
        self.wanted = list(wanted[rank])
        self.transfers: dict[str, Transfer] = {}
        for number, (output, (source, targets)) in enumerate(transfers):
            (tensor,) = tensors([output])
            self.transfers[tensor.name] = Transfer(tensor, number, source, targets)
        names = list(self.transfers)
        self.messages = [(names[number], mb) for number, mb in messages]
        self.signals: dict[Segment, Transfer] = {
            self.segments[segment]: Transfer(None, number, source, targets)
            for number, (segment, (source, targets)) in enumerate(signals, len(transfers))
        }
