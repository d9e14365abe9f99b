"""The rows of a committed shard, from its result files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import LedgerError
from storage.files import batches_of
from storage.merge import SortedRows
from storage.objects import ObjectStore
from storage.shards import Shard


class CommittedRows:
    """Rows whose ordinals are their places in the files.

    Args:
        store: the output.
        shard: which rows.
        files: its result files, in the order of its rows, relative to the output.
    """

    def __init__(self, store: ObjectStore, shard: Shard, files: Sequence[str]) -> None:
        self._store = store
        self._shard = shard
        self._files = files

    def read(self, schema: pa.Schema) -> pa.Table:
        """All rows, with the columns of a schema whose first one is the ordinal.

        Raises:
            LedgerError: the files do not have the shard's rows.
        """
        names = schema.names[1:]
        tables: list[pa.Table] = []
        for name in self._files:
            with self._store.fs.open(self._store.path(name), "rb") as handle:
                tables.append(pq.ParquetFile(handle).read(columns=names))
        table = pa.concat_tables(tables)
        if table.num_rows != self._shard.num_rows:
            raise LedgerError(
                f"{self._files[0]} and what belongs to it have {table.num_rows} rows, the shard "
                f"{self._shard.num_rows}"
            )
        return _numbered(table, 0, schema)

    def source(self, schema: pa.Schema) -> list[SortedRows]:
        """The same rows for `storage.merge.merged`, a batch at a time; none of an empty shard."""
        last = self._shard.num_rows - 1
        return [SortedRows(0, last, lambda: self._stream(schema))] if last >= 0 else []

    def _stream(self, schema: pa.Schema) -> Iterator[pa.Table]:
        stored = pa.schema(list(schema)[1:])
        position = 0
        for name in self._files:
            for table in batches_of(self._store, name, stored):
                yield _numbered(table, position, schema)
                position += table.num_rows


def _numbered(table: pa.Table, first: int, schema: pa.Schema) -> pa.Table:
    ordinals = pa.array(np.arange(first, first + table.num_rows, dtype=np.int64))
    return table.add_column(0, schema.field(0), ordinals).cast(schema)
