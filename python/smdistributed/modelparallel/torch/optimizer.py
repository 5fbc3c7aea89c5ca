"""The optimizer of a script, for the parameters that this rank holds."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from smdistributed.modelparallel.exceptions import SMPUnsupportedError, SMPUsageError
from smdistributed.modelparallel.torch.checkpoint import state_dicts
from smdistributed.modelparallel.torch.state import state
from smdistributed.modelparallel.torch.tracing.remote_tensor import MetaParameter

#: What `dynamic_loss_args` may hold; also as arguments of their own.
_DYNAMIC = {"init_scale", "scale_factor", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis"}


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps any optimizer of PyTorch's; it may have been made before or after the model was wrapped.

    It is an ``Optimizer`` itself, with the wrapped one's ``param_groups``, ``state`` and ``defaults``, so schedulers
    take it as well as ``.optimizer``. On a rank without parameters ``step`` does nothing.

    Args:
        optimizer: The optimizer.
        static_loss_scale: The loss scale of the configuration's ``fp16``. Scales have no effect without ``fp16``, and a
            warning says so once.
        dynamic_loss_scale: Whether that scale is found during training.
        dynamic_loss_args: How it is found: ``init_scale``, ``scale_window`` and others.
        **more: The older names ``static_loss_scaling`` and ``dynamic_loss_scaling``, or what ``dynamic_loss_args`` may
            hold.

    Attributes:
        optimizer: The wrapped one.
        overflow: Whether the last step was skipped; of FP16.
        fp16_groups: Of FP16.
        _global_grad_norm: The norm of all gradients that ``smp.clip_grad_norm_`` found last; scripts of the original
            print it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        static_loss_scale = more.pop("static_loss_scaling", static_loss_scale)
        dynamic_loss_scale = more.pop("dynamic_loss_scaling", dynamic_loss_scale)
        unknown = {*more, *(dynamic_loss_args or ())} - _DYNAMIC
        if unknown:
            raise TypeError(f"`smp.DistributedOptimizer` has no argument `{min(unknown)}`")
        if isinstance(optimizer, DistributedOptimizer):
            raise SMPUsageError("the optimizer is wrapped in `smp.DistributedOptimizer` already")
        if not (hasattr(optimizer, "param_groups") and callable(getattr(optimizer, "step", None))):
            raise TypeError(f"`smp.DistributedOptimizer` takes an optimizer, not a {type(optimizer).__name__}")
        if static_loss_scale not in (None, 1.0) or dynamic_loss_scale or dynamic_loss_args or more:
            _warn_of_scales()
        # Not `super().__init__`: everything that an optimizer has is the wrapped one's.
        self.__dict__["optimizer"] = optimizer
        self.overflow = False
        self.fp16_groups: list[Any] = []
        self._global_grad_norm: torch.Tensor | None = None
        if state.model is not None and state.model.is_partitioned:
            self._localize({})
        # Last: an optimizer that could not be wrapped is not the job's.
        state.optimizer = self

    #: A scaler would leave the scale here, where a fused optimizer inside does not look.
    _step_supports_amp_scaling = False

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def _localize(self, replaced: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Drops the parameters of other partitions.

        Args:
            replaced: By identity, parameters that others have taken the place of, and these.
        """
        for group in self.optimizer.param_groups:
            names = group.get("param_names")
            kept, kept_names, seen = [], [], set()
            for place, parameter in enumerate(group["params"]):
                parameter = replaced.get(id(parameter), (None, parameter))[1]
                if isinstance(parameter, MetaParameter) or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                kept.append(parameter)
                if names is not None:
                    kept_names.append(names[place])
            group["params"] = kept
            if names is not None:
                group["param_names"] = kept_names
        gone = [parameter for parameter in self.optimizer.state if id(parameter) in replaced]
        for parameter in gone:
            content = self.optimizer.state.pop(parameter)
            new = replaced[id(parameter)][1]
            if not isinstance(new, MetaParameter):
                self.optimizer.state[new] = content

    def step(self, closure: Any = None) -> Any:
        """Take a step of the wrapped optimizer with this rank's parameters.

        Args:
            closure: Must be ``None``: a closure would run the model again.

        Returns:
            What the wrapped optimizer returns; ``None`` on a rank without parameters.

        Raises:
            SMPUnsupportedError: ``closure`` is given.
        """
        if closure is not None:
            raise SMPUnsupportedError(
                "a closure would run the model again: call the `smp.step` function before `step()`"
            )
        if not any(group["params"] for group in self.optimizer.param_groups):
            return None
        return self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, as the wrapped optimizer does.

        Args:
            set_to_none: Whether gradients become ``None`` instead of zeros.
        """
        self.optimizer.zero_grad(set_to_none)

    def clip_master_grads(self, max_norm: float) -> Any:
        """Raise an error: master weights belong to FP16, which is not supported.

        Args:
            max_norm: Ignored.

        Raises:
            SMPUnsupportedError: Always.
        """
        del max_norm
        raise SMPUnsupportedError(
            "master weights belong to FP16, which is not there yet: `smp.clip_grad_norm_` clips the gradients of all "
            "partitions"
        )

    # State: `checkpoint/state_dicts.py` says how it is gathered, split and named.

    def state_dict(self) -> dict[str, Any]:
        """The whole optimizer's, on every rank of one replica, all of which call it."""
        return state_dicts.full_optimizer(_model(), self)

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """Return the part of the state that this rank holds.

        Args:
            gather_if_shard: Ignored.

        Returns:
            The state, with ``_smp_is_partial``.
        """
        del gather_if_shard
        return state_dicts.local_optimizer(_model(), self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state. Before the first step, it is loaded when the model has been partitioned.

        Args:
            state_dict: A whole state, or this rank's part of one.
        """
        found = dict(state_dict)
        _model()._when_partitioned(lambda: state_dicts.load_optimizer(_model(), self, found))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped one's."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped one's."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped one's."""
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to the wrapped optimizer; parameters of other partitions are dropped.

        Args:
            param_group: The group, as PyTorch's optimizers take it.
        """
        self.optimizer.add_param_group(param_group)
        if state.model is not None and state.model.is_partitioned:
            self._localize({})


@functools.cache
def _warn_of_scales() -> None:
    warnings.warn(
        "the loss scale of `smp.DistributedOptimizer` has no effect without the configuration's `fp16`: "
        "`smp.amp.GradScaler` "
        "scales losses under autocast",
        stacklevel=3,
    )


def _model() -> Any:
    if state.model is None:
        raise SMPUsageError(
            "the names of an optimizer's parameters are those of a `smp.DistributedModel`: there is none"
        )
    return state.model
