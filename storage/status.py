"""What an output holds, from its record, markers and parts: `flows status`, from anywhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import InputError
from storage.lease import Holder, living_holder
from storage.ledger import JOB
from storage.marker import MARKERS, Counting, ShardSummary, Tally, counted, read_marker
from storage.merge import ORDINAL, last_of_each
from storage.objects import ObjectStore
from storage.parts import CHECKPOINTS, parts_folder
from storage.record import JobRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """Where a job stands.

    Attributes:
        job_id: of the output.
        total_rows: rows of the job.
        committed_rows: rows in committed shards.
        checkpointed_rows: rows in the parts of open shards.
        total_shards: shards of the plan.
        done_shards: shards with a marker.
        by_status: committed and checkpointed rows by status.
        by_finish_reason: the same by finish reason.
        prompt_tokens: of these rows.
        completion_tokens: of these rows.
        lease: who is writing to the output now, if anybody.
        spec: the job as it was given.
    """

    job_id: str
    total_rows: int
    committed_rows: int
    checkpointed_rows: int
    total_shards: int
    done_shards: int
    by_status: Mapping[str, int]
    by_finish_reason: Mapping[str, int]
    prompt_tokens: int
    completion_tokens: int
    lease: Holder | None
    spec: Mapping[str, Any]

    @property
    def done_rows(self) -> int:
        return self.committed_rows + self.checkpointed_rows

    @property
    def encodes(self) -> bool:
        """The rows are embedded, classified or scored: they have no completions."""
        return self.spec.get("task", "generate") != "generate"

    @property
    def complete(self) -> bool:
        return self.done_shards == self.total_shards


def read_status(
    url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    wall_clock: Callable[[], float] = time.time,
) -> JobStatus:
    """Read an output's status. Writes nothing; may be called while a run goes on.

    Raises:
        InputError: there is no job at that place.
    """
    store = ObjectStore(url, storage_options=storage_options)
    data = store.read_or_none(JOB)
    if data is None:
        raise InputError(f"{url!r} holds no job (it has no {JOB})")
    record = JobRecord.from_bytes(data, store.path(JOB))
    tally = _Tally()
    committed: set[int] = set()
    for name in store.list(MARKERS):
        marker = read_marker(store, name)
        if marker is not None:
            committed.add(marker.index)
            tally.add(marker, marker.num_rows)
    committed_rows = tally.num_rows
    begun = set(store.list_folders(CHECKPOINTS))
    for shard in record.shards:
        folder = parts_folder(shard.name, 0)
        if shard.index not in committed and folder in begun:
            counting = _count_parts(store, folder)
            tally.add(counting.tally(), counting.num_rows)
    return JobStatus(
        job_id=record.job_id,
        total_rows=record.total_rows,
        committed_rows=committed_rows,
        checkpointed_rows=tally.num_rows - committed_rows,
        total_shards=len(record.shards),
        done_shards=len(committed),
        by_status=dict(tally.by_status),
        by_finish_reason=dict(tally.by_finish_reason),
        prompt_tokens=tally.prompt_tokens,
        completion_tokens=tally.completion_tokens,
        lease=living_holder(store, wall_clock),
        spec=record.spec,
    )


class _Tally:
    """Sums over markers and parts."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.by_status: Counter[str] = Counter()
        self.by_finish_reason: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.completion_tokens = 0

    def add(self, counts: ShardSummary | Tally, num_rows: int) -> None:
        self.num_rows += num_rows
        self.by_status.update(counts.by_status)
        self.by_finish_reason.update(counts.by_finish_reason)
        self.prompt_tokens += counts.prompt_tokens
        self.completion_tokens += counts.completion_tokens


def _count_parts(store: ObjectStore, folder: str) -> Counting:
    """Count the rows of a shard's parts, each once, as the last part has it."""
    tables: list[pa.Table] = []
    for name in store.list(folder):
        try:
            with store.fs.open(store.path(name), "rb") as handle:
                parquet = pq.ParquetFile(handle)
                columns = [ORDINAL, *counted(parquet.schema_arrow.names)]
                tables.append(parquet.read(columns=columns))
        except FileNotFoundError:
            continue  # its shard was committed, or its parts merged, while we looked
    counting = Counting()
    if tables:
        counting.add(last_of_each(pa.concat_tables(tables)))
    return counting
