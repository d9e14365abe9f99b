"""What a report knows of an encoding job's superbatches: the plan's sizes, the thresholds, and what
the job's own calls cost. From the output alone, so the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flows.report_data import Telemetry
from schedulers.advice import Advice, advise
from schedulers.encode_cost import EncodeFit, fit_encode
from schedulers.sizes import SizeStats
from schedulers.superbatch import Thresholds
from storage.objects import ObjectStore
from storage.partitions import PartitionPlan
from storage.record import JobRecord

SHOWN_S = 1e-6
"""Seconds below which a part of a cost is not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeFacts:
    """The superbatches of a job.

    Attributes:
        num_shards: superbatches; without partitions, shards.
        num_calls: K of the plan, slices included. A run that was killed makes more.
        num_slices: of these, calls of shards that are more than one call.
        min_texts: B_min.
        max_texts: B_max.
        fit: of the measured calls; None: there is none.
        stats: of the partitions' sizes; None without partitions.
        advice: whether superbatching paid, by the fit; None without partitions, or where the fit
            does not tell the cost of a call.
    """

    num_shards: int
    num_calls: int
    num_slices: int
    min_texts: int
    max_texts: int
    fit: EncodeFit | None
    stats: SizeStats | None = None
    advice: Advice | None = None


def encode_facts(record: JobRecord, store: ObjectStore, telemetry: Telemetry) -> EncodeFacts | None:
    """What is known of a job that encodes; None for one that generates.

    Raises:
        LedgerError: the plan of the partitions is gone or damaged.
    """
    if record.columns.vector is None:
        return None
    shard_rows = np.array([shard.num_rows for shard in record.shards], np.int64)
    max_texts = record.max_texts or int(shard_rows.max(initial=1))
    calls = np.maximum(1, -(-shard_rows // max_texts))
    fit = fit_encode(telemetry.encode_samples())
    facts = EncodeFacts(
        num_shards=len(shard_rows),
        num_calls=int(calls.sum()),
        num_slices=int(calls[calls > 1].sum()),
        min_texts=record.min_texts or max_texts,
        max_texts=max_texts,
        fit=fit,
    )
    if not record.columns.partition_by:
        return facts
    return _of_partitions(facts, PartitionPlan.read(store))


def _of_partitions(facts: EncodeFacts, plan: PartitionPlan) -> EncodeFacts:
    stats = SizeStats.of(plan.num_rows.tolist())
    fit, advice = facts.fit, None
    if fit is not None and fit.is_identified:
        thresholds = Thresholds(facts.min_texts, facts.max_texts)
        advice = advise(fit.cost, stats, thresholds, num_calls=facts.num_calls)
    return replace(facts, stats=stats, advice=advice)
