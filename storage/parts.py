"""Checkpoint parts: the durable rows of a shard that is not committed yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow as pa
import pyarrow.parquet as pq

from storage.files import batches_of, part_options, row_groups
from storage.merge import ORDINAL, SortedRows, last_of_each, merged
from storage.objects import ObjectStore
from storage.results import ResultColumns, part_schema

CHECKPOINTS = "_checkpoints"
COMPACT_PARTS = 24
"""So many parts are merged into one: opening a shard costs the same however long it has run (C7).
"""
LARGE_BYTES = 64 << 20
"""A part of vectors of this size is merged no more: to write it again would cost more than it
saves.
"""


def parts_folder(shard_name: str, round_: int) -> str:
    """Where a shard's parts lie. Each round has its own folder, so that what a crash left of a
    round that is committed is never taken for rows of the next.
    """
    return f"{CHECKPOINTS}/{shard_name}" + (f"-r{round_}" if round_ else "")


class Parts:
    """The parts of one shard, in the order in which they were written.

    A row may be in several (a merge was cut short, or it was computed again): the last one counts.
    Parts of vectors are sorted, so that they can be streamed in order.

    Args:
        store: the output.
        folder: see `parts_folder`.
        columns: optional columns of the results.
        on_step: told the name of every step.
    """

    def __init__(
        self,
        store: ObjectStore,
        folder: str,
        columns: ResultColumns,
        *,
        on_step: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self._store = store
        self._columns = columns
        self._schema = part_schema(columns)
        self._options = part_options(self._schema, columns)
        self._on_step = on_step
        self._sizes = dict(sorted(store.sizes(folder).items()))
        self._next = 1 + max((_number(name) for name in self._sizes), default=0)

    def __len__(self) -> int:
        return len(self._sizes)

    def append(self, table: pa.Table) -> None:
        """Write one more part, whole and durable; merge when there are many.

        Args:
            table: with vectors, sorted by ordinal.

        Raises:
            OutputError: it could not be written; then it is not there.
        """
        self._write([table])
        self._on_step("part_written")
        small = self._small()
        if len(small) >= COMPACT_PARTS:
            self._merge(small)

    def read(self, columns: list[str] | None = None) -> pa.Table:
        """All rows, each once, in order of their ordinals.

        Args:
            columns: only these, and the ordinal.
        """
        names = self._schema.names if columns is None else [ORDINAL, *columns]
        schema = pa.schema([self._schema.field(name) for name in names])
        tables = [_read(self._store, name, names).cast(schema) for name in self._sizes]
        return last_of_each(pa.concat_tables([schema.empty_table(), *tables]))

    def sources(self) -> list[SortedRows]:
        """The parts for `merged`; of sorted ones only."""
        return self._sources(list(self._sizes))

    def delete(self) -> None:
        self._store.delete_folder(self.folder)
        self._sizes = {}

    def _sources(self, names: list[str]) -> list[SortedRows]:
        found = (_source(self._store, name, self._schema) for name in names)
        return [source for source in found if source is not None]

    def _small(self) -> list[str]:
        """The parts that a merge may take: the latest ones, as the order of parts counts."""
        names = list(self._sizes)
        if self._columns.vector is None:
            return names
        large = [n for n, name in enumerate(names) if self._sizes[name] >= LARGE_BYTES]
        return names[large[-1] + 1 :] if large else names

    def _write(self, tables: Iterable[pa.Table]) -> None:
        name = f"{self.folder}/part-{self._next:06d}.parquet"
        with (
            self._store.writer(name, on_written=lambda: self._on_step("part_durable")) as file,
            pq.ParquetWriter(file, self._schema, **self._options) as writer,
        ):
            for table in tables:
                writer.write_table(table)
            writer.close()
            num_bytes = file.tell()
        self._next += 1
        self._sizes[name] = num_bytes

    def _merge(self, names: list[str]) -> None:
        """Merge parts into one. Between the two steps rows are there twice, and read once."""
        if self._columns.vector is None:
            self._write([self.read()])
        else:
            self._write(row_groups(merged(self._sources(names))))
        self._on_step("parts_merged")
        for name in names:
            self._store.delete(name)
            del self._sizes[name]
            self._on_step("old_part_deleted")


def _source(store: ObjectStore, name: str, schema: pa.Schema) -> SortedRows | None:
    """A part for `merged`: its bounds are in its footer. None: it has no rows."""
    with store.fs.open(store.path(name), "rb") as handle:
        metadata = pq.ParquetFile(handle).metadata
    groups = [metadata.row_group(n).column(0).statistics for n in range(metadata.num_row_groups)]
    if not groups or not metadata.num_rows:
        return None
    return SortedRows(groups[0].min, groups[-1].max, lambda: batches_of(store, name, schema))


def _read(store: ObjectStore, name: str, columns: list[str]) -> pa.Table:
    with store.fs.open(store.path(name), "rb") as handle:
        return pq.ParquetFile(handle).read(columns=columns)


def _number(name: str) -> int:
    return int(name.rpartition("-")[2].removesuffix(".parquet"))
