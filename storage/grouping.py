"""Grouping an input by its keys: an external sort, in bounded memory, with types left as they are.

DuckDB sorts what decides, pairs of (key, row number), and spills what does not fit; the rows
themselves do not go through it (its sort holds wide payloads in memory, and fails below about a
third of their size), but follow the order in two passes:

    order    (key, row number) sorted -> the place of each row, 8 bytes a row, in a file
    scatter  rows in the input's order -> bucket files by place, each small enough to be held
    gather   each bucket, put in order -> `_input/part-*.parquet`, the job's input from then on
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.errors import InputError, LedgerError
from storage.files import GROUP_BYTES, GROUP_ROWS
from storage.hive import as_keys, encoded, folders, key_schema
from storage.identified import READ_ROWS, ROW_ID, as_before, identified_rows
from storage.objects import ObjectStore
from storage.partitions import first_rows
from storage.rows import RowReader, whole
from storage.shards import Shard
from storage.source import Dataset, open_dataset

GROUPED = "_input"
FILE_ROWS = 64 * GROUP_ROWS
FILE_BYTES = 32 * GROUP_BYTES
"""A file of the grouped input is closed at the first of these two."""
GATHER_BYTES = GROUP_BYTES
"""A row group of the grouped input is of this size, or of `GROUP_ROWS`."""
MIN_MEMORY_BYTES = 64 << 20
"""DuckDB cannot sort in less."""
_PLACE = "__place"
_SORTED = "FROM source SELECT n ORDER BY k, n"


class _Setting(NamedTuple):
    """What all passes know."""

    dataset: Dataset
    keys: pa.Schema
    schema: pa.Schema
    limit: int | None
    folder: Path
    bucket_bytes: int
    on_batch: Callable[[], None]

    @property
    def num_rows(self) -> int:
        total = self.dataset.num_rows
        return total if self.limit is None else min(total, self.limit)


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

    What an earlier call left unfinished in the output goes.

    Args:
        dataset: the input.
        keys: the key columns.
        columns: those that the grouped input has besides.
        store: the output; it gets the folder `_input`.
        spill: a folder of this machine for what does not fit, about as large as the columns; made
            if it is not there, and left empty.
        memory_bytes: what to use of memory, 64 MiB at least.
        limit: only the first rows.
        threads: that sort.
        on_batch: called for every batch of every pass, from whichever thread reads it.

    Returns:
        The grouped input. Its id column is `__row_id`.

    Raises:
        InputError: the input cannot be read, sorted or partitioned so; says why.
        OutputError: the output cannot be written.
    """
    memory = max(memory_bytes, MIN_MEMORY_BYTES)
    wanted = tuple(dict.fromkeys([*keys, *columns]))
    folder = spill / f"grouping-{uuid.uuid4().hex}"
    setting = _Setting(
        dataset,
        key_schema(dataset.schema, keys),
        pa.schema([dataset.schema.field(name) for name in wanted]),
        limit,
        folder,
        memory // 4,
        on_batch,
    )
    store.delete_folder(GROUPED)
    try:
        folder.mkdir(parents=True)
        places = _order(setting, memory, threads)
        buckets = _scatter(setting, places)
        _write(store, setting, buckets)
    except (OSError, duckdb.Error, pa.ArrowException) as fault:
        raise InputError(
            f"the input cannot be grouped by {', '.join(keys)} within {memory >> 20} MiB of memory "
            f"and the disk space of {spill}: {fault}"
        ) from fault
    finally:
        shutil.rmtree(folder, ignore_errors=True)
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


# -- order --


