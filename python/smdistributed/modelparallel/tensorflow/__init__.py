"""Model parallel training for TensorFlow: ``import smdistributed.modelparallel.tensorflow as smp``.

.. code-block:: python

    smp.init({"partitions": 2, "microbatches": 4})


    class Model(smp.DistributedModel):
        ...


    model = Model()


    @smp.step
    def get_grads(images, labels):
        predictions = model(images, training=True)
        loss = loss_object(labels, predictions)
        return optimizer.get_gradients(loss, model.trainable_variables), loss


    @tf.function
    def train_step(images, labels):
        gradients, loss = get_grads(images, labels)
        gradients = [g.accumulate() for g in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss.reduce_mean()
"""

from __future__ import annotations

from smdistributed._common import shims

# TensorFlow is imported through the loader, which reports missing packages.
shims.load_tensorflow()

from smdistributed._common.unpickling import add_safe_globals  # noqa: E402
from smdistributed.modelparallel import __version__ as __version__  # noqa: E402
from smdistributed.modelparallel.objects import CommGroup, RankType  # noqa: E402
from smdistributed.modelparallel.tensorflow import autograph  # noqa: E402
from smdistributed.modelparallel.tensorflow import core as core  # noqa: E402
from smdistributed.modelparallel.tensorflow import exceptions as exceptions  # noqa: E402
from smdistributed.modelparallel.tensorflow.checkpoint.manager import CheckpointManager  # noqa: E402
from smdistributed.modelparallel.tensorflow.communication import (  # noqa: E402
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    mp_barrier,
    pp_barrier,
    rdp_barrier,
    recv_from,
    send,
    tp_barrier,
)
from smdistributed.modelparallel.tensorflow.gradients import clip_by_global_norm  # noqa: E402
from smdistributed.modelparallel.tensorflow.job import (  # noqa: E402
    init,
    is_initialized,
    process_groups,
    ranks,
    shutdown,
)
from smdistributed.modelparallel.tensorflow.model import (  # noqa: E402
    DistributedModel,
    partition,
    register_post_partition_hook,
)
from smdistributed.modelparallel.tensorflow.output import StepOutput  # noqa: E402
from smdistributed.modelparallel.tensorflow.state import state  # noqa: E402
from smdistributed.modelparallel.tensorflow.step import step  # noqa: E402

autograph.leave_out("smdistributed.modelparallel")

rank, size, local_rank, local_size = ranks.rank, ranks.size, ranks.local_rank, ranks.local_size
mp_rank, mp_size, get_mp_group = ranks.mp_rank, ranks.mp_size, ranks.get_mp_group
dp_rank, dp_size, get_dp_group = ranks.dp_rank, ranks.dp_size, ranks.get_dp_group
pp_rank, pp_size, get_pp_group = ranks.pp_rank, ranks.pp_size, ranks.get_pp_group
tp_rank, tp_size, get_tp_group = ranks.tp_rank, ranks.tp_size, ranks.get_tp_group
rdp_rank, rdp_size, get_rdp_group = ranks.rdp_rank, ranks.rdp_size, ranks.get_rdp_group
get_world_process_group = get_mp_process_group = get_dp_process_group = process_groups
get_pp_process_group = get_tp_process_group = get_rdp_process_group = process_groups

__all__ = [
    "CheckpointManager",
    "CommGroup",
    "DistributedModel",
    "RankType",
    "StepOutput",
    "add_safe_globals",
    "allgather",
    "barrier",
    "broadcast",
    "clip_by_global_norm",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_process_group",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "partition",
    "pp_barrier",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_barrier",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "register_post_partition_hook",
    "send",
    "shutdown",
    "size",
    "state",
    "step",
    "tp_barrier",
    "tp_rank",
    "tp_size",
]
