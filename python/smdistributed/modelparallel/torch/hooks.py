"""Hooks of the distributed model: functions of the script that run after the partition or after a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from smdistributed.modelparallel.torch.state import state

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.model import DistributedModel


class Removable:
    """The handle of a registered hook."""

    def __init__(self, hooks: list[Any], hook: Any) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        """Remove the hook; does nothing on a second call."""
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


def call_hook(hook: Callable[..., Any], model: DistributedModel) -> None:
    """Call a hook with the model and the optimizer, or with as many of both as it accepts."""
    arguments = (model, state.optimizer)
    try:
        parameters = inspect.signature(hook).parameters.values()
    except (TypeError, ValueError):
        hook(*arguments)
        return
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        hook(*arguments)
        return
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    hook(*arguments[: len(positional)])
