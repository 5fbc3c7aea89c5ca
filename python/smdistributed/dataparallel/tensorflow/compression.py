"""How gradients travel."""

from __future__ import annotations

import tensorflow as tf


class NoneCompression:
    """Unchanged."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType | None]:
        """What is sent, and what :meth:`decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType | None) -> tf.Tensor:
        """The tensor again."""
        return tensor


class FP16Compression:
    """Floating tensors are sent as float16; others are untouched."""

    _wire = tf.float16

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType | None]:
        """What is sent, and the type to go back to."""
        if not tensor.dtype.is_floating:
            return tensor, None
        return tf.cast(tensor, cls._wire), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType | None) -> tf.Tensor:
        """The tensor in its own type."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class BF16Compression(FP16Compression):
    """Floating tensors are sent as bfloat16, which has the range of float32; others are untouched. An extension."""

    _wire = tf.bfloat16


class Compression:
    """The choices."""

    none = NoneCompression
    fp16 = FP16Compression
    bf16 = BF16Compression
