"""Callbacks for ``model.fit`` of what ``tf.keras`` is."""

from __future__ import annotations

import tensorflow as tf

from horovod._keras import callbacks as _impl

_classes = _impl.define(tf.keras, __name__)

BroadcastGlobalVariablesCallback = _classes.BroadcastGlobalVariablesCallback
MetricAverageCallback = _classes.MetricAverageCallback
LearningRateScheduleCallback = _classes.LearningRateScheduleCallback
LearningRateWarmupCallback = _classes.LearningRateWarmupCallback
BestModelCheckpoint = _classes.BestModelCheckpoint
