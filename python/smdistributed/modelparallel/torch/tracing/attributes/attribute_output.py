"""An attribute that calls of its module set to tensors (MST-3 in :mod:`.module_state`)."""

from __future__ import annotations

from typing import Any

from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.tracing.remote_tensor import RemoteTensor


class AttributeOutput:
    """An attribute that calls set to tensors (MST-3).

    Attributes:
        owner: The module.
        value: Its value for tasks: that of the last task that has run, at first that before the step.
        shown: Its value for the body: remote tensors, or what the body has set after the last call.
        is_set: Whether the body has set it after the last call.
        remote: The remote tensors, with their values and recordings when the call was recorded.
    """

    __slots__ = ("is_set", "owner", "remote", "shown", "value")

    def __init__(self, owner: Any, value: Any) -> None:
        self.owner, self.value, self.shown = owner, value, value
        self.is_set = False
        self.remote: list[tuple[RemoteTensor, Any, Any]] = []

    def show(self, value: Any, is_set: bool) -> None:
        """Show the body a value, which it has set itself or which a call has set."""
        self.shown, self.is_set = value, is_set
        leaves = [] if is_set else [leaf for leaf in pytree.tensors_of(value) if type(leaf) is RemoteTensor]
        self.remote = [(leaf, leaf.value, leaf.recording) for leaf in leaves]
