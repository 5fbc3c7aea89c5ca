"""The errors of this package."""

from smdistributed.modelparallel.exceptions import *  # noqa: F403
from smdistributed.modelparallel.exceptions import __all__ as __all__
