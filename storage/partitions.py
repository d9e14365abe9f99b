"""Partitions: the rows of one key, which come out as one file in a folder of their own.

A job's partitions are found by reading the key columns only (`find_partitions`), put together to
shards of whole partitions by whoever plans (`plan_partitions`), and kept with the record, in
`_plan/partitions.parquet`: there may be as many as there are rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import LedgerError
from storage.hive import as_keys, folders, key_schema, runs_of
from storage.objects import ObjectStore
from storage.rows import RowReader, whole
from storage.shards import Shard, Span, TokenCost, shards_at
from storage.source import Dataset

PLAN = "_plan"
PARTITIONS = f"{PLAN}/partitions.parquet"
FILE = "part-00000.parquet"
"""Of every partition: it has one."""
READ_ROWS = 65536
_SHARD, _FOLDER, _NUM_ROWS = "__shard", "__folder", "__num_rows"


class ShardPartitions(NamedTuple):
    """The partitions of one shard, in the order of its rows.

    Attributes:
        folders: of each, relative to the results.
        num_rows: of each, int64.
    """

    folders: list[str]
    num_rows: np.ndarray

    def files(self, results: str) -> list[str]:
        """The file of each, relative to the output."""
        return [f"{results}/{folder}/{FILE}" for folder in self.folders]


@dataclass(frozen=True, slots=True)
class FoundPartitions:
    """Partitions of an input in the order of its rows.

    Attributes:
        keys: [P] the key columns.
        folders: [P] of each, relative to the results.
        num_rows: [P] int64.
        grouped: all rows of each key are together. If not, the search ended where that was seen:
            the input is to be grouped (`grouping.py`).
    """

    keys: pa.Table
    folders: pa.Array
    num_rows: np.ndarray
    grouped: bool

    def __len__(self) -> int:
        return len(self.num_rows)


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """Which partitions each shard has. As large as there are keys, so it is columns, not objects.

    Attributes:
        keys: [P] the key columns, in the order of shards and rows.
        folders: [P] of each partition, relative to the results.
        num_rows: [P] int64.
        shards: [P] int64, the shard of each, ascending.
    """

    keys: pa.Table
    folders: pa.Array
    num_rows: np.ndarray
    shards: np.ndarray

    def __len__(self) -> int:
        return len(self.num_rows)

    def of(self, shard_index: int) -> ShardPartitions:
        """The partitions of a shard."""
        start, stop = np.searchsorted(self.shards, [shard_index, shard_index + 1])
        return ShardPartitions(
            self.folders.slice(start, stop - start).to_pylist(), self.num_rows[start:stop]
        )

    def num_of(self, shard_index: int) -> int:
        """How many a shard has."""
        start, stop = np.searchsorted(self.shards, [shard_index, shard_index + 1])
        return int(stop - start)

    def check(self, shards: Sequence[Shard]) -> None:
        """The partitions of each shard have its rows.

        Raises:
            LedgerError: they have not.
        """
        rows = np.bincount(self.shards, weights=self.num_rows, minlength=len(shards))
        for shard, num_rows in zip(shards, rows.tolist(), strict=True):
            if shard.num_rows != num_rows:
                raise LedgerError(
                    f"the partitions of {shard.name} have {num_rows:.0f} rows, and it has "
                    f"{shard.num_rows}"
                )

    def write(self, store: ObjectStore) -> None:
        """Keep it with the output."""
        ours = pa.table(
            {_SHARD: self.shards, _FOLDER: self.folders, _NUM_ROWS: self.num_rows},
            schema=_OURS,
        )
        table = ours
        for name in self.keys.column_names:
            table = table.append_column(self.keys.field(name), self.keys.column(name))
        with store.writer(PARTITIONS) as file:
            pq.write_table(table, file, compression="zstd")

    @classmethod
    def read(cls, store: ObjectStore) -> PartitionPlan:
        """The one that an output has.

        Raises:
            LedgerError: there is none, or it is damaged.
        """
        try:
            with store.fs.open(store.path(PARTITIONS), "rb") as handle:
                table = pq.ParquetFile(handle).read().combine_chunks()
            return cls(
                table.drop_columns(_OURS.names),
                _array(table.column(_FOLDER)),
                table.column(_NUM_ROWS).to_numpy(),
                table.column(_SHARD).to_numpy(),
            )
        except (OSError, pa.ArrowException, KeyError) as fault:
            raise LedgerError(
                f"{store.path(PARTITIONS)} is gone or damaged ({fault}); --overwrite starts anew"
            ) from fault


_OURS = pa.schema([(_SHARD, pa.int64()), (_FOLDER, pa.string()), (_NUM_ROWS, pa.int64())])


def _array(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def find_partitions(
    dataset: Dataset,
    columns: Sequence[str],
    *,
    limit: int | None = None,
    on_batch: Callable[[], None] = lambda: None,
) -> FoundPartitions:
    """The runs of equal keys of an input. Reads the key columns only, a batch at a time.

    Args:
        dataset: the input.
        columns: the key columns, in the order of their folders.
        limit: only the first rows.
        on_batch: called for every batch.

    Raises:
        InputError: the input cannot be partitioned so; says why.
    """
    found = _Runs(key_schema(dataset.schema, columns))
    reader = RowReader(dataset, columns, batch_rows=READ_ROWS)
    spans = tuple(first_rows(whole(dataset), limit))
    try:
        for batch in reader.batches(Shard(0, spans, 0)):
            on_batch()
            if not found.add(batch):
                return found.ended(grouped=False)
    finally:
        reader.close()
    return found.ended(grouped=True)


def partition_sizes(
    dataset: Dataset, columns: Sequence[str], *, limit: int | None = None
) -> np.ndarray:
    """Rows of each key, int64 [P], whether or not they are together; keys as they first appear.

    Reads the key columns only, a batch at a time.

    Raises:
        InputError: the input cannot be partitioned so; says why.
    """
    schema = key_schema(dataset.schema, columns)
    counts: Counter[str] = Counter()
    reader = RowReader(dataset, columns, batch_rows=READ_ROWS)
    try:
        for batch in reader.batches(Shard(0, tuple(first_rows(whole(dataset), limit)), 0)):
            for item in folders(as_keys(batch, schema)).value_counts().to_pylist():
                counts[item["values"]] += item["counts"]
    finally:
        reader.close()
    return np.fromiter(counts.values(), np.int64, len(counts))


def first_rows(spans: Iterable[Span], limit: int | None) -> Iterator[Span]:
    """Spans of the first rows; of all without a limit."""
    left = limit
    for span in spans:
        if left is None:
            yield span
            continue
        count = min(left, span.stop - span.start)
        left -= count
        if count:
            yield span._replace(stop=span.start + count)


class _Runs:
    """Runs of equal keys, as batches come."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._last: pa.Table | None = None
        self._num_rows = 0
        self._seen: set[str] = set()
        self._keys: list[pa.Table] = []
        self._folders: list[pa.Array] = []
        self._starts: list[np.ndarray] = []

    def add(self, batch: pa.RecordBatch) -> bool:
        """Take the next rows; False when a key comes back that had ended."""
        if not batch.num_rows:
            return True
        keys = as_keys(batch, self._schema)
        carried = 0 if self._last is None else 1
        joined = keys if self._last is None else pa.concat_tables([self._last, keys])
        starts = runs_of(joined)
        if not carried:
            starts = np.concatenate([[0], starts])
        begun = joined.take(starts)
        paths = folders(begun)
        self._last = keys.slice(keys.num_rows - 1)
        self._starts.append(starts - carried + self._num_rows)
        self._num_rows += keys.num_rows
        self._keys.append(begun)
        self._folders.append(paths)
        num_seen = len(self._seen)
        self._seen.update(paths.to_pylist())
        return len(self._seen) == num_seen + len(paths)

    def ended(self, *, grouped: bool) -> FoundPartitions:
        starts = np.concatenate([*self._starts, [self._num_rows]]).astype(np.int64)
        return FoundPartitions(
            pa.concat_tables([self._schema.empty_table(), *self._keys]).combine_chunks(),
            pa.concat_arrays([pa.array([], pa.string()), *self._folders]),
            np.diff(starts),
            grouped,
        )