def _order(setting: _Setting, memory_bytes: int, threads: int) -> np.ndarray:
    """The place of each row in the grouped input: int64 [N], over a file."""
    if not setting.num_rows:
        return np.zeros(0, np.int64)
    places = np.memmap(setting.folder / "places", np.int64, "w+", shape=(setting.num_rows,))
    source = _KeyReader(setting)
    config: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": f"{memory_bytes // 1024}KiB",
        "temp_directory": str(setting.folder / "sort"),
        "threads": threads,
    }
    place = 0
    try:
        with duckdb.connect(config=config) as con:
            con.register("source", source.reader())
            for batch in con.sql(_SORTED).to_arrow_reader(READ_ROWS):
                setting.on_batch()
                rows = batch.column(0).to_numpy()
                places[rows] = np.arange(place, place + len(rows))
                place += len(rows)
    except (duckdb.Error, pa.ArrowException):
        if source.fault is not None:
            raise source.fault from None
        raise
    assert place == setting.num_rows, (place, setting.num_rows)
    return places


class _KeyReader:
    """(key, row number) of all rows, for DuckDB, which would make another error of what is raised
    while it reads: that is kept.
    """

    def __init__(self, setting: _Setting) -> None:
        self._setting = setting
        self._schema = pa.schema([("k", pa.binary()), ("n", pa.int64())])
        self._start = len(encoded(setting.keys.names[0])) + 1
        self.fault: BaseException | None = None

    def reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self._schema, self._kept_fault())

    def _kept_fault(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._batches()
        except GeneratorExit:  # DuckDB has given up
            raise
        except BaseException as fault:
            self.fault = fault
            raise

    def _batches(self) -> Iterator[pa.RecordBatch]:
        setting = self._setting
        reader = RowReader(setting.dataset, setting.keys.names, batch_rows=READ_ROWS)
        row = 0
        try:
            spans = tuple(first_rows(whole(setting.dataset), setting.limit))
            for batch in reader.batches(Shard(0, spans, 0)):
                setting.on_batch()
                numbers = np.arange(row, row + batch.num_rows, dtype=np.int64)
                arrays = [self._texts(batch), pa.array(numbers)]
                yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)
                row += batch.num_rows
        finally:
            reader.close()

    def _texts(self, batch: pa.RecordBatch) -> pa.Array:
        """Keys as they are sorted: their folders, without what all begin with."""
        texts = folders(as_keys(batch, self._setting.keys))
        options = pc.SliceOptions(self._start)
        return pc.call_function("utf8_slice_codeunits", [texts], options).cast(pa.binary())


