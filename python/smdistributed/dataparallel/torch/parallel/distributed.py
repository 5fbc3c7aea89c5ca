"""``DistributedDataParallel``: one replica of a model on every rank, gradients averaged during backward.

What happens on the gradient path is in C++ and in the core (``torch_ext/reducer.cc``, ``rust-core/src/reducer``); this
module checks arguments and says which tensors take part.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from smdistributed._common import errors, shims
from smdistributed.dataparallel.exceptions import CLASSES, SMDDPNotInitializedError
from smdistributed.dataparallel.torch import distributed as dist

# PyTorch first, through the loader: it says what is missing.
shims.load_torch()

import torch  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

_MIB = 1024 * 1024
_DEFAULT_BUCKET_CAP_MB = 25
# A small first bucket lets the reduction start while backward is young.
_FIRST_BUCKET_BYTES = _MIB
# Collectives work on chunks of this size, so a bucket's size is a multiple.
_BUCKET_MULTIPLE_BYTES = 128

# Keywords of torch's DistributedDataParallel that change what it does and that this one does not know, with the values
# that ask for nothing.
_UNSUPPORTED = {
    "dim": 0,
    "delay_all_reduce_named_params": None,
    "param_to_hook_all_reduce": None,
    "mixed_precision": None,
    "device_mesh": None,
    "skip_all_reduce_unused_params": False,
}


class DistributedDataParallel(torch.nn.Module):
    """Wraps ``module`` so that the gradients of all ranks are averaged during backward.

    At construction all ranks get the parameters and buffers of rank 0. Gradients are reduced in buckets while backward
    goes on, without Python; when ``backward()`` returns, ``.grad`` of every parameter is the average over the ranks,
    bitwise the same on each. Gradients live in memory that the ranks of a host share; a gradient that the script keeps
    a reference to is not overwritten by later steps.

    Every rank runs the same number of backwards. If a rank cannot, the others get an error that names it.

    Args:
        module: The model. Its parameters must be the same on all ranks, in the same order, and must not be added,
            removed or frozen differently afterwards.
        device_ids: At most one CUDA device, for a module that is on it; ``None`` or empty for modules on the CPU.
        output_device: Where outputs go; ``device_ids[0]`` by default, and must be ``None`` without ``device_ids``.
        broadcast_buffers: Whether buffers follow rank 0's: they do after every reduced backward, and before a training
            forward if there was another one since. A forward in eval mode communicates nothing, so that a single rank
            may evaluate.
        process_group: The ranks that take part; ``None`` or ``group.WORLD`` for all.
        bucket_cap_mb: Size of a bucket in MiB, 25 if ``None``; as bytes a multiple of 128.
        find_unused_parameters: Whether a backward may leave parameters without a gradient. They count as zero; one that
            no rank used keeps the gradient that it had. Costs one small collective a step.
        gradient_as_bucket_view: Accepted for torch's sake: gradients are always made in the buckets where possible.
        static_graph: Accepted for torch's sake: nothing depends on it.
        init_sync: Whether to broadcast parameters and buffers at construction.
        gradient_accumulation_steps: Reduce in every n-th backward only; the others accumulate locally. Deprecated in
            favour of :meth:`no_sync`.
        **torch_options: Other keywords of torch's class; a value other than torch's default raises
            ``NotImplementedError``.

    Raises:
        SMDDPNotInitializedError: ``init_process_group()`` was not called.
        MismatchError: Parameters or options differ between ranks; names the parameter and the ranks.
        ValueError: An argument is not acceptable.
        NotImplementedError: A parameter is not on the CPU, or an option is not supported.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        broadcast_buffers: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        *,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        init_sync: bool = True,
        gradient_accumulation_steps: int = 1,
        **torch_options: Any,
    ) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise SMDDPNotInitializedError("DistributedDataParallel needs `init_process_group()` first")
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"`module` is a {type(module).__name__}, not a torch.nn.Module")
        check_torch_options(torch_options)
        self.module = module
        self.process_group = process_group
        self.broadcast_buffers = bool(broadcast_buffers)
        self.find_unused_parameters = bool(find_unused_parameters)
        self.gradient_as_bucket_view = bool(gradient_as_bucket_view)
        self.static_graph = bool(static_graph)
        self.bucket_bytes_cap = bucket_bytes(bucket_cap_mb)
        self.gradient_accumulation_steps = checked_accumulation_steps(gradient_accumulation_steps)
        self.parameters_to_ignore = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.device_ids, self.output_device = checked_devices(module, device_ids, output_device)
        self.require_backward_grad_sync = True
        self._start(init_sync)

    def _start(self, init_sync: bool) -> None:
        """Makes the reducer. Collective."""
        named = [
            (name, parameter)
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and name not in self.parameters_to_ignore
        ]
        if not named:
            raise ValueError(
                "no parameter of the module requires a gradient: there is nothing for DistributedDataParallel to do"
            )
        with errors.translated(CLASSES):
            self._reducer = torch.classes.smd.Reducer(
                [parameter for _, parameter in named],
                [name for name, _ in named],
                self.bucket_bytes_cap,
                min(_FIRST_BUCKET_BYTES, self.bucket_bytes_cap),
                self.find_unused_parameters,
                self.gradient_accumulation_steps,
                dist._id(self.process_group),
            )
            if init_sync:
                self._reducer.broadcast([*self._parameters_of_module(), *self._buffers_of_module()], 0)

    def _parameters_of_module(self) -> list[torch.Tensor]:
        """Also frozen ones: replicas start out equal."""
        named = self.module.named_parameters()
        return [parameter.detach() for name, parameter in named if name not in self.parameters_to_ignore]

    def _buffers_of_module(self) -> list[torch.Tensor]:
        named = self.module.named_buffers()
        return [buffer.detach() for name, buffer in named if name not in self.parameters_to_ignore]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module on this rank's share of the batch."""
        if self.training and self.broadcast_buffers:
            buffers = self._buffers_of_module()
            if buffers:
                with errors.translated(CLASSES):
                    self._reducer.sync_buffers(buffers)
        outputs = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self._reducer.watch([leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)])
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards that run inside accumulate gradients locally; the next one outside reduces the sum."""
        before = self.require_backward_grad_sync
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(before)

    def _set_sync(self, sync: bool) -> None:
        self.require_backward_grad_sync = sync
        self._reducer.set_sync(sync)

    def describe_buckets(self) -> str:
        """Which parameters are reduced together, one bucket a line, in the order of reduction."""
        return self._reducer.describe_plan()

    def __getstate__(self) -> dict[str, Any]:
        # The reducer belongs to this process and this job.
        state = self.__dict__.copy()
        del state["_reducer"]
        state["process_group"] = None if self.process_group is dist.group.WORLD else self.process_group
        if state["process_group"] is not None:
            raise TypeError("a DistributedDataParallel of a group other than the world cannot be copied or pickled")
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Collective, as the constructor: every rank makes its copy."""
        super().__setstate__(state)
        if not dist.is_initialized():
            raise SMDDPNotInitializedError(
                "a copy of a DistributedDataParallel needs `init_process_group()` first; to save a model, save "
                "`model.module` or `model.state_dict()`"
            )
        self.require_backward_grad_sync = True
        self._start(init_sync=False)


