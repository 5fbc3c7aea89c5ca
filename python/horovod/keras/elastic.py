"""Elastic training with the ``keras`` package: ``hvd.elastic``."""

from __future__ import annotations

import keras

from horovod._keras import elastic as _impl
from horovod._keras.elastic import KerasState as KerasState
from horovod.tensorflow.elastic import run as run

_classes = _impl.define(keras, __name__)

CommitStateCallback = _classes.CommitStateCallback
UpdateBatchStateCallback = _classes.UpdateBatchStateCallback
UpdateEpochStateCallback = _classes.UpdateEpochStateCallback
