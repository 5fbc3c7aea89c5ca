"""Reductions of values over ranks; the same for both frameworks."""

from __future__ import annotations

import enum


class ReduceOp(enum.Enum):
    """A reduction. The value is the core's name for it.

    ``AVERAGE``, ``SUM``, ``MIN`` and ``MAX`` are the documented ones; the others are extensions. Bit operations are
    for integers and bool.
    """

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BAND = "bit_and"
    BOR = "bit_or"
    BXOR = "bit_xor"


def core_name(op: ReduceOp | None, default: ReduceOp) -> str:
    """Return the core's name of a reduction.

    Args:
        op: A reduction, or ``None`` for ``default``.
        default: The reduction for ``None``.

    Returns:
        The name.

    Raises:
        ValueError: ``op`` is something else.
    """
    if op is None:
        return default.value
    if not isinstance(op, ReduceOp):
        names = ", ".join(f"ReduceOp.{member.name}" for member in ReduceOp)
        raise ValueError(f"{op!r} is not a reduction: expected one of {names}")
    return op.value
