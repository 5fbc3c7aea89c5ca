"""The state of a Keras model on PyTorch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from horovod._keras_torch import forget_sums
from horovod._keras_torch.callbacks import Engine
from horovod.common.elastic import ObjectState
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import rank


class KerasState(ObjectState):
    """The state of a training on a Keras model.

    When it is restored or synchronized, distributed optimizers drop the gradients that they have summed for
    ``backward_passes_per_step``: ranks begin the next step together.

    Args:
        model: The model, built.
        optimizer: The optimizer; by default the model's.
        **kwargs: Plain objects such as ``epoch=0, batch=0``, which become attributes.

    Raises:
        ValueError: The model is not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if self.optimizer is not None and not self.optimizer.built:
            # Creates the optimizer's variables, so that all ranks have the same ones at any point of the training.
            self.optimizer.build(model.trainable_variables)
        self._values: list[np.ndarray] = []
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)
        self._save_model()

    def save(self) -> None:
        """Keep model, optimizer and objects in memory."""
        self._save_model()
        super().save()

    def restore(self) -> None:
        """Return to the saved state."""
        self._restore_model()
        super().restore()

    def sync(self) -> None:
        """Take over rank 0's state, and save it."""
        Engine.broadcast(self._variables(), 0)
        forget_sums()
        self._save_model()
        super().sync()

    def _committed_state(self) -> Any:
        return self._values, super()._committed_state()

    def _restore_saved(self, saved: Any) -> None:
        self._values, objects = saved
        self._restore_model()
        super()._restore_saved(objects)

    def _variables(self) -> list[keras.Variable]:
        return [*Engine.variables_of(self.model), *Engine.variables_of(self.optimizer)]

    def _save_model(self) -> None:
        self._values = [np.array(keras.ops.convert_to_numpy(variable)) for variable in self._variables()]

    def _restore_model(self) -> None:
        forget_sums()
        variables = self._variables()
        for variable, value in zip(variables, self._values, strict=False):
            variable.assign(value)
        for variable in variables[len(self._values) :]:
            # The entry was created after the commit.
            variable.assign(keras.ops.zeros_like(variable))
