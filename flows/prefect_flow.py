"""The job as a Prefect flow: one task run per shard, and what `flows.prefect_board` shows.

Prefect sees shards, never rows, and decides nothing about resuming: the ledger in the output does,
so it is harmless when Prefect runs a flow or a task twice. Imported only when Prefect is wanted.

The engine's threads never wait for Prefect. Task runs are threads that submit shards and wait for
their commits; artifacts are made by the flow's own thread. SIGTERM (cancel, reschedule) reaches
that thread as an exception: the run is told to stop, what is finished is committed, and Prefect
gives the state.
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

from prefect import Flow, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import TaskRunContext
from prefect.exceptions import FailedRun
from prefect.futures import PrefectFuture, wait
from prefect.logging import get_run_logger
from prefect.states import Cancelled, Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from flows.gpu_slots import gpu_slots_held
from flows.prefect_board import UPDATE_S, Board
from flows.prefect_text import begun_label, done_label, done_message
from flows.prepare import prepare
from flows.progress import Progress
from flows.queues import Stopped
from flows.runner import JobRunner
from flows.shard_run import ShardRun
from flows.spec import JobSpec
from flows.summary import JobSummary
from storage.ledger import ShardSummary
from storage.shards import Shard

MAX_TASK_RUNS = 200
"""More shards than that share task runs: thousands of those would bring a server down (C59)."""

TASKS_IN_FLIGHT = 8
"""Task runs at a time: with less than that small shards would leave the engine without rows."""

LOG_S = 30.0
"""Seconds between lines of progress in the flow run's log."""


class Runner(Protocol):
    """What the flow needs of `flows.runner.JobRunner`."""

    @property
    def job_id(self) -> str: ...
    @property
    def pending(self) -> Sequence[Shard]: ...
    def submit(self, shard: Shard) -> Future[ShardSummary]: ...
    def shard_run(self, index: int) -> ShardRun: ...
    def finish(self) -> JobSummary: ...
    def stop(self, reason: str) -> None: ...


MakeRunner = Callable[[JobSpec, Progress], AbstractContextManager[Runner]]


class ShardDesk:
    """Where task runs, which are threads, bring their shards: submits one at a time, and none once
    it is closed; keeps what became of them.

    Args:
        runner: of the job.
        on_done: told of each committed shard, in the task run's thread.
    """

    def __init__(self, runner: Runner, on_done: Callable[[ShardRun], None]) -> None:
        self._runner = runner
        self._on_done = on_done
        self._lock = threading.Lock()
        self._closed = False
        self._done: list[ShardRun] = []

    def close(self) -> None:
        """The run is ending: submit no more."""
        self._closed = True

    def run(self, shards: Sequence[Shard]) -> list[ShardRun]:
        """Submit shards and wait until all are committed.

        Raises:
            Stopped: the run ended before.
            Exception: what broke the run.
        """
        waiting = [(shard, self._submit(shard)) for shard in shards]
        return [self._await(shard, committed) for shard, committed in waiting]

    def done(self) -> list[ShardRun]:
        """The committed shards, in order."""
        with self._lock:
            return sorted(self._done, key=lambda run: run.index)

    def _submit(self, shard: Shard) -> Future[ShardSummary]:
        with self._lock:
            if self._closed:
                raise Stopped
            return self._runner.submit(shard)

    def _await(self, shard: Shard, committed: Future[ShardSummary]) -> ShardRun:
        committed.result()
        run = self._runner.shard_run(shard.index)
        with self._lock:
            self._done.append(run)
        self._on_done(run)
        return run


@task(name="shard", task_run_name="{label}", cache_policy=NO_CACHE, persist_result=False)
def run_shards(label: str, work: Callable[[], list[ShardRun]]) -> State[Any]:
    """Some shards, mostly one, from submission to commit. Safe to run twice."""
    del label  # it is the task run's name
    try:
        runs = work()
    except Stopped:
        return Cancelled(message="the run ended before; the rows that were finished are kept")
    context = TaskRunContext.get()
    assert context is not None
    # It travels with the final state, which spares a call.
    context.task_run.name = done_label(runs)
    return Completed(message=done_message(runs))


def run_in_flow(
    spec: JobSpec,
    make_runner: MakeRunner,
    *,
    key: str | None = None,
    gpu_slots: int = 0,
) -> State[Any]:
    """The body of every flow: run a job and say what became of it.

    Args:
        spec: the job.
        make_runner: makes its runner.
        key: begins the artifacts' keys; None: one for the output.
        gpu_slots: slots of the global concurrency limit `gpu` to hold while it computes.

    Raises:
        Exception: the user's mistakes and what broke the run, as in `flows.runner.JobRunner`.
    """
    if gpu_slots:
        prepare(spec)  # a mistake is told at once, not after a night of waiting for slots
    progress = Progress(write=get_run_logger().info, interval_s=LOG_S)
    with gpu_slots_held(gpu_slots), progress.running():
        with make_runner(spec, progress) as runner:
            board = Board(spec, runner.job_id, key=key)
            desk = ShardDesk(runner, on_done=board.shard_done)
            try:
                board.tag(*(["gpu"] if gpu_slots else []))
                _run_shards(runner, desk, progress, board)
            except BaseException:
                desk.close()
                runner.stop("the flow was ended")
                raise
            summary = runner.finish()
        board.progress(progress.snapshot(), force=True)
    state = final_state(summary, spec.max_error_rate)
    board.close(summary, desk.done(), str(state.message))
    return state


def make_flow(make_runner: MakeRunner) -> Flow[[JobSpec], State[Any]]:
    """The flow over a kind of runner."""

    @flow(
        name="infer",
        description="A model over every row of a Parquet dataset, one result per row.",
        flow_run_name="infer-{spec.model}",
        task_runner=cast("Any", ThreadPoolTaskRunner(max_workers=TASKS_IN_FLIGHT)),
        persist_result=False,
    )
    def infer(spec: JobSpec) -> State[Any]:
        """Run a job.

        Args:
            spec: the job: input, prompt, model, output and the rest.
        """
        return run_in_flow(spec, make_runner)

    return infer


def job_runner(spec: JobSpec, progress: Progress) -> AbstractContextManager[Runner]:
    """The runner of real jobs."""
    return JobRunner(spec, progress=progress)


infer = make_flow(job_runner)


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


def task_groups(shards: Sequence[Shard]) -> list[tuple[Shard, ...]]:
    """The shards of each task run: one, or as many in a row as keeps to `MAX_TASK_RUNS`."""
    size = max(1, -(-len(shards) // MAX_TASK_RUNS))
    return [tuple(shards[start : start + size]) for start in range(0, len(shards), size)]


def _run_shards(runner: Runner, desk: ShardDesk, progress: Progress, board: Board) -> None:
    """Hand every shard to a task run and wait, keeping the progress artifact up to date."""
    board.progress(progress.snapshot(), force=True)
    waiting: list[PrefectFuture[Any]] = [
        run_shards.submit(label=begun_label(group), work=partial(desk.run, group))
        for group in task_groups(runner.pending)
    ]
    while waiting:
        waiting = list(wait(waiting, timeout=UPDATE_S).not_done)
        board.progress(progress.snapshot())
