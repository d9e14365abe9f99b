"""A run that is told to end: what is finished is committed, in time, and running again goes on."""

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
from tests.e2e.cases import durable
from tests.e2e.conftest import SAMPLE
from tests.e2e.jobs import read_results
from tests.services.prefect_server import ROOT, PrefectServer
from tests.services.processes import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_ROWS = 90
GRACE_S = 30.0
"""What Prefect gives a process between SIGTERM and SIGKILL."""


@pytest.fixture(scope="module")
def server(prefect_server: PrefectServer) -> Iterator[PrefectServer]:
    """A server whose deployments are served here, without a work pool."""
    forget_deployments(prefect_server)
    with prefect_server.serving("--limit", "3"):
        wait_until(lambda: is_registered(prefect_server), 60, "flows serve registers nothing")
        yield prefect_server
    forget_deployments(prefect_server)


def forget_deployments(server: PrefectServer) -> None:
    """Prefect would leave those of another test in their work pool."""
    for name in ("adhoc", "nightly"):
        found = server.api.get(f"/deployments/name/headrace/{name}")
        if found.is_success:
            server.api.delete(f"/deployments/{found.json()['id']}").raise_for_status()


def is_registered(server: PrefectServer) -> bool:
    return server.api.get("/deployments/name/headrace/nightly").is_success


@pytest.fixture
def lonely(server: PrefectServer) -> dict[str, Any]:
    """A deployment of `adhoc` in a work pool that has no worker."""
    adhoc = server.deployment("headrace/adhoc")
    server.api.post("/work_pools/", json={"name": "lonely", "type": "process"})
    copied = {
        key: adhoc[key] for key in ("flow_id", "entrypoint", "parameter_openapi_schema", "tags")
    }
    return server.post(
        "/deployments/", name="lonely", work_pool_name="lonely", pull_steps=[], **copied
    )


@pytest.fixture
def job(tiny_model: Path, tmp_path: Path) -> dict[str, Any]:
    """Many seconds of work for a tiny model."""
    return {
        "input": str(SAMPLE), "output": str(tmp_path / "out"), "model": str(tiny_model),
        "prompt": {"template": "{{ description }}"}, "limit": NUM_ROWS, "shard_tokens": 3000,
        "checkpoint_s": 0.2, "sampling": {"max_tokens": 400, "ignore_eos": True},
        "engine": {"dtype": "float32", "memory": "64MiB", "max_seqs": 2},
    }  # fmt: skip


def output_of(job: dict[str, Any]) -> Path:
    return Path(job["output"])


def wait_for_rows(server: PrefectServer, run_id: str, output: Path, num_rows: int = 8) -> None:
    def enough() -> bool:
        state = server.state(run_id)
        assert state not in ("FAILED", "CRASHED", "COMPLETED"), server.logs(run_id)
        return len(durable(output)) >= num_rows

    wait_until(enough, 90, "no rows", lambda: server.logs(run_id))


def check_finished(job: dict[str, Any], kept: dict[str, dict[str, Any]]) -> None:
    """Every row once, and none of the kept ones computed again."""
    rows = read_results(output_of(job))
    by_id = {row["row_id"]: row for row in rows}
    assert len(rows) == len(by_id) == NUM_ROWS
    for row_id, row in kept.items():
        assert by_id[row_id]["run_s"] == row["run_s"], "it was computed again"


def test_cancelled_run_keeps_its_rows_and_goes_on(
    server: PrefectServer, job: dict[str, Any]
) -> None:
    output = output_of(job)
    run_id = server.trigger("headrace/adhoc", job)
    wait_for_rows(server, run_id, output)
    server.cancel(run_id)
    asked_s = time.monotonic()
    run = server.wait_for(run_id, "CANCELLED", patience_s=60)
    took_s = time.monotonic() - asked_s
    print(f"cancelled after {took_s:.1f} s: {run['state']['message']}")
    assert took_s < GRACE_S

    kept = durable(output)
    status = read_status(str(output))
    assert 8 <= status.done_rows == len(kept) < NUM_ROWS
    assert status.lease is None, "the output was given back"

    again = server.trigger("headrace/adhoc", job)
    run = server.wait_for(again, "COMPLETED", "FAILED", "CRASHED", patience_s=200)
    assert (run["state_type"], run["state"]["message"]) == (
        "COMPLETED", f"{NUM_ROWS} ok of {NUM_ROWS} rows",
    ), server.logs(again)  # fmt: skip
    check_finished(job, kept)


def test_a_second_run_of_an_output_is_refused(server: PrefectServer, job: dict[str, Any]) -> None:
    job["limit"] = 30
    output = output_of(job)
    first = server.trigger("headrace/adhoc", job)
    wait_for_rows(server, first, output, num_rows=2)
    second = server.trigger("headrace/adhoc", job)
    refused = server.wait_for(second, "COMPLETED", "FAILED", "CRASHED")
    assert refused["state_type"] == "FAILED"
    assert f"{output} is being written by process" in refused["state"]["message"]
    assert "wait for it, or stop it" in refused["state"]["message"]
    done = server.wait_for(first, "COMPLETED", "FAILED", "CRASHED", patience_s=200)
    assert done["state"]["message"] == "30 ok of 30 rows"
    assert len({row["row_id"] for row in read_results(output)}) == 30


def test_a_second_night_is_cancelled_while_the_first_runs(
    server: PrefectServer, job: dict[str, Any]
) -> None:
    job["limit"] = 30
    first = server.trigger("headrace/nightly", job)
    wait_for_rows(server, first, output_of(job), num_rows=2)
    second = server.trigger("headrace/nightly", job)
    run = server.wait_for(second, "CANCELLED", "COMPLETED", "FAILED", "CRASHED")
    assert run["state_type"] == "CANCELLED"
    assert "concurrency limit" in run["state"]["message"].lower()
    server.wait_for(first, "COMPLETED", patience_s=200)


@pytest.mark.parametrize(
    ("behavior", "state"), [("", "CRASHED"), ("reschedule", "SCHEDULED"), ("relinquish", "RUNNING")]
)
def test_sigterm_to_a_flow_run_process_is_safe(
    server: PrefectServer,
    lonely: dict[str, Any],
    job: dict[str, Any],
    behavior: str,
    state: str,
) -> None:
    """As on Kubernetes, where a pod runs `prefect flow-run execute` and may be evicted."""
    output = output_of(job)
    env = server.env()
    if behavior:
        env["PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"] = behavior
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
        wait_for_rows(server, run_id, output)
        # Without a behavior nobody passes the signal on: whoever evicts tells the whole group.
        tell = os.kill if behavior else os.killpg
        tell(child.pid, signal.SIGTERM)
        told_s = time.monotonic()
        try:
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
    print(f"{behavior or 'no behavior'}: the output was given back after {took_s:.1f} s")
    assert took_s < GRACE_S
    kept = durable(output)
    status = read_status(str(output))
    assert 8 <= status.done_rows == len(kept) < NUM_ROWS

    # Prefect may then run it again, or start another run; so do we.
    if state == "CRASHED":
        run_id = server.post("/flow_runs/", state={"type": "PENDING"}, **fields)["id"]
    else:
        server.post(f"/flow_runs/{run_id}/set_state", state={"type": "PENDING"}, force=True)
    done = subprocess.run(
        [*command[:-1], run_id], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert server.state(run_id) == "COMPLETED", f"{done.stdout}{done.stderr}"[-3000:]
    check_finished(job, kept)
