"""Names and layouts of weights in Hugging Face's models, and in the distributed modules that replace them.

Translations only move and transpose tensors, so they are exact in both directions.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smdistributed.modelparallel.exceptions import SMPCheckpointError

State = Mapping[str, Any]

#: Marks a state of one rank, which is not translated.
_PARTIAL = "_smp_is_partial"
#: Suffixes of buffers in the states of older versions of transformers, which are not weights.
_BUFFERS = re.compile(
    r".*\.(attn|attention|self_attn)\.(\w+\.)*(bias|masked_bias|inv_freq|embed_positions)|.*\.position_ids|.*\.inv_freq"
)


@dataclass(frozen=True)
class Weight:
    """A weight of Hugging Face's model, and the weights of the distributed module that correspond to it.

    Attributes:
        ours: Names in the distributed module.
        theirs: The name in Hugging Face's model.
        is_transposed: Whether Hugging Face's model stores matrices as ``[in, out]``.
        is_by_head: Whether a combined tensor has the rows of each head together: query, key and value of head 0, and
        so on.
        other_name: Another name in Hugging Face's model.
        dim: The dimension along which a combined tensor has its parts.
    """

    ours: tuple[str, ...]
    theirs: str
    is_transposed: bool = False
    is_by_head: bool = False
    other_name: str | None = None
    dim: int = 0

    def split(self, tensor: torch.Tensor, heads: int | None) -> list[torch.Tensor]:
        """Return the distributed module's tensors for Hugging Face's tensor."""
        if self.is_transposed and tensor.dim() == 2:
            tensor = tensor.t()
        count = len(self.ours)
        if count == 1:
            return [tensor.contiguous()]
        if not self.is_by_head:
            return [part.contiguous() for part in tensor.chunk(count, self.dim)]
        rows = tensor.view(_known(heads, self.theirs), count, -1, *tensor.shape[1:])
        return [rows[:, place].reshape(-1, *tensor.shape[1:]) for place in range(count)]

    def join(self, tensors: Sequence[torch.Tensor], heads: int | None) -> torch.Tensor:
        """Return Hugging Face's tensor for those of the distributed module."""
        if len(tensors) == 1:
            whole = tensors[0]
        elif self.is_by_head:
            count = _known(heads, self.theirs)
            rows = [tensor.view(count, -1, *tensor.shape[1:]) for tensor in tensors]
            whole = torch.stack(rows, 1).reshape(-1, *tensors[0].shape[1:])
        else:
            whole = torch.cat(list(tensors), self.dim)
        return whole.t().contiguous() if self.is_transposed and whole.dim() == 2 else whole.contiguous()


def _known(heads: int | None, name: str) -> int:
    if heads is None:
        raise SMPCheckpointError(f"`{name}` has the rows of each head together: pass `num_attention_heads`")
    return heads


def product(ours: str | Sequence[str], theirs: str, transposed: bool = False, by_head: bool = False) -> list[Weight]:
    """Return the weight and the bias of a layer.

    Args:
        ours: Its name in the distributed module, or several.
        theirs: Its name in Hugging Face's model.
        transposed: As ``is_transposed`` of :class:`Weight`.
        by_head: As ``is_by_head`` of :class:`Weight`.

    Returns:
        Both.
    """
    names = (ours,) if isinstance(ours, str) else tuple(ours)
    return [
        Weight(tuple(f"{name}.{kind}" for name in names), f"{theirs}.{kind}", transposed, by_head)
        for kind in ("weight", "bias")
    ]


