"""What a run keeps: ledger, telemetry and catalogue, behind one object with one writing thread."""

from __future__ import annotations

import logging
import math
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from flows.busy import BusyTimes, Work
from flows.credentials import storage_options
from flows.encode_costs import cost_key, learn_cost
from flows.fleet.messages import EncodeCall
from flows.job_plan import plan_new_job
from flows.model import Model
from flows.prepare import PreparedJob
from flows.summary import JobSummary
from schedulers.encode_cost import EncodeSample
from schedulers.events import MemorySizing, event_row
from schedulers.memory import MemoryPlan
from storage.catalogue import Catalogue
from storage.ledger import Ledger
from storage.marker import Tally
from storage.remote import hurry, retry_log
from storage.remote_catalogue import RemoteCatalogue
from storage.shards import Shard
from storage.telemetry import TABLES, TelemetryWriter
from storage.writer import ShardSummary, ShardWriter
from workers.loading.cache import cache_root
from workers.request import EventRecord, StepRecord

_log = logging.getLogger(__name__)

MEMORY_BYTES = (
    "limit_bytes", "weights_bytes", "activation_bytes", "kv_bytes", "block_size", "num_blocks",
)  # fmt: skip
"""Of a `MemoryPlan`, in the table `memory_plan`."""

CATALOGUE_S = 10.0
"""Seconds between updates of the DuckDB file while a run goes on."""

MAX_SAMPLES = 4096
"""Encode calls that are remembered, for what they cost."""

FLUSH_S = 30.0
"""A killed run loses at most so many seconds of telemetry, and a checkpoint interval."""


