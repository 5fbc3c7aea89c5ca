"""Tensors between the ranks of a pipeline, as operations of a step's graph.

- MSG-1: a message has a number of its own in a step, as both sides count them in the same layout. So between hosts a receive
  may be posted at any time, and messages have no order. Steps share the numbers: they run one after the other, also those
  that one ``tf.function`` calls, as calls that run operations of ours join TensorFlow's chain (``ordering.py``).
- MSG-2: between GPUs, both sides give a channel its messages in the order in which the sender's anchored calls make them,
  each when the one before it has begun (there) or come (here). A receive there is a kernel that runs until its
  message comes, and what is launched for the first time may have to wait for such kernels. So it begins when the sender has
  told this host that it has begun to send, and waits for nothing that still has to be launched.
- MSG-3: what goes between GPUs are the floating-point tensors that anchored segments make. Integers of a graph lie in host
  memory, and what other segments make comes in no order.
- MSG-4: nothing is sent before all ranks are known to run the same step: it would come in the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops
from smdistributed.modelparallel.tensorflow.groups import TensorFlowGroups
from smdistributed.modelparallel.tensorflow.runtime import channels
from smdistributed.modelparallel.tensorflow.runtime.segment_graph import Layout, Segment, Transfer

_HOST = "/device:CPU:0"
#: What tells that a tensor has begun to come, whose shape needs no telling.
_NOTICE = [0]


class Messages:
    """What a step of this rank sends and receives.

    Args:
        layout: The step.
        groups: The pipeline, of more than one rank.
        microbatches: How many there are.
        start: The operation that everything waits for.
        runs_by_itself: Called with every operation that must run and has no order with others but what it is told.
    """

    def __init__(
        self,
        layout: Layout,
        groups: TensorFlowGroups,
        microbatches: int,
        start: tf.Operation,
        runs_by_itself: Callable[[tf.Operation], None],
    ) -> None:
        self._layout, self._microbatches = layout, microbatches
        self._group, self._here, self._channels = groups.pipe, groups.rank_in("pp"), groups.channels
        self._start, self._runs_by_itself = start, runs_by_itself
        # MSG-2: for each channel, what is still to be received, the last operation, and what has been received too early
        # for the graph, for the sake of the order.
        self._coming: dict[int, deque[tuple[str, int]]] = {}
        self._last: dict[tuple[int, int], list[tf.Operation]] = {}
        self._come: dict[tuple[str, int], tf.Tensor] = {}
        self._in_order = {name for name, _ in layout.messages}

    def _channel(self, tensor: tf.Tensor, source: int, target: int) -> int | None:
        """That of a tensor, if it does not go between hosts."""
        if tensor.name not in self._in_order or not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            return None
        return self._channels.get((source, target))

    def _tag(self, transfer: Transfer, mb: int) -> int:
        return 2 * (transfer.number * self._microbatches + mb)

    def send(
        self, tensor: tf.Tensor, value: tf.Tensor, mb: int, after: Sequence[tf.Operation]
    ) -> tuple[list[tf.Operation], tf.Operation]:
        """Gives the other ranks ``value`` for ``tensor``.

        Returns:
            The operations that begin to, and the one that ends when they have it.
        """
        messages = []
        # MSG-4.
        with tf.control_dependencies([self._start, *after]):
            for target in self._layout.transfers[tensor.name].targets:
                messages += self._send_to(target, tensor, value, mb)
        with tf.device(_HOST):
            sent = core_ops.smd_sent(messages=messages)
        begun = [message.op for message in messages]
        for op in (*begun, sent):
            self._runs_by_itself(op)
        return begun, sent

    def _send_to(self, target: int, tensor: tf.Tensor, value: tf.Tensor, mb: int) -> list[tf.Tensor]:
        tag = self._tag(self._layout.transfers[tensor.name], mb)
        channel = self._channel(tensor, self._here, target)
        known = tensor.shape.is_fully_defined()

        def send_to_host(what: Any, tag: int) -> tf.Tensor:
            with tf.device(_HOST):
                return core_ops.smd_send(tensor=what, peer=target, tag=tag, group=self._group)

        if channel is None:
            shape = [] if known else [send_to_host(tf.shape(value), tag + 1)]
            return [*shape, send_to_host(value, tag)]
        way = self._here, target
        with tf.control_dependencies(self._last.get(way, [])), tf.device(channels.device()):
            message = core_ops.smd_send(tensor=value, peer=channels.RECEIVER, tag=tag, group=channel)
        self._last[way] = [message.op]
        with tf.control_dependencies([message.op]):
            return [message, send_to_host(_NOTICE if known else tf.shape(value), tag + 1)]

    def receive(self, tensor: tf.Tensor, mb: int, after: Sequence[tf.Operation]) -> tf.Tensor:
        """What another rank has for ``tensor``; between hosts, it is waited for once ``after`` have ended."""
        source = self._layout.transfers[tensor.name].source
        if self._channel(tensor, source, self._here) is None:
            with tf.control_dependencies([self._start, *after]):
                known = tensor.shape.is_fully_defined()
                shape = tensor.shape.as_list() if known else self._told(tensor, source, mb)
                return self._receive(tensor, shape, _HOST, self._group, source, mb)
        if source not in self._coming:
            self._coming[source] = deque(self._in_order_from(source))
        while (tensor.name, mb) not in self._come:
            self._receive_next(source)
        return self._come[tensor.name, mb]

    def _in_order_from(self, source: int) -> Iterator[tuple[str, int]]:
        for name, mb in self._layout.messages:
            transfer = self._layout.transfers[name]
            is_ours = transfer.source == source and self._here in transfer.targets
            if is_ours and self._channel(transfer.tensor, source, self._here) is not None:
                yield name, mb

    def _receive_next(self, source: int) -> None:
        """MSG-2."""
        name, mb = self._coming[source].popleft()
        tensor, way = self._layout.transfers[name].tensor, (source, self._here)
        with tf.control_dependencies([self._start]):
            told = self._told(tensor, source, mb)
        shape = tensor.shape.as_list() if tensor.shape.is_fully_defined() else told
        with tf.control_dependencies([told.op, *self._last.get(way, [])]):
            channel = self._channels[way]
            value = self._receive(tensor, shape, channels.device(), channel, channels.SENDER, mb)
        self._come[name, mb], self._last[way] = value, [value.op]

    def _told(self, tensor: tf.Tensor, source: int, mb: int) -> tf.Tensor:
        """What comes with a tensor: its shape, or a notice."""
        size = [1] if tensor.shape.is_fully_defined() else [tensor.shape.rank]
        with tf.device(_HOST):
            tag = self._tag(self._layout.transfers[tensor.name], mb) + 1
            told = core_ops.smd_recv(shape=size, T=tf.int32, peer=source, tag=tag, group=self._group)
        self._runs_by_itself(told.op)
        return told

    def _receive(self, tensor: tf.Tensor, shape: Any, device: str, group: int, source: int, mb: int) -> tf.Tensor:
        with tf.device(device):
            tag = self._tag(self._layout.transfers[tensor.name], mb)
            value = core_ops.smd_recv(shape=shape, T=tensor.dtype, peer=source, tag=tag, group=group)
        self._runs_by_itself(value.op)
        value.set_shape(tensor.shape)
        return value

    def signal(self, segment: Segment, mb: int, call: tf.Operation) -> None:
        """Tells other ranks when a segment's call has ended."""
        signal = self._layout.signals[segment]
        tag = self._tag(signal, mb)
        with tf.control_dependencies([self._start, call]), tf.device(_HOST):
            messages = [
                core_ops.smd_send(tensor=_NOTICE, peer=target, tag=tag, group=self._group) for target in signal.targets
            ]
            sent = core_ops.smd_sent(messages=messages)
        for op in (*(message.op for message in messages), sent):
            self._runs_by_itself(op)

    def signalled(self, segment: Segment, mb: int) -> tf.Operation:
        """What ends when another rank's call of a segment has."""
        signal = self._layout.signals[segment]
        with tf.control_dependencies([self._start]), tf.device(_HOST):
            tag = self._tag(signal, mb)
            heard = core_ops.smd_recv(shape=[1], T=tf.int32, peer=signal.source, tag=tag, group=self._group)
        self._runs_by_itself(heard.op)
        return heard.op
