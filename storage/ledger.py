"""The commit ledger of an output: which job it is, which shards are done, and how they get done.

    OUTPUT/job.json                              the job and its shard plan            (`record.py`)
    OUTPUT/_lease.json                           who is writing                        (`lease.py`)
    OUTPUT/_checkpoints/shard-00000/part-*.parquet  finished rows of open shards       (`writer.py`)
    OUTPUT/results/shard-00000.parquet           all rows of a shard, in input order
    OUTPUT/results/KEY=VALUE/part-00000.parquet  all rows of a partition, where a job has those
    OUTPUT/_markers/shard-00000.json             written last: the shard is committed
    OUTPUT/_plan/partitions.parquet              which partitions each shard has   (`partitions.py`)
    OUTPUT/_input/part-*.parquet                 the input grouped by its keys       (`grouping.py`)
    OUTPUT/telemetry/, OUTPUT/job.duckdb         what happened

The order of a commit, and what a crash after each step leaves, is in `README.md`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from storage.errors import OutputError, OutputMismatch
from storage.grouping import GROUPED, open_grouped
from storage.hive import encoded
from storage.lease import LEASE, Lease
from storage.marker import MARKERS, ShardSummary, count_again, marker_name, read_marker
from storage.objects import TMP, ObjectStore
from storage.partitions import PLAN, PartitionPlan, ShardPartitions
from storage.parts import CHECKPOINTS, parts_folder
from storage.record import JobRecord, differences
from storage.results import computed_fields, result_schema
from storage.shards import Shard
from storage.source import Dataset
from storage.writer import RESULTS, ShardWriter, result_files, rewrite_kept

JOB = "job.json"
TELEMETRY = "telemetry"
OWNED_FOLDERS = (MARKERS, RESULTS, CHECKPOINTS, TELEMETRY, TMP, PLAN, GROUPED)
BEFORE_RECORD = (TMP, PLAN, GROUPED)
"""Folders that a run makes before its record: one that was killed leaves them alone."""
OWNED_FILES = ("job.duckdb", "job.duckdb.wal", "report.html", LEASE)


class Opened(NamedTuple):
    """What `Ledger.open` found.

    Attributes:
        ledger: ready to write.
        resumed: the output belonged to this job already.
    """

    ledger: Ledger
    resumed: bool


class NewOutput(NamedTuple):
    """An output whose job is being planned.

    Attributes:
        store: where; what is grouped goes there.
        beat: to be called every few seconds while planning takes long; shows that the run is alive.
    """

    store: ObjectStore
    beat: Callable[[], None]


class PlannedJob(NamedTuple):
    """A job whose shards are runs of partitions.

    Attributes:
        record: with the shards of `storage.partitions.plan_partitions`.
        partitions: of the shards.
        dataset: the input that the shards are of: the given one, or as it was grouped.
    """

    record: JobRecord
    partitions: PartitionPlan
    dataset: Dataset


class Ledger:
    """The ledger of one output, held by one run. Made by `open`.

    Args:
        store: the output.
        record: the job.
        dataset: what its shards are of.
        lease: held.
        partitions: of the shards; None: each has one file.
        on_step: told the name of every step of a commit (tests stop there).
    """

    def __init__(
        self,
        store: ObjectStore,
        record: JobRecord,
        dataset: Dataset,
        lease: Lease,
        *,
        partitions: PartitionPlan | None = None,
        on_step: Callable[[str], None],
    ) -> None:
        self.store = store
        self.record = record
        self.dataset = dataset
        self.partitions = partitions
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
        make_record: Callable[[NewOutput], JobRecord | PlannedJob],
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        wall_clock: Callable[[], float] = time.time,
        on_step: Callable[[str], None] = lambda _: None,
    ) -> Opened:
        """Create the output of a job, or go on with it.

        Args:
            url: the output.
            dataset: the input. Where the job's record says that it was grouped, the ledger's own
                `dataset` is the grouped one, and that is what its shards are of.
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
        try:
            store = ObjectStore(url, storage_options=storage_options)
        except (ImportError, ValueError) as fault:
            raise OutputError(f"the output {url!r} cannot be opened: {fault}") from fault
        lease = Lease(store, uuid.uuid4().hex, wall_clock)
        try:
            # Before the lease, so that a refusal leaves no trace; and under it, as another run may
            # have made the job in between.
            _refuse_what_is_not_ours(store, generation, overwrite=overwrite)
            lease.acquire()
        except (PermissionError, NotADirectoryError) as fault:
            raise OutputError(f"the output {url!r} cannot be written: {fault}") from fault
        try:
            _refuse_what_is_not_ours(store, generation, overwrite=overwrite)
            store.delete_drafts()
            if overwrite:
                _delete_job(store)
            record = _read_record(store)
            resumed = record is not None
            if record is None:
                job = _begin(store, dataset, make_record(NewOutput(store, lease.beat)))
            else:
                job = _go_on(store, dataset, record)
            ledger = cls(
                store,
                job.record,
                job.dataset,
                lease,
                partitions=job.partitions,
                on_step=on_step,
            )
            ledger._settle(output)
        except BaseException:
            lease.release()
            raise
        return Opened(ledger, resumed)

    # -- what there is to do --

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

    def writer(self, shard: Shard, *, retry_errors: bool = False) -> ShardWriter:
        """Opens a shard for writing. Error rows of a committed shard are to be computed again, and
        with `retry_errors` those of an open one too.
        """
        return ShardWriter(
            self.store,
            shard,
            self.dataset,
            self.record.columns,
            committed=self._committed.get(shard.index),
            retry_errors=retry_errors,
            partitions=self._partitions_of(shard),
            on_step=self._step,
        )

    def _step(self, name: str) -> None:
        """A step of a writer. To commit a superbatch of many files may take longer than a lease
        lasts without a sign of life.
        """
        self._on_step(name)
        self._lease.beat()

    def _partitions_of(self, shard: Shard) -> ShardPartitions | None:
        return None if self.partitions is None else self.partitions.of(shard.index)

    def note_committed(self, summary: ShardSummary) -> None:
        """A writer of this ledger has committed a shard."""
        self._committed[summary.index] = summary

    def beat(self) -> None:
        """Show that the run is alive.

        Raises:
            OutputInUse: another run has taken the output.
        """
        self._lease.beat()

    def release(self) -> None:
        """Give the output back."""
        self._lease.release()

    # -- what a crash or another job spec left --

    def _settle(self, output: Mapping[str, Any]) -> None:
        """Bring what is committed in line with the record; nothing is computed again (C12).

        The record is changed first and each file then follows it, so that a crash on the way only
        means that the next run rewrites the rest, whatever columns it asks for.
        """
        if differences(self.record.output, output):
            kept = tuple(output.get("keep_columns", self.record.columns.kept))
            columns = replace(self.record.columns, kept=kept)
            result_schema(self.dataset.schema, columns)
            self.record = replace(self.record, output=dict(output), columns=columns)
            self.store.write(JOB, self.record.to_bytes())
        self._check_results()
        for index, summary in sorted(self._committed.items()):
            if summary.kept != self.record.columns.kept:
                self._committed[index] = rewrite_kept(
                    self.store,
                    self.shards[index],
                    self.dataset,
                    self.record.columns,
                    summary,
                    self._partitions_of(self.shards[index]),
                )
        self._delete_stale_parts()

    def _check_results(self) -> None:
        """Each marker has its files, of their size. A shard that lacks one is computed again; files
        that were replaced and then not marked are whole, so they are counted.
        """
        if not self._committed:
            return
        computed = {field.name for field in computed_fields(self.record.columns)}
        is_deep = self.partitions is not None
        sizes = self.store.sizes_below(RESULTS) if is_deep else self.store.sizes(RESULTS)
        for index, summary in sorted(self._committed.items()):
            shard = self.shards[index]
            files = result_files(summary, self._partitions_of(shard))
            found = [sizes[name] for name in files if name in sizes]
            if len(found) < len(files):
                self.store.delete(marker_name(shard.name))
                del self._committed[index]
            elif summary.num_bytes != sum(found):
                counted = count_again(self.store, summary, files, computed)
                self.store.write(marker_name(shard.name), counted.to_json())
                self._committed[index] = counted

    def _delete_stale_parts(self) -> None:
        """Parts of rounds that are committed, and of a next one where no error is left to retry:
        its run died between the result file and the marker.
        """
        found = set(self.store.list_folders(CHECKPOINTS))
        for index, summary in self._committed.items():
            for round_ in range(summary.round + (1 if summary.num_errors else 2)):
                folder = parts_folder(self.shards[index].name, round_)
                if folder in found:
                    self.store.delete_folder(folder)