class Journal:
    """The files of one run's output. Made by `open`; written by the collector's thread."""

    def __init__(
        self,
        job: PreparedJob,
        ledger: Ledger,
        *,
        model_fingerprint: str,
        clock: Callable[[], float],
        busy: BusyTimes,
    ) -> None:
        self._job = job
        self._clock = clock
        self._busy = busy
        self.meter = busy.meter("collector")
        self.ledger = ledger
        self.run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}"
        self._tables = {
            table: TelemetryWriter(ledger.store, table, self.run_id) for table in TABLES
        }
        self._catalogue = _catalogue_of(ledger)
        self._retry_logs = [
            log for fs in (job.dataset.fs, ledger.store.fs) if (log := retry_log(fs)) is not None
        ]
        self._catalogue_due_s = clock()
        self._writers: dict[int, ShardWriter] = {}
        self._open_counts: Counter[str] = Counter()
        self.warnings: list[str] = []
        self.memory: MemoryPlan | None = None
        self._works: dict[str, Sequence[Work]] = {}
        self._num_steps = 0
        self._num_short_steps = 0
        self._num_encoded = 0
        self._encoded_from_s, self._encoded_until_s = math.inf, -math.inf
        self._encodes: deque[EncodeSample] = deque(maxlen=MAX_SAMPLES)
        self._files_of: dict[str, int] = {}  # a worker's last call's
        self._cost_key = cost_key(model_fingerprint, job.spec.task, job.spec.engine)
        self._started_s = clock()
        self._flush_due_s = self._started_s + FLUSH_S
        self._steps_end_s = self._started_s

    @classmethod
    def open(
        cls,
        job: PreparedJob,
        model: Model,
        *,
        clock: Callable[[], float],
        busy: BusyTimes,
        on_step: Callable[[str], None] = lambda _: None,
    ) -> Journal:
        """Claim the output of a job.

        Args:
            job: prepared.
            model: found, not loaded.
            clock: seconds, monotonic.
            busy: what the run's threads work on; kept with the steps.
            on_step: told what is being done.

        Raises:
            OutputMismatch, OutputInUse, OutputError: see `storage.ledger`.
        """
        spec = job.spec
        identity = job.fingerprint(model)

        opened = Ledger.open(
            spec.output,
            dataset=job.dataset,
            generation=identity.generation,
            output=identity.output,
            make_record=lambda output: plan_new_job(job, model, identity, output),
            overwrite=spec.overwrite,
            storage_options=storage_options(spec.credentials, spec.output),
            on_step=on_step,
        )
        journal = cls(
            job, opened.ledger, model_fingerprint=model.fingerprint, clock=clock, busy=busy
        )
        journal._update_catalogue()
        return journal

    # -- what there is --

    @property
    def total_rows(self) -> int:
        return self.ledger.record.total_rows

    def pending(self) -> list[Shard]:
        """Shards to work on, and the writers of those that were begun, for `earlier_rows`."""
        return self.ledger.pending(retry_errors=self._job.spec.retry_errors)

    def earlier_rows(self, pending: list[Shard]) -> Mapping[str, int]:
        """Rows by status that need no work in this run."""
        counts: Counter[str] = Counter()
        open_shards = {shard.index for shard in pending}
        for index, summary in self.ledger.committed.items():
            if index not in open_shards:
                counts.update(summary.by_status)
        begun = {name.rsplit("/", 1)[-1] for name in self.ledger.store.list_folders("_checkpoints")}
        for shard in pending:
            if shard.name in begun or shard.index in self.ledger.committed:
                counts.update(self.writer(shard).so_far().by_status)
        return counts

    def writer(self, shard: Shard) -> ShardWriter:
        """The one writer of a shard."""
        if shard.index not in self._writers:
            self._writers[shard.index] = self.ledger.writer(
                shard, retry_errors=self._job.spec.retry_errors
            )
        return self._writers[shard.index]

    # -- what happens --

    def add_step(self, step: StepRecord, worker: str = "") -> None:
        """An engine step; of a worker with a name, under a run id of its own."""
        if not self._num_steps:
            self._busy.mark("engine and first rows", step.started_s)
        self._steps_end_s = max(
            self._steps_end_s, step.started_s + step.elapsed_s + step.schedule_s
        )
        self._tables["steps"].add(step.row() | self._run_id_of(worker))
        self._num_steps += 1
        self._num_short_steps += step.num_suspended > 0

    def _run_id_of(self, worker: str) -> dict[str, str]:
        """What tells the records of several engines apart: each counts its own steps."""
        return {"run_id": f"{self.run_id}-{worker}"} if worker else {}

    def add_note(self, table: str, values: Mapping[str, Any]) -> None:
        """A row of a table that is the run's own."""
        self._tables[table].add(values)

    def add_encode(self, call: EncodeCall, worker: str = "") -> None:
        """An encode call of a worker."""
        row = call._asdict()
        index, row["num_calls"] = row.pop("shard_index"), row.pop("num_batches")
        sizes = self._sizes_of(index)
        row |= {"shard": index, **sizes, **self._run_id_of(worker)}
        self._tables["encodes"].add(row)
        self._num_encoded += call.num_texts
        self._encoded_from_s = min(self._encoded_from_s, call.started_s)
        self._encoded_until_s = max(self._encoded_until_s, call.started_s + call.elapsed_s)
        files, self._files_of[worker] = self._files_of.get(worker, 0), sizes["num_partitions"]
        sample = EncodeSample(call.num_texts, call.num_tokens, call.interval_s, files)
        self._encodes.append(sample)

    def _sizes_of(self, index: int) -> dict[str, int]:
        """Partitions and vectors of a shard."""
        vector, partitions = self.ledger.record.columns.vector, self.ledger.partitions
        return {
            "width": 0 if vector is None else vector.width,
            "num_partitions": 1 if partitions is None else partitions.num_of(index),
        }

    def set_works(self, worker: str, works: Sequence[Work]) -> None:
        """What the threads of a worker have done since it began."""
        self._works[worker] = works

    def add_event(self, event: EventRecord, worker: str = "") -> None:
        """A decision of the policy; a memory plan is completed with the bytes behind it."""
        row = {"step": event.step, "at_s": event.at_s, **event_row(event.event)}
        row |= self._run_id_of(worker)
        if isinstance(event.event, MemorySizing):
            plan = self.memory._asdict() if self.memory is not None else {}
            row |= {name: plan.get(name) for name in MEMORY_BYTES}
        self._tables[event.event.table].add(row)

    def committed(self, summary: ShardSummary) -> None:
        """A shard was committed."""
        del self._writers[summary.index]
        self.ledger.note_committed(summary)
        if self._clock() >= self._catalogue_due_s:
            self._update_catalogue()

    def tick(self) -> None:
        """Called after every checkpoint."""
        self.ledger.beat()
        self._flush(force=self._clock() >= self._flush_due_s)

    def hurry(self) -> None:
        """The run is to end: a store that does not answer is not waited for as long as usual.

        Safe from other threads and signal handlers.
        """
        for fs in (self._job.dataset.fs, self.ledger.store.fs):
            hurry(fs)

    def close(self) -> None:
        """Write what is left, bring the catalogue up to date and give the output back."""
        try:
            self._flush(force=True)
            if self._encodes:
                learn_cost(self._cost_key, list(self._encodes))
            self._note_warning(self._catalogue.close(self.ledger))
            self._busy.skip_to(self._steps_end_s)
            self._busy.mark("finishing")
            self._flush(force=True)
        finally:
            self.ledger.release()

    def _flush(self, *, force: bool) -> None:
        """Write the telemetry that makes a file worth while, or all of it."""
        if force:
            self._flush_due_s = self._clock() + FLUSH_S
            if self._num_steps:
                self._add_works("", list(self._busy.works()))
                for worker, works in self._works.items():
                    self._add_works(worker, works)
        for log in self._retry_logs:
            for retried in log.take():
                self._tables["retries"].add({"at_s": self._clock(), **asdict(retried)})
        for table in self._tables.values():
            table.flush(force=force)

    def _add_works(self, worker: str, works: Sequence[Work]) -> None:
        for work in works:
            row = {"at_s": self._clock(), **work._asdict(), **self._run_id_of(worker)}
            self._tables["threads"].add(row)

    def _update_catalogue(self) -> None:
        with self.meter("catalogue"):
            self._note_warning(self._catalogue.rebuild(self.ledger))
        self._catalogue_due_s = self._clock() + CATALOGUE_S

    def _note_warning(self, warning: str | None) -> None:
        if warning is not None and warning not in self.warnings:
            self.warnings.append(warning)
            _log.warning("%s", warning)

    def summary(self, *, stopped: str | None, rate: float) -> JobSummary:
        """The job's end, from its markers and the parts of open shards."""
        by_status: Counter[str] = Counter()
        by_reason: Counter[str] = Counter()
        prompt = completion = 0
        for shard in self._shard_summaries():
            by_status.update(shard.by_status)
            by_reason.update(shard.by_finish_reason)
            prompt += shard.prompt_tokens
            completion += shard.completion_tokens
        return JobSummary(
            total_rows=self.total_rows,
            by_status=dict(by_status),
            by_finish_reason=dict(by_reason),
            prompt_tokens=prompt,
            completion_tokens=completion,
            elapsed_s=self._clock() - self._started_s,
            tokens_per_s=rate,
            output=self._job.spec.output,
            complete=len(self.ledger.committed) == len(self.ledger.shards),
            stopped=stopped,
            num_steps=self._num_steps,
            num_short_steps=self._num_short_steps,
            overflow_probability=self._job.spec.engine.overflow_probability,
            num_retries=sum(log.num_retries for log in self._retry_logs),
            rows_per_s=None if self._job.spec.task == "generate" else self._encode_rate(),
        )

    def _encode_rate(self) -> float:
        """Texts per second, from the first call's start to the last one's end."""
        span_s = self._encoded_until_s - self._encoded_from_s
        return self._num_encoded / span_s if span_s > 0 else 0.0

    def _shard_summaries(self) -> Iterator[ShardSummary | Tally]:
        yield from self.ledger.committed.values()
        for writer in self._writers.values():
            if writer.shard.index not in self.ledger.committed:
                yield writer.so_far()


def _catalogue_of(ledger: Ledger) -> Catalogue | RemoteCatalogue:
    """The DuckDB file of an output: in it when it is on this machine, else in the cache folder."""
    folder = ledger.store.local_path("")
    if folder is not None:
        return Catalogue(folder, ledger.dataset)
    cache = cache_root() / "catalogues" / ledger.record.job_id
    return RemoteCatalogue(cache, ledger.store, ledger.dataset)
