"""Grouping an input by its keys: an external sort in DuckDB, in bounded memory.

Rows stream in as Arrow batches from any file system, are sorted by (key, file, row) with spills to
a local folder, and stream out to the output as `_input/part-*.parquet`, which is the job's input
from then on. DuckDB sees a row as its key's text, its number and a payload: text travels as bytes,
times as integers, so that nothing is rounded, checked or refused on the way, and each column comes
out with the type it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.errors import InputError, LedgerError
from storage.files import GROUP_BYTES, GROUP_ROWS, row_groups
from storage.hive import as_keys, folders, key_schema
from storage.objects import ObjectStore
from storage.partitions import first_rows
from storage.rows import RowReader, id_text, to_values, whole
from storage.shards import Shard
from storage.source import Dataset, open_dataset

GROUPED = "_input"
ROW_ID = "__row_id"
"""Identity of each row in the input as it was; the id column of the grouped one."""
FILE_ROWS = 64 * GROUP_ROWS
FILE_BYTES = 8 * GROUP_BYTES
"""A file of the grouped input is closed at the first of these two."""
READ_ROWS = 8192
MIN_MEMORY_BYTES = 64 << 20
"""DuckDB cannot sort in less."""


def group_by_keys(
    dataset: Dataset,
    keys: Sequence[str],
    *,
    columns: Sequence[str],
    store: ObjectStore,
    spill: Path,
    memory_bytes: int,
    limit: int | None = None,
    threads: int = 2,
    on_batch: Callable[[], None] = lambda: None,
) -> Dataset:
    """Write an input anew, with the rows of each key together, in their order otherwise.

    What an earlier call left unfinished goes.

    Args:
        dataset: the input.
        keys: the key columns.
        columns: those that the grouped input has besides.
        store: the output; it gets the folder `_input`.
        spill: a folder of this machine for what does not fit; made if it is not there.
        memory_bytes: of the sort. Batches on the way in and out take some tens of MiB more.
        limit: only the first rows.
        threads: that sort.
        on_batch: called for every batch, from the thread that reads or writes it.

    Returns:
        The grouped input. Its id column is `__row_id`.

    Raises:
        InputError: the input cannot be read, sorted or partitioned so; says why.
        OutputError: the output cannot be written.
    """
    wanted = tuple(dict.fromkeys([*keys, *columns]))
    schema = pa.schema([dataset.schema.field(name) for name in wanted])
    source = _Source(dataset, key_schema(dataset.schema, keys), schema, limit, on_batch)
    store.delete_folder(GROUPED)
    spill.mkdir(parents=True, exist_ok=True)
    memory = max(memory_bytes, MIN_MEMORY_BYTES)
    config = {
        "memory_limit": f"{memory // 1024}KiB",
        "temp_directory": str(spill),
        "threads": threads,
    }
    try:
        with duckdb.connect(config=config) as con:
            con.register("source", source.reader())
            rows = con.execute(f"FROM source SELECT {source.payload} ORDER BY k, n")
            batches = source.restored(rows.to_arrow_reader(READ_ROWS))
            _write(store, source.out_schema, batches)
    except (duckdb.Error, pa.ArrowException) as fault:
        if source.fault is not None:
            raise source.fault from None
        raise InputError(
            f"the input cannot be grouped by {', '.join(keys)} within {memory >> 20} MiB and the "
            f"disk space of {spill}: {fault}"
        ) from fault
    return open_grouped(store)


def open_grouped(store: ObjectStore) -> Dataset:
    """The grouped input of an output.

    Raises:
        LedgerError: it is gone or damaged.
    """
    try:
        return open_dataset(
            f"{store.url}/{GROUPED}", storage_options=store.storage_options, id_column=ROW_ID
        )
    except InputError as fault:
        raise LedgerError(
            f"the grouped input of {store.url} is gone or damaged ({fault}); --overwrite starts "
            "anew"
        ) from fault


class _Source:
    """The rows that are sorted, as DuckDB gets them and as they come back."""

    def __init__(
        self,
        dataset: Dataset,
        keys: pa.Schema,
        schema: pa.Schema,
        limit: int | None,
        on_batch: Callable[[], None],
    ) -> None:
        self._dataset = dataset
        self._keys = keys
        self._schema = schema
        self._limit = limit
        self._on_batch = on_batch
        self._carried = [carried_type(field.name, field.type) for field in schema]
        self.out_schema = pa.schema([pa.field(ROW_ID, pa.string()), *schema])
        self.fault: BaseException | None = None
        names = ["id", *(f"c{number}" for number in range(len(schema)))]
        self.payload = ", ".join(names)
        self._in_schema = pa.schema(
            [
                ("k", pa.binary()),
                ("n", pa.int64()),
                ("id", pa.binary()),
                *zip(names[1:], self._carried, strict=True),
            ]
        )

    def reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self._in_schema, self._kept_fault())

    def _kept_fault(self) -> Iterator[pa.RecordBatch]:
        """DuckDB would make another error of what is raised while it reads."""
        try:
            yield from self._batches()
        except BaseException as fault:
            self.fault = fault
            raise

    def _batches(self) -> Iterator[pa.RecordBatch]:
        id_column = self._dataset.id_column
        extra = [id_column] if id_column is not None else []
        names = tuple(dict.fromkeys([*self._schema.names, *extra]))
        reader = RowReader(self._dataset, names, batch_rows=READ_ROWS)
        position = 0
        try:
            for span in first_rows(whole(self._dataset), self._limit):
                file = self._dataset.files[span.file_index].name
                first = span.first_row + span.start
                for batch in reader.batches(Shard(0, (span,), 0)):
                    self._on_batch()
                    ids = (
                        _places(file, first, batch.num_rows)
                        if id_column is None
                        else _ids(batch.column(id_column))
                    )
                    yield self._carry(batch, position, ids)
                    first += batch.num_rows
                    position += batch.num_rows
        finally:
            reader.close()

    def _carry(self, batch: pa.RecordBatch, position: int, ids: pa.Array) -> pa.RecordBatch:
        keys = folders(as_keys(batch, self._keys))
        numbers = np.arange(position, position + batch.num_rows, dtype=np.int64)
        payload = [
            carried(batch.column(field.name), kind)
            for field, kind in zip(self._schema, self._carried, strict=True)
        ]
        arrays = [keys.cast(pa.binary()), pa.array(numbers), ids.cast(pa.binary()), *payload]
        return pa.RecordBatch.from_arrays(arrays, schema=self._in_schema)

    def restored(self, batches: pa.RecordBatchReader) -> Iterator[pa.Table]:
        """The sorted rows, with the types that they had."""
        for batch in batches:
            self._on_batch()
            columns = [restored(batch.column(0), pa.string())]
            for column, kind, field in zip(
                batch.columns[1:], self._carried, self._schema, strict=True
            ):
                as_sent = column if column.type == kind else column.cast(kind, safe=False)
                columns.append(restored(as_sent, field.type))
            yield pa.Table.from_arrays(columns, schema=self.out_schema)


def _places(file: str, first: int, count: int) -> pa.Array:
    """Row ids where there is no id column: `FILE:ROW`."""
    rows = pa.array(np.arange(first, first + count, dtype=np.int64)).cast(pa.string())
    name = file.encode("utf-8", "replace").decode()
    return pc.binary_join_element_wise(pa.scalar(name), rows, ":")


def _ids(column: pa.Array) -> pa.Array:
    """Row ids from an id column."""
    if pa.types.is_string(column.type) or pa.types.is_integer(column.type):
        return column.cast(pa.string())
    return pa.array([id_text(value) for value in to_values(column)], pa.string())


def carried_type(name: str, kind: pa.DataType) -> pa.DataType:
    """The type that a column has on its way through the sort.

    Raises:
        InputError: DuckDB has none that holds it.
    """
    if pa.types.is_nested(kind):
        return _carried_nested(name, kind)
    if pa.types.is_dictionary(kind):
        return carried_type(name, kind.value_type)
    if (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    ):
        return pa.binary()
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_null(kind):
        return pa.int8()
    if pa.types.is_primitive(kind) or pa.types.is_decimal128(kind):
        return kind
    raise InputError(
        f"the input cannot be grouped with column {name!r}: there is no sorting {kind}; leave it "
        "out, or group the input by its keys before"
    )


def _carried_nested(name: str, kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, carried_type(name, f.type)) for f in kind])
    if pa.types.is_map(kind):
        entry = [
            pa.field("key", carried_type(name, kind.key_type)),
            pa.field("value", carried_type(name, kind.item_type)),
        ]
        return pa.list_(pa.struct(entry))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(carried_type(name, kind.value_type))
    raise InputError(
        f"the input cannot be grouped with column {name!r}: there is no sorting {kind}; leave it "
        "out, or group the input by its keys before"
    )


def carried(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column as it is on its way."""
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), kind)
    return column if column.type == kind else column.cast(kind, safe=False)


def restored(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column as it was before it was sent on its way."""
    if pa.types.is_null(kind):
        return pa.nulls(len(column))
    if pa.types.is_dictionary(kind):
        return restored(column, kind.value_type).cast(kind)
    return column if column.type == kind else column.cast(kind, safe=False)


def _write(store: ObjectStore, schema: pa.Schema, tables: Iterator[pa.Table]) -> None:
    """Files of a bounded size, of row groups of a bounded size; at least one."""
    groups = row_groups(tables)
    number = 0
    while True:
        first = next(groups, None)
        if first is None and number:
            return
        with (
            store.writer(f"{GROUPED}/part-{number:05d}.parquet") as file,
            pq.ParquetWriter(file, schema, compression="zstd") as writer,
        ):
            _fill(writer, first, groups)
        number += 1


def _fill(writer: Any, group: pa.Table | None, more: Iterator[pa.Table]) -> None:
    rows = num_bytes = 0
    while group is not None:
        writer.write_table(group, row_group_size=GROUP_ROWS)
        rows += group.num_rows
        num_bytes += group.nbytes
        if rows >= FILE_ROWS or num_bytes >= FILE_BYTES:
            return
        group = next(more, None)
