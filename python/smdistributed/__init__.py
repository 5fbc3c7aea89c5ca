"""The `smdistributed` namespace: data and model parallel training for PyTorch and TensorFlow.

Import what you need, such as `smdistributed.dataparallel.torch.torch_smddp`; this package imports no framework.
"""

from pkgutil import extend_path

# Other distributions may add packages under this name.
__path__ = extend_path(__path__, __name__)


def __getattr__(name: str) -> str:
    """``__version__``: what is installed."""
    if name == "__version__":
        from smdistributed._core import __version__

        return __version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
