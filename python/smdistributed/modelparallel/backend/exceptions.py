"""The errors of model parallelism, under the name by which Amazon's launchers list them."""

from smdistributed.modelparallel.exceptions import *  # noqa: F403
from smdistributed.modelparallel.exceptions import __all__ as __all__
