"""Result rows with the input's kept columns beside them, and the file of a shard that has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from storage.files import GROUP_ROWS, result_options, row_groups
from storage.objects import ObjectStore
from storage.results import ResultColumns, result_schema
from storage.rows import BATCH_ROWS, RowReader
from storage.shards import Shard
from storage.source import Dataset

VECTOR_BATCH_ROWS = 4096
"""Kept columns of vectors are read in batches of this size: they are sliced, not looked at."""


def write_results(
    store: ObjectStore,
    name: str,
    tables: Iterable[pa.Table],
    shard: Shard,
    dataset: Dataset,
    columns: ResultColumns,
    *,
    on_written: Callable[[], None] = lambda: None,
) -> int:
    """Write a shard's result file: computed columns in order, joined with the input's kept ones.

    The kept columns are streamed from the input by position, so they have the input's own types and
    the whole shard is never in memory with them.

    Returns:
        Its size in bytes.
    """
    schema = result_schema(dataset.schema, columns)
    with store.writer(name, on_written=on_written) as file:
        options = result_options(schema, columns)
        with pq.ParquetWriter(file, schema, **options) as writer:
            for group in row_groups(joined(tables, shard, dataset, columns)):
                writer.write_table(group, row_group_size=GROUP_ROWS)
        return file.tell()


def joined(
    tables: Iterable[pa.Table], shard: Shard, dataset: Dataset, columns: ResultColumns
) -> Iterator[pa.Table]:
    """Result rows as `result_schema` has them, a batch at a time.

    Args:
        tables: the computed columns of all rows, in order.
        shard: which rows.
        dataset: the input, for the kept columns.
        columns: optional columns of the results.
    """
    schema = result_schema(dataset.schema, columns)
    if not columns.beside:
        for table in tables:
            yield table.select(schema.names).cast(schema)
        return
    computed = _Stream(tables)
    batch_rows = BATCH_ROWS if columns.vector is None else VECTOR_BATCH_ROWS
    reader = RowReader(dataset, columns.beside, batch_rows=batch_rows)
    try:
        for kept in reader.batches(shard):
            start = 0
            for part in computed.take(kept.num_rows):
                beside = kept.slice(start, part.num_rows)
                start += part.num_rows
                yield _beside(part, beside, schema)
        computed.end()
    finally:
        reader.close()


def _beside(part: pa.Table, kept: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    arrays = [
        kept.column(field.name)
        if field.name in kept.schema.names
        else part.column(field.name).cast(field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


class _Stream:
    """Tables of which the first rows are taken."""

    def __init__(self, tables: Iterable[pa.Table]) -> None:
        self._tables = iter(tables)
        self._held: pa.Table | None = None

    def take(self, count: int) -> Iterator[pa.Table]:
        """The next rows."""
        while count:
            held = next(self._tables) if self._held is None else self._held
            taken = min(count, held.num_rows)
            if taken:
                yield held.slice(0, taken)
            self._held = held.slice(taken) if taken < held.num_rows else None
            count -= taken

    def end(self) -> None:
        """Let the tables find that they are at their end: a check may wait there."""
        for table in self._tables:
            assert not table.num_rows
