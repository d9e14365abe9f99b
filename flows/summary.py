"""What a job did, in numbers, and what that makes its exit status (C25, C55)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

BAD_STATUSES = ("error", "invalid_output")
"""Statuses that count against the error rate; a skipped row (null prompt) does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """A job's rows, those of earlier runs included, and this run's speed.

    Attributes:
        total_rows: rows of the job.
        by_status: rows that have a result, by status.
        by_finish_reason: the same by finish reason, for rows that have one.
        prompt_tokens: of all results.
        completion_tokens: of all results.
        elapsed_s: of this run, start-up included.
        tokens_per_s: completion tokens of this run per second, start-up excluded.
        output: where the results are.
        complete: every row has a result, and all of them are committed.
        stopped: why the run ended early, if it did.
        num_steps: of the engine in this run.
        num_short_steps: of these, steps in which KV memory ran short and sequences had to wait.
        overflow_probability: the bound on their share that the run was planned with.
        num_retries: requests to an object store that this run repeated.
        rows_per_s: rows of this run per second, start-up excluded; given for tasks that encode,
            whose rows have no completion.
    """

    total_rows: int
    by_status: Mapping[str, int]
    by_finish_reason: Mapping[str, int]
    prompt_tokens: int
    completion_tokens: int
    elapsed_s: float
    tokens_per_s: float
    output: str
    complete: bool
    stopped: str | None = None
    num_steps: int = 0
    num_short_steps: int = 0
    overflow_probability: float = 0.01
    num_retries: int = 0
    rows_per_s: float | None = None

    @property
    def generates(self) -> bool:
        """The rows have completions."""
        return self.rows_per_s is None

    @property
    def num_done(self) -> int:
        return sum(self.by_status.values())

    @property
    def num_bad(self) -> int:
        return sum(self.by_status.get(status, 0) for status in BAD_STATUSES)

    @property
    def error_rate(self) -> float:
        """Bad rows as a share of all rows that have a result; 0 when none has."""
        return self.num_bad / self.num_done if self.num_done else 0.0

    def exit_code(self, max_error_rate: float) -> int:
        """0 when all rows are there and no more of them are bad than allowed, else 1."""
        return 0 if self.complete and self.error_rate <= max_error_rate else 1

    def message(self) -> str:
        """One line: `998 ok, 2 error of 1000 rows`."""
        counts = ", ".join(f"{count} {status}" for status, count in ordered(self.by_status))
        ended = f"; stopped: {self.stopped}" if self.stopped else ""
        return f"{counts or 'no result'} of {self.total_rows} rows{ended}"

    def lines(self) -> Iterator[tuple[str, str]]:
        """Name and value of each line of the final table."""
        yield "rows", f"{self.num_done} of {self.total_rows}"
        for status, count in ordered(self.by_status):
            yield f"status {status}", str(count)
        for reason, count in ordered(self.by_finish_reason):
            yield f"finish {reason}", str(count)
        if self.rows_per_s is None:
            yield "prompt tokens", f"{self.prompt_tokens:,}"
            yield "completion tokens", f"{self.completion_tokens:,}"
            yield "tokens/s", f"{self.tokens_per_s:,.1f}"
        else:
            yield "text tokens", f"{self.prompt_tokens:,}"
            yield "rows/s", f"{self.rows_per_s:,.1f}"
        yield "time", duration(self.elapsed_s)
        if self.num_steps and self.rows_per_s is None:
            short, bound = self.num_short_steps, self.overflow_probability
            yield "KV memory", f"short in {short} of {self.num_steps} steps (bound {bound:.2%})"
        if self.num_retries:
            yield "storage", f"{counted(self.num_retries, 'request')} repeated"
        if self.stopped:
            yield "stopped", self.stopped
        yield "output", self.output


_ORDER = ("ok", "stop", "length", "invalid_output", "error", "skipped")


def ordered(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Non-zero counts, the good ones first."""
    known = [(key, counts[key]) for key in _ORDER if counts.get(key)]
    return known + sorted((key, n) for key, n in counts.items() if n and key not in _ORDER)


def duration(seconds: float) -> str:
    """`4.2 s`, `3 min 05 s`, `2 h 03 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size_text(num_bytes: float) -> str:
    """`1.2 GiB`, `22.5 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def counted(count: int, noun: str) -> str:
    """`1 shard`, `2,000 shards`, `2 mode switches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"
