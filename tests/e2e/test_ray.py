"""The same jobs on a local Ray cluster: actors in place of processes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from flows.errors import SpecError
from flows.runner import run_job
from tests.e2e.cases import fleet_spec, results
from tests.e2e.jobs import comparable, worker_model
from tests.e2e.test_workers import alone, behave, query, run

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]
__all__ = ["behave"]


def actors() -> list[psutil.Process]:
    """Processes of the workers' actors."""
    found = []
    for process in psutil.process_iter():
        try:
            if any("ray::_RayWorker" in part for part in process.cmdline()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue
    return sorted(found, key=lambda process: process.pid)


def test_the_rows_are_those_of_a_single_process(tmp_path, behave) -> None:
    spec = fleet_spec(tmp_path, 500, workers=2, cluster="local", shard_tokens=3000)
    assert run(spec).by_status == {"ok": 500}
    assert comparable(results(spec)) == alone(spec, tmp_path)
    assert not ray.is_initialized()
    assert {worker for (worker,) in query(spec, "select distinct worker from workers")} == {
        "worker-0",
        "worker-1",
    }


@pytest.mark.parametrize("way", [pytest.param("actor", marks=pytest.mark.long), "process"])
def test_a_dead_actor_is_replaced_and_no_row_is_lost(tmp_path, behave, way) -> None:
    """Killed through Ray, and as the process that a raylet has started."""
    behave(delay_s=0.02)
    spec = fleet_spec(tmp_path, 1200, workers=2, cluster="local", shard_tokens=5000, max_seqs=16)
    killed: list[int] = []

    def kill_one(runner) -> None:
        def body() -> None:
            while runner.progress.snapshot().done_rows < 100:
                time.sleep(0.02)
            if way == "actor":
                fleet = runner._fleet
                fleet._links[0, 1].kill()
                killed.append(0)
            else:
                victim = actors()[0]
                victim.kill()
                killed.append(victim.pid)

        threading.Thread(target=body, daemon=True).start()

    summary = run_job(spec, find_model=worker_model, on_start=kill_one)
    assert killed
    assert summary.by_status == {"ok": 1200}
    assert comparable(results(spec)) == alone(spec, tmp_path)
    events = Counter(event for (event,) in query(spec, "select event from workers"))
    assert events["died"] == 1
    assert Path(spec.output).exists()


def test_a_cluster_that_is_not_there_is_one_line(tmp_path) -> None:
    spec = fleet_spec(tmp_path, 20, workers=2, cluster="ray://127.0.0.1:1")
    with pytest.raises(SpecError, match=r"cluster is 'ray://127.0.0.1:1', but no Ray cluster"):
        run(spec)


def test_more_workers_than_the_cluster_has_cores_for_are_refused(tmp_path) -> None:
    spec = fleet_spec(tmp_path, 20, workers=500, cluster="local")
    with pytest.raises(SpecError, match="workers is 500, but the Ray cluster"):
        run(spec)
