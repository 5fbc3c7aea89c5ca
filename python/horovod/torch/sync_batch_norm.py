"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from horovod.common import basics
from horovod.torch.mpi_ops import Sum, allgather_async, allreduce_async, size, synchronize

_calls = itertools.count()


def _restart() -> None:
    """Reset the counters of a new session, because after a failure ranks may have counted differently."""
    global _calls
    _calls = itertools.count()


basics._cleanups.append(_restart)


class SyncBatchNorm(_BatchNorm):
    """Batch normalization over the batches of all ranks, which may differ in size.

    It takes the arguments of ``torch.nn.BatchNorm1d`` and its siblings, and works on CPUs, too.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a batch.

        Args:
            input: Of shape ``[batch, channels, ...]``.

        Returns:
            A tensor of the same shape and type.
        """
        self._check_input_dim(input)
        exponential_average_factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                exponential_average_factor = 1.0 / float(self.num_batches_tracked)
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        tracked = not self.training or self.track_running_stats
        running_mean = self.running_mean if tracked else None
        running_var = self.running_var if tracked else None
        if not by_batch or size() == 1:
            return torch.nn.functional.batch_norm(
                input,
                running_mean,
                running_var,
                self.weight,
                self.bias,
                by_batch,
                exponential_average_factor,
                self.eps,
            )
        return _SyncBatchNorm.apply(
            input, self.weight, self.bias, running_mean, running_var, self.eps, exponential_average_factor
        )

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module) -> torch.nn.Module:
        """Replace a module's layers of batch normalization by this one; an extension.

        Args:
            module: The module; its other layers are unchanged.

        Returns:
            The module, or the new layer if the module is a layer of batch normalization.
        """
        converted = module
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            converted = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
            converted.load_state_dict(module.state_dict())
            converted.training = module.training
            for name, parameter in module.named_parameters(recurse=False):
                setattr(converted, name, parameter)
            for name, buffer in module.named_buffers(recurse=False):
                setattr(converted, name, buffer)
        for name, child in module.named_children():
            converted.add_module(name, cls.convert_sync_batchnorm(child))
        return converted


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.reshape([1, -1, *[1] * (like.dim() - 2)])


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, eps: float, momentum: float
    ) -> Any:
        # Layers may overlap, so each call uses new names; all ranks make the calls in the same order.
        ctx.name = f"sync_batch_norm.{next(_calls)}"
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [0, *range(2, input.dim())]
        channels = wide.shape[1]
        count = wide.numel() // max(channels, 1)
        mean = wide.mean(dims) if count > 0 else wide.new_zeros(channels)
        squares = ((wide - _per_channel(mean, wide)) ** 2).sum(dims)
        own = torch.cat([wide.new_full((1,), count), mean, squares]).unsqueeze(0)
        statistics = synchronize(allgather_async(own, f"{ctx.name}.mean"))
        counts, means, sums = statistics.split([1, channels, channels], dim=1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        # The variance within the batches of ranks, and the variance between them.
        var = (sums.sum(0) + (counts * (means - mean) ** 2).sum(0)) / total
        invstd = torch.rsqrt(var + eps)
        if running_mean is not None:
            running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
        if running_var is not None:
            unbiased = var * (total / (total - 1).clamp(min=1))
            running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
        ctx.save_for_backward(input, weight, mean, invstd, total)
        normal = (wide - _per_channel(mean, wide)) * _per_channel(invstd, wide)
        if weight is not None:
            normal = normal * _per_channel(weight, wide) + _per_channel(bias, wide)
        return normal.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Any) -> Any:
        input, weight, mean, invstd, total = ctx.saved_tensors
        wide = grad_output.to(mean.dtype)
        dims = [0, *range(2, input.dim())]
        centred = input.to(mean.dtype) - _per_channel(mean, wide)
        sum_dy = wide.sum(dims)
        sum_dy_xmu = (wide * centred).sum(dims)
        # The gradients of this rank's batch: the optimizer averages them.
        grad_weight = sum_dy_xmu * invstd if weight is not None and ctx.needs_input_grad[1] else None
        grad_bias = sum_dy if ctx.needs_input_grad[2] else None
        grad_input = None
        if ctx.needs_input_grad[0]:
            handles = [
                allreduce_async(values, op=Sum, name=f"{ctx.name}.{what}")
                for what, values in (("sum_dy", sum_dy), ("sum_dy_xmu", sum_dy_xmu))
            ]
            all_dy, all_dy_xmu = (synchronize(handle) for handle in handles)
            scale = invstd if weight is None else invstd * weight
            grad_input = _per_channel(scale, wide) * (
                wide - _per_channel(all_dy / total, wide) - centred * _per_channel(invstd**2 * all_dy_xmu / total, wide)
            )
            grad_input = grad_input.to(input.dtype)

        def narrow(grad: Any) -> Any:
            return None if grad is None or weight is None else grad.to(weight.dtype)

        return grad_input, narrow(grad_weight), narrow(grad_bias), None, None, None, None
