"""The name of the aggregation that scripts for eager execution use."""

from __future__ import annotations

from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper


class LocalGradientAggregationHelperEager(LocalGradientAggregationHelper):
    """The same: one works in both modes."""