class _Job(NamedTuple):
    """A record, and what belongs to it."""

    record: JobRecord
    partitions: PartitionPlan | None
    dataset: Dataset


def _begin(store: ObjectStore, dataset: Dataset, made: JobRecord | PlannedJob) -> _Job:
    """Write a new job's record, and its partitions before: a record has them always."""
    job = _Job(made, None, dataset) if isinstance(made, JobRecord) else _Job(*made)
    result_schema(job.dataset.schema, job.record.columns)  # a name clash is found now
    if job.partitions is not None:
        _refuse_keys_above(store, job.record.columns.partition_by)
        job.partitions.check(job.record.shards)
        job.partitions.write(store)
    store.write(JOB, job.record.to_bytes())
    return job


def _refuse_keys_above(store: ObjectStore, keys: Sequence[str]) -> None:
    """Refuse an output below a folder that readers would take for a key of its partitions."""
    above = {folder.partition("=")[0] for folder in store.root.split("/") if "=" in folder}
    for name in keys:
        if encoded(name) in above:
            raise OutputError(
                f"{store.url} is below a folder that is called as a partition is, '{name}=...': "
                "readers would take that for the key; give another --output"
            )


def _go_on(store: ObjectStore, dataset: Dataset, record: JobRecord) -> _Job:
    """What belongs to the record of an output."""
    if record.grouped:
        dataset = open_grouped(store)
    if not record.columns.partition_by:
        return _Job(record, None, dataset)
    partitions = PartitionPlan.read(store)
    partitions.check(record.shards)
    return _Job(record, partitions, dataset)


