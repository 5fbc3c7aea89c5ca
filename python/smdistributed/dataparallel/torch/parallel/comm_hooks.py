"""Communication hooks: functions of the user that reduce a bucket, as in torch's DistributedDataParallel.

A hook that only compresses to another dtype runs no Python: the core casts while it reduces the bucket
(``rust-core/src/reducer``). Autograd's thread calls every other hook (``torch_ext/ddp/comm_hook.cc``) with a
``GradBucket`` and waits for the future that it returns.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import Any

from smdistributed._common import shims

# PyTorch is imported through the loader, which reports missing packages.
shims.load_torch()

import torch  # noqa: E402
from torch.distributed import GradBucket  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks  # noqa: E402

#: The core's reductions (``smd::Reduction`` of the bridge).
AVERAGE, FLOAT16, BFLOAT16 = 0, 1, 2

_BY_CORE = {
    default_hooks.allreduce_hook: AVERAGE,
    default_hooks.fp16_compress_hook: FLOAT16,
    default_hooks.bf16_compress_hook: BFLOAT16,
}

_WITHOUT_GROUP = (
    "without a process group of `torch.distributed`. If it communicates by that, add this before, on every rank:\n"
    "    import smdistributed.dataparallel.torch.torch_smddp\n"
    '    torch.distributed.init_process_group("smddp")'
)

#: Hooks by the number by which C++ identifies them.
_hooks: weakref.WeakValueDictionary[int, CommHook] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class CommHook:
    """A communication hook with its state; registered for as long as the object lives.

    Args:
        state: First argument of the function.
        function: Takes the state and a bucket; returns a future of the bucket's new values.
    """

    def __init__(self, state: object, function: Callable[..., Any]) -> None:
        self.state = state
        self.function = function
        self.name = getattr(function, "__qualname__", type(function).__qualname__)
        self.futures: dict[int, torch._C.Future] = {}
        self.number = next(_numbers)
        _hooks[self.number] = self

    def start(self, bucket: Any) -> None:
        """Call the function for a bucket.

        Args:
            bucket: The bucket.

        Raises:
            TypeError: The function returned something else than a future.
        """
        try:
            future = self.function(self.state, bucket)
        except Exception as error:
            # Adds the hint to the message, because Python 3.10 has no exception notes.
            if not torch.distributed.is_initialized() and hasattr(error, "add_note"):
                error.add_note(f"communication hook `{self.name}` ran {_WITHOUT_GROUP}")
            raise
        # The base class of torch.futures.Future, which operations of torch.distributed return.
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                f"communication hook `{self.name}` returned a {type(future).__name__}: expected a torch.futures.Future"
            )
        self.futures[bucket.index()] = future

    def result(self, bucket: int) -> torch.Tensor:
        """Wait for the future of a bucket.

        Args:
            bucket: Index of the bucket.

        Returns:
            The bucket's new values.

        Raises:
            TypeError: The value of the future is not a tensor.
        """
        value = self.futures.pop(bucket).wait()
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"the future of communication hook `{self.name}` has a {type(value).__name__}: expected a tensor"
            )
        return value


def reduction_of(state: object, hook: Callable[..., Any], process_group: object) -> int | None:
    """Find the core's reduction that does what a hook does.

    Args:
        state: The hook's state.
        hook: The hook.
        process_group: The group of the model.

    Returns:
        The reduction, or ``None`` if Python has to call the hook.
    """
    own_group = state is None or state is process_group
    return _BY_CORE.get(hook) if own_group and inspect.isfunction(hook) else None


def builtin_reduction(comm_hook_type: Any) -> int:
    """Return the core's reduction for a hook that is built into torch.

    Args:
        comm_hook_type: A ``torch.distributed.BuiltinCommHookType``.

    Returns:
        The reduction.

    Raises:
        ValueError: It is something else.
    """
    kinds = torch.distributed.BuiltinCommHookType
    reductions = {kinds.ALLREDUCE: AVERAGE, kinds.FP16_COMPRESS: FLOAT16}
    if comm_hook_type not in reductions:
        raise ValueError(f"`comm_hook_type` is {comm_hook_type!r}: expected a torch.distributed.BuiltinCommHookType")
    return reductions[comm_hook_type]


def check_group(hook: Callable[..., Any]) -> None:
    """Check that torch's own hooks have the default group of ``torch.distributed``, by which they communicate.

    Args:
        hook: The hook.

    Raises:
        RuntimeError: The hook needs the group, and there is none.
    """
    module = getattr(hook, "__module__", None) or ""
    communicates = module.startswith("torch.distributed.") and hook is not debugging_hooks.noop_hook
    if communicates and not torch.distributed.is_initialized():
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        raise RuntimeError(f"communication hook `{name}` was registered {_WITHOUT_GROUP}")


def check(hook: Callable[..., Any]) -> None:
    """Check what can be known of a hook before it runs, by the rules of torch's class.

    Args:
        hook: The hook.

    Raises:
        TypeError: It cannot be called.
        ValueError: Its annotations are not those of a hook.
    """
    if not callable(hook):
        raise TypeError(f"the communication hook is a {type(hook).__name__}, which cannot be called")
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    # Annotations that are strings are not resolved.
    known = (inspect.Parameter.empty, GradBucket)
    if bucket is not None and not isinstance(bucket.annotation, str) and bucket.annotation not in known:
        raise ValueError(f"the communication hook's `bucket` is a {bucket.annotation}: expected dist.GradBucket")
    returned = signature.return_annotation
    expected = torch.futures.Future[torch.Tensor]
    if not isinstance(returned, str) and returned not in (inspect.Signature.empty, expected):
        raise ValueError(f"the communication hook returns {returned}: expected torch.futures.Future[torch.Tensor]")


def _start(number: int, bucket: Any) -> None:
    _hooks[number].start(bucket)


def _await(number: int, bucket: int) -> torch.Tensor:
    return _hooks[number].result(bucket)


_library = torch.library.Library("smd", "IMPL")
# The operations take no tensor from which the dispatcher could choose a backend.
_library.impl("start_comm_hook", _start, "CompositeImplicitAutograd")
_library.impl("await_comm_hook", _await, "CompositeImplicitAutograd")
