"""Horovod's API for Keras 3 on PyTorch: ``horovod.keras`` where ``KERAS_BACKEND=torch``.

A distributed optimizer is a view of the given one (``smdistributed/_common/views.py``). Gradients are reduced in
``apply``, which Keras calls in every kind of training, after it has computed all gradients. A reduction in hooks during
backward, as of ``horovod.torch``, would be wrong where ``apply`` gets other tensors than the parameters' ``grad``: a
``LossScaleOptimizer`` and a ``train_step`` of the script pass gradients that they have computed from these.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import keras
import torch

from horovod.common.basics import warn_once
from horovod.common.exceptions import HorovodInternalError as HorovodInternalError
from horovod.common.keras_loading import objects_by_name
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import split_list
from horovod.torch import mpi_ops
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Average, Sum
from smdistributed import _core
from smdistributed._common import keras3, replicas, views

# Whether gradients are to be reduced; `False` where a caller has reduced them already.
_reduces: ContextVar[bool] = ContextVar("_reduces", default=True)

# The number that Keras appends to a name that is in use.
_COUNT = re.compile(r"_\d+(?=/|$)")


class _Options:
    """The options of a distributed optimizer."""

    def __init__(
        self,
        scope: str,
        compression: Any,
        op: int,
        factor: float,
        groups: Any,
        passes: int,
        average_passes: bool,
        process_set: ProcessSet,
        scale_local: bool,
    ) -> None:
        self.scope, self.compression, self.op, self.factor, self.groups = scope, compression, op, factor, groups
        self.passes, self.average_passes = passes, average_passes
        self.process_set, self.scale_local = process_set, scale_local
        #: The ids of variables whose gradients are not reduced.
        self.local: set[int] = set()
        #: Id of the session in which the variables were compared between the ranks.
        self.checked_session: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Options:
        # Copies of an optimizer share variables and process sets.
        return self


class _Sums:
    """Gradients of earlier passes that are added in a step."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: list[torch.Tensor | None] = []

    @torch.no_grad()
    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients of one more pass. The caller may write to them afterwards."""
        self.count += 1
        self.sums += [None] * (len(gradients) - len(self.sums))
        for place, gradient in enumerate(gradients):
            total = self.sums[place]
            if gradient is not None:
                self.sums[place] = gradient.clone() if total is None else total.add_(gradient)


# Accumulated gradients of each distributed optimizer. An attribute would be tracked and saved by Keras.
_sums: weakref.WeakKeyDictionary[Any, _Sums] = weakref.WeakKeyDictionary()


def forget_sums() -> None:
    """Drop the sums of all optimizers: a rank that joins has none, and all ranks must begin the next step together."""
    _sums.clear()


class _Methods(keras3.Reducing):
    _smd_class: type
    _smd_options: _Options

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy or unpickle the given optimizer, and make it distributed again."""
        return _distributed, (views.original_optimizer(self), self._smd_options)

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable unreduced."""
        self._smd_options.local.add(id(var))

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        options = self._smd_options
        if options.passes == 1 or not _reduces.get():
            return super().apply(grads, trainable_variables)
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(trainable_variables)
        sums = _sums.setdefault(self, _Sums())
        sums.add(grads)
        if sums.count < options.passes:
            self._iterations.assign_add(1)
            return None
        del _sums[self]
        divisor = options.passes if options.average_passes else 1
        gradients = [None if each is None else each / divisor for each in sums.sums]
        return super().apply(gradients, trainable_variables)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
        skip_gradients_aggregation: bool = False,
        **kwargs: Any,
    ) -> Any:
        token = _reduces.set(experimental_aggregate_gradients and not skip_gradients_aggregation)
        try:
            return super().apply_gradients(grads_and_vars)
        finally:
            _reduces.reset(token)

    def _aggregate_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Return the reduced gradients with their variables."""
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        return list(zip(self._smd_reduce([gradient for gradient, _ in pairs], variables), variables, strict=True))

    def _smd_all(self, condition: Any) -> bool:
        """Return whether the condition holds on all ranks that reduce gradients with this one."""
        if not self._smd_is_shared():
            return bool(condition)
        mine = torch.tensor([int(condition)], device="cpu")
        return bool(mpi_ops.allreduce(mine, op=mpi_ops.Min, process_set=self._smd_options.process_set).item())

    def _smd_is_shared(self) -> bool:
        """Return whether other ranks take part in this one's reductions."""
        process_set = self._smd_options.process_set
        return process_set.included() is not False and process_set.size() != 1

    @torch.no_grad()
    def _smd_reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        options = self._smd_options
        results = list(gradients)
        if not _reduces.get() or not self._smd_is_shared():
            return results
        present = [place for place, gradient in enumerate(results) if gradient is not None]
        places = [place for place in present if id(variables[place]) not in options.local]
        if options.scale_local:
            for place in set(present) - set(places):
                results[place] = results[place] / options.process_set.size()
        if all(id(variable) in options.local for variable in variables):
            return results
        _core.note_fallback("gradients_one_by_one")
        warn_once(
            "gradients are reduced by name after backward, instead of in buckets while it runs, because Keras on "
            "PyTorch passes them to its optimizer only then: a training loop with an optimizer of `horovod.torch` "
            "overlaps them"
        )
        self._smd_compare_replicas([variable for variable in variables if id(variable) not in options.local])
        names = [f"{place}.{_COUNT.sub('', variables[place].path)}" for place in places]
        # Checked before any operation waits for the other ranks.
        number = mpi_ops._number(options.process_set)
        compare = torch.ops.smd.named_step.default
        mpi_ops._submit(compare, f"{options.scope}.step", "\n".join(names), number, finish=lambda _: None).wait()
        started = [self._start(results, group) for group in self._grouped(places, variables)]
        for finish in started:
            finish()
        return results

    def _smd_compare_replicas(self, variables: Sequence[Any]) -> None:
        """Compare the variables with those of other ranks, in the first step. The first rank warns if they differ."""
        options, session = self._smd_options, _core.session_id()
        if options.checked_session == session:
            return
        options.checked_session = session
        tensors = [variable.value.detach().reshape(-1)[: replicas.SAMPLE].cpu().contiguous() for variable in variables]
        replicas.report(
            [(tuple(variable.shape), str(variable.dtype)) for variable in variables],
            [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors],
            options.process_set.ranks or range(mpi_ops.size()),
            "the callback `hvd.callbacks.BroadcastGlobalVariablesCallback(0)`: give it to `fit`",
        )

    def _start(self, results: list[Any], group: list[int]) -> Callable[[], None]:
        """Reduce some of the gradients in one collective."""
        options = self._smd_options
        small, ctxs = zip(*(options.compression.compress(results[place].contiguous()) for place in group), strict=True)
        handle = mpi_ops.grouped_allreduce_async(
            list(small),
            name=f"{options.scope}.{group[0]}",
            op=options.op,
            prescale_factor=1.0 / options.factor,
            postscale_factor=options.factor,
            process_set=options.process_set,
        )

        def finish() -> None:
            for place, tensor, ctx in zip(group, mpi_ops.synchronize(handle), ctxs, strict=True):
                results[place] = options.compression.decompress(tensor, ctx)

        return finish

    def _grouped(self, places: list[int], variables: Sequence[Any]) -> list[list[int]]:
        groups = self._smd_options.groups
        if isinstance(groups, int) and groups > 0:
            return [chunk for chunk in split_list(places, groups) if chunk]
        number_of = {id(variable): number for number, group in enumerate(groups or []) for variable in group}
        together: dict[Any, list[int]] = {}
        for place in places:
            together.setdefault(number_of.get(id(variables[place]), f"alone.{place}"), []).append(place)
        return list(together.values())


