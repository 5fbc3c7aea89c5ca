"""The `smdistributed` namespace: data and model parallel training for PyTorch and TensorFlow.

Import what you need, such as `smdistributed.dataparallel.torch.torch_smddp`; this package imports no framework.
"""

from pkgutil import extend_path

# Other distributions may add packages under this name.
__path__ = extend_path(__path__, __name__)
