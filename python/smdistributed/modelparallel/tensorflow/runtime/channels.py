"""Channels between the GPUs of a pipeline.

Each direction of each pair of ranks that exchanges tensors has a group of its own (a channel). A device runs the
operations of a group in order, so with one group for both directions, two ranks that send to each other first would
deadlock.
"""

from __future__ import annotations

import zlib

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.collectives import call
from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.tensorflow import communication
from smdistributed.modelparallel.tensorflow.groups import TensorFlowGroups
from smdistributed.modelparallel.tensorflow.runtime.segment_graph import SegmentGraph

#: The ranks of a channel.
SENDER, RECEIVER = 0, 1


def device() -> str | None:
    """Return the GPU on which this process computes, if there is one."""
    return "/device:GPU:0" if tf.config.list_logical_devices("GPU") else None


def open_between(groups: TensorFlowGroups, segment_graph: SegmentGraph) -> None:
    """Open channels in both directions between the ranks that exchange tensors of ``segment_graph``.

    Each channel is used once here: the first use blocks its two ranks, which during a step could deadlock with a
    third rank. All ranks of the pipeline call it with the first step that they trace. It opens no channel if one of
    the ranks has no GPU or traces another step.
    """
    here = device()
    mine = (here is not None, zlib.crc32("\n".join(segment_graph.lines).encode()))
    gathered = communication.gather_for("has partitioned the model", mine, CommGroup.PP_GROUP)
    if here is None or any(other != mine for other in gathered):
        return
    members, place = groups.members["pp"], groups.rank_in("pp")
    edges = {(each.source, target) for each in segment_graph.transfers.values() for target in each.targets}
    with tf.init_scope(), tf.device(here):
        for source, target in sorted(edges | {(b, a) for a, b in edges}):
            if place not in (source, target):
                continue
            channel = groups.channels[source, target] = groups.new_group([members[source], members[target]])
            if place == source:
                message = call(core_ops.smd_send, tensor=tf.zeros([1]), peer=RECEIVER, tag=0, group=channel)
                with tf.device("/device:CPU:0"):
                    call(core_ops.smd_sent, messages=[message])
            else:
                call(core_ops.smd_recv, shape=[1], T=tf.float32, peer=SENDER, tag=0, group=channel)
