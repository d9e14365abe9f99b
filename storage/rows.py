"""Rows of a shard, streamed: slices inside row groups, never a whole row group in memory.

`ParquetFile.iter_batches` is the only way in: `read_table` and `Dataset.to_batches` hold whole row
groups, and fail on nested columns of more than 2 GB (C38, C39, C42).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from fsspec.implementations.local import LocalFileSystem

from storage.errors import InputError
from storage.shards import Shard, Span
from storage.source import Dataset, InputFile, RowGroup

BATCH_ROWS = 256
BATCH_BYTES = 16 << 20
"""A batch has fewer rows where rows are large, so that it is about this size at most."""
READ_BYTES = 1 << 20
"""Column chunks are read in pieces of this size; without it, each chunk is read whole."""
FETCH_BYTES = 4 << 20
"""The same over a network. One range request each: fsspec's own read-ahead has one window for the
whole file, and two columns would push each other out of it and fetch everything several times.
"""


class Row(NamedTuple):
    """One input row.

    Attributes:
        ordinal: position within its shard, from 0.
        row_id: `FILE:ROW`, or the value of the id column.
        values: the wanted columns as Python values.
    """

    ordinal: int
    row_id: str
    values: dict[str, Any]


class RowReader:
    """Reads shards. Keeps its place between them, so shards in order read each row group once.

    Args:
        dataset: the input.
        columns: the wanted columns; hive columns may be among them.
        batch_rows: rows decoded at a time.
    """

    def __init__(
        self, dataset: Dataset, columns: Sequence[str], *, batch_rows: int = BATCH_ROWS
    ) -> None:
        self._dataset = dataset
        self._columns = tuple(columns)
        self._batch_rows = batch_rows
        self._cursor: _Cursor | None = None

    def rows(self, shard: Shard, *, skip: Container[int] = ()) -> Iterator[list[Row]]:
        """Rows of a shard in order, in batches, those with an ordinal in `skip` left out.

        Raises:
            InputError: the file is gone or damaged.
        """
        id_column = self._dataset.id_column
        wanted = self._columns if id_column is None else (*self._columns, id_column)
        ordinal = 0
        for span, batch, first in self._batches(shard, tuple(dict.fromkeys(wanted))):
            wanted_here = [n for n in range(batch.num_rows) if ordinal + n not in skip]
            if wanted_here:
                values = batch_to_rows(batch)
                name = self._dataset.files[span.file_index].name
                yield [
                    Row(
                        ordinal + n,
                        f"{name}:{first + n}"
                        if id_column is None
                        else id_text(values[n][id_column]),
                        values[n],
                    )
                    for n in wanted_here
                ]
            ordinal += batch.num_rows

    def batches(self, shard: Shard) -> Iterator[pa.RecordBatch]:
        """The wanted columns of all rows of a shard, as Arrow, with the dataset's types."""
        for _, batch, _ in self._batches(shard, self._columns):
            yield batch

    def _batches(
        self, shard: Shard, columns: tuple[str, ...]
    ) -> Iterator[tuple[Span, pa.RecordBatch, int]]:
        """(span, batch, row number of its first row in the file) for all rows of a shard."""
        for span in shard.spans:
            cursor = self._cursor
            if cursor is None or not cursor.reaches(span, columns):
                if cursor is not None:
                    cursor.close()
                cursor = self._cursor = _Cursor(self._dataset, span, columns, self._batch_rows)
            for position, batch in cursor.take(span.start, span.stop):
                yield span, batch, span.first_row + position

    def close(self) -> None:
        """Close the open file, if any."""
        if self._cursor is not None:
            self._cursor.close()
            self._cursor = None


