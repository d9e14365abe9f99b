"""Prefect away, or burdened: the rows go on, and few requests are made (C59)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cases import make_spec, results
from tests.e2e.jobs import TokenLog, flow_command
from tests.services.prefect_server import ROOT, PrefectServer
from tests.services.processes import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

AWAY_S = 30.0


@pytest.mark.timeout(300)
def test_a_job_goes_on_while_the_prefect_server_is_away_for_30_s(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    server = prefect_server
    spec = make_spec(
        tmp_path, 900, shard_tokens=2000, sampling={"max_tokens": 20}, engine={"max_seqs": 16}
    )
    log = TokenLog(tmp_path / "tokens.log")
    said = tmp_path / "said.log"
    command = flow_command(tmp_path, spec, log, "--delay-s", "0.08")
    with (
        said.open("wb") as out,
        subprocess.Popen(command, cwd=ROOT, env=server.env(), stdout=out, stderr=out) as child,
    ):
        try:
            wait_until(lambda: log.total() > 500, 60, "no row was computed", said.read_text)
            server.kill()
            before_kill = committed(spec)
            killed_s, before = time.monotonic(), log.total()
            time.sleep(AWAY_S)
            during = log.total() - before
            still_running = child.poll() is None
        finally:
            server.start()
        away_s = time.monotonic() - killed_s
        child.wait(timeout=180)
    text = said.read_text()
    assert still_running, f"the job was over before the server came back:\n{text[-3000:]}"
    assert child.returncode == 0, text[-5000:]
    print(f"away {away_s:.0f} s, {during} tokens meanwhile\n{text[-6000:]}")
    assert during > 3000, "the rows did not go on"
    assert text.count("the Prefect server does not take progress") == 1
    assert text.count("the Prefect server is back") == 1

    rows = results(spec)
    assert len({row["row_id"] for row in rows}) == len(rows) == 900
    run = server.run_of(spec.output)
    assert (run["state_type"], run["state"]["message"]) == ("COMPLETED", "900 ok of 900 rows")
    num_shards = len(list((Path(spec.output) / "results").glob("*.parquet")))
    tasks = server.task_runs(run["id"], num_shards)
    assert {task["state_type"] for task in tasks} == {"COMPLETED"}
    shown = server.artifacts(run["id"])
    assert shown["progress"]["data"] == 100.0
    assert len(json.loads(shown["shards"]["data"])) == num_shards

    def untold() -> set[int]:
        told = server.events("headrace.shard.done", resource=f"headrace.job.{job_id(spec)}.")
        return set(range(num_shards)) - {event["payload"]["index"] for event in told}

    # What the server had taken and not yet kept is gone with it; nothing else is.
    wait_until(lambda: untold() <= before_kill, 20, "events were lost", lambda: str(untold()))


def committed(spec: Any) -> set[int]:
    """Shards that are committed now."""
    return {int(file.stem[-5:]) for file in (Path(spec.output) / "_markers").glob("*.json")}


def job_id(spec: Any) -> str:
    return json.loads((Path(spec.output) / "job.json").read_text())["job_id"]


@pytest.mark.timeout(300)
def test_c59_a_thousand_shards_make_few_requests(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    server = prefect_server
    spec = make_spec(tmp_path, 20_000, shard_tokens=500, sampling={"max_tokens": 20})
    calls = tmp_path / "calls.txt"
    command = flow_command(tmp_path, spec, TokenLog(tmp_path / "tokens.log"), "--calls", str(calls))
    done = subprocess.run(
        command, cwd=ROOT, env=server.env(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    num_shards = len(list((Path(spec.output) / "results").glob("*.parquet")))
    assert num_shards > 900
    made = Counter(calls.read_text().split("\n"))
    print(made.most_common(20))
    assert 5 < made.total() < 200
    run = server.run_of(spec.output)
    a_task = -(-num_shards // 200)
    tasks = server.task_runs(run["id"], -(-num_shards // a_task))
    assert {task["state_type"] for task in tasks} == {"COMPLETED"}


def test_unreachable_server_is_one_line_before_a_model_is_loaded(
    tiny_model: Path, tmp_path: Path
) -> None:
    from tests.e2e.conftest import SAMPLE

    env = {**os.environ, "PREFECT_API_URL": "http://127.0.0.1:9/api", "PYTHONPATH": str(ROOT)}
    job = (
        str(SAMPLE), "--prompt", "{{ description }}", "--model", str(tiny_model), "--output",
        str(tmp_path / "out"),
    )  # fmt: skip
    for command in (["deploy"], ["serve"], ["run", *job, "--prefect"]):
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", *command],
            env=env, cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert done.returncode == 2, done.stderr
        assert len(errors) == 1
        assert "the Prefect server at http://127.0.0.1:9/api does not answer" in errors[0]
        assert "Traceback" not in done.stderr
        assert "loading the model" not in done.stderr
        assert not (tmp_path / "out").exists()


def test_no_server_at_all_is_said(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    env |= {"PREFECT_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "deploy"],
        env=env, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "error: no Prefect server is set; start one with `prefect server start`" in done.stderr
