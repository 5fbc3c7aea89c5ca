"""Types in which gradients are sent."""

from __future__ import annotations

import tensorflow as tf


class NoneCompression:
    """Send tensors unchanged."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType | None]:
        """Return the tensor unchanged.

        Args:
            tensor: The tensor to send.

        Returns:
            The tensor, and ``None`` for :meth:`decompress`.
        """
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType | None) -> tf.Tensor:
        """Return the tensor unchanged.

        Args:
            tensor: The reduced tensor.
            ctx: Ignored.

        Returns:
            The tensor.
        """
        return tensor


class FP16Compression:
    """Send floating-point tensors as float16; others are unchanged."""

    _wire = tf.float16

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType | None]:
        """Cast a floating-point tensor to the narrow type.

        Args:
            tensor: The tensor to send.

        Returns:
            The tensor in the narrow type, and the type to return to; ``None`` if it was not cast.
        """
        if not tensor.dtype.is_floating:
            return tensor, None
        return tf.cast(tensor, cls._wire), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType | None) -> tf.Tensor:
        """Cast a reduced tensor to its own type.

        Args:
            tensor: The reduced tensor.
            ctx: The context that :meth:`compress` returned.

        Returns:
            The tensor in its own type.
        """
        return tensor if ctx is None else tf.cast(tensor, ctx)


class BF16Compression(FP16Compression):
    """Send floating-point tensors as bfloat16, which has the range of float32; others are unchanged. An extension."""

    _wire = tf.bfloat16


class Compression:
    """The compressions of gradients.

    Attributes:
        none: Gradients travel in their own type.
        fp16: As float16.
        bf16: As bfloat16. An extension.
    """

    none = NoneCompression
    fp16 = FP16Compression
    bf16 = BF16Compression
