"""Support for other libraries: their training loops, and their modules that scripts import."""

from smdistributed.modelparallel.torch.integrations import apex as _apex
from smdistributed.modelparallel.torch.integrations.trainer import enable_trainer

__all__ = ["enable_trainer"]

_apex.install()
