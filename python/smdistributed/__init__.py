"""The `smdistributed` namespace: data and model parallel training for PyTorch and TensorFlow.

Import what you need, such as `smdistributed.dataparallel.torch.torch_smddp`; this package imports no framework.
"""

import sys
from pkgutil import extend_path

# The core is built for the stable ABI of Python with the GIL.
if "t" in sys.abiflags:
    raise ImportError(
        f"OpenSMD does not support free-threaded Python, which `{sys.executable}` is: use the build of Python "
        f"{sys.version_info[0]}.{sys.version_info[1]} with the GIL",
        name=__name__,
    )

# Other distributions may add packages under this name.
__path__ = extend_path(__path__, __name__)


def __getattr__(name: str) -> str:
    """``__version__``: what is installed."""
    if name == "__version__":
        from smdistributed._core import __version__

        return __version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
