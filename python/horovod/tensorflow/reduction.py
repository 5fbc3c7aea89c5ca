"""The reduction of a step's gradients, for the tape and the optimizers.

In a graph, each gradient or group of gradients has a collective of its own, which starts when its gradients are ready.
In eager mode, which waits for each collective, one collective reduces all dense gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import split_list
from horovod.tensorflow.collectives import allreduce, grouped_allreduce
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.mpi_ops import Average, _compare_step, _number, size_op
from horovod.tensorflow.util import is_active
from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.dataparallel.tensorflow.replicas import compare

Gradients = Sequence[tf.Tensor | tf.IndexedSlices | None]

#: For errors: the calls that give replicas equal values at the start.
_BROADCAST = (
    "`hvd.broadcast_variables(model.variables, root_rank=0)` before the first step or right after it, or give `fit` "
    "the callback `hvd.callbacks.BroadcastGlobalVariablesCallback(0)`"
)

# Set on reduced gradients. A gradient may pass two methods that reduce, and must be reduced once.
_MARK = "_hvd_reduced"


def are_reduced(gradients: Gradients) -> bool:
    """Return whether gradients are the results of a reduction.

    Args:
        gradients: The gradients.

    Returns:
        ``True`` if there are some and all are marked.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    return bool(present) and all(getattr(gradient, _MARK, False) for gradient in present)


def mark_reduced(gradients: Gradients) -> None:
    """Mark gradients as the results of a reduction.

    Args:
        gradients: The gradients.
    """
    for gradient in gradients:
        if gradient is not None:
            setattr(gradient, _MARK, True)


def key(variable: Any) -> Any:
    """Return a key of a variable for sets and dictionaries.

    Args:
        variable: The variable.

    Returns:
        The key; the same for a Keras variable and the ``tf.Variable`` in it.
    """
    variable = underlying(variable)
    return variable.ref() if hasattr(variable, "ref") else id(variable)


def _name_of(variable: Any) -> str:
    return getattr(variable, "path", None) or getattr(variable, "name", None) or "a tensor"


def layers_of(local_layers: Any) -> list[Any]:
    """Return layers as a list.

    Args:
        local_layers: A layer, a list of layers or ``None``.

    Returns:
        The list.

    Raises:
        ValueError: An entry is not a layer.
    """
    layers = list(local_layers) if isinstance(local_layers, (list, tuple, set)) else [local_layers]
    layers = [] if local_layers is None else layers
    # The layers may be of any Keras package; none is imported for this check.
    if not all(hasattr(layer, "trainable_weights") and callable(layer) for layer in layers):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    return layers


def resolve_groups(num_groups: int, groups: Any) -> Any:
    """Return the groups that both arguments mean together.

    Args:
        num_groups: Deprecated: use ``groups``.
        groups: Number of groups of gradients that are reduced together, or lists of variables that are.

    Returns:
        The groups: a number, lists of variables, or ``None``.

    Raises:
        ValueError: An argument is not acceptable.
    """
    import warnings

    if num_groups:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed", DeprecationWarning, stacklevel=4
        )
        groups = groups if groups is not None else num_groups
    if groups is None:
        return None
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError("groups should be a non-negative integer or a list of list of tf.Variable.")
        return groups
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError("groups should be a non-negative integer or a list of list of tf.Variable.")
    members = [underlying(variable) for group in groups for variable in group]
    if not all(isinstance(variable, tf.Variable) for variable in members):
        raise ValueError("groups must consist of tf.Variable.")
    if len({variable.ref() for variable in members}) < len(members):
        raise ValueError("A variable can only appear once in groups.")
    return groups


