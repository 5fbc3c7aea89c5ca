"""What lets scripts and libraries that use other packages run with this one."""

from smdistributed.modelparallel.torch.integrations import apex as _apex

_apex.install()
