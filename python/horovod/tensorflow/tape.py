"""Gradient tapes whose gradients are those of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.mpi_ops import Average
from horovod.tensorflow.reduction import Reduction, key, layers_of, resolve_groups
from smdistributed.dataparallel.tensorflow.tape import TapeView


class _DistributedGradientTape(TapeView):
    __slots__ = ("_reduction",)

    def __init__(self, tape: tf.GradientTape, reduction: Reduction) -> None:
        super().__init__(tape)
        self._reduction = reduction

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a variable unreduced.

        Args:
            source: The variable.
        """
        self._reduction.add_local(source)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """As ``tf.GradientTape.gradient``, reduced over the ranks.

        Args:
            target: The value to differentiate.
            sources: With respect to what; any structure.
            output_gradients: Gradients of `target`.
            use_generic_names: Collectives are named by the place in the list alone, the same on ranks whose models have
                other names.
            unconnected_gradients: See ``tf.GradientTape.gradient``.
        """
        gradients = self._given.gradient(target, sources, output_gradients, unconnected_gradients)
        reduced = self._reduction(tf.nest.flatten(gradients), tf.nest.flatten(sources), use_generic_names)
        return tf.nest.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return the gradients of local variables, and the reduced others, as lists of (variable, gradient)."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True))
        local = self._reduction.local
        mine = [pair for pair in pairs if key(pair[0]) in local]
        return mine, [pair for pair in pairs if key(pair[0]) not in local]


def DistributedGradientTape(  # noqa: N802 - the documented name, of what scripts take for a class
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape whose ``gradient`` reduces the gradients over the ranks.

    The tape records, watches and forgets what the given one does.

    Args:
        gradtape: The tape.
        device_dense: Device on which dense tensors are reduced; by default TensorFlow chooses.
        device_sparse: Device on which ``tf.IndexedSlices`` are gathered; by default TensorFlow chooses.
        compression: Type in which gradients travel, a member of ``Compression``.
        sparse_as_dense: Whether ``tf.IndexedSlices`` become dense before they are reduced.
        op: The reduction.
        gradient_predivide_factor: With ``Average``: gradients are divided by it before the sum, and by the rest after
            it.
        num_groups: Deprecated: use ``groups``.
        groups: Number of groups of gradients that are reduced together, or lists of variables that are.
        process_set: The ranks that take part.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.

    Returns:
        The tape.

    Raises:
        ValueError: An argument is not acceptable.

    Examples:
        >>> with tf.GradientTape() as tape:
        ...     loss = loss_of(model(batch))
        >>> tape = hvd.DistributedGradientTape(tape)
        >>> gradients = tape.gradient(loss, model.trainable_variables)
    """
    reduction = Reduction(
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=resolve_groups(num_groups, groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        scope="DistributedGradientTape",
    )
    return _DistributedGradientTape(gradtape, reduction)


def PartialDistributedGradientTape(  # noqa: N802 - the documented name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape as :func:`DistributedGradientTape`; gradients of some layers stay each rank's own.

    Args:
        gradtape: The tape.
        device_dense: Device on which dense tensors are reduced; by default TensorFlow chooses.
        device_sparse: Device on which ``tf.IndexedSlices`` are gathered; by default TensorFlow chooses.
        compression: Type in which gradients travel, a member of ``Compression``.
        sparse_as_dense: Whether ``tf.IndexedSlices`` become dense before they are reduced.
        op: The reduction.
        gradient_predivide_factor: With ``Average``: gradients are divided by it before the sum, and by the rest after
            it.
        num_groups: Deprecated: use ``groups``.
        groups: Number of groups of gradients that are reduced together, or lists of variables that are.
        process_set: The ranks that take part.
        local_layers: A Keras layer or a list of layers whose gradients are not reduced.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.

    Returns:
        The tape.

    Raises:
        ValueError: An argument is not acceptable.
    """
    layers = layers_of(local_layers)
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    tape._reduction.add_layers(layers)
    return tape
