"""The job as a Prefect flow: a task run per shard, artifacts, and a state that means something."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import SAMPLE

os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ["DO_NOT_TRACK"] = "1"

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SPEC = {"input": "in.parquet", "prompt": "{{ text }}", "model": "fake", "output": "out/x"}


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    """One Prefect server in a temporary place for all tests of this file."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@dataclass
class FakeRunner:
    """Commits each shard as soon as it is submitted; a shard in `broken` fails."""

    statuses: dict[str, int]
    broken: frozenset[int] = frozenset()
    num_shards: int = 3
    submitted: list[int] = field(default_factory=list[int])
    stopped: list[str] = field(default_factory=list[str])

    @property
    def pending(self) -> list[Any]:
        from storage.shards import Shard, Span

        return [
            Shard(index, (Span(0, 0, 10 * index, 10 * index + 10, 0),), 100)
            for index in range(self.num_shards)
        ]

    def submit(self, shard: Any) -> Future[Any]:
        self.submitted.append(shard.index)
        future: Future[Any] = Future()
        if shard.index in self.broken:
            future.set_exception(RuntimeError("the device is gone"))
        else:
            future.set_result(None)
        return future

    def finish(self) -> Any:
        from flows.summary import JobSummary

        if self.broken:
            raise RuntimeError("the device is gone")
        return JobSummary(
            total_rows=30, by_status=self.statuses, by_finish_reason={"stop": 30},
            prompt_tokens=300, completion_tokens=600, elapsed_s=2.0, tokens_per_s=300.0,
            output="out/x", complete=True,
        )  # fmt: skip

    def stop(self, reason: str) -> None:
        self.stopped.append(reason)


def flow_over(runner: FakeRunner) -> Any:
    """The flow with a runner of ours."""
    from flows.prefect_flow import make_flow

    @contextmanager
    def make_runner(spec: Any, progress: Any) -> Iterator[Any]:
        progress.start(total_rows=30)
        yield runner

    return make_flow(make_runner)


def job() -> Any:
    from flows.spec import JobSpec

    return JobSpec.model_validate(SPEC)


def run(runner: FakeRunner) -> Any:
    """The final state of the flow over a runner."""
    return flow_over(runner)(job(), return_state=True)


def recorded(kind: str, flow_run_id: Any) -> list[Any]:
    """The flow run's task runs or artifacts."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        ArtifactFilter,
        ArtifactFilterFlowRunId,
        FlowRunFilter,
        FlowRunFilterId,
    )

    with get_client(sync_client=True) as client:
        if kind == "artifacts":
            chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
            return list(client.read_artifacts(artifact_filter=chosen))
        of_run = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
        return list(client.read_task_runs(flow_run_filter=of_run))


def task_run_names(flow_run_id: Any, expected: int) -> list[str]:
    """Names of the flow run's task runs; the server learns of them a little later."""
    deadline_s = time.monotonic() + 20.0
    while len(found := recorded("task runs", flow_run_id)) < expected:
        assert time.monotonic() < deadline_s, f"{len(found)} task runs, {expected} expected"
        time.sleep(0.2)
    return sorted(run.name for run in found)


def test_flow_has_one_task_run_per_shard_and_artifacts() -> None:
    runner = FakeRunner({"ok": 29, "error": 1})
    state = run(runner)
    assert state.is_completed()
    assert state.message == "29 ok, 1 error of 30 rows"
    assert sorted(runner.submitted) == [0, 1, 2]
    flow_run_id = state.state_details.flow_run_id
    expected = [f"shard-0000{index} (10 rows)" for index in range(3)]
    assert task_run_names(flow_run_id, 3) == expected
    artifacts = {artifact.type: artifact for artifact in recorded("artifacts", flow_run_id)}
    assert artifacts.keys() == {"progress", "table", "markdown"}
    assert "29 ok, 1 error" in artifacts["markdown"].data
    assert '"finish stop"' in artifacts["table"].data


def test_c25_flow_over_the_error_rate_fails() -> None:
    state = run(FakeRunner({"ok": 20, "error": 10}))
    assert state.is_failed()
    assert "10 error of 30 rows (error rate 33.3%, at most 5.0% is allowed)" in state.message


def test_broken_run_fails_its_shard_and_the_flow() -> None:
    state = run(FakeRunner({"ok": 20}, broken=frozenset({1})))
    assert state.is_failed()
    assert "the device is gone" in state.message


def test_c25_exit_status_is_that_of_the_flows_state() -> None:
    from flows.prefect_flow import run_as_flow

    assert run_as_flow(job(), flow_over(FakeRunner({"ok": 30}))) == 0
    assert run_as_flow(job(), flow_over(FakeRunner({"error": 30}))) == 1
    with pytest.raises(RuntimeError, match="the device is gone"):
        run_as_flow(job(), flow_over(FakeRunner({"ok": 20}, broken=frozenset({1}))))


def test_real_job_runs_as_a_flow(tiny_model: Path, tmp_path: Path) -> None:
    from flows.prefect_flow import infer
    from flows.spec import build

    flat = {
        "input": str(SAMPLE), "prompt": "{{ description }}", "model": str(tiny_model),
        "limit": 6, "max_tokens": 4, "memory": "1GiB", "output": str(tmp_path / "out"),
        "shard_tokens": 500,
    }  # fmt: skip
    state = infer(build({}, flat), return_state=True)
    assert state.message == "6 ok of 6 rows"
    num_shards = len(list((tmp_path / "out" / "results").glob("*.parquet")))
    assert num_shards > 1
    assert len(task_run_names(state.state_details.flow_run_id, num_shards)) == num_shards


def test_spec_is_the_form() -> None:
    from prefect.utilities.callables import parameter_schema

    from flows.prefect_flow import infer

    schema = parameter_schema(infer.fn)
    fields = schema.definitions["JobSpec"]["properties"]
    assert fields["input"]["position"] == 0
    assert fields["max_error_rate"]["maximum"] == 1.0
    assert schema.definitions["EngineSpec"]["properties"]["policy"]["enum"] == [
        "hybrid",
        "exclusive",
        "mixed",
    ]
