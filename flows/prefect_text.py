"""What a job says in the Prefect UI: names, state messages, tables and pages. Text only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from flows.shard_run import ShardRun
from flows.spec_model import input_stem
from flows.summary import JobSummary, counted, duration
from storage.shards import Shard

MAX_KEY = 60
MAX_TABLE_ROWS = 1000


def slug(text: str) -> str:
    """What Prefect takes as a part of an artifact's key: `[a-z0-9-]`."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:MAX_KEY].rstrip("-")


def output_key(output: str) -> str:
    """A key for the artifacts of the job in an output: its name, and a digest that tells it from
    others of that name.
    """
    digest = xxhash.xxh64_hexdigest(output.encode())[:8]
    return "-".join(filter(None, ("headrace", slug(input_stem(output)), digest)))


def link_to(path: str) -> str:
    """A file or folder of the output as a browser wants it."""
    return path if "://" in path else Path(path).resolve().as_uri()


def model_name(model: str) -> str:
    """A model in a word: a hub id as it is, a folder or file by its own name."""
    return input_stem(model) if model.startswith((".", "/")) else model


# -- task runs --


def begun_label(shards: Sequence[Shard]) -> str:
    """The name of a task run that begins: `shard-00007 (1,000 rows, about 250,000 tokens)`."""
    rows = sum(shard.num_rows for shard in shards)
    tokens = sum(shard.est_tokens for shard in shards)
    name = _name([shard.index for shard in shards])
    return f"{name} ({_counts(len(shards), rows)}, about {tokens:,} tokens)"


def done_label(runs: Sequence[ShardRun]) -> str:
    """Its name when it is done: `shard-00007 (1,000 rows, 251,322 tokens, worker-0, 12.3 s)`; of a
    superbatch `shard-00007 (1,000 rows of 12 partitions, 20,322 tokens, worker-0, 1.3 s)`.
    """
    whole = together(runs)
    name = _name([run.index for run in runs])
    tokens = f"{whole.num_tokens:,} tokens"
    counts = _counts(len(runs), whole.num_rows, whole.num_partitions)
    return f"{name} ({counts}, {tokens}, {_workers(whole)}, {duration(whole.run_s)})"


def done_message(runs: Sequence[ShardRun]) -> str:
    """The message of its final state."""
    whole = together(runs)
    counts = _counts(len(runs), whole.num_rows, whole.num_partitions)
    tokens = (
        f"{whole.prompt_tokens:,} text tokens"
        if whole.completion_tokens is None
        else f"{whole.prompt_tokens:,} prompt and {whole.completion_tokens:,} completion tokens"
    )
    return (
        f"{counts}, {tokens} on {_workers(whole)}; waited {duration(whole.queued_s)}, ran "
        f"{duration(whole.run_s)}"
    )


def together(runs: Sequence[ShardRun]) -> ShardRun:
    """Shards that were submitted together as one: first start to last end."""
    queued_s = min(run.queued_s for run in runs)
    return ShardRun(
        index=runs[0].index,
        num_rows=sum(run.num_rows for run in runs),
        est_tokens=sum(run.est_tokens for run in runs),
        prompt_tokens=sum(run.prompt_tokens for run in runs),
        completion_tokens=_sum([run.completion_tokens for run in runs]),
        workers=tuple(sorted({worker for run in runs for worker in run.workers})),
        queued_s=queued_s,
        run_s=max(run.queued_s + run.run_s for run in runs) - queued_s,
        num_partitions=_sum([run.num_partitions for run in runs]),
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    """Of counts that all shards of a job have, or none has."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _name(indices: Sequence[int]) -> str:
    """A shard, or several; they may come in any order, as the largest are computed first."""
    if len(indices) == 1:
        return f"shard-{indices[0]:05d}"
    first, last = min(indices), max(indices)
    joint = "-" if last - first == len(indices) - 1 else " to "
    return f"shards {first:05d}{joint}{last:05d}"


def _counts(num_shards: int, num_rows: int, num_partitions: int | None = None) -> str:
    rows = counted(num_rows, "row")
    if num_partitions is not None:
        rows += f" of {counted(num_partitions, 'partition')}"
    return rows if num_shards == 1 else f"{counted(num_shards, 'shard')}, {rows}"


def _workers(run: ShardRun) -> str:
    return ", ".join(run.workers)


# -- artifacts --


def shard_table(runs: Sequence[ShardRun]) -> list[dict[str, Any]]:
    """One row a shard of this run; of very many the first ones."""
    return [
        {
            "shard": _name([run.index]),
            "rows": run.num_rows,
            **_work(run),
            "worker": _workers(run),
            "waited, s": round(run.queued_s, 2),
            "ran, s": round(run.run_s, 2),
        }
        for run in runs[:MAX_TABLE_ROWS]
    ]


def _work(run: ShardRun) -> dict[str, int]:
    """The columns that tell what a shard's rows are made of."""
    partitions = {} if run.num_partitions is None else {"partitions": run.num_partitions}
    if run.completion_tokens is None:
        return {**partitions, "text tokens": run.prompt_tokens}
    tokens = {"prompt tokens": run.prompt_tokens, "completion tokens": run.completion_tokens}
    return {**partitions, **tokens}


def table_description(runs: Sequence[ShardRun]) -> str:
    """What the table of shards holds."""
    held = f"{counted(len(runs), 'shard')} of this run"
    if len(runs) > MAX_TABLE_ROWS:
        held += f", the first {MAX_TABLE_ROWS:,} of them"
    return f"{held}; those of earlier runs are in job.duckdb"


def summary_page(summary: JobSummary, why: str, decisions: str | None) -> str:
    """The markdown of a job's end.

    Args:
        summary: the job.
        why: the final state's message.
        decisions: what the policy decided, or of a job that encodes what became of superbatching,
            in sentences; None when nothing is known of it.
    """
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in summary.lines()]
    lines = [f"# {_cell(why)}", "", "| what | value |", "|---|---|", *rows]
    if decisions is not None:
        title = "Prefill and decode: apart or together" if summary.generates else "Superbatches"
        lines += ["", f"## {title}", "", _cell(decisions)]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text that markdown shows as it is, in one line."""
    return re.sub(r"([\\`*_{}\[\]<>|])", r"\\\1", " ".join(text.split()))


def event_payload(run: ShardRun) -> dict[str, Any]:
    """What the event of a shard says. What its rows do not have is left out."""
    counts = {
        "index": run.index,
        "num_rows": run.num_rows,
        "num_partitions": run.num_partitions,
        "prompt_tokens": run.prompt_tokens,
        "completion_tokens": run.completion_tokens,
    }
    return {
        **{name: count for name, count in counts.items() if count is not None},
        "workers": list(run.workers),
        "queued_s": round(run.queued_s, 3),
        "run_s": round(run.run_s, 3),
    }


def job_payload(summary: JobSummary) -> dict[str, Any]:
    """What the events of a job say."""
    counts: Mapping[str, int] = summary.by_status
    made: dict[str, Any] = (
        {"completion_tokens": summary.completion_tokens}
        if summary.rows_per_s is None
        else {"rows_per_s": round(summary.rows_per_s, 3)}
    )
    return {
        "output": summary.output,
        "complete": summary.complete,
        "total_rows": summary.total_rows,
        "by_status": dict(counts),
        "error_rate": round(summary.error_rate, 6),
        "prompt_tokens": summary.prompt_tokens,
        **made,
        "elapsed_s": round(summary.elapsed_s, 3),
    }
