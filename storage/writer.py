"""Writes one shard: checkpoint parts while it runs, then the result file, then the marker.

Theory of operation. A row is in exactly one of three places: the buffer (lost in a crash), a part
(durable), the result file (readable). It only moves forward, and what is behind is deleted only
after what is ahead is durable:

    add         into the buffer
    checkpoint  buffer -> a part
    close       all parts -> the result file -> the marker; then the parts go

A writer that opens a shard again finds its terminal rows in the parts (`done`), whatever step the
last one died in, and `close` may be repeated: it writes the same file again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.errors import LedgerError
from storage.objects import ObjectStore
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

COMPACT_PARTS = 24
"""So many parts are merged into one: opening a shard costs the same however long it has run (C7).
"""

WRITE_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSummary:
    """What a marker says of a committed shard.

    Attributes:
        index: of the shard.
        file: the result file, relative to the output.
        num_rows: rows in it.
        num_bytes: its size.
        by_status: rows by status.
        by_finish_reason: rows by finish reason, where they have one.
        prompt_tokens: of all rows.
        completion_tokens: of all rows.
    """

    index: int
    file: str
    num_rows: int
    num_bytes: int
    by_status: Mapping[str, int]
    by_finish_reason: Mapping[str, int]
    prompt_tokens: int
    completion_tokens: int

    @property
    def num_errors(self) -> int:
        return self.by_status.get("error", 0)

    def to_json(self) -> bytes:
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> ShardSummary:
        return cls(**raw)


class ShardWriter:
    """The only writer of a shard's files. Not thread-safe.

    Args:
        store: the output.
        shard: which rows.
        dataset: the input, for the kept columns.
        columns: optional columns of the results.
        committed: the shard's marker, when its error rows are to be computed again.
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
        on_step: Callable[[str], None],
    ) -> None:
        self.shard = shard
        self._store = store
        self._dataset = dataset
        self._columns = columns
        self._on_step = on_step
        self._folder = f"_checkpoints/{shard.name}"
        self._buffer: list[ResultRow] = []
        self._base = None if committed is None else self._read_committed(committed)
        self._parts = store.list(self._folder)
        self._next_part = 1 + max((_part_number(name) for name in self._parts), default=0)
        self._earlier_attempts: dict[int, int] = {}
        self._done = bytearray(shard.num_rows)
        for ordinal in self._read_done():
            self._done[ordinal] = 1
        self.num_missing = shard.num_rows - sum(self._done)

    # -- what is there
    # ------------------------------------------------------------------------------

    def is_done(self, ordinal: int) -> bool:
        """Whether a row has its final result."""
        return bool(self._done[ordinal])

    @property
    def done(self) -> set[int]:
        """Ordinals that have their final result."""
        return {ordinal for ordinal, flag in enumerate(self._done) if flag}

    def counts(self) -> Mapping[str, int]:
        """Rows that are done, by status."""
        return Counter(self._rows_so_far().column("status").to_pylist())

    def _read_done(self) -> Iterator[int]:
        if self._base is not None:
            status = self._base.column("status").to_pylist()
            attempts = self._base.column("attempts").to_pylist()
            for ordinal, state in enumerate(status):
                if state == "error":
                    self._earlier_attempts[ordinal] = attempts[ordinal]
                else:
                    yield ordinal
        for name in self._parts:
            yield from self._read_part(name, [ORDINAL]).column(ORDINAL).to_pylist()

    def _read_committed(self, committed: ShardSummary) -> pa.Table:
        """The result file of a committed shard as a part, kept columns left out."""
        computed = part_schema(self._columns).names[1:]
        table = self._read(committed.file, computed)
        if table.num_rows != self.shard.num_rows:
            raise LedgerError(
                f"{committed.file} has {table.num_rows} rows, its shard {self.shard.num_rows}"
            )
        ordinals = pa.array(np.arange(table.num_rows, dtype=np.int64))
        return table.add_column(0, part_schema(self._columns).field(ORDINAL), ordinals)

    def _read_part(self, name: str, columns: list[str] | None = None) -> pa.Table:
        return self._read(name, columns)

    def _read(self, name: str, columns: list[str] | None) -> pa.Table:
        with self._store.fs.open(self._store.path(name), "rb") as handle:
            return pq.ParquetFile(handle).read(columns=columns)

    # -- adding
    # ---------------------------------------------------------------------------------------

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
        self._done[row.ordinal] = 1
        self.num_missing -= 1
        self._buffer.append(row)

    def checkpoint(self) -> None:
        """Make the buffered rows durable.

        An error leaves them in the buffer: nothing counts as written that was not (C4).
        """
        if not self._buffer:
            return
        self._on_step("before_part")
        self._write_part(rows_to_table(self._buffer, self._columns))
        self._buffer = []
        self._on_step("part_written")
        if len(self._parts) >= COMPACT_PARTS:
            self._compact()

    def _write_part(self, table: pa.Table) -> None:
        name = f"{self._folder}/part-{self._next_part:06d}.parquet"
        with self._store.writer(name, on_written=lambda: self._on_step("part_durable")) as file:
            pq.write_table(table, file)
        self._next_part += 1
        self._parts.append(name)

    def _compact(self) -> None:
        """Merge all parts into one. Between the two steps rows are there twice, and read once."""
        old = list(self._parts)
        self._write_part(self._part_rows())
        self._on_step("compacted")
        for name in old:
            self._store.delete(name)
        self._parts = self._parts[len(old) :]

    def _part_rows(self) -> pa.Table:
        """Rows of all parts, each once."""
        schema = part_schema(self._columns)
        tables = [self._read_part(name).cast(schema) for name in self._parts]
        return _first_of_each(pa.concat_tables([schema.empty_table(), *tables]))

    def _rows_so_far(self) -> pa.Table:
        """All durable rows in order, each once; a retried row is the newer one."""
        parts = self._part_rows()
        if self._base is None:
            return parts.sort_by(ORDINAL)
        good = self._base.filter(pc.not_equal(self._base.column("status"), "error"))
        both = pa.concat_tables([parts, good.cast(parts.schema)])
        return _first_of_each(both).sort_by(ORDINAL)

    # -- committing
    # -----------------------------------------------------------------------------------

    def close(self) -> ShardSummary:
        """Commit the shard.

        Raises:
            LedgerError: ids out are not ids in.
        """
        self.checkpoint()
        table = self._rows_so_far()
        self._check_complete(table)
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
        summary = summarise(self.shard.index, name, table, self._store)
        self._on_step("before_marker")
        self._store.write(f"_markers/{self.shard.name}.json", summary.to_json())
        self._on_step("marker_written")
        self._store.delete_folder(self._folder)
        self._on_step("parts_deleted")
        return summary

    def _check_complete(self, table: pa.Table) -> None:
        """Ids out are ids in: every row once, in order (C16)."""
        ordinals = table.column(ORDINAL).to_numpy()
        if not np.array_equal(ordinals, np.arange(self.shard.num_rows)):
            raise LedgerError(
                f"{self.shard.name} has {len(ordinals)} results for {self.shard.num_rows} rows "
                f"({self.num_missing} missing)"
            )