class _Cursor:
    """A place in one row group, moving forward only."""

    def __init__(
        self, dataset: Dataset, span: Span, columns: tuple[str, ...], batch_rows: int
    ) -> None:
        self._key = (span.file_index, span.row_group, columns)
        self._position = 0
        self._rest: pa.RecordBatch | None = None
        self._file: InputFile = dataset.files[span.file_index]
        self._schema = pa.schema([dataset.schema.field(column) for column in columns])
        stored = [column for column in columns if column not in self._file.partitions]
        group = self._file.row_groups[span.row_group]
        # A column has to be read to learn how many rows a batch has; the smallest is enough.
        read = stored or [min(group.column_bytes, key=lambda name: group.column_bytes[name])]
        read_bytes = READ_BYTES if isinstance(dataset.fs, LocalFileSystem) else FETCH_BYTES
        try:
            self._handle = dataset.fs.open(self._file.path, "rb", cache_type="none")
            parquet = pq.ParquetFile(self._handle, buffer_size=read_bytes, pre_buffer=False)
            self._source: Iterator[pa.RecordBatch] = parquet.iter_batches(
                batch_size=_batch_rows(group, read, batch_rows),
                row_groups=[span.row_group],
                columns=read,
                use_threads=False,
            )
        except (OSError, pa.ArrowException) as fault:
            raise InputError(f"{self._file.path} cannot be read: {fault}") from fault

    def reaches(self, span: Span, columns: tuple[str, ...]) -> bool:
        key = (span.file_index, span.row_group, columns)
        return key == self._key and self._position <= span.start

    def take(self, start: int, stop: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Batches of rows `[start, stop)` of the row group, each with the position of its first
        row.
        """
        while self._position < stop:
            batch = self._next() if self._rest is None else self._rest
            begin, end = self._position, self._position + batch.num_rows
            low, high = max(start, begin), min(stop, end)
            self._rest = batch.slice(high - begin) if high < end else None
            self._position = high
            if low < high:
                yield low, self._complete(batch.slice(low - begin, high - low))

    def _next(self) -> pa.RecordBatch:
        try:
            return next(self._source)
        except StopIteration:
            raise InputError(
                f"{self._file.path} has fewer rows than its footer said; was it edited?"
            ) from None
        except (OSError, pa.ArrowException) as fault:
            raise InputError(f"{self._file.path} cannot be read: {fault}") from fault

    def _complete(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Add hive columns, and bring all to the dataset's order and types."""
        if not self._schema.names:
            return batch.select([])  # made of no arrays, a batch would have no rows
        arrays: list[pa.Array] = []
        for field in self._schema:
            if field.name in self._file.partitions:
                value = self._file.partitions[field.name]
                arrays.append(pa.array([value] * batch.num_rows, field.type))
            else:
                column = batch.column(field.name)
                arrays.append(column if column.type == field.type else column.cast(field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def close(self) -> None:
        self._handle.close()


def _batch_rows(group: RowGroup, columns: Sequence[str], most: int) -> int:
    """Rows of a batch of about `BATCH_BYTES`, by the footer's average."""
    num_bytes = sum(group.column_bytes.get(column, 0) for column in columns)
    return max(1, min(most, BATCH_BYTES * group.num_rows // max(1, num_bytes)))


def batch_to_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Python values of each row; see `to_values`."""
    columns = [to_values(column) for column in batch.columns]
    names = batch.schema.names
    if not columns:
        return [{} for _ in range(batch.num_rows)]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def to_values(column: pa.Array) -> list[Any]:
    """Python values of a column; maps as dicts.

    What Python cannot hold must not stop the other rows: text that is not UTF-8 comes as bytes, and
    a time outside Python's range or precision as Arrow writes it.
    """
    try:
        return column.to_pylist(maps_as_pydicts="lossy")
    except (ValueError, OverflowError):  # UnicodeDecodeError is a ValueError
        plain = column.cast(_plain(column.type)).to_pylist(maps_as_pydicts="lossy")
        return [_decoded(value) for value in plain]


def _plain(kind: pa.DataType) -> pa.DataType:
    """The same type with bytes for text, and text for times."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.large_binary()
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain(kind.value_type))
    if pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _plain(field.type)) for field in kind])
    return kind


def _decoded(value: Any) -> Any:
    """Bytes that are UTF-8 as text, at any depth."""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return value
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if isinstance(value, dict):
        return {_decoded(key): _decoded(item) for key, item in value.items()}
    return value


def id_text(value: Any) -> str:
    """A row id; of bytes, the text that they are, or their hexadecimal digits."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value.hex()


def read_shard(
    dataset: Dataset, shard: Shard, columns: Sequence[str], *, skip: Container[int] = ()
) -> Iterator[list[Row]]:
    """Rows of one shard; see `RowReader`, which keeps its place between shards."""
    reader = RowReader(dataset, columns)
    try:
        yield from reader.rows(shard, skip=skip)
    finally:
        reader.close()


def sample_rows(dataset: Dataset, columns: Sequence[str], count: int) -> list[dict[str, Any]]:
    """About `count` rows, spread evenly over the dataset: the first rows of evenly spaced row
    groups.

    The same for the same dataset.
    """
    spans = [
        Span(file_index, index, 0, group.num_rows, 0)
        for file_index, file in enumerate(dataset.files)
        for index, group in enumerate(file.row_groups)
        if group.num_rows
    ]
    if not spans or count < 1:
        return []
    picked = spans[:: -(-len(spans) // min(count, 16))]
    each = -(-count // len(picked))
    reader = RowReader(dataset, columns)
    rows: list[dict[str, Any]] = []
    try:
        for span in picked:
            part = Shard(0, (span._replace(stop=min(span.stop, each)),), 0)
            for batch in reader.rows(part):
                rows.extend(row.values for row in batch)
    finally:
        reader.close()
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


def check_unique_ids(dataset: Dataset) -> None:
    """Refuse an id column with nulls or duplicates: results are told apart by it.

    Reads that one column, a batch at a time; keeps 8 bytes a row.

    Raises:
        InputError: names the column, and a null's row or a duplicate value.
    """
    column = dataset.id_column
    if column is None:
        return
    hashes: list[np.ndarray] = []
    for span, rows in _all_ids(dataset):
        for row in rows:
            if row.values[column] is None:
                raise InputError(
                    f"the id column {column!r} has a null (row {row.ordinal} of row group "
                    f"{span.row_group} in {dataset.files[span.file_index].name})"
                )
        hashes.append(np.array([_digest(row.row_id) for row in rows], np.uint64))
    if not hashes:
        return
    every = np.sort(np.concatenate(hashes))
    again = every[1:][every[1:] == every[:-1]]
    twice = _first_duplicate(dataset, set(again.tolist())) if len(again) else None
    if twice is not None:
        raise InputError(
            f"the id column {column!r} has duplicates, such as {twice!r}; every row needs its own "
            "id, or leave --id-column out"
        )


def whole(dataset: Dataset) -> Iterator[Span]:
    """All rows of a dataset, a span per row group."""
    for file_index, file in enumerate(dataset.files):
        first_row = 0
        for index, group in enumerate(file.row_groups):
            if group.num_rows:
                yield Span(file_index, index, 0, group.num_rows, first_row)
            first_row += group.num_rows


def _all_ids(dataset: Dataset) -> Iterator[tuple[Span, list[Row]]]:
    reader = RowReader(dataset, (), batch_rows=4096)
    try:
        for span in whole(dataset):
            for rows in reader.rows(Shard(0, (span,), 0)):
                yield span, rows
    finally:
        reader.close()


def _digest(row_id: str) -> int:
    return xxhash.xxh3_64_intdigest(row_id.encode())


def _first_duplicate(dataset: Dataset, digests: set[int]) -> str | None:
    """The first id that is there twice; None when only digests were the same."""
    seen: set[str] = set()
    for _, rows in _all_ids(dataset):
        for row in rows:
            if _digest(row.row_id) in digests:
                if row.row_id in seen:
                    return row.row_id
                seen.add(row.row_id)
    return None
