"""Optimizers of Apex that the original provides: ``smp.optimizers``.

Adam is PyTorch's, in its fused form where available. LAMB and NovoGrad follow their papers:

- LAMB: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", Algorithm 2.
- NovoGrad: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of Deep
  Networks", Algorithm 1.

- WPO-1: both use norms of whole parameters. Where tensor parallelism divides parameters, each step reduces the norms
  of all slices over the tensor-parallel group in one collective. LAMB's norm of all gradients is that of the whole
  model, also with partitions. This holds for optimizers that ``smp.DistributedOptimizer`` wraps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.modelparallel.config import warn_once
from smdistributed.modelparallel.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.torch import norms
from smdistributed.modelparallel.torch.nn import collectives

_Betas = tuple[float, float]


def _check(amsgrad: bool, set_grad_none: bool, name: str) -> None:
    if amsgrad:
        raise SMPUnsupportedError(f"`{name}` has no AMSGrad variant: leave `amsgrad` at False")
    if not set_grad_none:
        warn_once(
            f"`set_grad_none=False` of `{name}` is ignored: call `zero_grad(set_to_none=False)` to keep gradients as "
            "zeros"
        )


class FusedAdam(torch.optim.Adam):
    """Adam, or AdamW, by PyTorch's fused kernels.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        bias_correction: Must be ``True``.
        betas: Decay of the running averages of gradients and of their squares.
        eps: Added to denominators.
        adam_w_mode: Whether weight decay is decoupled, as in AdamW, instead of added to gradients.
        weight_decay: Weight decay.
        amsgrad: Must be ``False``.
        set_grad_none: ``False`` is ignored with a warning; PyTorch's ``zero_grad(set_to_none)`` applies.

    Raises:
        SMPUnsupportedError: ``bias_correction`` is ``False`` or ``amsgrad`` is ``True``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: _Betas = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _check(amsgrad, set_grad_none, "FusedAdam")
        if not bias_correction:
            raise SMPUnsupportedError("`FusedAdam` corrects the bias of its averages: leave `bias_correction` at True")
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=adam_w_mode
        )
        # The fused form is selected later: PyTorch requires a CUDA device for it, which parameters without memory
        # lack.
        for group in self.param_groups:
            group["fused"] = True
        self.defaults["fused"] = True


class FusedLAMB(Optimizer):
    """LAMB: Adam with a step for each parameter that is proportional to the norm of the parameter.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        bias_correction: Whether the bias of running averages towards zero at the beginning is corrected.
        betas: Decay of the running averages of gradients and of their squares.
        eps: Added to denominators.
        weight_decay: Decoupled weight decay; with ``adam_w_mode=False`` it is added to gradients.
        amsgrad: Must be ``False``.
        adam_w_mode: See ``weight_decay``.
        grad_averaging: Whether gradients are multiplied by ``1 - beta1`` when they are added to their average.
        set_grad_none: ``False`` is ignored with a warning; PyTorch's ``zero_grad(set_to_none)`` applies.
        max_grad_norm: Gradients of all parameters of this optimizer are first clipped to this norm; 0 for no clipping.
        use_nvlamb: Whether parameters without weight decay are scaled by their norms as well.

    Raises:
        SMPUnsupportedError: ``amsgrad`` is ``True``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: _Betas = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        _check(amsgrad, set_grad_none, "FusedLAMB")
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode, "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        Args:
            closure: Computes the loss and the gradients.

        Returns:
            The result of ``closure``.
        """
        loss = _loss_of(closure)
        total = norms.whole_norm(self) if any(group["max_grad_norm"] for group in self.param_groups) else None
        divided = norms.divided(self)
        waiting: list[tuple[torch.Tensor, dict[str, Any]]] = []
        local: list[torch.Tensor] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self._average(parameter, group, total)
                update = self._update(parameter, group)
                if not group["weight_decay"] and not group["use_nvlamb"]:
                    self._apply(parameter, group, update)
                    continue
                both = torch.stack([torch.linalg.vector_norm(each) for each in (_wide(parameter), update)])
                if id(parameter) in divided:
                    # The update is computed again below, because all of them together need the memory of a model.
                    waiting.append((parameter, group))
                    local.append(both)
                else:
                    self._apply(parameter, group, update * _trust_ratio(both))
        for (parameter, group), both in zip(waiting, _whole_norms(local, 2.0), strict=True):
            self._apply(parameter, group, self._update(parameter, group) * _trust_ratio(both))
        return loss

    def _average(self, parameter: torch.Tensor, group: dict[str, Any], total: torch.Tensor | None) -> None:
        """Add the gradient of a parameter to its running averages."""
        beta1, beta2 = group["betas"]
        assert parameter.grad is not None
        gradient, weights, limit = _wide(parameter.grad), _wide(parameter), group["max_grad_norm"]
        if limit:
            assert total is not None
            gradient = gradient / torch.clamp(total / limit, min=1.0).to(gradient)
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device="cpu")
            state["exp_avg"] = torch.zeros_like(weights)
            state["exp_avg_sq"] = torch.zeros_like(weights)
        state["step"] += 1
        if group["weight_decay"] and not group["adam_w_mode"]:
            gradient = gradient + group["weight_decay"] * weights
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Return Adam's update of a parameter."""
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        first = second = 1.0
        if group["bias_correction"]:
            count = float(state["step"])
            first, second = 1 - beta1**count, 1 - beta2**count
        update = (state["exp_avg"] / first) / ((state["exp_avg_sq"] / second).sqrt() + group["eps"])
        if group["weight_decay"] and group["adam_w_mode"]:
            update = update + group["weight_decay"] * _wide(parameter)
        return update

    def _apply(self, parameter: torch.Tensor, group: dict[str, Any], update: torch.Tensor) -> None:
        parameter.sub_(update.to(parameter.dtype), alpha=group["lr"])


