"""`job.duckdb` of a remote output: whole when the run ends, also where results are large."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import pytest

from storage.catalogue import FILE
from storage.errors import OutputError
from storage.ledger import Ledger
from storage.objects import ObjectStore
from storage.remote_catalogue import RemoteCatalogue
from storage.telemetry import RETRIES, TelemetryWriter
from tests.unit.storage.outputs import Job, write_input

TEXTS = ["a", "bb", None, "d", "ee"]
URL = "memory://remote-catalogue/out"


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    """A remote output that holds a finished job of five rows in two shards."""
    yield ObjectStore(URL)
    fs = fsspec.filesystem("memory")
    if fs.exists("/remote-catalogue"):
        fs.rm("/remote-catalogue", recursive=True)


@pytest.fixture
def job(tmp_path: Path, store: ObjectStore) -> Job:
    rows = {"text": TEXTS, "number": list(range(5))}
    job = Job(write_input(tmp_path / "in.parquet", rows), tmp_path / "out", 3, kept=("number",))
    job.run()
    for path in job.output.rglob("*"):
        if path.is_file():
            store.write(str(path.relative_to(job.output)), path.read_bytes())
    return job


@pytest.fixture
def ledger(job: Job) -> Iterator[Ledger]:
    """Of the same job: what it knows is what the remote output holds."""
    ledger = job.open()
    yield ledger
    ledger.release()


def catalogue(job: Job, store: ObjectStore, folder: Path, **options: Any) -> RemoteCatalogue:
    return RemoteCatalogue(folder / "cache" / "job", store, job.dataset, **options)


def fetched(store: ObjectStore, folder: Path) -> duckdb.DuckDBPyConnection:
    (folder / "fetched.duckdb").write_bytes(store.read(FILE))
    return duckdb.connect(str(folder / "fetched.duckdb"), read_only=True)


def comment(con: duckdb.DuckDBPyConnection, kind: str) -> str:
    query = f"SELECT comment FROM duckdb_{kind}s() WHERE {kind}_name = 'results'"
    ((text,),) = con.execute(query).fetchall()
    return str(text)


def test_while_a_run_goes_on_the_local_file_says_how_far_it_is(
    job: Job, store: ObjectStore, ledger: Ledger, tmp_path: Path
) -> None:
    made = catalogue(job, store, tmp_path)
    assert made.rebuild(ledger) is None
    assert made.rebuild(ledger) is None
    with duckdb.connect(str(made.path), read_only=True) as con:
        assert con.execute("SELECT count(*) FROM shards WHERE committed").fetchall() == [(2,)]
        assert con.execute("SELECT job_id FROM jobs").fetchall() == [("job",)]
    assert not store.exists(FILE)


def test_small_results_are_in_the_file_in_input_order(
    job: Job, store: ObjectStore, ledger: Ledger, tmp_path: Path
) -> None:
    writer = TelemetryWriter(store, "retries", "run-a")
    writer.add({field.name: None for field in RETRIES if field.name != "run_id"})
    writer.flush(force=True)
    made = catalogue(job, store, tmp_path)
    assert made.close(ledger) is None
    with fetched(store, tmp_path) as con:
        rows = con.execute("SELECT number, text FROM results").fetchall()
        assert rows == [(i, text and text.upper()) for i, text in enumerate(TEXTS)]
        assert con.execute("SELECT run_id FROM retries").fetchall() == [("run-a",)]
        assert con.execute("SELECT * FROM steps").fetchall() == []
        assert con.execute("SELECT * FROM step_costs").fetchall() == []
        assert f"Copied from {URL}/results/" in comment(con, "table")
    assert not made.path.exists()


def test_large_results_are_a_view_that_says_how_it_is_read(
    job: Job, store: ObjectStore, ledger: Ledger, tmp_path: Path
) -> None:
    assert catalogue(job, store, tmp_path, results_bytes=0).close(ledger) is None
    with fetched(store, tmp_path) as con:
        assert "con.register_filesystem(fsspec.filesystem('memory'))" in comment(con, "view")
        assert con.execute("SELECT count(*) FROM shards").fetchall() == [(2,)]
        con.register_filesystem(fsspec.filesystem("memory"))
        assert con.execute("SELECT number FROM results ORDER BY ALL").fetchall() == [
            (number,) for number in range(5)
        ]


def test_without_results_there_is_an_empty_table(
    job: Job, store: ObjectStore, tmp_path: Path
) -> None:
    fresh = Job(job.input, tmp_path / "fresh", 3, kept=("number",))
    ledger = fresh.open()
    store.delete_folder("results")
    assert catalogue(fresh, store, tmp_path, results_bytes=0).close(ledger) is None
    ledger.release()
    with fetched(store, tmp_path) as con:
        assert con.execute("SELECT * FROM results").fetchall() == []


def test_a_second_run_writes_the_file_anew(
    job: Job, store: ObjectStore, ledger: Ledger, tmp_path: Path
) -> None:
    for _ in range(2):
        assert catalogue(job, store, tmp_path).close(ledger) is None
    with fetched(store, tmp_path) as con:
        assert con.execute("SELECT count(*) FROM results").fetchall() == [(5,)]


def test_what_cannot_be_written_is_a_warning(
    job: Job, store: ObjectStore, ledger: Ledger, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("in the way")
    warning = catalogue(job, store, tmp_path).rebuild(ledger)
    assert warning is not None and FILE in warning
    (tmp_path / "cache").unlink()

    class Full(ObjectStore):
        """A store that takes no more."""

        def writer(self, name: str, **_: Any) -> Any:
            raise OutputError(f"{name} cannot be written: it is full")

    warning = catalogue(job, Full(URL), tmp_path).close(ledger)
    assert warning is not None and "it is full" in warning and "next run writes it" in warning
    shutil.rmtree(tmp_path / "cache")
