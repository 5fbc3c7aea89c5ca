"""Aliases for the wrapper modules of Amazon's library.

- ``model.module.module`` and one further ``.module``: the original wrapped the model for data parallelism and again
  for 16-bit weights. Its scripts access the model through as many levels as their configuration created.
- ``super()._orig_forward()``: the same as ``super().forward()``.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from smdistributed.modelparallel.config import Config, warn_once

#: The ``_orig_forward`` that this module added to classes.
_given: WeakKeyDictionary[type, Any] = WeakKeyDictionary()
#: Wrappers of the original inside of ``smp.DistributedModel``.
_LEVELS = 2


class _Level:
    """Represents one wrapper of the original; attributes are those of the model.

    It is a separate object, because code that unwraps until there is no ``.module`` would loop forever otherwise.
    """

    __slots__ = ("_depth", "_model")

    def __init__(self, model: Any, depth: int) -> None:
        object.__setattr__(self, "_model", model)
        object.__setattr__(self, "_depth", depth)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        if name != "module":
            return getattr(self._model, name)
        if self._depth == 1:
            raise AttributeError(f"`{type(self._model).__name__}` has no attribute `module`")
        return _Level(self._model, self._depth - 1)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    # Attributes of wrapper modules.

    def __getitem__(self, key: Any) -> Any:
        return self._model[key]

    def __iter__(self) -> Any:
        return iter(self._model)

    def __len__(self) -> int:
        return len(self._model)

    def __bool__(self) -> bool:
        return bool(self._model)

    def __dir__(self) -> list[str]:
        return dir(self._model)

    def __repr__(self) -> str:
        return repr(self._model)

    def __reduce__(self) -> tuple[type, tuple[nn.Module, int]]:
        return _Level, (self._model, self._depth)


def add_documented_aliases(model: nn.Module) -> None:
    """Add the aliases to ``model``, unless it has an attribute ``module`` of its own."""
    if not hasattr(model, "module"):
        # Set in `__dict__` and not as a submodule, so that functions that iterate over modules do not see it.
        vars(model)["module"] = _Level(model, _LEVELS)
    types = {type(module) for module in model.modules()}
    # A script may have replaced `forward` of a class and call the original one by this name.
    taken = {cls for kind in types if any(map(_is_patched, kind.__mro__)) for cls in kind.__mro__}
    for cls in {cls for kind in types for cls in kind.__mro__} - taken - {nn.Module}:
        if "forward" in vars(cls) and "_orig_forward" not in vars(cls):
            _given[cls] = vars(cls)["forward"]
            setattr(cls, "_orig_forward", _given[cls])  # noqa: B010 - no attribute of `type`


def _is_patched(cls: type) -> bool:
    """Return whether the class has an ``_orig_forward`` of the script."""
    own = vars(cls).get("_orig_forward")
    return own is not None and own is not _given.get(cls)


#: Arguments of ``smp.DistributedModel`` that change nothing: the value that is ignored, and why.
IGNORED_ARGUMENTS = {
    "trace_device": ("'cpu'", "the trace takes no memory of any device"),
    "trace_memory_usage": ("True", "the memory of activations is always counted"),
    "gradient_as_bucket_view": ("True", "gradients keep their own memory"),
    "find_unused_parameters": ("True", "unused parameters are always found"),
}


#: Arguments of ``smp.DistributedModel`` that need a part of the configuration, with their defaults.
_CONDITIONAL_ARGUMENTS = {
    "trace_execution_times": False,
    "overlapping_allreduce": True,
    "backward_passes_per_step": 1,
    "bucket_cap_mb": 25,
    "broadcast_buffers": True,
}
#: Arguments that configure the reduction of unsharded gradients.
_OF_WHOLE_GRADIENTS = ("overlapping_allreduce", "bucket_cap_mb")


def warn_of_arguments(cfg: Config, **arguments: Any) -> None:
    """Warn once of each argument of ``smp.DistributedModel`` that is given and changes nothing.

    Args:
        cfg: The configuration.
        **arguments: Arguments by their names.
    """
    for name, value in arguments.items():
        if name in IGNORED_ARGUMENTS:
            ignored, reason = IGNORED_ARGUMENTS[name]
            if repr(value) == ignored:
                warn_once(f"`{name}={ignored}` of `smp.DistributedModel` is ignored: {reason}")
        elif value != _CONDITIONAL_ARGUMENTS[name]:
            has_effect, need = cfg.ddp, "`ddp: true`"
            if name == "trace_execution_times":
                has_effect = cfg.pipeline_parallel_degree > 1 and cfg.auto_partition
                need = "`auto_partition` over several partitions"
            if not has_effect:
                warn_once(f"`{name}` of `smp.DistributedModel` changes nothing without {need}")
            elif cfg.shard_optimizer_state and name in _OF_WHOLE_GRADIENTS:
                key = "sharded_data_parallel_degree"
                key = f"{key}: {cfg[key]}" if cfg[key] > 1 else "shard_optimizer_state: true"
                warn_once(
                    f"`{name}` of `smp.DistributedModel` changes nothing with `{key}`: gradients are reduced to "
                    "shards, without buckets"
                )
