"""Splits a step's arguments into those of its microbatches, for any framework."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from smdistributed.modelparallel.exceptions import SMPValidationError

#: Returns a tensor's pieces, given the tensor and its name; ``None`` for a value that is not a tensor.
SplitTensor = Callable[[Any, str], list[Any] | None]
#: Creates a sequence of the first argument's type from the items in the second one.
MakeSequence = Callable[[Any, list[Any]], Any]


def split(
    value: Any,
    name: str,
    microbatches: int,
    axis: int,
    keep: bool,
    split_tensor: SplitTensor,
    make_sequence: MakeSequence = lambda like, items: type(like)(items),
) -> list[Any]:
    """Return ``value`` for each microbatch, with the tensors in it split.

    Args:
        value: An argument of the step, or a part of one.
        name: Its name in errors.
        microbatches: The number of pieces.
        axis: The batch's axis, for objects that have a method ``smp_slice``.
        keep: Whether every microbatch gets the whole value.
        split_tensor: Splits a tensor of the framework.
        make_sequence: Makes a list or tuple of pieces.

    Raises:
        SMPValidationError: A tensor cannot be split into equal pieces.
    """
    if keep or value is None:
        return [value] * microbatches

    def split_item(item: Any, item_name: str) -> list[Any]:
        return split(item, item_name, microbatches, axis, False, split_tensor, make_sequence)

    pieces = split_tensor(value, name)
    if pieces is not None:
        return pieces
    if hasattr(value, "smp_slice"):
        return [value.smp_slice(microbatches, index, axis) for index in range(microbatches)]
    if isinstance(value, dict):
        parts = {key: split_item(item, f"{name}[{key!r}]") for key, item in value.items()}
        return [
            _make_dict(type(value), {key: part[index] for key, part in parts.items()}) for index in range(microbatches)
        ]
    if isinstance(value, tuple | list):
        items = [split_item(item, f"{name}[{place}]") for place, item in enumerate(value)]
        rows = [[item[index] for item in items] for index in range(microbatches)]
        if hasattr(value, "_fields"):
            return [type(value)(*row) for row in rows]
        return [make_sequence(value, row) for row in rows]
    if isinstance(value, set | frozenset):
        items = [split_item(item, name) for item in value]
        return [type(value)(item[index] for item in items) for index in range(microbatches)]
    return [value] * microbatches


def _make_dict(kind: type, items: dict[Any, Any]) -> Any:
    try:
        return kind(items)
    except TypeError:
        return items


def check_names(names: Collection[str], parameters: Collection[str], what: str) -> None:
    """Check that the option ``what`` names parameters of the step function only.

    Raises:
        SMPValidationError: It names another one.
    """
    for name in names:
        if name not in parameters:
            raise SMPValidationError(f"`{what}` names `{name}`, which is not a parameter of the function")
