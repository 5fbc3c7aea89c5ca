"""How tensors travel."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed.dataparallel.tensorflow import compression as shared


class Compressor:
    """What a choice of one's own has."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """What is sent, and what :meth:`decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """The tensor again."""
        raise NotImplementedError


class NoneCompressor(shared.NoneCompression, Compressor):
    """Unchanged."""


class FP16Compressor(shared.FP16Compression, Compressor):
    """Floating tensors are sent as float16; others are untouched."""


class BF16Compressor(shared.BF16Compression, Compressor):
    """Floating tensors are sent as bfloat16, which has the range of float32. An extension."""


class Compression:
    """The choices."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
