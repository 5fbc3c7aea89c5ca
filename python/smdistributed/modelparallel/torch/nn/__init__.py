"""Modules that are divided over the tensor-parallel group: ``smp.nn``. Sizes are those of the whole modules."""

from smdistributed.modelparallel.torch.nn import huggingface as huggingface
from smdistributed.modelparallel.torch.nn.attention import DistributedAttentionLayer
from smdistributed.modelparallel.torch.nn.cross_entropy import vocab_parallel_cross_entropy
from smdistributed.modelparallel.torch.nn.embedding import DistributedEmbedding, VocabParallelEmbedding
from smdistributed.modelparallel.torch.nn.encoder_decoder import DistributedEncoderDecoder
from smdistributed.modelparallel.torch.nn.experts import DistributedExpertsLayer
from smdistributed.modelparallel.torch.nn.feed_forward import DistributedTransformerOutputLayer
from smdistributed.modelparallel.torch.nn.flash_attention import FlashAttentionLayer
from smdistributed.modelparallel.torch.nn.linear import DistributedLinear
from smdistributed.modelparallel.torch.nn.lm_head import DistributedTransformerLMHead
from smdistributed.modelparallel.torch.nn.module import DistributedModule
from smdistributed.modelparallel.torch.nn.norm import DistributedLayerNorm, DistributedRMSNorm, FusedLayerNorm
from smdistributed.modelparallel.torch.nn.options import BlockOptions
from smdistributed.modelparallel.torch.nn.relative_bias import RelativeBias
from smdistributed.modelparallel.torch.nn.rotary import Rotary
from smdistributed.modelparallel.torch.nn.transformer import DistributedTransformer, DistributedTransformerLayer

__all__ = [
    "BlockOptions",
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedEncoderDecoder",
    "DistributedExpertsLayer",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedModule",
    "DistributedRMSNorm",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "RelativeBias",
    "Rotary",
    "VocabParallelEmbedding",
    "huggingface",
    "vocab_parallel_cross_entropy",
]
