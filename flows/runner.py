"""Runs a job: the threads of a run, from start to summary.

    main       loads, submits shards, waits, shows progress, takes signals
    feeder     reads rows, renders prompts, tokenises ahead         (`feeder.py`)
    engine     plan, apply, execute, resume                         (`workers.engine`)
    collector  detokenises, checkpoints, commits, keeps telemetry   (`collector.py`)

All shards share one engine and several are open at a time, so it never runs empty between two. The
first thread that fails ends the run; what was finished is durable, and the same command goes on
from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from types import TracebackType
from typing import Self

from flows.busy import BusyTimes
from flows.collector import Answered, Collector, Item, OpenShard
from flows.feeder import Feeder, PromptLimits
from flows.journal import Journal
from flows.model import Model, open_model
from flows.outputs import output_rules
from flows.prepare import PreparedJob, prepare
from flows.progress import Progress
from flows.queues import Outbox, RequestQueue, RowRef, Stopped
from flows.rowmaker import RowMaker
from flows.sampling import resolve_sampling
from flows.shard_run import ShardRun, ShardRuns
from flows.spec import JobSpec
from flows.summary import JobSummary
from flows.threads import ThreadGroup
from flows.watchdog import Watchdog, WatchedBackend
from schedulers.cost import StepSample
from storage.allocator import use_system_allocator
from storage.errors import StorageError
from storage.ledger import ShardSummary
from storage.rows import Row, RowReader
from storage.shards import Shard
from workers.backends.base import ModelInfo
from workers.engine import Engine
from workers.errors import BackendError
from workers.setup import EngineOptions, device_memory_bytes, make_engine

OPEN_SHARDS = 4
"""Shards in flight, at least: enough that the engine never waits for a commit."""

OPEN_ROWS = 8192
"""Rows in flight shards, at least: enough to fill the engine's window however small shards are."""

READY_REQUESTS = 512
"""Requests kept tokenised ahead of the engine."""

STEP_TIMEOUT_S = 600.0
"""No step takes that long: what does has lost its device."""

STOP_GRACE_S = 15.0
"""Seconds that a step may still take once the run has been told to stop."""


