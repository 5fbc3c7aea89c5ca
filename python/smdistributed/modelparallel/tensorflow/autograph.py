"""Excludes the modules of this package from AutoGraph, as AutoGraph excludes Keras.

Otherwise the first call of a step would convert all of them.

The script's functions that they call, a step's body or a layer's ``call``, are converted as usual.
"""

from __future__ import annotations

from tensorflow.python.autograph.core import config


def leave_out(package: str) -> None:
    """Exclude all functions of ``package`` from conversion."""
    config.CONVERSION_RULES = (config.DoNotConvert(package), *config.CONVERSION_RULES)
