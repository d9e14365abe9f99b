"""A run that is told to end: what is finished is committed, in time, and running again goes on.

The deployments here are of `adhoc` over a fake model with a pace of its own (`paced.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from storage.status import read_status
from tests.e2e.cases import durable, make_spec
from tests.e2e.conftest import SAMPLE
from tests.e2e.jobs import TokenLog, flow_command, read_results, write_dataset
from tests.services.prefect_server import ROOT, PrefectServer
from tests.services.processes import wait_until

pytestmark = [pytest.mark.alone, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

NUM_ROWS = 500
GRACE_S = 30.0
"""What Prefect gives a process between SIGTERM and SIGKILL."""


@pytest.fixture(scope="module")
def server(prefect_server: PrefectServer) -> Iterator[PrefectServer]:
    """A server with the deployments `paced`, `night` (one run at a time) and `lonely` (no worker),
    and a Prefect worker.
    """
    from prefect.utilities.callables import parameter_schema

    import tests.e2e.paced as paced

    flow_id = prefect_server.post("/flows/", name="headrace")["id"]
    for pool in ("paced", "lonely"):
        prefect_server.api.post("/work_pools/", json={"name": pool, "type": "process"})
    common = {
        "flow_id": flow_id, "entrypoint": "tests.e2e.paced.adhoc", "pull_steps": [],
        "parameter_openapi_schema": parameter_schema(paced.adhoc).model_dump_for_openapi(),
    }  # fmt: skip
    alone = {"collision_strategy": "CANCEL_NEW"}
    prefect_server.post("/deployments/", name="paced", work_pool_name="paced", **common)
    prefect_server.post("/deployments/", name="lonely", work_pool_name="lonely", **common)
    prefect_server.post(
        "/deployments/", name="night", work_pool_name="paced", concurrency_limit=1,
        concurrency_options=alone, **common,
    )  # fmt: skip
    with prefect_server.worker("paced"):
        yield prefect_server


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    """Some 25 seconds of work for two worker processes."""
    return {
        "input": str(write_dataset(tmp_path / "in.parquet", NUM_ROWS)),
        "output": str(tmp_path / "out"), "prompt": {"template": "{{ text }}"},
        "shard_tokens": 1500, "checkpoint_s": 0.2, "sampling": {"max_tokens": 20},
        "engine": {"max_seqs": 8, "workers": 2},
    }  # fmt: skip


def output_of(job: dict[str, Any]) -> Path:
    return Path(job["output"])


def wait_for_rows(server: PrefectServer, run_id: str, output: Path, num_rows: int = 20) -> None:
    def enough() -> bool:
        state = server.state(run_id)
        assert state not in ("FAILED", "CRASHED", "COMPLETED"), server.logs(run_id)
        return len(durable(output)) >= num_rows

    wait_until(enough, 90, "no rows", lambda: server.logs(run_id))


def check_complete(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every row once; the rows by id."""
    rows = read_results(output_of(job))
    by_id = {row["row_id"]: row for row in rows}
    assert len(rows) == len(by_id) == NUM_ROWS
    return by_id


def check_kept(job: dict[str, Any], kept: dict[str, dict[str, Any]]) -> None:
    """Every row once, and none of the kept ones computed again."""
    by_id = check_complete(job)
    for row_id, row in kept.items():
        assert by_id[row_id]["run_s"] == row["run_s"], "it was computed again"


def test_cancelled_run_keeps_its_rows_and_goes_on(
    server: PrefectServer, job: dict[str, Any]
) -> None:
    output = output_of(job)
    run_id = server.trigger("headrace/paced", job)
    wait_for_rows(server, run_id, output)
    server.cancel(run_id)
    asked_s = time.monotonic()
    server.wait_for(run_id, "CANCELLED", patience_s=60)
    took_s = time.monotonic() - asked_s
    print(f"cancelled after {took_s:.1f} s")
    assert took_s < GRACE_S

    kept = durable(output)
    status = read_status(str(output))
    assert 20 <= status.done_rows == len(kept) < NUM_ROWS
    assert status.lease is None, "the output was given back"

    again = server.trigger("headrace/paced", job)
    run = server.wait_for(again, "COMPLETED", "FAILED", "CRASHED")
    assert (run["state_type"], run["state"]["message"]) == (
        "COMPLETED", f"{NUM_ROWS} ok of {NUM_ROWS} rows",
    ), server.logs(again)  # fmt: skip
    check_kept(job, kept)


def test_a_second_run_of_an_output_is_refused(server: PrefectServer, job: dict[str, Any]) -> None:
    output = output_of(job)
    first = server.trigger("headrace/paced", job)
    wait_for_rows(server, first, output, num_rows=2)
    second = server.trigger("headrace/paced", job)
    refused = server.wait_for(second, "COMPLETED", "FAILED", "CRASHED")
    assert refused["state_type"] == "FAILED"
    assert f"{output} is being written by process" in refused["state"]["message"]
    assert "wait for it, or stop it" in refused["state"]["message"]
    done = server.wait_for(first, "COMPLETED", "FAILED", "CRASHED")
    assert done["state"]["message"] == f"{NUM_ROWS} ok of {NUM_ROWS} rows"
    check_complete(job)


