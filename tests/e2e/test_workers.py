"""Jobs on several worker processes: the same rows as on one, whoever dies on the way."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pytest

from flows.fleet import coordinator, health
from flows.journal import Journal
from flows.runner import run_job
from flows.spec import JobSpec
from storage.status import read_status
from tests.e2e.cases import Crash, fleet_spec, in_one_process, results
from tests.e2e.conftest import SAMPLE
from tests.e2e.jobs import Behaviour, comparable, read_results, worker_model
from workers.errors import ModelError

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def behave(monkeypatch):
    """Set what the worker processes of the test do."""

    def behave(**behaviour: Any) -> None:
        for name, value in Behaviour(**behaviour).environ().items():
            monkeypatch.setenv(name, value)

    behave()
    return behave


def run(spec: JobSpec):
    return run_job(spec, find_model=worker_model)


def alone(spec: JobSpec, folder: Path) -> list[dict[str, Any]]:
    """The rows of the same job in one process."""
    other = in_one_process(spec, folder / "alone")
    assert run(other).complete
    return comparable(results(other))


def query(spec: JobSpec, sql: str) -> list[tuple[Any, ...]]:
    with duckdb.connect(str(Path(spec.output) / "job.duckdb"), read_only=True) as con:
        return con.execute(sql).fetchall()


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_the_rows_are_those_of_a_single_process(tmp_path, behave, num_workers) -> None:
    spec = fleet_spec(tmp_path, 700, workers=num_workers, shard_tokens=4000, keep_columns=["n"])
    summary = run(spec)
    assert summary.by_status == {"ok": 700}
    assert comparable(results(spec)) == alone(spec, tmp_path)
    events = Counter(query(spec, "select worker, event from workers"))
    names = {f"worker-{index}" for index in range(num_workers)}
    assert {name for name, _ in events} == names
    assert all(events[name, "started"] == events[name, "ended"] == 1 for name in names)
    # The others may have done it all before one was ready.
    assert sum(events[name, "ready"] for name in names) >= 1
    assert {event for _, event in events} == {"started", "ready", "ended"}
    engines = {run_id.rsplit("-", 2)[-2:][0] for (run_id,) in query(
        spec, "select distinct run_id from steps"
    )}  # fmt: skip
    assert engines == {"worker"}


def test_c1_a_worker_killed_in_the_middle_loses_no_row_and_comes_back(tmp_path, behave) -> None:
    behave(delay_s=0.01)
    spec = fleet_spec(tmp_path, 1500, workers=2, shard_tokens=6000, max_seqs=16)
    killed: list[int] = []

    def kill_one(runner) -> None:
        def body() -> None:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and not killed:
                time.sleep(0.02)
                if runner.progress.snapshot().done_rows > 100:
                    children = psutil.Process().children(recursive=True)
                    workers = [c for c in children if "flows.fleet.process" in c.cmdline()]
                    if workers:
                        killed.append(workers[0].pid)
                        workers[0].kill()

        threading_start(body)

    summary = run_job(spec, find_model=worker_model, on_start=kill_one)
    assert killed
    assert summary.by_status == {"ok": 1500}
    assert comparable(results(spec)) == alone(spec, tmp_path)
    events = Counter(event for (event,) in query(spec, "select event from workers"))
    assert events["died"] == 1
    (detail,) = query(spec, "select detail from workers where event = 'died'")
    assert detail == ("killed by SIGKILL",)


def threading_start(body) -> None:
    import threading

    threading.Thread(target=body, daemon=True).start()


def test_a_row_that_kills_its_worker_becomes_an_error_row(tmp_path, behave, monkeypatch) -> None:
    monkeypatch.setattr(health, "FIRST_DELAY_S", 0.05)
    killer = "in-300.parquet:123"
    behave(killers=(killer,), delay_s=0.002)
    spec = fleet_spec(tmp_path, 300, workers=2, shard_tokens=2500, max_seqs=8)
    summary = run(spec)
    assert summary.by_status == {"ok": 299, "error": 1}
    (bad,) = [row for row in results(spec) if row["status"] != "ok"]
    assert bad["row_id"] == killer
    assert bad["error_type"] == "worker_died"
    assert "killed by SIGKILL" in bad["error_message"]
    # A row with the same name elsewhere is no reason to compute it again.
    again = run(spec)
    assert again.by_status == summary.by_status


def start_job(spec: JobSpec, folder: Path, **behaviour: Any) -> subprocess.Popen[bytes]:
    """The job in a process of its own, in a session of its own."""
    file = folder / "job.json"
    file.write_text(json.dumps(spec.model_dump(mode="json")))
    return subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.jobs", str(file)],
        cwd=ROOT,
        env={**os.environ, **Behaviour(**behaviour).environ()},
        start_new_session=True,
    )


def wait_for_rows(spec: JobSpec, count: int, job: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and job.poll() is None:
        if (Path(spec.output) / "job.json").exists() and read_status(
            spec.output
        ).done_rows >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"{count} rows were not reached; exit status {job.poll()}")


def processes_of(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess, PermissionError):
            continue
    return found


def test_c2_a_killed_coordinator_takes_its_workers_along_and_the_next_run_goes_on(
    tmp_path, behave
) -> None:
    spec = fleet_spec(tmp_path, 1500, workers=2, shard_tokens=6000, checkpoint_s=0.2, max_seqs=16)
    job = start_job(spec, tmp_path, delay_s=0.02)
    wait_for_rows(spec, 200, job)
    job.kill()
    job.wait()
    deadline = time.monotonic() + 10
    while processes_of(job.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(job.pid) == []
    before = read_status(spec.output).done_rows
    assert 200 <= before < 1500
    assert run(spec).by_status == {"ok": 1500}
    assert comparable(results(spec)) == alone(spec, tmp_path)


@pytest.mark.parametrize(
    "step",
    [
        "result_written",
        "before_marker",
        *(
            pytest.param(step, marks=pytest.mark.long)
            for step in ("before_part", "part_written", "result_durable")
        ),
    ],
)
def test_c3_a_crash_at_any_step_of_a_commit_leaves_every_row_once(
    tmp_path, behave, monkeypatch, step
) -> None:
    """The coordinator's, while both workers go on."""
    spec = fleet_spec(tmp_path, 600, workers=2, shard_tokens=4000, checkpoint_s=0.2, max_seqs=16)
    behave(delay_s=0.005)
    seen: Counter[str] = Counter()

    def crash(name: str) -> None:
        seen[name] += 1
        if name == step and seen[name] == 2:
            raise Crash(name)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "open", partial(Journal.open, on_step=crash))
        with pytest.raises(Crash, match=step):
            run(spec)
    assert run(spec).by_status == {"ok": 600}
    assert comparable(results(spec)) == alone(spec, tmp_path)


