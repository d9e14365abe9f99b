"""How an encoding job is cut into superbatches: from what encoding costs here, the sizes of the
partitions and the memory that there is. The rules are in `schedulers.superbatch` and `.advice`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flows.worker_memory import worker_memory
from schedulers.advice import Advice, Choice, advise, choose_thresholds
from schedulers.encode_cost import EncodeCost, predicted_s
from schedulers.memory import MemoryPlan
from schedulers.sizes import SizeStats, expected_calls
from schedulers.superbatch import (
    Superbatch,
    Thresholds,
    form_superbatches,
    resident_bound,
)
from storage.partitions import FoundPartitions, Planned, plan_partitions
from storage.shards import TokenCost
from storage.source import Dataset

if TYPE_CHECKING:
    from flows.spec_model import EncodeSpec, JobSpec
    from workers.encoding import EncoderInfo

QUEUE_DEPTH = 4
"""Calls whose texts are in memory beside the one that is encoded: one that is tokenised ahead, one
that waits for the coordinator, one for the collector, one that is being written."""

MEMORY_SHARE = 0.1
"""Of the memory that a worker may use, for texts and vectors; the rest is the model's."""

TEXT_OVERHEAD_BYTES = 400
"""Of a resident text beside its characters, tokens and vector: Python's objects for it."""

DEFAULT_COST = EncodeCost.of_tokens(
    call_s=0.01, token_s=57e-6, partition_s=1.5e-3, mean_tokens=14.5
)
"""What is assumed before anything was measured: of all-MiniLM-L6-v2 on two cores."""


def encode_memory(spec: JobSpec, info: EncoderInfo, *, num_workers: int = 1) -> MemoryPlan:
    """Where a worker's memory goes.

    Raises:
        NotEnoughMemory: the limit does not hold the model and its longest text.
    """
    from workers.setup import EngineOptions, default_memory_bytes, size_encoder

    given, share = worker_memory(spec.engine, info.device, num_workers)
    limit_bytes = given or default_memory_bytes(info.device, info.weights_bytes, host_share=share)
    texts_bytes = int(MEMORY_SHARE * max(0, limit_bytes - info.weights_bytes))
    max_batch_tokens = size_encoder(
        info,
        EngineOptions(
            memory_bytes=limit_bytes - texts_bytes, max_batch_tokens=spec.engine.max_batch_tokens
        ),
    )
    return MemoryPlan(
        limit_bytes=limit_bytes,
        weights_bytes=info.weights_bytes,
        activation_bytes=max_batch_tokens * info.activation_bytes_per_token + info.scratch_bytes,
        kv_bytes=0,
        block_size=1,
        num_blocks=0,
        max_batch_tokens=max_batch_tokens,
        max_seqs=max_batch_tokens,
    )


class SuperbatchPlan(NamedTuple):
    """The superbatches of a job, and why they are so.

    Attributes:
        planned: shards, and the partitions in each.
        choice: of the thresholds.
        advice: whether superbatching pays.
        stats: of the partitions' sizes.
        num_calls: encode calls.
    """

    planned: Planned
    choice: Choice
    advice: Advice
    stats: SizeStats
    num_calls: int


def text_bytes(mean_bytes: float, mean_tokens: float, width: int) -> float:
    """Memory of a resident text: its characters, token ids and vector."""
    return mean_bytes + 8 * mean_tokens + 4 * width + TEXT_OVERHEAD_BYTES


def choose(
    encode: EncodeSpec,
    stats: SizeStats,
    cost: EncodeCost,
    *,
    resident_text_bytes: float,
    memory_bytes: float,
) -> Choice:
    """The thresholds that the user gives, or else the best ones."""
    found = choose_thresholds(
        cost,
        stats,
        text_bytes=resident_text_bytes,
        memory_bytes=memory_bytes,
        queue_depth=QUEUE_DEPTH,
    )
    if encode.min_texts is None and encode.max_texts is None:
        return found
    min_texts = encode.min_texts or min(found.thresholds.min_texts, encode.max_texts or 1)
    max_texts = encode.max_texts or max(found.thresholds.max_texts, min_texts)
    return _given(Thresholds(min_texts, max_texts), stats, cost)


def _given(thresholds: Thresholds, stats: SizeStats, cost: EncodeCost) -> Choice:
    """What follows from thresholds that the user gives."""
    num_calls = expected_calls(stats, thresholds)
    calls_s = num_calls * cost.call_s
    all_s = predicted_s(cost, stats.total, num_calls, num_partitions=stats.count)
    return Choice(
        thresholds,
        num_calls,
        calls_s / all_s if all_s else 0.0,
        resident_bound(thresholds, stats.largest, QUEUE_DEPTH),
        ("The thresholds are given.",),
    )


def plan_superbatches(
    dataset: Dataset,
    found: FoundPartitions,
    choice: Choice,
    encode_cost: EncodeCost,
    token_cost: TokenCost,
) -> SuperbatchPlan:
    """Form the superbatches of a grouped input.

    Args:
        dataset: grouped.
        found: its partitions.
        choice: of the thresholds.
        encode_cost: of calls and texts.
        token_cost: of rows, for the shards' estimates.
    """
    sizes: Sequence[int] = found.num_rows.tolist()
    stats = SizeStats.of(sizes)
    batches = list(form_superbatches(sizes, choice.thresholds, first_texts=choice.first_texts))
    num_calls = sum(batch.num_slices for batch in batches)
    return SuperbatchPlan(
        planned=plan_partitions(dataset, found, map(_bounds, batches), cost=token_cost),
        choice=choice,
        advice=advise(encode_cost, stats, choice.thresholds, num_calls=num_calls),
        stats=stats,
        num_calls=num_calls,
    )


def _bounds(batch: Superbatch) -> tuple[int, int]:
    return batch.first, batch.stop


def mean_text_bytes(dataset: Dataset, columns: Sequence[str]) -> float:
    """Uncompressed bytes of the text columns of a row, by the footers."""
    groups = [group for file in dataset.files for group in file.row_groups]
    total = sum(group.column_bytes.get(name, 0) for group in groups for name in columns)
    rows = sum(group.num_rows for group in groups)
    return float(np.divide(total, max(1, rows)))
