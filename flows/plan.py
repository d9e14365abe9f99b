"""`flows plan`: what a job would do, from its input, the tokenizer and config.json (C60)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flows.estimate import token_cost
from flows.prepare import PreparedJob, prepare
from flows.sampling import resolve_sampling
from flows.shape import ModelShape, model_shape
from flows.summary import counted, duration, size_text
from flows.survey import Survey, histogram, survey
from flows.worker_memory import worker_memory

if TYPE_CHECKING:
    from rich.console import RenderableType

    from flows.plan_encode import EncodePlan
    from flows.spec import JobSpec
    from schedulers.memory import MemoryPlan

EXACT_ROWS = 5000
"""Jobs of up to that many rows are tokenised whole; of longer ones, a sample of that many rows."""

SHOWN_CHARS = 600
"""Of an example; its head and its tail, where the chat template shows."""
ASSUMED_EFFICIENCY = 0.5
"""Share of the measured matrix rate that a whole job is assumed to reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """What is known of a job before it runs.

    Attributes:
        num_rows: rows of the job, its limit applied.
        num_shards: units of commit.
        survey: of the prompts; of all of them when `exact`.
        max_answer_tokens: of a row, all samples together.
        num_workers: processes that share the machine.
        memory: where memory of each would go; None on a GPU, which is only asked at run time.
        flops_per_s: of this machine's CPU, as measured; None on a GPU.
    """

    num_rows: int
    num_shards: int
    survey: Survey
    exact: bool
    max_answer_tokens: int
    shape: ModelShape
    memory: MemoryPlan | None
    flops_per_s: float | None
    num_workers: int = 1

    @property
    def prompt_tokens(self) -> int:
        """Of all rows; extrapolated from the sample unless exact."""
        return round(self.survey.mean_tokens * self.num_rows)

    @property
    def num_prompts(self) -> int:
        """Rows that reach the model; extrapolated likewise."""
        if not self.survey.num_rows:
            return 0
        return round(self.num_rows * len(self.survey.lengths) / self.survey.num_rows)

    def seconds(self, answer_tokens: int) -> float | None:
        """Estimated computing time with answers of that many tokens a row."""
        if self.flops_per_s is None:
            return None
        tokens = self.prompt_tokens + answer_tokens * self.num_prompts
        return 2.0 * self.shape.num_parameters * tokens / (ASSUMED_EFFICIENCY * self.flops_per_s)


def plan_job(spec: JobSpec) -> JobPlan:
    """Look at everything but the weights.

    Raises:
        SpecError, InputError, ModelError, NotEnoughMemory: as running the job would.
    """
    from workers.loading.files import resolve_model
    from workers.loading.tokenizer import Tokenizer

    job = prepare(spec)
    files = resolve_model(spec.model, revision=spec.revision)
    tokenizer = Tokenizer.load(files)
    sampling = resolve_sampling(spec.sampling, files.generation_config)
    num_rows = min(job.dataset.num_rows, spec.limit or job.dataset.num_rows)
    exact = num_rows <= EXACT_ROWS
    found = survey(planned_rows(job, exact=exact), job.renderer.bind(tokenizer), tokenizer)
    shape = model_shape(files, spec.engine.dtype)
    on_cpu = spec.engine.device in ("auto", "cpu")
    return JobPlan(
        num_rows=num_rows,
        num_shards=_num_shards(job, found, sampling.max_tokens * sampling.n),
        survey=found,
        exact=exact,
        max_answer_tokens=sampling.max_tokens * sampling.n,
        shape=shape,
        memory=_memory(spec, shape) if on_cpu else None,
        flops_per_s=measured_flops_per_s() if on_cpu else None,
        num_workers=spec.engine.workers or 1,
    )


