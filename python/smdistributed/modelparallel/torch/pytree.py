"""Nested structures with tensors in them: lists, tuples, dictionaries, dataclasses and their subclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

#: Types that are never containers, for a fast check.
ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size})


def transform(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return ``value`` with every tensor replaced by ``leaf(tensor)``.

    Objects whose class sets ``_smp_leaf = True`` count as tensors. Containers are recreated with the same classes;
    other objects are kept.
    """
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is tuple:
        return tuple([transform(item, leaf) for item in value])
    if kind is list:
        return [transform(item, leaf) for item in value]
    if kind is dict:
        return {key: transform(item, leaf) for key, item in value.items()}
    if isinstance(value, torch.Tensor) or getattr(kind, "_smp_leaf", False):
        return leaf(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*[transform(item, leaf) for item in value])
    if isinstance(value, Mapping) and isinstance(value, dict):
        return _mapping(value, leaf)
    if isinstance(value, list | tuple):
        try:
            return kind([transform(item, leaf) for item in value])
        except TypeError:
            return value
    if kind in (set, frozenset):
        return kind([transform(item, leaf) for item in value])
    if dataclasses.is_dataclass(value):
        new = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(new, field.name, transform(getattr(value, field.name), leaf))
        return new
    if kind is slice:
        return slice(*(transform(item, leaf) for item in (value.start, value.stop, value.step)))
    return value


def _mapping(value: dict[Any, Any], leaf: Callable[[Any], Any]) -> Any:
    """Transform a mapping; the result has the same class if its items determine it, else it is a plain dictionary."""
    return rebuilt_mapping(value, {key: transform(item, leaf) for key, item in value.items()})


def rebuilt_mapping(value: dict[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the class of ``value`` with these items, or a plain dictionary."""
    try:
        # Outputs of Hugging Face's models are dataclasses as well: absent fields keep their defaults.
        new = type(value)(**items) if dataclasses.is_dataclass(value) else type(value)(items)
    except (TypeError, ValueError):
        return items
    return new if dict(new.items()).keys() == items.keys() else items


def tensors_of(value: Any) -> list[Any]:
    """Return the leaves, in the order of :func:`transform`."""
    found: list[Any] = []

    def leaf(tensor: Any) -> Any:
        found.append(tensor)
        return tensor

    transform(value, leaf)
    return found


class Slot:
    """The position of a tensor in a template."""

    _smp_leaf = True
    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"<{self.index}>"


def template(value: Any) -> tuple[Any, list[Any]]:
    """Return ``value`` with slots instead of tensors, and the tensors."""
    found: list[Any] = []

    def leaf(tensor: Any) -> Slot:
        found.append(tensor)
        return Slot(len(found) - 1)

    return transform(value, leaf), found


def filled(shape: Any, leaves: list[Any]) -> Any:
    """Return a template with these tensors in its slots."""
    return transform(shape, lambda slot: leaves[slot.index] if isinstance(slot, Slot) else slot)
