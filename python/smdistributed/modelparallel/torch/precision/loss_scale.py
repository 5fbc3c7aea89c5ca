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
_CLASSES = {**CLASSES, "invalid_argument": SMPValidationError}


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
