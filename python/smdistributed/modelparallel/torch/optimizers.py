"""Optimizers of Apex that the original provides: ``smp.optimizers``.

Adam is PyTorch's, in its fused form where available. LAMB and NovoGrad follow their papers:

- LAMB: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", Algorithm 2.
- NovoGrad: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of Deep
  Networks", Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from smdistributed.modelparallel.exceptions import SMPUnsupportedError

_Betas = tuple[float, float]


def _refuse_amsgrad(amsgrad: bool, name: str) -> None:
    if amsgrad:
        raise SMPUnsupportedError(f"`{name}` has no AMSGrad variant: leave `amsgrad` at False")


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
        set_grad_none: Ignored; the argument of PyTorch's ``zero_grad(set_to_none)`` applies.

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
        del set_grad_none
        _refuse_amsgrad(amsgrad, "FusedAdam")
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
        set_grad_none: Ignored; the argument of PyTorch's ``zero_grad(set_to_none)`` applies.
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
        del set_grad_none
        _refuse_amsgrad(amsgrad, "FusedLAMB")
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
        norms = [
            torch.linalg.vector_norm(each.grad, dtype=torch.float32)
            for group in self.param_groups
            for each in group["params"]
            if each.grad is not None
        ]
        total = torch.linalg.vector_norm(torch.stack(norms)) if norms else None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            limit = group["max_grad_norm"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                assert total is not None
                gradient = parameter.grad.float()
                if limit:
                    gradient = gradient / torch.clamp(total / limit, min=1.0)
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device="cpu")
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["step"] += 1
                decay, weights = group["weight_decay"], parameter.float()
                if decay and not group["adam_w_mode"]:
                    gradient = gradient + decay * weights
                average, squares = state["exp_avg"], state["exp_avg_sq"]
                average.mul_(beta1).add_(gradient, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
                squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                first = second = 1.0
                if group["bias_correction"]:
                    count = float(state["step"])
                    first, second = 1 - beta1**count, 1 - beta2**count
                update = (average / first) / ((squares / second).sqrt() + group["eps"])
                if decay and group["adam_w_mode"]:
                    update = update + decay * weights
                if decay or group["use_nvlamb"]:
                    update = update * _trust_ratio(weights, update)
                parameter.sub_(update.to(parameter.dtype), alpha=group["lr"])
        return loss


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
        set_grad_none: Ignored; the argument of PyTorch's ``zero_grad(set_to_none)`` applies.

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
        del set_grad_none
        _refuse_amsgrad(amsgrad, "FusedNovoGrad")
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
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            order = 2.0 if group["norm_type"] == 2 else math.inf
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, weights = parameter.grad.float(), parameter.float()
                norm = torch.linalg.vector_norm(gradient, order)
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device="cpu")
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["norm"] = torch.zeros_like(norm) if group["init_zero"] else norm.clone()
                state["step"] += 1
                if order == 2.0:
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
        return loss


def _trust_ratio(weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """Return the factor of an update: the parameter's norm over the update's; 1 if either is zero."""
    of_weights, of_update = torch.linalg.vector_norm(weights), torch.linalg.vector_norm(update)
    ratio = of_weights / of_update
    return torch.where((of_weights > 0) & (of_update > 0), ratio, torch.ones_like(ratio))


def _loss_of(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


#: Optimizers whose update of an element needs the whole parameter; their states cannot be sharded.
WHOLE_PARAMETER = (FusedLAMB, FusedNovoGrad)
