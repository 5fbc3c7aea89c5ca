"""Elastic training with the ``keras`` package: ``hvd.elastic``."""

from __future__ import annotations

from typing import Any

import keras

from horovod._keras import elastic as _impl
from horovod.tensorflow.elastic import TensorFlowKerasState
from horovod.tensorflow.elastic import run as run

_classes = _impl.define(keras, __name__)

CommitStateCallback = _classes.CommitStateCallback
UpdateBatchStateCallback = _classes.UpdateBatchStateCallback
UpdateEpochStateCallback = _classes.UpdateEpochStateCallback


class KerasState(TensorFlowKerasState):
    """The state of a training on a Keras model.

    Args:
        model: Built.
        optimizer: By default the model's.
        **kwargs: Plain objects such as ``epoch=0, batch=0``, which become attributes.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer=optimizer, **kwargs)
