"""The job as a Prefect flow: one task run per shard, a progress artifact, a table and a summary.

Prefect sees shards, never rows, and decides nothing about resuming: the ledger in the output does,
so it is harmless when Prefect runs a flow or a task twice. Imported only when Prefect is wanted.
"""

from __future__ import annotations

import os
import threading

# Before prefect is imported: the ephemeral server's telemetry locks its own database.
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, cast
from uuid import UUID

from prefect import Flow, flow, task
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import FailedRun
from prefect.futures import PrefectFuture, wait
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from flows.progress import Progress
from flows.runner import OPEN_SHARDS, JobRunner
from flows.spec import JobSpec
from flows.summary import JobSummary
from storage.ledger import ShardSummary
from storage.shards import Shard

ARTIFACT_INTERVAL_S = 3.0


class Runner(Protocol):
    """What the flow needs of `flows.runner.JobRunner`."""

    @property
    def pending(self) -> Sequence[Shard]: ...
    def submit(self, shard: Shard) -> Future[ShardSummary]: ...
    def finish(self) -> JobSummary: ...
    def stop(self, reason: str) -> None: ...


class OneByOne:
    """`runner.submit` for task runs, which are threads: one call at a time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._lock = threading.Lock()

    def __call__(self, shard: Shard) -> Future[ShardSummary]:
        with self._lock:
            return self._runner.submit(shard)


MakeRunner = Callable[[JobSpec, Progress], AbstractContextManager[Runner]]


@task(
    name="shard",
    task_run_name="shard-{index:05d} ({num_rows} rows)",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def run_shard(index: int, num_rows: int, submit: Callable[[], Future[ShardSummary]]) -> None:
    """One shard, from its submission to its commit. Safe to run twice."""
    del index, num_rows  # they are for the task run's name
    submit().result()


def make_flow(make_runner: MakeRunner) -> Flow[[JobSpec], State[Any]]:
    """The flow over a kind of runner."""

    @flow(
        name="infer",
        description="A model over every row of a Parquet dataset, one result per row.",
        flow_run_name="infer-{spec.model}",
        task_runner=cast("Any", ThreadPoolTaskRunner(max_workers=OPEN_SHARDS)),
        persist_result=False,
    )
    def infer(spec: JobSpec) -> State[Any]:
        """Run a job.

        Args:
            spec: the job: input, prompt, model, output and the rest.
        """
        progress = Progress(write=get_run_logger().info, interval_s=30.0)
        with progress.running(), make_runner(spec, progress) as runner:
            try:
                _run_shards(runner, progress)
            except BaseException:
                runner.stop("the flow was ended")
                raise
            summary = runner.finish()
        _show(summary)
        return final_state(summary, spec.max_error_rate)

    return infer


def _job_runner(spec: JobSpec, progress: Progress) -> AbstractContextManager[Runner]:
    return JobRunner(spec, progress=progress)


infer = make_flow(_job_runner)


def run_as_flow(spec: JobSpec, run: Flow[[JobSpec], State[Any]] = infer) -> int:
    """Run a job as a flow, here and now; returns the exit status.

    Raises:
        Exception: what broke the flow, as it was raised in it.
    """
    try:
        run(spec)
    except FailedRun:  # the state that `final_state` made
        return 1
    return 0


def final_state(summary: JobSummary, max_error_rate: float) -> State[Any]:
    """What the rows make of the flow (C25): `Completed` only within the error rate."""
    if summary.exit_code(max_error_rate) == 0:
        return Completed(message=summary.message())
    rate = f"error rate {summary.error_rate:.1%}, at most {max_error_rate:.1%} is allowed"
    why = rate if summary.complete else "not complete"
    return Failed(message=f"{summary.message()} ({why})")


def _run_shards(runner: Runner, progress: Progress) -> None:
    """Submit every shard and wait, keeping the progress artifact up to date.

    Artifacts are made here, in the flow's own thread, as Prefect knows no run in others.
    """
    artifact_id = cast("UUID", create_progress_artifact(progress=0.0, description="rows done"))
    submit = OneByOne(runner)
    waiting: list[PrefectFuture[None]] = [
        run_shard.submit(index=shard.index, num_rows=shard.num_rows, submit=partial(submit, shard))
        for shard in runner.pending
    ]
    while waiting:
        waiting = list(wait(waiting, timeout=ARTIFACT_INTERVAL_S).not_done)
        snapshot = progress.snapshot()
        update_progress_artifact(
            artifact_id, progress=100.0 * snapshot.fraction, description=snapshot.line()
        )


def _show(summary: JobSummary) -> None:
    rows = [{"what": name, "value": value} for name, value in summary.lines()]
    create_table_artifact(table=rows, description="Rows, tokens and time")
    create_markdown_artifact(
        markdown=f"# {summary.message()}\n\nResults: `{summary.output}`",
        description="Result of the job",
    )
