"""Optimizers that step during backward (``torch.distributed.optim._apply_optimizer_in_backward``)."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel


def register(model: DistributedDataParallel) -> None:
    """Make optimizers that step during backward run when a bucket is reduced.

    Without this, they would step when a rank's own gradient is ready. Collective, if the model has such optimizers.

    Args:
        model: The model.
    """
    if not any(hasattr(parameter, "_in_backward_optimizers") for parameter in model._module_parameters):
        return
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for parameter in model._module_parameters:
        for handle in param_to_optim_hook_handle_map.get(parameter, ()):
            handle.remove()
    model.register_comm_hook(weakref.ref(model), step_in_backward)


def step_in_backward(model: weakref.ref[DistributedDataParallel], bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket, run the optimizers of its parameters, and set their gradients to none.

    This is a communication hook.

    Args:
        model: The model.
        bucket: The bucket.

    Returns:
        A future of the averaged bucket.
    """
    ddp = model()
    assert ddp is not None, "a model outlives its backward"
    ddp._average(bucket.buffer())
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
            parameter.grad = gradient
            optimizer.step()
    if bucket.is_last():
        # Gradients are removed only after the reducer has finished, because it assigns every parameter's gradient.
        torch.autograd.Variable._execution_engine.queue_callback(ddp._drop_stepped_gradients)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
