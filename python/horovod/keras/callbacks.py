"""Callbacks for ``model.fit`` of the ``keras`` package."""

from __future__ import annotations

from typing import Any

import keras

from horovod.common import keras_callbacks as _impl
from horovod.common.keras_backend import BACKEND

if BACKEND == "torch":
    from horovod._keras_torch.callbacks import Engine
else:
    from horovod._keras.callbacks import Engine  # type: ignore[assignment]  # the other backend's

_classes: Any = _impl.define(keras, __name__, Engine)

BroadcastGlobalVariablesCallback = _classes.BroadcastGlobalVariablesCallback
MetricAverageCallback = _classes.MetricAverageCallback
LearningRateScheduleCallback = _classes.LearningRateScheduleCallback
LearningRateWarmupCallback = _classes.LearningRateWarmupCallback


_BestModelCheckpoint: Any = _classes.BestModelCheckpoint


class BestModelCheckpoint(_BestModelCheckpoint):
    """Save the best model of a training.

    Same as ``horovod.tensorflow.keras.callbacks.BestModelCheckpoint``, with the arguments in another order.

    Args:
        monitor: The metric.
        verbose: 1 prints a line for each file.
        mode: ``min``, ``max`` or ``auto``.
        save_freq: ``epoch``, or a number of batches.
        save_weights_only: Whether to save weights instead of the model.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        save_weights_only: bool = False,
    ) -> None:
        super().__init__(monitor, verbose, save_weights_only, mode, save_freq)
