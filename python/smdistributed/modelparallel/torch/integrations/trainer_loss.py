"""Losses of the Trainer of transformers 5 under model parallelism, equal to those that it computes in one process.

Without model parallelism, the Trainer has models divide the sum of their losses by the number of labels in all batches
between two updates. Its branch for model parallelism does not: it takes the mean of the losses of microbatches, each a
mean over labels of its own.

- TRL-1: a model gets the number of labels divided by that of microbatches, since a step averages over microbatches.
  Its loss is multiplied by the number of ranks over which labels were counted, since gradients are averaged over them.
- TRL-2: a model whose code shows no use of the number gets none. One process then adds up the losses of accumulated
  batches, though they are means, if the model takes arguments that it does not know. So does the branch here.
- TRL-3: if the loss of such a model is the mean over its labels, as that of BERT for masked language modeling, the loss
  of a microbatch is weighted by its share of the labels in the batch, which the ranks add up once for each batch.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from typing import Any

import torch

from smdistributed.modelparallel.config import warn_once
from smdistributed.modelparallel.torch.state import state

_ITEMS = "num_items_in_batch"
_IGNORED_LABEL = -100
#: The divisor of the loss of the step that begins, if the branch's own is not that of one process.
_divisor: contextvars.ContextVar[Any] = contextvars.ContextVar("divisor", default=None)


class ItemCount:
    """The number of labels by which a model divides a sum of losses, as an argument of a step.

    Args:
        count: The number.
    """

    def __init__(self, count: torch.Tensor | float) -> None:
        whole = count if isinstance(count, torch.Tensor) else torch.tensor(count, device="cpu")
        self._count = whole.double()

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> torch.Tensor:
        """Return the number for a microbatch (TRL-1).

        Args:
            num_mb: Number of microbatches.
            mb: Index of the microbatch.
            axis: The batch's axis, which a number has none of.

        Returns:
            The number, without axes.
        """
        del mb, axis
        return self._count / num_mb


class LabelShares:
    """The divisors of the mean losses of microbatches, as an argument of a step (TRL-3).

    Args:
        labels: ``[batch, ..]``, the labels on this rank.
        whole: The number of labels in the batch, over all counting ranks.
        ranks: The number of these ranks.
        divisor: A divisor of all losses.
    """

    def __init__(self, labels: torch.Tensor, whole: torch.Tensor, ranks: int, divisor: float = 1.0) -> None:
        self._is_label = labels.ne(_IGNORED_LABEL).flatten(1).sum(1)
        self._mean, self._divisor = whole.double() / ranks, divisor

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> torch.Tensor:
        """Return the divisor for a microbatch.

        Args:
            num_mb: Number of microbatches.
            mb: Index of the microbatch.
            axis: The batch's axis, which a number has none of.

        Returns:
            The divisor, without axes.
        """
        del axis
        own = self._is_label.chunk(num_mb)[mb].sum()
        return self._mean.to(own.device) / (own * num_mb) * self._divisor


def adapt(module: Any) -> None:
    """Correct the losses of the Trainer's branch, if its version counts labels.

    Args:
        module: The module of the Trainer.
    """
    kind = module.Trainer
    if _ITEMS not in inspect.signature(getattr(kind, "training_step", _nothing)).parameters:
        return
    training_step, prediction_step = kind.training_step, kind.prediction_step
    forward_backward, forward_only = module.smp_forward_backward, module.smp_forward_only

    @functools.wraps(training_step)
    def step_of_batch(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        counts = num_items_in_batch is not None and _uses_count(self)
        shares = not counts and _averages_labels(self, inputs)
        _warn_of_differences(self, inputs, counts or shares)
        divisor: Any = 1.0 if _adds_up(self, num_items_in_batch) else float(self.current_gradient_accumulation_steps)
        if counts:
            inputs = {**inputs, _ITEMS: ItemCount(num_items_in_batch)}
            divisor = 1.0 / _counting_ranks(self)
        elif shares:
            divisor = _shares(self, inputs["labels"], divisor)
        # An epoch may end with fewer batches than are accumulated otherwise.
        state.require_model().replicas.reduce_in_next_step(self.accelerator.gradient_state.sync_gradients)
        token = _divisor.set(divisor)
        try:
            return training_step(self, model, inputs, num_items_in_batch)
        finally:
            _divisor.reset(token)

    @functools.wraps(prediction_step)
    def predict_batch(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        if has_labels and _uses_count(self):
            count = self._get_num_items_in_batch([inputs], self.args.device)
            if count is not None:
                inputs = {**inputs, _ITEMS: ItemCount(count / _counting_ranks(self))}
        token = None
        if has_labels and _ITEMS not in inputs and _averages_labels(self, inputs):
            token = _divisor.set(_shares(self, inputs["labels"]))
        try:
            return prediction_step(self, model, inputs, *args, **kwargs)
        finally:
            if token is not None:
                _divisor.reset(token)

    @functools.wraps(forward_backward)
    def divided(model: Any, inputs: Any, gradient_accumulation_steps: float = 1) -> Any:
        divisor = _divisor.get()
        return forward_backward(model, inputs, gradient_accumulation_steps if divisor is None else divisor)

    @functools.wraps(forward_only)
    def divided_outputs(model: Any, inputs: Any) -> Any:
        outputs, shares = forward_only(model, inputs), _divisor.get()
        if isinstance(shares, LabelShares) and isinstance(outputs, dict):
            losses = outputs["loss"].outputs
            of_parts = [each / shares.smp_slice(len(losses), at, 0).to(each) for at, each in enumerate(losses)]
            outputs["loss"] = type(outputs["loss"])(of_parts)
        return outputs

    kind.training_step, kind.prediction_step = step_of_batch, predict_batch
    module.smp_forward_backward, module.smp_forward_only = divided, divided_outputs


def _nothing() -> None:
    """Stand for a method that is absent."""


def _adds_up(trainer: Any, num_items: Any) -> bool:
    """Return whether one process adds up the losses of accumulated batches instead of dividing by their number."""
    chosen = getattr(trainer, "loss_is_scaled_for_ga", None)
    return bool(chosen) if chosen is not None else bool(trainer.model_accepts_loss_kwargs and num_items is not None)


def _shares(trainer: Any, labels: torch.Tensor, divisor: float = 1.0) -> LabelShares:
    """Return the shares of the labels of microbatches; all counting ranks call it."""
    ranks, count = _counting_ranks(trainer), labels.ne(_IGNORED_LABEL).sum()
    if ranks > 1:
        count = trainer.accelerator.gather(count.to(trainer.args.device)).sum().to(labels.device)
    return LabelShares(labels, count, ranks, divisor)


def _counting_ranks(trainer: Any) -> int:
    """Return the number of ranks over which labels were counted."""
    return trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1


def _warn_of_differences(trainer: Any, inputs: Any, counts: bool) -> None:
    """Warn if the loss of a batch does not follow from those of its microbatches."""
    microbatches = state.cfg.microbatches
    if microbatches == 1:
        return
    config = getattr(trainer.model, "config", None)
    if getattr(config, "output_router_logits", False):
        warn_once(
            "the load-balancing loss of the experts (`output_router_logits`) is the mean over microbatches: it differs "
            "from that of the whole batch, which one process computes"
        )
    if not counts and _are_uneven(inputs.get("labels"), microbatches):
        warn_once(
            f"microbatches have different numbers of labels, and {type(trainer.model).__name__} does not divide its "
            f"loss by `{_ITEMS}`: the loss is the mean over microbatches, and not over the labels of the whole batch"
        )


def _uses_count(trainer: Any) -> bool:
    """Return whether a model divides its loss by the number: by a parameter, or by transformers' loss (TRL-2)."""
    if not trainer.model_accepts_loss_kwargs:
        return False
    forward, code = _forward_of(trainer.model)
    return _ITEMS in inspect.signature(forward).parameters or (code is not None and "loss_function" in code.co_names)


