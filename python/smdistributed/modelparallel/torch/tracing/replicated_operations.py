"""Operations of a body on replicated tensors only, which every rank computes at once."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.tracing.encoder import Encoder

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.tracing.recording import Recording


def operands(recording: Recording, args: Any, kwargs: Any) -> list[torch.Tensor] | None:
    """Return the tensors among the arguments if these are replicated tensors and plain values; else ``None``.

    Most operations of a body have such arguments: masks and positions. They need no ``Encoder``.
    """
    located, stale = recording.located, recording.pipeline.stale_storages
    found: list[torch.Tensor] = []
    for item in (*args, *kwargs.values()) if kwargs else args:
        kind = type(item)
        if kind in pytree.ATOMS:
            continue
        if kind is not torch.Tensor or id(item) in located or stale.has(item):
            return None
        found.append(item)
    return found


def run(
    recording: Recording,
    func: Any,
    args: Any,
    kwargs: Any,
    tensors: list[Any],
    encoder: Encoder | None = None,
) -> Any:
    """Compute an operation whose operands are ``tensors``, which may be written to."""

    def key() -> Any:
        if encoder is None:
            return _constants_of(args, kwargs)
        return None if encoder.unknown else encoder.key()

    compute = functools.partial(recording.copy_on_write.call, func, args, kwargs, tensors, recording.microbatch)
    result = recording.pipeline.constants.call(func, key, tensors, compute)
    recording.outside_tensors.note_result(result, tensors)
    return result


def _constants_of(args: Any, kwargs: Any) -> Any:
    """Return a key of arguments that are plain values and, in a place of their own, replicated tensors.

    Tensors are not described: whoever uses the key knows them.
    """
    items = (*args, *kwargs.values()) if kwargs else args
    values = tuple([None if isinstance(item, torch.Tensor) else _described(item) for item in items])
    return len(args), tuple(kwargs) if kwargs else (), values


def _described(item: Any) -> tuple[str, Any]:
    kind = type(item)
    # 0.0 and -0.0 are equal, but different arguments.
    return kind.__name__, str(item) if kind in (float, complex) else item
