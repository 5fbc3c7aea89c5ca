"""Callbacks for ``model.fit`` of the ``keras`` package."""

from __future__ import annotations

import keras

from horovod._keras import callbacks as _impl

_classes = _impl.define(keras, __name__)

BroadcastGlobalVariablesCallback = _classes.BroadcastGlobalVariablesCallback
MetricAverageCallback = _classes.MetricAverageCallback
LearningRateScheduleCallback = _classes.LearningRateScheduleCallback
LearningRateWarmupCallback = _classes.LearningRateWarmupCallback
BestModelCheckpoint = _classes.BestModelCheckpoint
