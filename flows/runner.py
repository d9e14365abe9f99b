"""Runs a job: the threads of a run, from start to summary.

    main         loads, submits shards, waits, shows progress, takes signals
    coordinator  gives rows to workers, and survives their deaths      (`fleet.coordinator`)
    worker       feeder, engine and outlet: in threads of this process, or in processes of their own
                                                                       (`fleet.worker`)
    collector    checkpoints, commits, keeps telemetry                 (`collector.py`)

Several shards are open at a time, so no engine runs empty between two. The first thread that fails
ends the run; what was finished is durable, and the same command goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from flows.busy import BusyTimes
from flows.collector import QUEUE_ITEMS, Collector, Item, OpenShard, item_weight
from flows.errors import SpecError
from flows.fleet.coordinator import Coordinator
from flows.fleet.links import Deliver, Link, LocalLink, ProcessLink
from flows.fleet.make_worker import make_worker
from flows.fleet.messages import OpenModel, WorkerSetup
from flows.fleet.places import default_workers, places
from flows.journal import Journal
from flows.model import Model, open_model
from flows.prepare import PreparedJob, prepare
from flows.progress import Progress
from flows.queues import Outbox, Stopped
from flows.sampling import resolve_sampling
from flows.shard_run import ShardRun, ShardRuns
from flows.spec import JobSpec
from flows.summary import JobSummary
from flows.threads import ThreadGroup
from schedulers.memory import MemoryPlan
from storage.allocator import use_system_allocator
from storage.errors import StorageError
from storage.ledger import ShardSummary
from storage.rows import RowReader
from storage.shards import Shard

if TYPE_CHECKING:
    from flows.fleet.ray_fleet import RayFleet

OPEN_SHARDS = 4
"""Shards in flight, at least: enough that the engine never waits for a commit."""

OPEN_ROWS = 8192
"""Rows in flight shards, at least: enough to fill the engine's window however small shards are."""

STEP_TIMEOUT_S = 600.0
"""No step takes that long: what does has lost its device."""

KV_BYTES_PER_S = 0.15e9
"""How fast keys and values travel between two processes of a machine through a third one, all
copies included: 300 MB took 2.3 s on two cores (`tests/bench/tail.py`).
"""


