"""Model parallel training for PyTorch: ``import smdistributed.modelparallel.torch as smp``.

.. code-block:: python

    smp.init({"partitions": 2, "microbatches": 4})
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(optimizer)


    @smp.step
    def train_step(model, x, y):
        loss = loss_function(model(x), y)
        model.backward(loss)
        return loss


    loss = train_step(model, x, y).reduce_mean()
    optimizer.step()
"""

from __future__ import annotations

from smdistributed._common import shims

# PyTorch is imported through the loader, which reports missing packages.
shims.load_torch()

from smdistributed._common.unpickling import add_safe_globals  # noqa: E402
from smdistributed.modelparallel import __version__ as __version__  # noqa: E402
from smdistributed.modelparallel.objects import CommGroup, RankType  # noqa: E402
from smdistributed.modelparallel.torch import amp as amp  # noqa: E402
from smdistributed.modelparallel.torch import core as core  # noqa: E402
from smdistributed.modelparallel.torch import exceptions as exceptions  # noqa: E402
from smdistributed.modelparallel.torch import integrations as integrations  # noqa: E402
from smdistributed.modelparallel.torch import model as model  # noqa: E402
from smdistributed.modelparallel.torch import nn as nn  # noqa: E402
from smdistributed.modelparallel.torch import optimizers as optimizers  # noqa: E402
from smdistributed.modelparallel.torch import patches as patches  # noqa: E402
from smdistributed.modelparallel.torch.activation_checkpointing import set_activation_checkpointing  # noqa: E402
from smdistributed.modelparallel.torch.checkpoint.manager import CheckpointManager  # noqa: E402
from smdistributed.modelparallel.torch.checkpoint.save_load import (  # noqa: E402
    load,
    resume_from_checkpoint,
    save,
    save_checkpoint,
)
from smdistributed.modelparallel.torch.communication import (  # noqa: E402
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
from smdistributed.modelparallel.torch.creation import model_creation  # noqa: E402
from smdistributed.modelparallel.torch.groups import (  # noqa: E402
    get_dp_process_group,
    get_mp_process_group,
    get_pp_process_group,
    get_rdp_process_group,
    get_tp_process_group,
    get_world_process_group,
)
from smdistributed.modelparallel.torch.job import (  # noqa: E402
    init,
    is_initialized,
    is_tracing,
    ranks,
    shutdown,
)
from smdistributed.modelparallel.torch.model import DistributedModel  # noqa: E402
from smdistributed.modelparallel.torch.nn.registry import tp_register, tp_register_with_module  # noqa: E402
from smdistributed.modelparallel.torch.nn.replacement import set_tensor_parallelism, tensor_parallelism  # noqa: E402
from smdistributed.modelparallel.torch.norms import clip_grad_norm_  # noqa: E402
from smdistributed.modelparallel.torch.optimizer import DistributedOptimizer  # noqa: E402
from smdistributed.modelparallel.torch.output import StepOutput  # noqa: E402
from smdistributed.modelparallel.torch.partitioning.materialize import delay_param_initialization  # noqa: E402
from smdistributed.modelparallel.torch.partitioning.placement import partition, set_partition  # noqa: E402
from smdistributed.modelparallel.torch.state import state  # noqa: E402
from smdistributed.modelparallel.torch.step import step  # noqa: E402

rank, size, local_rank, local_size = ranks.rank, ranks.size, ranks.local_rank, ranks.local_size
mp_rank, mp_size, get_mp_group = ranks.mp_rank, ranks.mp_size, ranks.get_mp_group
dp_rank, dp_size, get_dp_group = ranks.dp_rank, ranks.dp_size, ranks.get_dp_group
pp_rank, pp_size, get_pp_group = ranks.pp_rank, ranks.pp_size, ranks.get_pp_group
tp_rank, tp_size, get_tp_group = ranks.tp_rank, ranks.tp_size, ranks.get_tp_group
rdp_rank, rdp_size, get_rdp_group = ranks.rdp_rank, ranks.rdp_size, ranks.get_rdp_group
delayed_parameter_initialization = delay_param_initialization
WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP

__all__ = [
    "DP_GROUP",
    "MP_GROUP",
    "PP_GROUP",
    "RDP_GROUP",
    "TP_GROUP",
    "WORLD",
    "CheckpointManager",
    "CommGroup",
    "DistributedModel",
    "DistributedOptimizer",
    "RankType",
    "StepOutput",
    "__version__",
    "add_safe_globals",
    "allgather",
    "amp",
    "barrier",
    "broadcast",
    "clip_grad_norm_",
    "core",
    "delay_param_initialization",
    "delayed_parameter_initialization",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "exceptions",
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
    "is_tracing",
    "load",
    "local_rank",
    "local_size",
    "model",
    "model_creation",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "nn",
    "optimizers",
    "partition",
    "patches",
    "pp_barrier",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_barrier",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "send",
    "set_activation_checkpointing",
    "set_partition",
    "set_tensor_parallelism",
    "shutdown",
    "size",
    "state",
    "step",
    "tensor_parallelism",
    "tp_barrier",
    "tp_rank",
    "tp_register",
    "tp_register_with_module",
    "tp_size",
]
