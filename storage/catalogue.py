"""`job.duckdb`: the job in SQL. A view of the Parquet files, rebuilt from them at any time.

DuckDB lets one process write, so the file is opened, written and closed in one go, by the run that
holds the output. When a reader has it open just then, or it is damaged, the run goes on and says
so: the Parquet files and markers are the truth (C44). That of a remote output is in
`remote_catalogue.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import duckdb
import orjson
import pyarrow as pa

from storage.hive import encoded
from storage.ledger import RESULTS, Ledger
from storage.results import Status, result_schema
from storage.source import Dataset
from storage.telemetry import TABLES

FILE = "job.duckdb"
MARKED = ("file", "num_bytes", "prompt_tokens", "completion_tokens")
"""Columns of `shards` that a marker has under the same name."""
SHARDS = pa.schema(
    [
        ("shard", pa.int64()),
        ("num_rows", pa.int64()),
        ("est_tokens", pa.int64()),
        ("committed", pa.bool_()),
        ("file", pa.string()),
        ("num_bytes", pa.int64()),
        ("ok", pa.int64()),
        ("error", pa.int64()),
        ("invalid_output", pa.int64()),
        ("skipped", pa.int64()),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
    ]
)

STEP_COSTS = """
    CREATE OR REPLACE VIEW step_costs AS
    SELECT
        steps.run_id, steps.step, steps.started_s, phase, policy_mode,
        num_prefill_tokens, num_decode_tokens, num_context_tokens, source,
        CASE
            WHEN num_decode_tokens = 0 THEN alpha_p + beta_p * num_prefill_tokens
            WHEN num_prefill_tokens = 0
                THEN alpha_d + beta_d * num_decode_tokens + gamma * num_context_tokens
            ELSE alpha_mb + mix_a * num_tokens + mix_b * num_decode_tokens
                + mix_c * num_decode_tokens * num_decode_tokens / num_tokens
                + gamma * num_context_tokens
        END AS predicted_s,
        elapsed_s AS realised_s
    FROM (SELECT *, num_prefill_tokens + num_decode_tokens AS num_tokens FROM steps) AS steps
    ASOF LEFT JOIN costs ON steps.run_id = costs.run_id AND steps.step >= costs.step
"""
"""Each step beside what the coefficients in force, fitted to earlier steps only, say it costs."""

Migration = Callable[[duckdb.DuckDBPyConnection], None]
MIGRATIONS: list[Migration] = []


@MIGRATIONS.append
def m001_tables(con: duckdb.DuckDBPyConnection) -> None:
    """The first tables."""
    con.execute("CREATE TABLE jobs (job_id VARCHAR, created VARCHAR, spec JSON, generation JSON, "
                "total_rows BIGINT, total_shards BIGINT)")  # fmt: skip
    con.execute("CREATE TABLE shards (shard BIGINT, num_rows BIGINT, est_tokens BIGINT, "
                "committed BOOLEAN, file VARCHAR, num_bytes BIGINT, ok BIGINT, error BIGINT, "
                "invalid_output BIGINT, skipped BIGINT, prompt_tokens BIGINT, "
                "completion_tokens BIGINT)")  # fmt: skip


class Catalogue:
    """The DuckDB file of a local output.

    Args:
        folder: the output.
        dataset: the job's input, for the schema of an empty `results`.
        tries: how often a locked file is tried.
        sleep: between tries.
    """

    def __init__(
        self,
        folder: Path,
        dataset: Dataset,
        *,
        tries: int = 5,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder = folder
        self._dataset = dataset
        self._tries = tries
        self._sleep = sleep

    def rebuild(self, ledger: Ledger) -> str | None:
        """Bring the file up to date with the ledger.

        Returns:
            A warning when the file could not be written; None when all is well.
        """
        if "?" in str(self._folder):
            return f"{FILE} was not written: DuckDB takes the '?' in {self._folder} for options"
        try:
            con = self._connect()
            try:
                self._write(con, ledger)
            finally:
                con.close()
        except duckdb.Error as fault:
            return (
                f"{FILE} was not brought up to date: {fault}. If no other process has it open, "
                "delete it; the next run rebuilds it"
            )
        return None

    def _connect(self) -> duckdb.DuckDBPyConnection:
        """Open the file; a few tries while another process holds it."""
        for attempt in range(self._tries - 1):
            try:
                return duckdb.connect(str(self._folder / FILE))
            except duckdb.IOException:
                self._sleep(0.1 * 2**attempt)
        return duckdb.connect(str(self._folder / FILE))

    def close(self, ledger: Ledger) -> str | None:
        """The run ends: as `rebuild`."""
        return self.rebuild(ledger)

    def _write(self, con: duckdb.DuckDBPyConnection, ledger: Ledger) -> None:
        con.begin()
        write_job(con, ledger)
        self._results(con, ledger)
        for table, schema in TABLES.items():
            files = (self._folder / "telemetry" / table).glob("*.parquet")
            self._view(con, f"telemetry/{table}", any(files), schema)
        con.execute(STEP_COSTS)
        con.commit()

    def _results(self, con: duckdb.DuckDBPyConnection, ledger: Ledger) -> None:
        schema = result_schema(ledger.dataset.schema, ledger.record.columns)
        if ledger.partitions is None:
            self._view(con, "results", bool(ledger.committed), schema)
            return
        keys = ledger.partitions.keys.schema
        if not ledger.committed:
            empty_view(con, "results", pa.unify_schemas([schema, keys]))
        elif not _is_filled(con):  # to look at 100,000 folders again would take seconds
            folder = no_glob(str(self._folder.resolve()))
            source = hive_source(con, f"{folder}/{RESULTS}/**/*.parquet", schema, keys)
            con.execute(f"CREATE OR REPLACE VIEW results AS {source}")
            con.execute(f"COMMENT ON VIEW results IS {quoted(FILLED)}")

    def _view(
        self, con: duckdb.DuckDBPyConnection, folder: str, filled: bool, schema: pa.Schema
    ) -> None:
        """A view over the Parquet files of a folder, or a typed empty one before there are any."""
        name = folder.rpartition("/")[2]
        if filled:
            files = f"{no_glob(str(self._folder.resolve()))}/{folder}/*.parquet"
            con.execute(
                f"CREATE OR REPLACE VIEW {name} AS FROM read_parquet("
                f"{quoted(files)}, union_by_name = true)"
            )
            return
        empty_view(con, name, schema)


FILLED = "One file a partition; the folders' names are its key."


def _is_filled(con: duckdb.DuckDBPyConnection) -> bool:
    """Whether the view of partitioned results is over their files already."""
    found = con.execute("SELECT comment FROM duckdb_views() WHERE view_name = 'results'").fetchall()
    return found == [(FILLED,)]


def empty_view(con: duckdb.DuckDBPyConnection, name: str, schema: pa.Schema) -> None:
    """A view without rows, with the types that the files' own would have."""
    columns = ", ".join(
        f"NULL::{kind} AS {_name(column)}" for column, kind in duckdb_types(con, schema).items()
    )
    con.execute(f"CREATE OR REPLACE VIEW {name} AS SELECT {columns} WHERE false")


