"""Which worker has which row. Owned by the coordinator's thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from flows.fleet.messages import Assign, Ordinals
from flows.queues import RowKey
from storage.shards import Shard

NOBODY = -1
ANSWERED = -2


class RowOwners:
    """The rows of open shards by worker. A row is somebody's, nobody's or answered.

    A shard is open from `open` until its last row is answered.
    """

    def __init__(self) -> None:
        self._shards: dict[int, Shard] = {}
        self._owner: dict[int, NDArray[np.int32]] = {}
        self._open_rows: dict[int, int] = {}
        self._rows_of: Counter[int] = Counter()

    def __len__(self) -> int:
        """Open shards."""
        return len(self._shards)

    def open(self, shard: Shard, missing: Ordinals) -> Assign:
        """A shard's rows that have no result are nobody's."""
        owner = np.full(shard.num_rows, ANSWERED, dtype=np.int32)
        owner[missing] = NOBODY
        if len(missing):
            self._shards[shard.index] = shard
            self._owner[shard.index] = owner
            self._open_rows[shard.index] = len(missing)
        return Assign(shard, missing)

    def give(self, part: Assign, worker: int) -> None:
        """Rows become a worker's, whoever had them."""
        owner = self._owner[part.shard.index]
        for former, count in zip(*np.unique(owner[part.ordinals], return_counts=True), strict=True):
            if former == ANSWERED:
                raise ValueError(f"{count} rows of {part.shard.name} are answered already")
            if former != NOBODY:
                self._rows_of[int(former)] -= int(count)
        owner[part.ordinals] = worker
        if worker != NOBODY:
            self._rows_of[worker] += part.num_rows

    def parts(self, keys: Iterable[RowKey]) -> list[Assign]:
        """Rows by shard, in order."""
        found: dict[int, list[int]] = {}
        for index, ordinal in keys:
            found.setdefault(index, []).append(ordinal)
        return [
            Assign(self._shards[index], np.array(sorted(ordinals), dtype=np.int64))
            for index, ordinals in sorted(found.items())
        ]

    def owner(self, key: RowKey) -> int:
        """A worker, `NOBODY` or `ANSWERED`."""
        owner = self._owner.get(key[0])
        return ANSWERED if owner is None else int(owner[key[1]])

    def shard(self, index: int) -> Shard:
        """An open shard."""
        return self._shards[index]

    def owned(self, index: int, ordinals: Ordinals, worker: int) -> NDArray[np.bool_]:
        """Which rows of a shard are a worker's."""
        owner = self._owner.get(index)
        if owner is None:
            return np.zeros(len(ordinals), dtype=np.bool_)
        return owner[ordinals] == worker

    def answer(self, key: RowKey) -> None:
        """A row has its result."""
        self.answer_all(key[0], np.array([key[1]], dtype=np.int64))

    def answer_all(self, index: int, ordinals: Ordinals) -> None:
        """Rows of a shard have their results."""
        owner = self._owner[index]
        former, counts = np.unique(owner[ordinals], return_counts=True)
        if ANSWERED in former:
            again = ordinals[owner[ordinals] == ANSWERED][0]
            raise ValueError(f"row {again} of {self._shards[index].name} is answered already")
        for worker, count in zip(former.tolist(), counts.tolist(), strict=True):
            if worker != NOBODY:
                self._rows_of[worker] -= count
        owner[ordinals] = ANSWERED
        self._open_rows[index] -= len(ordinals)
        if not self._open_rows[index]:
            for table in (self._shards, self._owner, self._open_rows):
                del table[index]

    @property
    def num_open(self) -> int:
        """Rows of open shards without a result."""
        return sum(self._open_rows.values())

    def num_rows(self, worker: int) -> int:
        """Rows that a worker has."""
        return self._rows_of[worker]

    def rows_of(self, worker: int) -> list[Assign]:
        """What a worker has, by shard."""
        return [
            Assign(self._shards[index], np.flatnonzero(owner == worker).astype(np.int64))
            for index, owner in sorted(self._owner.items())
            if (owner == worker).any()
        ]

    def check_integrity(self, num_workers: int) -> None:
        """Recount everything.

        Raises:
            AssertionError: a count is wrong.
        """
        recount: Counter[int] = Counter()
        for index, owner in self._owner.items():
            open_rows = owner[owner != ANSWERED]
            assert len(open_rows) == self._open_rows[index] > 0, f"open rows of shard {index}"
            recount.update(int(worker) for worker in open_rows if worker != NOBODY)
        for worker in range(num_workers):
            assert recount[worker] == self._rows_of[worker], f"rows of worker {worker}"
