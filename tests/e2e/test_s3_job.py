"""Whole jobs from `s3://` to `s3://` on a real server: faults, kills, two at once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest

from flows.runner import run_job
from flows.spec import JobSpec
from storage.catalogue import FILE
from storage.errors import InputError
from storage.remote_catalogue import RemoteCatalogue
from storage.status import read_status
from tests.e2e.cases import Witness, make_spec
from tests.e2e.jobs import TokenLog, comparable, fake_model, write_dataset
from tests.e2e.test_cli_job import Shell
from tests.services.faults import FaultProxy
from tests.services.seaweed import ADMIN, READER, STRANGER, Keys, SeaweedServer, client

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
FIELDS: dict[str, Any] = {
    "shard_tokens": 3000, "checkpoint_s": 0.2, "keep_columns": ["n"], "engine": {"max_seqs": 16},
}  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine's memory of earlier jobs: none."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HEADRACE_CACHE", str(folder))
    return folder


class Bucket:
    """A bucket with an input of `num_rows` rows, and jobs over it."""

    def __init__(self, server: SeaweedServer, name: str, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self.name = name

    def put_input(self, num_rows: int) -> str:
        """The input's URL."""
        local = write_dataset(self._folder / f"in-{num_rows}.parquet", num_rows)
        with client(self._server.endpoint) as fs:
            fs.put_file(str(local), f"{self.name}/in/{local.name}")
        return f"s3://{self.name}/in/"

    def spec(self, num_rows: int, output: str = "out", **fields: Any) -> JobSpec:
        source = self.put_input(num_rows)
        target = f"s3://{self.name}/{output}"
        return make_spec(self._folder, input=source, output=target, **{**FIELDS, **fields})

    def rows(self, spec: JobSpec) -> list[dict[str, Any]]:
        """All committed rows, in order."""
        with client(self._server.endpoint) as fs:
            files = sorted(fs.glob(f"{spec.output}/results/*.parquet"))
            tables = [pq.ParquetFile(fs.open(file)).read() for file in files]
        return [row for table in tables for row in table.to_pylist()]

    def fetch(self, spec: JobSpec, name: str) -> Path:
        """A file of the output, on this machine."""
        local = self._folder / "fetched" / name
        local.parent.mkdir(exist_ok=True)
        with client(self._server.endpoint) as fs:
            local.write_bytes(fs.cat_file(f"{spec.output}/{name}"))
        return local

    def command(self, spec: JobSpec, log: TokenLog, *options: str) -> list[str]:
        job = self._folder / "job.json"
        job.write_text(json.dumps(spec.model_dump(mode="json")))
        module = [sys.executable, "-m", "tests.e2e.jobs"]
        return [*module, str(job), "--log", str(log.path), *options]


@pytest.fixture
def bucket(s3_environment: SeaweedServer, s3_bucket: str, tmp_path: Path, cache: Path) -> Bucket:
    return Bucket(s3_environment, s3_bucket, tmp_path)


@pytest.fixture
def proxy(s3_environment: SeaweedServer) -> Iterator[FaultProxy]:
    with FaultProxy(s3_environment.endpoint) as proxy:
        yield proxy


def check_all(rows: list[dict[str, Any]], num_rows: int) -> None:
    """Every row once, in order."""
    assert [row["n"] for row in rows] == list(range(num_rows))


# -- faults --


