"""`job.duckdb` says what the files say, at any time, and never stands in a run's way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from storage.catalogue import FILE, Catalogue, migrate
from storage.telemetry import STEPS, TelemetryWriter
from tests.unit.storage.outputs import Job, write_input

TEXTS = ["a", "bb", None, "d", "ee"]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Five rows, one of them bad, in two shards."""
    rows = {"text": TEXTS, "number": list(range(5))}
    return Job(write_input(tmp_path / "in.parquet", rows), tmp_path / "out", 3, kept=("number",))


def rebuild(job: Job, *, tries: int = 1) -> str | None:
    ledger = job.open()
    try:
        slept: list[float] = []
        warning = Catalogue(job.output, job.dataset, tries=tries, sleep=slept.append).rebuild(
            ledger
        )
        assert len(slept) == (0 if warning is None else tries - 1)
    finally:
        ledger.release()
    return warning


def query(job: Job, sql: str) -> list[tuple[Any, ...]]:
    with duckdb.connect(str(job.output / FILE), read_only=True) as con:
        return con.execute(sql).fetchall()


def columns(job: Job, view: str) -> list[tuple[str, str]]:
    return [(name, kind) for name, kind, *_ in query(job, f"DESCRIBE {view}")]


def test_before_the_first_commit_views_are_empty_and_have_their_types(job: Job) -> None:
    assert rebuild(job) is None
    assert query(job, "SELECT * FROM results") == []
    assert query(job, "SELECT * FROM steps") == []
    early = columns(job, "results")
    job.run()
    assert rebuild(job) is None
    assert columns(job, "results") == early
    assert ("number", "BIGINT") in early and ("text", "VARCHAR") in early


def test_c53_results_are_the_committed_rows_in_input_order(job: Job) -> None:
    job.run()
    rebuild(job)
    assert query(job, "SELECT row_id, number, text, status FROM results") == [
        (f"in.parquet:{i}", i, text and text.upper(), "ok" if text else "error")
        for i, text in enumerate(TEXTS)
    ]


def test_results_follow_the_files_without_an_update(job: Job) -> None:
    job.run()
    rebuild(job)
    (job.output / "results" / "shard-00001.parquet").unlink()
    assert query(job, "SELECT count(*) FROM results") == [(3,)]


def test_shards_and_jobs_say_what_the_markers_say(job: Job) -> None:
    rebuild(job)
    assert query(job, "SELECT shard, num_rows, committed, ok FROM shards") == [
        (0, 3, False, None), (1, 2, False, None),
    ]  # fmt: skip
    job.run()
    rebuild(job)
    rebuild(job)  # again changes nothing
    assert query(
        job, "SELECT shard, num_rows, committed, ok, error, skipped, completion_tokens FROM shards"
    ) == [(0, 3, True, 2, 1, 0, 2), (1, 2, True, 2, 0, 0, 2)]
    assert query(job, "SELECT job_id, total_rows, total_shards FROM jobs") == [("job", 5, 2)]
    assert query(job, "SELECT generation->>'model' FROM jobs") == [("m",)]


def test_steps_are_the_telemetry_of_all_runs(job: Job) -> None:
    ledger = job.open()
    for run in ("r1", "r2"):
        writer = TelemetryWriter(ledger.store, "steps", run)
        step: dict[str, Any] = {field.name: "" if field.type == "string" else 0 for field in STEPS}
        writer.add({**step, "phase": "decode", "reason": "", "step": 7})
        writer.flush(force=True)
    ledger.release()
    rebuild(job)
    assert query(job, "SELECT run_id, step, phase FROM steps ORDER BY run_id") == [
        ("r1", 7, "decode"), ("r2", 7, "decode"),
    ]  # fmt: skip


def test_a_deleted_catalogue_is_rebuilt_from_the_files(job: Job) -> None:
    job.run()
    rebuild(job)
    before = query(job, "FROM shards"), query(job, "FROM results")
    (job.output / FILE).unlink()
    rebuild(job)
    assert (query(job, "FROM shards"), query(job, "FROM results")) == before


HOLD = """
import duckdb, sys
con = duckdb.connect(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_process(job: Job) -> Iterator[None]:
    """Holds the job's catalogue."""
    rebuild(job)
    command = [sys.executable, "-c", HOLD, str(job.output / FILE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield
        process.communicate()
        assert process.returncode == 0


def test_c44_a_run_goes_on_while_another_process_holds_the_file(
    job: Job, other_process: None
) -> None:
    job.run()
    warning = rebuild(job, tries=3)
    assert warning is not None and "was not brought up to date" in warning
    assert [row["number"] for row in job.results()] == list(range(5))


def test_c44_the_next_update_after_the_lock_is_whole(job: Job) -> None:
    job.run()
    command = [sys.executable, "-c", HOLD, str(job.output / FILE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert rebuild(job) is not None
        process.communicate()
    assert rebuild(job) is None
    assert query(job, "SELECT count(*) FROM results") == [(5,)]


def test_a_damaged_catalogue_is_a_warning_that_says_what_to_do(job: Job) -> None:
    job.run()
    (job.output / FILE).write_bytes(b"not a database" * 1000)
    warning = rebuild(job)
    assert warning is not None and "delete it; the next run rebuilds it" in warning
    assert len(job.results()) == 5


@pytest.mark.parametrize("folder", ["out 'quoted'", "out [1]*"])
def test_the_output_may_have_any_name(job: Job, folder: str) -> None:
    job.output = job.output.with_name(folder)
    job.run()
    job.output.with_name("out 1").mkdir()  # what the name would match as a pattern
    rebuild(job)
    assert query(job, "SELECT count(*) FROM results") == [(5,)]


def test_a_name_that_duckdb_would_misread_gets_a_warning_and_no_file_elsewhere(job: Job) -> None:
    """In `out?/job.duckdb` it would take what follows `?` for options, and write to `out`."""
    job.output = job.output.with_name("out?")
    job.run()
    warning = rebuild(job, tries=1)
    assert warning is not None and "'?'" in warning
    assert sorted(path.name for path in job.output.parent.iterdir()) == ["in.parquet", "out?"]


def test_kept_columns_of_any_type_and_name_have_an_empty_view_too(tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": ["a"],
            'a "quoted" name': [1],
            "chat": pa.array([[{"role": "user"}]]),
            "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
            "word": pa.array(["w"]).dictionary_encode(),
            "price": pa.array([1], pa.int32()).cast(pa.decimal128(12, 2)),
            "when": pa.array([0], pa.timestamp("us", "UTC")),
            "view": pa.array(["v"], pa.string_view()),
        }
    )
    kept = tuple(name for name in table.column_names if name != "text")
    job = Job(write_input(tmp_path / "in.parquet", table), tmp_path / "out", kept=kept)
    assert rebuild(job) is None
    early = columns(job, "results")
    job.run()
    assert rebuild(job) is None
    assert columns(job, "results") == early
    assert len(early) == len(set(early)) == len(kept) + 12


def test_migrations_are_applied_once_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with duckdb.connect() as con:
        migrate(con)
        applied: list[str] = []

        def m002_more(con: duckdb.DuckDBPyConnection) -> None:
            applied.append("m002")
            con.execute("CREATE TABLE more (x INTEGER)")

        from storage.catalogue import MIGRATIONS

        monkeypatch.setattr("storage.catalogue.MIGRATIONS", [*MIGRATIONS, m002_more])
        migrate(con)
        migrate(con)
        assert applied == ["m002"]
        names = con.execute("SELECT name FROM migrations").fetchall()
        assert names == [("m001_tables",), ("m002_more",)]
