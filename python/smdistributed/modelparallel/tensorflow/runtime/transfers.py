"""Transfers of tensors between the ranks of a pipeline, as operations of a step's graph.

- MSG-1: each message has a number in the step, which both sides derive from the same segment graph. So between hosts
  a receive may be posted at any time, and messages need no order. Steps reuse the numbers, because they run one after
  the other, also inside one ``tf.function``: calls that run operations of this library join TensorFlow's chain
  (``ordering.py``).
- MSG-2: between GPUs, both sides use a channel in the order in which the sender's anchored calls compute the
  messages. A receive is a kernel that runs until its message arrives, and a kernel's first launch may have to wait
  for running kernels. So a receive begins only after a notice from the sender's host that the send has begun, and
  then depends on no kernel that is still to be launched.
- MSG-3: only floating-point tensors of anchored segments are sent between GPUs. Integers of a graph are in host memory,
  and outputs of other segments have no order.
- MSG-4: no message is sent before all ranks are known to run the same step; otherwise it would arrive in the next
  one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops
from smdistributed.modelparallel.tensorflow.groups import TensorFlowGroups
from smdistributed.modelparallel.tensorflow.runtime import channels
from smdistributed.modelparallel.tensorflow.runtime.segment_graph import Segment, SegmentGraph, Transfer

_HOST = "/device:CPU:0"
#: The notice that a tensor of known shape is being sent.
_NOTICE = [0]


class Transfers:
    """The messages of a step on this rank.

    Args:
        segment_graph: The segments of the step.
        groups: The process groups of the pipeline, which has more than one rank.
        microbatches: Number of microbatches.
        start: The operation that all messages wait for.
        run_independently: Called with every operation that must run and has explicit dependencies only.
    """

    def __init__(
        self,
        segment_graph: SegmentGraph,
        groups: TensorFlowGroups,
        microbatches: int,
        start: tf.Operation,
        run_independently: Callable[[tf.Operation], None],
    ) -> None:
        self._segment_graph, self._microbatches = segment_graph, microbatches
        self._group, self._here, self._channels = groups.pp_group, groups.rank_in("pp"), groups.channels
        self._start, self._run_independently = start, run_independently
        # For each channel: the messages to receive, the last operation, and messages that were received before the
        # graph needed them, because a channel keeps its order (MSG-2).
        self._pending_receives: dict[int, deque[tuple[str, int]]] = {}
        self._last: dict[tuple[int, int], list[tf.Operation]] = {}
        self._received: dict[tuple[str, int], tf.Tensor] = {}
        self._in_order = {name for name, _ in segment_graph.messages}

    def _channel(self, tensor: tf.Tensor, source: int, target: int) -> int | None:
        """Return the channel of a tensor between GPUs; ``None`` between hosts."""
        if tensor.name not in self._in_order or not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            return None
        return self._channels.get((source, target))

    def _tag(self, transfer: Transfer, mb: int) -> int:
        return 2 * (transfer.number * self._microbatches + mb)

    def send(
        self, tensor: tf.Tensor, value: tf.Tensor, mb: int, after: Sequence[tf.Operation]
    ) -> tuple[list[tf.Operation], tf.Operation]:
        """Send ``value`` of ``tensor`` to the ranks that need it.

        Returns:
            The operations that begin to send, and the one that ends when the ranks have received it.
        """
        messages = []
        # Waits for the comparison of the steps (MSG-4).
        with tf.control_dependencies([self._start, *after]):
            for target in self._segment_graph.transfers[tensor.name].targets:
                messages += self._send_to(target, tensor, value, mb)
        with tf.device(_HOST):
            sent = core_ops.smd_sent(messages=messages)
        begun = [message.op for message in messages]
        for op in (*begun, sent):
            self._run_independently(op)
        return begun, sent

    def _send_to(self, target: int, tensor: tf.Tensor, value: tf.Tensor, mb: int) -> list[tf.Tensor]:
        tag = self._tag(self._segment_graph.transfers[tensor.name], mb)
        channel = self._channel(tensor, self._here, target)
        known = tensor.shape.is_fully_defined()

        def send_to_host(what: Any, tag: int) -> tf.Tensor:
            with tf.device(_HOST):
                return core_ops.smd_send(tensor=what, peer=target, tag=tag, group=self._group)

        if channel is None:
            shape = [] if known else [send_to_host(tf.shape(value), tag + 1)]
            return [*shape, send_to_host(value, tag)]
        edge = self._here, target
        with tf.control_dependencies(self._last.get(edge, [])), tf.device(channels.device()):
            message = core_ops.smd_send(tensor=value, peer=channels.RECEIVER, tag=tag, group=channel)
        self._last[edge] = [message.op]
        with tf.control_dependencies([message.op]):
            return [message, send_to_host(_NOTICE if known else tf.shape(value), tag + 1)]

    def receive(self, tensor: tf.Tensor, mb: int, after: Sequence[tf.Operation]) -> tf.Tensor:
        """Receive ``tensor`` from its rank; between hosts, after ``after``."""
        source = self._segment_graph.transfers[tensor.name].source
        if self._channel(tensor, source, self._here) is None:
            assert self._group is not None, "one partition receives nothing"
            with tf.control_dependencies([self._start, *after]):
                known = tensor.shape.is_fully_defined()
                shape = tensor.shape.as_list() if known else self._receive_shape(tensor, source, mb)
                return self._receive(tensor, shape, _HOST, self._group, source, mb)
        if source not in self._pending_receives:
            self._pending_receives[source] = deque(self._in_order_from(source))
        while (tensor.name, mb) not in self._received:
            self._receive_next(source)
        return self._received[tensor.name, mb]

    def _in_order_from(self, source: int) -> Iterator[tuple[str, int]]:
        for name, mb in self._segment_graph.messages:
            transfer = self._segment_graph.transfers[name]
            is_ours = transfer.source == source and self._here in transfer.targets
            if is_ours and self._channel(transfer.tensor, source, self._here) is not None:
                yield name, mb

    def _receive_next(self, source: int) -> None:
        """Receive the next message of a channel (MSG-2)."""
        name, mb = self._pending_receives[source].popleft()
        tensor: Any = self._segment_graph.transfers[name].tensor
        edge = (source, self._here)
        with tf.control_dependencies([self._start]):
            sent_shape = self._receive_shape(tensor, source, mb)
        shape = tensor.shape.as_list() if tensor.shape.is_fully_defined() else sent_shape
        with tf.control_dependencies([sent_shape.op, *self._last.get(edge, [])]):
            channel = self._channels[edge]
            value = self._receive(tensor, shape, channels.device(), channel, channels.SENDER, mb)
        self._received[name, mb], self._last[edge] = value, [value.op]

    def _receive_shape(self, tensor: tf.Tensor, source: int, mb: int) -> tf.Tensor:
        """Receive the shape of a tensor, or the notice that it is being sent."""
        size = [1] if tensor.shape.is_fully_defined() else [tensor.shape.rank]
        with tf.device(_HOST):
            tag = self._tag(self._segment_graph.transfers[tensor.name], mb) + 1
            sent_shape = core_ops.smd_recv(shape=size, T=tf.int32, peer=source, tag=tag, group=self._group)
        self._run_independently(sent_shape.op)
        return sent_shape

    def _receive(
        self, tensor: tf.Tensor, shape: Any, device: str | None, group: int, source: int, mb: int
    ) -> tf.Tensor:
        with tf.device(device):
            tag = self._tag(self._segment_graph.transfers[tensor.name], mb)
            value = core_ops.smd_recv(shape=shape, T=tensor.dtype, peer=source, tag=tag, group=group)
        self._run_independently(value.op)
        value.set_shape(tensor.shape)
        return value

    def signal(self, segment: Segment, mb: int, call: tf.Operation) -> None:
        """Signal the end of a segment's call to other ranks."""
        signal = self._segment_graph.signals[segment]
        tag = self._tag(signal, mb)
        with tf.control_dependencies([self._start, call]), tf.device(_HOST):
            messages = [
                core_ops.smd_send(tensor=_NOTICE, peer=target, tag=tag, group=self._group) for target in signal.targets
            ]
            sent = core_ops.smd_sent(messages=messages)
        for op in (*(message.op for message in messages), sent):
            self._run_independently(op)

    def receive_signal(self, segment: Segment, mb: int) -> tf.Operation:
        """Return the operation that ends when another rank's call of a segment has ended."""
        signal = self._segment_graph.signals[segment]
        with tf.control_dependencies([self._start]), tf.device(_HOST):
            tag = self._tag(signal, mb)
            received = core_ops.smd_recv(shape=[1], T=tf.int32, peer=signal.source, tag=tag, group=self._group)
        self._run_independently(received.op)
        return received.op
