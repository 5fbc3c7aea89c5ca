"""The state of a Keras model on TensorFlow."""

from __future__ import annotations

from typing import Any

from horovod.common.keras_elastic import CommitStateCallbackImpl as CommitStateCallbackImpl
from horovod.common.keras_elastic import UpdateBatchStateCallbackImpl as UpdateBatchStateCallbackImpl
from horovod.common.keras_elastic import UpdateEpochStateCallbackImpl as UpdateEpochStateCallbackImpl
from horovod.common.keras_elastic import define as define
from horovod.tensorflow.elastic import TensorFlowKerasState


class KerasState(TensorFlowKerasState):
    """The state of a training on a Keras model.

    Args:
        model: Built.
        optimizer: By default the model's.
        **kwargs: Plain objects such as ``epoch=0, batch=0``, which become attributes.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer=optimizer, **kwargs)
