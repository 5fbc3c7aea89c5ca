"""The optimizer of a script, for the parameters that this rank holds."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from smdistributed import _core
from smdistributed.modelparallel.exceptions import SMPUnsupportedError, SMPUsageError
from smdistributed.modelparallel.torch import norms
from smdistributed.modelparallel.torch.checkpoint import optimizer_state
from smdistributed.modelparallel.torch.optimizers import steps_here
from smdistributed.modelparallel.torch.precision import half_model, loss_scale
from smdistributed.modelparallel.torch.precision.loss_scale import DYNAMIC_DEFAULTS, make_loss_scale
from smdistributed.modelparallel.torch.precision.master_weights import MasterWeights
from smdistributed.modelparallel.torch.sharding.optimizer_shards import (
    OptimizerShards,
    ReplicaGroup,
    check_elementwise,
    check_slices,
)
from smdistributed.modelparallel.torch.sharding.piece import Piece
from smdistributed.modelparallel.torch.sharding.sharded_model import ShardedModel
from smdistributed.modelparallel.torch.state import state
from smdistributed.modelparallel.torch.tracing.remote_tensor import MetaParameter


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps any optimizer of PyTorch, which may have been created before or after the model was wrapped.

    It is an ``Optimizer`` itself, with the wrapped optimizer's ``param_groups``, ``state`` and ``defaults``, so
    schedulers accept it as well as ``.optimizer``. On a rank without parameters, ``step`` does nothing.

    With the configuration's ``fp16`` or ``bf16``, the wrapped optimizer updates float32 master weights, and the model's
    parameters are these, rounded. With ``fp16``, ``model.backward`` multiplies losses by a scale, and a step whose
    gradients overflow on any rank is skipped on all.

    Args:
        optimizer: The optimizer.
        static_loss_scale: The loss scale of the configuration's ``fp16``; may be ``None`` with a dynamic one. Without
        ``fp16``, scales are ignored with a warning.
        dynamic_loss_scale: Whether the scale is adapted during training.
        dynamic_loss_args: How it is adapted. ``init_scale`` (2**32) is the first scale. An overflow divides it by
        ``scale_factor`` (2.0), and ``scale_window`` (1000) steps without an overflow multiply it by that; it never
        falls below ``min_scale`` (1). ``delayed_shift`` (1) is the number of overflows until it shrinks; this count
        restarts when the scale grows, and with ``consecutive_hysteresis`` (``False``) after each step without an
        overflow.
        **more: The older names ``static_loss_scaling`` and ``dynamic_loss_scaling``, or keys of
        ``dynamic_loss_args``.

    Attributes:
        optimizer: The wrapped optimizer.
        _global_grad_norm: The norm of all gradients from the last ``smp.clip_grad_norm_`` or ``clip_master_grads``;
        scripts of the original print it.

    Raises:
        SMPValidationError: An argument of the loss scale is invalid.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        if (static_loss_scale, dynamic_loss_scale, dynamic_loss_args) == (1.0, False, None) and not more:
            more = dict(loss_scale.chosen)
            static_loss_scale = more.pop("static_loss_scale", static_loss_scale)
            dynamic_loss_scale = more.pop("dynamic_loss_scale", dynamic_loss_scale)
        static_loss_scale = more.pop("static_loss_scaling", static_loss_scale)
        dynamic_loss_scale = more.pop("dynamic_loss_scaling", dynamic_loss_scale)
        unknown = {*more, *(dynamic_loss_args or ())} - DYNAMIC_DEFAULTS.keys()
        if unknown:
            raise TypeError(f"`smp.DistributedOptimizer` has no argument `{min(unknown)}`")
        if isinstance(optimizer, DistributedOptimizer):
            raise SMPUsageError("the optimizer is wrapped in `smp.DistributedOptimizer` already")
        if not (hasattr(optimizer, "param_groups") and callable(getattr(optimizer, "step", None))):
            raise TypeError(f"`smp.DistributedOptimizer` takes an optimizer, not a {type(optimizer).__name__}")
        if state.model is not None:
            check_slices(optimizer, state.model.module)
        dtype = half_model.model_dtype(state.cfg) if state.initialized else None
        scale = _core.LossScale(1.0)
        if dtype is torch.float16:
            scale = make_loss_scale(static_loss_scale, dynamic_loss_scale, {**(dynamic_loss_args or {}), **more})
        elif static_loss_scale not in (None, 1.0) or dynamic_loss_scale or dynamic_loss_args or more:
            _warn_of_scales()
        # Does not call `super().__init__`: all attributes of an optimizer are the wrapped one's.
        self.__dict__["optimizer"] = optimizer
        self._half, self._loss_scale = dtype, scale
        self._masters: MasterWeights | None = None
        self._shards: OptimizerShards | None = None
        #: Whether `model.backward` has scaled a loss since the last step.
        self._has_scaled_loss = False
        self._global_grad_norm: torch.Tensor | None = None
        if state.model is not None and state.model.is_partitioned:
            self._localize({})
        # Registered last, so that an optimizer that could not be wrapped is not registered.
        state.optimizer = self

    #: Attributes in which a GradScaler stores its scale; they are forwarded, because the wrapped optimizer reads
    #: them.
    _step_supports_amp_scaling = False

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def _localize(self, replaced: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Drop the parameters of other partitions.

        Args:
            replaced: For each replaced parameter by id: itself and its replacement.
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
        if _sharded_model() is not None:
            self._check_sharded()
        elif state.cfg.shard_optimizer_state and state.groups.dp_group is not None:
            self._adopt_shards()
        if self._half is not None:
            self._adopt_masters()

    def _check_sharded(self) -> None:
        """Reject optimizers that cannot update sharded parameters."""
        check_elementwise(self.optimizer)
        if any(
            value.dim() > 1
            for entry in self.optimizer.state.values()
            for value in entry.values()
            if torch.is_tensor(value)
        ):
            raise SMPUnsupportedError(
                "sharded data parallelism: the optimizer has a state of whole parameters already; wrap it before its "
                "first step, and load its state by `load_state_dict`"
            )

    def _adopt_shards(self) -> None:
        if self._shards is not None:
            self._shards.adopt()
            return
        if self.optimizer.state:
            raise SMPUnsupportedError(
                "`shard_optimizer_state`: the optimizer has a state already; wrap it before its first step, and load "
                "its state by `load_state_dict`"
            )
        model, groups = _model(), state.groups
        parts = []
        for name, group, named in (
            ("dp", groups.dp_group, model.default_reducer_named_parameters()),
            ("rdp", groups.rdp_group, model.scaled_batch_reducer_named_parameters()),
        ):
            replicas = ReplicaGroup(group, len(groups.members[name]), groups.rank_in(name))
            parts.append((replicas, [(each_name, each) for each_name, each in named if each.requires_grad]))
        self._shards = OptimizerShards(self.optimizer, parts)
        norms.follow_torch()

    def _adopt_masters(self) -> None:
        if self._masters is None:
            self._masters = MasterWeights(self.optimizer, self._loss_scale, self._half is torch.float16)
            norms.follow_torch()
        else:
            self._masters.adopt()

    def _pieces(self) -> dict[int, Piece]:
        """Map each parameter of the wrapped optimizer, by id, to its part of a model's parameter."""
        named = _model().module.named_parameters()
        found = {id(parameter): Piece.whole(name, parameter) for name, parameter in named}
        if self._shards is not None:
            found |= self._shards.pieces
        sharded = _sharded_model()
        if sharded is not None:
            found |= sharded.pieces
        if self._masters is not None:
            sources = self._masters.sources.items()
            found |= {master: found[id(source)] for master, source in sources if id(source) in found}
        return found

    @property
    def master_sources(self) -> Mapping[int, torch.Tensor]:
        """For each master weight by id, the 16-bit parameter of the model; empty without ``fp16`` and ``bf16``."""
        return {} if self._masters is None else self._masters.sources

    @property
    def is_sharded(self) -> bool:
        """Whether ranks with the same parameters hold different parts of the state."""
        return self._shards is not None or _sharded_model() is not None

    def _counted(self, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the gradients that this rank adds to a norm, so that each one counts on one rank only."""
        sharded = _sharded_model()
        if sharded is None:
            return gradients
        sources = self.master_sources
        pieces = sharded.pieces
        left_out = set()
        for each in itertools.chain.from_iterable(group["params"] for group in self.optimizer.param_groups):
            source = sources.get(id(each), each)
            groups = sharded.groups_of(source)
            # Replicas have the same shards; ranks of a sharding group have the same parameters that are not sharded.
            if groups.number > 0 or (groups.rank > 0 and id(source) not in pieces):
                left_out.add(id(each.grad))
        return [each for each in gradients if id(each) not in left_out]

    def _parameters_changed(self) -> None:
        """Update the master weights after parameters of the model were changed by other means than a step."""
        if self._masters is not None:
            self._masters.refresh()

    def _publish(self) -> None:
        """Set the model's parameters from the master weights; with shards, all ranks that hold them call it."""
        if self._masters is not None:
            self._masters.publish()
        if self._shards is not None:
            self._shards.gather()

    # 16-bit training.

    @property
    def loss_scale(self) -> float:
        """The factor by which ``model.backward`` multiplies losses; 1 without ``fp16``."""
        return self._loss_scale.scale

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, because a gradient on some rank was not finite (``fp16`` only)."""
        return self._masters is not None and self._masters.overflow

    @property
    def fp16_groups(self) -> list[list[torch.Tensor]]:
        """The 16-bit parameters of each group; empty without ``fp16`` and ``bf16``."""
        return [] if self._masters is None else self._masters.groups

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """The concatenated master weights of each group; empty without ``fp16`` and ``bf16``."""
        return [] if self._masters is None else self._masters.flat

    @property
    def ds_param_shard_group(self) -> Any:
        """The ``torch.distributed`` group of the ranks that hold one model; ``None`` without sharded parameters."""
        return None if state.groups.sharding is None else state.groups.process_group("sharding")

    def _loss_is_scaled(self) -> None:
        """Note that the loss was scaled; ``model.backward`` calls it."""
        self._has_scaled_loss = True
        if self._masters is not None:
            self._masters.forget_gradients()

    def update_master_grads(self) -> None:
        """Divide gradients by the loss scale, and move them to the master weights; otherwise ``step`` does so.

        Raises:
            SMPUsageError: A gradient was computed without ``model.backward``, so without the scale.
        """
        if self._masters is not None:
            self._check_scaled()
            self._masters.unscale()

    def _lacks_parameters(self, wanted: Container[int]) -> bool | None:
        """Return whether a parameter of this rank that has a gradient is not among those with the given ids.

        `None` unless the state is sharded: only then the gradients of a parameter are on different ranks, and all
        must be clipped together.
        """
        if self._shards is None:
            return None
        return any(id(each) not in wanted for each in _model().local_parameters() if each.requires_grad)

    def _gradients_of(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of these parameters that the wrapped optimizer uses, ready to be clipped."""
        if self._shards is not None:
            parameters = self._shards.parts_of({id(each) for each in parameters})
        if self._masters is None:
            return [each.grad for each in parameters if each.grad is not None]
        self.update_master_grads()
        return self._masters.gradients({id(each) for each in parameters})

    def _check_scaled(self) -> None:
        if self._loss_scale.scale != 1.0 and not self._has_scaled_loss:
            raise SMPUsageError(
                "`fp16` divides gradients by the loss scale, and no loss was multiplied by it since the last step: "
                "call `model.backward(loss)` instead of `loss.backward()`"
            )

    def step(self, closure: Any = None) -> Any:
        """Take a step of the wrapped optimizer with this rank's parameters.

        Args:
            closure: Must be ``None``: a closure would run the model again.

        Returns:
            The result of the wrapped optimizer; ``None`` on a rank without parameters.

        Raises:
            SMPUnsupportedError: ``closure`` is given.
        """
        if closure is not None:
            raise SMPUnsupportedError(
                "a closure would run the model again: call the `smp.step` function before `step()`"
            )
        result = None
        limit = state.cfg.sdp_gradient_clipping if _sharded_model() is not None else 0.0
        if limit:
            norms.clip_grad_norm_(_model().local_parameters(), limit)
        if self._masters is not None:
            self._check_scaled()
            self._has_scaled_loss = False
            result = self._masters.step()
        elif steps_here(self.optimizer):
            result = self.optimizer.step()
        if self._shards is not None and not self.overflow:
            self._shards.gather()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, as the wrapped optimizer does.

        Args:
            set_to_none: Whether gradients become ``None`` instead of zeros.
        """
        self.optimizer.zero_grad(set_to_none)
        for parameter in itertools.chain.from_iterable(self.fp16_groups):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
        if self._shards is not None:
            self._shards.zero_grad(set_to_none)

    def clip_master_grads(self, max_norm: float) -> float:
        """Clip the norm of all gradients of the model, before ``step``; all ranks of the job call it.

        Args:
            max_norm: Largest norm that is left unchanged, of gradients without the loss scale.

        Returns:
            The norm before clipping; -1 if a gradient overflowed, in which case ``step`` will be skipped.

        Raises:
            SMPUsageError: There are no master weights: the configuration has neither ``fp16`` nor ``bf16``.
        """
        if self._masters is None:
            raise SMPUsageError(
                "master weights belong to the configuration's `fp16` and `bf16`: without, `smp.clip_grad_norm_` clips "
                "gradients"
            )
        self.update_master_grads()
        norm = norms.clip_grad_norm_(_model().local_parameters(), max_norm)
        return -1.0 if self._masters.overflow else float(norm)

    # State dicts; `checkpoint/optimizer_state.py` gathers, splits and names the entries.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole optimizer, on every rank of one replica, all of which call it."""
        return optimizer_state.full_optimizer(_model(), self)

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """Return the part of the state that this rank holds.

        Args:
            gather_if_shard: If ranks with the same parameters hold shards of the state, whether the first of them
                gets the whole states, and the others none; all of them call it. Otherwise each gets its shards.

        Returns:
            The state by parameter name, with ``_smp_is_partial``; with ``fp16`` or ``bf16`` also ``master_weights``
            and ``loss_scale``.
        """
        if gather_if_shard and self.is_sharded:
            return optimizer_state.gather_shards(_model(), self)
        return optimizer_state.local_optimizer(_model(), self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state. Before the first step, it is loaded when the model has been partitioned.

        Args:
            state_dict: A whole state, or this rank's part of one.
        """
        found = dict(state_dict)
        _model()._when_partitioned(lambda: optimizer_state.load_optimizer(_model(), self, found))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the wrapped optimizer."""
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to the wrapped optimizer; parameters of other partitions are dropped.

        Args:
            param_group: The group, as for PyTorch's optimizers.
        """
        self.optimizer.add_param_group(param_group)
        if state.model is not None and state.model.is_partitioned:
            self._localize({})


@functools.cache
def _warn_of_scales() -> None:
    warnings.warn(
        "the loss scale of `smp.DistributedOptimizer` has no effect without the configuration's `fp16`: "
        "`smp.amp.GradScaler` scales losses under autocast",
        stacklevel=3,
    )


def _sharded_model() -> ShardedModel | None:
    return None if state.model is None else state.model.sharded


def _model() -> Any:
    if state.model is None:
        raise SMPUsageError("parameter names of an optimizer come from a `smp.DistributedModel`: create one first")
    return state.model
