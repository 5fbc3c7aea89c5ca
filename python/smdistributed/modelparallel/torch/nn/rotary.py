"""Rotary position embeddings (Su et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Rotary:
    """Rotates pairs of features of queries and keys by angles that are proportional to the position.

    Attributes:
        inverse_frequencies: Angle of each pair for one position; features beyond the pairs are not rotated.
        interleaved: Whether a pair consists of adjacent features, as in GPT-J; otherwise of features ``i`` and ``i +
        pairs``.
        scaling: Factor of sines and cosines.
    """

    inverse_frequencies: tuple[float, ...]
    interleaved: bool = False
    scaling: float = 1.0

    @staticmethod
    def with_base(size: int, base: float = 10_000.0, interleaved: bool = False) -> Rotary:
        """Return the embedding of the paper.

        Args:
            size: Number of features that are rotated.
            base: The base of the frequencies.
            interleaved: As for the attribute.

        Returns:
            The rotary embedding.
        """
        # On the CPU, even if modules are created on another device.
        exponents = torch.arange(0, size, 2, dtype=torch.int64, device="cpu").float() / size
        return Rotary(tuple((1.0 / base**exponents).tolist()), interleaved)

    def angles(
        self, positions: torch.Tensor | None, length: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, computed in float32. Those of positions 0, 1, ... are computed once.

        Args:
            positions: ``[N, S]`` or ``[1, S]``; ``None`` for 0, 1, ...
            length: ``S``.
            like: A tensor of the device and the type of the result.

        Returns:
            Each ``[N or 1, 1, S, 2 * pairs]``; the sine of a pair's first feature is negative.
        """
        if positions is not None or type(like) is not torch.Tensor or torch.compiler.is_compiling():
            return self._angles(positions, length, like)
        # Tensors that are created while a CUDA graph is captured belong to the graph. This call is
        # the last condition, because a compiler cannot trace it.
        if like.is_cuda and torch.cuda.is_current_stream_capturing():
            return self._angles(positions, length, like)
        key = self, length, like.device, like.dtype
        found = _TABLES.pop(key, None)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = self._angles(None, length, like)
            if like.is_cuda:
                # Another stream may use them next.
                torch.cuda.current_stream(like.device).synchronize()
            while len(_TABLES) >= _MAX_TABLES:
                del _TABLES[next(iter(_TABLES))]
        _TABLES[key] = found
        return found

    def _angles(
        self, positions: torch.Tensor | None, length: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if positions is None:
            positions = torch.arange(length, device=like.device)[None]
        frequencies = torch.tensor(self.inverse_frequencies, dtype=torch.float32, device=like.device)
        angles = positions[:, None, :, None].float() * frequencies
        cosines, sines = (angles.cos() * self.scaling).to(like.dtype), (angles.sin() * self.scaling).to(like.dtype)
        if self.interleaved:
            return cosines.repeat_interleave(2, -1), torch.stack((-sines, sines), -1).flatten(-2)
        return torch.cat((cosines, cosines), -1), torch.cat((-sines, sines), -1)

    def rotate(self, heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotate queries or keys.

        Args:
            heads: ``[N, heads, S, size]``.
            angles: The result of :meth:`angles`.

        Returns:
            The same shape.
        """
        pairs = len(self.inverse_frequencies)
        turned, rest = heads[..., : 2 * pairs], heads[..., 2 * pairs :]
        turned = _Rotation.apply(turned, *angles, self.interleaved)
        return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


class _Rotation(torch.autograd.Function):
    """Multiplies features by cosines, and adds the other features of their pairs, multiplied by sines.

    Three kernels on a GPU. The backward is the rotation by the opposite angles.
    """

    @staticmethod
    def forward(
        ctx: Any, features: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, interleaved: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(cosines, sines)
        ctx.interleaved = interleaved
        # Not in place: for a result of an in-place operation, Dynamo of PyTorch 2.11 loses the gradient without a word.
        return torch.addcmul(features * cosines, _exchanged(features, interleaved), sines)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cosines, sines = ctx.saved_tensors
        other = _exchanged(gradient, ctx.interleaved)
        return (gradient * cosines).addcmul_(other, sines, value=-1), None, None, None


def _exchanged(features: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Exchange the two features of each pair."""
    if interleaved:
        return features.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return features.roll(features.shape[-1] // 2, -1)


#: Cosines and sines of positions 0, 1, ..., the most recently used ones last.
_TABLES: dict[tuple[Rotary, int, torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
#: Enough for a model that is trained and evaluated at a few lengths.
_MAX_TABLES = 8