def planned_rows(job: PreparedJob, *, exact: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All rows with their ids, or a sample."""
    from storage.rows import RowReader, sample_rows
    from storage.shards import TokenCost, cut_shards

    columns = job.renderer.columns
    if not exact:
        sample = sample_rows(job.dataset, columns, EXACT_ROWS)
        yield from (("(of a sample)", values) for values in sample)
        return
    cost = TokenCost(columns=columns, tokens_per_byte=0.25, tokens_per_row=0.0)
    target_tokens, limit = job.spec.shard_tokens, job.spec.limit
    with closing(RowReader(job.dataset, columns)) as reader:
        for shard in cut_shards(job.dataset, cost=cost, target_tokens=target_tokens, limit=limit):
            for batch in reader.rows(shard):
                yield from ((row.row_id, row.values) for row in batch)


def _num_shards(job: PreparedJob, found: Survey, answer_tokens: int) -> int:
    """Shards that a run would cut."""
    from storage.shards import cut_shards

    cost = token_cost(job, mean_prompt_tokens=found.mean_tokens, answer_tokens=answer_tokens)
    target_tokens, limit = job.spec.shard_tokens, job.spec.limit
    return len(cut_shards(job.dataset, cost=cost, target_tokens=target_tokens, limit=limit))


def _memory(spec: JobSpec, shape: ModelShape) -> MemoryPlan:
    """The memory plan that the engine would make on this machine's CPU; of several workers, each.

    Raises:
        NotEnoughMemory: as the engine would.
    """
    from workers.backends.base import ModelInfo
    from workers.setup import EngineOptions, size_engine

    info = ModelInfo(
        name=spec.model,
        vocab_size=shape.vocab_size,
        max_model_len=shape.max_model_len,
        eos_token_ids=frozenset(),
        device="cpu",
        dtype=shape.dtype,
        weights_bytes=shape.weights_bytes,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        activation_bytes_per_token=shape.activation_bytes_per_token,
        logits_bytes_per_seq=shape.logits_bytes_per_seq,
        num_parameters=shape.num_parameters,
    )
    engine = spec.engine
    memory = worker_memory(engine, "cpu", engine.workers or 1)
    options = EngineOptions(
        policy=engine.policy,
        memory_bytes=memory.limit_bytes,
        host_share=memory.host_share,
        max_batch_tokens=engine.max_batch_tokens,
        max_seqs=engine.max_seqs,
        deterministic=engine.deterministic,
    )
    return size_engine(info, options).memory


def measured_flops_per_s(*, size: int = 1024, repeats: int = 3) -> float:
    """Best rate of a few float32 matrix products with numpy, after one to warm up: 0.1 s or so."""
    import numpy as np

    left = np.ones((size, size), np.float32)
    best_s = float("inf")
    for _ in range(repeats + 1):
        started_s = time.perf_counter()
        np.matmul(left, left)
        best_s = min(best_s, time.perf_counter() - started_s)
    return 2.0 * size**3 / best_s


def plan_of(spec: JobSpec) -> JobPlan | EncodePlan:
    """The plan of a job of any task.

    Raises:
        SpecError, InputError, ModelError, NotEnoughMemory: as running the job would.
    """
    if spec.task == "generate":
        return plan_job(spec)
    from flows.plan_encode import plan_encoding

    return plan_encoding(spec)


def render_plan(plan: JobPlan | EncodePlan) -> RenderableType:
    """The plan for the terminal."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    facts = Table(show_header=False, box=None)
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for name, value in _lines(plan):
        facts.add_row(name, Text(value))
    what = "prompts" if isinstance(plan, JobPlan) else "texts"
    bars = Table("tokens", what, "", title="Lengths", title_justify="left", box=None)
    bins = histogram(plan.survey.lengths)
    most = max((item.num_prompts for item in bins), default=1)
    for item in bins:
        bar = "#" * round(40 * item.num_prompts / most)
        bars.add_row(f"{item.low}-{item.high}", str(item.num_prompts), bar)
    examples = [
        Panel(
            Text(_shortened(prompt.text)),
            title=Text(f"{prompt.row_id}: {prompt.num_tokens} tokens"),
            title_align="left",
        )
        for prompt in plan.survey.examples
    ]
    return Group(facts, bars, *examples)


def _lines(plan: JobPlan | EncodePlan) -> Iterator[tuple[str, str]]:
    if isinstance(plan, JobPlan):
        return plan_lines(plan)
    from flows.plan_encode import encode_plan_lines

    return encode_plan_lines(plan)


def plan_lines(plan: JobPlan) -> Iterator[tuple[str, str]]:
    """Name and value of each fact."""
    looked = plan.survey
    basis = "exact" if plan.exact else f"from a sample of {looked.num_rows} rows"
    yield "rows", f"{plan.num_rows} in {counted(plan.num_shards, 'shard')}"
    for kind, count in sorted(looked.without_prompt.items()):
        yield f"rows {kind}", f"{count} of {looked.num_rows} looked at"
    yield "prompt tokens", f"{plan.prompt_tokens:,} ({basis}), mean {looked.mean_tokens:.1f}"
    if looked.longest is not None:
        yield "longest row", f"{looked.longest.num_tokens} tokens: {looked.longest.row_id}"
    too_long = sum(length >= plan.shape.max_model_len for length in looked.lengths)
    if too_long:
        longest = f"the model takes {plan.shape.max_model_len} tokens (see --on-too-long)"
        yield "too long", f"{too_long} of {looked.num_rows} looked at; {longest}"
    yield "answer tokens", f"at most {plan.max_answer_tokens * plan.num_prompts:,}"
    if plan.num_workers > 1:
        yield "workers", f"{plan.num_workers} processes, that share the machine"
    yield from _memory_lines(plan)
    yield "time (estimate)", _time(plan)


def _memory_lines(plan: JobPlan) -> Iterator[tuple[str, str]]:
    shape, memory = plan.shape, plan.memory
    yield "weights", f"{size_text(shape.weights_bytes)} in {shape.dtype}"
    yield "KV per token", size_text(shape.kv_bytes_per_token)
    if memory is None:
        yield "memory", "known when the GPU is asked, at run time"
        return
    parts = (
        f"{size_text(memory.limit_bytes)}: weights {size_text(memory.weights_bytes)}, activations "
        f"{size_text(memory.activation_bytes)} (estimate), KV {size_text(memory.kv_bytes)} for "
        f"{memory.capacity_tokens:,} tokens; at most {memory.max_seqs} sequences at once"
    )
    yield "memory" if plan.num_workers == 1 else "memory of each worker", parts


def _time(plan: JobPlan) -> str:
    prompts, most = plan.seconds(0), plan.seconds(plan.max_answer_tokens)
    if prompts is None or most is None or plan.flops_per_s is None:
        return "unknown before the GPU is asked"
    return (
        f"{duration(prompts)} for the prompts, {duration(most)} with the longest answers; basis: "
        f"2 x {plan.shape.num_parameters / 1e6:.0f} M parameters per token at "
        f"{ASSUMED_EFFICIENCY:.0%} of {plan.flops_per_s / 1e9:.0f} GFLOP/s, float32, measured now"
    )


def _shortened(text: str) -> str:
    if len(text) <= SHOWN_CHARS:
        return text
    tail = SHOWN_CHARS // 4
    left_out = len(text) - SHOWN_CHARS
    head = text[: SHOWN_CHARS - tail]
    return f"{head} [... {left_out} characters ...] {text[-tail:]}"