def bucket_bytes(bucket_cap_mb: float | None) -> int:
    """The size of a bucket in bytes.

    Args:
        bucket_cap_mb: In MiB; ``None`` means 25.

    Raises:
        ValueError: It is not positive, or not a multiple of 128 bytes.
    """
    if bucket_cap_mb is None:
        bucket_cap_mb = _DEFAULT_BUCKET_CAP_MB
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)):
        raise ValueError(f"`bucket_cap_mb` is {bucket_cap_mb!r}: expected a positive number of MiB")
    size = bucket_cap_mb * _MIB
    if not 0 < size < 2**62:
        raise ValueError(f"`bucket_cap_mb` is {bucket_cap_mb!r}: expected a positive number of MiB")
    if size % _BUCKET_MULTIPLE_BYTES != 0:
        raise ValueError(
            f"`bucket_cap_mb` is {bucket_cap_mb!r}, which is {size:g} bytes: expected a multiple of "
            f"{_BUCKET_MULTIPLE_BYTES} bytes"
        )
    return int(size)


def checked_accumulation_steps(steps: int) -> int:
    """Checks ``gradient_accumulation_steps``; warns if it is used."""
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 2**31:
        raise ValueError(f"`gradient_accumulation_steps` is {steps!r}: expected a whole number of at least 1")
    if steps > 1:
        warnings.warn(
            f"gradient_accumulation_steps={steps}: gradients are reduced in every {steps}th backward only; the keyword "
            "is deprecated, use `no_sync()`",
            FutureWarning,
            stacklevel=3,
        )
    return steps


def check_torch_options(options: dict[str, Any]) -> None:
    """Refuses keywords of torch's class that would change what this one does."""
    for name, value in options.items():
        if name == "check_reduction":
            continue  # without effect in torch, too
        if name not in _UNSUPPORTED:
            raise TypeError(f"DistributedDataParallel has no argument `{name}`")
        if value != _UNSUPPORTED[name]:
            raise NotImplementedError(f"DistributedDataParallel does not support `{name}={value!r}` so far")


def checked_devices(
    module: torch.nn.Module,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[None, None]:
    """Checks ``device_ids`` and ``output_device`` by the rules of torch's class.

    Raises:
        ValueError: They do not fit each other or the module.
        NotImplementedError: They name a CUDA device.
    """
    if not device_ids:
        if output_device is not None:
            raise ValueError(f"`output_device` is {output_device!r}: expected None without `device_ids`")
        return None, None
    if len(device_ids) > 1:
        raise ValueError(f"`device_ids` is {list(device_ids)}: expected at most one device, or None")
    types = sorted({parameter.device.type for parameter in module.parameters()})
    if types == ["cpu"]:
        raise ValueError(
            f"`device_ids` is {list(device_ids)}, but the module is on the CPU: expected None, or a module that was "
            "moved to the device before"
        )
    raise NotImplementedError(f"modules on {' and '.join(types)}: only CPU modules are supported so far")
