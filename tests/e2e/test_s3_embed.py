"""Partitioned embedding jobs from `s3://` to `s3://` on a real server: sorted there, broken off and
gone on with, through faults, and seen from elsewhere.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest

from flows.runner import run_job
from flows.spec import JobSpec
from storage.catalogue import FILE
from storage.hive import NULL_FOLDER
from storage.status import read_status
from tests.e2e.cases import write_table
from tests.e2e.jobs import Behaviour, fake_encoder_model, worker_model
from tests.e2e.test_cli_job import Shell
from tests.e2e.test_embed import embed_spec, lognormal, vector_of, write_keyed
from tests.services.faults import FaultProxy
from tests.services.seaweed import SeaweedServer, client
from workers.backends.fake_encoder import FakeEncodeFaults
from workers.errors import BackendError

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine's memory of earlier jobs: none."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HEADRACE_CACHE", str(folder))
    return folder


@pytest.fixture
def proxy(s3_environment: SeaweedServer) -> Iterator[FaultProxy]:
    with FaultProxy(s3_environment.endpoint) as proxy:
        yield proxy


class Bucket:
    """A bucket, the input that is in it, and what a job has written there."""

    def __init__(self, server: SeaweedServer, name: str, folder: Path) -> None:
        self._endpoint = server.endpoint
        self._folder = folder
        self.name = name
        self.local = ""

    def spec(self, local: str, **fields: Any) -> JobSpec:
        """A job over a file of this machine, that is copied to the bucket."""
        self.local = local
        with client(self._endpoint) as fs:
            fs.put_file(local, f"{self.name}/in/rows.parquet")
        output = f"s3://{self.name}/out"
        return embed_spec(self._folder, f"s3://{self.name}/in/", **{"output": output, **fields})

    def files(self) -> dict[str, list[dict[str, Any]]]:
        """The rows of each result file, by the folders it lies in."""
        root = f"{self.name}/out/results/"
        with client(self._endpoint) as fs:
            fs.invalidate_cache()
            return {
                path[len(root) :].rpartition("/")[0]: pq.ParquetFile(fs.open(path))
                .read()
                .to_pylist()
                for path in fs.find(root)
            }

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Of the output's catalogue, on a copy of it."""
        copy = self._folder / "copy.duckdb"
        with client(self._endpoint) as fs:
            copy.write_bytes(fs.cat_file(f"{self.name}/out/{FILE}"))
        with duckdb.connect(str(copy), read_only=True) as con:
            return con.execute(sql).fetchall()

    def check(self) -> None:
        """Every row is there once, under its key and in order, with its own vector."""
        inputs = pq.read_table(self.local).to_pylist()
        files = self.files()
        assert set(files) == {f"key={row['key']}" for row in inputs}
        ids = [row["row_id"] for rows in files.values() for row in rows]
        assert Counter(ids) == Counter(row["id"] for row in inputs)
        by_id = {row["id"]: row for row in inputs}
        for folder, rows in files.items():
            assert [row["n"] for row in rows] == sorted(row["n"] for row in rows)
            for row in rows:
                given = by_id[row["row_id"]]
                assert (f"key={given['key']}", given["n"], "ok") == (
                    folder,
                    row["n"],
                    row["status"],
                )
                assert row["embedding"] == vector_of(given["text"])


@pytest.fixture
def bucket(s3_environment: SeaweedServer, s3_bucket: str, tmp_path: Path) -> Bucket:
    return Bucket(s3_environment, s3_bucket, tmp_path)


