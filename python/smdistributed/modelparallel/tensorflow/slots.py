"""The optimizer's variables: those of a partition's variables have values where the partition is.

An optimizer is built for the whole model on every rank, so its variables have the same names and order as in one process;
those that belong to others are emptied as they are made.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.modelparallel.tensorflow.state import state


def empty(variable: Any) -> None:
    """Frees a variable's memory. It stays, and takes a value of its shape again when one is assigned; TensorFlow's own ways
    would refuse another shape."""
    inner = underlying(variable)
    tf.raw_ops.AssignVariableOp(resource=inner.handle, value=tf.zeros([0], inner.dtype))


def build(optimizer: Any) -> None:
    """Builds an optimizer of the divided model; does nothing for one that is built."""
    model = state.model
    if model is None or not model.is_partitioned or getattr(optimizer, "built", getattr(optimizer, "_built", True)):
        return
    homes, rank = model._smp_homes.variables, state.groups.rank_in("pp")
    plain = optimizer.add_variable_from_reference

    def noted(*args: Any, **kwargs: Any) -> Any:
        slot = plain(*args, **kwargs)
        reference = args[0] if args else kwargs.get("reference_variable", kwargs.get("model_variable"))
        home = homes.get(id(underlying(reference).handle))
        if home is not None:
            homes[id(underlying(slot).handle)] = home
            if home != rank:
                empty(slot)
                model._smp_slots.append(slot)
        return slot

    vars(optimizer)["add_variable_from_reference"] = noted
    try:
        with tf.init_scope(), model._smp_as_whole():
            optimizer.build(model.trainable_variables)
    finally:
        del vars(optimizer)["add_variable_from_reference"]
