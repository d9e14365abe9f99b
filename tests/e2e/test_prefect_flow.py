"""The job as a Prefect flow: a task run per shard, artifacts, and a state that means something.

On a server that Prefect starts itself, with SQLite; `test_nightly.py` and its neighbours use one on
PostgreSQL.
"""

from __future__ import annotations

import json
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
    job_id: str = "fake"

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

    def shard_run(self, index: int) -> Any:
        from flows.shard_run import ShardRun

        return ShardRun(
            index=index, num_rows=10, est_tokens=100, prompt_tokens=60, completion_tokens=50,
            workers=("worker-0",), queued_s=0.5, run_s=2.0,
        )  # fmt: skip

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


def job(**fields: Any) -> Any:
    from flows.spec import JobSpec

    return JobSpec.model_validate({**SPEC, **fields})


def run(runner: FakeRunner) -> Any:
    """The final state of the flow over a runner."""
    return flow_over(runner)(job(), return_state=True)


def artifacts(flow_run_id: Any) -> dict[str, Any]:
    """The flow run's artifacts by the last word of their keys."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
    with get_client(sync_client=True) as client:
        return {
            str(found.key).rpartition("-")[2]: found
            for found in client.read_artifacts(artifact_filter=chosen)
        }


def task_runs(flow_run_id: Any, expected: int) -> list[Any]:
    """The flow run's task runs in order, once so many are final: the server learns later."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    deadline_s = time.monotonic() + 20.0
    while True:
        with get_client(sync_client=True) as client:
            found = client.read_task_runs(flow_run_filter=of_run)
        if len([item for item in found if item.state and item.state.is_final()]) >= expected:
            return sorted(found, key=lambda item: item.name)
        assert time.monotonic() < deadline_s, [(item.name, item.state_name) for item in found]
        time.sleep(0.2)


def test_flow_has_one_task_run_per_shard_and_artifacts() -> None:
    runner = FakeRunner({"ok": 29, "error": 1})
    state = run(runner)
    assert state.is_completed()
    assert state.message == "29 ok, 1 error of 30 rows"
    assert sorted(runner.submitted) == [0, 1, 2]
    flow_run_id = state.state_details.flow_run_id
    found = task_runs(flow_run_id, 3)
    assert [item.name for item in found] == [
        f"shard-0000{index} (10 rows, 110 tokens, worker-0, 2.0 s)" for index in range(3)
    ]
    assert {item.state.message for item in found} == {
        "10 rows, 60 prompt and 50 completion tokens on worker-0; waited 0.5 s, ran 2.0 s"
    }
    shown = artifacts(flow_run_id)
    assert {name: item.type for name, item in shown.items()} == {
        "progress": "progress", "shards": "table", "summary": "markdown", "output": "markdown",
    }  # fmt: skip
    assert "29 ok, 1 error" in shown["summary"].data
    assert "| finish stop | 30 |" in shown["summary"].data
    assert [row["rows"] for row in json.loads(shown["shards"].data)] == [10, 10, 10]
    assert shown["output"].data.startswith("[out/x](file:///")


def test_c59_many_shards_share_task_runs() -> None:
    from flows.prefect_flow import MAX_TASK_RUNS, task_groups

    runner = FakeRunner({"ok": 30}, num_shards=3 * MAX_TASK_RUNS - 1)
    groups = task_groups(runner.pending)
    assert len(groups) == MAX_TASK_RUNS
    assert [shard.index for group in groups for shard in group] == list(range(runner.num_shards))
    assert len(task_groups(runner.pending[:MAX_TASK_RUNS])) == MAX_TASK_RUNS
    assert task_groups([]) == []


def test_shards_that_share_a_task_run_are_all_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.prefect_flow.MAX_TASK_RUNS", 2)
    runner = FakeRunner({"ok": 30}, num_shards=5)
    state = run(runner)
    assert sorted(runner.submitted) == [0, 1, 2, 3, 4]
    names = [item.name for item in task_runs(state.state_details.flow_run_id, 2)]
    assert names == [
        "shards 00000-00002 (3 shards, 30 rows, 330 tokens, worker-0, 2.0 s)",
        "shards 00003-00004 (2 shards, 20 rows, 220 tokens, worker-0, 2.0 s)",
    ]


def test_c25_flow_over_the_error_rate_fails() -> None:
    state = run(FakeRunner({"ok": 20, "error": 10}))
    assert state.is_failed()
    assert "10 error of 30 rows (error rate 33.3%, at most 5.0% is allowed)" in state.message
    shown = artifacts(state.state_details.flow_run_id)["summary"].data
    assert shown.startswith("# 20 ok, 10 error of 30 rows (error rate 33.3%")


