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

Vectors come in blocks. A shard that is whole in the buffer is written from there, without a part on
the way: a crash then repeats it, which is one encode call. Else the parts are streamed in order, so
that a shard larger than memory can be closed. A shard of partitions has a file for each of them in
place of the one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.allocator import return_unused
from storage.committed import CommittedRows
from storage.errors import LedgerError
from storage.files import result_options
from storage.joined import joined, write_results
from storage.marker import (
    Counting,
    ShardSummary,
    Tally,
    announce_replacement,
    commit_marker,
    counted,
    summarise,
    tally,
    write_marker,
)
from storage.merge import checked, in_order, last_of_each, merged
from storage.objects import ObjectStore
from storage.partition_files import Written, write_partitions
from storage.partitions import ShardPartitions
from storage.parts import Parts, parts_folder
from storage.results import (
    ORDINAL,
    ResultColumns,
    ResultRow,
    part_schema,
    result_schema,
    rows_to_table,
)
from storage.shards import Shard
from storage.source import Dataset

RESULTS = "results"


class ShardWriter:
    """The only writer of a shard's files. Not thread-safe.

    Args:
        store: the output.
        shard: which rows.
        dataset: the input, for the kept columns.
        columns: optional columns of the results.
        committed: the shard's marker, when its error rows are to be computed again.
        retry_errors: error rows in parts are not terminal.
        partitions: those of the shard; None: it has one file.
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
        partitions: ShardPartitions | None = None,
        on_step: Callable[[str], None],
    ) -> None:
        self.shard = shard
        self._store = store
        self._dataset = dataset
        self._columns = columns
        self._on_step = on_step
        self._committed = committed
        self._partitions = partitions
        self._round = 0 if committed is None else committed.round + 1
        self._schema = part_schema(columns)
        self._parts = Parts(store, parts_folder(shard.name, self._round), columns, on_step=on_step)
        self._rows: list[ResultRow] = []
        self._blocks: list[pa.Table] = []
        self._num_buffered = 0
        self._summary: ShardSummary | None = None
        self._earlier_attempts = np.zeros(shard.num_rows, np.int32)
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
        rows = self._durable(counted(self._schema.names))
        return tally(rows.filter(pa.array(self._done[rows.column(ORDINAL).to_numpy()])))

    def _find_done(self, retry_errors: bool) -> np.ndarray:
        """A flag a row; notes how often the rows to retry were tried."""
        done = np.zeros(self.shard.num_rows, np.bool_)
        rows = self._durable(["status", "attempts"])
        ordinals = rows.column(ORDINAL).to_numpy()
        done[ordinals] = True
        if retry_errors:
            failed = pc.call_function(
                "equal", [rows.column("status"), pa.scalar("error")]
            ).to_numpy()
            done[ordinals[failed]] = False
            attempts = rows.column("attempts").to_numpy()
            self._earlier_attempts[ordinals[failed]] = attempts[failed]
        return done

    def _durable(self, columns: list[str] | None = None) -> pa.Table:
        """All durable rows in order, each once; what was computed last counts."""
        parts = self._parts.read(columns)
        if self._committed is None:
            return parts
        base = self._base(self._committed).read(parts.schema)
        return last_of_each(pa.concat_tables([base, parts]))

    def _base(self, committed: ShardSummary) -> CommittedRows:
        return CommittedRows(self._store, self.shard, result_files(committed, self._partitions))

    @property
    def num_buffered(self) -> int:
        """Rows that a crash would lose now."""
        return self._num_buffered

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
        if self._columns.vector is not None and row.status not in ("error", "skipped"):
            raise LedgerError(
                f"{self.shard.name}: row {row.row_id} has the status {row.status!r} and no vector; "
                "rows with vectors come in blocks"
            )
        row.attempts += int(self._earlier_attempts[row.ordinal])
        self._done[row.ordinal] = True
        self.num_missing -= 1
        self._num_buffered += 1
        self._rows.append(row)

    def add_block(self, ordinals: np.ndarray, table: pa.Table) -> None:
        """Take the results of many rows.

        Nothing is copied; in ascending order the rows are written straight from the table's memory.

        Args:
            ordinals: int64 [N], positions within the shard.
            table: N rows with the columns that a run computes (`storage.results.computed_fields`),
                such as of `storage.vectors.vectors_table`.

        Raises:
            LedgerError: a row is not of this shard, or has its result already, or the columns are
                others. Then none of the block is taken.
        """
        self._check_block(ordinals, table)
        earlier = self._earlier_attempts[ordinals]
        if earlier.any():
            name = "attempts"
            attempts = table.column(name).to_numpy() + earlier
            index = table.column_names.index(name)
            table = table.set_column(index, table.field(name), pa.array(attempts, pa.int32()))
        block = table.add_column(0, self._schema.field(0), pa.array(ordinals))
        self._blocks.append(block.select(self._schema.names).cast(self._schema))
        self._done[ordinals] = True
        self.num_missing -= len(ordinals)
        self._num_buffered += len(ordinals)

    def _check_block(self, ordinals: np.ndarray, table: pa.Table) -> None:
        name = self.shard.name
        if ordinals.dtype != np.int64 or ordinals.shape != (table.num_rows,):
            raise LedgerError(
                f"{name}: a block of {table.num_rows} rows needs as many int64 ordinals, got "
                f"{ordinals.dtype} {list(ordinals.shape)}"
            )
        lacking = set(self._schema.names) - {ORDINAL, *table.column_names}
        if lacking:
            raise LedgerError(f"{name}: a block lacks the columns {', '.join(sorted(lacking))}")
        if not len(ordinals):
            return
        if ordinals.min() < 0 or ordinals.max() >= self.shard.num_rows:
            raise LedgerError(
                f"{name} has {self.shard.num_rows} rows; a block has the ordinals "
                f"{ordinals.min()} to {ordinals.max()}"
            )
        again = self._done[ordinals]
        if again.any():
            raise LedgerError(f"{name}: a second result for row {ordinals[again][0]} in a block")
        if len(np.unique(ordinals)) != len(ordinals):
            raise LedgerError(f"{name}: a block has a row twice")

    def checkpoint(self) -> None:
        """Make the buffered rows durable.

        An error leaves them in the buffer: nothing counts as written that was not (C4).

        Raises:
            OutputError: the output cannot be written.
        """
        if not self._num_buffered:
            return
        self._on_step("before_part")
        self._parts.append(self._buffered())
        self._rows, self._blocks, self._num_buffered = [], [], 0

    def _buffered(self) -> pa.Table:
        """The buffer as a part; sorted where there are vectors."""
        rows = [rows_to_table(self._rows, self._columns)] if self._rows else []
        table = pa.concat_tables([*self._blocks, *rows])
        return table if self._columns.vector is None else in_order(table)

    # -- committing --

    def close(self) -> ShardSummary:
        """Commit the shard. Safe to repeat after an error.

        Raises:
            LedgerError: ids out are not ids in.
            OutputError: the output cannot be written.
            OutputInUse: another run has taken the output over.
        """
        if self._summary is not None:  # only the parts were still to go
            return self._tidy(self._summary)
        if self.num_missing:
            num_done = self.shard.num_rows - self.num_missing
            raise LedgerError(
                f"{self.shard.name} has {num_done} results for {self.shard.num_rows} rows "
                f"({self.num_missing} missing)"
            )
        tables = self._all_rows()
        if self._committed is not None:
            announce_replacement(self._store, self.shard.name, self._committed)
        self._on_step("before_result")
        counting = Counting()
        rows = counting.passing(checked(tables, self.shard.num_rows, self.shard.name))
        written = write_shard(
            self._store,
            self.shard,
            rows,
            self._dataset,
            self._columns,
            self._partitions,
            on_step=self._on_step,
        )
        self._on_step("result_written")
        summary = summarise(
            self.shard.index,
            result_name(self.shard, self._partitions),
            counting,
            num_bytes=written.num_bytes,
            kept=self._columns.kept,
            round_=self._round,
            num_files=written.num_files,
        )
        self._commit(summary)
        return self._tidy(summary)

    def _commit(self, summary: ShardSummary) -> None:
        self._on_step("before_marker")
        if self._committed is None:
            commit_marker(self._store, self.shard.name, summary)
        else:
            write_marker(self._store, self.shard.name, summary)
        self._summary = summary
        self._on_step("marker_written")

    def _tidy(self, summary: ShardSummary) -> ShardSummary:
        """Let go of what the result files have."""
        self._parts.delete()
        self._on_step("parts_deleted")
        self._rows, self._blocks, self._num_buffered = [], [], 0
        return_unused()
        return summary

    def _all_rows(self) -> Iterable[pa.Table]:
        """All rows in order. Texts, and vectors of which some are in parts already, are made
        durable first.
        """
        whole = self._num_buffered == self.shard.num_rows and not len(self._parts)
        if self._columns.vector is not None and whole:
            return [self._buffered()]
        self.checkpoint()
        if self._columns.vector is None:
            return [self._durable()]
        base = [] if self._committed is None else self._base(self._committed).source(self._schema)
        return merged([*base, *self._parts.sources()])


def result_name(shard: Shard, partitions: ShardPartitions | None) -> str:
    """The result file of a shard, or of one of several partitions the folder of theirs."""
    if partitions is None:
        return f"{RESULTS}/{shard.name}.parquet"
    files = partitions.files(RESULTS)
    return files[0] if len(files) == 1 else RESULTS


def result_files(committed: ShardSummary, partitions: ShardPartitions | None) -> list[str]:
    """The result files of a committed shard, in the order of its rows."""
    return [committed.file] if partitions is None else partitions.files(RESULTS)


def write_shard(
    store: ObjectStore,
    shard: Shard,
    rows: Iterable[pa.Table],
    dataset: Dataset,
    columns: ResultColumns,
    partitions: ShardPartitions | None,
    *,
    on_step: Callable[[str], None] = lambda _: None,
) -> Written:
    """Write the result file of a shard, or of each of its partitions.

    Args:
        store: the output.
        shard: which rows.
        rows: the computed columns of all of them, in order.
        dataset: the input, for the kept columns.
        columns: optional columns of the results.
        partitions: those of the shard; None: it has one file.
        on_step: told the name of every step.
    """
    if partitions is None:
        name = result_name(shard, None)
        num_bytes = write_results(
            store, name, rows, shard, dataset, columns,
            on_written=lambda: on_step("result_durable"),
        )  # fmt: skip
        return Written(1, num_bytes)
    schema = result_schema(dataset.schema, columns)
    return write_partitions(
        store,
        joined(rows, shard, dataset, columns),
        partitions.files(RESULTS),
        partitions.num_rows.tolist(),
        schema=schema,
        options=result_options(schema, columns),
        on_step=on_step,
    )


def rewrite_kept(
    store: ObjectStore,
    shard: Shard,
    dataset: Dataset,
    columns: ResultColumns,
    committed: ShardSummary,
    partitions: ShardPartitions | None = None,
) -> ShardSummary:
    """Write a committed shard anew with other kept columns. Nothing is computed.

    A crash on the way leaves whole files, old or new, and a marker that says so.
    """
    base = CommittedRows(store, shard, result_files(committed, partitions))
    counting = Counting()
    schema = part_schema(columns)
    tables = [base.read(schema)] if columns.vector is None else merged(base.source(schema))
    rows = counting.passing(checked(tables, shard.num_rows, shard.name))
    announce_replacement(store, shard.name, committed)
    written = write_shard(store, shard, rows, dataset, columns, partitions)
    summary = summarise(
        shard.index,
        committed.file,
        counting,
        num_bytes=written.num_bytes,
        kept=columns.kept,
        round_=committed.round,
        num_files=written.num_files,
    )
    write_marker(store, shard.name, summary)
    return summary
