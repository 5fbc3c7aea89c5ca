"""What lets other libraries train with model parallelism, and scripts that use other packages run with this one."""

from smdistributed.modelparallel.torch.integrations import apex as _apex
from smdistributed.modelparallel.torch.integrations.trainer import enable_trainer

__all__ = ["enable_trainer"]

_apex.install()
