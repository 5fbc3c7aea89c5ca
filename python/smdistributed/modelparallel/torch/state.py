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
    """Translations for modules whose replacements under tensor parallelism have different weight names.

    Attributes:
        translate_functions: For each class two functions, which translate a whole state of a model to the names of
        the original modules, and back.
    """

    def __init__(self) -> None:
        self.translate_functions: list[
            tuple[Callable[[dict[str, Any]], dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]]
        ] = []
        self._classes: set[type] = set()

    def add(
        self,
        module_cls: type,
        functions: tuple[Callable[[dict[str, Any]], dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]],
    ) -> None:
        """Add the functions of a class that was replaced, once."""
        if module_cls not in self._classes:
            self._classes.add(module_cls)
            self.translate_functions.append(functions)

    def to_own_names(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Translate a whole state to the names of the original modules."""
        for to_own, _ in self.translate_functions:
            state_dict = to_own(state_dict)
        return state_dict

    def from_own_names(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Translate a whole state with the names of the original modules."""
        for _, from_own in reversed(self.translate_functions):
            state_dict = from_own(state_dict)
        return state_dict


class State:
    """The state of this process; ``smp.state`` is the only object.

    Attributes:
        initialized: Whether ``smp.init`` has been called.
        model: The wrapped model, if there is one.
        optimizer: The wrapped optimizer, if there is one.
        module_manager: Translations for modules that tensor parallelism has replaced.
        tracing: Whether the model is being traced for its partition.
        delay: Ends the delay of parameters, if the configuration delays them until there is a model.
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
        """Set the configuration and groups of the job."""
        self._cfg, self._groups, self.initialized = cfg, groups, True

    def leave(self) -> None:
        """Reset the state."""
        self.end_delay()
        self.__init__()  # type: ignore[misc]

    def end_delay(self) -> None:
        """End the delay of parameters."""
        if self.delay is not None:
            self.delay.remove()
            self.delay = None

    @property
    def loss_scale(self) -> float:
        """The loss scale of the optimizer's 16-bit training."""
        return 1.0 if self.optimizer is None else self.optimizer.loss_scale

    @property
    def param_index_to_name_tp_group(self) -> list[dict[int, str]]:
        """For each rank of the tensor-parallel group, names of the optimizer's parameters by their index.

        Indices are those of the optimizer's own ``state_dict``. Without ``shard_optimizer_state`` they are the same on
        all ranks of the group.
        """
        if self.optimizer is None:
            return []
        pieces = self.optimizer._pieces()
        params = [each for group in self.optimizer.optimizer.param_groups for each in group["params"]]
        names = {index: pieces[id(each)].name for index, each in enumerate(params)}
        return [dict(names) for _ in self.groups.members["tp"]]

    @property
    def param_name_to_index_tp_group(self) -> list[dict[str, int]]:
        """The inverse of :attr:`param_index_to_name_tp_group`."""
        return [{name: index for index, name in names.items()} for names in self.param_index_to_name_tp_group]

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
    def groups(self) -> TorchGroups:
        """The ranks and groups of the job."""
        return self._groups if self._groups is not None else _refuse()


def _refuse() -> NoReturn:
    raise SMPNotInitializedError("this call needs `smp.init()` first")


state = State()
