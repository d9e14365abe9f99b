"""Checkpoint parts: the durable rows of a shard that is not committed yet."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.objects import ObjectStore
from storage.results import ORDINAL, ResultColumns, part_schema

CHECKPOINTS = "_checkpoints"
COMPACT_PARTS = 24
"""So many parts are merged into one: opening a shard costs the same however long it has run (C7).
"""


def parts_folder(shard_name: str, round_: int) -> str:
    """Where a shard's parts lie. Each round has its own folder, so that what a crash left of a
    round that is committed is never taken for rows of the next.
    """
    return f"{CHECKPOINTS}/{shard_name}" + (f"-r{round_}" if round_ else "")


class Parts:
    """The parts of one shard, in the order in which they were written.

    A row may be in several (a merge was cut short, or it was computed again): the last one counts.

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
        self._schema = part_schema(columns)
        self._on_step = on_step
        self._names = store.list(folder)
        self._next = 1 + max((_number(name) for name in self._names), default=0)

    def append(self, table: pa.Table) -> None:
        """Write one more part, whole and durable; merge all when there are many.

        Raises:
            OutputError: it could not be written; then it is not there.
        """
        self._write(table)
        self._on_step("part_written")
        if len(self._names) >= COMPACT_PARTS:
            self._merge()

    def read(self, columns: list[str] | None = None) -> pa.Table:
        """All rows, each once, in order of their ordinals.

        Args:
            columns: only these, and the ordinal.
        """
        names = self._schema.names if columns is None else [ORDINAL, *columns]
        schema = pa.schema([self._schema.field(name) for name in names])
        tables = [_read(self._store, name, names).cast(schema) for name in self._names]
        return last_of_each(pa.concat_tables([schema.empty_table(), *tables]))

    def delete(self) -> None:
        self._store.delete_folder(self.folder)
        self._names = []

    def _write(self, table: pa.Table) -> None:
        name = f"{self.folder}/part-{self._next:06d}.parquet"
        with self._store.writer(name, on_written=lambda: self._on_step("part_durable")) as file:
            pq.write_table(table, file)
        self._next += 1
        self._names.append(name)

    def _merge(self) -> None:
        """Merge all parts into one. Between the two steps rows are there twice, and read once."""
        old = list(self._names)
        self._write(self.read())
        self._on_step("parts_merged")
        for name in old:
            self._store.delete(name)
            self._on_step("old_part_deleted")
        self._names = self._names[len(old) :]


def last_of_each(table: pa.Table) -> pa.Table:
    """The last row of each ordinal, in order of ordinals."""
    ordinals = table.column(ORDINAL).to_numpy()
    _, from_end = np.unique(ordinals[::-1], return_index=True)
    return table.take(len(ordinals) - 1 - from_end)


def _read(store: ObjectStore, name: str, columns: list[str]) -> pa.Table:
    with store.fs.open(store.path(name), "rb") as handle:
        return pq.ParquetFile(handle).read(columns=columns)


def _number(name: str) -> int:
    return int(name.rpartition("-")[2].removesuffix(".parquet"))
