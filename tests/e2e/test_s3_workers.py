"""Two worker processes from `s3://` to `s3://`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.runner import run_job
from flows.spec import JobSpec
from storage.status import read_status
from tests.e2e.cases import in_one_process, results
from tests.e2e.jobs import comparable, worker_model, write_dataset
from tests.services.seaweed import SeaweedServer, client

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_the_rows_are_those_of_a_local_job(
    s3_environment: SeaweedServer, s3_bucket: str, tmp_path: Path
) -> None:
    rows = write_dataset(tmp_path / "in.parquet", 700)
    with client(s3_environment.endpoint) as fs:
        fs.put_file(str(rows), f"{s3_bucket}/in.parquet")
    spec = JobSpec.model_validate(
        {
            "input": f"s3://{s3_bucket}/in.parquet",
            "output": f"s3://{s3_bucket}/out",
            "prompt": "{{ text }}",
            "keep_columns": ["n"],
            "shard_tokens": 4000,
            "sampling": {"max_tokens": 12},
            "engine": {"workers": 2},
        }
    )
    assert run_job(spec, find_model=worker_model).by_status == {"ok": 700}
    assert read_status(spec.output).complete
    local = in_one_process(spec, tmp_path / "local", input=str(rows))
    assert run_job(local, find_model=worker_model).complete
    assert comparable(read_remote(s3_environment, f"{s3_bucket}/out")) == comparable(results(local))


def read_remote(server: SeaweedServer, place: str) -> list[dict[str, Any]]:
    """All committed rows, in the order of the files' names."""
    found: list[dict[str, Any]] = []
    with client(server.endpoint) as fs:
        for name in sorted(fs.ls(f"{place}/results", detail=False)):
            with fs.open(name, "rb") as file:
                found += pq.read_table(pa.BufferReader(file.read())).to_pylist()
    return found
