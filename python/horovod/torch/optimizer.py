"""Optimizers that reduce gradients over the ranks.

The result of :func:`DistributedOptimizer` is a view of the given optimizer: an object of a subclass with the same name
that shares its ``__dict__``. Options, state and hooks are therefore the same, whichever of them is used.
"""

from __future__ import annotations

import functools
import gc
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from horovod.common.basics import warn_once
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import split_list
from horovod.torch.compression import Compression
from horovod.torch.functions import broadcast_object
from horovod.torch.handles import _number, _submit
from horovod.torch.mpi_ops import (
    Adasum,
    Average,
    allreduce_async_,
    grouped_allreduce_async_,
    size,
    sparse_allreduce_async,
    synchronize,
)
from horovod.torch.planned_reducer import PLANNED, PlannedReducer
from horovod.torch.sparse import no_rows
from smdistributed import _core
from smdistributed._common import replicas

# A mixin for classes of a framework, which have the other attributes; `Any` tells the type checker so.
_Base: Any = object


class _DistributedOptimizer(_Base):
    """The additional methods of a distributed optimizer; mixed into a subclass of the given optimizer's class."""

    def _distribute(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        compression: Any,
        backward_passes_per_step: int,
        op: int,
        gradient_predivide_factor: float,
        groups: int | list[list[torch.Tensor]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._compression = compression
        self.backward_passes_per_step = backward_passes_per_step
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self._parameter_names = _names(self.param_groups, named_parameters)
        self._handles: dict[Any, Any] = {}
        self._comparison: Any = None
        self._requires_update: set[torch.Tensor] = set()
        self._allreduce_delay = dict.fromkeys(self._parameters(), backward_passes_per_step)
        self._synchronized = False
        self._should_synchronize = True
        self._hooks: list[Any] = []
        # The number of each parameter's group.
        self._group_of: dict[torch.Tensor, int] = {}
        self._groups: list[list[torch.Tensor]] = []
        self._arrived: dict[int, set[torch.Tensor]] = {}
        self._planned_reducer = PlannedReducer(
            self._parameter_names, op, gradient_predivide_factor, compression, process_set, self._submit_declined
        )
        # `size` comes first, because it raises if `init` has not been called.
        self._active = (size() > 1 or os.environ.get("HOROVOD_ELASTIC") == "1") and process_set.included()
        if self._active:
            self._register_groups(groups)
            self._register_hooks()

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _register_groups(self, groups: int | list[list[torch.Tensor]] | None) -> None:
        if not groups:
            return
        index_of = {parameter: index for index, parameter in enumerate(self._parameters())}
        if isinstance(groups, int):
            own = [index for parameter, index in index_of.items() if parameter.requires_grad]
            chunks = [chunk for chunk in split_list(own, groups) if chunk]
        else:
            chunks = [[index_of[parameter] for parameter in group if parameter in index_of] for group in groups]
        # All ranks use rank 0's order, because a script may list the groups in any order. Elastic jobs skip the
        # broadcast: a worker that joins late makes its optimizer while the other workers train.
        if self._is_global() and os.environ.get("HOROVOD_ELASTIC") != "1":
            chunks = broadcast_object(chunks, 0, "distributed_optimizer.groups")
        parameters = list(index_of)
        self._groups = [[parameters[index] for index in chunk] for chunk in chunks if chunk]
        self._group_of = {parameter: number for number, group in enumerate(self._groups) for parameter in group}
        self._arrived = {number: set() for number in range(len(self._groups))}

    def _is_global(self) -> bool:
        return self.process_set.process_set_id == 0

    def _register_hooks(self) -> None:
        for number, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.requires_grad and parameter not in self._requires_update:
                    # The group may have come with `add_param_group`.
                    self._parameter_names.setdefault(parameter, f"allreduce.noname.{number}.{index}")
                    self._allreduce_delay.setdefault(parameter, self.backward_passes_per_step)
                    self._requires_update.add(parameter)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._make_hook()))

    def _make_hook(self) -> Callable[[torch.Tensor], None]:
        delays = self._allreduce_delay

        def hook(parameter: torch.Tensor) -> None:
            left = delays[parameter] - 1
            if left < 0:
                raise AssertionError(
                    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                    "backward_passes_per_step to accumulate gradients locally."
                )
            delays[parameter] = left
            if left == 0:
                self._start(parameter, accumulating=True)

        return hook

    def _start(self, parameter: torch.Tensor, accumulating: bool) -> None:
        """Reduce a complete gradient; if `accumulating`, it is complete only when autograd has finished."""
        if self._comparison is not None:
            self._finish_comparison()
        planned = self._planned_reducer
        with planned.lock:
            if not planned.begun:
                # The hook has counted this accumulation, which is still to come in the reducer's hook.
                current = parameter if accumulating else None
                planned.begin(self._parameters(), lambda each: 1 if each is current else self._passes_left(each))
            starting = [*planned.take_declined(in_hook=True)]
            if planned.take(parameter, accumulating):
                self._handles[parameter] = None
            else:
                starting.append(parameter)
            for place, each in enumerate(starting):
                try:
                    self._start_by_name(each)
                except Exception as error:
                    # A script may catch it, and must not take a step with gradients that are not reduced.
                    self._fail(starting[place:], error)
                    raise

    def _passes_left(self, parameter: torch.Tensor) -> int:
        return self._allreduce_delay[parameter] if parameter in self._requires_update else 0

    def _submit_declined(self) -> None:
        with self._planned_reducer.lock, self._planned_reducer.stream():
            for parameter in self._planned_reducer.take_declined(in_hook=False):
                try:
                    self._start_by_name(parameter)
                except Exception as error:
                    self._fail([parameter], error)

    def _fail(self, parameters: Sequence[torch.Tensor], error: Exception) -> None:
        """Let the end of the step raise an error for parameters, and for those of their groups that are not reduced."""
        for parameter in parameters:
            number = self._group_of.get(parameter)
            for each in [parameter] if number is None else self._groups[number]:
                if self._handles.get(each) is None and (each is parameter or each in self._handles):
                    self._handles[each] = functools.partial(_raise, error)

    def _start_by_name(self, parameter: torch.Tensor) -> None:
        number = self._group_of.get(parameter)
        if number is None:
            self._handles[parameter] = self._reduce_one(parameter)
            return
        self._handles[parameter] = None
        arrived = self._arrived[number]
        arrived.add(parameter)
        if len(arrived) == len(self._groups[number]):
            self._reduce_group(number)

    def _factors(self) -> tuple[int, float, float]:
        if self.op == Average and self.gradient_predivide_factor != 1.0:
            return Average, 1.0 / self.gradient_predivide_factor, self.gradient_predivide_factor
        return self.op, 1.0, 1.0

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter.grad is None:
            # The parameter may have a gradient on other ranks.
            parameter.grad = no_rows(parameter) if _is_sparse(parameter) else torch.zeros_like(parameter)
        grad = parameter.grad
        if grad.is_sparse:
            self._planned_reducer.sparse.add(parameter)
            return grad.to_dense() if self.sparse_as_dense else grad
        if not grad.is_contiguous():
            # The gradient of `expand`, for example, has elements that share memory.
            grad = parameter.grad = grad.contiguous()
        return grad

    def _reduce_one(self, parameter: torch.Tensor) -> Callable[[], None]:
        name = f"{self._parameter_names[parameter]}"
        op, prescale, postscale = self._factors()
        with torch.no_grad():
            grad = self._gradient(parameter)
            if grad.is_sparse:
                reduced = sparse_allreduce_async(grad, name, op, self.process_set)
                return lambda: _set(parameter, reduced())
            small, ctx = self._compression.compress(grad)
            handle = allreduce_async_(
                small,
                name=name,
                op=op,
                prescale_factor=prescale,
                postscale_factor=postscale,
                process_set=self.process_set,
            )
        if ctx is None and small is parameter.grad:
            return lambda: synchronize(handle)
        return lambda: _write(parameter, self._compression.decompress(synchronize(handle), ctx))

    def _reduce_group(self, number: int) -> None:
        """Reduce the gradients of a group that have arrived; the others are frozen, or reduced by plan."""
        arrived = self._arrived[number]
        members = [parameter for parameter in self._groups[number] if parameter in arrived]
        arrived.clear()
        op, prescale, postscale = self._factors()
        dense, small, ctxs = [], [], []
        with torch.no_grad():
            for parameter in members:
                grad = self._gradient(parameter)
                if grad.is_sparse:
                    # The other ranks do not know the size of a sparse gradient.
                    self._handles[parameter] = self._reduce_one(parameter)
                    continue
                tensor, ctx = self._compression.compress(grad)
                dense.append(parameter)
                small.append(tensor)
                ctxs.append(ctx)
            if not dense:
                return
            handle = grouped_allreduce_async_(
                small,
                name=f"group.{number}.{self._parameter_names[dense[0]]}",
                op=op,
                prescale_factor=prescale,
                postscale_factor=postscale,
                process_set=self.process_set,
            )

        def finish() -> None:
            for parameter, tensor, ctx in zip(dense, synchronize(handle), ctxs, strict=True):
                reduced = self._compression.decompress(tensor, ctx)
                if reduced is not parameter.grad:
                    _write(parameter, reduced)

        self._handles[dense[0]] = finish
        for parameter in dense[1:]:
            self._handles[parameter] = _nothing

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes whose gradients are summed before they are reduced."""
        self.backward_passes_per_step = passes
        for parameter in self._allreduce_delay:
            self._allreduce_delay[parameter] = passes
        with self._planned_reducer.lock:
            self._planned_reducer.expect(lambda each: 0 if each in self._handles else self._passes_left(each))

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load the state of the given optimizer; reductions that are pending are dropped."""
        self._give_up()
        super().load_state_dict(*args, **kwargs)

    def _forget(self) -> None:
        """Drop gradients that no step has taken.

        A rank that joins a job has no such gradients, and all ranks must begin the next step together.
        """
        for arrived in self._arrived.values():
            # The other ranks may have no such gradients, and would not take part in their reduction.
            arrived.clear()
        self._give_up()
        self.zero_grad()

    def _give_up(self) -> None:
        # Errors belong to the reductions that are dropped: elastic training restores a state after a failure.
        with suppress(Exception):
            self._finish(False)
        self._comparison = None

    def _finish(self, is_step: bool) -> None:
        """Wait for all operations, also after one has failed, so that none remains in progress."""
        failure: Exception | None = None
        try:
            try:
                self._end_round()
                if is_step:
                    self._compare()
            except Exception as error:
                failure = error
            for finish in list(self._handles.values()):
                try:
                    if finish is not None:
                        finish()
                except Exception as error:
                    failure = failure or error
            try:
                self._planned_reducer.check()
            except Exception as error:
                failure = failure or error
        finally:
            self._reset()
        if failure is not None:
            self._comparison = None
            raise failure

    def _end_round(self) -> None:
        for parameter in self._planned_reducer.end(self._gradient):
            self._start_by_name(parameter)
        for number, arrived in self._arrived.items():
            if arrived:
                self._reduce_group(number)

    def _compare(self) -> None:
        """Compare the names of the gradients that the ranks have reduced.

        Otherwise, a rank without a gradient would leave the others waiting. Waiting ranks get the error at once. A rank
        that has all gradients does not wait, and gets the error in its next step.
        """
        if self._planned_reducer.vote_result != PLANNED:
            first = next(iter(self._parameter_names.values()))
            names = "\n".join([self._parameter_names[parameter] for parameter in self._handles])
            step, number = torch.ops.smd.named_step.default, _number(self.process_set)
            self._comparison = _submit(step, f"step.{first}", names, number, finish=_ignored)

    def _finish_comparison(self) -> None:
        """Raise the error of the last step's comparison, if there was one."""
        if self._comparison is None:
            return
        comparison, self._comparison = self._comparison, None
        try:
            comparison.wait()
        except HorovodInternalError:
            self._reset()
            raise

    def _reset(self) -> None:
        self._handles.clear()
        for arrived in self._arrived.values():
            arrived.clear()
        for parameter in self._parameters():
            self._allreduce_delay[parameter] = self.backward_passes_per_step

    def synchronize(self) -> None:
        """Wait until all gradients are reduced. Then call ``step`` in ``with optimizer.skip_synchronize():``."""
        if not self._active:
            self._synchronized = True
            return
        _compare_replicas(self, self.process_set.ranks)
        # For parameters whose `requires_grad` was set after the optimizer was created.
        self._register_hooks()
        for parameter in self._parameters():
            missing = parameter.requires_grad and parameter not in self._handles
            if missing and parameter in self._requires_update:
                self._gradient(parameter)
                self._start(parameter, accumulating=False)
        with torch.no_grad():
            self._finish(True)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context for a ``step`` after :meth:`synchronize`, in which it does not reduce again."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait until all gradients are reduced, and run the given optimizer's step."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        # PyTorch's schedulers look for this attribute.
        self._opt_called = True
        return super().step(closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients as the given optimizer does.

        Raises:
            AssertionError: Gradients are being reduced.
        """
        if self._handles:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(*args, **kwargs)


def _is_sparse(parameter: Any) -> bool:
    """Return whether a parameter without a gradient has sparse gradients on ranks that have one.

    This is decided by the type of the parameter's layer. It is needed if this rank has not used the layer. The search
    runs once for each parameter.
    """
    known = getattr(parameter, "_hvd_sparse", None)
    if known is None:
        kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        # By `type`, because `isinstance` asks an object for `__class__`, which may have side effects.
        layers = (one for one in gc.get_objects() if issubclass(type(one), kinds))
        known = any(layer.weight is parameter and layer.sparse for layer in layers)
        parameter._hvd_sparse = known
    return known


class _DistributedAdasumOptimizer(_Base):
    """Combines by Adasum the changes that each rank's optimizer would make in a step."""

    def _distribute(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        compression: Any,
        backward_passes_per_step: int,
    ) -> None:
        self._compression = compression
        self.backward_passes_per_step = backward_passes_per_step
        self.op = Adasum
        self._parameter_names = _names(self.param_groups, named_parameters)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before a step, whose gradients autograd sums."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Do nothing: this optimizer reduces no gradients."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise an error: the changes of a step cannot be reduced before the step.

        Raises:
            AssertionError: Always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the given optimizer's step, and combine the changes of the parameters with Adasum."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        _compare_replicas(self, global_process_set.ranks)
        starts = [parameter.detach().clone() for parameter in parameters]
        result = super().step(closure)
        with torch.no_grad():
            handles = []
            for parameter, start in zip(parameters, starts, strict=True):
                small, ctx = self._compression.compress(parameter.detach() - start)
                handles.append((allreduce_async_(small, name=self._parameter_names[parameter], op=Adasum), ctx))
            for parameter, start, (handle, ctx) in zip(parameters, starts, handles, strict=True):
                parameter.copy_(start + self._compression.decompress(synchronize(handle), ctx))
        return result


def _compare_replicas(optimizer: Any, ranks: list[int] | None) -> None:
    """Report a checksum of the parameters, once in a session; rank 0 warns if the ranks differ."""
    session = _core.session_id()
    if optimizer.__dict__.get("_replicas_told") == session:
        return
    optimizer._replicas_told = session
    parameters = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
    replicas.report(
        [(tuple(parameter.shape), str(parameter.dtype)) for parameter in parameters],
        map(_sample, parameters),
        range(size()) if ranks is None else ranks,
        "`hvd.broadcast_parameters(model.state_dict(), root_rank=0)` before the first step",
        is_final=True,
    )


def _sample(tensor: torch.Tensor) -> bytes:
    values = tensor.reshape(-1)[: replicas.SAMPLE].cpu().contiguous()
    return values.view(torch.uint8).numpy().tobytes()


def _nothing() -> None:
    pass


def _raise(error: Exception) -> None:
    raise error


def _ignored(_: Any) -> None:
    pass


def _set(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    parameter.grad = grad


def _write(parameter: torch.Tensor, reduced: torch.Tensor) -> None:
    gradient = parameter.grad
    assert gradient is not None, "the parameter has a gradient, which was reduced"
    if gradient.is_sparse:
        parameter.grad = reduced.to_sparse()
    else:
        gradient.copy_(reduced)


def _names(
    param_groups: list[dict[str, Any]], named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    if named_parameters is None:
        return {
            parameter: f"allreduce.noname.{number}.{index}"
            for number, group in enumerate(param_groups)
            for index, parameter in enumerate(group["params"])
        }
    named = list(named_parameters)
    if not all(isinstance(one, tuple) for one in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    known = {parameter for _, parameter in named}
    unnamed = [parameter for group in param_groups for parameter in group["params"] if parameter not in known]
    if unnamed:
        raise ValueError(
            f"named_parameters was specified, but {len(unnamed)} of the optimizer's parameters were not named. Python "
            "object ids: " + ", ".join(str(id(parameter)) for parameter in unnamed)
        )
    return {parameter: name for name, parameter in named}


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor")
        return
    if not isinstance(groups, list):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor")
    seen: set[int] = set()
    for group in groups:
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError(f"groups must consist of torch.Tensor, not {type(parameter).__name__}")
            if id(parameter) in seen:
                raise ValueError("a parameter can only appear once in groups")
            seen.add(id(parameter))


def _reduced(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer itself when unpickled, because hooks and handles belong to a process."""
    return optimizer


def _view(optimizer: torch.optim.Optimizer, mixin: type) -> Any:
    base = optimizer.__class__

    def reduce(self: Any) -> tuple[Any, ...]:
        plain = object.__new__(base)
        ours = (
            "_hooks",
            "_handles",
            "_comparison",
            "_planned_reducer",
            "_compression",
            "_parameter_names",
            "process_set",
            "_groups",
            "_group_of",
            "_arrived",
            "_replicas_told",
            "_allreduce_delay",
            "_requires_update",
        )
        plain.__dict__.update({key: value for key, value in self.__dict__.items() if key not in ours})
        return _reduced, (plain,)

    cls = type(
        base.__name__, (mixin, base), {"__module__": base.__module__, "__reduce__": reduce, "__doc__": base.__doc__}
    )
    view: Any = object.__new__(cls)
    # A scheduler's wrapper calls the wrapped optimizer's `step` and not this one's.
    optimizer.__dict__.pop("step", None)
    view.__dict__ = optimizer.__dict__
    return view


def DistributedOptimizer(  # noqa: N802 - the documented name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make an optimizer reduce gradients over the ranks while backward runs.

    Args:
        optimizer: The optimizer. It stays usable, and shares all state with the result.
        named_parameters: Names of all its parameters; without them they are numbered.
        compression: Type in which gradients travel, a member of ``Compression``.
        backward_passes_per_step: Number of backward passes whose gradients are summed before they are reduced.
        op: ``Average``, ``Sum`` or ``Adasum``.
        gradient_predivide_factor: With ``Average``: splits the division by the number of ranks. Gradients are divided
            by the factor before the sum, and by the rest after it.
        num_groups: Deprecated: use ``groups``.
        groups: Parameters that are reduced together: a number of groups, or lists of parameters.
        sparse_as_dense: Whether sparse gradients become dense before they are reduced.
        process_set: The ranks that take part.

    Returns:
        An optimizer of a subclass with the same name.

    Raises:
        ValueError: An argument is not acceptable, or the optimizer reduces gradients already.
        NotImplementedError: ``op`` is ``Adasum`` and the process set is not that of all ranks.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    """
    if isinstance(optimizer, (_DistributedOptimizer, _DistributedAdasumOptimizer)):
        raise ValueError("the optimizer is a DistributedOptimizer already: its gradients would be reduced twice")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed", DeprecationWarning, stacklevel=2
        )
        groups = num_groups if groups is None else groups
    _check_groups(groups)
    if op == Adasum and size() > 1:
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        for argument, value in (("groups", groups), ("sparse_as_dense", sparse_as_dense)):
            if value:
                warn_once(f"`{argument}` has no effect with op=Adasum, which combines the updates of whole parameters")
        view = _view(optimizer, _DistributedAdasumOptimizer)
        view._distribute(named_parameters, compression, backward_passes_per_step)
        return view
    view = _view(optimizer, _DistributedOptimizer)
    arguments = (groups, sparse_as_dense, process_set)
    view._distribute(named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor, *arguments)
    return view
