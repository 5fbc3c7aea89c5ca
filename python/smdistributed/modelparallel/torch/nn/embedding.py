"""Embeddings with divided weights."""

from __future__ import annotations

import torch
from torch.nn import functional

from smdistributed.modelparallel.exceptions import SMPValidationError
from smdistributed.modelparallel.torch.nn import collectives, initializers, layout
from smdistributed.modelparallel.torch.nn.module import DistributedModule, check_divisible


class DistributedEmbedding(DistributedModule):
    """An embedding whose features are divided over the tensor-parallel group.

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Features of a whole row; a multiple of the degree.
        padding_idx: A row that gets no gradient.
        max_norm: Rows with a larger norm are scaled down to it when they are used.
        norm_type: Order of that norm.
        scale_grad_by_freq: Whether gradients are divided by the number of uses of a row in the group's batch.
        sparse: Must be ``False`` with several ranks: sparse gradients are not reduced.
        _weight: The whole weight; by default it is drawn from a normal distribution with ``initializer_range``.
        initializer_range: Standard deviation of initial values.
        _skip_allgather: Whether the input is the group's batch already.
        _skip_scatter_and_merge: Whether the output stays ``[N, .., embedding_dim / tp_size]``.

    Raises:
        SMPValidationError: ``embedding_dim`` is not divisible, or ``sparse`` is set with several ranks.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        initializer_range: float = 0.02,
        _skip_allgather: bool = False,
        _skip_scatter_and_merge: bool = False,
    ) -> None:
        super().__init__()
        check_divisible(embedding_dim, "`embedding_dim` of DistributedEmbedding")
        if sparse and collectives.tp_size() > 1:
            raise SMPValidationError("`sparse` of DistributedEmbedding is True: sparse gradients are not reduced")
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise SMPValidationError(f"`padding_idx` is {padding_idx}: there are {num_embeddings} embeddings")
        if padding_idx is not None and padding_idx < 0:
            padding_idx += num_embeddings
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = (
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
        )
        self._skip_allgather, self._skip_scatter_and_merge = _skip_allgather, _skip_scatter_and_merge
        initial = initializers.normal_rows(initializer_range, padding_idx)
        self.add_parameter("weight", (num_embeddings, embedding_dim), initial, shard_dim=1)
        if _weight is not None:
            self.load_whole("weight", _weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up rows.

        Args:
            input: ``[batch, ..]``, row numbers.

        Returns:
            ``[batch, .., embedding_dim]``, or the shape of ``_skip_scatter_and_merge``.
        """
        is_whole_batch = layout.is_prescaled() or self._skip_allgather
        ids = input if is_whole_batch else collectives.gather_constant(input)
        if self.max_norm is not None:
            self._renormalize(ids)
        local = functional.embedding(
            ids, self.weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq, sparse=self.sparse
        )
        if self._skip_scatter_and_merge:
            return local
        if layout.is_prescaled():
            return collectives.gather_features(local)
        return collectives.features_to_tokens(local)

    @torch.no_grad()
    def _renormalize(self, ids: torch.Tensor) -> None:
        """Renormalize rows as PyTorch does, with the norm over all slices of a row."""
        # All rows are scaled: finding the used ones with `unique` would give a shape that depends on values.
        used = torch.zeros(self.num_embeddings, dtype=torch.bool, device=ids.device).index_fill_(0, ids.flatten(), True)
        powers = self.weight.abs().pow(self.norm_type).sum(1)
        norms = collectives.all_reduce(powers).pow(1.0 / self.norm_type)
        factors = torch.where(used & (norms > self.max_norm), self.max_norm / (norms + 1e-7), 1.0)
        self.weight.mul_(factors.to(self.weight.dtype)[:, None])

    def extra_repr(self) -> str:
        """Return the sizes of the whole embedding.

        Returns:
            The same text as ``torch.nn.Embedding``.
        """
        return f"{self.num_embeddings}, {self.embedding_dim}"


class VocabParallelEmbedding(DistributedModule):
    """An embedding whose rows are divided; the last ranks may hold rows of padding.

    Args:
        num_embeddings: Rows of the whole embedding.
        embedding_dim: Number of features.
        initializer_range: Standard deviation of initial values.
        padding_idx: A row that gets no gradient.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        initializer_range: float = 0.02,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        initial = initializers.normal_rows(initializer_range, padding_idx)
        self.add_parameter("weight", (num_embeddings, embedding_dim), initial, shard_dim=0, padded=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up the rows that this rank holds.

        Args:
            ids: ``[N, S]``, the ids of the group's tokens.

        Returns:
            ``[N, S, embedding_dim]``, with zeros for rows of other ranks: a partial result.
        """
        if collectives.tp_size() == 1:
            return functional.embedding(ids, self.weight, self.padding_idx)
        begin, end = self.shards["weight"].bounds(collectives.tp_rank())
        local = ids - begin
        is_here = (local >= 0) & (local < end - begin)
        padding = self.padding_idx
        padding = None if padding is None or not begin <= padding < end else padding - begin
        rows = functional.embedding(local.masked_fill(~is_here, 0), self.weight, padding)
        return rows.masked_fill(~is_here[..., None], 0.0)