class JobRunner:
    """One run of a job: `with JobRunner(spec) as runner: ...`.

    Entering finds everything that is the user's to mend, claims the output and, when there is work,
    loads the model and starts the threads. Leaving stops them and gives the output back.

    Args:
        spec: the job.
        model: another model than the spec names, for a worker in this process (tests, benchmarks).
        find_model: finds the spec's model, here and in worker processes; a function of a module.
        progress: told of everything.
        clock: seconds, monotonic.
        step_timeout_s: a step of the engine that takes longer hangs, and ends its worker.
        began_s: when the process or whatever wanted the run began, for its profile; now if None.

    Raises:
        SpecError, InputError, OutputMismatch, ModelError: the user's to mend; nothing was started.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        model: Model | None = None,
        find_model: OpenModel = open_model,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
        step_timeout_s: float = STEP_TIMEOUT_S,
        began_s: float | None = None,
    ) -> None:
        self.spec = spec
        self._busy = BusyTimes(clock=clock, began_s=began_s)
        self.progress = progress or Progress(clock=clock)
        self._given_model = model
        self._find_model = find_model
        self._clock = clock
        self._step_timeout_s = step_timeout_s
        self._threads = ThreadGroup(on_failure=self._interrupt)
        self._outbox: Outbox[Item] = Outbox(QUEUE_ITEMS, weigh=item_weight)
        self._coordinator: Coordinator | None = None
        self._collector: Collector | None = None
        self._shard_runs = ShardRuns(
            clock=clock, encodes=spec.task != "generate", partitioned=bool(spec.partition_by)
        )
        self._stopped: str | None = None
        self._fleet: RayFleet | None = None
        workers = spec.engine.workers or default_workers(spec.engine.device)
        self.num_workers = None if model is not None else workers

    # -- start --

    def __enter__(self) -> Self:
        self._busy.mark("imports")
        use_system_allocator(keep_large=self.spec.task == "generate")
        self.job: PreparedJob = prepare(self.spec)
        self.model = self._given_model or self._find_model(self.spec)
        # What the model itself makes impossible is found before the output is touched.
        self._tokenizer = self.model.load_tokenizer()
        self.job.renderer.bind(self._tokenizer)
        resolve_sampling(self.spec.sampling, self.model.generation_config)
        self.journal = Journal.open(self.job, self.model, clock=self._clock, busy=self._busy)
        try:
            self.pending = self._in_order(self.journal.pending())
            if self.pending and self._stopped is None:
                self._start()
            self.progress.start(
                total_rows=self.journal.total_rows,
                earlier=self.journal.earlier_rows(self.pending),
            )
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def _in_order(self, shards: list[Shard]) -> list[Shard]:
        """Largest first for several workers, so that they end together; else as they come."""
        if self.num_workers is None:
            return shards
        return sorted(shards, key=lambda shard: -shard.est_tokens)

    def _start(self) -> None:
        """Bring the workers to life and start the threads, from the last of the chain to the
        first.
        """
        self.progress.set_phase("loading the model")
        if self.spec.engine.cluster is not None and self._given_model is None:
            self._join_cluster(self.spec.engine.cluster)
        self._reader = RowReader(self.journal.ledger.dataset, ())
        if self.num_workers is not None and self._fleet is None:
            self._places = places(self.num_workers, self.spec.engine.device)
        names = [f"worker-{index}" for index in range(self.num_workers or 0)] or [""]
        coordinator = Coordinator(
            names=names,
            make_link=self._make_link,
            collect=self._outbox.put,
            find_row_id=self._find_row_id,
            clock=self._clock,
            kv_bytes_per_s=KV_BYTES_PER_S,
            start_timeout_s=self.spec.engine.start_timeout_s,
            on_ready=self._note_memory,
            on_assign=self._shard_runs.started,
        )
        self._collector = Collector(
            outbox=self._outbox,
            checkpoint_s=self.spec.checkpoint_s,
            clock=self._clock,
            journal=self.journal,
            progress=self.progress,
        )
        self._threads.start("collector", self._collector.run)
        coordinator.start()
        self._coordinator = coordinator
        if self._stopped is not None:
            coordinator.stop()
        self._threads.start("coordinator", self._coordinate)
        coordinator.wait_ready()
        self._threads.raise_failure()

    def _join_cluster(self, address: str) -> None:
        try:
            from flows.fleet.ray_fleet import RayFleet
        except ImportError as fault:
            raise SpecError(
                f"cluster is {address!r}, but Ray is not installed; pip install 'headrace[ray]'"
            ) from fault
        self._fleet = RayFleet(
            address, num_workers=self.spec.engine.workers, device=self.spec.engine.device
        )
        self.num_workers = self._fleet.num_workers

    def _make_link(self, index: int, deliver: Deliver) -> Link:
        setup = WorkerSetup(
            spec=self.spec,
            dataset=self.journal.ledger.dataset,
            open_model=self._find_model,
            num_workers=self._fleet.workers_a_host if self._fleet else self.num_workers or 1,
            step_timeout_s=self._step_timeout_s,
            reports=self.num_workers is not None,
            max_texts=self.journal.ledger.record.max_texts,
        )
        if self.num_workers is None:
            model = replace(self.model, load_tokenizer=lambda: self._tokenizer)
            worker = make_worker(setup, deliver, model=model, clock=self._clock, busy=self._busy)
            return LocalLink(worker, deliver)
        if self._fleet is not None:
            return self._fleet.make_link(setup, index, deliver)
        place = self._places[index]
        return ProcessLink(
            setup,
            environ=place.environ,
            cores=place.cores,
            deliver=deliver,
            name=f"worker-{index}",
        )

    def _note_memory(self, memory: MemoryPlan) -> None:
        self.journal.memory = memory

    def _find_row_id(self, shard: Shard, ordinal: int) -> str:
        others = set(range(shard.num_rows)) - {ordinal}
        (row,) = (row for rows in self._reader.rows(shard, skip=others) for row in rows)
        return row.row_id

    def _coordinate(self) -> None:
        assert self._coordinator is not None
        try:
            self._coordinator.run()
        finally:
            if self._stopped is not None:
                self._threads.release(Stopped())

    # -- work --

    def submit(self, shard: Shard) -> Future[ShardSummary]:
        """Queue a shard; the future is done when it is committed.

        It fails with `Stopped` when the run ends before that, and with the run's error when it
        broke.
        """
        self._shard_runs.submitted(shard)
        committed: Future[ShardSummary] = Future()
        committed.add_done_callback(lambda _: self._shard_runs.ended(shard.index))
        self._threads.watch(committed)
        if self._coordinator is None or self._collector is None:
            return committed  # stopped before the start: it has failed already
        opened = OpenShard(shard, self.journal.writer(shard), committed)
        missing = opened.writer.missing
        self._collector.open(opened)
        if len(missing):
            with suppress(Stopped):  # the run has ended, and released the future
                self._coordinator.submit(shard, missing)
        return committed

    def has_enough(self, open_rows: Collection[int]) -> bool:
        """Whether so many shards of so many rows keep all workers busy."""
        num_workers = self.num_workers or 1
        return (
            len(open_rows) >= OPEN_SHARDS * num_workers
            and sum(open_rows) >= OPEN_ROWS * num_workers
        )

    @property
    def job_id(self) -> str:
        """Of the output."""
        return self.journal.ledger.record.job_id

    def shard_run(self, index: int) -> ShardRun:
        """What became of a shard of this run, once it is committed."""
        return self._shard_runs.of(self.journal.ledger.committed[index])

    def stop(self, reason: str) -> None:
        """End the run early: finished rows are made durable, the rest is left for the next run.

        Safe from other threads and signal handlers; returns at once.
        """
        self._stopped = self._stopped or reason
        self._interrupt()
        if hasattr(self, "journal"):  # else the output is not open yet
            self.journal.hurry()

    def _interrupt(self) -> None:
        if self._coordinator is None:
            self._threads.release(Stopped())
        else:
            self._coordinator.stop()

    def finish(self) -> JobSummary:
        """Wait for everything that was submitted, end the threads, and sum up.

        Raises:
            Exception: what broke the run, as it was raised in its thread.
        """
        self._end_threads()
        self._threads.raise_failure()
        return self.journal.summary(
            stopped=self._stopped, rate=self.progress.snapshot().tokens_per_s
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """End the threads and give the output back. What broke the run is not hidden by what breaks
        on the way out.
        """
        if error is not None:
            self._interrupt()
        self._end_threads()
        try:
            self.journal.close()
        except (OSError, StorageError):
            if error is None:
                raise

    def _end_threads(self) -> None:
        """From the first of the chain to the last. Without effect the second time."""
        if self._coordinator is not None:
            self._coordinator.close()
            self._threads.join("coordinator")
        if self._collector is not None:
            self._collector.finish()
            self._threads.join("collector")
        if self._fleet is not None:
            self._fleet.close()
            self._fleet = None


def run_job(
    spec: JobSpec,
    *,
    model: Model | None = None,
    find_model: OpenModel = open_model,
    progress: Progress | None = None,
    on_start: Callable[[JobRunner], None] | None = None,
    began_s: float | None = None,
) -> JobSummary:
    """Run a job on this machine, to its end or until it is stopped.

    Args:
        spec: the job.
        model: see `JobRunner`.
        find_model: see `JobRunner`.
        progress: told of everything.
        on_start: given the runner once it has started (to install signal handlers).
        began_s: see `JobRunner`.

    Example:
        >>> run_job(JobSpec(input="reviews.parquet", prompt="Summarise: {{ text }}"))  # doctest:
        +SKIP
    """
    with JobRunner(
        spec, model=model, find_model=find_model, progress=progress, began_s=began_s
    ) as runner:
        if on_start is not None:
            on_start(runner)
        open_shards: dict[Future[ShardSummary], int] = {}
        for shard in runner.pending:
            while runner.has_enough(open_shards.values()):
                _settle_one(open_shards)
            open_shards[runner.submit(shard)] = shard.num_rows
        while open_shards:
            _settle_one(open_shards)
        return runner.finish()


def _settle_one(open_shards: dict[Future[ShardSummary], int]) -> None:
    """Wait until one shard is committed, or given up because the run is ending."""
    done, _ = wait(open_shards, return_when=FIRST_COMPLETED)
    for committed in done:
        del open_shards[committed]
        with suppress(Stopped):
            committed.result()