# -- scatter --


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Rows of the places `[start, stop)`, in a file of Arrow streams behind one another."""

    path: Path
    start: int
    stop: int


def _scatter(setting: _Setting, places: np.ndarray) -> list[_Bucket]:
    """Send each row to the bucket of its place."""
    rows = max(1, int(setting.bucket_bytes // _row_bytes(setting)))
    buckets = [
        _Bucket(setting.folder / f"{start:012d}", start, min(start + rows, setting.num_rows))
        for start in range(0, setting.num_rows, rows)
    ]
    held: dict[int, list[pa.Table]] = {}
    num_bytes = row = 0
    for table in identified_rows(setting.dataset, setting.schema.names, setting.limit):
        setting.on_batch()
        place = places[row : row + table.num_rows]
        row += table.num_rows
        placed = table.append_column(_PLACE, pa.array(place))
        for number, piece in _split(placed, place // rows):
            held.setdefault(number, []).append(piece)
        num_bytes += table.nbytes
        if num_bytes >= setting.bucket_bytes:
            _spill(buckets, held)
            held, num_bytes = {}, 0
    _spill(buckets, held)
    return buckets


def _row_bytes(setting: _Setting) -> float:
    """Mean size of a row, by the footers."""
    groups = [group for file in setting.dataset.files for group in file.row_groups]
    columns = {*setting.schema.names, setting.dataset.id_column or ""}
    num_bytes = sum(sum(g.column_bytes.get(name, 0) for name in columns) for g in groups)
    return 64 + num_bytes / max(1, setting.dataset.num_rows)


def _split(table: pa.Table, numbers: np.ndarray) -> Iterator[tuple[int, pa.Table]]:
    """The rows of each bucket; those of one bucket are not copied."""
    if len(numbers) and (numbers == numbers[0]).all():
        yield int(numbers[0]), table
        return
    order = np.argsort(numbers, kind="stable")
    found, starts = np.unique(numbers[order], return_index=True)
    sorted_rows = table.take(order)
    for number, start, stop in zip(found, starts, [*starts[1:], len(order)], strict=True):
        yield int(number), sorted_rows.slice(start, stop - start)


def _spill(buckets: Sequence[_Bucket], held: dict[int, list[pa.Table]]) -> None:
    """Append to the files of the buckets. Each time a whole stream: no file stays open."""
    for number, pieces in held.items():
        table = pa.concat_tables(pieces).combine_chunks()
        with (
            buckets[number].path.open("ab") as file,
            pa.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)


# -- gather --


def _gather(setting: _Setting, buckets: Sequence[_Bucket]) -> Iterator[pa.Table]:
    """The rows in their new order, as row groups."""
    for bucket in buckets:
        for start, stop in _ranges(bucket, setting.bucket_bytes):
            yield from _sorted(setting, bucket, start, stop)
        bucket.path.unlink()


def _sorted(setting: _Setting, bucket: _Bucket, start: int, stop: int) -> Iterator[pa.Table]:
    """The rows of a bucket that have the places `[start, stop)`, in order."""
    setting.on_batch()
    held = _read(bucket, start, stop)
    order = np.argsort(held.column(_PLACE).to_numpy())
    assert len(order) == stop - start, (bucket, start, stop)
    rows = held.drop_columns([_PLACE])
    step = max(1, min(GROUP_ROWS, len(order) * GATHER_BYTES // max(1, rows.nbytes)))
    for first in range(0, len(order), step):
        setting.on_batch()
        yield rows.take(order[first : first + step])


def _ranges(bucket: _Bucket, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Places that are gathered together: fewer than all where rows were larger than expected."""
    num_parts = -(-bucket.path.stat().st_size // (2 * most_bytes))
    num_rows = bucket.stop - bucket.start
    step = -(-num_rows // max(1, num_parts))
    for start in range(bucket.start, bucket.stop, step):
        yield start, min(start + step, bucket.stop)


def _read(bucket: _Bucket, start: int, stop: int) -> pa.Table:
    """The rows of a bucket that have these places, as they come."""
    tables: list[pa.Table] = []
    with pa.memory_map(str(bucket.path)) as file:
        while file.tell() < file.size():
            with pa.ipc.open_stream(file) as reader:
                table = reader.read_all()
            if (start, stop) != (bucket.start, bucket.stop):
                place = table.column(_PLACE).to_numpy()
                table = table.filter(pa.array((place >= start) & (place < stop)))
            tables.append(table)
        return pa.concat_tables(tables).combine_chunks()


def _write(store: ObjectStore, setting: _Setting, buckets: Sequence[_Bucket]) -> None:
    """Files of a bounded size, of row groups of a bounded size; at least one."""
    schema = pa.schema([pa.field(ROW_ID, pa.string()), *setting.schema])
    groups = _gather(setting, buckets)
    number = 0
    while True:
        first = next(groups, None)
        if first is None and number:
            return
        with (
            store.writer(f"{GROUPED}/part-{number:05d}.parquet") as file,
            pq.ParquetWriter(file, schema, compression="zstd") as writer,
        ):
            _fill(writer, first, groups, schema)
        number += 1


def _fill(writer: Any, group: pa.Table | None, more: Iterator[pa.Table], schema: pa.Schema) -> None:
    rows = num_bytes = 0
    while group is not None:
        columns = [as_before(group.column(field.name), field.type) for field in schema]
        writer.write_table(pa.Table.from_arrays(columns, schema=schema))
        rows += group.num_rows
        num_bytes += group.nbytes
        if rows >= FILE_ROWS or num_bytes >= FILE_BYTES:
            return
        del group, columns  # before the next one is made
        group = next(more, None)
