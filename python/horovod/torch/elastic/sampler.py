"""A sampler that remembers which samples were processed, so that another set of workers can process the rest."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from horovod.torch.mpi_ops import rank, size


class ElasticSampler(torch.utils.data.Sampler):
    """Divides a data set among the ranks, without the samples that were processed in this epoch.

    Call :meth:`record_batch` after each batch, and :meth:`set_epoch` at the end of each epoch. As a part of a state it
    is divided anew after each reset.

    Args:
        dataset: The data set; only its length is used.
        shuffle: Whether each epoch has another order.
        seed: Seed of the order; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing is processed.

        Args:
            epoch: The epoch; part of the seed.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that all ranks have processed a batch of this size.

        Args:
            batch_idx: Ignored.
            batch_size: Samples of the batch on each rank.
        """
        self.record_indices(batch_size * self.num_replicas)

    def record_indices(self, processed_num: int) -> None:
        """Record that more samples of the epoch were processed.

        Args:
            processed_num: Number of samples, over all ranks.
        """
        self.processed_num += processed_num

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return this rank's indices of a batch.

        Args:
            batch_idx: The batch, from 0.
            batch_size: Samples of a batch on each rank.

        Returns:
            Indices into the data set.
        """
        start = batch_idx * batch_size
        return self._own()[start : start + batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch.

        Returns:
            A dictionary for :meth:`load_state_dict`.
        """
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a position.

        Args:
            state_dict: The result of :meth:`state_dict`.
        """
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the current ranks."""
        self.num_replicas = size()
        self.rank = rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def _own(self) -> list[int]:
        # All ranks need the same number of indices, so the first ones are repeated as often as necessary.
        padded = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return list(padded)[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        self.indices = self._own()
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
