"""``DistributedDataParallel``: one replica of a model on every rank, gradients averaged during backward.

Gradients are handled in C++ and in the core (``torch_ext/ddp/``, ``rust-core/src/reducer``). This module checks the
arguments and selects the parameters that take part.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from smdistributed import _core
from smdistributed._common import errors, shims
from smdistributed.dataparallel.exceptions import CLASSES, SMDDPNotInitializedError
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.torch import distributed as dist

# PyTorch is imported through the loader, which reports missing packages.
shims.load_torch()

import torch  # noqa: E402
from torch.distributed.algorithms.join import Joinable  # noqa: E402
from torch.distributed.utils import _to_kwargs  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from smdistributed.dataparallel.torch.parallel import (  # noqa: E402
    arguments,
    comm_hooks,
    groups,
    in_backward,
    join,
    logging_data,
    registrations,
)
from smdistributed.dataparallel.torch.parallel.join import DDPJoinHook  # noqa: E402
from smdistributed.dataparallel.torch.parallel.precision import MixedPrecision  # noqa: E402
from smdistributed.dataparallel.torch.parallel.reducer_methods import ReducerMethods  # noqa: E402

_TorchDDP: Any = torch.nn.parallel.DistributedDataParallel


class DistributedDataParallel(_TorchDDP):
    """Wraps ``module`` so that the gradients of all ranks are averaged during backward.

    At construction all ranks get the parameters and, with ``broadcast_buffers``, the buffers of rank 0. Gradients are
    reduced in buckets while backward continues, without Python. When ``backward()`` returns, ``.grad`` of every
    parameter is the average over the ranks, bitwise the same on each. On CPUs, gradients are in memory that the ranks
    of a host share; on GPUs, large ones are reduced in place. Later steps do not overwrite a gradient to which the
    script keeps a reference.

    Every rank runs the same number of backwards, except under :meth:`join`. If a rank fails, the others get an error
    that names it.

    The class is a subclass of ``torch.nn.parallel.DistributedDataParallel``, so libraries treat it as one; its
    ``reducer`` has the methods that libraries call. If the module contains another DistributedDataParallel, of either
    kind, that one reduces its own parameters.

    Args:
        module: The model. Its parameters must be the same on all ranks, in the same order, and must not be added,
            removed or frozen differently afterwards.
        device_ids: At most one CUDA device, for a module that is on it; ``None`` or empty for modules on the CPU.
            Inputs are moved there.
        output_device: ``device_ids[0]`` by default, and must be ``None`` without ``device_ids``. It has no other
        effect: outputs stay on the device on which the module computes them.
        broadcast_buffers: Whether buffers are those of rank 0: they are broadcast at construction, after every
        reduced backward, and before a training forward if there was another forward since. A forward in eval mode
        communicates nothing, so a single rank may evaluate.
        process_group: The ranks that take part: ``None`` or ``group.WORLD`` for all, or a group of ``new_group`` of
        this library or of ``torch.distributed``.
        bucket_cap_mb: Size of a bucket in MiB, as bytes a multiple of 128. ``None`` means the size that
        ``SMD_AUTOTUNE`` measured on GPUs, or else 100 there and 25 on CPUs.
        dim: Ignored with a warning, if it is not 0; accepted for compatibility with
            ``torch.nn.parallel.DistributedDataParallel``.
        init_sync: Whether to broadcast parameters and buffers at construction. Parameters are compared in any case.
        find_unused_parameters: Whether a backward may leave parameters without a gradient. They count as zero; one that
            no rank used keeps the gradient that it had. Costs one small collective a step.
        check_reduction: Ignored, as in torch.
        gradient_as_bucket_view: Accepted for compatibility. On CPUs, gradients are allocated in buckets
        where possible; on GPUs, small ones become views of a bucket.
        static_graph: Whether every backward repeats the first one. Gradients may then arrive in several parts
        (re-entrant checkpoints that share parameters), and unused parameters are known after the first step, which is
        reduced at its end.
        delay_all_reduce_named_params: Parameters by name that are reduced after all others; they may stay without a
            gradient and then get zeros.
        param_to_hook_all_reduce: The parameter whose gradient they wait for; required with the previous argument.
        mixed_precision: torch's ``_MixedPrecision``: the module computes in ``param_dtype``, gradients are reduced in
        ``reduce_dtype``, and parameters and gradients keep their type.
        device_mesh: A mesh of one dimension, instead of ``process_group``.
        skip_all_reduce_unused_params: As ``find_unused_parameters``.
        bucket_cap_mb_list: Sizes of the first bucket, the second, and so on, instead of ``bucket_cap_mb``; the last one
            is also that of all others.
        gradient_accumulation_steps: Reduce in every n-th backward only; the others accumulate locally. Deprecated in
            favour of :meth:`no_sync`.

    Raises:
        SMDDPNotInitializedError: ``init_process_group()`` was not called.
        MismatchError: Parameters or options differ between ranks; names the parameter and the ranks.
        ValueError: An argument is not acceptable.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        broadcast_buffers: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        *,
        dim: int = 0,
        init_sync: bool = True,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        gradient_accumulation_steps: int = 1,
    ) -> None:
        # Does not call torch's constructor, which would create torch's own reducer.
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        if not dist.is_initialized():
            raise SMDDPNotInitializedError("DistributedDataParallel needs `init_process_group()` first")
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"`module` is a {type(module).__name__}, not a torch.nn.Module")
        if check_reduction:
            warnings.warn("`check_reduction` has no effect", FutureWarning, stacklevel=2)
        arguments.warn_of_dim(dim)
        self.module = module
        self.process_group = groups.resolve(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.dim = dim
        self.broadcast_buffers = bool(broadcast_buffers)
        self.find_unused_parameters = bool(find_unused_parameters or skip_all_reduce_unused_params)
        self.skip_all_reduce_unused_params = bool(skip_all_reduce_unused_params)
        self.gradient_as_bucket_view = bool(gradient_as_bucket_view)
        self.static_graph = bool(static_graph)
        self.bucket_bytes_cap_list = arguments.bucket_bytes_list(bucket_cap_mb_list)
        bucket_bytes = arguments.bucket_bytes(bucket_cap_mb, any(p.is_cuda for p in module.parameters()))
        self.bucket_bytes_cap = max(self.bucket_bytes_cap_list, default=bucket_bytes)
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not self.bucket_bytes_cap_list
        self.gradient_accumulation_steps = arguments.accumulation_steps(gradient_accumulation_steps)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._delayed = self._checked_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        self._module_parameters = self._parameters_of_module()
        if not any(parameter.requires_grad for parameter in self._module_parameters):
            raise RuntimeError(
                "no parameter of the module requires a gradient: there is nothing for DistributedDataParallel to do"
            )
        arguments.check_parameters(self._named_parameters())
        self.device_ids, self.output_device = arguments.devices(self._module_parameters, device_ids, output_device)
        self.device = self._module_parameters[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({parameter.device for parameter in self._module_parameters}) > 1
        arguments.check_sync_batch_norm(module, self.device_type)
        self.mixed_precision = mixed_precision
        self._precision = None if mixed_precision is None else MixedPrecision(mixed_precision, module)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.logger = None
        self._lazy_init_ran = False
        self.use_side_stream_for_tensor_copies = False
        self.broadcast_bucket_size = 250 * 1024 * 1024
        self._comm_hook: comm_hooks.CommHook | None = None
        self._comm_hook_name: str | None = None
        self._reduction = comm_hooks.AVERAGE if self._precision is None else self._precision.reduction
        self._divide_by_initial_world_size = True
        # Attributes that torch's methods read.
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []
        self._use_python_reducer = False
        self._start(init_sync)

    def _checked_delayed(
        self, named: Sequence[tuple[str, torch.nn.Parameter]] | None, trigger: torch.nn.Parameter | None
    ) -> frozenset[str]:
        if (named is None) != (trigger is None):
            raise ValueError(
                "`delay_all_reduce_named_params` and `param_to_hook_all_reduce` must be given together: one is missing"
            )
        known = dict(self.module.named_parameters(remove_duplicate=False))
        for name, parameter in named or ():
            if known.get(name) is not parameter:
                raise ValueError(
                    f"`delay_all_reduce_named_params` has `{name}`, which is not a parameter of the module"
                )
        if trigger is not None and not any(parameter is trigger for parameter in known.values()):
            raise ValueError("`param_to_hook_all_reduce` is not a parameter of the module")
        return frozenset(name for name, _ in named or ())

    def _start(self, init_sync: bool) -> None:
        """Create the reducer. Collective."""
        named = self._named_parameters()
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        self._trained = [parameter for _, parameter in trained]
        sparse = self._sparse_parameters()
        self._registrations = registrations.count()
        self._known = {id(parameter) for _, parameter in named}
        with errors.translated(CLASSES):
            self._reducer = torch.classes.smd.Reducer(
                self._trained,
                [name for name, _ in trained],
                [index for index, (_, parameter) in enumerate(trained) if id(parameter) in sparse],
                [index for index, (name, _) in enumerate(trained) if name in self._delayed],
                [parameter for _, parameter in frozen],
                [name for name, _ in frozen],
                groups.ranks(self.process_group),
                self._bucket_sizes(),
                self._settings(),
            )
            if init_sync:
                self._broadcast_state(0)
            if self.bucket_bytes_cap_default and self.device_type == "cuda":
                self._take_measured_buckets()
        self._first_buckets = self._reducer.buckets()
        # Uses the ranks of the group, in order with the reducer's own operations.
        self._own_group = dist.ProcessGroup(self._reducer.group(), None)

    def _bucket_sizes(self) -> list[int]:
        return self.bucket_bytes_cap_list or _core.bucket_sizes(self.bucket_bytes_cap)

    def _settings(self) -> dict[str, int]:
        return {
            "find_unused_parameters": int(self.find_unused_parameters),
            "static_graph": int(self.static_graph),
            "accumulation_steps": self.gradient_accumulation_steps,
            "reduction": self._reduction,
            "comm_hook": -1 if self._comm_hook is None else self._comm_hook.number,
        }

    def _take_measured_buckets(self) -> None:
        """Use the bucket size that ``SMD_AUTOTUNE`` measures at the group's first use of its devices. Collective."""
        measured = _core.measure_bucket_bytes(self._reducer.group(), self.device.index)
        if measured is not None and measured != self.bucket_bytes_cap:
            self.bucket_bytes_cap = measured
            self._configure()

    def _configure(self) -> None:
        """Pass options to the reducer that were chosen after construction. Collective."""
        with errors.translated(CLASSES):
            self._reducer.configure(self._bucket_sizes(), self._settings())

    def _named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters that this object reduces, each once, in the order of registration."""
        left_to_others = {
            id(parameter)
            for module in self.module.modules()
            if isinstance(module, _TorchDDP)
            for parameter in module.parameters()
        }
        named: dict[int, tuple[str, torch.nn.Parameter]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if name not in self.parameters_to_ignore and id(parameter) not in left_to_others:
                named.setdefault(id(parameter), (name, parameter))
        return list(named.values())

    def _parameters_of_module(self) -> list[torch.nn.Parameter]:
        """Return the parameters to broadcast, including frozen ones, because replicas must start equal."""
        return [parameter for _, parameter in self._named_parameters()]

    def _buffers_of_module(self) -> list[torch.Tensor]:
        named = self.module.named_buffers()
        return [buffer.detach() for name, buffer in named if name not in self.parameters_to_ignore]

    def _sparse_parameters(self) -> set[int]:
        embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        return {
            id(module.weight) for module in self.module.modules() if isinstance(module, embeddings) and module.sparse
        }

    # PyTorch's internal decorator: the public one would import the compiler with this module, which takes a second.
    @torch._disable_dynamo(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's share of the batch.

        Args:
            *inputs: Arguments of the module.
            **kwargs: Keyword arguments of the module.

        Returns:
            The result of the module.
        """
        started = time.monotonic_ns()
        has_graph = torch.is_grad_enabled()
        sync = has_graph and self.require_backward_grad_sync
        if has_graph:
            if not self._lazy_init_ran:
                in_backward.register(self)
                self._lazy_init_ran = True
            if registrations.count() != self._registrations:
                self._check_parameters()
        with_buffers = self.training and self.broadcast_buffers
        if self._join_config.enable:
            self._go_on_with_others(sync, with_buffers)
        elif with_buffers and not self._has_buffer_hook():
            buffers = self._buffers_of_module()
            if buffers:
                with errors.translated(CLASSES):
                    self._reducer.sync_buffers(buffers, self.require_backward_grad_sync)
        if self.device_ids:
            moved, moved_kwargs = _to_kwargs(inputs, kwargs, torch.device(self.device_type, self.device_ids[0]), False)
            inputs, kwargs = moved[0], moved_kwargs[0]
        self._run_buffer_hook(before=True)
        # torch.compile reads the active model, to split graphs at the ends of buckets.
        _TorchDDP._active_ddp_module = self
        try:
            if self._precision is None:
                outputs = self.module(*inputs, **kwargs)
            else:
                outputs = self._precision.run(self.module, inputs, kwargs)
        finally:
            _TorchDDP._active_ddp_module = None
        self._run_buffer_hook(before=False)
        if has_graph:
            self._reducer.watch(
                [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)], sync, started
            )
        return outputs

    def _check_parameters(self) -> None:
        """Check for parameters that were registered after construction, because they would not be reduced.

        Raises:
            RuntimeError: There is one.
        """
        self._registrations = registrations.count()
        for name, parameter in self._named_parameters():
            if parameter.requires_grad and id(parameter) not in self._known:
                raise RuntimeError(
                    f"parameter `{name}` was added after DistributedDataParallel wrapped the model, so its gradient "
                    "would not be reduced: wrap the model again"
                )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward does not reduce gradients.

        Backwards of forwards that run inside accumulate gradients locally. The next backward of a forward outside
        reduces the sum.

        Yields:
            Nothing.

        Examples:
            >>> with model.no_sync():
            ...     loss(model(first)).backward()
            >>> loss(model(second)).backward()  # reduces the sum of both gradients
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def describe_buckets(self) -> str:
        """Describe which parameters are reduced together.

        Returns:
            One line a bucket, in the order of reduction.
        """
        return self._reducer.describe_plan()

    @property
    def reducer(self) -> ReducerMethods:
        """An object with the methods that libraries call on torch's reducer."""
        return ReducerMethods(self)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return bool(self._reducer.statistics()["has_rebuilt_buckets"])

    def _get_ddp_logging_data(self) -> dict[str, int | str]:
        """Return options, buckets, and the times of the parts of a step, under torch's names.

        Times are in nanoseconds, of one of the first ten steps or of every hundredth after them.
        """
        return logging_data.collect(self)

    def _average(self, tensor: torch.Tensor) -> None:
        """Average a tensor over the ranks in place, in order with the reducer's own operations."""
        with errors.translated(CLASSES):
            dist.all_reduce(tensor, op=ReduceOp.AVERAGE, group=self._own_group)

    def _drop_stepped_gradients(self) -> None:
        for parameter in self._module_parameters:
            if hasattr(parameter, "_in_backward_optimizers"):
                parameter.grad = None

    # Communication hooks.

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a hook that reduces buckets, as torch's method of this name. All ranks call it.

        The core runs torch's own hooks that average in a narrow type. Sparse gradients are reduced without the hook.

        Args:
            state: First argument of the hook.
            hook: Called as ``hook(state, bucket)``. The bucket has the methods of ``torch.distributed.GradBucket``. The
                hook returns a ``torch.futures.Future`` of the bucket's new values.

        Raises:
            RuntimeError: There is a hook already, or a hook of torch's own has no process group of
                ``torch.distributed``.
            TypeError: The hook cannot be called.
            MismatchError: Ranks registered different hooks.
        """
        comm_hooks.check(hook)
        reduction = comm_hooks.reduction_of(state, hook, self.process_group)
        if reduction is None:
            comm_hooks.check_group(hook)
        self._register(
            getattr(hook, "__qualname__", type(hook).__qualname__), reduction, comm_hooks.CommHook(state, hook)
        )
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Set the reduction of the core, from a ``torch.distributed.BuiltinCommHookType``. Collective."""
        self._register(str(comm_hook_type), comm_hooks.builtin_reduction(comm_hook_type), None)

    def _register(self, name: str, reduction: int | None, hook: comm_hooks.CommHook | None) -> None:
        if self._comm_hook_name is not None:
            raise RuntimeError(f"communication hook `{self._comm_hook_name}` is registered already")
        if reduction is None:
            self._comm_hook = hook
        else:
            self._reduction = reduction
        self._configure()
        self._comm_hook_name = name

    def _set_static_graph(self) -> None:
        """Set the argument ``static_graph`` after construction. Collective."""
        if self.static_graph:
            warnings.warn("`static_graph` is True already", stacklevel=2)
            return
        self.static_graph = True
        self._configure()

    # Buffers.

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers that are not ignored, by name."""
        return {name: buffer for name, buffer in self.module.named_buffers() if name not in self.parameters_to_ignore}

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """Buffers that are not ignored."""
        return list(self.named_module_buffers.values())

    def _assign_modules_buffers(self) -> None:
        """Do nothing; called by torch. Buffers are looked up when they are needed."""

    def _has_buffer_hook(self) -> bool:
        return "buffer_hook" in self.__dict__

    def _run_buffer_hook(self, before: bool) -> None:
        if not self._has_buffer_hook():
            return
        location = type(self.buffer_hook.buffer_comm_hook_location)
        wanted = location.PRE_FORWARD if before else location.POST_FORWARD
        if self.buffer_hook.buffer_comm_hook_location != wanted or not self.will_sync_module_buffers():
            return
        futures = self.buffer_hook.buffer_comm_hook(self.buffer_hook.buffer_comm_hook_state, self.named_module_buffers)
        for future in futures or ():
            future.wait()

    # Uneven inputs.

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Any:
        """Return a context for a training loop in which ranks may run out of inputs at different times.

        A rank that leaves the loop takes part in the others' reductions with zeros until all have left it. Then every
        rank gets the model of one that stayed longest.

        Args:
            divide_by_initial_world_size: Whether gradients are divided by the number of all ranks, or of those that
                still have inputs.
            enable: Whether to do any of this.
            throw_on_early_termination: Whether every rank raises ``RuntimeError`` instead when the first one leaves.

        Returns:
            The context manager.

        Examples:
            >>> with model.join():
            ...     for batch in batches:  # of different number on each rank
            ...         loss(model(batch)).backward()
        """
        return join.join(
            self, enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> DDPJoinHook:
        """Return the hook for ``torch.distributed.algorithms.join.Join``.

        Args:
            **kwargs: ``divide_by_initial_world_size`` of :meth:`join`.

        Returns:
            The hook.
        """
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return DDPJoinHook(self)

    def _go_on_with_others(self, sync: bool, with_buffers: bool) -> None:
        """Prepare the forward of a rank that has inputs."""
        join.notify(self)
        ranks = self._agree_on_step(1, sync, with_buffers)
        by_present = sync and not self._divide_by_initial_world_size
        factor = torch.tensor(self._group_size / ranks, dtype=torch.float64, device="cpu")
        self._reducer.scale_next(factor if by_present else None)

    def _shadow_step(self) -> None:
        """Take part in the step of the others without inputs.

        This rank follows before their forward, and in the backward that may follow.
        """
        if self._agree_on_step(0, False, False):
            with errors.translated(CLASSES):
                self._reducer.shadow()

    def _agree_on_step(self, present: int, sync: bool, with_buffers: bool) -> float:
        """Exchange what the ranks with inputs do.

        Returns:
            On ranks with inputs, how many ranks have some; on the others, whether a backward is reduced.
        """
        counts = torch.tensor([float(present), float(sync), float(with_buffers)], device="cpu")
        with errors.translated(CLASSES):
            dist.all_reduce(counts, op=ReduceOp.SUM, group=self._own_group)
            ranks, syncing, with_buffers_anywhere = counts.tolist()
            if with_buffers_anywhere:
                self._reducer.broadcast(self._buffers_of_module(), self._last_rank(bool(present)))
        return ranks if present else syncing

    def _take_final_model(self, is_last_joiner: bool) -> None:
        root = self._last_rank(is_last_joiner)
        with errors.translated(CLASSES):
            self._broadcast_state(root)
        self._reducer.scale_next(None)

    def _broadcast_state(self, root: int) -> None:
        parameters = [parameter.detach() for parameter in self._module_parameters]
        buffers = self._buffers_of_module() if self.broadcast_buffers else []
        self._reducer.broadcast([*parameters, *buffers], root)

    def _last_rank(self, candidate: bool) -> int:
        """Return the last rank that is a candidate, as a rank inside the group."""
        root = torch.tensor([self._group_rank if candidate else -1], device="cpu")
        dist.all_reduce(root, op=ReduceOp.MAX, group=self._own_group)
        return int(root.item())

    @property
    def join_device(self) -> torch.device:
        """The device, for ``torch.distributed.algorithms.join.Join``."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The group, for ``torch.distributed.algorithms.join.Join``."""
        return self.process_group

    @property
    def _distributed_rank(self) -> int:
        return self._group_rank

    @property
    def _group_rank(self) -> int:
        """This rank inside the group."""
        if groups.is_torch_group(self.process_group):
            return torch.distributed.get_rank(self.process_group)
        return dist.get_rank(self.process_group)

    @property
    def _group_size(self) -> int:
        if groups.is_torch_group(self.process_group):
            return torch.distributed.get_world_size(self.process_group)
        return dist.get_world_size(self.process_group)

    # Copies.

    def __getstate__(self) -> dict[str, Any]:
        if not groups.is_default(self.process_group):
            raise TypeError("a DistributedDataParallel of a group other than the world cannot be copied or pickled")
        # The reducer and hooks belong to this process and this job.
        state = self.__dict__.copy()
        for name in ("_reducer", "_own_group", "process_group", "device_mesh", "_known", "_trained", "_comm_hook"):
            state.pop(name, None)
        return state | {"_comm_hook_name": None, "_comm_hooks": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, collectively like the constructor. A communication hook is not copied."""
        torch.nn.Module.__setstate__(self, state)
        if not dist.is_initialized():
            raise SMDDPNotInitializedError(
                "a copy of a DistributedDataParallel needs `init_process_group()` first; to save a model, save "
                "`model.module` or `model.state_dict()`"
            )
        self.process_group = groups.resolve(None, None)
        self._comm_hook = None
        self._lazy_init_ran = False
        self.require_backward_grad_sync = True
        self._module_parameters = self._parameters_of_module()
        self._start(init_sync=False)

    def _update_process_group(self, new_process_group: Any) -> None:
        """Change the group; all its ranks call this."""
        self.process_group = groups.resolve(new_process_group, None)
        self._start(init_sync=False)
