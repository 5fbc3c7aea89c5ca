"""Rows of a Parquet data set as batches of numpy arrays; each rank reads its row groups.

Every rank takes the same number of steps. A rank with fewer rows than others starts again with its first ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class _Piece:
    """Rows of one row group."""

    fragment: Any
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    def part(self, number: int, count: int) -> _Piece:
        """Return one of several parts of about the same size."""
        first, following = (self.start + self.rows * place // count for place in (number, number + 1))
        return _Piece(self.fragment, first, following)


def _divided(pieces: Sequence[_Piece], size: int) -> list[list[_Piece]]:
    """Assign row groups to ranks, so that the ranks have about the same number of rows."""
    if len(pieces) < size:
        # Fewer row groups than ranks: each rank reads a part of each.
        return [[piece.part(rank, size) for piece in pieces] for rank in range(size)]
    shares: list[list[_Piece]] = [[] for _ in range(size)]
    for piece in sorted(pieces, key=lambda piece: -piece.rows):
        min(shares, key=lambda share: sum(each.rows for each in share)).append(piece)
    return shares


class Shard:
    """The rows of one rank.

    Args:
        store: The store.
        path: Folder of the data set.
        columns: Columns to read.
        rank: The rank.
        size: Number of ranks.
        transformation: Takes a pandas data frame and returns the one to train with.

    Raises:
        ValueError: There are fewer rows than ranks.
    """

    def __init__(
        self,
        store: Any,
        path: str,
        columns: Sequence[str],
        rank: int,
        size: int,
        transformation: Callable[[Any], Any] | None = None,
    ) -> None:
        self._columns = list(columns)
        self._transformation = transformation
        groups = [
            _Piece(group, 0, group.row_groups[0].num_rows)
            for fragment in sorted(store.get_parquet_dataset(path).get_fragments(), key=lambda each: each.path)
            for group in fragment.split_by_row_group()
        ]
        shares = _divided([group for group in groups if group.rows], size)
        counts = [sum(piece.rows for piece in share) for share in shares]
        if min(counts) == 0:
            raise ValueError(f"the data set at {path} has {sum(counts)} rows: each of {size} ranks needs at least one")
        self._pieces = shares[rank]
        #: Number of rows of this rank.
        self.rows = counts[rank]
        #: Number of rows of the rank that has most.
        self.most_rows = max(counts)

    def steps(self, batch_size: int) -> int:
        """Return the steps in which each rank reads all of its rows.

        Args:
            batch_size: Rows of a batch.

        Returns:
            The number, which is the same on all ranks.
        """
        return math.ceil(self.most_rows / batch_size)

    def batches(
        self,
        batch_size: int,
        steps: int | None = None,
        seed: Sequence[int] | None = None,
        buffer_size: int | None = None,
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yield batches.

        Args:
            batch_size: Rows of a batch. The last one of a pass over the rows may be smaller.
            steps: Number of batches; by default that of one pass over this rank's rows.
            seed: Seed of the order of rows; without one they are not shuffled.
            buffer_size: Rows that are shuffled together; all by default.

        Yields:
            Arrays by column; the first dimension is that of rows.
        """
        left = math.ceil(self.rows / batch_size) if steps is None else steps
        number = 0
        while left > 0:
            random = None if seed is None else np.random.default_rng([*seed, number])
            for batch in self._pass(batch_size, random, buffer_size):
                yield batch
                left -= 1
                if left == 0:
                    return
            number += 1

    def _pass(
        self, batch_size: int, random: np.random.Generator | None, buffer_size: int | None
    ) -> Iterator[dict[str, np.ndarray]]:
        import pyarrow

        rest = None
        for table in self._chunks(random, buffer_size):
            whole = table if rest is None else pyarrow.concat_tables([rest, table])
            count = whole.num_rows - whole.num_rows % batch_size
            arrays = {name: _array(name, whole[name].slice(0, count)) for name in self._columns if count}
            for start in range(0, count, batch_size):
                yield {name: array[start : start + batch_size] for name, array in arrays.items()}
            rest = whole.slice(count)
        if rest is not None and rest.num_rows:
            yield {name: _array(name, rest[name]) for name in self._columns}

    def _chunks(self, random: np.random.Generator | None, buffer_size: int | None) -> Iterator[Any]:
        import pyarrow

        order = range(len(self._pieces)) if random is None else random.permutation(len(self._pieces))
        held: list[Any] = []
        for index in order:
            held.append(self._read(self._pieces[index]))
            if random is None or (buffer_size and sum(table.num_rows for table in held) >= buffer_size):
                yield _shuffled(pyarrow.concat_tables(held), random)
                held = []
        if held:
            yield _shuffled(pyarrow.concat_tables(held), random)

    def _read(self, piece: _Piece) -> Any:
        import pyarrow

        columns = None if self._transformation else self._columns
        table = piece.fragment.to_table(columns=columns).slice(piece.start, piece.rows)
        if self._transformation is None:
            return table
        return pyarrow.Table.from_pandas(self._transformation(table.to_pandas()), preserve_index=False)


def _shuffled(table: Any, random: np.random.Generator | None) -> Any:
    return table if random is None else table.take(random.permutation(table.num_rows))


def _array(name: str, column: Any) -> np.ndarray:
    """Return a column as an array of numbers."""
    import pyarrow
    import pyarrow.compute

    if column.null_count:
        raise ValueError(f"column `{name}` has {column.null_count} null(s): fill or drop such rows before the training")
    count, is_scalar = len(column), True
    while pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
        lengths = pyarrow.compute.unique(pyarrow.compute.list_value_length(column))
        if len(lengths) > 1:
            raise ValueError(f"arrays of column `{name}` have different lengths, such as {lengths.to_pylist()[:3]}")
        column, is_scalar = pyarrow.compute.list_flatten(column), False
    if not (
        pyarrow.types.is_integer(column.type)
        or pyarrow.types.is_floating(column.type)
        or pyarrow.types.is_boolean(column.type)
    ):
        raise ValueError(f"column `{name}` is of type {column.type}: expected numbers, or arrays or vectors of numbers")
    values = column.to_numpy()
    return values if is_scalar else values.reshape(count, -1)