def test_broken_run_fails_its_shard_and_the_flow() -> None:
    runner = FakeRunner({"ok": 20}, broken=frozenset({1}))
    state = run(runner)
    assert state.is_failed()
    assert "the device is gone" in state.message
    names = {item.state_name: item.name for item in task_runs(state.state_details.flow_run_id, 3)}
    assert names["Failed"] == "shard-00001 (10 rows, about 100 tokens)"


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
    flow_run_id = state.state_details.flow_run_id
    assert len(task_runs(flow_run_id, num_shards)) == num_shards
    shown = artifacts(flow_run_id)
    assert (tmp_path / "out" / "report.html").exists()
    assert str(tmp_path / "out" / "report.html") in shown["report"].data
    assert "Policy hybrid" in shown["summary"].data or "mode" in shown["summary"].data
    assert sum(row["rows"] for row in json.loads(shown["shards"].data)) == 6


def test_embedding_job_runs_as_a_flow(tmp_path: Path) -> None:
    from flows.prefect_flow import make_flow
    from flows.runner import JobRunner
    from tests.e2e.cases import write_table
    from tests.e2e.jobs import fake_encoder_model

    sizes = [1, 7, 2, 30, 4, 4, 12, 1, 9, 3, 25, 2]
    keys = [f"p{index:02d}" for index, size in enumerate(sizes) for _ in range(size)]
    texts = [" ".join(["word"] * (1 + n % 9)) for n in range(len(keys))]
    source = write_table(tmp_path / "in.parquet", key=keys, text=texts)
    spec = job(
        input=str(source), task="embed", prompt={"column": "text"}, partition_by=["key"],
        encode={"min_texts": 10, "max_texts": 20}, output=str(tmp_path / "out"),
    )  # fmt: skip

    def make_runner(spec: Any, progress: Any) -> JobRunner:
        return JobRunner(spec, model=fake_encoder_model(token_s=0.0002), progress=progress)

    state = make_flow(make_runner)(spec, return_state=True)
    assert state.message == "100 ok of 100 rows"
    flow_run_id = state.state_details.flow_run_id
    shown = artifacts(flow_run_id)
    table = json.loads(shown["shards"].data)
    assert sum(row["rows"] for row in table) == 100
    assert sum(row["partitions"] for row in table) == len(sizes)
    assert sum(row["text tokens"] for row in table) == sum(1 + n % 9 for n in range(100))
    found = task_runs(flow_run_id, len(table))
    assert len(found) == len(table) > 3
    assert "30 rows of 1 partition, " in " ".join(item.name for item in found)
    said = " ".join([*(item.state.message for item in found), shown["summary"].data])
    assert " text tokens on worker-0; waited" in said
    assert "completion" not in said and "Prefill" not in said
    assert "## Superbatches" in shown["summary"].data
    assert f"12 partitions in {len(table)} superbatches" in shown["summary"].data
    assert "rows/s" in shown["progress"].description
    assert str(tmp_path / "out" / "report.html") in shown["report"].data


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


# -- GPU slots --


@pytest.fixture
def gpu_limit() -> Iterator[Any]:
    """Two slots; yields how many are taken."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate

    with get_client(sync_client=True) as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name="gpu", limit=2))
        yield lambda: client.read_global_concurrency_limit_by_name("gpu").active_slots
        client.delete_global_concurrency_limit_by_name("gpu")


def slots_flow(num_slots: int, during: Any = lambda: None) -> Any:
    """The final state of a flow that holds slots, and what was seen while it held them."""
    from prefect import flow

    from flows.gpu_slots import gpu_slots_held

    @flow(name="slots")
    def hold() -> Any:
        with gpu_slots_held(num_slots):
            return during()

    return hold(return_state=True)


def test_slots_are_held_while_the_job_computes(gpu_limit: Any) -> None:
    assert slots_flow(2, gpu_limit).result() == 2
    assert gpu_limit() == 0


def test_no_slots_need_no_limit() -> None:
    assert slots_flow(0, lambda: "computed").result() == "computed"


def test_more_slots_than_there_are_is_said_and_not_waited_for(gpu_limit: Any) -> None:
    state = slots_flow(3)
    assert state.is_failed()
    assert "gpu_slots is 3, but the global concurrency limit 'gpu' is 2" in state.message


def test_slots_of_no_limit_are_said() -> None:
    state = slots_flow(1)
    assert state.is_failed()
    assert "prefect gcl create gpu --limit N" in state.message