def is_distributed(optimizer: Any) -> bool:
    """Return whether an optimizer, or the one inside it, reduces gradients over the ranks.

    Args:
        optimizer: Any optimizer.

    Returns:
        ``True`` if an optimizer, or the one inside it, reduces gradients over the ranks.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    return isinstance(optimizer, _Methods) or (inner is not None and is_distributed(inner))


def _distributed(optimizer: Any, options: _Options) -> Any:
    keras3.install(is_distributed)
    return views.view(optimizer, _Methods, options, module=__name__)


def _layers_of(local_layers: Any) -> list[Any]:
    layers = list(local_layers) if isinstance(local_layers, (list, tuple, set)) else [local_layers]
    layers = [] if local_layers is None else layers
    if not all(isinstance(layer, keras.Layer) for layer in layers):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    return layers


def _check_groups(groups: Any) -> None:
    if groups is None or (isinstance(groups, int) and groups >= 0):
        return
    members = [one for group in groups for one in group] if isinstance(groups, (list, tuple)) else [None]
    if not all(isinstance(one, keras.Variable) for one in members):
        raise ValueError("groups should be a non-negative integer or a list of list of keras.Variable.")
    if len(set(map(id, members))) < len(members):
        raise ValueError("A variable can only appear once in groups.")


def DistributedOptimizer(  # noqa: N802 - the documented name, of what scripts take for a class
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer reduce gradients over the ranks before it applies them.

    Args:
        optimizer: An optimizer of Keras 3.
        name: Name of the optimizer; by default ``Distributed`` and the class's name.
        device_dense: Ignored with a warning: gradients are reduced where they are.
        device_sparse: Ignored with a warning: Keras has no sparse gradients on PyTorch.
        compression: How gradients travel.
        sparse_as_dense: As `device_sparse`.
        gradient_predivide_factor: For averages: gradients are divided by it before the sum, and by the rest after it.
        op: ``Average`` or ``Sum``.
        backward_passes_per_step: How many gradients each rank sums before they are reduced and applied.
        average_aggregated_gradients: Whether these sums are divided by their number.
        num_groups: Deprecated: `groups`.
        groups: How many groups of gradients are reduced together each; or lists of variables that are.
        process_set: The ranks that take part.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.

    Returns:
        An optimizer of a subclass with the same name, which shares all state with the given one.

    Raises:
        ValueError: The arguments are not acceptable.
        TypeError: ``optimizer`` is not an optimizer of Keras 3.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"{optimizer!r} is not an optimizer of Keras 3")
    if op not in (Average, Sum):
        raise ValueError("op currently only supports Average and Sum")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if is_distributed(optimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already: its gradients would be reduced twice")
    if num_groups:
        import warnings

        message = "Parameter `num_groups` has been replaced by `groups` and will be removed"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    _check_groups(groups)
    for argument, value, reason in (
        ("device_dense", device_dense, "gradients are reduced on their own device"),
        ("device_sparse", device_sparse, "Keras has no sparse gradients on PyTorch"),
        ("sparse_as_dense", sparse_as_dense, "Keras has no sparse gradients on PyTorch"),
    ):
        if value:
            warn_once(f"`{argument}` has no effect on Keras optimizers on PyTorch: {reason}")
    name = name or f"Distributed{type(optimizer).__name__}"
    result = _distributed(
        optimizer,
        _Options(
            name,
            compression,
            op,
            gradient_predivide_factor,
            groups,
            backward_passes_per_step,
            average_aggregated_gradients,
            process_set,
            scale_local_gradients,
        ),
    )
    result.__dict__["name"] = name
    return result


def PartialDistributedOptimizer(  # noqa: N802 - the documented name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer reduce gradients as :func:`DistributedOptimizer`, except those of some layers.

    Args:
        optimizer: The optimizer.
        name: Name of the optimizer; by default ``Distributed`` and the class's name.
        device_dense: Ignored with a warning.
        device_sparse: Ignored with a warning.
        compression: Type in which gradients travel, a member of ``Compression``.
        sparse_as_dense: Ignored with a warning.
        gradient_predivide_factor: With ``Average``: gradients are divided by it before the sum, and by the rest after
            it.
        op: ``Average`` or ``Sum``.
        backward_passes_per_step: Number of gradients that each rank sums before they are reduced and applied.
        average_aggregated_gradients: Whether these sums are divided by their number of gradients.
        groups: Number of groups of gradients that are reduced together, or lists of variables that are.
        process_set: The ranks that take part.
        local_layers: A Keras layer or a list of layers, built, whose gradients are not reduced.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.

    Returns:
        The distributed optimizer.

    Raises:
        ValueError: An argument is not acceptable.
    """
    layers = _layers_of(local_layers)
    result = DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in (variable for layer in layers for variable in layer.trainable_variables):
        result.register_local_var(variable)
    return result


