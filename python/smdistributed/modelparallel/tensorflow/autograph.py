"""AutoGraph leaves these modules as they are, as it does with Keras': a step's first call would convert each function of theirs.

What they call of a script's, a step's body or a layer's ``call``, is converted as ever.
"""

from __future__ import annotations

from tensorflow.python.autograph.core import config


def leave_out(package: str) -> None:
    """Lets nothing of ``package`` be converted."""
    config.CONVERSION_RULES = (config.DoNotConvert(package), *config.CONVERSION_RULES)
