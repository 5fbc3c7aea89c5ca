"""The errors of ``smdistributed.modelparallel``, under the name of this framework."""

from smdistributed.modelparallel.exceptions import *  # noqa: F403
from smdistributed.modelparallel.exceptions import __all__ as __all__