@dataclass(frozen=True)
class NameTable:
    """The weights of one architecture.

    Attributes:
        base: Prefix in Hugging Face's model of all weights except the head's.
        layers: Prefix of a layer in Hugging Face's model, after ``base``, with ``{}`` for its number.
        layer: Weights of a layer; our names are relative to ``transformer.seq_layers.{}.``.
        rest: Other weights, with complete names.
        masks: Names of causal masks in the states of older versions of transformers, relative to a layer.
    """

    base: str
    layers: str
    layer: Sequence[Weight]
    rest: Sequence[Weight]
    masks: str | None = None

    def from_hf(self, state_dict: State, heads: int | None = None) -> dict[str, Any]:
        """Translate a state of Hugging Face's model.

        Args:
            state_dict: Whole tensors by Hugging Face's names, with or without ``base``.
            heads: Number of attention heads, if rows are grouped by them.

        Returns:
            Whole tensors by our names.

        Raises:
            SMPCheckpointError: A name is unknown.
        """
        table = self._by_theirs(state_dict)
        result: dict[str, Any] = {}
        for name, tensor in state_dict.items():
            if name == _PARTIAL:
                result[name] = tensor
                continue
            full = name if name in table else self.base + name
            if full in table:
                weight = table[full]
                result.update(zip(weight.ours, weight.split(tensor, heads), strict=True))
            elif not _BUFFERS.fullmatch(name):
                raise SMPCheckpointError(f"`{name}` is not a weight of this architecture")
        head, words = "lm_head.weight", "embeddings.word_embedding.weight"
        if head not in result and words in result and any(head in weight.ours for weight in self.rest):
            # A tied weight, which the file contains once.
            result[head] = result[words]
        return result

    def to_hf(self, state_dict: State, max_seq_len: int | None = None, heads: int | None = None) -> dict[str, Any]:
        """Translate a state to the names of Hugging Face's model.

        Args:
            state_dict: Whole tensors by our names.
            max_seq_len: Adds the causal masks of this size that older versions of transformers expect.
            heads: Number of attention heads, if rows are grouped by them.

        Returns:
            Whole tensors by Hugging Face's names.

        Raises:
            SMPCheckpointError: A name is unknown.
        """
        count = _layers(state_dict)
        weights = [*self.rest, *(each for index in range(count) for each in self._of_layer(index))]
        result: dict[str, Any] = {}
        used = {_PARTIAL}
        for weight in weights:
            if weight.ours[0] in state_dict:
                used.update(weight.ours)
                result[weight.theirs] = weight.join([state_dict[name] for name in weight.ours], heads)
        unknown = sorted(set(state_dict) - used)
        if unknown:
            raise SMPCheckpointError(f"`{unknown[0]}` is not a weight of this architecture")
        if max_seq_len is not None and self.masks is not None:
            for index in range(count):
                prefix = (self.base + self.layers).format(index) + self.masks
                mask = torch.ones(max_seq_len, max_seq_len, dtype=torch.bool, device="cpu").tril()
                result[f"{prefix}.bias"] = mask[None, None]
                result[f"{prefix}.masked_bias"] = torch.tensor(-1e4, device="cpu")
        if _PARTIAL in state_dict:
            result[_PARTIAL] = state_dict[_PARTIAL]
        return result

    def _of_layer(self, index: int) -> list[Weight]:
        here, there = f"transformer.seq_layers.{index}.", (self.base + self.layers).format(index)
        return [
            dataclasses.replace(each, ours=tuple(here + name for name in each.ours), theirs=there + each.theirs)
            for each in self.layer
        ]

    def _by_theirs(self, state_dict: State) -> dict[str, Weight]:
        pattern = re.compile(r".*?" + re.escape(self.layers).replace(r"\{\}", r"(\d+)"))
        numbers = {int(found[1]) for name in state_dict if (found := pattern.match(name))}
        weights = [*self.rest, *(each for index in sorted(numbers) for each in self._of_layer(index))]
        found = {weight.theirs: weight for weight in weights}
        return found | {weight.other_name: weight for weight in weights if weight.other_name is not None}


def _layers(state_dict: State) -> int:
    numbers = [int(found[1]) for name in state_dict if (found := re.match(r"transformer\.seq_layers\.(\d+)\.", name))]
    return max(numbers, default=-1) + 1


def translations(table: NameTable) -> tuple[Callable[..., dict[str, Any]], Callable[..., dict[str, Any]]]:
    """Return the two public functions of an architecture.

    Args:
        table: The names of its weights.

    Returns:
        The function to the names of Hugging Face's model, and that from them.
    """

    def to_hf(
        state_dict: State, max_seq_len: int | None = None, num_attention_heads: int | None = None
    ) -> dict[str, Any]:
        """Translate the state of a distributed model to that of Hugging Face's model.

        Args:
            state_dict: The result of ``model.state_dict()``.
            max_seq_len: Adds the causal masks of this size that older versions of transformers expect.
            num_attention_heads: Required for architectures whose weights have the rows of each head together.

        Returns:
            The state.
        """
        return table.to_hf(state_dict, max_seq_len, num_attention_heads)

    def from_hf(state_dict: State, num_attention_heads: int | None = None) -> dict[str, Any]:
        """Translate the state of Hugging Face's model to that of a distributed model.

        Args:
            state_dict: The state of the model, or of a file of its weights.
            num_attention_heads: Required for architectures whose weights have the rows of each head together.

        Returns:
            A state for ``model.load_state_dict()``.
        """
        return table.from_hf(state_dict, num_attention_heads)

    return to_hf, from_hf
