"""How result files and parts are laid out in Parquet, and how they are read back a batch at a time.

Vectors are noise to a dictionary, to a codec and to statistics: their pages hold the numbers as
they are. All other columns are compressed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.objects import ObjectStore
from storage.results import ResultColumns

GROUP_ROWS = 16384
GROUP_BYTES = 8 << 20
"""A row group of a result file is closed at the first of these two."""
READ_BYTES = 1 << 20
"""A part is read in batches of about this size, as many parts may be open at a time."""
MAX_BATCH_ROWS = 4096
SMALL_ROWS = 64
SMALL_BYTES = 256 << 10
"""Up to so many rows and bytes a file of its own is written plainly: to set up a codec for each
column would take more than half of its time, and save nothing.
"""
PLAIN: Mapping[str, Any] = {
    "compression": "none",
    "use_dictionary": False,
    "write_statistics": False,
}


def result_options(schema: pa.Schema, columns: ResultColumns) -> dict[str, Any]:
    """Of `pq.ParquetWriter`, for a result file of this schema."""
    if columns.vector is None:
        return {"compression": "zstd"}
    return _options(schema, columns, "zstd")


def part_options(schema: pa.Schema, columns: ResultColumns) -> dict[str, Any]:
    """Of `pq.ParquetWriter`, for a part."""
    return {} if columns.vector is None else _options(schema, columns, "snappy")


def _options(schema: pa.Schema, columns: ResultColumns, codec: str) -> dict[str, Any]:
    assert columns.vector is not None
    vector = columns.vector.column
    others = [leaf for field in schema if field.name != vector for leaf in _leaves(field)]
    plain = {} if vector is None else dict.fromkeys(_leaves(schema.field(vector)), "none")
    return {
        "compression": {**dict.fromkeys(others, codec), **plain},
        "use_dictionary": others,
        "write_statistics": others,
    }


def _leaves(field: pa.Field, above: str = "") -> list[str]:
    """The paths of a column's leaves, as Parquet has them."""
    path, kind = f"{above}{field.name}", field.type
    if pa.types.is_struct(kind):
        return [leaf for child in kind for leaf in _leaves(child, f"{path}.")]
    if pa.types.is_map(kind):
        return [
            *_leaves(pa.field("key", kind.key_type), f"{path}.key_value."),
            *_leaves(pa.field("value", kind.item_type), f"{path}.key_value."),
        ]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _leaves(pa.field("element", kind.value_type), f"{path}.list.")
    return [path]


def batches_of(store: ObjectStore, name: str, schema: pa.Schema) -> Iterator[pa.Table]:
    """The columns of a file that a schema names, a batch at a time."""
    with store.fs.open(store.path(name), "rb") as handle:
        parquet = pq.ParquetFile(handle, buffer_size=READ_BYTES, pre_buffer=False)
        found = parquet.metadata
        num_bytes = sum(found.row_group(n).total_byte_size for n in range(found.num_row_groups))
        fitting = READ_BYTES * found.num_rows // max(1, num_bytes)
        for batch in parquet.iter_batches(
            batch_size=max(64, min(MAX_BATCH_ROWS, fitting)),
            columns=schema.names,
            use_threads=False,
        ):
            yield pa.Table.from_batches([batch]).select(schema.names).cast(schema)


def row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
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
