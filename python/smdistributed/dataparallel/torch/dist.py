"""Another name of `smdistributed.dataparallel.torch.distributed`."""

import sys

from smdistributed.dataparallel.torch import distributed

sys.modules[__name__] = distributed
