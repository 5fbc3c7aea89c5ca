"""Models of Hugging Face without casts to float32: every computation is in the dtype of the weights."""

from __future__ import annotations

import functools
import sys

import torch
from torch import nn


def _norm(module, hidden):
    return nn.functional.rms_norm(hidden, hidden.shape[-1:], module.weight, module.variance_epsilon)


def _route(module, hidden):
    logits = nn.functional.linear(hidden.reshape(-1, module.hidden_dim), module.weight)
    weights, chosen = logits.softmax(-1).topk(module.top_k, -1)
    return logits, weights / weights.sum(-1, keepdim=True), chosen


class _WithoutFloat32:
    """The module `torch`, in which `float32` is the default type."""

    def __getattr__(self, name):
        return torch.get_default_dtype() if name == "float32" else getattr(torch, name)


def exact(model):
    """Replaces the parts of a model that compute in float32, and returns the model."""
    for each in model.modules():
        kind = type(each).__name__
        if kind.endswith("RMSNorm") or kind == "T5LayerNorm":
            each.forward = functools.partial(_norm, each)
        elif kind == "MixtralTopKRouter":
            each.forward = functools.partial(_route, each)
        elif kind in ("GPTJAttention", "GPTNeoSelfAttention"):
            # Their code casts queries and keys to `torch.float32`.
            sys.modules[type(each).__module__].torch = _WithoutFloat32()
        elif kind == "MixtralForCausalLM":
            sys.modules[type(each).__module__].load_balancing_loss_func = _balancing_loss
    return model


def _balancing_loss(logits, num_experts, experts_per_token, is_token=None):
    """The load-balancing loss of a mixture of experts over the tokens of all layers. ``logits`` has a tensor of
    ``[batch * S, experts]`` for each layer.
    """
    rows = torch.cat(logits)
    if is_token is not None:
        rows = rows[is_token.flatten().bool().repeat(len(logits))]
    uses = nn.functional.one_hot(rows.topk(experts_per_token, -1)[1], num_experts).sum(1).to(rows)
    return num_experts * (uses.mean(0) * rows.softmax(-1).mean(0)).sum()
