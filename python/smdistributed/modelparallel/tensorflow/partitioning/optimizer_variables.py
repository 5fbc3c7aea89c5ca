"""The optimizer's variables, which have values only on the partition of their model variable.

Every rank builds the optimizer for the whole model, so its variables have the names and order of one process.
Variables of other partitions are emptied when they are created. The variables of an optimizer that is built before
the model is partitioned take no memory until then.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.tensorflow import communication
from smdistributed.modelparallel.tensorflow.partitioning import delayed_initialization, remote_variables
from smdistributed.modelparallel.tensorflow.partitioning.delayed_initialization import handle_of
from smdistributed.modelparallel.tensorflow.state import state


def build(optimizer: Any, variables: Sequence[Any] | None = None, are_all: bool = False) -> None:
    """Build an optimizer for the partitioned model; do nothing if it is built.

    Args:
        optimizer: An optimizer of any Keras package.
        variables: The variables that it updates; by default, those of the model.
        are_all: Whether ``variables`` are equal on all partitions, even if all of them are on this rank.
    """
    model = state.model
    if model is None or not model.is_partitioned or optimizer in state.optimizers:
        return
    given = model.trainable_variables if variables is None else variables
    given = given if are_all else _of_all_partitions(given)
    # The variables must not belong to a surrounding `tf.function`: if its first trace fails, the next trace could not
    # use them.
    with tf.init_scope(), model._smp_all_variables(), tf.variable_creator_scope(delayed_initialization.with_its_value):
        # The method of Keras' older optimizers that creates slots.
        create = optimizer._create_all_weights if hasattr(optimizer, "_create_all_weights") else optimizer.build
        create(given)


@contextlib.contextmanager
def being_built(optimizer: Any, variables: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Return a context for an optimizer's own creation of variables.

    Yields:
        The variables to build for: those of the whole model, if ``variables`` are those of this rank's partition.
    """
    model, given = state.model, variables
    make = "add_slot" if hasattr(optimizer, "add_slot") else "add_variable_from_reference"
    if make in vars(optimizer):
        # A subclass's method has called that of its base class.
        yield variables
        return
    is_partitioned = model is not None and model.is_partitioned
    if optimizer in state.optimizers:
        # Keras' oldest optimizers call this in every update.
        before = state.optimizers[optimizer]
        known = {id(handle_of(each)) for each in before}
        given = [*before, *(each for each in variables if id(handle_of(each)) not in known)]
    elif is_partitioned:
        given = _of_all_partitions(variables)
    plain = getattr(optimizer, make)

    def noted(*args: Any, **kwargs: Any) -> Any:
        slot = plain(*args, **kwargs)
        if is_partitioned:
            _put(slot, args[0] if args else next(iter(kwargs.values())))
        else:
            delayed_initialization.delay(slot)
        return slot

    vars(optimizer)[make] = noted
    try:
        yield given
    finally:
        del vars(optimizer)[make]
    if state.initialized:
        state.optimizers[optimizer] = list(given)
    if is_partitioned:
        _materialize(optimizer)


def _of_all_partitions(variables: Sequence[Any]) -> Sequence[Any]:
    """Return the variables that an optimizer is built for: the whole model's instead of this rank's."""
    model = state.require_model()
    here = {id(handle_of(each)) for each in model.trainable_variables}
    others = [each for each in variables if id(handle_of(each)) not in here]
    with model._smp_all_variables():
        whole = model.trainable_variables
    elsewhere = {id(handle_of(each)) for each in whole} - here
    if others and len(others) == len(variables) and not any(id(handle_of(each)) in elsewhere for each in others):
        return variables
    is_part = len(variables) - len(others) < len(here) or any(id(handle_of(each)) in elsewhere for each in others)
    if state.trace is None and not model.__dict__.get("_smp_shows_all") and state.groups.pp_group is not None:
        # If a rank has the whole list, it cannot tell whether that is only its partition; other ranks may.
        is_part = any(communication.gather_for("builds an optimizer", is_part, CommGroup.PP_GROUP))
    return variables if is_part else [*whole, *others]


def local_variables(optimizer: Any) -> list[Any] | None:
    """Return the variables that an optimizer updates on this rank; ``None`` if it was built for other variables."""
    model = state.model
    if model is None or not model.is_partitioned or optimizer not in state.optimizers:
        return None
    return model._smp_local(state.optimizers[optimizer])


def partition_existing() -> None:
    """Partition the optimizers that were built before the model was partitioned."""
    for optimizer in list(state.optimizers):
        _materialize(optimizer)


def unknown(optimizer: Any) -> list[Any]:
    """Return variables of an optimizer, larger than a scalar, whose partition is unknown."""
    if hasattr(optimizer, "inner_optimizer"):
        # A loss-scaling optimizer has two variables of its own.
        return unknown(optimizer.inner_optimizer)
    assignment = state.model._smp_assignment.variables if state.model is not None and state.model.is_partitioned else {}
    known = set(assignment)
    if optimizer in state.optimizers:
        # Slots of variables that all ranks have exist on all ranks, too.
        known |= {id(handle_of(slot)) for slot, _ in _pairs(optimizer)}
    return [each for each in variables_of(optimizer) if len(each.shape) and id(handle_of(each)) not in known]


def variables_of(optimizer: Any) -> list[Any]:
    """Return all variables of an optimizer; none without an optimizer."""
    found = getattr(optimizer, "variables", [])
    return list(found() if callable(found) else found)


def _put(slot: Any, reference: Any) -> None:
    """Place ``slot`` on the partition of ``reference``, a variable of the model."""
    model = state.model
    assert model is not None, "it is partitioned"
    assignment = model._smp_assignment.variables
    home, handle = assignment.get(id(handle_of(reference))), id(handle_of(slot))
    if home is None or handle in assignment:
        return
    if home != state.groups.rank_in("pp"):
        remote_variables.make_remote(slot)
        model._smp_slots.append(slot)
    assignment[handle] = home
    weakref.finalize(underlying(slot), assignment.pop, handle, None)


def _materialize(optimizer: Any) -> None:
    for slot, variable in _pairs(optimizer):
        _put(slot, variable)


def _pairs(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Pair an optimizer's variables with their model variables.

    Keras' optimizers keep lists with an entry for each variable that they were built for. Older optimizers keep slots.
    """
    variables = state.optimizers[optimizer]
    if hasattr(optimizer, "get_slot_names"):
        for name, variable in itertools.product(optimizer.get_slot_names(), variables):
            with contextlib.suppress(KeyError):
                yield optimizer.get_slot(variable, name), variable
        return
    of_model = {id(handle_of(each)) for each in variables}
    for name, values in vars(optimizer).items():
        # The optimizer also keeps a list of all its variables.
        if name == "_variables" or not isinstance(values, list | tuple) or len(values) != len(variables):
            continue
        for slot, variable in zip(values, variables, strict=True):
            if handle_of(slot) is not None and id(handle_of(slot)) not in of_model:
                yield slot, variable
