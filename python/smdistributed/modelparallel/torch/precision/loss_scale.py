"""Creates the loss scale from arguments of ``smp.DistributedOptimizer``; the core implements its changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.modelparallel.exceptions import CLASSES, SMPValidationError

#: Keys of ``dynamic_loss_args`` with their defaults.
DYNAMIC_DEFAULTS: dict[str, Any] = {
    "init_scale": 2.0**32,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1,
    "delayed_shift": 1,
    "consecutive_hysteresis": False,
}
#: Arguments for optimizers whose caller passes none, such as the Trainer of transformers.
chosen: dict[str, Any] = {}
_ALIASES = {"static_loss_scaling": "static_loss_scale", "dynamic_loss_scaling": "dynamic_loss_scale"}
_CLASSES = {**CLASSES, "invalid_argument": SMPValidationError}


def choose(arguments: Mapping[str, Any]) -> None:
    """Set the arguments for optimizers whose caller passes none.

    Args:
        arguments: As those of ``smp.DistributedOptimizer``.

    Raises:
        SMPValidationError: A value is invalid.
        TypeError: A name is unknown.
    """
    found = {_ALIASES.get(name, name): value for name, value in arguments.items()}
    found |= found.pop("dynamic_loss_args", None) or {}
    unknown = found.keys() - DYNAMIC_DEFAULTS.keys() - set(_ALIASES.values())
    if unknown:
        raise TypeError(f"a loss scale has no argument `{min(unknown)}`")
    dynamic = {name: value for name, value in found.items() if name in DYNAMIC_DEFAULTS}
    make_loss_scale(found.get("static_loss_scale", 1.0), found.get("dynamic_loss_scale", False), dynamic)
    chosen.clear()
    chosen.update(found)


def make_loss_scale(static: float | None, dynamic: bool, dynamic_args: Mapping[str, Any]) -> _core.LossScale:
    """Return the scale that the arguments describe; a dynamic one takes precedence.

    Raises:
        SMPValidationError: A value is invalid.
    """
    found = {**DYNAMIC_DEFAULTS, **dynamic_args}
    for name, default in DYNAMIC_DEFAULTS.items():
        is_number = isinstance(found[name], int | float) and not isinstance(found[name], bool)
        if isinstance(default, bool) != isinstance(found[name], bool) or not (is_number or isinstance(default, bool)):
            raise SMPValidationError(f"`{name}` is {found[name]!r}: expected as {default!r}")
        if isinstance(default, int) and not isinstance(default, bool) and name != "min_scale":
            if int(found[name]) != found[name] or found[name] < 0:
                raise SMPValidationError(f"`{name}` is {found[name]!r}: expected a whole number")
            found[name] = int(found[name])
    if static is None and not dynamic:
        raise SMPValidationError("`static_loss_scale` is None without `dynamic_loss_scale`: expected a number")
    init_scale = found.pop("init_scale")
    with errors.translated(_CLASSES):
        if not dynamic:
            return _core.LossScale(float(static or 0.0))
        return _core.LossScale(float(init_scale), True, **found)