class Planned(NamedTuple):
    """Shards of whole partitions, and which those are."""

    shards: tuple[Shard, ...]
    partitions: PartitionPlan


def plan_partitions(
    dataset: Dataset,
    found: FoundPartitions,
    bounds: Iterable[tuple[int, int]],
    *,
    cost: TokenCost,
) -> Planned:
    """The plan of a job whose shards are runs of partitions.

    Args:
        dataset: grouped.
        found: its partitions.
        bounds: of each shard the partitions `[first, stop)`; together all of them, in order.
        cost: of rows.

    Raises:
        ValueError: the bounds leave partitions out, or have them twice.
    """
    if not found.grouped:
        raise ValueError("the rows of a key are not together; group the input first")
    pairs = np.array(list(bounds), np.int64).reshape(-1, 2)
    edges = np.concatenate([[0], pairs[:, 1]])
    if not np.array_equal(pairs[:, 0], edges[:-1]) or edges[-1] != len(found):
        raise ValueError(f"the shards have not each of the {len(found)} partitions once, in order")
    rows = np.concatenate([[0], np.cumsum(found.num_rows)])
    shards = shards_at(dataset, rows[pairs[:, 1]].tolist(), cost=cost)
    owners = np.repeat(np.arange(len(pairs), dtype=np.int64), np.diff(edges))
    plan = PartitionPlan(found.keys, found.folders, found.num_rows, owners)
    plan.check(shards)
    return Planned(shards, plan)