@pytest.mark.parametrize("grouped", [True, False])
def test_every_row_is_under_its_key(
    bucket: Bucket, tmp_path: Path, grouped: bool, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    sizes = [*lognormal(30), 200]
    total = sum(sizes)
    spec = bucket.spec(write_keyed(tmp_path / "in.parquet", sizes, grouped=grouped))
    assert run_job(spec, model=fake_encoder_model()).complete
    bucket.check()

    monkeypatch.setenv("COLUMNS", "200")
    flows = Shell(capsys)
    assert flows("status", spec.output) == 0
    assert f"{total} of {total} (100.0%)" in flows.out
    assert "no, complete" in flows.out
    rows = bucket.query("select row_id, key, n, status, len(embedding) from results")
    given = pq.read_table(bucket.local).to_pylist()
    assert Counter(rows) == Counter((r["id"], r["key"], r["n"], "ok", 8) for r in given)
    assert bucket.query("select sum(num_texts) from encodes") == [(total,)]
    assert run_job(spec, model=unloadable()).by_status == {"ok": total}  # nothing is left to do


def unloadable() -> Any:
    """A model that fails at its first text."""
    return fake_encoder_model(faults=FakeEncodeFaults(fail_at_call=1))


@pytest.mark.slow
@pytest.mark.parametrize("grouped", [True, False])
def test_a_job_that_failed_goes_on_with_what_is_left(
    bucket: Bucket, tmp_path: Path, grouped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_keyed(tmp_path / "in.parquet", lognormal(35, seed=5), grouped=grouped)
    spec, seen = bucket.spec(source), list[int]()
    for attempt in range(2):
        faults = FakeEncodeFaults(fail_at_call=3 + attempt)
        with pytest.raises(BackendError, match="scripted"):
            run_job(spec, model=fake_encoder_model(faults=faults))
    total, status = pq.read_metadata(source).num_rows, read_status(spec.output)
    assert 0 < status.committed_rows < total
    assert status.lease is None
    flows = Shell(capsys)
    assert flows("status", spec.output) == 0
    assert f"{status.done_rows} of {total}" in flows.out
    run_job(spec, model=fake_encoder_model(on_execute=lambda texts: seen.append(len(texts))))
    assert sum(seen) == total - status.done_rows
    bucket.check()


@pytest.mark.slow
@pytest.mark.parametrize("grouped", [True, False])
def test_faults_on_the_way_change_nothing(
    bucket: Bucket, proxy: FaultProxy, tmp_path: Path, grouped: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    spec = bucket.spec(write_keyed(tmp_path / "in.parquet", lognormal(40, 1), grouped=grouped))
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.add("slow_down", times=None, chance=0.08)
        proxy.add("drop_after", times=None, chance=0.03)
        proxy.add("truncate", times=None, method="GET", chance=0.05)
        summary = run_job(spec, model=fake_encoder_model())
    assert summary.complete
    assert proxy.faults["slow_down"] > 3
    assert summary.num_retries > 10
    bucket.check()
    assert bucket.query("select count(*), count(distinct row_id) from results") == [
        (summary.total_rows, summary.total_rows)
    ]


@pytest.mark.slow
def test_two_workers_write_what_one_does(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in Behaviour(delay_s=0.01).environ().items():
        monkeypatch.setenv(name, value)
    source = write_keyed(tmp_path / "in.parquet", lognormal(60, seed=2), grouped=False)
    spec = bucket.spec(source, engine={"workers": 2})
    assert run_job(spec, find_model=worker_model).complete
    bucket.check()


def test_odd_keys_and_rows_without_a_text(bucket: Bucket, tmp_path: Path) -> None:
    keys = ["a/b", "a%2Fb", None, "ü 漢", "x=?&#+*", "", "null", "..", "a b"] * 2
    texts = [None if n == 4 else "  " if n == 7 else f"text {n}" for n in range(len(keys))]
    source = write_table(
        tmp_path / "in.parquet", id=[f"r{n}" for n in range(len(keys))], key=keys,
        n=range(len(keys)), text=texts,
    )  # fmt: skip
    spec = bucket.spec(source, max_error_rate=0.5)
    summary = run_job(spec, model=fake_encoder_model())
    assert summary.by_status == {"ok": 16, "skipped": 1, "error": 1}
    found = bucket.query("select n, key, status, embedding from results order by n")
    assert [(n, key) for n, key, _, _ in found] == list(enumerate(keys))
    assert [n for n, _, _, vector in found if vector is None] == [4, 7]
    for n, _, status, vector in found:
        if status == "ok":
            assert list(vector) == vector_of(f"text {n}")
    assert len(bucket.files()) == 9


def test_the_one_text_that_pyarrow_takes_for_null(bucket: Bucket, tmp_path: Path) -> None:
    keys = [None, NULL_FOLDER]
    source = write_table(
        tmp_path / "in.parquet", id=["a", "b"], key=keys, n=[0, 1], text=["one", "two"]
    )
    run_job(bucket.spec(source), model=fake_encoder_model())
    assert bucket.query("select key from results order by n") == [(None,), (NULL_FOLDER,)]


def test_the_sorted_input_and_the_spill_are_where_they_should_be(
    bucket: Bucket, tmp_path: Path, cache: Path
) -> None:
    """Of an input that is not grouped: its sorted form is in the output, and nothing stays here."""
    spec = bucket.spec(write_keyed(tmp_path / "in.parquet", lognormal(20), grouped=False))
    run_job(spec, model=fake_encoder_model())
    with client(os.environ["AWS_ENDPOINT_URL"]) as fs:
        sorted_files = fs.find(f"{bucket.name}/out/_input")
        assert sorted_files
        keys = [
            key
            for path in sorted(sorted_files)
            if path.endswith(".parquet")
            for key in pq.ParquetFile(fs.open(path)).read()["key"].to_pylist()
        ]
    assert keys == sorted(keys)
    assert len(keys) == pq.read_metadata(bucket.local).num_rows
    assert [path for path in cache.rglob("*") if path.is_file() and "spill" in path.parts] == []