def test_sigterm_commits_what_is_finished_and_leaves_in_time(tmp_path, behave) -> None:
    spec = fleet_spec(tmp_path, 1500, workers=2, shard_tokens=6000, checkpoint_s=60, max_seqs=16)
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(spec.model_dump(mode="json")))
    code = (
        "import sys; from flows.signals import StopOnSignal; from flows.runner import run_job;"
        "from flows.spec import JobSpec; from tests.e2e.jobs import worker_model; import json;"
        "spec = JobSpec.model_validate(json.load(open(sys.argv[1])));\n"
        "with StopOnSignal() as signals:\n"
        "    summary = run_job(spec, find_model=worker_model, on_start=signals.attach)\n"
        "print(summary.by_status); sys.exit(summary.exit_code(1.0))"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", code, str(file)],
        cwd=ROOT,
        env={**os.environ, **Behaviour(delay_s=0.02).environ()},
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(Path(spec.output).glob("results/*.parquet")):
        time.sleep(0.05)
    began_s = time.monotonic()
    os.killpg(job.pid, signal.SIGTERM)  # as a service manager does: to all at once
    out, _ = job.communicate(timeout=30)
    assert time.monotonic() - began_s < 20
    assert job.returncode == 1
    status = read_status(spec.output)
    assert f"'ok': {status.done_rows}" in out.decode()
    assert 0 < status.done_rows < 1500
    assert run(spec).by_status == {"ok": 1500}


def test_a_worker_that_stops_answering_is_replaced(tmp_path, behave, monkeypatch) -> None:
    monkeypatch.setattr(coordinator, "SILENCE_S", 3.0)
    behave(delay_s=0.01)
    spec = fleet_spec(tmp_path, 1000, workers=2, shard_tokens=6000, max_seqs=16)

    def freeze_one(runner) -> None:
        def body() -> None:
            while runner.progress.snapshot().done_rows < 50:
                time.sleep(0.02)
            children = psutil.Process().children(recursive=True)
            next(c for c in children if "flows.fleet.process" in c.cmdline()).suspend()

        threading_start(body)

    assert run_job(spec, find_model=worker_model, on_start=freeze_one).by_status == {"ok": 1000}
    assert comparable(results(spec)) == alone(spec, tmp_path)


def test_c32_shards_of_very_unequal_cost_end_together(tmp_path, behave) -> None:
    """The rows of one shard take most of the time: the others help."""
    behave(token_s=0.001)
    spec = fleet_spec(tmp_path, 400, workers=3, shard_tokens=3000, max_seqs=64)
    assert run(spec).by_status == {"ok": 400}
    assert comparable(results(spec)) == alone(spec, tmp_path)
    busy = dict(query(spec, "select run_id, sum(elapsed_s) from steps group by run_id"))
    assert len(busy) == 3
    assert query(spec, "select count(*) from moves")[0][0] >= 1


def test_a_model_that_is_wrong_is_said_once_before_anything_starts(tmp_path) -> None:
    spec = fleet_spec(tmp_path, 20, workers=2, model="no/such-model")
    with pytest.raises(ModelError, match="no/such-model"):
        run_job(spec)
    assert not (tmp_path / "out").exists()


def test_c58_four_workers_start_at_once_on_an_empty_cache(tmp_path, monkeypatch) -> None:
    """The embedded model is converted once and its kernels are compiled once."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    spec = JobSpec.model_validate(
        {
            "input": str(SAMPLE), "prompt": "Say {{ package }}.", "limit": 24,
            "output": str(tmp_path / "out"), "sampling": {"max_tokens": 4}, "shard_tokens": 400,
            "engine": {"workers": 4},
        }
    )  # fmt: skip
    assert run_job(spec).by_status == {"ok": 24}
    libraries = [*(tmp_path / "cache" / "kernels").glob("*.so")]
    assert len(libraries) <= 1
    rows = comparable(read_results(Path(spec.output)))
    single = in_one_process(spec, tmp_path / "single")
    assert run_job(single).complete
    texts = [row["text"] for row in comparable(read_results(Path(single.output)))]
    assert sum(a["text"] == b for a, b in zip(rows, texts, strict=True)) >= 20


@pytest.mark.long
@pytest.mark.timeout(600)
def test_random_kills_of_workers_and_coordinator(tmp_path, behave) -> None:
    """A worker or the coordinator is killed at a random moment, ten times."""
    rng = random.Random(0)
    spec = fleet_spec(tmp_path, 2000, workers=2, shard_tokens=8000, checkpoint_s=0.2, max_seqs=16)
    rounds = 0
    while rounds < 10:
        job = start_job(spec, tmp_path, delay_s=0.01)
        while job.poll() is None and rounds < 10:
            time.sleep(rng.uniform(0.5, 2.5))
            if job.poll() is not None:
                break
            workers = [p for p in processes_of(job.pid) if p.pid != job.pid]
            rounds += 1
            if rng.random() < 0.4 or not workers:
                job.kill()
                job.wait()
            else:
                rng.choice(workers).kill()
        if rounds < 10 and job.poll() == 0:
            break
        job.kill()
        job.wait()
    assert run(spec).by_status == {"ok": 2000}
    assert comparable(results(spec)) == alone(spec, tmp_path)
    assert rounds >= 5
