"""Rotary position embeddings (Su et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass

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
        """Return cosines and sines, computed in float32.

        Args:
            positions: ``[N, S]`` or ``[1, S]``; ``None`` for 0, 1, ...
            length: ``S``.
            like: A tensor of the device and the type of the result.

        Returns:
            Each ``[N or 1, 1, S, pairs]``.
        """
        if positions is None:
            positions = torch.arange(length, device=like.device)[None]
        frequencies = torch.tensor(self.inverse_frequencies, dtype=torch.float32, device=like.device)
        angles = positions[:, None, :, None].float() * frequencies
        return (angles.cos() * self.scaling).to(like.dtype), (angles.sin() * self.scaling).to(like.dtype)

    def rotate(self, heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotate queries or keys.

        Args:
            heads: ``[N, heads, S, size]``.
            angles: The result of :meth:`angles`.

        Returns:
            The same shape.
        """
        cosines, sines = angles
        pairs = len(self.inverse_frequencies)
        turned, rest = heads[..., : 2 * pairs], heads[..., 2 * pairs :]
        if self.interleaved:
            first, second = turned[..., ::2], turned[..., 1::2]
            new = (first * cosines - second * sines, second * cosines + first * sines)
            turned = torch.stack(new, -1).flatten(-2)
        else:
            first, second = turned.chunk(2, -1)
            turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)
        return torch.cat((turned, rest), -1) if rest.shape[-1] else turned