def check_predivide(gradient_predivide_factor: float, op: int) -> None:
    """Check that a factor is given for averages only.

    Args:
        gradient_predivide_factor: The factor.
        op: The reduction.

    Raises:
        ValueError: The factor is not 1, and ``op`` is not ``Average``.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")


@dataclass
class Reduction:
    """The reduction of gradients; the arguments are those of the optimizers and the tape."""

    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    op: int = Average
    gradient_predivide_factor: float = 1.0
    groups: Any = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    scope: str = "DistributedGradients"
    #: Keys of variables whose gradients are not reduced.
    local: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        check_predivide(self.gradient_predivide_factor, self.op)

    def add_local(self, variable: Any) -> None:
        """Leave the gradients of a variable unreduced.

        Args:
            variable: The variable.
        """
        self.local.add(key(variable))

    def add_layers(self, layers: Iterable[Any]) -> None:
        """Leave the gradients of all trainable weights of layers unreduced.

        Args:
            layers: The layers.
        """
        for layer in layers:
            for variable in layer.trainable_weights:
                self.add_local(variable)

    def __call__(
        self, gradients: Gradients, variables: Sequence[Any], use_generic_names: bool = False
    ) -> list[tf.Tensor | tf.IndexedSlices | None]:
        """Return the reduced gradients.

        Args:
            gradients: One for each variable; ``None`` stays ``None``.
            variables: The variables of the gradients.
            use_generic_names: Names follow from the place in the list alone.
        """
        results = list(gradients)
        if not is_active(self.process_set):
            return results
        if self.sparse_as_dense:
            results = [
                tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
                for gradient in results
            ]
        is_local = [key(variable) in self.local for variable in variables]
        shared = [variable for variable, local in zip(variables, is_local, strict=True) if not local]
        compare(shared, self.process_set.ranks, _BROADCAST)
        with tf.name_scope(f"{self.scope}_Allreduce"):
            for index, gradient in enumerate(results):
                if gradient is not None and is_local[index] and self.scale_local_gradients:
                    results[index] = self._scaled(gradient)
            places = [i for i, gradient in enumerate(results) if gradient is not None and not is_local[i]]
            # Checked before any operation waits for ranks that do not take part; in a graph, at its beginning.
            # If all gradients are of local variables, no other rank takes part.
            names = [_name_of(variables[place]) for place in places]
            compared = None if all(is_local) else _compare_step(places, names, use_generic_names, self.process_set)
            with tf.control_dependencies([] if compared is None else [compared]):
                for group in self._grouped(places, variables):
                    reduced = self._reduced([results[place] for place in group], group, use_generic_names)
                    for place, gradient in zip(group, reduced, strict=True):
                        results[place] = gradient
        mark_reduced(results)
        return results

    def _scaled(self, gradient: Any) -> Any:
        """Scale a local gradient to the size of averages, because other ranks do not add to it."""
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(self._scaled(gradient.values), gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(size_op(_number(self.process_set)), gradient.dtype)

    def _grouped(self, places: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """Divide gradients into groups, each of which is reduced in one collective."""
        if isinstance(self.groups, int) and self.groups > 0:
            return [chunk for chunk in split_list(places, self.groups) if chunk]
        if isinstance(self.groups, (list, tuple)):
            number_of = {key(variable): number for number, group in enumerate(self.groups) for variable in group}
            together: dict[Any, list[int]] = {}
            for place in places:
                together.setdefault(number_of.get(key(variables[place]), f"alone.{place}"), []).append(place)
            return list(together.values())
        return [places] if places and tf.executing_eagerly() else [[place] for place in places]

    def _reduced(self, gradients: list[Any], places: list[int], use_generic_names: bool) -> list[Any]:
        factor = self.gradient_predivide_factor
        options = {
            "device_dense": self.device_dense,
            "device_sparse": self.device_sparse,
            "compression": self.compression,
            "op": self.op,
            # Combined with the average, which divides by the number of ranks.
            "prescale_factor": 1.0 / factor,
            "postscale_factor": factor,
            "name": f"grad_{places[0]}" if use_generic_names else None,
            "process_set": self.process_set,
            "ignore_name_scope": use_generic_names,
        }
        if len(gradients) == 1:
            return [allreduce(gradients[0], **options)]
        return grouped_allreduce(gradients, **options)
