"""The graph of a step, cut into segments: what one rank computes at a time, and what passes between ranks.

A segment is the operations of one place, phase and *level*, the number of changes of place on the longest way to them.
So segments depend on each other in one direction only, whatever the model's form.

- LAY-1: the forward segments are the stages of the pipeline; the last of the backward segments that use what a stage
  keeps is its backward.
- LAY-2: an operation whose results are taken by its own place only, later, is computed later, with them.
- LAY-3: every rank makes the same layout of the whole, so it knows what others send.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.modelparallel.exceptions import CLASSES, SMPUnsupportedError
from smdistributed.modelparallel.tensorflow.placement import FREE, REPLICATED, Placement, operands_of, tensor_bytes
from smdistributed.modelparallel.tensorflow.tracing import Trace

#: Kinds of actions that compute, as the core names them.
FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
_REPLICATED_PHASE = "R"
#: Stateful, but nothing happens if nobody asks for the result.
_ONLY_ASKED_FOR = {
    "Placeholder",
    "ReadVariableOp",
    "ResourceGather",
    "VarHandleOp",
    "VarIsInitializedOp",
    "VariableShape",
}


@dataclass(eq=False)
class Segment:
    """See the module's text.

    Attributes:
        place: A partition, or ``REPLICATED``.
        stage: Of a forward segment its own, of a backward segment the one whose activations it uses.
        anchored: Whether its place in the rank's order is the schedule's; others run when their operands are there.
    """

    place: int
    phase: str
    level: int
    ops: list[tf.Operation] = field(default_factory=list)
    stage: int = -1
    anchored: bool = False

    def __str__(self) -> str:
        return f"{self.phase} of level {self.level} on {self.place if self.place >= 0 else 'all'}"


class Layout:
    """The segments of a trace, and who needs what.

    Attributes:
        stages: The forward segments, in their order.
        segments: All of them, in an order in which they can be computed.
        of: The segment of an operation, by its name.
        trains: Whether there is a backward.
        transfers: Tensors that go to other ranks, with those; their order is that of all ranks.
    """

    def __init__(self, trace: Trace, placement: Placement, wanted: Sequence[Sequence[tf.Tensor]], ranks: int) -> None:
        """``wanted``: for each rank, the tensors that the step returns there."""
        self._trace, self._placement, self.ranks = trace, placement, ranks
        self._ops = [op for op in trace.ordered() if op.type != "Placeholder"]
        live = self._live(wanted)
        self.of: dict[str, Segment] = {}
        self.segments: list[Segment] = self._cut([op for op in self._ops if op.name in live])
        self.stages: list[Segment] = []
        self._make_stages()
        self.needed = [self._needed(rank, wanted[rank], live) for rank in range(ranks)]
        self.wanted = wanted
        self.transfers: dict[str, tuple[int, tf.Tensor, list[int]]] = {}
        self._find_transfers(live)

    # Which operations are computed.

    def _live(self, wanted: Sequence[Sequence[tf.Tensor]]) -> set[str]:
        """Those that something depends on: what is returned, and what changes a state."""
        roots = [tensor.op for tensors in wanted for tensor in tensors]
        roots += [op for op in self._ops if _must_run(op)]
        return _ancestors(roots)

    def _needed(self, rank: int, wanted: Sequence[tf.Tensor], live: set[str]) -> set[str]:
        """Replicated operations that a rank computes, and all of its own."""
        places = self._placement.places
        own = [op for op in self._ops if op.name in live and places[op.name] == rank]
        states = [op for op in self._ops if places[op.name] == REPLICATED and _must_run(op)]
        roots = [tensor.op for tensor in wanted] + states
        found: set[str] = set()
        pending = [op for op in roots if places[op.name] < 0] + own
        while pending:
            op = pending.pop()
            if op.name in found:
                continue
            found.add(op.name)
            pending += [each for each in operands_of(op) if places[each.name] in (REPLICATED, FREE)]
        return found

    # Segments.

    def _cut(self, ops: Sequence[tf.Operation]) -> list[Segment]:
        placement = self._placement
        levels = dict(placement.levels)
        phases: dict[str, str] = {}
        for op in ops:
            phase = FORWARD if placement.is_forward(op) else BACKWARD
            phases[op.name] = _REPLICATED_PHASE if placement.places[op.name] < 0 else phase
        takers: dict[str, list[tf.Operation]] = {}
        for op in ops:
            for each in operands_of(op):
                takers.setdefault(each.name, []).append(op)
        for op in reversed(ops):
            # LAY-2.
            mine = placement.places[op.name], phases[op.name]
            theirs = takers.get(op.name, ())
            if mine[1] == FORWARD or not theirs or _must_run(op):
                continue
            if all((placement.places[each.name], phases[each.name]) == mine for each in theirs):
                levels[op.name] = min(levels[each.name] for each in theirs)
        found: dict[tuple[int, str, int], Segment] = {}
        for op in ops:
            place = placement.places[op.name]
            if place == FREE:
                continue
            key = (levels[op.name], phases[op.name], place)
            segment = found.setdefault(key, Segment(place, phases[op.name], levels[op.name]))
            segment.ops.append(op)
            self.of[op.name] = segment
        order = {_REPLICATED_PHASE: 0, FORWARD: 1, BACKWARD: 2}
        return sorted(found.values(), key=lambda each: (each.level, order[each.phase], each.place))

    def _make_stages(self) -> None:
        self.stages = [segment for segment in self.segments if segment.phase == FORWARD]
        for number, segment in enumerate(self.stages):
            segment.stage, segment.anchored = number, True
        last: dict[int, Segment] = {}
        for segment in self.segments:
            if segment.phase != BACKWARD:
                continue
            used: dict[int, int] = {}
            for tensor in self.inputs_of(segment.ops):
                maker = self.of.get(tensor.op.name)
                if maker is not None and maker.phase == FORWARD and maker.place == segment.place:
                    used[maker.stage] = used.get(maker.stage, 0) + tensor_bytes(tensor) + 1
            if used:
                segment.stage = max(used, key=lambda stage: used[stage])
                last[segment.stage] = segment
        self.trains = bool(last)
        for segment in last.values():
            segment.anchored = True

    def split_backwards(self) -> None:
        """Halves anchored backwards: what others wait for, and the rest, which is the gradients of variables."""
        for segment in [each for each in self.segments if each.phase == BACKWARD and each.anchored]:
            names = {op.name for op in segment.ops}
            outside = [
                op
                for op in segment.ops
                if any(taker.name not in names and taker.name in self.of for taker in _takers(op))
            ]
            first = _ancestors(outside) & names
            segment.phase = WEIGHT
            if not first:
                continue
            half = Segment(segment.place, INPUT, segment.level, stage=segment.stage, anchored=True)
            half.ops = [op for op in segment.ops if op.name in first]
            segment.ops = [op for op in segment.ops if op.name not in first]
            for op in half.ops:
                self.of[op.name] = half
            at = self.segments.index(segment)
            self.segments[at : at + 1] = [half, segment] if segment.ops else [half]

    # What passes between them.

    def inputs_of(self, ops: Iterable[tf.Operation]) -> list[tf.Tensor]:
        """Tensors that ``ops`` take and do not make, without those that anybody can make."""
        ops = list(ops)
        made = {op.name for op in ops}
        found: dict[str, tf.Tensor] = {}
        for op in ops:
            for tensor in op.inputs:
                if tensor.op.name not in made and self._placement.places[tensor.op.name] != FREE:
                    found.setdefault(tensor.name, tensor)
        return list(found.values())

    def ops_on(self, segment: Segment, rank: int) -> list[tf.Operation]:
        """The operations of a segment that ``rank`` computes."""
        if segment.place >= 0:
            return segment.ops if segment.place == rank else []
        return [op for op in segment.ops if op.name in self.needed[rank]]

    def outputs_of(self, segment: Segment, rank: int) -> list[tf.Tensor]:
        """What ``rank`` needs of a segment that it computes, others' needs included."""
        ops = self.ops_on(segment, rank)
        made = {op.name for op in ops}
        wanted = {tensor.name for tensor in self.wanted[rank]}
        found = []
        for op in ops:
            for tensor in op.outputs:
                if (
                    tensor.name in wanted
                    or tensor.name in self.transfers
                    or any(taker.name not in made and taker.name in self.needed[rank] for taker in tensor.consumers())
                ):
                    found.append(tensor)
        return found

    def _find_transfers(self, live: set[str]) -> None:
        places = self._placement.places
        for op in self._ops:
            if op.name not in live or places[op.name] < 0:
                continue
            for tensor in op.outputs:
                takers = {each.name for each in tensor.consumers()} & live
                targets = [
                    rank
                    for rank in range(self.ranks)
                    if rank != places[op.name]
                    and (takers & self.needed[rank] or any(each.name == tensor.name for each in self.wanted[rank]))
                ]
                if not targets:
                    continue
                if tensor.dtype in (tf.resource, tf.variant, tf.string) or tensor.shape.rank is None:
                    what = "of unknown rank" if tensor.shape.rank is None else f"of type {tensor.dtype.name}"
                    raise SMPUnsupportedError(
                        f"`{tensor.name}`, a tensor {what}, would pass from partition {places[op.name]} to {targets[0]}: put the "
                        "operations around it on one partition"
                    )
                self.transfers[tensor.name] = len(self.transfers), tensor, targets

    # The schedule.

    def plan(self, microbatches: int, schedule: str, active: int) -> list[list[tuple[str, int, int]]]:
        """For each rank, its computations in their order: kind, stage and microbatch.

        Raises:
            SMPUnsupportedError: the order of the schedule and what depends on what contradict each other.
        """
        if not self.stages:
            return [[] for _ in range(self.ranks)]
        rows = self._rows()
        schedule = schedule if self.trains else "_only_forward"
        with errors.translated(CLASSES):
            programs = [
                _core.plan_pipeline(rank, self.ranks, microbatches, rows, schedule, active)
                for rank in range(self.ranks)
            ]
        orders = [[(kind, stage, mb) for kind, stage, mb, peer in program if peer is None] for program in programs]
        self._check(orders, microbatches)
        return orders

    def _rows(self) -> list[Any]:
        rows = []
        outputs: list[int] = []
        for segment in self.stages:
            edges: dict[int, int] = {}
            for tensor in self.inputs_of(segment.ops):
                maker = self.of.get(tensor.op.name)
                if maker is not None and maker.phase == FORWARD:
                    edges[maker.stage] = edges.get(maker.stage, 0) + tensor_bytes(tensor)
            cost = 1 + sum(tensor_bytes(tensor) for op in segment.ops for tensor in op.outputs) // 1024
            rows.append((segment.place, (cost, cost, cost), cost, sorted(edges.items()), self.trains))
            if any(self._placement.places[each.name] == REPLICATED for op in segment.ops for each in _takers(op)):
                outputs.append(segment.stage)
        if self.trains and len(outputs) > 1:
            # The loss, which waits for all results and which all backwards wait for.
            edges = [(stage, 0) for stage in outputs]
            rows.append((self.stages[outputs[-1]].place, (1, 1, 1), 0, edges, True))
        return rows

    def _check(self, orders: Sequence[Sequence[tuple[str, int, int]]], microbatches: int) -> None:
        """Runs the orders of all ranks without computing."""
        anchored = {(each.phase, each.stage): each for each in self.segments if each.anchored}
        before: dict[tuple[int, int], set[tuple[int, int]]] = {}
        numbers = {id(segment): number for number, segment in enumerate(self.segments)}
        for segment in self.segments:
            makers = {
                numbers[id(self.of[tensor.op.name])]
                for tensor in self.inputs_of(segment.ops)
                if tensor.op.name in self.of
            }
            for mb in range(microbatches):
                before[numbers[id(segment)], mb] = {(maker, mb) for maker in makers}
                if mb and not segment.anchored:
                    before[numbers[id(segment)], mb].add((numbers[id(segment)], mb - 1))
        for order in orders:
            previous = None
            for kind, stage, mb in order:
                segment = anchored.get((kind, stage))
                if segment is None:
                    continue
                node = numbers[id(segment)], mb
                if previous is not None:
                    before[node].add(previous)
                previous = node
        waiting = {node: len(nodes) for node, nodes in before.items()}
        after: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for node, nodes in before.items():
            for each in nodes:
                after.setdefault(each, []).append(node)
        ready = [node for node, count in waiting.items() if count == 0]
        done = 0
        while ready:
            done += 1
            for node in after.get(ready.pop(), ()):
                waiting[node] -= 1
                if waiting[node] == 0:
                    ready.append(node)
        if done < len(before):
            stuck = next(node for node, count in waiting.items() if count)
            raise SMPUnsupportedError(
                f"the schedule cannot order this step: {self.segments[stuck[0]]} of microbatch {stuck[1]} would wait for itself; "
                "with `pipeline: 'simple'` fewer steps do"
            )

    def lines(self) -> list[str]:
        """A line for each operation, the same on all ranks if they have the same step: for comparing, and to read."""
        numbers = {op.name: number for number, op in enumerate(self._trace.ordered())}
        found = []
        for op in self._trace.ordered():
            inputs = ", ".join(f"%{numbers[tensor.op.name]}:{tensor.value_index}" for tensor in op.inputs)
            outputs = ", ".join(f"{tensor.dtype.name}{_shape(tensor)}" for tensor in op.outputs)
            place = self._placement.places[op.name]
            where = {FREE: "", REPLICATED: " on all"}.get(place, f" on {place}")
            found.append(f"%{numbers[op.name]}: {op.type}({inputs}) -> {outputs}{where}")
        for rank, tensors in enumerate(self.wanted):
            found.append(f"returned on {rank}: " + ", ".join(f"%{numbers[tensor.op.name]}" for tensor in tensors))
        return found


def _shape(tensor: tf.Tensor) -> str:
    return "[?]" if tensor.shape.rank is None else "[" + ",".join(str(size or "?") for size in tensor.shape) + "]"


def _must_run(op: tf.Operation) -> bool:
    return auto_control_deps.op_is_stateful(op) and op.type not in _ONLY_ASKED_FOR


def _takers(op: tf.Operation) -> list[tf.Operation]:
    return [each for tensor in op.outputs for each in tensor.consumers()]


def _ancestors(ops: Iterable[tf.Operation]) -> set[str]:
    found: set[str] = set()
    pending = list(ops)
    while pending:
        op = pending.pop()
        if op.name not in found:
            found.add(op.name)
            pending += operands_of(op)
    return found
