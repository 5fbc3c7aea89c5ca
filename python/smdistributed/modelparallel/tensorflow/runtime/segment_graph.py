"""The segments that this rank computes in a step, as the core cuts them (``pipeline/operations`` there)."""

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
    """Operations that this rank computes at a time.

    Attributes:
        name: Phase, stage and level.
        anchored: Whether its place in the rank's order is the schedule's; others run when their operands are there.
        alone: Whether no other rank computes it.
        ops: The operations.
        inputs: Tensors that they need from elsewhere.
        outputs: Tensors of theirs that are needed elsewhere.
        after: Segments that they come after besides, for the same microbatch (0) or for the one before (1).
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
        tensor: In the graph of the trace; ``None`` for a signal.
        number: The same on all ranks.
        source: The partition that sends it.
        targets: Those that get it.
    """

    tensor: tf.Tensor | None
    number: int
    source: int
    targets: list[int]


class SegmentGraph:
    """This rank's part of a step.

    Attributes:
        segments: In an order in which they can be computed.
        order: The anchored ones with their microbatches, in the schedule's order.
        of: The segment of an operation, by its name.
        transfers: Tensors that pass between ranks, by name.
        signals: Segments that other ranks wait for.
        messages: Names of those that anchored segments make, with their microbatches: rank after rank, in the order in
            which each makes them.
        free: Names of operations that are computed wherever they are needed.
        wanted: What the step returns here.
        lines: What must be the same on all ranks.
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
        """``wanted``: for each rank, the tensors that the step returns there.

        Raises:
            SMPUnsupportedError: a tensor cannot pass between ranks, or the schedule contradicts what depends on what.
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