def _averages_labels(trainer: Any, inputs: Any) -> bool:
    """Return whether the loss of a model is the mean over the labels of tokens, as its code shows (TRL-3).

    That is so if its only labels go to a ``CrossEntropyLoss`` without weights and with PyTorch's reduction.
    """
    labels = inputs.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.dim() < 2 or labels.is_floating_point():
        return False
    forward, code = _forward_of(trainer.model)
    if (
        code is None
        or "CrossEntropyLoss" not in code.co_names
        or not {"loss_function", "loss_fn"}.isdisjoint(code.co_names)
    ):
        return False
    of_labels = [name for name in inspect.signature(forward).parameters if "label" in name]
    options = {name for each in code.co_consts if isinstance(each, tuple) for name in each if isinstance(name, str)}
    return of_labels == ["labels"] and options.isdisjoint({"weight", "reduction", "label_smoothing"})


def _forward_of(model: Any) -> tuple[Any, Any]:
    """Return the function that computes the loss, and its code."""
    if hasattr(model, "get_base_model"):
        # An adapter of PEFT calls the model with its own arguments.
        model = model.get_base_model()
    forward = inspect.unwrap(model.forward)
    return forward, getattr(forward, "__code__", None)


def _are_uneven(labels: Any, microbatches: int) -> bool:
    """Return whether some microbatches have more labels than others."""
    if not isinstance(labels, torch.Tensor) or labels.dim() < 2 or labels.is_floating_point():
        return False
    if labels.shape[0] % microbatches or not labels.numel():
        return False
    counts = labels.ne(_IGNORED_LABEL).reshape(microbatches, -1).sum(1)
    return bool((counts != counts[0]).any())
