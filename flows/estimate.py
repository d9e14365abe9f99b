"""How many tokens rows take, for cutting shards and for `flows plan`."""

from __future__ import annotations

from flows.model import Model
from flows.prepare import PreparedJob
from flows.spec import JobSpec
from flows.survey import survey
from storage.rows import sample_rows
from storage.shards import TokenCost

SAMPLE_ROWS = 256


def token_cost(job: PreparedJob, *, mean_prompt_tokens: float, answer_tokens: int) -> TokenCost:
    """Cost of a row: the mean prompt of a sample, spread over rows by the bytes of their columns.

    Args:
        job: the job.
        mean_prompt_tokens: of a sample.
        answer_tokens: of a row, all samples together.
    """
    columns = job.renderer.columns
    column_bytes = sum(
        group.column_bytes.get(name, 0)
        for file in job.dataset.files
        for group in file.row_groups
        for name in columns
    )
    prompt_tokens = mean_prompt_tokens * job.dataset.num_rows
    return TokenCost(
        columns=columns,
        tokens_per_byte=prompt_tokens / column_bytes if column_bytes else 0.0,
        tokens_per_row=float(answer_tokens),
    )


def estimate_cost(job: PreparedJob, model: Model) -> TokenCost:
    """The same from a small sample of the input, tokenised now."""
    tokenizer = model.load_tokenizer()
    rows = sample_rows(job.dataset, job.renderer.columns, SAMPLE_ROWS)
    found = survey((("", values) for values in rows), job.renderer.bind(tokenizer), tokenizer)
    return token_cost(
        job,
        mean_prompt_tokens=found.mean_tokens * max(1, len(job.spec.encode.choices)),
        answer_tokens=answer_tokens(job.spec),
    )


def answer_tokens(spec: JobSpec) -> int:
    """Tokens that are generated for a row, at most."""
    return spec.sampling.max_tokens * spec.sampling.n if spec.task == "generate" else 0
