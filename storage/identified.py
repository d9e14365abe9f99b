"""Rows of an input with the identity that they keep when their order changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.partitions import first_rows
from storage.rows import RowReader, id_text, to_values, whole
from storage.shards import Shard
from storage.source import Dataset

ROW_ID = "__row_id"
"""Identity of each row in the input as it was: `FILE:ROW`, or the value of the id column."""
READ_ROWS = 8192


def identified_rows(
    dataset: Dataset, columns: Sequence[str], limit: int | None
) -> Iterator[pa.Table]:
    """All rows, `__row_id` before the columns, in the input's order, in types that can be taken
    from (`as_before` gives them back).

    Args:
        dataset: the input.
        columns: those that are wanted.
        limit: only the first rows.
    """
    extra = [] if dataset.id_column is None else [dataset.id_column]
    names = tuple(dict.fromkeys([*columns, *extra]))
    reader = RowReader(dataset, names, batch_rows=READ_ROWS)
    try:
        for span in first_rows(whole(dataset), limit):
            file = dataset.files[span.file_index].name
            row = span.first_row + span.start
            for batch in reader.batches(Shard(0, (span,), 0)):
                ids = (
                    _places(file, row, batch.num_rows)
                    if dataset.id_column is None
                    else _ids(batch.column(dataset.id_column))
                )
                row += batch.num_rows
                arrays = [_takeable(batch.column(name)) for name in columns]
                yield pa.table([ids, *arrays], names=[ROW_ID, *columns])
    finally:
        reader.close()


def _places(file: str, first: int, count: int) -> pa.Array:
    """Row ids where there is no id column."""
    rows = pa.array(np.arange(first, first + count, dtype=np.int64)).cast(pa.string())
    name = file.encode("utf-8", "replace").decode()
    return pc.call_function("binary_join_element_wise", [pa.scalar(name), rows, pa.scalar(":")])


def _ids(column: pa.Array) -> pa.Array:
    """Row ids from an id column."""
    if pa.types.is_string(column.type) or pa.types.is_integer(column.type):
        return column.cast(pa.string())
    return pa.array([id_text(value) for value in to_values(column)], pa.string())


def _takeable(column: pa.Array) -> pa.Array:
    """A column as it can be sorted: each batch may have a dictionary of its own, and rows of many
    are put together; views cannot be taken from.
    """
    if pa.types.is_dictionary(column.type):
        return _takeable(column.dictionary_decode())
    if pa.types.is_string_view(column.type):
        return column.cast(pa.large_string())
    if pa.types.is_binary_view(column.type):
        return column.cast(pa.large_binary())
    return column


def as_before(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """A column in the type that it had in the input."""
    if pa.types.is_dictionary(kind):
        column = column.dictionary_encode()
    return column if column.type == kind else column.cast(kind)
