"""`flows plan` of an encoding job: its texts, its partitions, and whether superbatching pays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flows.estimate import token_cost
from flows.job_plan import choose_for, known_cost, measured_cost
from flows.model import Model, open_model
from flows.prepare import PreparedJob, prepare
from flows.summary import counted, duration
from flows.survey import Survey, survey
from schedulers.advice import Advice, Choice, advise
from schedulers.encode_cost import EncodeCost, predicted_s
from schedulers.sizes import SizeStats
from schedulers.superbatch import call_bound, count_calls, num_slices

if TYPE_CHECKING:
    from flows.spec_model import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodePlan:
    """What is known of an encoding job before it runs.

    Attributes:
        survey: of the texts; of all of them when `exact`.
        width: numbers of a row.
        stats: of the partitions' sizes; without partitions, of the shards'.
        cost: of a call and a text on this machine.
        measured: the cost comes from an earlier job; else it is assumed.
        advice: whether superbatching pays; None without partitions.
    """

    num_rows: int
    survey: Survey
    exact: bool
    width: int
    partitioned: bool
    stats: SizeStats
    choice: Choice
    num_calls: int
    cost: EncodeCost
    measured: bool
    advice: Advice | None


def plan_encoding(spec: JobSpec) -> EncodePlan:
    """Look at everything but the weights.

    Raises:
        SpecError, InputError, ModelError: as running the job would.
    """
    from flows.plan import EXACT_ROWS, planned_rows
    from storage.partitions import partition_sizes
    from storage.shards import cut_shards

    job = prepare(spec)
    model = open_model(spec)
    tokenizer = model.load_tokenizer()
    num_rows = min(job.dataset.num_rows, spec.limit or job.dataset.num_rows)
    exact = num_rows <= EXACT_ROWS
    found = survey(planned_rows(job, exact=exact), job.renderer.bind(tokenizer), tokenizer)
    tokens = token_cost(
        job,
        mean_prompt_tokens=found.mean_tokens * max(1, len(spec.encode.choices)),
        answer_tokens=0,
    )
    if spec.partition_by:
        sizes = partition_sizes(job.dataset, spec.partition_by, limit=spec.limit).tolist()
    else:
        shards = cut_shards(
            job.dataset, cost=tokens, target_tokens=spec.shard_tokens, limit=spec.limit
        )
        sizes = [shard.num_rows for shard in shards]
    stats = SizeStats.of(sizes)
    cost = known_cost(job, model, tokens)
    choice = choose_for(job, model, stats, tokens, cost)
    num_calls = _num_calls(sizes, choice, partitioned=bool(spec.partition_by))
    return EncodePlan(
        num_rows=num_rows,
        survey=found,
        exact=exact,
        width=_width(model),
        partitioned=bool(spec.partition_by),
        stats=stats,
        choice=choice,
        num_calls=num_calls,
        cost=cost,
        measured=_is_measured(job, model),
        advice=advise(cost, stats, choice.thresholds, num_calls=num_calls)
        if spec.partition_by
        else None,
    )


def _num_calls(sizes: Sequence[int], choice: Choice, *, partitioned: bool) -> int:
    """Partitions are gathered; shards of a job without any are encoded one by one, in slices."""
    if partitioned:
        return count_calls(sizes, choice.thresholds, first_texts=choice.first_texts)
    return sum(num_slices(size, choice.thresholds.max_texts) for size in sizes)


def _width(model: Model) -> int:
    return 0 if model.vectors is None else model.vectors.width


def _is_measured(job: PreparedJob, model: Model) -> bool:
    return measured_cost(job, model) is not None


def encode_plan_lines(plan: EncodePlan) -> Iterator[tuple[str, str]]:
    """Name and value of each fact."""
    looked = plan.survey
    basis = "exact" if plan.exact else f"from a sample of {looked.num_rows} rows"
    yield "rows", f"{plan.num_rows:,}, {counted(plan.width, 'number')} each"
    for kind, count in sorted(looked.without_prompt.items()):
        yield f"rows {kind}", f"{count} of {looked.num_rows} looked at"
    yield (
        "text tokens",
        f"{round(looked.mean_tokens * plan.num_rows):,} ({basis}), mean {looked.mean_tokens:.1f}",
    )
    if looked.longest is not None:
        yield "longest row", f"{looked.longest.num_tokens} tokens: {looked.longest.row_id}"
    if plan.advice is not None:
        yield from _partition_lines(plan, plan.advice)
    yield "encode calls", _calls(plan)
    cost, source = plan.cost, "measured here" if plan.measured else "assumed, not measured yet"
    parts = [f"{cost.call_s * 1e3:.1f} ms a call", f"{cost.text_s * 1e6:.0f} us a text"]
    if plan.partitioned:
        parts.append(f"{cost.partition_s * 1e3:.1f} ms a partition")
    yield "cost", f"{', '.join(parts)} ({source})"
    seconds = predicted_s(cost, plan.stats.total, plan.num_calls, num_partitions=plan.stats.count)
    yield "time (estimate)", duration(seconds)


def _partition_lines(plan: EncodePlan, advice: Advice) -> Iterator[tuple[str, str]]:
    stats = plan.stats
    sizes = (
        f"{stats.count:,}, mean {stats.mean:,.1f} texts, largest {stats.largest:,}, "
        f"coefficient of variation (CV) {stats.cv:.2f}"
    )
    yield "partitions", sizes
    yield (
        "phi",
        f"{advice.phi:.1%}: share of the calls' fixed cost, with a call for each partition",
    )
    yield "speed-up", f"{advice.speed_up:.2f} predicted, at most {advice.most_speed_up:.2f}"
    yield "advice", advice.text


def _calls(plan: EncodePlan) -> str:
    thresholds = plan.choice.thresholds
    if not plan.partitioned:
        most = min(thresholds.max_texts, plan.stats.largest)
        return f"{plan.num_calls:,} of at most {most:,} texts"
    most = call_bound(thresholds, plan.stats.largest)
    why = " ".join(plan.choice.reasons)
    return (
        f"{plan.num_calls:,} of {thresholds.min_texts:,} to {most:,} texts; at most "
        f"{plan.choice.resident_texts:,} texts in memory. {why}"
    )
