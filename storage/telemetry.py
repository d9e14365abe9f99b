"""Telemetry of a run as Parquet files beside the results. One schema a table, declared here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.objects import ObjectStore

STEPS = pa.schema(
    [
        ("run_id", pa.string()),
        ("step", pa.int64()),
        ("started_s", pa.float64()),
        ("elapsed_s", pa.float64()),
        ("schedule_s", pa.float64()),
        ("phase", pa.string()),
        ("reason", pa.string()),
        ("num_prefill_tokens", pa.int64()),
        ("num_decode_tokens", pa.int64()),
        ("num_context_tokens", pa.int64()),
        ("num_seqs", pa.int64()),
        ("num_running", pa.int64()),
        ("num_waiting", pa.int64()),
        ("num_admitted", pa.int64()),
        ("num_suspended", pa.int64()),
        ("num_finished", pa.int64()),
        ("num_free_blocks", pa.int64()),
        ("num_blocks", pa.int64()),
    ]
)
TABLES: Mapping[str, pa.Schema] = {"steps": STEPS}


class TelemetryWriter:
    """Appends records of one table. Flushed in whole files; a crash loses what was not flushed.

    Args:
        store: the output.
        table: a name in `TABLES`.
        run_id: names the files, and is the first column.
        flush_rows: records that make a file worth while; `flush(force=True)` writes fewer.
    """

    def __init__(
        self, store: ObjectStore, table: str, run_id: str, *, flush_rows: int = 1000
    ) -> None:
        self._store = store
        self._table = table
        self._schema = TABLES[table]
        self._run_id = run_id
        self._flush_rows = flush_rows
        self._records: list[Mapping[str, Any]] = []
        self._num_files = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Take a record with the table's columns but `run_id`."""
        self._records.append(record)

    def flush(self, *, force: bool = False) -> None:
        """Write what has come together."""
        if not self._records or (len(self._records) < self._flush_rows and not force):
            return
        arrays = [
            pa.array(
                [self._run_id if f.name == "run_id" else r[f.name] for r in self._records], f.type
            )
            for f in self._schema
        ]
        self._num_files += 1
        name = f"telemetry/{self._table}/{self._run_id}-{self._num_files:05d}.parquet"
        with self._store.writer(name) as file:
            pq.write_table(pa.Table.from_arrays(arrays, schema=self._schema), file)
        self._records = []
