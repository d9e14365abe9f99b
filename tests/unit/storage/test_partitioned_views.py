"""`job.duckdb` and the views in memory: partitioned vectors with their keys, in the keys' types."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import pytest

from storage.catalogue import FILE, Catalogue
from storage.ledger import Ledger
from storage.objects import ObjectStore
from storage.remote_catalogue import RemoteCatalogue
from storage.telemetry import ENCODES, TelemetryWriter
from storage.views import open_views
from tests.unit.storage.outputs import write_input
from tests.unit.storage.partitioned import VectorJob, vector_of

ROWS = [("007", 1), ("007", 1), ("7", 1), (None, 2), ("a/b", None)]
QUERY = 'SELECT row_id, "key", "the year", embedding, status FROM results ORDER BY row_id'


@pytest.fixture
def job(tmp_path: Path) -> VectorJob:
    """Five rows in four partitions of two keys."""
    rows: dict[str, Any] = {
        "key": [key for key, _ in ROWS],
        "the year": [year for _, year in ROWS],
        "text": ["a", None, "c", "d", "e"],
    }
    file = write_input(tmp_path / "in.parquet", rows)
    return VectorJob(file, tmp_path / "out", keys=("key", "the year"), batch_rows=2)


def expected() -> list[tuple[Any, ...]]:
    texts = ["a", None, "c", "d", "e"]
    return [
        (f"in.parquet:{n}", *ROWS[n], vector_of(text) if text else None, "ok" if text else "error")
        for n, text in enumerate(texts)
    ]


def as_read(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(*row[:3], None if row[3] is None else list(row[3]), row[4]) for row in rows]


def rebuild(job: VectorJob) -> Ledger:
    ledger = job.open()
    assert Catalogue(Path(job.output), job.dataset).rebuild(ledger) is None
    ledger.release()
    return ledger


def query(job: VectorJob, sql: str) -> list[tuple[Any, ...]]:
    with duckdb.connect(str(Path(job.output) / FILE), read_only=True) as con:
        return con.execute(sql).fetchall()


def test_results_have_the_keys_in_their_types_before_and_after_the_first_commit(
    job: VectorJob,
) -> None:
    rebuild(job)
    assert query(job, "FROM results") == []
    early = query(job, "DESCRIBE results")
    job.run()
    rebuild(job)
    rebuild(job)  # again changes nothing
    late = query(job, "DESCRIBE results")
    assert [row[0] for row in early] == [row[0] for row in late]
    kinds = {row[0]: row[1] for row in late}
    assert (kinds["key"], kinds["the year"]) == ("VARCHAR", "BIGINT")
    assert kinds == {row[0]: row[1] for row in early} | {"embedding": kinds["embedding"]}
    assert as_read(query(job, QUERY)) == expected()
    assert query(job, "SELECT count(*) FROM results WHERE \"key\" = '007'") == [(2,)]
    job.kept = ("text",)
    rebuild(job)
    assert query(job, "SELECT text FROM results WHERE \"key\" = '7'") == [("c",)]
    assert query(job, "SELECT shard, committed, ok, error, num_rows FROM shards") == [
        (0, True, 1, 1, 2), (1, True, 2, 0, 2), (2, True, 1, 0, 1),
    ]  # fmt: skip


def test_views_in_memory_have_the_keys_too(job: VectorJob) -> None:
    job.open().release()
    with closing(open_views(ObjectStore(str(job.output)))) as con:
        assert con.execute(QUERY).fetchall() == []
    job.run()
    with closing(open_views(ObjectStore(str(job.output)))) as con:
        assert as_read(con.execute(QUERY).fetchall()) == expected()


def test_views_of_vectors_without_partitions(tmp_path: Path) -> None:
    job = VectorJob(
        write_input(tmp_path / "in.parquet", {"key": ["k"], "text": ["a"]}), tmp_path / "out"
    )
    job.run()
    with closing(open_views(ObjectStore(str(job.output)))) as con:
        found = con.execute("SELECT embedding FROM results").fetchall()
    assert [list(row[0]) for row in found] == [vector_of("a")]


@pytest.mark.parametrize("results_bytes", [0, 1 << 20])
def test_a_remote_output_has_them_in_its_file(
    job: VectorJob, tmp_path: Path, results_bytes: int
) -> None:
    job.output = f"memory://partitioned-views/{results_bytes}"
    job.run()
    store = ObjectStore(str(job.output))
    ledger = job.open(wall_clock=lambda: 1000.0)
    made = RemoteCatalogue(tmp_path / "cache", store, job.dataset, results_bytes=results_bytes)
    assert made.close(ledger) is None
    ledger.release()
    (tmp_path / "fetched.duckdb").write_bytes(store.read(FILE))
    with duckdb.connect(str(tmp_path / "fetched.duckdb"), read_only=True) as con:
        con.register_filesystem(fsspec.filesystem("memory"))
        assert as_read(con.execute(QUERY).fetchall()) == expected()
    with closing(open_views(store)) as con:
        assert as_read(con.execute(QUERY).fetchall()) == expected()
    fsspec.filesystem("memory").rm("/partitioned-views", recursive=True)


def test_encode_calls_are_a_table(job: VectorJob) -> None:
    job.run()
    writer = TelemetryWriter(ObjectStore(str(job.output)), "encodes", "run-a")
    writer.add({field.name: 1 for field in ENCODES if field.name != "run_id"})
    writer.flush(force=True)
    rebuild(job)
    assert query(job, "SELECT run_id, num_texts, width FROM encodes") == [("run-a", 1, 1)]
