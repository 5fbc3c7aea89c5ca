"""Types in which tensors are sent."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow import compression as shared


class Compressor:
    """The interface of a compression. Subclass it for a compression of your own."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the tensor in the form in which it is sent.

        Args:
            tensor: The tensor to send.

        Returns:
            The compressed tensor, and a context for :meth:`decompress`.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Return a received tensor in its original form.

        Args:
            tensor: The received tensor.
            ctx: The context that :meth:`compress` returned.

        Returns:
            The tensor.
        """
        raise NotImplementedError


class NoneCompressor(shared.NoneCompression, Compressor):
    """Send tensors unchanged."""


class FP16Compressor(shared.FP16Compression, Compressor):
    """Send floating-point tensors as float16; others are unchanged."""


class BF16Compressor(shared.BF16Compression, Compressor):
    """Send floating-point tensors as bfloat16, which has the range of float32. An extension."""


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
