"""Outputs of encoding jobs that never ran: real files and plans, and telemetry of a machine on
which a call costs what the test says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from schedulers.superbatch import Thresholds, form_superbatches, slices
from storage.ledger import Ledger, PlannedJob
from storage.partitions import PartitionPlan, find_partitions, plan_partitions
from storage.record import JobRecord
from storage.results import ResultColumns
from storage.shards import Shard, TokenCost, cut_shards
from storage.source import Dataset, open_dataset
from storage.vectors import VectorSpec, vectors_table
from tests.report_jobs import CLOCK_S, step, write_table

THRESHOLDS = Thresholds(40, 120)
SIZES = (5, 30, 12, 90, 1, 1, 60, 20, 25, 300, 8)
"""With these thresholds: 47, 90, 62, 45, 300 and 8 texts, 300 in three slices."""
TOKENS = 20
"""Of every text."""
VECTORS = VectorSpec(task="embed", width=4)
_COST = TokenCost(columns=(), tokens_per_byte=0.0, tokens_per_row=float(TOKENS))


@dataclass(frozen=True, kw_only=True)
class EncodeJob:
    """What is made up.

    Attributes:
        sizes: texts of each partition.
        thresholds: of the superbatches.
        call_s: c of the machine.
        text_s: t of the machine.
        partitioned: else the rows are one shard, encoded in slices.
        num_done: shards that are committed and have telemetry; None: all.
        key: begins the partitions' keys.
    """

    sizes: Sequence[int] = SIZES
    thresholds: Thresholds = THRESHOLDS
    call_s: float = 0.05
    text_s: float = 0.001
    partitioned: bool = True
    num_done: int | None = None
    key: str = "p"

    def spec(self) -> dict[str, Any]:
        return {
            "input": "in.parquet", "model": "org/encoder", "task": "embed",
            "partition_by": ["key"] if self.partitioned else [], "engine": {"policy": "hybrid"},
            "encode": {"min_texts": None, "max_texts": None},
        }  # fmt: skip


def write_encoded(folder: Path, job: EncodeJob, *, run_id: str = "run-1") -> Path:
    """The output of such a job, committed by the real ledger."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "in.parquet"
    keys = [f"{job.key}{n:04d}" for n, size in enumerate(job.sizes) for _ in range(size)]
    pq.write_table(pa.table({"key": keys, "text": ["x"] * len(keys)}), source)
    dataset, output = open_dataset(str(source)), folder / "out"
    planned = _planned(job, dataset)
    ledger = Ledger.open(
        str(output), dataset=dataset, generation={}, output={}, make_record=lambda _: planned
    ).ledger
    partitions = planned.partitions if isinstance(planned, PlannedJob) else None
    try:
        done = ledger.pending()[: job.num_done]
        for shard in done:
            writer = ledger.writer(shard)
            writer.add_block(np.arange(shard.num_rows), _rows(shard))
            ledger.note_committed(writer.close())
    finally:
        ledger.release()
    _write_telemetry(output, job, done, partitions, run_id)
    return output


def _planned(job: EncodeJob, dataset: Dataset) -> JobRecord | PlannedJob:
    found = find_partitions(dataset, ["key"])
    bounds = [(item.first, item.stop) for item in form_superbatches(job.sizes, job.thresholds)]
    if job.partitioned:
        planned = plan_partitions(dataset, found, bounds, cost=_COST)
        return PlannedJob(_record(job, planned.shards, ("key",)), planned.partitions, dataset)
    return _record(job, cut_shards(dataset, cost=_COST, target_tokens=10**9), ())


def _record(job: EncodeJob, shards: tuple[Shard, ...], keys: tuple[str, ...]) -> JobRecord:
    return JobRecord(
        job_id="job-1", created="2026-12-01T00:00:00+00:00", spec=job.spec(), generation={},
        output={}, columns=ResultColumns(vector=VECTORS, partition_by=keys), shards=shards,
        **asdict(job.thresholds),
    )  # fmt: skip


def _rows(shard: Shard) -> pa.Table:
    """Vectors of a shard; the first text of each was cut."""
    num_rows = shard.num_rows
    return vectors_table(
        VECTORS,
        np.ones((num_rows, VECTORS.width), np.float32),
        row_ids=[f"{shard.index}-{n}" for n in range(num_rows)],
        prompt_tokens=np.full(num_rows, TOKENS),
        truncated=np.arange(num_rows) == 0,
    )


def _write_telemetry(
    output: Path,
    job: EncodeJob,
    shards: Sequence[Shard],
    partitions: PartitionPlan | None,
    run_id: str,
) -> None:
    """A call after the other, each of one batch of the model."""
    calls: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    at_s = 0.0
    for shard in shards:
        for start, stop in slices(shard.num_rows, job.thresholds.max_texts):
            count = stop - start
            elapsed_s = job.call_s + count * job.text_s
            calls.append({
                "started_s": CLOCK_S + at_s, "elapsed_s": elapsed_s, "interval_s": elapsed_s,
                "shard": shard.index, "num_texts": count, "num_tokens": count * TOKENS,
                "num_calls": 1, "width": VECTORS.width,
                "num_partitions": 1 if partitions is None else partitions.num_of(shard.index),
            })  # fmt: skip
            steps.append(encode_step(len(calls), at_s, elapsed_s, count))
            at_s += elapsed_s
    write_table(output, "encodes", run_id, calls)
    write_table(output, "steps", run_id, steps)


def encode_step(number: int, started_s: float, elapsed_s: float, num_texts: int) -> dict[str, Any]:
    """A batch of an encoder, as its worker tells it: no part of it is known."""
    parts = ("layout_s", "products_s", "attention_s", "rows_s", "head_s", "sampling_s", "device_s")
    around = ("intake_s", "plan_s", "apply_s", "resume_s", "account_s")
    return step(
        number, started_s, elapsed_s, phase="encode", num_prefill_tokens=num_texts * TOKENS,
        num_decode_tokens=0, num_context_tokens=0, num_seqs=num_texts, num_running=num_texts,
        num_waiting=0, num_admitted=num_texts, num_finished=num_texts, num_free_blocks=0,
        num_blocks=0, policy_mode="", **dict.fromkeys((*parts, *around), 0.0),
    )  # fmt: skip