class JobRunner:
    """One run of a job: `with JobRunner(spec) as runner: ...`.

    Entering finds everything that is the user's to mend, claims the output and, when there is work,
    loads the model and starts the threads. Leaving stops them and gives the output back.

    Args:
        spec: the job.
        model: another model than the spec names (tests, benchmarks).
        progress: told of everything.
        clock: seconds, monotonic.
        step_timeout_s: a step of the engine that takes longer hangs, and ends the run.
        began_s: when the process or whatever wanted the run began, for its profile; now if None.

    Raises:
        SpecError, InputError, OutputMismatch, ModelError: the user's to mend; nothing was started.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        model: Model | None = None,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
        step_timeout_s: float = STEP_TIMEOUT_S,
        began_s: float | None = None,
    ) -> None:
        self.spec = spec
        self._busy = BusyTimes(clock=clock, began_s=began_s)
        self.progress = progress or Progress(clock=clock)
        self._given_model = model
        self._clock = clock
        self._step_timeout_s = step_timeout_s
        self._threads = ThreadGroup(on_failure=self._interrupt)
        self._requests = RequestQueue(READY_REQUESTS)
        self._outbox: Outbox[Item] = Outbox(1024)
        self._in_flight: dict[str, RowRef] = {}
        self._shard_runs = ShardRuns(clock=clock)
        self._engine: Engine | None = None
        self._watchdog: Watchdog | None = None
        self._stopped: str | None = None

    # -- start --

    def __enter__(self) -> Self:
        self._busy.mark("imports")
        use_system_allocator()
        self.job: PreparedJob = prepare(self.spec)
        self.model = self._given_model or open_model(self.spec)
        # What the model itself makes impossible is found before the output is touched.
        self._tokenizer = self.model.load_tokenizer()
        self._renderer = self.job.renderer.bind(self._tokenizer)
        self._sampling = resolve_sampling(self.spec.sampling, self.model.generation_config)
        self.journal = Journal.open(self.job, self.model, clock=self._clock, busy=self._busy)
        try:
            self.pending = self.journal.pending()
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

    def _start(self) -> None:
        """Load the model and start the threads, from the last of the chain to the first."""
        self.progress.set_phase("loading the model")
        tokenizer = self._tokenizer
        self._busy.mark("opening the job")
        backend = WatchedBackend(self.model.load_backend(), clock=self._clock)
        self._busy.mark("loading the model")
        rules = output_rules(self.spec, tokenizer, vocab_size=backend.info.vocab_size)
        self._engine, self.journal.memory = make_engine(
            backend,
            self._engine_options(backend.info.device),
            clock=self._clock,
            calibration=self._calibration(backend.info),
            find_stop=tokenizer.find_stop,
            on_step=lambda step: self._outbox.put([step]),
            on_event=lambda event: self._outbox.put([event]),
        )
        self._collector = Collector(
            outbox=self._outbox,
            to_rows=RowMaker(tokenizer, check_output=rules.check),
            checkpoint_s=self.spec.checkpoint_s,
            clock=self._clock,
            journal=self.journal,
            progress=self.progress,
        )
        self._reader = RowReader(self.job.dataset, self.job.renderer.columns)
        self._feeder = Feeder(
            read=self._read,
            renderer=self._renderer,
            encoder=tokenizer,
            limits=PromptLimits(
                max_model_len=backend.info.max_model_len,
                max_tokens=self._sampling.max_tokens,
                on_too_long=self.spec.on_too_long,
            ),
            sampling=self._sampling,
            requests=self._requests,
            outbox=self._outbox,
            in_flight=self._in_flight,
            grammar=rules.grammar,
            meter=self._busy.meter("feeder"),
        )
        self._watchdog = Watchdog(
            backend,
            step_timeout_s=self._step_timeout_s,
            stop_grace_s=STOP_GRACE_S,
            clock=self._clock,
        )
        self._threads.start("collector", self._collector.run)
        self._threads.start("watchdog", self._watch)
        self._threads.start("engine", self._drive)
        self._threads.start("feeder", self._feeder.run)

    def _engine_options(self, device: str) -> EngineOptions:
        engine = self.spec.engine
        return EngineOptions(
            policy=engine.policy,
            overflow_probability=engine.overflow_probability,
            sizing=engine.sizing,
            memory_bytes=engine.memory_bytes(device_memory_bytes(device)),
            max_batch_tokens=engine.max_batch_tokens,
            max_seqs=engine.max_seqs,
            deterministic=engine.deterministic,
            row_timeout_s=self.spec.row_timeout_s,
        )

    def _calibration(self, info: ModelInfo) -> tuple[StepSample, ...]:
        """Steps of `flows calibrate`, when it has been run here with this model."""
        from flows.calibration import hardware_of, load_calibration

        found = load_calibration(
            hardware=hardware_of(info.device),
            model_fingerprint=self.model.fingerprint,
            dtype=info.dtype,
        )
        return () if found is None else found.prior_samples

    # -- the threads' bodies --

    def _read(self, shard: Shard) -> Iterator[list[Row]]:
        """Rows of a shard that have no result yet."""
        self._shard_runs.started(shard.index)
        return self._reader.rows(shard, skip=self.journal.writer(shard).done)

    def _drive(self) -> None:
        """Run the engine until the feeder has closed the queue and every request is answered."""
        assert self._engine is not None
        try:
            for result in self._engine.run(self._requests):
                ref = self._in_flight.pop(result.request_id)
                self._outbox.put([Answered(ref, result)])
        except Stopped:
            return
        finally:
            self._engine.backend.close()
            if self._stopped is not None:
                self._threads.release(Stopped())

    def _watch(self) -> None:
        """Wait for a step that hangs, and end the run around it."""
        assert self._watchdog is not None
        assert self._engine is not None
        step = self._watchdog.wait()
        if step is None:
            return
        self._threads.abandon("engine")
        if self._stopped is None:
            raise BackendError(
                f"the device has not come back from a step for "
                f"{self._clock() - step.started_s:.1f} s ({step.num_tokens} tokens of "
                f"{step.num_seqs} sequences; {self._engine.num_in_flight} rows in flight). "
                "Finished rows are kept; run the same command again to go on, with a smaller "
                "--max-batch-tokens if steps really take that long"
            )
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
        if self._engine is None:
            return committed  # stopped before the start: it has failed already
        opened = OpenShard(shard, self.journal.writer(shard), committed)
        has_work = opened.writer.num_missing > 0
        self._collector.open(opened)
        if has_work:
            self._feeder.submit(shard)
        return committed

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

    def _interrupt(self) -> None:
        self._requests.stop()
        if self._engine is None:
            self._threads.release(Stopped())
        else:
            self._engine.stop()
        if self._watchdog is not None:
            self._watchdog.stop()

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
        if self._watchdog is None:
            return
        self._feeder.close()
        self._threads.join("feeder", "engine")
        self._watchdog.end()
        self._threads.join("watchdog")
        self._collector.finish()
        self._threads.join("collector")


def run_job(
    spec: JobSpec,
    *,
    model: Model | None = None,
    progress: Progress | None = None,
    on_start: Callable[[JobRunner], None] | None = None,
    began_s: float | None = None,
) -> JobSummary:
    """Run a job on this machine, to its end or until it is stopped.

    Args:
        spec: the job.
        model: another model than the spec names.
        progress: told of everything.
        on_start: given the runner once it has started (to install signal handlers).
        began_s: see `JobRunner`.

    Example:
        >>> run_job(JobSpec(input="reviews.parquet", prompt="Summarise: {{ text }}"))  # doctest:
        +SKIP
    """
    with JobRunner(spec, model=model, progress=progress, began_s=began_s) as runner:
        if on_start is not None:
            on_start(runner)
        open_shards: dict[Future[ShardSummary], int] = {}
        for shard in runner.pending:
            while len(open_shards) >= OPEN_SHARDS and sum(open_shards.values()) >= OPEN_ROWS:
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
