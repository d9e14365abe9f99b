"""`job.duckdb` of a remote output: made on this machine, and uploaded when the run ends.

DuckDB can write only to a local file. While the run goes on, it is in the cache folder and holds
`jobs` and `shards`. When the run ends, a whole one is made and put beside the results: telemetry as
tables, and the results as a table too while they are small. Larger ones are a view over the Parquet
files, for a connection that can read them, and its comment says what it takes. A run that is killed
leaves the file of the run before, or none: the Parquet files and markers are the truth.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import duckdb
import pyarrow as pa

from storage.catalogue import FILE, STEP_COSTS, hive_source, no_glob, quoted, write_job
from storage.errors import StorageError
from storage.ledger import RESULTS, TELEMETRY, Ledger
from storage.objects import ObjectStore
from storage.results import result_schema
from storage.source import Dataset
from storage.telemetry import TABLES
from storage.views import each_file, each_partition

MEMORY = "256MB"
"""That DuckDB may take: a job's memory is not to jump at its end."""

RESULTS_BYTES = 64 << 20
"""Result files of this size in all are copied into the file; larger ones stay where they are."""
RESULTS_FILES = 1000
"""So many files are copied at most: each takes a few requests."""


class RemoteCatalogue:
    """The DuckDB file of a remote output.

    Args:
        folder: on this machine, for this job alone; made when it is needed.
        store: the output.
        dataset: the job's input, for the schema of `results`.
        results_bytes: see `RESULTS_BYTES`.
    """

    def __init__(
        self,
        folder: Path,
        store: ObjectStore,
        dataset: Dataset,
        *,
        results_bytes: int = RESULTS_BYTES,
    ) -> None:
        self._folder = folder
        self._store = store
        self._dataset = dataset
        self._results_bytes = results_bytes

    @property
    def path(self) -> Path:
        """The file on this machine; there while the run goes on."""
        return self._folder / FILE

    def rebuild(self, ledger: Ledger) -> str | None:
        """Write the local file, without telemetry and results.

        Returns:
            A warning when it could not be written; None when all is well.
        """
        try:
            self._make(lambda con: write_job(con, ledger))
        except (duckdb.Error, OSError) as fault:
            return f"{self.path} was not brought up to date: {fault}"
        return None

    def close(self, ledger: Ledger) -> str | None:
        """The run ends: make the whole file, upload it, and delete it here.

        Returns:
            A warning when there is no new file beside the results; None when all is well.
        """
        try:
            self._make(lambda con: self._write(con, ledger))
            with self._store.writer(FILE) as file, self.path.open("rb") as local:
                shutil.copyfileobj(local, file)
            shutil.rmtree(self._folder)
        except (duckdb.Error, OSError, StorageError) as fault:
            return f"{FILE} was not brought up to date: {fault}. The next run writes it anew"
        return None

    def _make(self, write: Callable[[duckdb.DuckDBPyConnection], None]) -> None:
        """A new file in place of the old one, whole: who has the old one open keeps it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / f"{FILE}.new"
        draft.unlink(missing_ok=True)
        with duckdb.connect(str(draft), config={"memory_limit": MEMORY}) as con:
            write(con)
        os.replace(draft, self.path)

    def _write(self, con: duckdb.DuckDBPyConnection, ledger: Ledger) -> None:
        write_job(con, ledger)
        for table, schema in TABLES.items():
            self._copy(con, table, f"{TELEMETRY}/{table}", schema)
        con.execute(STEP_COSTS)
        num_bytes = sum(summary.num_bytes for summary in ledger.committed.values())
        num_files = sum(summary.num_files for summary in ledger.committed.values())
        if num_bytes <= self._results_bytes and num_files <= RESULTS_FILES:
            self._copy_results(con, ledger)
            self._comment(con, "TABLE", f"Copied from {self._store.url}/{RESULTS}/.")
        else:
            self._view_of_results(con, ledger)

    def _copy_results(self, con: duckdb.DuckDBPyConnection, ledger: Ledger) -> None:
        schema = result_schema(ledger.dataset.schema, ledger.record.columns)
        if ledger.partitions is None:
            self._copy(con, "results", RESULTS, schema)
            return
        everything = pa.unify_schemas([schema, ledger.partitions.keys.schema])
        found = each_partition(self._store, ledger.partitions, ledger.committed, schema)
        self._fill(con, "results", everything, found)

    def _copy(
        self, con: duckdb.DuckDBPyConnection, table: str, folder: str, schema: pa.Schema
    ) -> None:
        """A table with the rows of a folder's files, in the order of their names; one file at a
        time is in memory.
        """
        self._fill(con, table, schema, each_file(self._store, folder, schema))

    def _fill(
        self,
        con: duckdb.DuckDBPyConnection,
        table: str,
        schema: pa.Schema,
        found: Iterable[pa.Table],
    ) -> None:
        con.register("found", schema.empty_table())
        con.execute(f"CREATE TABLE {table} AS FROM found")
        for rows in found:
            con.register("found", rows.select(schema.names))
            con.execute(f"INSERT INTO {table} FROM found")
        con.unregister("found")

    def _view_of_results(self, con: duckdb.DuckDBPyConnection, ledger: Ledger) -> None:
        url = self._store.url
        con.register_filesystem(self._store.fs)  # to look at the files' columns
        if ledger.partitions is None:
            files = f"{no_glob(url)}/{RESULTS}/*.parquet"
            con.execute(f"CREATE VIEW results AS FROM read_parquet({quoted(files)})")
        else:
            schema = result_schema(ledger.dataset.schema, ledger.record.columns)
            files = f"{no_glob(url)}/{RESULTS}/**/*.parquet"
            source = hive_source(con, files, schema, ledger.partitions.keys.schema)
            con.execute(f"CREATE VIEW results AS {source}")
        scheme = url.partition("://")[0]
        self._comment(
            con, "VIEW",
            f"Read from {url}/{RESULTS}/ when asked. In Python, first: "
            f"con.register_filesystem(fsspec.filesystem('{scheme}')). Elsewhere the connection "
            "needs DuckDB's httpfs extension and a secret.",
        )  # fmt: skip

    def _comment(self, con: duckdb.DuckDBPyConnection, kind: str, text: str) -> None:
        con.execute(f"COMMENT ON {kind} results IS {quoted(text)}")
