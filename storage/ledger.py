"""The commit ledger of an output: which job it is, which shards are done, and how they get done.

    OUTPUT/job.json                              the job and its shard plan            (`record.py`)
    OUTPUT/_lease.json                           who is writing                        (`lease.py`)
    OUTPUT/_checkpoints/shard-00000/part-*.parquet  finished rows of open shards       (`writer.py`)
    OUTPUT/results/shard-00000.parquet           all rows of a shard, in input order
    OUTPUT/_markers/shard-00000.json             written last: the shard is committed
    OUTPUT/telemetry/, OUTPUT/job.duckdb         what happened

The order of a commit, and what a crash after each step leaves, is in `README.md`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import orjson

from storage.errors import OutputError, OutputMismatch
from storage.lease import Lease
from storage.objects import TMP, ObjectStore
from storage.record import JobRecord, differences
from storage.results import result_schema
from storage.shards import Shard
from storage.source import Dataset
from storage.writer import ShardSummary, ShardWriter, rewrite_kept

JOB = "job.json"
MARKERS = "_markers"
RESULTS = "results"
CHECKPOINTS = "_checkpoints"
TELEMETRY = "telemetry"
OWNED_FOLDERS = (MARKERS, RESULTS, CHECKPOINTS, TELEMETRY, TMP)
OWNED_FILES = ("job.duckdb", "job.duckdb.wal", "report.html", "_lease.json")


class Opened(NamedTuple):
    """What `Ledger.open` found.

    Attributes:
        ledger: ready to write.
        resumed: the output belonged to this job already.
    """

    ledger: Ledger
    resumed: bool


class Ledger:
    """The ledger of one output, held by one run. Made by `open`.

    Args:
        store: the output.
        record: the job.
        dataset: its input, for the kept columns.
        lease: held.
        on_step: told the name of every step of a commit (tests stop there).
    """

    def __init__(
        self,
        store: ObjectStore,
        record: JobRecord,
        dataset: Dataset,
        lease: Lease,
        *,
        on_step: Callable[[str], None],
    ) -> None:
        self.store = store
        self.record = record
        self._dataset = dataset
        self._lease = lease
        self._on_step = on_step
        self._committed = _read_markers(store)

    @classmethod
    def open(
        cls,
        url: str,
        *,
        dataset: Dataset,
        generation: Mapping[str, Any],
        output: Mapping[str, Any],
        make_record: Callable[[], JobRecord],
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        wall_clock: Callable[[], float] = time.time,
        on_step: Callable[[str], None] = lambda _: None,
    ) -> Opened:
        """Create the output of a job, or go on with it.

        Args:
            url: the output.
            dataset: the input.
            generation: the job's fingerprint; another one than stored is refused.
            output: keys that only change how results are written; if they differ, committed shards
                are written anew from what was generated.
            make_record: makes the job's record, called only for a new output.
            overwrite: delete what an earlier job left.
            storage_options: for fsspec.
            wall_clock: seconds since the epoch, for the lease.
            on_step: see the class.

        Raises:
            OutputMismatch: the output belongs to another job.
            OutputInUse: another run is writing to it.
            OutputError: it is a folder of something else, or cannot be written.
        """
        store = ObjectStore(url, storage_options=storage_options)
        try:
            return cls._open(
                store, dataset, generation, output, make_record, overwrite, wall_clock, on_step
            )
        except (PermissionError, NotADirectoryError) as fault:
            raise OutputError(f"the output {url!r} cannot be written: {fault}") from fault

    @classmethod
    def _open(  # noqa: PLR0913 - the arguments of `open`, behind its error handling
        cls,
        store: ObjectStore,
        dataset: Dataset,
        generation: Mapping[str, Any],
        output: Mapping[str, Any],
        make_record: Callable[[], JobRecord],
        overwrite: bool,
        wall_clock: Callable[[], float],
        on_step: Callable[[str], None],
    ) -> Opened:
        data = store.read_or_none(JOB)
        if data is None and not store.is_empty() and not _only_ours(store):
            raise OutputError(
                f"{store.url} is not empty and holds no job; give an empty or a new --output"
            )
        if data is not None and not overwrite:
            _refuse_other_job(store, JobRecord.from_bytes(data, store.path(JOB)), generation)
        lease = Lease(store, uuid.uuid4().hex, wall_clock)
        lease.acquire()
        if data is not None and overwrite:
            _delete_job(store)
            data = None
        if data is None:
            record = make_record()
            result_schema(dataset.schema, record.columns)  # a name clash is found now
            store.write(JOB, record.to_bytes())
            return Opened(cls(store, record, dataset, lease, on_step=on_step), resumed=False)
        record = JobRecord.from_bytes(data, store.path(JOB))
        ledger = cls(store, record, dataset, lease, on_step=on_step)
        if differences(record.output, output):
            ledger._rewrite(output)
        return Opened(ledger, resumed=True)

    # -- what there is to do
    # ------------------------------------------------------------------------

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.record.shards

    @property
    def committed(self) -> Mapping[int, ShardSummary]:
        """Committed shards by index."""
        return self._committed

    def pending(self, *, retry_errors: bool = False) -> list[Shard]:
        """Shards to work on, in order: those without a marker, and with `retry_errors` those with
        error rows.
        """

        def wanted(shard: Shard) -> bool:
            summary = self._committed.get(shard.index)
            return summary is None or (retry_errors and summary.num_errors > 0)

        return [shard for shard in self.shards if wanted(shard)]

    def writer(self, shard: Shard) -> ShardWriter:
        """Opens a shard for writing; of a committed shard, its error rows are to be computed again."""
        return ShardWriter(
            self.store,
            shard,
            self._dataset,
            self.record.columns,
            committed=self._committed.get(shard.index),
            on_step=self._on_step,
        )

    def note_committed(self, summary: ShardSummary) -> None:
        """A writer of this ledger has committed a shard."""
        self._committed[summary.index] = summary

    def beat(self) -> None:
        """Show that the run is alive."""
        self._lease.beat()

    def release(self) -> None:
        """Give the output back."""
        self._lease.release()

    def _rewrite(self, output: Mapping[str, Any]) -> None:
        """Write committed shards anew with other kept columns; nothing is computed again (C12).

        The record is changed last, so a crash before it only means that all is written once more.
        """
        columns = replace(self.record.columns, kept=tuple(output.get("keep_columns", ())))
        result_schema(self._dataset.schema, columns)
        for index in sorted(self._committed):
            summary = rewrite_kept(
                self.store, self.shards[index], self._dataset, columns, self._committed[index]
            )
            self._committed[index] = summary
        self.record = replace(self.record, output=dict(output), columns=columns)
        self.store.write(JOB, self.record.to_bytes())


def _refuse_other_job(store: ObjectStore, record: JobRecord, generation: Mapping[str, Any]) -> None:
    found = differences(record.generation, generation)
    if found:
        raise OutputMismatch(store.url, found)


def _only_ours(store: ObjectStore) -> bool:
    """True for what a run leaves that was killed before its first file."""
    others = [name for name in store.list("") if name.strip("/") not in OWNED_FILES]
    folders = [name.strip("/") for name in store.list_folders("")]
    return not others and all(name == TMP for name in folders)


def _delete_job(store: ObjectStore) -> None:
    """Delete what a job owns, and nothing else.

    Markers go first, so that a crash on the way leaves rows to compute and never a hole; the record
    goes last, so that the output stays known as a job's.
    """
    for folder in OWNED_FOLDERS:
        store.delete_folder(folder)
    for name in OWNED_FILES:
        if name != "_lease.json":
            store.delete(name)
    store.delete(JOB)


def _read_markers(store: ObjectStore) -> dict[int, ShardSummary]:
    found: dict[int, ShardSummary] = {}
    for name in store.list(MARKERS):
        summary = ShardSummary.from_json(orjson.loads(store.read(name)))
        found[summary.index] = summary
    return found
