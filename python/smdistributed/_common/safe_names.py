"""Names that a pickle from another rank may call: with any arguments, they create a value and have no other effect."""

from __future__ import annotations

import builtins
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

_BUILTINS = "bool bytearray bytes complex dict float frozenset int list object range set slice str tuple"

#: Names by module. All of them are safe with any arguments, and so are the ``__setstate__`` of their objects.
_NAMES: dict[str, frozenset[str]] = {
    module: frozenset(names.split())
    for module, names in {
        "builtins": _BUILTINS,
        "_codecs": "encode",
        "argparse": "Namespace",
        "array": "_array_reconstructor",
        "collections": "ChainMap Counter OrderedDict UserDict UserList defaultdict deque",
        "datetime": "date datetime time timedelta timezone",
        "decimal": "Decimal",
        "fractions": "Fraction",
        "pathlib": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
        "pathlib._local": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
        "types": "SimpleNamespace",
        "uuid": "SafeUUID UUID",
        "zoneinfo": "ZoneInfo._unpickle",
        # Names that differ between NumPy 1 and 2.
        "numpy": "dtype",
        "numpy._core.multiarray": "_reconstruct scalar",
        "numpy.core.multiarray": "_reconstruct scalar",
        "numpy._core.numeric": "_frombuffer",
        "numpy.core.numeric": "_frombuffer",
        "torch": "Size device",
        "torch._utils": (
            "_rebuild_device_tensor_from_cpu_tensor _rebuild_device_tensor_from_numpy _rebuild_meta_tensor_no_storage"
            " _rebuild_nested_tensor _rebuild_parameter _rebuild_parameter_with_state _rebuild_qtensor"
            " _rebuild_sparse_tensor _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3"
        ),
        "torch.serialization": "_get_layout",
        "torch.storage": "TypedStorage UntypedStorage",
        # Batches of Hugging Face libraries: dictionaries whose own `__setstate__` sets two attributes.
        "transformers.tokenization_utils_base": "BatchEncoding",
        "transformers.feature_extraction_utils": "BatchFeature",
        "transformers.image_processing_base": "BatchFeature",
        "tensorflow.python.framework.dtypes": "DType as_dtype",
        "tensorflow.python.framework.tensor": "TensorSpec",
        "tensorflow.python.framework.tensor_shape": "Dimension TensorShape",
    }.items()
}

#: Classes that may be arguments of those functions. Calling them may be unsafe: `numpy.ndarray`, for example, can make
#: an array over any memory.
_ARGUMENTS = {
    ("numpy", "ndarray"),
    ("torch", "Tensor"),
    ("torch._tensor", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
}

#: Packages whose scalar types and dtypes are allowed.
_NUMPY = ("numpy", "ml_dtypes")


def is_known(module: str, name: str) -> bool:
    """Return whether a name is safe to import and call.

    Args:
        module: The module's name.
        name: The name inside it.

    Returns:
        ``True`` if a call only creates an object.
    """
    if name in _NAMES.get(module, ()):
        return True
    return module == "builtins" and _is_exception(getattr(builtins, name, None))


def is_argument(module: str, name: str) -> bool:
    """Return whether a name is safe to import as an argument of such calls.

    Args:
        module: The module's name.
        name: The name inside it.

    Returns:
        ``True`` if it is; it may still be unsafe to call.
    """
    return (module, name) in _ARGUMENTS


def is_known_object(module: str, found: Any) -> bool:
    """Return whether an imported object is a value or creates one: scalar types, dtypes, layouts.

    Args:
        module: The module's name.
        found: The object.

    Returns:
        ``True`` if it is safe to use and to call.
    """
    package = module.split(".")[0]
    generic = sys.modules.get("transformers.utils.generic")
    if generic is not None and isinstance(found, type) and issubclass(found, generic.ModelOutput):
        return True
    if package in _NUMPY:
        import numpy as np

        return isinstance(found, type) and issubclass(found, (np.generic, np.dtype))
    if package == "torch":
        torch = sys.modules["torch"]
        values = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
        return isinstance(found, values) or (isinstance(found, type) and issubclass(found, torch.storage.TypedStorage))
    if package == "tensorflow":
        return found is sys.modules["tensorflow"].convert_to_tensor
    return False


def replacement(module: str, name: str) -> Callable[..., Any] | None:
    """Return the replacement of a function that unpickles data or calls one of its arguments.

    Args:
        module: The module's name.
        name: The name inside it.

    Returns:
        The function to call instead, or ``None`` if there is none.
    """
    replacements: dict[tuple[str, str], Callable[..., Any]] = {
        ("torch.storage", "_load_from_bytes"): _storage,
        ("torch._tensor", "_rebuild_from_type_v2"): _tensor_with_attributes,
        ("torch._utils", "_rebuild_sparse_tensor"): _sparse_tensor,
    }
    return replacements.get((module, name))


def _storage(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), weights_only=True)


def _sparse_tensor(layout: Any, data: Any) -> Any:
    import torch

    # Unchecked indices would be used as addresses.
    with torch.sparse.check_sparse_tensor_invariants():
        return torch._utils._rebuild_sparse_tensor(layout, data)


def _tensor_with_attributes(function: Callable[..., Any], cls: type, arguments: tuple[Any, ...], state: Any) -> Any:
    import torch

    is_rebuilding = (
        getattr(function, "__name__", "") in _NAMES["torch._utils"] and function.__module__ == "torch._utils"
    )
    if not is_rebuilding or cls not in (torch.Tensor, torch.nn.Parameter):
        raise pickle.UnpicklingError(f"refused to unpickle a tensor of class {cls!r} that {function!r} rebuilds")
    return torch._tensor._rebuild_from_type_v2(function, cls, arguments, state)


def _is_exception(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, BaseException)
