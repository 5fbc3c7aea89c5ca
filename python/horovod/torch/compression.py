"""Types in which tensors are sent."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """The interface of a compression. Subclass it for a compression of your own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor in the form in which it is sent.

        Args:
            tensor: The tensor to send.

        Returns:
            The compressed tensor, and a context for :meth:`decompress`.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return a received tensor in its original form.

        Args:
            tensor: The received tensor.
            ctx: The context that :meth:`compress` returned.

        Returns:
            The tensor.
        """
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Send tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor unchanged.

        Args:
            tensor: The tensor to send.

        Returns:
            The tensor, and ``None``.
        """
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor unchanged.

        Args:
            tensor: The received tensor.
            ctx: Ignored.

        Returns:
            The tensor.
        """
        return tensor


class FP16Compressor(Compressor):
    """Send floating-point tensors as float16; others are unchanged."""

    _wire = torch.float16

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Cast a floating-point tensor to the narrow type.

        Args:
            tensor: The tensor to send.

        Returns:
            The tensor in the narrow type, and the type to return to; ``None`` if it was not cast.
        """
        return (tensor.to(cls._wire), tensor.dtype) if tensor.dtype.is_floating_point else (tensor, None)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Cast a received tensor to its own type.

        Args:
            tensor: The received tensor.
            ctx: The context that :meth:`compress` returned.

        Returns:
            The tensor in its own type.
        """
        return tensor if ctx is None else tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Send floating-point tensors as bfloat16, which has the range of float32. An extension."""

    _wire = torch.bfloat16


class Compression:
    """The compressions of tensors.

    Attributes:
        none: Tensors travel in their own type.
        fp16: As float16.
        bf16: As bfloat16. An extension.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
