"""Writes one shard: checkpoint parts while it runs, then the result file, then the marker.

Theory of operation. A row is in exactly one of three places: the buffer (lost in a crash), a part
(durable), the result file (readable). It only moves forward, and what is behind is deleted only
after what is ahead is durable:

    add         into the buffer
    checkpoint  buffer -> a part
    close       all parts -> the result file -> the marker; then the parts go

A writer that opens a shard again finds its terminal rows in the parts (`done`), whatever step the
last one died in, and `close` may be repeated: it writes the same file again. A committed shard may
be opened once more to compute its error rows; its file stays until a better one replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.allocator import return_unused
from storage.errors import LedgerError
from storage.marker import (
    COUNTED,
    ShardSummary,
    Tally,
    announce_replacement,
    commit_marker,
    summarise,
    tally,
    write_marker,
)
from storage.objects import ObjectStore
from storage.parts import Parts, last_of_each, parts_folder
from storage.results import (
    ORDINAL,
    ResultColumns,
    ResultRow,
    part_schema,
    result_schema,
    rows_to_table,
)
from storage.rows import RowReader
from storage.shards import Shard
from storage.source import Dataset

GROUP_ROWS = 16384
GROUP_BYTES = 32 << 20
"""A row group of a result file is closed at the first of these two."""


class ShardWriter:
    """The only writer of a shard's files. Not thread-safe.

    Args:
        store: the output.
        shard: which rows.
        dataset: the input, for the kept columns.
        columns: optional columns of the results.
        committed: the shard's marker, when its error rows are to be computed again.
        retry_errors: error rows in parts are not terminal.
        on_step: told the name of every step.

    Attributes:
        num_missing: rows that still need a result.
    """

    def __init__(
        self,
        store: ObjectStore,
        shard: Shard,
        dataset: Dataset,
        columns: ResultColumns,
        *,
        committed: ShardSummary | None,
        retry_errors: bool,
        on_step: Callable[[str], None],
    ) -> None:
        self.shard = shard
        self._store = store
        self._dataset = dataset
        self._columns = columns
        self._on_step = on_step
        self._committed = committed
        self._round = 0 if committed is None else committed.round + 1
        self._parts = Parts(store, parts_folder(shard.name, self._round), columns, on_step=on_step)
        self._buffer: list[ResultRow] = []
        self._earlier_attempts: dict[int, int] = {}
        self._done = self._find_done(retry_errors or committed is not None)
        self.num_missing = shard.num_rows - int(self._done.sum())

    # -- what is there --

    def is_done(self, ordinal: int) -> bool:
        """Whether a row has its final result."""
        return bool(self._done[ordinal])

    @property
    def done(self) -> set[int]:
        """Ordinals that have their final result; of bad rows too (C7)."""
        return set(np.flatnonzero(self._done).tolist())

    @property
    def missing(self) -> np.ndarray:
        """Ordinals of the rows that need a result, int64, ascending."""
        return np.flatnonzero(~self._done).astype(np.int64)

    def so_far(self) -> Tally:
        """Counts over the rows that are done and durable."""
        rows = self._durable(list(COUNTED))
        return tally(rows.filter(pa.array(self._done[rows.column(ORDINAL).to_numpy()])))

    def _find_done(self, retry_errors: bool) -> np.ndarray:
        """A flag a row; notes how often the rows to retry were tried."""
        done = np.zeros(self.shard.num_rows, np.bool_)
        rows = self._durable(["status", "attempts"])
        for ordinal, status, attempts in zip(
            *(column.to_pylist() for column in rows.columns), strict=True
        ):
            if retry_errors and status == "error":
                self._earlier_attempts[ordinal] = attempts
            else:
                done[ordinal] = True
        return done

    def _durable(self, columns: list[str] | None = None) -> pa.Table:
        """All durable rows in order, each once; what was computed last counts."""
        parts = self._parts.read(columns)
        if self._committed is None:
            return parts
        base = self._read_committed(self._committed, parts.schema)
        return last_of_each(pa.concat_tables([base, parts]))

    def _read_committed(self, committed: ShardSummary, schema: pa.Schema) -> pa.Table:
        """The result file of a committed shard as a part with these columns."""
        with self._store.fs.open(self._store.path(committed.file), "rb") as handle:
            table = pq.ParquetFile(handle).read(columns=schema.names[1:])
        if table.num_rows != self.shard.num_rows:
            raise LedgerError(
                f"{committed.file} has {table.num_rows} rows, its shard {self.shard.num_rows}"
            )
        ordinals = pa.array(np.arange(table.num_rows, dtype=np.int64))
        return table.add_column(0, schema.field(0), ordinals).cast(schema)

    @property
    def num_buffered(self) -> int:
        """Rows that a crash would lose now."""
        return len(self._buffer)

    # -- adding --

    def add(self, row: ResultRow) -> None:
        """Take a row's result.

        Raises:
            LedgerError: the row is not of this shard, or has its result already.
        """
        if not 0 <= row.ordinal < self.shard.num_rows:
            raise LedgerError(f"{self.shard.name} has no row {row.ordinal} ({row.row_id})")
        if self._done[row.ordinal]:
            raise LedgerError(f"{self.shard.name}: a second result for row {row.row_id}")
        row.attempts += self._earlier_attempts.get(row.ordinal, 0)
        self._done[row.ordinal] = True
        self.num_missing -= 1
        self._buffer.append(row)

    def checkpoint(self) -> None:
        """Make the buffered rows durable.

        An error leaves them in the buffer: nothing counts as written that was not (C4).

        Raises:
            OutputError: the output cannot be written.
        """
        if not self._buffer:
            return
        self._on_step("before_part")
        self._parts.append(rows_to_table(self._buffer, self._columns))
        self._buffer = []

    # -- committing --

    def close(self) -> ShardSummary:
        """Commit the shard. Safe to repeat after an error.

        Raises:
            LedgerError: ids out are not ids in.
            OutputError: the output cannot be written.
            OutputInUse: another run has taken the output over.
        """
        self.checkpoint()
        table = self._durable()
        self._check_complete(table)
        if self._committed is not None:
            announce_replacement(self._store, self.shard.name, self._committed)
        self._on_step("before_result")
        name = f"results/{self.shard.name}.parquet"
        write_results(
            self._store,
            name,
            table.drop_columns([ORDINAL]),
            self.shard,
            self._dataset,
            self._columns,
            on_written=lambda: self._on_step("result_durable"),
        )
        self._on_step("result_written")
        summary = summarise(
            self.shard.index,
            name,
            table,
            self._store,
            kept=self._columns.kept,
            round_=self._round,
        )
        self._on_step("before_marker")
        if self._committed is None:
            commit_marker(self._store, self.shard.name, summary)
        else:
            write_marker(self._store, self.shard.name, summary)
        self._on_step("marker_written")
        self._parts.delete()
        self._on_step("parts_deleted")
        return_unused()
        return summary

    def _check_complete(self, table: pa.Table) -> None:
        """Ids out are ids in: every row once, in order (C16)."""
        ordinals = table.column(ORDINAL).to_numpy()
        if self.num_missing or not np.array_equal(ordinals, np.arange(self.shard.num_rows)):
            raise LedgerError(
                f"{self.shard.name} has {len(ordinals)} results for {self.shard.num_rows} rows "
                f"({self.num_missing} missing)"
            )


def write_results(
    store: ObjectStore,
    name: str,
    table: pa.Table,
    shard: Shard,
    dataset: Dataset,
    columns: ResultColumns,
    *,
    on_written: Callable[[], None] = lambda: None,
) -> None:
    """Write a shard's result file: computed columns in order, joined with the input's kept ones.

    The kept columns are streamed from the input by position, so they have the input's own types and
    the whole shard is never in memory with them.
    """
    schema = result_schema(dataset.schema, columns)
    with (
        store.writer(name, on_written=on_written) as file,
        pq.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        for group in _groups(_joined(table, shard, dataset, columns, schema)):
            writer.write_table(group, row_group_size=GROUP_ROWS)


def _joined(
    table: pa.Table, shard: Shard, dataset: Dataset, columns: ResultColumns, schema: pa.Schema
) -> Iterator[pa.Table]:
    """Result rows with the kept columns beside them, a batch at a time."""
    if not columns.kept:
        yield table.select(schema.names).cast(schema)
        return
    start = 0
    reader = RowReader(dataset, columns.kept)
    try:
        for kept in reader.batches(shard):
            part = table.slice(start, kept.num_rows)
            arrays = [
                kept.column(field.name)
                if field.name in columns.kept
                else part.column(field.name).cast(field.type)
                for field in schema
            ]
            yield pa.Table.from_arrays(arrays, schema=schema)
            start += kept.num_rows
    finally:
        reader.close()


def _groups(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Small tables put together to row groups."""
    held: list[pa.Table] = []
    rows = num_bytes = 0
    for table in tables:
        held.append(table)
        rows += table.num_rows
        num_bytes += table.nbytes
        if rows >= GROUP_ROWS or num_bytes >= GROUP_BYTES:
            yield pa.concat_tables(held)
            held, rows, num_bytes = [], 0, 0
    if held:
        yield pa.concat_tables(held)


def rewrite_kept(
    store: ObjectStore,
    shard: Shard,
    dataset: Dataset,
    columns: ResultColumns,
    committed: ShardSummary,
) -> ShardSummary:
    """Write a committed shard anew with other kept columns. Nothing is computed.

    A crash on the way leaves a whole file, the old or the new, and a marker that says so.
    """
    computed = part_schema(columns).names[1:]
    with store.fs.open(store.path(committed.file), "rb") as handle:
        table = pq.ParquetFile(handle).read(columns=computed)
    announce_replacement(store, shard.name, committed)
    write_results(store, committed.file, table, shard, dataset, columns)
    summary = summarise(
        shard.index,
        committed.file,
        table,
        store,
        kept=columns.kept,
        round_=committed.round,
    )
    write_marker(store, shard.name, summary)
    return summary
