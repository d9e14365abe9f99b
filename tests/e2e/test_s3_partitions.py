"""Partitioned vectors on a real S3 server: faults, kills at each step, odd keys, many files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest

from storage.errors import OutputInUse
from storage.hive import NULL_FOLDER
from storage.lease import LEASE
from storage.objects import ObjectStore
from storage.rows import RowReader
from storage.status import read_status
from storage.views import open_views
from tests.services.faults import FaultProxy
from tests.services.seaweed import SeaweedServer, client
from tests.unit.storage.outputs import Crash, crash_at, write_input
from tests.unit.storage.partitioned import VectorJob, vector_of

pytestmark = pytest.mark.e2e

KEYS = ["a/b", "a/b", "a%2Fb", None, "ü 漢", "ü 漢", "ü 漢", "x=?&#+*"]


@pytest.fixture
def proxy(s3_environment: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Between this process and the server."""
    with FaultProxy(s3_environment.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture
def job(tmp_path: Path, s3_bucket: str) -> VectorJob:
    """Eight rows in five partitions, in three superbatches."""
    rows = {"key": KEYS, "text": [f"t{n}" for n in range(len(KEYS))]}
    file = write_input(tmp_path / "in.parquet", rows)
    return VectorJob(file, f"s3://{s3_bucket}/out", batch_rows=3, slice_rows=2)


def results(server: SeaweedServer, url: str) -> dict[str, list[dict[str, Any]]]:
    """Rows by folder, read past the faults."""
    root = f"{url.removeprefix('s3://')}/results/"
    with client(server.endpoint) as fs:
        fs.invalidate_cache()
        return {
            name[len(root) :].rpartition("/")[0]: pq.ParquetFile(fs.open(name)).read().to_pylist()
            for name in fs.find(root)
        }


def check(server: SeaweedServer, job: VectorJob) -> None:
    found = results(server, str(job.output))
    assert sorted(found) == [
        f"key={NULL_FOLDER}", "key=a%252Fb", "key=a%2Fb", "key=x%3D%3F%26%23%2B%2A", "key=ü%20漢",
    ]  # fmt: skip
    rows = [row for held in found.values() for row in held]
    assert {row["row_id"]: row["embedding"] for row in rows} == {
        f"in.parquet:{n}": vector_of(f"t{n}") for n in range(len(KEYS))
    }
    assert len(rows) == len(KEYS)
    status = read_status(str(job.output))
    assert status.complete and status.lease is None and status.by_status == {"ok": len(KEYS)}


def test_partitions_are_committed_through_faults(
    proxy: FaultProxy, s3_server: SeaweedServer, job: VectorJob
) -> None:
    proxy.add("drop_after", times=None, chance=0.1)
    proxy.add("slow_down", times=None, chance=0.1)
    proxy.add("truncate", times=None, method="GET", chance=0.1)
    job.checkpoint_blocks = 1
    job.run()
    proxy.clear()
    assert proxy.num_faults > 3
    check(s3_server, job)
    job.run()
    assert len(job.encoded) == len(KEYS)
    with closing(open_views(ObjectStore(str(job.output)))) as con:
        found = con.execute("SELECT DISTINCT key FROM results").fetchall()
    assert {key for (key,) in found} == set(KEYS)


@pytest.mark.parametrize("checkpoint_blocks", [1, 1000])
def test_a_kill_at_each_step_loses_and_repeats_no_row(
    s3_environment: SeaweedServer, job: VectorJob, checkpoint_blocks: int
) -> None:
    job.checkpoint_blocks = checkpoint_blocks
    base, number = str(job.output), 0
    while True:
        job.output = f"{base}-{number}"
        try:
            job.run(on_step=crash_at(number))
        except Crash:
            number += 3
            job.run()
            check(s3_environment, job)
            continue
        break
    assert number > 12


def test_a_run_that_was_taken_over_commits_no_superbatch(
    s3_environment: SeaweedServer, job: VectorJob
) -> None:
    first = job.open()
    writer = first.writer(first.shards[0])
    rows = [r for batch in RowReader(first.dataset, ("text",)).rows(first.shards[0]) for r in batch]
    job.add(writer, [row._replace(values={"text": "another, longer text"}) for row in rows])
    store = ObjectStore(str(job.output))
    store.delete(LEASE)  # as stale as it gets
    job.run()
    before = store.read("_markers/shard-00000.json")
    with pytest.raises(OutputInUse, match="another run has taken the output over"):
        writer.close()
    assert store.read("_markers/shard-00000.json") == before
    assert orjson.loads(before)["num_files"] == 2
    job.run()
    held = results(s3_environment, str(job.output))
    assert sum(map(len, held.values())) == len(KEYS)
    assert read_status(str(job.output)).complete
