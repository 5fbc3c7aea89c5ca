"""JSON encoding of the user content of a checkpoint. Decoding executes no code.

Supported are numbers, strings, bytes, ``None``, lists, tuples, sets, dicts with keys of these types, tensors, and
torch's dtypes and sizes. A type without a JSON form becomes an object with one key that begins with ``$``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import torch

from smdistributed.modelparallel.exceptions import SMPCheckpointError


def encode(value: Any, keep: Callable[[torch.Tensor], str], where: str = "user_content") -> str:
    """Encode a value as JSON.

    Args:
        value: Numbers, strings, bytes, tensors, and lists, tuples, sets and dicts of them.
        keep: Saves a tensor elsewhere, and returns its name there.
        where: The name of the value in errors.

    Raises:
        SMPCheckpointError: The value contains a type that cannot be decoded without executing code.
    """
    return json.dumps(_plain(value, where, keep), allow_nan=False)


def decode(text: str, find: Callable[[str], torch.Tensor]) -> Any:
    """Decode a value; ``find`` returns the tensor with a name."""
    return _value(json.loads(text), find)


def _plain(value: Any, where: str, keep: Callable[[torch.Tensor], str]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        # Larger integers are stored as text, because other JSON readers would round them.
        return value if abs(value) < 1 << 53 else {"$int": str(value)}
    if kind is float:
        return {"$float": value.hex()}
    if kind is complex:
        return {"$complex": [value.real.hex(), value.imag.hex()]}
    if kind in (bytes, bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return {"$tensor": keep(value)}
    if isinstance(value, torch.dtype | torch.device):
        return {f"${kind.__name__}": str(value).removeprefix("torch.")}
    if kind is list:
        return [_plain(item, f"{where}[{at}]", keep) for at, item in enumerate(value)]
    if kind in (tuple, set, torch.Size):
        items = [_plain(item, f"{where}[{at}]", keep) for at, item in enumerate(value)]
        return {f"${kind.__name__}": items}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _plain(item, f"{where}[{key!r}]", keep) for key, item in value.items()}
        pairs = value.items()
        return {"$dict": [[_plain(k, where, keep), _plain(v, f"{where}[{k!r}]", keep)] for k, v in pairs]}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        # A scalar of NumPy.
        return _plain(value.item(), where, keep)
    raise SMPCheckpointError(
        f"`{where}` is a {kind.__module__}.{kind.__qualname__}: a checkpoint takes numbers, texts, bytes, tensors, "
        "and lists, tuples, sets and dicts of them; save its state, such as `state_dict()`"
    )


_SPECIAL: dict[str, Callable[[Any], Any]] = {
    "$int": int,
    "$float": float.fromhex,
    "$complex": lambda parts: complex(*map(float.fromhex, parts)),
    "$bytes": base64.b64decode,
    "$device": torch.device,
}


def _value(plain: Any, find: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(plain, list):
        return [_value(item, find) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        ((key, inner),) = plain.items()
        if key in _SPECIAL:
            return _SPECIAL[key](inner)
        if key == "$tensor":
            return find(inner)
        if key == "$dtype":
            dtype = getattr(torch, inner, None)
            if not isinstance(dtype, torch.dtype):
                raise SMPCheckpointError(
                    f"the checkpoint's content names the element type `{inner}`, which torch does not have"
                )
            return dtype
        if key in ("$tuple", "$set", "$Size"):
            return {"$tuple": tuple, "$set": set, "$Size": torch.Size}[key](_value(inner, find))
        if key == "$dict":
            return {_value(k, find): _value(v, find) for k, v in inner}
    return {key: _value(item, find) for key, item in plain.items()}
