"""`job.duckdb`: the job in SQL. A view of the Parquet files, rebuilt from them at any time.

DuckDB lets one process write, so the file is opened, written and closed in one go, by the run that
holds the output. When a reader has it open just then, the run goes on and says so: the Parquet files and
markers are the truth (C44). A remote output has no such file yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import orjson

from storage.ledger import Ledger
from storage.results import result_schema
from storage.source import Dataset
from storage.writer import ShardSummary

FILE = "job.duckdb"

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
            A warning when another process holds the file; None when all is well.
        """
        for attempt in range(self._tries):
            try:
                con = duckdb.connect(str(self._folder / FILE))
            except duckdb.IOException as fault:
                if attempt + 1 < self._tries:
                    self._sleep(0.1 * 2**attempt)
                    continue
                return f"{FILE} is open in another process and was not brought up to date: {fault}"
            try:
                self._write(con, ledger)
            finally:
                con.close()
            return None
        raise AssertionError("unreachable: tries is at least 1")

    def _write(self, con: duckdb.DuckDBPyConnection, ledger: Ledger) -> None:
        con.begin()
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
        con.executemany(
            f"INSERT INTO shards VALUES ({', '.join('?' * 12)})",  # noqa: S608 - only placeholders
            [_shard_row(s.index, s.num_rows, s.est_tokens, ledger.committed) for s in record.shards]
            or [[None] * 12],
        )
        con.execute("DELETE FROM shards WHERE shard IS NULL")
        self._view(con, "results", bool(ledger.committed), _empty(self._dataset, ledger))
        steps = self._folder / "telemetry" / "steps"
        self._view(con, "telemetry/steps", any(steps.glob("*.parquet")), _EMPTY_STEPS)
        con.commit()

    def _view(
        self, con: duckdb.DuckDBPyConnection, folder: str, filled: bool, empty: Any
    ) -> None:
        """A view over the Parquet files of a folder, or a typed empty one before there are any."""
        name = folder.rsplit("/", 1)[-1]
        if filled:
            files = str((self._folder / folder).resolve() / "*.parquet").replace("'", "''")
            con.execute(f"CREATE OR REPLACE VIEW {name} AS FROM read_parquet('{files}')")
            return
        con.register("empty_rows", empty)
        con.execute("CREATE OR REPLACE TEMP TABLE typed AS FROM empty_rows")
        described = con.execute("DESCRIBE typed").fetchall()
        columns = ", ".join(f'NULL::{kind} AS "{column}"' for column, kind, *_ in described)
        con.execute(f"CREATE OR REPLACE VIEW {name} AS SELECT {columns} WHERE false")
        con.unregister("empty_rows")


def migrate(con: duckdb.DuckDBPyConnection) -> None:
    """Apply the migrations that the file lacks, in order."""
    con.execute("CREATE TABLE IF NOT EXISTS migrations (name VARCHAR)")
    applied = {name for (name,) in con.execute("SELECT name FROM migrations").fetchall()}
    for migration in MIGRATIONS:
        if migration.__name__ not in applied:
            migration(con)
            con.execute("INSERT INTO migrations VALUES (?)", [migration.__name__])


def _shard_row(
    index: int, num_rows: int, est_tokens: int, committed: Any
) -> Sequence[Any]:
    summary: ShardSummary | None = committed.get(index)
    if summary is None:
        return [index, num_rows, est_tokens, False, *[None] * 8]
    by_status = [summary.by_status.get(s, 0) for s in ("ok", "error", "invalid_output", "skipped")]
    return [
        index, num_rows, est_tokens, True, summary.file, summary.num_bytes, *by_status,
        summary.prompt_tokens, summary.completion_tokens,
    ]  # fmt: skip


def _empty(dataset: Dataset, ledger: Ledger) -> Any:
    return result_schema(dataset.schema, ledger.record.columns).empty_table()


def _empty_steps() -> Any:
    from storage.telemetry import STEPS

    return STEPS.empty_table()


_EMPTY_STEPS = _empty_steps()