@pytest.mark.long
def test_a_second_night_is_cancelled_while_the_first_runs(
    server: PrefectServer, job: dict[str, Any]
) -> None:
    first = server.trigger("headrace/night", job)
    wait_for_rows(server, first, output_of(job), num_rows=2)
    second = server.trigger("headrace/night", job)
    run = server.wait_for(second, "CANCELLED", "COMPLETED", "FAILED", "CRASHED")
    assert run["state_type"] == "CANCELLED"
    assert "concurrency limit" in run["state"]["message"].lower()
    server.wait_for(first, "COMPLETED")


@pytest.mark.long
@pytest.mark.parametrize(
    ("behavior", "state"), [("reschedule", "SCHEDULED"), ("relinquish", "RUNNING")]
)
def test_sigterm_to_a_flow_run_process_is_safe(
    server: PrefectServer, job: dict[str, Any], behavior: str, state: str
) -> None:
    """As on Kubernetes, where a pod runs `prefect flow-run execute` and may be evicted."""
    output = output_of(job)
    lonely = server.deployment("headrace/lonely")
    env = server.env(PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR=behavior)
    fields = {"flow_id": lonely["flow_id"], "deployment_id": lonely["id"], "parameters": job}
    run_id = server.post("/flow_runs/", state={"type": "PENDING"}, **fields)["id"]
    command = [sys.executable, "-m", "prefect", "flow-run", "execute", run_id]
    log = output.parent / "execute.log"
    with (
        log.open("wb") as out,
        subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True
        ) as child,
    ):
        try:
            wait_for_rows(server, run_id, output)
            child.send_signal(signal.SIGTERM)
            told_s = time.monotonic()
            child.wait(timeout=GRACE_S)
            wait_until(
                lambda: read_status(str(output)).lease is None,
                GRACE_S, "the output is still held", log.read_text,
            )  # fmt: skip
            took_s = time.monotonic() - told_s
            wait_until(lambda: server.state(run_id) == state, 20, f"not {state}", log.read_text)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    print(f"{behavior}: the output was given back after {took_s:.1f} s")
    assert took_s < GRACE_S
    kept = durable(output)
    status = read_status(str(output))
    assert 20 <= status.done_rows == len(kept) < NUM_ROWS

    # Prefect may then run it again, and so do we.
    server.post(f"/flow_runs/{run_id}/set_state", state={"type": "PENDING"}, force=True)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert server.state(run_id) == "COMPLETED", f"{done.stdout}{done.stderr}"[-3000:]
    check_kept(job, kept)


@pytest.mark.long
def test_sigterm_to_flows_run_keeps_what_is_finished(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """A job that is a flow of its own process, and that is told to end."""
    server = prefect_server
    spec = make_spec(tmp_path, NUM_ROWS, checkpoint_s=0.2, engine={"max_seqs": 8})
    command = flow_command(tmp_path, spec, TokenLog(tmp_path / "tokens.log"), "--delay-s", "0.05")
    said = tmp_path / "said.log"
    output = Path(spec.output)
    with (
        said.open("wb") as out,
        subprocess.Popen(command, cwd=ROOT, env=server.env(), stdout=out, stderr=out) as child,
    ):
        wait_until(lambda: len(durable(output)) >= 20, 90, "no rows", said.read_text)
        child.send_signal(signal.SIGTERM)
        child.wait(timeout=GRACE_S)
    assert child.returncode != 0
    assert server.run_of(spec.output)["state_type"] == "CRASHED", said.read_text()[-3000:]
    kept = durable(output)
    status = read_status(spec.output)
    assert 20 <= status.done_rows == len(kept) < NUM_ROWS
    assert status.lease is None, "the output was given back"
    subprocess.run(command, cwd=ROOT, env=server.env(), check=True, capture_output=True)
    assert server.run_of(spec.output)["state_type"] == "COMPLETED"
    check_kept({"output": spec.output}, kept)


def test_flows_serve_runs_them_without_a_work_pool(
    prefect_server: PrefectServer, tiny_model: Path, tmp_path: Path
) -> None:
    server = prefect_server
    for name in ("adhoc", "nightly"):  # of other tests, in their work pool
        found = server.api.get(f"/deployments/name/headrace/{name}")
        if found.is_success:
            server.api.delete(f"/deployments/{found.json()['id']}").raise_for_status()
    job = {
        "input": str(SAMPLE), "output": str(tmp_path / "out"), "model": str(tiny_model),
        "prompt": {"template": "{{ description }}"}, "limit": 3, "sampling": {"max_tokens": 4},
        "engine": {"memory": "1GiB"},
    }  # fmt: skip
    nightly = "/deployments/name/headrace/nightly"
    with server.serving() as serving:
        wait_until(
            lambda: server.api.get(nightly).is_success, 60, "nothing registered", serving.tail
        )
        assert server.get(nightly)["work_pool_name"] is None
        assert [item["active"] for item in server.get(nightly)["schedules"]] == [False]
        run_id = server.trigger("headrace/adhoc", job)
        run = server.wait_for(run_id, "COMPLETED", "FAILED", "CRASHED")
    assert run["state"]["message"] == "3 ok of 3 rows"
    assert "serving headrace/adhoc, headrace/nightly for" in serving.tail(100_000)