def _read_record(store: ObjectStore) -> JobRecord | None:
    data = store.read_or_none(JOB)
    return None if data is None else JobRecord.from_bytes(data, store.path(JOB))


def _refuse_what_is_not_ours(
    store: ObjectStore, generation: Mapping[str, Any], *, overwrite: bool
) -> None:
    """Refuse another job's output, unless it is to be overwritten, and what is no output at all.

    Raises:
        OutputMismatch: another job.
        OutputError: no job, and not empty.
    """
    if not store.exists(JOB):
        if not store.is_empty() and not _only_ours(store):
            raise OutputError(
                f"{store.url} is not empty and holds no job; give an empty or a new --output"
            )
        return
    record = None if overwrite else _read_record(store)
    found = () if record is None else differences(record.generation, generation)
    if found:
        raise OutputMismatch(store.url, found)


def _only_ours(store: ObjectStore) -> bool:
    """True for what a run leaves that was killed before its first file."""
    others = [name for name in store.list("") if name.strip("/") not in OWNED_FILES]
    folders = [name.strip("/") for name in store.list_folders("")]
    return not others and all(name in BEFORE_RECORD for name in folders)


def _delete_job(store: ObjectStore) -> None:
    """Delete what a job owns, and nothing else.

    Markers go first, so that a crash on the way leaves rows to compute and never a hole; the record
    goes last, so that the output stays known as a job's.
    """
    for folder in OWNED_FOLDERS:
        store.delete_folder(folder)
    for name in (*OWNED_FILES, JOB):
        if name != LEASE:
            store.delete(name)


def _read_markers(store: ObjectStore) -> dict[int, ShardSummary]:
    markers = (read_marker(store, name) for name in store.list(MARKERS))
    return {marker.index: marker for marker in markers if marker is not None}
