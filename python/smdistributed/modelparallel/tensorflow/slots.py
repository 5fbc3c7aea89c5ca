"""The optimizer's variables: those of a partition's variables have values where the partition is.

An optimizer is built for the whole model on every rank, so its variables have the same names and order as in one process;
those that belong to others are emptied as they are made. One that is built before the model is divided follows it then.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.modelparallel.tensorflow.state import state


def empty(variable: Any) -> None:
    """Frees a variable's memory. It stays, and takes a value of its shape again when one is assigned; TensorFlow's own ways
    would refuse another shape."""
    inner = underlying(variable)
    with tf.init_scope():
        tf.raw_ops.AssignVariableOp(resource=inner.handle, value=tf.zeros([0], inner.dtype))


def build(optimizer: Any) -> None:
    """Builds an optimizer of the divided model; does nothing for one that is built."""
    model = state.model
    if model is None or not model.is_partitioned or optimizer in state.optimizers:
        return
    with tf.init_scope(), model._smp_as_whole():
        # Keras' older ones create their slots so.
        create = optimizer._create_all_weights if hasattr(optimizer, "_create_all_weights") else optimizer.build
        create(model.trainable_variables)


@contextlib.contextmanager
def being_built(optimizer: Any, variables: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Around an optimizer's own call that makes variables for those of a model.

    Yields:
        What it is to be built for: the whole model, if ``variables`` are those of this rank's partition.
    """
    model = state.model
    if model is None or not model.is_partitioned:
        yield variables
        if state.initialized:
            state.optimizers[optimizer] = list(variables)
        return
    make = "add_slot" if hasattr(optimizer, "add_slot") else "add_variable_from_reference"
    if make in vars(optimizer):
        # A class's call of that of its base.
        yield variables
        return
    with model._smp_as_whole():
        whole = model.trainable_variables
    given = {id(_handle(each)) for each in variables}
    if given == {id(_handle(each)) for each in model.trainable_variables}:
        variables = whole
    plain = getattr(optimizer, make)

    def noted(*args: Any, **kwargs: Any) -> Any:
        slot = plain(*args, **kwargs)
        _put(slot, args[0] if args else next(iter(kwargs.values())))
        return slot

    vars(optimizer)[make] = noted
    try:
        yield variables
    finally:
        del vars(optimizer)[make]
    state.optimizers[optimizer] = list(variables)
    _settle(optimizer)


def here(optimizer: Any) -> list[Any] | None:
    """Those of the variables which an optimizer was built for that this rank updates; ``None`` if it was built for none of a divided model."""
    model = state.model
    if model is None or not model.is_partitioned or optimizer not in state.optimizers:
        return None
    return model._smp_here(state.optimizers[optimizer])


def divide() -> None:
    """The model has been divided: so are the optimizers that were built for it before."""
    for optimizer in list(state.optimizers):
        _settle(optimizer)


def unknown(optimizer: Any) -> list[Any]:
    """Variables of an optimizer, larger than a number, of which nobody knows which partition they belong to."""
    homes = state.model._smp_homes.variables if state.model is not None and state.model.is_partitioned else {}
    known = set(homes)
    if optimizer in state.optimizers:
        # Those for variables that all ranks have are on all, too.
        known |= {id(_handle(slot)) for slot, _ in _pairs(optimizer)}
    return [each for each in variables_of(optimizer) if len(each.shape) and id(_handle(each)) not in known]


def variables_of(optimizer: Any) -> list[Any]:
    """All variables of an optimizer, if there is one."""
    found = getattr(optimizer, "variables", [])
    return list(found() if callable(found) else found)


def _handle(variable: Any) -> Any:
    return underlying(variable).handle


def _put(slot: Any, reference: Any) -> None:
    """``slot`` is where ``reference`` is, a variable of the model."""
    model = state.model
    assert model is not None, "it was divided"
    homes = model._smp_homes.variables
    home, handle = homes.get(id(_handle(reference))), id(_handle(slot))
    if home is None or handle in homes:
        return
    homes[handle] = home
    weakref.finalize(underlying(slot), homes.pop, handle, None)
    if home != state.groups.rank_in("pp"):
        empty(slot)
        model._smp_slots.append(slot)


def _settle(optimizer: Any) -> None:
    for slot, variable in _pairs(optimizer):
        _put(slot, variable)


def _pairs(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Variables of an optimizer, each with that of the model which it is for: Keras' optimizers keep them in lists that have an
    entry for each variable that they were built for, the older ones in slots."""
    variables = state.optimizers[optimizer]
    if hasattr(optimizer, "get_slot_names"):
        for name, variable in itertools.product(optimizer.get_slot_names(), variables):
            with contextlib.suppress(KeyError):
                yield optimizer.get_slot(variable, name), variable
        return
    of_model = {id(_handle(each)) for each in variables}
    for name, values in vars(optimizer).items():
        # All of its variables are in a list as well.
        if name == "_variables" or not isinstance(values, list | tuple) or len(values) != len(variables):
            continue
        for slot, variable in zip(values, variables, strict=True):
            if hasattr(underlying(slot), "handle") and id(_handle(slot)) not in of_model:
                yield slot, variable