@pytest.mark.slow
def test_c48_a_job_through_faults_gives_the_rows_of_one_without(
    bucket: Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bucket.spec(600, "whole")
    assert run_job(whole, model=fake_model()).complete

    spec = bucket.spec(600)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    for kind in ("slow_down", "internal", "drop_before", "drop_after"):
        proxy.add(kind, times=None, chance=0.04)
    proxy.add("truncate", times=None, method="GET", chance=0.1)
    proxy.add("delay", times=None, chance=0.05, delay_s=0.3)
    summary = run_job(spec, model=fake_model())
    monkeypatch.undo()

    assert summary.complete and summary.num_retries > 10
    assert dict(summary.lines())["storage"] == f"{summary.num_retries:,} requests repeated"
    check_all(bucket.rows(spec), 600)
    assert comparable(bucket.rows(spec)) == comparable(bucket.rows(whole))
    with duckdb.connect(str(bucket.fetch(spec, FILE)), read_only=True) as con:
        told = con.execute("SELECT sum(num_retries), sum(waited_s) FROM retries").fetchone()
    assert told is not None
    assert 0 < told[0] <= summary.num_retries and told[1] > 0


def test_c46_credentials_that_expire_in_a_running_job_are_renewed(
    bucket: Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment has newer keys each time the server calls the old ones expired."""
    from tests.services.seaweed import ROTATED

    spec = bucket.spec(300)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)

    def rotate() -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ROTATED.access)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ROTATED.secret)

    def expire(batch: Any) -> None:
        if not proxy.faults:
            proxy.add("expired", times=None, key=ADMIN.access, on_fault=rotate)
        del batch

    assert run_job(spec, model=fake_model(on_execute=expire)).complete
    assert proxy.faults["expired"] >= 1
    check_all(bucket.rows(spec), 300)


# -- kills --


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_was_left_alone(
    bucket: Bucket, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"shard_tokens": 6000, "sampling": {"max_tokens": 20}}
    whole = bucket.spec(1000, "whole", **fields)
    one_pass = Witness()
    run_job(whole, model=fake_model(on_execute=one_pass))

    spec, log, rng = (
        bucket.spec(1000, **fields),
        TokenLog(tmp_path / "tokens.log"),
        random.Random(3),
    )
    num_killed = 0
    for last in (False, False, True):
        before = log.total()
        with subprocess.Popen(bucket.command(spec, log, "--delay-s", "0.02"), cwd=ROOT) as child:
            if last:
                break
            while log.total() == before and child.poll() is None:
                time.sleep(0.01)
            time.sleep(rng.uniform(0.2, 1.2))
            num_killed += child.poll() is None
            child.kill()
    assert child.returncode == 0
    assert num_killed == 2
    check_all(bucket.rows(spec), 1000)
    assert comparable(bucket.rows(spec)) == comparable(bucket.rows(whole))
    assert log.total() < 2 * one_pass.num_tokens
    status = read_status(spec.output)
    assert status.complete and status.lease is None


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_server_that_is_gone_for_a_while_ends_nothing(
    bucket: Bucket, s3_server: SeaweedServer, tmp_path: Path
) -> None:
    """Killed as by a power cut in the middle of a job, and started again on the same data.

    For half a minute and in all rounds: `tests/e2e/disturb.py`.
    """
    whole = bucket.spec(1500, "whole", shard_tokens=6000)
    one_pass = Witness()
    run_job(whole, model=fake_model(on_execute=one_pass))
    spec, log = bucket.spec(1500, shard_tokens=6000), TokenLog(tmp_path / "tokens.log")
    with subprocess.Popen(
        bucket.command(spec, log, "--delay-s", "0.03"),
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        while log.total() < 4000:
            assert child.poll() is None
            time.sleep(0.05)
        s3_server.kill()
        time.sleep(10)
        assert child.poll() is None, child.stderr and child.stderr.read()
        s3_server.start()
        _, said = child.communicate(timeout=120)
    assert child.returncode == 0, said
    assert "trying again for up to 90 s" in said
    check_all(bucket.rows(spec), 1500)
    assert comparable(bucket.rows(spec)) == comparable(bucket.rows(whole))
    assert log.total() <= 1.02 * one_pass.num_tokens, "rows were computed twice"
    assert read_status(spec.output).complete


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_that_is_stopped_while_the_server_is_gone_ends_in_time(
    bucket: Bucket, s3_server: SeaweedServer, tiny_model: Path
) -> None:
    """A flow that is cancelled has half a minute. What was finished before is kept."""
    command = cli_run(bucket.put_input(80), f"s3://{bucket.name}/out", tiny_model)
    command += ["--checkpoint-s", "0.2", "--shard-tokens", "2000"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as child:
        while status_of(f"s3://{bucket.name}/out") < 10:
            assert child.poll() is None
            time.sleep(0.2)
        s3_server.kill()
        time.sleep(3)
        child.send_signal(signal.SIGTERM)
        told_s = time.monotonic()
        _, said = child.communicate(timeout=100)
        assert time.monotonic() - told_s < 30, said
    assert child.returncode in (1, 2)
    assert "Traceback" not in said
    s3_server.start()
    kept = status_of(f"s3://{bucket.name}/out")
    assert 10 <= kept < 80
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert status_of(f"s3://{bucket.name}/out") == 80


def status_of(output: str) -> int:
    """Rows that an output holds; 0 before there is one."""
    try:
        return read_status(output).done_rows
    except InputError:
        return 0


def cli_run(source: str, output: str, model: Path) -> list[str]:
    """`flows run` of a small model that takes some seconds."""
    return [
        sys.executable, "-m", "flows.cli", "run", source, "--model", str(model), "--local",
        "--prompt", "{{ text }}", "--max-tokens", "40", "--ignore-eos", "--dtype", "float32",
        "--memory", "64MiB", "--max-seqs", "4", "--keep-columns", "n", "--output", output,
    ]  # fmt: skip


# -- two at once --


@pytest.mark.slow
def test_of_two_runs_at_the_same_moment_one_is_accepted_and_one_is_refused(
    bucket: Bucket, tiny_model: Path, tmp_path: Path
) -> None:
    source, output = bucket.put_input(150), f"s3://{bucket.name}/out"
    command = cli_run(source, output, tiny_model)
    children = [
        subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [child.communicate(timeout=100)[1] for child in children]
    codes = [child.returncode for child in children]
    assert sorted(codes) == [0, 2], said
    refusal = said[codes.index(2)].strip().splitlines()[-1]
    winner = children[codes.index(0)].pid
    assert refusal.startswith(f"error: {output} is being written by process {winner} on ")
    assert "Traceback" not in said[codes.index(2)]
    with client(os.environ["AWS_ENDPOINT_URL"]) as fs:
        files = sorted(fs.glob(f"{output}/results/*.parquet"))
        found = [n for file in files for n in pq.ParquetFile(fs.open(file)).read()["n"].to_pylist()]
    assert found == list(range(150))


# -- from elsewhere --


def test_status_report_profile_and_simulation_need_no_local_state(
    bucket: Bucket,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    spec = bucket.spec(200)
    assert run_job(spec, model=fake_model()).complete
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "another-machine"))
    monkeypatch.setenv("COLUMNS", "200")
    flows = Shell(capsys)
    assert flows("status", spec.output) == 0
    assert "200 of 200 (100.0%)" in flows.out and "no, complete" in flows.out
    assert flows("report", spec.output) == 0
    assert flows.out.strip() == f"{spec.output}/report.html"
    assert "<html" in bucket.fetch(spec, "report.html").read_text()
    assert flows("profile", spec.output) == 0
    assert "matrix products" in flows.out or "backend" in flows.out
    assert flows("simulate", spec.output) == 0


def test_a_running_job_is_seen_from_elsewhere(bucket: Bucket, tmp_path: Path) -> None:
    spec, log = bucket.spec(400), TokenLog(tmp_path / "tokens.log")
    with subprocess.Popen(bucket.command(spec, log, "--delay-s", "0.03"), cwd=ROOT) as child:
        while log.total() < 1500:
            assert child.poll() is None
            time.sleep(0.05)
        status = read_status(spec.output)
        child.kill()
    assert status.lease is not None and status.lease.pid == child.pid
    assert 0 < status.done_rows < 400


def test_c45_the_catalogue_is_beside_the_results_and_needs_no_extension(
    bucket: Bucket, cache: Path
) -> None:
    spec = bucket.spec(200)
    run_job(spec, model=fake_model())
    with duckdb.connect(str(bucket.fetch(spec, FILE)), read_only=True) as con:
        con.execute("SET autoinstall_known_extensions = false")
        con.execute("SET autoload_known_extensions = false")
        assert con.execute("SELECT n FROM results").fetchall() == [(n,) for n in range(200)]
        (done,) = con.execute("SELECT count(*) FROM shards WHERE committed").fetchall()
        assert done[0] > 1
        assert con.execute("SELECT count(*) > 0 FROM step_costs").fetchall() == [(True,)]
    assert list(cache.rglob(FILE)) == [], "the copy of this machine is gone once it is uploaded"


def test_c45_results_too_large_to_copy_are_read_through_fsspec(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.journal.RemoteCatalogue", partial(RemoteCatalogue, results_bytes=0))
    spec = bucket.spec(200)
    run_job(spec, model=fake_model())
    with (
        client(os.environ["AWS_ENDPOINT_URL"]) as fs,
        duckdb.connect(str(bucket.fetch(spec, FILE)), read_only=True) as con,
    ):
        con.execute("SET autoinstall_known_extensions = false")
        con.execute("SET autoload_known_extensions = false")
        con.register_filesystem(fs)
        rows = con.execute("SELECT n, status FROM results ORDER BY n").fetchall()
    assert rows == [(n, "ok") for n in range(200)]


# -- one clear line, before a model is loaded --


@pytest.mark.parametrize(
    ("keys", "source", "target", "parts"),
    [
        (STRANGER, "{bucket}/in/", "{bucket}/out", ["does not know the access key"]),
        (Keys(ADMIN.access, "no"), "{bucket}/in/", "{bucket}/out", ["SignatureDoesNotMatch"]),
        (ADMIN, "no-such-bucket/in/", "{bucket}/out", ["no bucket 'no-such-bucket'"]),
        (ADMIN, "{bucket}/in/", "no-such-bucket/out", ["no bucket 'no-such-bucket'"]),
        (READER, "{bucket}/in/", "{bucket}/out", ["no permission", "s3:PutObject"]),
    ],
)
def test_what_is_wrong_with_s3_is_said_in_a_line_before_a_model_is_loaded(
    bucket: Bucket,
    s3_server: SeaweedServer,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    keys: Keys,
    source: str,
    target: str,
    parts: list[str],
) -> None:
    bucket.put_input(20)
    for name, value in s3_server.environment(keys).items():
        monkeypatch.setenv(name, value)
    flows = Shell(capsys)
    code = flows(
        "run", f"s3://{source.format(bucket=bucket.name)}", "--prompt", "{{ text }}", "--local",
        "--model", tiny_model, "--output", f"s3://{target.format(bucket=bucket.name)}",
    )  # fmt: skip
    assert code == 2
    errors = [line for line in flows.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert [part for part in parts if part not in errors[0]] == [], errors
    assert "Traceback" not in flows.err and "loading the model" not in flows.err
