"""A new job's record: its shards are cut by tokens, or are partitions that are encoded together."""

from __future__ import annotations

import logging
import uuid
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import NamedTuple

import psutil

from flows.encode_costs import cost_key, load_cost
from flows.estimate import estimate_cost
from flows.fingerprint import Fingerprint
from flows.model import Model
from flows.prepare import PreparedJob
from flows.superbatches import (
    DEFAULT_COST,
    MEMORY_SHARE,
    SuperbatchPlan,
    choose,
    mean_text_bytes,
    plan_superbatches,
    text_bytes,
)
from flows.vectors import vector_spec
from schedulers.advice import Choice
from schedulers.encode_cost import EncodeCost
from schedulers.sizes import SizeStats
from storage.grouping import group_by_keys
from storage.ledger import NewOutput, PlannedJob
from storage.partitions import FoundPartitions, find_partitions
from storage.record import JobRecord
from storage.results import ResultColumns
from storage.shards import Shard, TokenCost, cut_shards
from storage.source import Dataset
from workers.loading.cache import cache_root

SORT_SHARE = 0.25
"""Of the free memory, for grouping an input."""

_log = logging.getLogger(__name__)


class _Grouped(NamedTuple):
    """An input whose rows of each key are together."""

    dataset: Dataset
    found: FoundPartitions
    rewritten: bool


def plan_new_job(
    job: PreparedJob, model: Model, identity: Fingerprint, output: NewOutput
) -> JobRecord | PlannedJob:
    """Plan a job whose output is new. May take long where the input is to be grouped."""
    cost = estimate_cost(job, model)
    if not job.spec.partition_by:
        return _unpartitioned(job, model, identity, cost)
    grouped = _group(job, output)
    plan = cut_superbatches(job, model, grouped.dataset, grouped.found, cost)
    _log.info("%s", plan.advice.text)
    shards = plan.planned.shards
    record = replace(
        _record(job, model, identity, shards),
        grouped=grouped.rewritten,
        **asdict(plan.choice.thresholds),
    )
    return PlannedJob(record, plan.planned.partitions, grouped.dataset)


def _unpartitioned(
    job: PreparedJob, model: Model, identity: Fingerprint, cost: TokenCost
) -> JobRecord:
    """Shards by tokens, which are encoded in calls that memory holds."""
    shards = cut_shards(
        job.dataset, cost=cost, target_tokens=job.spec.shard_tokens, limit=job.spec.limit
    )
    record = _record(job, model, identity, shards)
    if model.vectors is None:
        return record
    sizes = SizeStats.of(shard.num_rows for shard in shards)
    choice = choose_for(job, model, sizes, cost, known_cost(job, model, cost))
    return replace(record, **asdict(choice.thresholds))


def cut_superbatches(
    job: PreparedJob,
    model: Model,
    dataset: Dataset,
    found: FoundPartitions,
    token_cost: TokenCost,
) -> SuperbatchPlan:
    """The superbatches of a grouped input."""
    encode_cost = known_cost(job, model, token_cost)
    stats = SizeStats.of(found.num_rows.tolist())
    choice = choose_for(job, model, stats, token_cost, encode_cost)
    return plan_superbatches(dataset, found, choice, encode_cost, token_cost)


def choose_for(
    job: PreparedJob,
    model: Model,
    stats: SizeStats,
    token_cost: TokenCost,
    encode_cost: EncodeCost,
) -> Choice:
    """The thresholds of a job with units of these sizes."""
    assert model.vectors is not None
    mean_bytes = mean_text_bytes(job.dataset, job.renderer.columns)
    mean_tokens = mean_bytes * token_cost.tokens_per_byte
    return choose(
        job.spec.encode,
        stats,
        encode_cost,
        resident_text_bytes=text_bytes(mean_bytes, mean_tokens, model.vectors.width),
        memory_bytes=text_memory(job),
    )


def known_cost(job: PreparedJob, model: Model, token_cost: TokenCost) -> EncodeCost:
    """What encoding was measured to cost, or is assumed to, at the job's mean length."""
    known = measured_cost(job, model) or DEFAULT_COST
    mean_tokens = token_cost.tokens_per_byte * mean_text_bytes(job.dataset, job.renderer.columns)
    return known.at_length(max(1.0, mean_tokens))


def measured_cost(job: PreparedJob, model: Model) -> EncodeCost | None:
    """What earlier jobs on this machine took."""
    return load_cost(cost_key(model.fingerprint, job.spec.task, job.spec.engine))


def text_memory(job: PreparedJob) -> float:
    """Bytes that texts and vectors may take in a worker."""
    engine, memory = job.spec.engine, psutil.virtual_memory()
    limit = engine.memory_bytes(memory.total) or memory.available / 2
    return MEMORY_SHARE * limit / (engine.workers or 1)


def _group(job: PreparedJob, output: NewOutput) -> _Grouped:
    """The input, written anew where the rows of a key are not together."""
    spec = job.spec
    found = find_partitions(job.dataset, spec.partition_by, limit=spec.limit, on_batch=output.beat)
    if found.grouped:
        return _Grouped(job.dataset, found, rewritten=False)
    _log.info("the input is not grouped by %s; it is sorted", ", ".join(spec.partition_by))
    ids = () if spec.id_column is None else (spec.id_column,)
    dataset = group_by_keys(
        job.dataset,
        spec.partition_by,
        columns=(*job.renderer.columns, *spec.keep_columns, *ids),
        store=output.store,
        spill=cache_root() / "spill" / uuid.uuid4().hex[:12],
        memory_bytes=int(SORT_SHARE * psutil.virtual_memory().available),
        limit=spec.limit,
        on_batch=output.beat,
    )
    return _Grouped(dataset, find_partitions(dataset, spec.partition_by), rewritten=True)


def _record(
    job: PreparedJob,
    model: Model,
    identity: Fingerprint,
    shards: tuple[Shard, ...],
) -> JobRecord:
    spec = job.spec
    return JobRecord(
        job_id=uuid.uuid4().hex[:12],
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        spec=spec.model_dump(mode="json", exclude={"credentials"}),
        generation=identity.generation,
        output=identity.output,
        columns=ResultColumns(
            kept=spec.keep_columns,
            logprobs=spec.sampling.logprobs is not None,
            samples=spec.sampling.n > 1,
            vector=None if model.vectors is None else vector_spec(spec, model.vectors),
            partition_by=spec.partition_by,
        ),
        shards=shards,
    )