def broadcast_global_variables(root_rank: int) -> None:
    """Raise an error: there are no global variables outside of graphs of TensorFlow 1.

    Args:
        root_rank: Ignored.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        "hvd.broadcast_global_variables() does not support Keras on PyTorch. Please use "
        "`hvd.callbacks.BroadcastGlobalVariablesCallback` instead."
    )


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> torch.Tensor:
    """Reduce a value over the ranks.

    Args:
        value: A number, an array or a tensor; same shape and type on all ranks.
        name: Matches the ranks' calls: the same on all ranks.
        average: Deprecated: ``True`` means ``op=Average``, ``False`` ``op=Sum``.
        prescale_factor: Multiplied with each rank's values before the reduction.
        postscale_factor: Multiplied with the result.
        op: The reduction, ``Average`` by default.
        compression: Type in which the value travels, a member of ``Compression``.

    Returns:
        A tensor.
    """
    factors = prescale_factor, postscale_factor
    return mpi_ops.allreduce(_tensor(value), average, name, compression, op, *factors)


def allgather(value: Any, name: str | None = None) -> torch.Tensor:
    """Concatenate the rows of all ranks.

    Args:
        value: An array or a tensor.
        name: Matches the ranks' calls: the same on all ranks.

    Returns:
        A tensor.
    """
    return mpi_ops.allgather(_tensor(value), name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return the root's value on every rank.

    Args:
        value: A number, an array or a tensor; same shape and type on all ranks.
        root_rank: Rank in the world whose values are sent.
        name: Matches the ranks' calls: the same on all ranks.

    Returns:
        A tensor.
    """
    return mpi_ops.broadcast(_tensor(value), root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> torch.Tensor:
    """Reduce a value over the ranks, and give each rank a part of the rows.

    Args:
        value: A number, an array or a tensor; same shape and type on all ranks.
        name: Matches the ranks' calls: the same on all ranks.
        op: ``Average`` or ``Sum``.

    Returns:
        A tensor.
    """
    return mpi_ops.reducescatter(_tensor(value), name=name, op=op)


def _tensor(value: Any) -> torch.Tensor:
    return keras.ops.convert_to_tensor(value)


def load_model(
    filepath: Any,
    custom_optimizers: list[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model that was saved with its optimizer, distributed or not, and make the optimizer distributed.

    Args:
        filepath: Path of the saved model; readable on every rank.
        custom_optimizers: Classes of the script's own optimizers.
        custom_objects: Classes and functions of the script, by name; a function of options stands for the class of what
            it makes.
        compression: How gradients travel.
        legacy_opts: Not needed: there are none on PyTorch.

    Returns:
        The model; its optimizer has the saved state.
    """
    objects = objects_by_name([keras.optimizers], custom_optimizers, custom_objects)
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None and not is_distributed(model.optimizer):
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
