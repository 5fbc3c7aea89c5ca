"""A gradient tape whose gradients are those of all ranks."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.tensorflow.compression import Compression
from smdistributed.dataparallel.tensorflow.reduction import check_options, reduce_gradients
from smdistributed.dataparallel.tensorflow.replicas import compare
from smdistributed.dataparallel.tensorflow.variables import BROADCAST


class TapeView(tf.GradientTape):
    """The given tape under another class: both record, watch and forget the same.

    It may therefore be created after the ``with`` block, or used for it. ``jacobian`` and ``batch_jacobian`` are those
    of the given tape.

    Args:
        tape: The tape.

    Raises:
        TypeError: The argument is not a ``tf.GradientTape``.
        ValueError: The argument is a view already.
    """

    # The given tape's state is in its `__dict__`, which both share.
    __slots__ = ("_given",)

    def __new__(cls, tape: tf.GradientTape, *args: Any, **kwargs: Any) -> TapeView:
        """Create an object of a subclass of the tape's class."""
        classes: tuple[Any, Any] = (cls, type(tape))
        return super().__new__(_class_for(*classes))

    def __init__(self, tape: tf.GradientTape) -> None:
        if not isinstance(tape, tf.GradientTape):
            raise TypeError(f"`gradtape` is {tape!r}: expected a tf.GradientTape")
        if isinstance(tape, TapeView):
            raise ValueError("the tape is a DistributedGradientTape already: its gradients would be reduced twice")
        object.__setattr__(self, "__dict__", tape.__dict__)
        self._given = tape

    # These methods call `gradient` for every row, which must not be reduced.

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Jacobian of this rank alone, as ``tf.GradientTape.jacobian``.

        Args:
            *args: Arguments of the tape's method.
            **kwargs: Keyword arguments of the tape's method.

        Returns:
            The result of the tape.
        """
        return self._given.jacobian(*args, **kwargs)

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batch Jacobian of this rank alone, as ``tf.GradientTape.batch_jacobian``.

        Args:
            *args: Arguments of the tape's method.
            **kwargs: Keyword arguments of the tape's method.

        Returns:
            The result of the tape.
        """
        return self._given.batch_jacobian(*args, **kwargs)


class DistributedGradientTape(TapeView):
    """A ``tf.GradientTape`` whose ``gradient`` reduces the gradients over the ranks.

    In all other respects it is the given tape: both record, watch and forget the same. It may be created after the
    ``with`` block, or used for it. ``jacobian`` and ``batch_jacobian`` are this rank's own.

    Args:
        gradtape: The tape.
        device_dense: Not supported.
        device_sparse: Not supported.
        compression: A member of ``Compression``.
        sparse_as_dense: Whether ``tf.IndexedSlices`` become dense first; otherwise the ranks' slices are gathered.
        op: ``AVERAGE``, which ``None`` means too, or ``SUM``.
        bucket_cap_mb: Most MiB of gradients that are reduced together.

    Raises:
        NotImplementedError: A device is given.
        ValueError: ``op`` or ``bucket_cap_mb`` is none of those, or the tape reduces already.

    Examples:
        >>> with tf.GradientTape() as tape:
        ...     loss = loss_of(model(batch))
        >>> tape = sdp.DistributedGradientTape(tape)
        >>> gradients = tape.gradient(loss, model.trainable_variables)
    """

    __slots__ = ("_options",)

    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = True,
        op: ReduceOp | None = ReduceOp.AVERAGE,
        *,
        bucket_cap_mb: float | None = 25,
    ) -> None:
        if device_dense or device_sparse:
            raise NotImplementedError("`device_dense` and `device_sparse` are not supported: leave them empty")
        check_options(op, bucket_cap_mb)
        super().__init__(gradtape)
        self._options: dict[str, Any] = {
            "compression": compression,
            "op": op,
            "sparse_as_dense": sparse_as_dense,
            "bucket_cap_mb": bucket_cap_mb,
        }

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Return gradients as ``tf.GradientTape.gradient`` does, reduced over the ranks.

        All ranks call it in the same order.

        Args:
            target: The value to differentiate.
            sources: Variables or tensors, in any structure.
            output_gradients: Gradients of ``target``; ones by default.
            unconnected_gradients: The gradient of a source that ``target`` does not depend on.

        Returns:
            The reduced gradients, in the structure of ``sources``.
        """
        gradients = self._given.gradient(target, sources, output_gradients, unconnected_gradients)
        variables = tf.nest.flatten(sources)
        compare(variables, None, BROADCAST)
        reduced = reduce_gradients(tf.nest.flatten(gradients), variables, **self._options)
        return tf.nest.pack_sequence_as(sources, reduced)


@functools.cache
def _class_for(cls: type, tape: type) -> type:
    """Return a subclass of ``cls`` and of the tape's own class, which may be the script's."""
    if tape is tf.GradientTape or not issubclass(tape, tf.GradientTape) or issubclass(tape, TapeView):
        return cls
    return type(cls.__name__, (cls, tape), {"__slots__": ()})
