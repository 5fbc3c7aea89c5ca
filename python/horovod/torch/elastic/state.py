"""The state of a PyTorch training: models, optimizers, samplers and plain objects."""

from __future__ import annotations

import copy
from typing import Any

import torch

from horovod.common.elastic import ObjectState
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from horovod.torch.mpi_ops import rank
from horovod.torch.optimizer import _DistributedOptimizer


class StateHandler:
    """Saves, restores and synchronizes objects of one class.

    Args:
        value: The object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._saved: Any = None

    def save(self) -> None:
        """Keep the object's state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over rank 0's state, and save it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the new ranks after a reset; does nothing by default."""

    def saved(self) -> Any:
        """Return the saved state.

        Returns:
            The state that :meth:`save` kept.
        """
        return self._saved

    def restore_from(self, saved: Any) -> None:
        """Return to a state that another process has saved.

        Args:
            saved: The result of :meth:`saved` in that process.
        """
        self._saved = saved
        self.restore()

    def set_value(self, value: Any) -> None:
        """Take another object, and save its state.

        Args:
            value: The object.
        """
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Handles parameters and buffers of a model.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.save()

    def save(self) -> None:
        """Keep a copy of parameters and buffers."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load the copy."""
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        """Take over rank 0's parameters and buffers, and save them."""
        state = self.value.state_dict()
        # Such as what a module returns from `get_extra_state`.
        others = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
        broadcast_parameters({name: value for name, value in state.items() if name not in others}, root_rank=0)
        others = broadcast_object(others, root_rank=0)
        if others:
            self.value.load_state_dict({**state, **others})
        self.save()


class OptimizerStateHandler(StateHandler):
    """Handles options and state of an optimizer.

    A distributed optimizer drops gradients that no step has taken when it is restored or synchronized.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.save()

    def save(self) -> None:
        """Keep a copy of options and state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def _forget(self) -> None:
        # Entries of other optimizers belong to the script.
        if isinstance(self.value, _DistributedOptimizer):
            self.value._forget()

    def restore(self) -> None:
        """Load the copy, and drop pending gradients."""
        self._forget()
        # Copied, because loading may keep the tensors, and the state may be restored again.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Take over rank 0's options and state, and save them; drop pending gradients."""
        self._forget()
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler):
    """Handles the position of a sampler in an epoch.

    Args:
        sampler: The sampler.
    """

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)
        self.save()

    def save(self) -> None:
        """Keep the position."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Return to the position that was kept."""
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        """Take over rank 0's position, and save it."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), name="elastic.sampler"))
        self.save()

    def reset(self) -> None:
        """Divide the remaining samples among the current ranks."""
        self.value.reset()


_handler_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return the handlers of classes.

    Returns:
        Pairs of a class and its handler; the first class that fits an object is used.
    """
    return _handler_registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the handlers of classes.

    Args:
        registry: Pairs as :func:`get_handler_registry` returns them.
    """
    global _handler_registry
    _handler_registry = registry


def _handler(value: Any) -> StateHandler | None:
    for kind, handler in _handler_registry:
        if isinstance(value, kind):
            return handler(value)
    return None


class TorchState(ObjectState):
    """The state of a training that continues when workers fail or join.

    Args:
        model: The model.
        optimizer: Its optimizer.
        **kwargs: More modules, optimizers and samplers, and plain objects such as ``epoch=0``. All become attributes.
    """

    model: Any = None
    optimizer: Any = None

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        kwargs |= {name: value for name, value in (("model", model), ("optimizer", optimizer)) if value is not None}
        handlers = {name: _handler(value) for name, value in kwargs.items()}
        self._handlers: dict[str, StateHandler] = {name: one for name, one in handlers.items() if one is not None}
        for name, handler in self._handlers.items():
            super().__setattr__(name, handler.value)
        objects = {name: value for name, value in kwargs.items() if name not in self._handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **objects)

    def save(self) -> None:
        """Keep the state of all objects in memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Return to the saved state."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Take over rank 0's state, and save it."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Adapt samplers to the current ranks."""
        for handler in self._handlers.values():
            handler.reset()

    def _committed_state(self) -> Any:
        own = {name: handler.saved() for name, handler in self._handlers.items()}
        return own, super()._committed_state()

    def _restore_saved(self, saved: Any) -> None:
        own, objects = saved
        for name, value in own.items():
            self._handlers[name].restore_from(value)
        super()._restore_saved(objects)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_handlers", {}):
            self._handlers[name].set_value(value)
