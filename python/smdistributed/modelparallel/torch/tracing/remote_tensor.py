"""Tensors without memory: values of a recorded step, and parameters of other partitions.

They are tensor subclasses with shape, dtype and device, which Python code may query. Operations that need the values
are recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from smdistributed.modelparallel.exceptions import SMPUsageError

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.tracing.tasks import Value


class TensorMeta(NamedTuple):
    """Shape, strides, dtype and device of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """Return the metadata of a strided tensor."""
        # Read without function modes, because a recording would handle each of these queries.
        with torch._C.DisableTorchFunction():
            return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    @property
    def bytes(self) -> int:
        """Return the size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}]"


def _getters(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)}


#: Queries that a tensor without values can answer itself.
METADATA: frozenset[Any] = frozenset(
    _getters(
        "shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_cpu", "is_sparse", "is_meta",
        "is_quantized", "is_nested", "is_mkldnn", "is_mps", "is_xpu", "is_sparse_csr", "itemsize", "nbytes", "names",
        "is_leaf", "grad", "_version", "retains_grad", "is_xla", "is_vulkan", "is_ipu", "is_maia", "output_nr",
    )
    | {
        getattr(torch.Tensor, name)
        for name in (
            "size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point",
            "is_complex", "is_signed", "element_size", "storage_offset", "get_device", "__len__", "is_inference",
            "has_names", "__hash__", "dim_order", "is_shared",
        )
        if hasattr(torch.Tensor, name)
    }
    | {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference, torch.is_signed}
)  # fmt: skip


def offset_of(tensor: torch.Tensor) -> int:
    """Return the storage offset of a tensor on this rank, in elements, also while a body is recorded."""
    with torch._C.DisableTorchFunction():
        return int(tensor.storage_offset())


def version_of(tensor: torch.Tensor) -> int:
    """Return autograd's version of a tensor on this rank, or 0 for a tensor without one.

    Used only by this library, also while a body is recorded. Versions that a body reads must be equal on all ranks,
    and are therefore exchanged.
    """
    with torch._C.DisableTorchFunction():
        return 0 if tensor.is_inference() else int(tensor._version)


class InvalidatedValue:
    """The value of a tensor that cannot be tracked any more; using the tensor raises an error with ``reason``."""

    _smp_leaf = True
    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


class GraphNode:
    """The ``grad_fn`` of a tensor on a partition, which cannot be inspected before the step has run."""

    def __getattr__(self, name: str) -> Any:
        raise SMPUsageError(
            f"`grad_fn.{name}` of a tensor on a partition, inside of a `smp.step` function: the graph is created after "
            "the function has returned"
        )


def storage_write(name: str, what: str = "a tensor on a partition") -> SMPUsageError:
    """Return the error of a function that replaces the storage of a tensor."""
    return SMPUsageError(
        f"`{name}` replaces the storage of {what}: inside of a `smp.step` function, assign the new tensor instead"
    )


class RemoteTensor(torch.Tensor):
    """A value of the step that is being recorded; see ``tracing/recording.py``.

    Attributes:
        value: The value, which is replaced when the tensor is changed in place.
        recording: The recording of its microbatch.
    """

    value: Value
    recording: Any

    @staticmethod
    def __new__(cls, value: Value, recording: Any = None) -> RemoteTensor:
        """Create a tensor without memory that represents a value."""
        meta = value.meta
        if meta.requires_grad and torch.is_inference_mode_enabled():
            # Inference mode creates no tensors that require gradients.
            with torch.inference_mode(False):
                return cls.__new__(cls, value, recording)
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride,
            dtype=meta.dtype,
            device=meta.device,
            requires_grad=meta.requires_grad,
        )
        self.value = value
        self.recording = recording
        return self

    def set_value(self, value: Value | InvalidatedValue) -> None:
        """Represent another value of the same shape from now on; a write in place may have given it a graph."""
        if not isinstance(value, InvalidatedValue) and value.meta.requires_grad and not self.value.meta.requires_grad:
            with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
                self.requires_grad_()
        self.value = value  # type: ignore[assignment]

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: PyTorch does not pass this method to function modes."""
        raise storage_write("set_")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        if isinstance(self.value, InvalidatedValue):
            return "RemoteTensor(invalidated)"
        return f"RemoteTensor({self.value.meta}, partition={self.value.rank})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise SMPUsageError(
            f"`{getattr(func, '__name__', func)}` of a tensor that was made inside of a `smp.step` function, after "
            "that function has ended: return the tensor from the function, and take it from the `StepOutput`; if the "
            "function has set it as an attribute of a module, pass it to the module instead"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise SMPUsageError(
            f"`{func}` was called on a tensor that is on another partition, and bypassed `__torch_function__`, by "
            "which calls are recorded"
        )


class MetaParameter(torch.Tensor):
    """A parameter or buffer of another partition, without memory."""

    #: The name in the model, and the partition.
    path: str
    partition: int

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, path: str, partition: int, device: torch.device) -> MetaParameter:
        """Create a parameter without memory that replaces a parameter of another partition."""
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.shape,
            strides=tensor.stride(),
            dtype=tensor.dtype,
            device=device,
            requires_grad=tensor.requires_grad,
        )
        self.path, self.partition = path, partition
        # The attribute that `isinstance(.., torch.nn.Parameter)` checks.
        self._is_param = isinstance(tensor, torch.nn.Parameter)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"MetaParameter({self.path!r}, {TensorMeta.of(self)}, partition={self.partition})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        absent = next((arg for arg in args if isinstance(arg, MetaParameter)), None)
        name = f"`{absent.path}` is on partition {absent.partition}" if absent is not None else "it is elsewhere"
        raise SMPUsageError(
            f"`{getattr(func, '__name__', func)}` of a parameter that this rank does not hold: {name}; see "
            "`model.local_parameters()` and `model.state_dict()`"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise SMPUsageError(f"`{func}` of a parameter that this rank does not hold")


#: PyTorch's stubs declare the types of a tensor's attributes; on the class, these are descriptors.
_TENSOR: Any = torch.Tensor
_ALLOWED = METADATA | {
    torch.Tensor.requires_grad_,
    _TENSOR.requires_grad.__set__,
    _TENSOR.grad.__set__,
    _TENSOR.grad_fn.__get__,
}
