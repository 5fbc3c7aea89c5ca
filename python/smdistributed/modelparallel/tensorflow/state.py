"""The state of this process: one configuration, one topology, at most one model, and the step that is being traced."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from smdistributed.modelparallel.config import Config
from smdistributed.modelparallel.exceptions import SMPNotInitializedError, SMPUsageError

if TYPE_CHECKING:
    from smdistributed.modelparallel.tensorflow.groups import TensorFlowGroups
    from smdistributed.modelparallel.tensorflow.model import DistributedModel
    from smdistributed.modelparallel.tensorflow.tracing.recording import Trace


class State:
    """The state of this process; ``smp.state`` is the only object.

    Attributes:
        initialized: Whether ``smp.init`` has been called.
        model: The distributed model, if there is one.
        trace: The current trace, inside of the body of a step.
        hooks: Functions to call once the model is partitioned.
        has_gradients: Whether a step has computed gradients.
        optimizers: Optimizers that have been built, with the variables that they were built for.
    """

    def __init__(self) -> None:
        self.initialized = False
        self.model: DistributedModel | None = None
        self.trace: Trace | None = None
        self.hooks: list[Callable[[], Any]] = []
        self.has_gradients = False
        self.optimizers: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._cfg: Config | None = None
        self._groups: TensorFlowGroups | None = None

    def enter(self, cfg: Config, groups: TensorFlowGroups) -> None:
        """Set the configuration and groups of the job."""
        self._cfg, self._groups, self.initialized = cfg, groups, True

    def leave(self) -> None:
        """Reset the state."""
        self.__init__()  # type: ignore[misc]

    def require_model(self) -> DistributedModel:
        """Return the distributed model.

        Raises:
            SMPUsageError: There is none.
        """
        if self.model is None:
            raise SMPUsageError("this call needs a model: make a `smp.DistributedModel` first")
        return self.model

    @property
    def cfg(self) -> Config:
        """The configuration of the job."""
        return self._cfg if self._cfg is not None else _refuse()

    @property
    def groups(self) -> TensorFlowGroups:
        """The ranks and groups of the job."""
        return self._groups if self._groups is not None else _refuse()


def _refuse() -> NoReturn:
    raise SMPNotInitializedError("this call needs `smp.init()` first")


state = State()
