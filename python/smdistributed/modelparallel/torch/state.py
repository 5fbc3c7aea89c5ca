"""The state of this process: one configuration, one topology, at most one model and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from smdistributed.modelparallel.config import Config
from smdistributed.modelparallel.exceptions import SMPNotInitializedError, SMPUsageError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from smdistributed.modelparallel.torch.groups import TorchGroups
    from smdistributed.modelparallel.torch.model import DistributedModel
    from smdistributed.modelparallel.torch.optimizer import DistributedOptimizer


class ModuleManager:
    """What Hugging Face's Trainer asks about modules that tensor parallelism has replaced: there are none.

    Attributes:
        translate_functions: For each family of such modules two functions, which translate a whole state of a model to
            the names of its own modules, and back.
    """

    def __init__(self) -> None:
        self.translate_functions: list[
            tuple[Callable[[dict[str, Any]], dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]]
        ] = []


class State:
    """See the module's text; ``smp.state`` is the only one.

    Attributes:
        initialized: Whether ``smp.init`` has been called.
        model: The wrapped model, if there is one.
        optimizer: The wrapped optimizer, if there is one.
        module_manager: What tensor parallelism has replaced: nothing.
        tracing: Whether the model is being looked at to divide it.
        delay: Undoes what delays parameters until there is a model, if the configuration has it so.
    """

    def __init__(self) -> None:
        self.initialized = False
        self.model: DistributedModel | None = None
        self.optimizer: DistributedOptimizer | None = None
        self.module_manager = ModuleManager()
        self.tracing = False
        self.delay: RemovableHandle | None = None
        self._cfg: Config | None = None
        self._groups: TorchGroups | None = None

    def enter(self, cfg: Config, groups: TorchGroups) -> None:
        """Sets the configuration and groups of the job."""
        self._cfg, self._groups, self.initialized = cfg, groups, True

    def leave(self) -> None:
        """Forgets the job."""
        self.end_delay()
        self.__init__()  # type: ignore[misc]

    def end_delay(self) -> None:
        """Ends the delay of parameters."""
        if self.delay is not None:
            self.delay.remove()
            self.delay = None

    @property
    def loss_scale(self) -> float:
        """The factor of losses that the optimizer's 16-bit training asks for."""
        return 1.0 if self.optimizer is None else self.optimizer.loss_scale

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
        """The configuration in force."""
        return self._cfg if self._cfg is not None else _refuse()

    @property
    def groups(self) -> TorchGroups:
        """Ranks and groups."""
        return self._groups if self._groups is not None else _refuse()


def _refuse() -> NoReturn:
    raise SMPNotInitializedError("this call needs `smp.init()` first")


state = State()
