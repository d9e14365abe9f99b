"""Figures and checks of the overhead benchmark, from runs made up; the server's log, counted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.bench.overhead import (
    EngineRun,
    JobRun,
    checks_of,
    cpu_seconds,
    figures,
    thinned,
    watched,
)
from tests.services.composed import ComposedPrefect

MIB = 1 << 20


def job(**changes: Any) -> JobRun:
    values: dict[str, Any] = {
        "num_rows": 1000,
        "total_s": 0.2,
        "cpu_s": {"job": 0.3, "prefect": 0.05},
        "memory": [(0.5, 100 * MIB), (1.0, 200 * MIB), (5.0, 190 * MIB), (10.0, 210 * MIB)],
        "calls": {"POST /logs/": 3, "POST /task_runs/": 4},
    }
    return JobRun(**{**values, **changes})


def engine(total_s: float = 0.08) -> EngineRun:
    return EngineRun(num_rows=1000, total_s=total_s)


def test_overhead_is_what_a_job_takes_beyond_the_engine() -> None:
    found = figures([job(), job(total_s=0.4), job(total_s=0.3)], [engine()])
    assert found["job_us"] == pytest.approx(300)
    assert found["engine_us"] == pytest.approx(80)
    assert found["overhead_us"] == pytest.approx(220)
    assert found["job_cpu_us"] == pytest.approx(300)
    assert found["prefect_cpu_us"] == pytest.approx(50)
    assert found["prefect_calls"] == 7


def test_memory_growth_is_from_the_first_half_to_the_second() -> None:
    assert job().memory_growth == pytest.approx(1.05)
    grown = job(memory=[(0.5, 100 * MIB), (10.0, 300 * MIB)])
    assert grown.memory_growth == pytest.approx(3.0)


def test_thinned_memory_keeps_the_highest_of_each_stretch() -> None:
    memory = [(float(at), (at * 7) % 10) for at in range(100)]
    kept = thinned(memory, 10)
    assert kept == [max(memory[i : i + 10], key=lambda one: one[1]) for i in range(0, 100, 10)]
    assert thinned(memory, 1000) == memory
    assert thinned([], 10) == []


def test_checks_fail_when_memory_grows_and_calls_are_many() -> None:
    good = checks_of([job()], [engine()])
    assert [check.holds for check in good] == [True, True]
    bad = checks_of(
        [job(memory=[(0.5, 100), (10.0, 120)], calls={"POST /logs/": 2000})], [engine()]
    )
    assert [check.holds for check in bad] == [False, False]


def test_calls_are_the_requests_of_the_access_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run = "0c5e6bd6-8d6a-4d43-9c56-5f4dd1b6a2f1"
    log.write_text(
        '12:00:00 | INFO | uvicorn.access - 127.0.0.1:1 - "GET /api/health HTTP/1.1" 200\n'
        f'INFO: 127.0.0.1:2 - "POST /api/flow_runs/{run}/set_state HTTP/1.1" 201\n'
        f'INFO: 127.0.0.1:2 - "POST /api/flow_runs/{run}/set_state HTTP/1.1" 201\n'
        'INFO: 127.0.0.1:2 - "WebSocket /api/events/in" [accepted]\n'
        'INFO: 127.0.0.1:2 - "GET /runs HTTP/1.1" 200\n'
        'INFO: 127.0.0.1:2 - "GET /api/artifacts/latest?limit=1 HTTP/1.1" 200\n'
    )
    server = ComposedPrefect(api_url="http://127.0.0.1:1/api", log=log, pid=1)
    assert server.calls() == {"POST /flow_runs/ID/set_state": 2, "GET /artifacts/latest": 1}


def test_engine_alone_answers_every_row(tmp_path: Path) -> None:
    from tests.bench.memory import write_rows

    file = tmp_path / "rows.parquet"
    write_rows(file, 300)
    told, memory, cpu_s = watched("engine", file, dict(os.environ))
    assert told["num_rows"] == 300
    assert told["total_s"] > 0
    assert cpu_s > 0
    assert max(size for _, size in memory) > MIB


def test_cpu_seconds_are_of_a_process_that_lives() -> None:
    assert cpu_seconds(os.getpid()) > 0