def duckdb_types(con: duckdb.DuckDBPyConnection, schema: pa.Schema) -> dict[str, str]:
    """DuckDB's name of each column's type."""
    con.register("empty_rows", schema.empty_table())
    con.execute("CREATE OR REPLACE TEMP TABLE typed AS FROM empty_rows")
    con.unregister("empty_rows")
    return {name: kind for name, kind, *_ in con.execute("DESCRIBE typed").fetchall()}


def hive_source(
    con: duckdb.DuckDBPyConnection, files: str, schema: pa.Schema, keys: pa.Schema
) -> str:
    """A query over the files of partitions, with their keys behind the files' own columns.

    The keys' types are told: DuckDB would make the number 7 of the text `007`.

    Args:
        con: to name types with.
        files: a glob.
        schema: of the files.
        keys: key columns.
    """
    folders = {name: encoded(name) for name in keys.names}
    types = ", ".join(
        f"{quoted(folders[name])}: {quoted(kind)}" for name, kind in duckdb_types(con, keys).items()
    )
    columns = [_name(name) for name in schema.names]
    columns += [f"{_name(folder)} AS {_name(name)}" for name, folder in folders.items()]
    return (
        f"FROM read_parquet({quoted(files)}, hive_partitioning = true, hive_types = {{{types}}}) "
        f"SELECT {', '.join(columns)}"
    )


def write_job(con: duckdb.DuckDBPyConnection, ledger: Ledger) -> None:
    """The tables `jobs` and `shards`."""
    migrate(con)
    record = ledger.record
    con.execute("DELETE FROM jobs")
    con.execute(
        "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?)",
        [
            record.job_id,
            record.created,
            orjson.dumps(dict(record.spec)).decode(),
            orjson.dumps(dict(record.generation)).decode(),
            record.total_rows,
            len(record.shards),
        ],
    )
    con.execute("DELETE FROM shards")
    con.register("planned", _shards_table(ledger))
    con.execute("INSERT INTO shards FROM planned")
    con.unregister("planned")


def migrate(con: duckdb.DuckDBPyConnection) -> None:
    """Apply the migrations that the file lacks, in order."""
    con.execute("CREATE TABLE IF NOT EXISTS migrations (name VARCHAR)")
    applied = {name for (name,) in con.execute("SELECT name FROM migrations").fetchall()}
    for migration in MIGRATIONS:
        if migration.__name__ not in applied:
            migration(con)
            con.execute("INSERT INTO migrations VALUES (?)", [migration.__name__])


def _shards_table(ledger: Ledger) -> pa.Table:
    """The rows of `shards`."""
    found: list[dict[str, Any]] = []
    for shard in ledger.shards:
        row: dict[str, Any] = dict.fromkeys(SHARDS.names)
        row |= {"shard": shard.index, "num_rows": shard.num_rows, "est_tokens": shard.est_tokens}
        summary = ledger.committed.get(shard.index)
        row["committed"] = summary is not None
        if summary is not None:
            row |= {status: summary.by_status.get(status, 0) for status in get_args(Status)}
            row |= {name: getattr(summary, name) for name in MARKED}
        found.append(row)
    return pa.Table.from_pylist(found, schema=SHARDS)


def quoted(text: str) -> str:
    """A string of SQL."""
    return "'" + text.replace("'", "''") + "'"


def _name(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def no_glob(path: str) -> str:
    """A path in which glob characters stand for themselves."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in path)