#: The name in older releases of Apex, which published scripts use.
FusedLamb = FusedLAMB


class FusedNovoGrad(Optimizer):
    """NovoGrad: gradients are normalized by a running average of the norm of each parameter's gradient.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        bias_correction: Whether the bias of running averages towards zero at the beginning is corrected.
        betas: Decay of the running averages of gradients and of their norms.
        eps: Added to denominators.
        weight_decay: Weight decay.
        amsgrad: Must be ``False``.
        reg_inside_moment: Whether weight decay is added inside of the running average, as in the paper, or to the
        update.
        grad_averaging: Whether gradients are multiplied by ``1 - beta1`` when they are added to their average.
        norm_type: Order of the norm: 2, or 0 for the largest element.
        init_zero: Whether the average of norms starts at zero, or at the first norm as in the paper.
        set_grad_none: ``False`` is ignored with a warning; PyTorch's ``zero_grad(set_to_none)`` applies.

    Raises:
        SMPUnsupportedError: ``amsgrad`` is ``True``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: _Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _check(amsgrad, set_grad_none, "FusedNovoGrad")
        if norm_type not in (0, 2):
            raise ValueError(f"`norm_type` is {norm_type}: expected 2, or 0 for the largest element")
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "reg_inside_moment": reg_inside_moment, "grad_averaging": grad_averaging, "norm_type": norm_type,
            "init_zero": init_zero,
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        Args:
            closure: Computes the loss and the gradients.

        Returns:
            The result of ``closure``.
        """
        loss = _loss_of(closure)
        divided = norms.divided(self)
        # The norms of all slices of one order are reduced together.
        waiting: dict[float, list[tuple[torch.Tensor, dict[str, Any], torch.Tensor]]] = {}
        for group in self.param_groups:
            order = 2.0 if group["norm_type"] == 2 else math.inf
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                norm = torch.linalg.vector_norm(_wide(parameter.grad), order)
                if id(parameter) in divided:
                    waiting.setdefault(order, []).append((parameter, group, norm))
                else:
                    self._update(parameter, group, norm)
        for order, rows in waiting.items():
            for (parameter, group, _), norm in zip(rows, _whole_norms([row[2] for row in rows], order), strict=True):
                self._update(parameter, group, norm)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], norm: torch.Tensor) -> None:
        """Update a parameter, given the norm of its gradient."""
        beta1, beta2 = group["betas"]
        assert parameter.grad is not None
        gradient, weights = _wide(parameter.grad), _wide(parameter)
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device="cpu")
            state["exp_avg"] = torch.zeros_like(weights)
            state["norm"] = torch.zeros_like(norm) if group["init_zero"] else norm.clone()
        state["step"] += 1
        if group["norm_type"] == 2:
            state["norm"] = (beta2 * state["norm"].square() + (1 - beta2) * norm.square()).sqrt()
        else:
            state["norm"] = beta2 * state["norm"] + (1 - beta2) * norm
        first = second = 1.0
        if group["bias_correction"]:
            count = float(state["step"])
            first = 1 - beta1**count
            # An average that starts at the first norm has no bias.
            second = math.sqrt(1 - beta2**count) if group["init_zero"] else 1.0
        normal = gradient / (state["norm"] / second + group["eps"])
        decay = group["weight_decay"]
        if decay and group["reg_inside_moment"]:
            normal = normal + decay * weights
        average = state["exp_avg"]
        average.mul_(beta1).add_(normal, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        update = average / first
        if decay and not group["reg_inside_moment"]:
            update = update + decay * weights
        parameter.sub_(update.to(parameter.dtype), alpha=group["lr"])


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a type that updates are computed in: float32 for narrow types."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.detach()


def _whole_norms(local: list[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return the norms of whole parameters, given those of this rank's slices; in one collective (WPO-1).

    Args:
        local: Norms of slices, all of one shape and type. All ranks of the tensor-parallel group have as many.
        order: Order of the norm.

    Returns:
        The norms.
    """
    if not local:
        return []
    stacked = torch.stack([each.to(torch.float64) for each in local])
    if math.isinf(order):
        whole = collectives.all_reduce(stacked, ReduceOp.MAX)
    else:
        whole = collectives.all_reduce(stacked.square()).sqrt()
    return [norm.to(each.dtype) for norm, each in zip(whole.unbind(), local, strict=True)]


def _trust_ratio(norms_of_both: torch.Tensor) -> torch.Tensor:
    """Return the factor of an update, given the norms of the parameter and of the update; 1 if either is zero."""
    of_weights, of_update = norms_of_both.unbind()
    ratio = of_weights / of_update
    return torch.where((of_weights > 0) & (of_update > 0), ratio, torch.ones_like(ratio))


def _loss_of(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


#: Optimizers whose update of an element needs norms of the whole parameter; their states cannot be sharded.
WHOLE_PARAMETER = (FusedLAMB, FusedNovoGrad)


def steps_here(optimizer: Optimizer) -> bool:
    """Return whether an optimizer takes steps on this rank.

    Args:
        optimizer: The optimizer.

    Returns:
        Whether it has parameters, or takes part in the norm of those of other ranks.
    """
    return isinstance(optimizer, FusedLAMB) or any(group["params"] for group in optimizer.param_groups)