def _part_number(name: str) -> int:
    return int(name.rsplit("-", 1)[-1].split(".")[0])


def _first_of_each(table: pa.Table) -> pa.Table:
    """The first row of each ordinal."""
    _, first = np.unique(table.column(ORDINAL).to_numpy(), return_index=True)
    return table if len(first) == table.num_rows else table.take(np.sort(first))


def write_results(
    store: ObjectStore,
    name: str,
    table: pa.Table,
    shard: Shard,
    dataset: Dataset,
    columns: ResultColumns,
    *,
    on_written: Callable[[], None] | None = None,
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
        start = 0
        for kept in _kept_batches(shard, dataset, columns):
            part = table.slice(start, kept.num_rows)
            arrays = [
                kept.column(field.name)
                if field.name in columns.kept
                else part.column(field.name).combine_chunks().cast(field.type)
                for field in schema
            ]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            start += kept.num_rows
        if start == 0 and not shard.num_rows:
            writer.write_table(schema.empty_table())


def _kept_batches(
    shard: Shard, dataset: Dataset, columns: ResultColumns
) -> Iterator[pa.RecordBatch | pa.Table]:
    if columns.kept:
        reader = RowReader(dataset, columns.kept, batch_rows=WRITE_ROWS)
        try:
            yield from reader.batches(shard)
        finally:
            reader.close()
        return
    for start in range(0, shard.num_rows, WRITE_ROWS):
        size = min(WRITE_ROWS, shard.num_rows - start)
        yield pa.table({"": pa.nulls(size)})


def summarise(index: int, name: str, table: pa.Table, store: ObjectStore) -> ShardSummary:
    """The marker of a shard whose result file has been written."""
    reasons = Counter(r for r in table.column("finish_reason").to_pylist() if r is not None)
    return ShardSummary(
        index=index,
        file=name,
        num_rows=table.num_rows,
        num_bytes=int(store.fs.size(store.path(name))),
        by_status=dict(Counter(table.column("status").to_pylist())),
        by_finish_reason=dict(reasons),
        prompt_tokens=pc.sum(table.column("prompt_tokens")).as_py() or 0,
        completion_tokens=pc.sum(table.column("completion_tokens")).as_py() or 0,
    )


def rewrite_kept(
    store: ObjectStore,
    shard: Shard,
    dataset: Dataset,
    columns: ResultColumns,
    committed: ShardSummary,
) -> ShardSummary:
    """Write a committed shard anew with other kept columns. Nothing is computed."""
    computed = part_schema(columns).names[1:]
    with store.fs.open(store.path(committed.file), "rb") as handle:
        table = pq.ParquetFile(handle).read(columns=computed)
    write_results(store, committed.file, table, shard, dataset, columns)
    summary = summarise(shard.index, committed.file, table, store)
    store.write(f"_markers/{shard.name}.json", summary.to_json())
    return summary
